"""What a linear probe found, and all the forms in which it is handed over."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from lincorr_lightning.io import write_csv, write_json
from lincorr_lightning.probe.ranking import Composition
from lincorr_lightning.probe.ridge_path import RidgePoint
from lincorr_lightning.probe.tables import tables_of
from lincorr_lightning.results.base import Drawings, Pictured
from lincorr_lightning.results.numbers import Rates, number, rates_as_json
from lincorr_lightning.results.tables import (
    Influence,
    top_influences,
)

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

# A run over all knowledges has thousands of pairs with a reference: these are looked at closely.
MOST_WEIGHT_FIGURES = 12
_TIE_KEYS = ("label_error", "excess_error", "p", "q", "partial_label_mean", "through_given")


@dataclass(frozen=True)
class CompletenessScore:
    """What a pair's target labels of one kind reach (paper, table 18).

    Attributes:
        n_labels: How many there are.
        label_mean: Their mean label-wise r.
        influenced: Hit@N of influenced targets among them; None without a reference.
    """

    n_labels: int
    label_mean: float
    influenced: Rates | None

    def results(self) -> dict[str, Any]:
        """Its entry in ``results.json``."""
        return {
            "n_labels": self.n_labels,
            "label_mean": number(self.label_mean),
            "influenced": self.influenced and rates_as_json(self.influenced),
        }


@dataclass(frozen=True)
class PairScore:
    """Scores of one pair on held-out X's.

    Attributes:
        source: Name of the source knowledge.
        target: Name of the target knowledge.
        label_mean: Mean label-wise r; NaN when no label varies.
        label_std: Its standard deviation over labels.
        instance_mean: Mean instance-wise r.
        n_labels: Labels of the target.
        n_constant_labels: How many of them have no r because they never change.
        permuted_label_mean: Mean label-wise r of a map fitted on permuted targets; None without.
        control_label_mean: Mean label-wise r from an unrelated prompt; None without.
        ridge: Ridge strength of the map.
        label_r: r of each label, ``(n_target_labels,)``, NaN where constant.
        precision: Hit@N under ``influenced`` and ``influencing``; None without a reference.
        label_error: Standard error of `label_mean` over X's; None where it was not taken.
        excess_error: That of `excess`, or of `label_mean` where there is no control.
        p: Probability of so high an excess where there is none, one-sided.
        q: `p` adjusted for all pairs of the run.
        partial_label_mean: Mean label-wise r given the knowledges of ``model.given``.
        through_given: Share of the tie that goes through these: 1 less what the source explains
            of the target beyond them over what it explains alone (squared correlations).
        completeness: Scores by kind of target label, where there are several kinds.
    """

    source: str
    target: str
    label_mean: float
    label_std: float
    instance_mean: float
    n_labels: int
    n_constant_labels: int
    permuted_label_mean: float | None
    control_label_mean: float | None
    ridge: float
    label_r: npt.NDArray[np.floating[Any]]
    precision: Mapping[str, Rates] | None
    label_error: float | None = None
    excess_error: float | None = None
    p: float | None = None
    q: float | None = None
    partial_label_mean: float | None = None
    through_given: float | None = None
    completeness: Mapping[str, CompletenessScore] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """As ``city->country``."""
        return f"{self.source}->{self.target}"

    @property
    def excess(self) -> float | None:
        """How far r lies above the control's; None where one of them is not known."""
        r, control = number(self.label_mean), number(self.control_label_mean)
        return None if r is None or control is None else r - control

    def results(self) -> dict[str, Any]:
        """The pair's entry in ``results.json``."""
        return {
            "source": self.source,
            "target": self.target,
            "label_mean": number(self.label_mean),
            "label_std": number(self.label_std),
            "instance_mean": number(self.instance_mean),
            "n_labels": int(self.n_labels),
            "n_constant_labels": int(self.n_constant_labels),
            "permuted_label_mean": number(self.permuted_label_mean),
            "control_label_mean": number(self.control_label_mean),
            "excess": self.excess,
            **{key: number(getattr(self, key)) for key in _TIE_KEYS},
            "ridge": number(self.ridge),
            "precision": self.precision
            and {way: rates_as_json(rates) for way, rates in self.precision.items()},
            "completeness": {kind: one.results() for kind, one in self.completeness.items()},
        }


@dataclass
class ProbeReport(Pictured):
    """Everything a probe found.

    Attributes:
        lm: Name or path of the LM.
        n_fit: X's the maps were fitted on.
        n_test: X's they were scored on.
        pairs: Scores of each pair.
        ridge_path: Ridge path of each pair, by name; empty when a stored fit was scored.
        weights: W of each pair, by name, ``(n_target_labels, n_source_labels)``.
        labels: Labels of each knowledge; its order is that of the matrices.
        reference: Which labels belong together, by pair name, shaped like W; None if unknown.
        settings: The study's settings.
        compositions: Maps laid end to end.
        left_out: Knowledges of a family that the LM cannot be asked about, and why.
    """

    lm: str
    n_fit: int
    n_test: int
    pairs: Sequence[PairScore]
    ridge_path: Mapping[str, Sequence[RidgePoint]]
    weights: Mapping[str, npt.NDArray[np.floating[Any]]]
    labels: Mapping[str, Sequence[str]]
    reference: Mapping[str, npt.NDArray[np.bool_] | None]
    settings: Mapping[str, Any]
    compositions: Sequence[Composition] = ()
    left_out: Mapping[str, str] = field(default_factory=dict)

    def results(self) -> dict[str, Any]:
        """What ``results.json`` says: the project's public contract, and more beside it."""
        results: dict[str, Any] = {
            "study": "linear_probe",
            "lm": self.lm,
            "n_fit": int(self.n_fit),
            "n_test": int(self.n_test),
            "control": self.settings.get("control"),
            "pairs": [score.results() for score in self.pairs],
        }
        if self.ridge_path:
            results["ridge_path"] = [
                {
                    **dict(zip(("source", "target"), pair.split("->"), strict=True)),
                    "path": [point.results() for point in path],
                }
                for pair, path in self.ridge_path.items()
            ]
        if self.left_out:
            results["left_out"] = dict(self.left_out)
        if self.compositions:
            results["transitivity"] = [one.results() for one in self.compositions]
        return {**results, "settings": dict(self.settings)}

    def write(self, folder: str | Path) -> None:
        """Write ``results.json``, ``tables/`` and ``figures/``.

        Args:
            folder: The run's folder.

        Raises:
            OutputError: It cannot be written.
        """
        folder = Path(folder)
        write_json(folder / "results.json", self.results())
        for name, columns, rows in tables_of(self):
            write_csv(folder / "tables" / f"{name}.csv", columns, rows)
        self.write_pictures(folder)

    def log_to_tensorboard(self, writer: SummaryWriter, step: int) -> None:
        """Add scalars, figures, a text table of top influences and the settings to a log.

        Args:
            writer: Of the run's own TensorBoard log.
            step: Global step.
        """
        from lincorr_lightning.probe.tensorboard import log_probe

        log_probe(self, writer, step)

    # -- which pairs are looked at closely ---------------------------------------------------

    def notable(self, limit: int) -> list[PairScore]:
        """Pairs with a reference, or without any such all pairs: those with the highest r.

        Args:
            limit: How many at most.
        """
        scored = [score for score in self.pairs if number(score.label_mean) is not None]
        with_reference = [score for score in scored if self.reference.get(score.name) is not None]
        best = sorted(with_reference or scored, key=lambda score: -score.label_mean)
        return best[: limit if with_reference else min(limit, MOST_WEIGHT_FIGURES)]

    def influences(self, score: PairScore, n: int = 5) -> list[Influence]:
        """The highest weights of every label of a pair, both ways."""
        return top_influences(
            self.weights[score.name],
            self.labels[score.source],
            self.labels[score.target],
            n,
            self.reference.get(score.name),
        )

    # -- matrices ----------------------------------------------------------------------------

    def matrix(
        self, value: Callable[[PairScore], float | None]
    ) -> tuple[list[str], list[str], npt.NDArray[np.float64]]:
        """A score of all pairs as a matrix.

        Args:
            value: The score.

        Returns:
            Sources, targets, and ``(n_source, n_target)``, NaN where there is none.
        """
        asked_s, asked_t = {s.source for s in self.pairs}, {s.target for s in self.pairs}
        sources = [name for name in self.labels if name in asked_s]
        targets = [name for name in self.labels if name in asked_t]
        matrix = np.full((len(sources), len(targets)), math.nan)
        row, column = ({name: i for i, name in enumerate(names)} for names in (sources, targets))
        for score in self.pairs:
            found = number(value(score))
            matrix[row[score.source], column[score.target]] = math.nan if found is None else found
        return sources, targets, matrix

    # -- figures -----------------------------------------------------------------------------

    def drawings(self) -> Drawings:
        """Every figure there are numbers for, by its file name without suffix."""
        from lincorr_lightning.probe.pictures import drawings_of

        return drawings_of(self)
