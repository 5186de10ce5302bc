"""Geometry of the prompts of each knowledge beside the linear ties between knowledges."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from lincorr_lightning.geometry.mantel import matrix_tie, rank_residuals
from lincorr_lightning.io import write_csv
from lincorr_lightning.results.base import Drawings, Pictured
from lincorr_lightning.results.loggers import tensorboard_writers
from lincorr_lightning.results.numbers import number
from lincorr_lightning.results.tables import markdown_table

if TYPE_CHECKING:
    import lightning as L

Floats = npt.NDArray[np.float64]
SCORES = ("r", "excess", "hit1")
_TEST_COLUMNS = ("closeness", "setting", "layer", "against", "given", "spearman", "p", "n_pairs",
                 "n_permutations")  # fmt: skip


@dataclass(frozen=True)
class OrderedScore:
    """What a linear map from one knowledge to another reaches.

    Attributes:
        source: Name of the source knowledge.
        target: Name of the target knowledge.
        r: Mean label-wise r on held-out X's.
        excess: What of it is above the control's; None without a control.
        hits: Hit@N of influenced targets by N; empty without a reference.
    """

    source: str
    target: str
    r: float | None
    excess: float | None
    hits: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class KnowledgeGeometryReport(Pictured):
    """How close the clouds of two knowledges' prompts are, beside the ties between them.

    Attributes:
        lm: Name of the LM.
        n_subjects: X's, the points of each cloud.
        scores: Of every ordered pair.
        layers: Numbers of the layers.
        range_scalings: The n2's.
        ks: Sizes of neighborhoods.
        dimension: Intrinsic dimension of each knowledge's cloud, ``(n_layers, n_scalings)``.
        overlap: Mean neighborhood overlap of the clouds of each two knowledges, in the order of
            `dimension`, ``(n_layers, n_ks)``.
        wording: How alike the prompts of each two knowledges are worded, from 0 to 1: the null that
            closeness has to be held against.
        n_permutations: Of the tests.
        seed: Of the permutations.
    """

    lm: str
    n_subjects: int
    scores: Sequence[OrderedScore]
    layers: Sequence[int]
    range_scalings: Sequence[int]
    ks: Sequence[int]
    dimension: Mapping[str, Floats]
    overlap: Mapping[tuple[str, str], Floats]
    wording: Mapping[tuple[str, str], float]
    n_permutations: int
    seed: int

    @property
    def names(self) -> list[str]:
        """The knowledges."""
        return list(self.dimension)

    @property
    def middle_k(self) -> int:
        """Position of the k that figures show."""
        return len(self.ks) // 2

    # -- matrices ----------------------------------------------------------------------------

    @cached_property
    def score_matrices(self) -> dict[str, Floats]:
        """Symmetric matrices of what maps reach: of both directions the mean, else the one known.

        ``r``, ``excess`` if a control was asked, ``hit1`` if there is a reference; NaN elsewhere.
        """
        n = len(self.names)
        found = {name: np.full((2, n, n), math.nan) for name in SCORES}
        for score in self.scores:
            i, j = self.names.index(score.source), self.names.index(score.target)
            for name, value in (
                ("r", score.r),
                ("excess", score.excess),
                ("hit1", score.hits.get("1")),
            ):
                if value is not None:
                    found[name][0, i, j] = found[name][1, j, i] = value
        means = {}
        for name, both in found.items():
            n_known = np.isfinite(both).sum(0)
            total = np.where(np.isfinite(both), both, 0.0).sum(0)
            means[name] = np.where(n_known > 0, total / np.maximum(n_known, 1), math.nan)
        return {name: m for name, m in means.items() if np.isfinite(m).any() or name == "r"}

    def overlap_matrix(self, k: int, layer: int | None = None) -> Floats:
        """Overlap of all pairs at one layer, or on average over layers.

        Args:
            k: Position of the k.
            layer: Position of the layer; None for the mean over all.
        """
        return self._matrix({
            pair: float(values[:, k].mean() if layer is None else values[layer, k])
            for pair, values in self.overlap.items()
        })  # fmt: skip

    def difference_matrix(self, scaling: int, layer: int | None = None) -> Floats:
        """``|log ID - log ID'|`` of all pairs at one layer, or on average over layers.

        Args:
            scaling: Position of the range scaling.
            layer: Position of the layer; None for the mean over all.
        """
        logs = {name: np.log(values[:, scaling]) for name, values in self.dimension.items()}
        apart = {(a, b): np.abs(logs[a] - logs[b]) for a, b in self.overlap}
        return self._matrix({
            pair: float(v.mean() if layer is None else v[layer]) for pair, v in apart.items()
        })  # fmt: skip

    def _matrix(self, values: Mapping[tuple[str, str], float]) -> Floats:
        matrix = np.full((len(self.names), len(self.names)), math.nan)
        for (a, b), value in values.items():
            i, j = self.names.index(a), self.names.index(b)
            matrix[i, j] = matrix[j, i] = value if math.isfinite(value) else math.nan
        return matrix

    # -- numbers -----------------------------------------------------------------------------

    @cached_property
    def tests(self) -> list[list[Any]]:
        """Closeness against what maps reach, over pairs; a row a test, None where there is none.

        Tied knowledges that are close have a positive rho with the overlap, and a negative one
        with the difference of ID. Prompts that are worded alike may be close and tied for that
        alone: the rho of wording tells, and what is left of the others *given* wording.
        """
        where: list[tuple[str, int | None]] = [("all", None)]
        if len(self.layers) > 1:
            where += [(str(layer), i) for i, layer in enumerate(self.layers)]
        rows = []
        for name, layer in where:
            kinds = [("overlap", f"k={k}", self.overlap_matrix(i, layer))
                     for i, k in enumerate(self.ks)]  # fmt: skip
            kinds += [("dimension_difference", f"n2={n}", self.difference_matrix(i, layer))
                      for i, n in enumerate(self.range_scalings)]  # fmt: skip
            wording = self._matrix(self.wording)
            if layer is None:
                kinds.append(("wording", "", wording))
            for kind, setting, matrix in kinds:
                for against, scores in self.score_matrices.items():
                    asked: list[tuple[str | None, Floats, Floats]] = [(None, matrix, scores)]
                    if kind != "wording":
                        left = rank_residuals(matrix, wording), rank_residuals(scores, wording)
                        asked.append(("wording", *left))
                    for given, x, y in asked:
                        found = matrix_tie(x, y, self.n_permutations, self.seed)
                        numbers: list[Any] = [None] * 4
                        if found is not None:
                            numbers = [found.spearman, found.p, found.n_pairs, found.n_permutations]
                        rows.append([kind, setting, name, against, given, *numbers])
        return rows

    def test(self, closeness: str, setting: str, against: str) -> dict[str, Any]:
        """One of `tests`, over the mean of all layers, nothing given.

        Args:
            closeness: ``overlap``, ``dimension_difference`` or ``wording``.
            setting: As ``k=10`` or ``n2=2``; empty for wording.
            against: One of `SCORES`.
        """
        wanted = [closeness, setting, "all", against, None]
        (row,) = [row for row in self.tests if row[:5] == wanted]
        return dict(zip(_TEST_COLUMNS, row, strict=True))

    def pair_rows(self) -> Iterator[dict[str, Any]]:
        """Each two knowledges: closeness, and what maps between them reach."""
        score = {(s.source, s.target): s for s in self.scores}
        differences = [self.difference_matrix(i) for i in range(len(self.range_scalings))]
        for (a, b), values in self.overlap.items():
            i, j = self.names.index(a), self.names.index(b)
            one, other = score.get((a, b)), score.get((b, a))
            row: dict[str, Any] = {"a": a, "b": b}
            row |= {name: number(m[i, j]) for name, m in self.score_matrices.items()}
            for name, each in (("a->b", one), ("b->a", other)):
                row[f"r {name}"] = None if each is None else each.r
                for n in ("1", "3", "5"):
                    row[f"hit{n} {name}"] = None if each is None else _known(each.hits.get(n))
            row["wording"] = self.wording[a, b]
            row |= {f"overlap k={k}": number(values[:, i].mean()) for i, k in enumerate(self.ks)}
            for n2, matrix in zip(self.range_scalings, differences, strict=True):
                row[f"dimension_difference n2={n2}"] = number(matrix[i, j])
            yield row

    def results(self) -> dict[str, Any]:
        """For ``results.json``."""
        profiles = {
            name: {
                str(n2): [number(v) for v in values[:, i]]
                for i, n2 in enumerate(self.range_scalings)
            }
            for name, values in self.dimension.items()
        }
        pairs = []
        for row, values in zip(self.pair_rows(), self.overlap.values(), strict=True):
            layers = {str(k): values[:, i].tolist() for i, k in enumerate(self.ks)}
            pairs.append({**row, "overlap": layers})
        return {
            "study": "knowledge_geometry",
            "lm": self.lm,
            "n_subjects": self.n_subjects,
            "layers": list(self.layers),
            "range_scalings": list(self.range_scalings),
            "ks": list(self.ks),
            "chance_overlap": {str(k): k / (self.n_subjects - 1) for k in self.ks},
            "dimension": profiles,
            "tests": [dict(zip(_TEST_COLUMNS, row, strict=True)) for row in self.tests],
            "pairs": pairs,
        }

    # -- files -------------------------------------------------------------------------------

    def write(self, folder: Path) -> None:
        """Write tables and figures.

        Args:
            folder: The run's.

        Raises:
            OutputError: It cannot be written.
        """
        tables = folder / "tables"
        rows = list(self.pair_rows())
        write_csv(tables / "pairs.csv", list(rows[0]), (list(row.values()) for row in rows))
        write_csv(tables / "tests.csv", _TEST_COLUMNS, self.tests)
        profiles = [
            [name, layer, n2, number(values[i, j])]
            for name, values in self.dimension.items()
            for i, layer in enumerate(self.layers)
            for j, n2 in enumerate(self.range_scalings)
        ]
        write_csv(tables / "dimension.csv", ("knowledge", "layer", "n2", "dimension"), profiles)
        by_layer = [
            [a, b, layer, k, number(values[i, j])]
            for (a, b), values in self.overlap.items()
            for i, layer in enumerate(self.layers)
            for j, k in enumerate(self.ks)
        ]
        write_csv(tables / "overlap.csv", ("a", "b", "layer", "k", "overlap"), by_layer)
        self.write_pictures(folder)

    def show(self, trainer: L.Trainer) -> None:
        """Add the tests and the figures to TensorBoard.

        Args:
            trainer: The run's trainer.
        """
        for writer in tensorboard_writers(trainer):
            for kind, setting, layer, against, given, rho, *_ in self.tests:
                if rho is not None and layer != "all" and given is None:
                    # What TensorBoard calls a step is the layer here.
                    tag = f"{kind}/{setting}/{against}"
                    writer.add_scalar(tag, rho, int(layer))  # type: ignore[no-untyped-call]
            writer.add_text("tests", self.markdown(), 0)  # type: ignore[no-untyped-call]
        self.show_pictures(trainer)

    def markdown(self) -> str:
        """The tests over the mean of all layers."""
        shown = [row for row in self.tests if row[2] == "all"]
        return markdown_table(_TEST_COLUMNS, shown)

    def drawings(self) -> Drawings:
        """The figures, by their file names without suffix."""
        from lincorr_lightning.geometry import knowledge_figures as draw

        figures = {
            "closeness": draw.closeness_figure,
            "overlap_matrix": draw.overlap_figure,
            "dimension": draw.dimension_figure,
        }
        if len(self.layers) > 1:
            figures["rho_by_layer"] = draw.rho_figure
        return {name: partial(figure, self) for name, figure in figures.items()}


def _known(value: float | None) -> float | None:
    return None if value is None else number(value)
