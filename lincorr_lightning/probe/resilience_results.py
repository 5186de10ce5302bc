"""Tables and figures of the resilience study (paper, figures 8, 9, 19 to 21)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from lincorr_lightning.io import write_csv
from lincorr_lightning.results.base import Drawings, Pictured
from lincorr_lightning.results.loggers import tensorboard_writers
from lincorr_lightning.results.tables import markdown_table

if TYPE_CHECKING:
    import lightning as L
    from matplotlib.figure import Figure

# A share of next to nothing says nothing.
_LEAST_R = 0.2
_MOST_ROWS = 100
MATRICES = ("before", "after", "difference", "refitted", "kept")
_KINDS = {
    "before": "the old map on the old LM",
    "after": "the old map on the new LM",
    "difference": "after minus before",
    "refitted": "a map fitted on the new LM itself",
    "kept": "share of the refitted map's r that the old map keeps",
}


@dataclass(frozen=True)
class PairResilience:
    """How well an old map holds on a new LM; each r is a mean over labels, of held-out X's.

    Attributes:
        source: Name of the source knowledge.
        target: Name of the target knowledge.
        before: r of the old map on the LM it was fitted on; None if that is not known.
        after: r of the old map on the new LM.
        refitted: r on the new LM of a map fitted on it.
        after_std: Standard deviation of `after` over labels.
        n_labels: Labels of the target.
    """

    source: str
    target: str
    before: float | None
    after: float | None
    refitted: float | None
    after_std: float | None
    n_labels: int

    @property
    def difference(self) -> float | None:
        """What the new LM took from the tie."""
        return None if self.before is None or self.after is None else self.after - self.before

    @property
    def kept(self) -> float | None:
        """The old map's r as a share of the refitted one's; None where that is next to nothing."""
        if self.after is None or self.refitted is None or self.refitted < _LEAST_R:
            return None
        return self.after / self.refitted

    def results(self) -> dict[str, Any]:
        """The pair's entry in ``results.json``."""
        return {
            "source": self.source,
            "target": self.target,
            "before": self.before,
            "after": self.after,
            "difference": self.difference,
            "refitted": self.refitted,
            "kept": self.kept,
            "after_std": self.after_std,
            "n_labels": self.n_labels,
        }


@dataclass(frozen=True)
class ResilienceReport(Pictured):
    """Every pair of a map on another LM.

    Attributes:
        before: Name of the LM that the map was fitted on.
        after: Name of the new one.
        n_fit: X's that the new LM's own maps were fitted on.
        n_test: Held-out X's.
        pairs: In the order of the map.
    """

    before: str
    after: str
    n_fit: int
    n_test: int
    pairs: Sequence[PairResilience]

    def results(self) -> dict[str, Any]:
        """For ``results.json``."""
        means = {name: _mean([getattr(p, name) for p in self.pairs]) for name in MATRICES}
        return {
            "study": "resilience",
            "lm": self.after,
            "lm_before": self.before,
            "n_fit": self.n_fit,
            "n_test": self.n_test,
            "mean": means,
            "pairs": [pair.results() for pair in self.pairs],
        }

    def write(self, folder: Path) -> None:
        """Write tables and figures.

        Args:
            folder: The run's.

        Raises:
            OutputError: It cannot be written.
        """
        rows = [pair.results() for pair in self.pairs]
        write_csv(folder / "tables" / "pairs.csv", list(rows[0]), (list(r.values()) for r in rows))
        for name in self._known():
            sources, targets, matrix = self.matrix(name)
            cells = (
                [source, *(None if math.isnan(v) else v for v in row)]
                for source, row in zip(sources, matrix.tolist(), strict=True)
            )
            write_csv(folder / "tables" / f"{name}_matrix.csv", ("source", *targets), cells)
        self.write_pictures(folder)

    def show(self, trainer: L.Trainer) -> None:
        """Add scalars, the table and the figures to TensorBoard.

        Args:
            trainer: The run's trainer.
        """
        for writer in tensorboard_writers(trainer):
            for name, value in self.results()["mean"].items():
                if value is not None:
                    writer.add_scalar(f"resilience/{name}", value, 0)  # type: ignore[no-untyped-call]
            writer.add_text("pairs", self.markdown(), 0)  # type: ignore[no-untyped-call]
        self.show_pictures(trainer)

    def markdown(self) -> str:
        """The pairs that kept least first."""
        ordered = sorted(self.pairs, key=lambda p: math.inf if p.kept is None else p.kept)
        columns = ("pair", "before", "after", "difference", "refitted", "kept")
        return markdown_table(
            columns,
            (
                (f"{p.source}->{p.target}", *(getattr(p, name) for name in columns[1:]))
                for p in ordered[:_MOST_ROWS]
            ),
        )

    def _known(self) -> list[str]:
        """Matrices that have a value."""
        return [n for n in MATRICES if any(getattr(p, n) is not None for p in self.pairs)]

    def matrix(self, name: str) -> tuple[list[str], list[str], npt.NDArray[np.float64]]:
        """One number of all pairs.

        Args:
            name: One of `MATRICES`.

        Returns:
            Sources, targets, and ``(n_source, n_target)``, NaN where there is none.
        """
        sources = list(dict.fromkeys(pair.source for pair in self.pairs))
        targets = list(dict.fromkeys([*sources, *(pair.target for pair in self.pairs)]))
        targets = [t for t in targets if any(pair.target == t for pair in self.pairs)]
        matrix = np.full((len(sources), len(targets)), math.nan)
        for pair in self.pairs:
            value = getattr(pair, name)
            if value is not None:
                matrix[sources.index(pair.source), targets.index(pair.target)] = value
        return sources, targets, matrix

    def drawings(self) -> Drawings:
        """A heat map for each matrix."""
        return {f"{name}_matrix": partial(self._heatmap, name) for name in self._known()}

    def _heatmap(self, name: str) -> Figure:
        from lincorr_lightning.results.heat_maps import correlation_heatmap

        told = (
            f"map of {self.before}, on {self.after}; {self.n_test:,} held-out X’s; refitted on "
            f"{self.n_fit:,}"
        )
        label = "share of r" if name == "kept" else "label-wise Pearson r"
        least = f"; pairs of a refitted r of {_LEAST_R:g} or more" if name == "kept" else ""
        sources, targets, matrix = self.matrix(name)
        return correlation_heatmap(
            matrix, sources, targets, f"{name.capitalize()}: {_KINDS[name]}", told + least, label
        )


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return float(np.mean(known)) if known else None
