"""Formation of correlations: a probe at set steps of training (paper, appendix B)."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import lightning as L
import torch
from torch import Tensor

from lincorr_lightning.callbacks.relation_callback import RelationCallback, require_template
from lincorr_lightning.errors import ConfigError, SubjectsError, require
from lincorr_lightning.functional import moments_of, random_hit_rates
from lincorr_lightning.linear_map.baselines import fit_and_score
from lincorr_lightning.linear_map.layout import build_layout, domain_rows
from lincorr_lightning.pretraining.corpus import Corpus
from lincorr_lightning.pretraining.datamodule import PackedStatements
from lincorr_lightning.results.plots import curves
from lincorr_lightning.results.results import Figure, Results
from lincorr_lightning.results.table import Table

MIN_SUBJECTS = 20  #: Subjects that fitting and scoring a map needs.
UNRELATED = "color"  #: Kind of knowledge that default pairs measure as a control.
_OF_PAIRS = {
    "label_mean": ("formation_r", "label-wise r"),
    "control_label_mean": ("formation_control", "r of the control prompt"),
    "random_label_mean": ("formation_random", "r of random source words"),
    "random_target_label_mean": ("formation_random_target", "r of random target words"),
    "excess_over_random": ("formation_excess_over_random", "r above random words"),
    "influenced": ("formation_influenced", "top-1 target right"),
    "best_baseline_1": ("formation_best_baseline", "top-1 of the strongest baseline"),
    "influencing": ("formation_influencing", "top-1 source right"),
}
_NUMBERS = _OF_PAIRS | {
    "stated": ("formation_recall", "recall of stated facts"),
    "withheld": ("formation_inferred", "recall of withheld facts"),
}
"""Log key and title of each number."""
_PANELS = ("label_mean", "excess_over_random", "influenced", "influencing", "stated", "withheld")
# Baselines, and the numbers whose panels they are drawn in.
_DOTTED = {"random_label_mean": "label_mean", "best_baseline_1": "influenced"}


class Formation(RelationCallback):
    """Fits and scores linear maps while any LightningModule trains a causal LM.

    At each measurement, maps are fitted on half of the subjects and scored on the other half. Logs
    ``formation_r/<pair>``, ``formation_control/<pair>``, ``formation_influenced/<pair>`` and
    ``formation_influencing/<pair>``, and beside them the probe's baselines: r of random words as
    source and as target labels (``formation_random``, ``formation_random_target``), r above random
    words at `random_labels` labels (``formation_excess_over_random``) and Hit@1 of the strongest
    pairing by the vocabulary alone (``formation_best_baseline``). If the training dataset is that
    of `CorpusDataModule`, also ``formation_recall/<knowledge>``, the recall of stated facts, and
    ``formation_inferred/<knowledge>``, that of withheld facts, which the text never states.

    Args:
        pairs: Ordered pairs, as ``city->country``; None takes the relation that the training
            dataset is about (without one, ``city->country``), and its source with ``color``.
        n_subjects: Number of subjects, or as many as the vocabulary has.
        every_n_steps: Largest number of optimizer steps between two measurements.
        control: Control prompt in place of the source's; None leaves it out.
        ridge: Ridge of the maps.
        random_labels: Number of source labels whose r is compared with that of as many random
            words; 0 leaves out random words and the vocabulary.
        **options: See `RelationCallback`.

    Attributes:
        correlations: A row per pair and step, with the columns of a probe's ``pairs.csv`` and
            Hit@1 of ``influenced`` targets and ``influencing`` sources; None if there is none.
        recall: A row per kind of knowledge and step: shares of facts that the LM answers right,
            ``stated`` by the training text and ``withheld`` from it; None if there are none.
    """

    study = "formation"
    kept = (*RelationCallback.kept, "correlations", "recall")

    def __init__(
        self, pairs: Sequence[str] | None = None, n_subjects: int = 1000, every_n_steps: int = 100,
        control: str | None = "One day, {} saw a", ridge: float = 0.0, random_labels: int = 20,
        **options: Any,
    ) -> None:  # fmt: skip
        super().__init__(relation=None, every_n_steps=every_n_steps, **options)
        require("Formation.ridge", ridge, at_least=0)
        require("Formation.random_labels", random_labels, at_least=0)
        require("Formation.n_subjects", n_subjects, at_least=MIN_SUBJECTS)
        if pairs is not None and not pairs:
            raise ConfigError("Formation.pairs is empty; name some, such as city->country.")
        if control is not None:
            require_template("Formation.control", control)
        self.pairs, self.n_subjects, self.control = pairs, n_subjects, control
        self.ridge, self.random_labels = ridge, random_labels

    def reset(self) -> None:
        super().reset()
        self.correlations: list[dict[str, Any]] = []
        self.recall: list[dict[str, Any]] = []

    def open(self, trainer: L.Trainer) -> None:
        catalogue, tokenizer = self.load_catalogue(trainer), self.cache.lm.tokenizer
        relation = self.relation_name(trainer)
        source = relation.partition("->")[0]
        default = [relation] if source == UNRELATED else [relation, f"{source}->{UNRELATED}"]
        self._layout = build_layout(
            tokenizer, catalogue, [], self.pairs or default, control=self.control,
            n_random=self.random_labels,
        )  # fmt: skip
        self._subjects = self.sample_subjects(self.n_subjects)
        if len(self._subjects) < MIN_SUBJECTS:
            raise SubjectsError(
                f"Formation needs {MIN_SUBJECTS} subjects and has {len(self._subjects)}: raise its "
                "n_subjects, or take an LM with a larger vocabulary."
            )
        self.declare_measured([*map("->".join, self._layout.pairs), *self._subjects])
        dataset = getattr(trainer.train_dataloader, "dataset", None)
        corpus = dataset.corpus if isinstance(dataset, PackedStatements) else None
        self._facts = {} if corpus is None else self._find_facts(corpus)

    def _find_facts(self, corpus: Corpus) -> dict[str, list[tuple[list[str], Tensor]]]:
        facts: dict[str, list[tuple[list[str], Tensor]]] = {}
        for name, domain in self._layout.domains.items():
            column_of = {
                answer.identity: i for i, one in enumerate(domain.labels) for answer in one.answers
            }
            for statements in corpus.facts(name):
                known = [s for s in statements if s.answer.identity in column_of]
                columns = torch.tensor([column_of[s.answer.identity] for s in known])
                facts.setdefault(name, []).append(([s.prompt for s in known], columns))
        return facts

    def measure(self, trainer: L.Trainer) -> None:
        step = self.step
        layout = self._layout
        logits = domain_rows(self.cache.lm, layout.reads, self._subjects)
        fit, test = (moments_of(half, layout.blocks) for half in (logits[::2], logits[1::2]))
        numbers: dict[str, dict[str, float | None]] = {}
        for score in fit_and_score(
            fit, test, layout, self.cache.lm, self.ridge, self.random_labels
        ):
            row = score.row()
            row |= {way: row[f"{way}_1"] for way in ("influenced", "influencing")}
            numbers[score.name] = {field: row[field] for field in _OF_PAIRS}
        recalled = {
            name: {"stated": self._recall(name, *stated), "withheld": self._recall(name, *withheld)}
            for name, (stated, withheld) in self._facts.items()
        }
        for rows in (self.correlations, self.recall):  # the end of a resumed run is measured again
            rows[:] = [row for row in rows if row["step"] != step]
        self.correlations += [{"step": step, "pair": name, **numbers[name]} for name in numbers]
        self.recall += [{"step": step, "knowledge": name, **recalled[name]} for name in recalled]
        scalars = {
            f"{self.numbered(_NUMBERS[field][0])}/{name}": value
            for name, values in (*numbers.items(), *recalled.items())
            for field, value in values.items()
            if value is not None
        }
        self.log_scalars(trainer, scalars, step)

    def _recall(self, name: str, prompts: list[str], columns: Tensor) -> float | None:
        if not prompts:
            return None
        logits = self.cache.lm.domain_logits(prompts, self._layout.domains[name].token_ids)
        return float((logits.argmax(1).cpu() == columns).double().mean())

    def finish(self, trainer: L.Trainer) -> Results:
        self._measure_once(trainer)
        look: dict[str, Any] = {
            "headline": True, "headings": {field: title for field, (_, title) in _NUMBERS.items()},
            "formats": dict.fromkeys(_NUMBERS, ".3f"),
        }  # fmt: skip
        correlations, recall = (
            sorted(rows, key=lambda row: -row["step"]) for rows in (self.correlations, self.recall)
        )
        caption = "Correlation of each pair on held-out subjects"
        tables = [Table.of(self.name, correlations, (), caption, **look)]
        if recall:
            name, caption = "formation_recall", "Recall of stated and of withheld facts"
            tables.append(Table.of(self.numbered(name), recall, (), caption, **look))
        right = [mask for mask in self._layout.references.values() if mask is not None]
        rates = [random_hit_rates(torch.from_numpy(one)) for one in right if one.any()]
        ways = enumerate(("influenced", "influencing"))
        chance = {way: [each[i].by_rank()["1"] for each in rates] for i, way in ways}
        draw = partial(_draw, [*self.correlations, *self.recall], chance)
        figure = Figure(self.name, "How correlations form during training", draw)
        values = {"correlations": self.correlations, "recall": self.recall}
        return Results(self.name, values, tables=tables, figures=[figure])


def _draw(rows: Sequence[Mapping[str, Any]], chance: Mapping[str, Sequence[Any]]) -> Any:
    """Draw numbers of pairs and of recall over the step, a panel for each, baselines dotted."""
    from pandas import DataFrame  # takes a second

    levels = {_NUMBERS[way][1]: by_pair for way, by_pair in chance.items()}

    def add_chance(axes: Any, panel: str, _: Any) -> None:
        for level in levels.get(panel, ()):
            axes.axhline(level, color="black", linestyle="--", linewidth=0.9, label="chance")

    frame = DataFrame([{"name": row.get("pair", row.get("knowledge")), **row} for row in rows])
    shown = [field for field in _NUMBERS if field in frame and field in (*_PANELS, *_DOTTED)]
    points = frame.melt(["name", "step"], shown, "field").astype({"value": float})
    return curves(
        points.dropna(subset="value").assign(
            panel=points["field"].replace(_DOTTED).map(lambda field: _NUMBERS[field][1]),
            baseline=points["field"].isin(_DOTTED),
        ),
        "step", "value", "name", "panel", "baseline", title="How correlations form",
        subtitle="r on held-out subjects; dotted: random words, best vocabulary baseline",
        labels=("step", ""), each=add_chance,
    )  # fmt: skip
