"""Formation of correlations: a probe at set steps of training (paper, appendix B)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, NamedTuple

import lightning as L
import torch
from torch import Tensor

from lincorr_lightning.callbacks.relation_callback import RelationCallback
from lincorr_lightning.errors import ConfigError, SubjectsError, require
from lincorr_lightning.functional import moments_of, summarize
from lincorr_lightning.knowledge import Domain, TokenizedRelation
from lincorr_lightning.linear_map.layout import JointLayout
from lincorr_lightning.linear_map.solver import fit_and_score
from lincorr_lightning.pretraining.batches import PackedStatements
from lincorr_lightning.pretraining.corpus import Corpus
from lincorr_lightning.results.numbers import number
from lincorr_lightning.results.plots import training_curves
from lincorr_lightning.results.results import Figure, Results
from lincorr_lightning.results.table import Table, column

MIN_SUBJECTS = 20
"""Subjects that fitting and scoring a map needs."""
UNRELATED = "color"
"""Kind of knowledge that default pairs measure as a control."""


@dataclass(frozen=True)
class CorrelationPoint:
    """Correlation of a pair at one step; None if it cannot be computed."""

    step: int
    """Number of optimizer steps."""
    pair: str
    """Pair, as ``city->country``."""
    label_mean: float | None = column("r", ".3f")
    """Mean label-wise r on held-out subjects; None if no label varies."""
    control_label_mean: float | None = column("r of the control prompt", ".3f")
    """The same from the control prompt; None without one."""
    influenced: float | None = column("top-1 target right", ".3f")
    """Hit@1 of influenced targets; None without a reference."""
    influencing: float | None = column("top-1 source right", ".3f")
    """Hit@1 of influencing sources; None without a reference."""


@dataclass(frozen=True)
class RecallPoint:
    """Recall of a kind of knowledge at one step: shares of facts that the LM answers right."""

    step: int
    """Number of optimizer steps."""
    knowledge: str
    """Name of the kind of knowledge."""
    stated: float | None = column("stated facts", ".3f")
    """Facts that the training text states; None if there are none."""
    withheld: float | None = column("withheld facts", ".3f")
    """Facts that the text withholds; None if there are none."""


_CURVES = {
    "label_mean": ("formation_r", "label-wise r"),
    "control_label_mean": ("formation_control", "r of the control prompt"),
    "influenced": ("formation_influenced", "top-1 target right"),
    "influencing": ("formation_influencing", "top-1 source right"),
    "stated": ("formation_recall", "recall of stated facts"),
    "withheld": ("formation_inferred", "recall of withheld facts"),
}
"""Log key and title of each number."""


class _Facts(NamedTuple):
    """Prompts, and the column of each right answer."""

    prompts: list[str]
    columns: Tensor


class Formation(RelationCallback):
    """Fits and scores linear maps while any LightningModule trains a causal LM.

    At each measurement, maps are fitted on half of the subjects and scored on the other half. Logs
    ``formation_r/<pair>``, ``formation_control/<pair>``, ``formation_influenced/<pair>`` and
    ``formation_influencing/<pair>``. If the training dataset is that of `CorpusDataModule`,
    also ``formation_recall/<knowledge>``, the recall of stated facts, and
    ``formation_inferred/<knowledge>``, that of withheld facts, which the text never states.

    Args:
        pairs: Ordered pairs, as ``city->country``; None takes the relation that the training
            dataset is about (without one, ``city->country``), and its source with ``color``.
        n_subjects: Number of subjects, or as many as the vocabulary has.
        every_n_steps: Optimizer steps between two measurements; the LM before and after training
            is always measured.
        control: Control prompt in place of the source's; None leaves it out.
        ridge: Ridge of the maps.
        **options: See `RelationCallback`.

    Attributes:
        correlations: A row per pair and step.
        recall: A row per kind of knowledge and step.
    """

    study = "formation"

    def __init__(
        self,
        pairs: Sequence[str] | None = None,
        n_subjects: int = 1000,
        every_n_steps: int = 100,
        control: str | None = "One day, {} saw a",
        ridge: float = 0.0,
        **options: Any,
    ) -> None:
        super().__init__(relation=None, every_n_steps=every_n_steps, **options)
        require("Formation.ridge", ridge, at_least=0)
        if pairs is not None and not pairs:
            raise ConfigError("Formation.pairs is empty; name some, such as city->country.")
        if control is not None and control.count("{}") != 1:
            raise ConfigError(
                f"Formation.control {control!r} must hold {{}} once, in place of the subject."
            )
        self.pairs = pairs
        self.n_subjects = n_subjects
        self.control = control
        self.ridge = ridge

    def reset(self) -> None:
        """Forget the measurements of an earlier run."""
        super().reset()
        self.correlations: list[CorrelationPoint] = []
        self.recall: list[RecallPoint] = []

    def open(self, trainer: L.Trainer) -> None:
        """Find the labels and the facts, and sample the subjects."""
        catalogue, tokenizer = self.load_catalogue(trainer), self.cache.lm.tokenizer
        relation = self.relation_name(trainer)
        source = relation.partition("->")[0]
        default = [relation] if source == UNRELATED else [relation, f"{source}->{UNRELATED}"]
        domains: dict[str, Domain] = {}
        references = {}
        for name in dict.fromkeys(self.pairs or default):
            one = TokenizedRelation.of(name, catalogue, tokenizer)
            domains |= {domain.knowledge.name: domain for domain in (one.source, one.target)}
            pair = one.source.knowledge.name, one.target.knowledge.name
            references[pair] = one.reference_mask if one.has_reference else None
        self._layout = JointLayout(domains, tuple(references), self.control, references)
        self._subjects = self.sample_subjects(self.n_subjects)
        if len(self._subjects) < MIN_SUBJECTS:
            raise SubjectsError(
                f"Formation needs {MIN_SUBJECTS} subjects and has {len(self._subjects)}: raise its "
                "n_subjects, or take an LM with a larger vocabulary."
            )
        dataset = getattr(trainer.train_dataloader, "dataset", None)
        corpus = dataset.corpus if isinstance(dataset, PackedStatements) else None
        self._facts = {} if corpus is None else self._find_facts(corpus)

    def _find_facts(self, corpus: Corpus) -> dict[str, list[_Facts]]:
        """Return the stated and the withheld facts of each kind of knowledge."""
        facts: dict[str, list[_Facts]] = {}
        for name, domain in self._layout.domains.items():
            column_of = {
                answer.identity: i for i, one in enumerate(domain.labels) for answer in one.answers
            }
            for statements in corpus.facts(name):
                known = [s for s in statements if s.answer.identity in column_of]
                columns = torch.tensor([column_of[s.answer.identity] for s in known])
                facts.setdefault(name, []).append(_Facts([s.prompt for s in known], columns))
        return facts

    def measure(self, trainer: L.Trainer) -> None:
        """Fit and score the maps, and measure recall."""
        step = trainer.global_step
        layout, read = self._layout, self.cache.lm.domain_logits
        parts = [
            read([domain.knowledge.prompt(x) for x in self._subjects], domain.token_ids)
            for domain in layout.domains.values()
        ]
        if self.control is not None:
            prompts = [self.control.format(x) for x in self._subjects]
            parts.append(read(prompts, layout.control_token_ids))
        rows = torch.cat(parts, 1)
        fit, test = moments_of(rows[::2]), moments_of(rows[1::2])
        scores = fit_and_score(fit, test, layout, self.ridge)
        for pair in layout.pairs:
            score = scores[pair]
            control = None if score.control_r is None else summarize(score.control_r).mean
            hits = score.precision or {}
            numbers = (
                number(summarize(score.r).mean),
                number(control),
                *(
                    number(hits[way]["1"]) if hits else None
                    for way in ("influenced", "influencing")
                ),
            )
            self.correlations.append(CorrelationPoint(step, "->".join(pair), *numbers))
        for name, facts in self._facts.items():
            self.recall.append(RecallPoint(step, name, *(self._recall(name, one) for one in facts)))
        scalars = {
            f"{self.numbered(_CURVES[field][0])}/{name}": value
            for field, name, at, value in self._values()
            if at == step
        }
        self.log_scalars(trainer, scalars, step)

    def _recall(self, name: str, facts: _Facts) -> float | None:
        if not facts.prompts:
            return None
        logits = self.cache.lm.domain_logits(facts.prompts, self._layout.domains[name].token_ids)
        return float((logits.argmax(1).cpu() == facts.columns).double().mean())

    def _values(self) -> Iterator[tuple[str, str, int, float]]:
        """Yield the field, pair or kind of knowledge, step and value of each known number."""
        points = [asdict(point) for point in self.correlations]
        for point in [*points, *(asdict(point) for point in self.recall)]:
            step, name, *_ = point.values()
            for field, value in point.items():
                if field in _CURVES and value is not None:
                    yield field, name, step, value

    def finish(self, trainer: L.Trainer) -> Results:
        """Return all measurements, as tables and curves."""
        self._measure_once(trainer)
        tables = [
            Table.of(name, sorted(points, key=lambda p: -p.step), caption=caption, headline=True)
            for name, points, caption in (
                (self.study, self.correlations, "Correlation of each pair on held-out subjects"),
                (f"{self.study}_recall", self.recall, "Recall of stated and of withheld facts"),
            )
            if points
        ]
        curves: dict[str, list[tuple[int, float]]] = {}
        for field, (_, panel) in _CURVES.items():
            for of, name, step, value in self._values():
                if of == field:
                    curves.setdefault(f"{panel}/{name}", []).append((step, value))
        title = "How correlations form"
        draw = partial(training_curves, curves, title, "r on held-out subjects at each step")
        return Results(
            self.study,
            {
                "correlations": [asdict(point) for point in self.correlations],
                "recall": [asdict(point) for point in self.recall],
            },
            tables=tables,
            figures=[Figure(self.study, f"{title} during training", draw)],
        )

    def state_dict(self) -> dict[str, Any]:
        """Return the measurements so far."""
        return {
            **super().state_dict(),
            "correlations": [asdict(point) for point in self.correlations],
            "recall": [asdict(point) for point in self.recall],
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from a checkpoint's measurements."""
        super().load_state_dict(state_dict)
        self.correlations = [CorrelationPoint(**point) for point in state_dict["correlations"]]
        self.recall = [RecallPoint(**point) for point in state_dict["recall"]]
