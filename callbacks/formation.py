"""Formation of correlations: a probe at set steps of training (paper, appendix B)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, NamedTuple

import lightning as L
import torch
from torch import Tensor

from lincorr_lightning.callbacks.relation_callback import RelationCallback
from lincorr_lightning.errors import ConfigError, SubjectsError
from lincorr_lightning.functional import (
    LeastSquares,
    hit_rates,
    labelwise_pearson,
    moments_of,
    summarize,
)
from lincorr_lightning.knowledge import Domain, TokenizedRelation
from lincorr_lightning.pretraining.batches import PackedStatements
from lincorr_lightning.pretraining.corpus import Corpus
from lincorr_lightning.results.numbers import number
from lincorr_lightning.results.results import Figure, Results
from lincorr_lightning.results.table import Column, Table
from lincorr_lightning.results.training_curves import training_curves

MIN_SUBJECTS = 20
"""Subjects that fitting and scoring a map needs."""
UNRELATED = "color"
"""Kind of knowledge that default pairs measure as a control."""


@dataclass(frozen=True)
class CorrelationPoint:
    """Correlation of a pair at one step.

    Attributes:
        step: Number of optimizer steps.
        pair: Pair, as ``city->country``.
        label_mean: Mean label-wise r on held-out subjects; None if no label varies.
        control_label_mean: The same from the control prompt; None without one.
        influenced: Hit@1 of influenced targets; None without a reference.
        influencing: Hit@1 of influencing sources; None without a reference.
    """

    step: int
    pair: str
    label_mean: float | None
    control_label_mean: float | None
    influenced: float | None
    influencing: float | None


@dataclass(frozen=True)
class RecallPoint:
    """Recall of a kind of knowledge at one step.

    Attributes:
        step: Number of optimizer steps.
        knowledge: Name of the kind of knowledge.
        stated: Share of the facts in the training text that the LM answers right, among its
            labels; None if there are none.
        withheld: Share of the facts that the text withholds; None if there are none.
    """

    step: int
    knowledge: str
    stated: float | None
    withheld: float | None


class _Facts(NamedTuple):
    """Prompts, and the column of each right answer."""

    prompts: list[str]
    columns: Tensor


def _default_pairs(relation: str) -> list[str]:
    """Return the relation that a run is about, and a pair that should not be correlated."""
    source = relation.partition("->")[0]
    return [relation] if source == UNRELATED else [relation, f"{source}->{UNRELATED}"]


class Formation(RelationCallback):
    """Fits and scores linear maps while any LightningModule trains a causal LM.

    At each measurement, maps are fitted on half of the subjects and scored on the other half. Logs
    ``formation_r/<pair>``, ``formation_control/<pair>``, ``formation_influenced/<pair>`` and
    ``formation_influencing/<pair>``. If the training dataset is that of `CorpusDataModule`,
    also ``formation_recall/<knowledge>``, the recall of stated facts, and
    ``formation_inferred/<knowledge>``, that of withheld facts, which the text never states.

    Args:
        pairs: Ordered pairs, as ``city->country``; None takes the relation that the datamodule or
            the training dataset is about (without one, ``city->country``), and its source with
            ``color``.
        n_subjects: Number of subjects, or as many as the vocabulary has.
        every_n_steps: Optimizer steps between two measurements; the LM before and after training
            is always measured.
        control: Control prompt in place of the source's; None leaves it out.
        ridge: Ridge of the maps.
        lm: Name of the LM in ``module.named_modules()``, if there are several.
        tokenizer: Folder or hub id of the LM's tokenizer, if none is found.
        knowledge_files: YAML files with more knowledge.
        seed: Seed of the subjects.

    Attributes:
        correlations: A row per pair and step.
        recall: A row per kind of knowledge and step.

    Raises:
        ConfigError: A setting is out of range.
    """

    study = "formation"
    uses_maps = False

    def __init__(
        self,
        pairs: Sequence[str] | None = None,
        n_subjects: int = 1000,
        every_n_steps: int = 100,
        control: str | None = "One day, {} saw a",
        ridge: float = 0.0,
        lm: str | None = None,
        tokenizer: str | None = None,
        knowledge_files: list[str] | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__(
            None, None, ridge, n_subjects, every_n_steps, lm, tokenizer, knowledge_files, seed
        )
        if pairs is not None and not pairs:
            raise ConfigError("Formation.pairs is empty; name some, such as city->country.")
        if control is not None and control.count("{}") != 1:
            raise ConfigError(
                f"Formation.control {control!r} must hold {{}} once, in place of the subject."
            )
        self.pairs = pairs
        self.control = control

    def reset(self) -> None:
        """Forget the measurements of an earlier run."""
        super().reset()
        self.correlations: list[CorrelationPoint] = []
        self.recall: list[RecallPoint] = []

    # -- measuring ---------------------------------------------------------------------------------

    def open(self, trainer: L.Trainer) -> None:
        """Find the labels and the facts, and sample the subjects."""
        catalogue = self.load_catalogue(trainer)
        tokenizer = self.cache.lm.tokenizer
        settings = getattr(getattr(trainer, "datamodule", None), "hparams", {})
        relation = settings.get("relation") or self.relation_name(trainer)
        self._relations = {
            name: TokenizedRelation.of(name, catalogue, tokenizer)
            for name in dict.fromkeys(self.pairs or _default_pairs(relation))
        }
        self._domains: dict[str, Domain] = {
            domain.knowledge.name: domain
            for relation in self._relations.values()
            for domain in (relation.source, relation.target)
        }
        self._subjects = self.sample_subjects(self.n_subjects)
        if len(self._subjects) < MIN_SUBJECTS:
            raise SubjectsError(
                f"Formation needs {MIN_SUBJECTS} subjects and has {len(self._subjects)}: raise its "
                "n_subjects, or take an LM with a larger vocabulary."
            )
        dataset = getattr(trainer.train_dataloader, "dataset", None)
        corpus = dataset.corpus if isinstance(dataset, PackedStatements) else None
        self._facts = {} if corpus is None else self._find_facts(corpus)

    def _find_facts(self, corpus: Corpus) -> dict[str, tuple[_Facts, _Facts]]:
        found = {}
        for name, domain in self._domains.items():
            column = {
                answer.identity: i for i, one in enumerate(domain.labels) for answer in one.answers
            }
            parts = []
            for statements in corpus.facts(name):
                known = [s for s in statements if s.answer.identity in column]
                columns = torch.tensor([column[s.answer.identity] for s in known])
                parts.append(_Facts([s.prompt for s in known], columns))
            found[name] = parts[0], parts[1]
        return found

    def start(self, trainer: L.Trainer) -> None:
        """Measure before training."""
        if not self.correlations:
            self.measure(trainer)

    def measure(self, trainer: L.Trainer) -> None:
        """Fit and score the maps, and measure recall."""
        step = trainer.global_step
        logits = {
            name: self.cache.lm.domain_logits(
                [domain.knowledge.prompt(x) for x in self._subjects], domain.token_ids
            )
            for name, domain in self._domains.items()
        }
        control_logits: dict[str, Tensor] = {}
        measured: dict[tuple[str, str], float | None] = {}
        for pair, relation in self._relations.items():
            source, target = (logits[d.knowledge.name] for d in (relation.source, relation.target))
            r, weight = self._score(source, target)
            control = None
            if self.control is not None:
                name = relation.source.knowledge.name
                if name not in control_logits:  # shared by all pairs of a source
                    prompts = [self.control.format(x) for x in self._subjects]
                    control_logits[name] = self.cache.lm.domain_logits(
                        prompts, relation.source.token_ids
                    )
                control, _ = self._score(control_logits[name], target)
            hits: list[float | None] = [None, None]
            if relation.has_reference:
                reference = torch.from_numpy(relation.reference_mask)
                found = hit_rates(weight.cpu(), reference)
                hits = [number(float(rates.rates[0])) for rates in found]
            self.correlations.append(CorrelationPoint(step, pair, r, control, hits[0], hits[1]))
            measured |= {
                ("r", pair): r, ("control", pair): control, ("influenced", pair): hits[0],
                ("influencing", pair): hits[1],
            }  # fmt: skip
        for name, facts in self._facts.items():
            stated, withheld = (self._recall(name, some) for some in facts)
            self.recall.append(RecallPoint(step, name, stated, withheld))
            measured |= {("recall", name): stated, ("inferred", name): withheld}
        scalars = {
            f"{self.numbered(f'formation_{kind}')}/{name}": value
            for (kind, name), value in measured.items()
            if value is not None
        }
        self.log_scalars(trainer, scalars, step)

    def _score(self, x: Tensor, y: Tensor) -> tuple[float | None, Tensor]:
        """Fit W on every second subject; return the mean label-wise r on the others, and W."""
        n = x.shape[1]
        fit = moments_of(torch.cat([x[::2], y[::2]], 1))
        weight = LeastSquares(fit.scatter[:n, :n], fit.scatter[:n, n:]).weight(self.ridge)
        return number(summarize(labelwise_pearson(x[1::2] @ weight.T, y[1::2])).mean), weight

    def _recall(self, name: str, facts: _Facts) -> float | None:
        if not facts.prompts:
            return None
        logits = self.cache.lm.domain_logits(facts.prompts, self._domains[name].token_ids)
        return float((logits.argmax(1).cpu() == facts.columns).double().mean())

    # -- results -----------------------------------------------------------------------------------

    def finish(self, trainer: L.Trainer) -> Results:
        """Return all measurements, as tables and curves."""
        if self.correlations[-1].step != trainer.global_step:
            self.measure(trainer)
        correlations = [asdict(point) for point in self.correlations]
        recall = [asdict(point) for point in self.recall]
        caption = "Correlation of each pair on held-out subjects, the last step first"
        tables = [_table(self.study, "pair", correlations, caption)]
        if recall:
            caption = "Recall of facts that the text states or withholds, the last step first"
            tables.append(_table(f"{self.study}_recall", "knowledge", recall, caption))
        title = "How correlations form"
        draw = partial(
            training_curves, self._curves(), title, "r on held-out subjects at each step"
        )
        figure = Figure(self.study, f"{title} during training", draw)
        values = {"correlations": correlations, "recall": recall}
        return Results(self.study, values, tables=tables, figures=[figure])

    def _curves(self) -> dict[str, list[tuple[int, float]]]:
        curves: dict[str, list[tuple[int, float]]] = {}
        for title, points, key, name in (
            ("label-wise r", self.correlations, "label_mean", "pair"),
            ("r of the control prompt", self.correlations, "control_label_mean", "pair"),
            ("Hit@1 influenced", self.correlations, "influenced", "pair"),
            ("Hit@1 influencing", self.correlations, "influencing", "pair"),
            ("recall of stated facts", self.recall, "stated", "knowledge"),
            ("recall of withheld facts", self.recall, "withheld", "knowledge"),
        ):
            for point in points:
                value = getattr(point, key)
                if value is not None:
                    curve = curves.setdefault(f"{title}/{getattr(point, name)}", [])
                    curve.append((point.step, value))
        return curves

    # -- resuming ----------------------------------------------------------------------------------

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


def _table(name: str, key: str, rows: list[dict[str, Any]], caption: str) -> Table:
    columns = [Column(c, format="" if c in ("step", key) else ".3f") for c in rows[0]]
    rows = sorted(rows, key=lambda row: -row["step"])
    return Table.from_dicts(name, rows, columns, caption=caption, headline=True)
