"""What sparse autoencoders reach at each place of an LM, as tables and figures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from lincorr_lightning.io import write_csv
from lincorr_lightning.results.base import Drawings, Pictured
from lincorr_lightning.results.loggers import tensorboard_writers
from lincorr_lightning.results.style import (
    BLUE,
    GREEN,
    GREY,
    INK,
    ORANGE,
    PALE,
    finish,
    new_figure,
    short_name,
)
from lincorr_lightning.results.tables import markdown_table

if TYPE_CHECKING:
    import lightning as L

_LOOKS = {
    "residual": (BLUE, "o", "residual stream"),
    "mlp_out": (ORANGE, "s", "MLP"),
    "attention_out": (GREEN, "^", "attention"),
}
_PANELS = {
    "explained_variance": ("explained variance", "share of the variance"),
    "loss_recovered": ("loss recovered", "share, from zeros to clean"),
    "l0": ("L0", "active features of a token"),
    "dead": ("dead features", "share, active at no token"),
}
SCORED = tuple(_PANELS)
_SHARES = ("explained_variance", "loss_recovered", "dead")
# Half decades of the share of tokens at which a feature is active.
DENSITY_EDGES = tuple(-5 + 0.5 * i for i in range(11))


@dataclass(frozen=True)
class SAEScore:
    """One SAE on held-out texts.

    Attributes:
        kind: residual, mlp_out or attention_out.
        layer: Counted from 0.
        n_features: Of the SAE.
        explained_variance: 1 - squared error / variance, over all tokens; None where the
            activations do not vary.
        l0: Mean number of active features of a token.
        dead: Share of the features that are active at none of the tokens.
        loss_recovered: (ablated - spliced) / (ablated - clean) of the LM's cross-entropy; None
            where zeros do no harm.
        loss_spliced: Cross-entropy with the reconstruction in the activations' stead, in nats.
        loss_ablated: Likewise with zeros.
    """

    kind: str
    layer: int
    n_features: int
    explained_variance: float | None
    l0: float
    dead: float
    loss_recovered: float | None
    loss_spliced: float
    loss_ablated: float

    @property
    def hook_point(self) -> str:
        """As in ``residual.3``."""
        return f"{self.kind}.{self.layer}"


@dataclass(frozen=True)
class SAEReport(Pictured):
    """All SAEs of an LM.

    Attributes:
        lm: Its name.
        n_tokens: Held-out tokens at which activations were rebuilt.
        loss_clean: The LM's own cross-entropy of a token, in nats.
        scores: By layer.
        density: Features by the share of tokens at which they are active: those active at none,
            then by half decades (`DENSITY_EDGES`, the first open below),
            ``(n_places, 1 + n_bins)``, shares of the features of a place.
    """

    lm: str
    n_tokens: int
    loss_clean: float
    scores: Sequence[SAEScore]
    density: npt.NDArray[np.float64]

    def results(self) -> dict[str, Any]:
        """For ``results.json``."""
        means = {name: _mean([getattr(s, name) for s in self.scores]) for name in SCORED}
        return {
            "study": "sparse_autoencoders",
            "lm": self.lm,
            "n_held_out_tokens": self.n_tokens,
            "loss_clean": self.loss_clean,
            "mean": means,
            "places": [asdict(s) for s in self.scores],
        }

    def write(self, folder: Path) -> None:
        """Write tables and figures.

        Args:
            folder: The run's.

        Raises:
            OutputError: It cannot be written.
        """
        rows = [asdict(s) for s in self.scores]
        write_csv(folder / "tables" / "places.csv", list(rows[0]), (list(r.values()) for r in rows))
        bins = ["never", *(f"10^{low:g} to 10^{low + 0.5:g}" for low in DENSITY_EDGES[:-1])]
        densities = zip(self.scores, self.density.tolist(), strict=True)
        write_csv(
            folder / "tables" / "feature_density.csv", ("place", *bins),
            ([score.hook_point, *shares] for score, shares in densities),
        )  # fmt: skip
        self.write_pictures(folder)

    def show(self, trainer: L.Trainer) -> None:
        """Add the table and the figures to TensorBoard.

        Args:
            trainer: The run's trainer.
        """
        for writer in tensorboard_writers(trainer):
            writer.add_text("places", self.markdown(), trainer.global_step)  # type: ignore[no-untyped-call]
        self.show_pictures(trainer, trainer.global_step)

    def markdown(self) -> str:
        """A row a place."""
        return markdown_table(
            ("place", *SCORED),
            ((s.hook_point, *(getattr(s, n) for n in SCORED)) for s in self.scores),
        )

    def drawings(self) -> Drawings:
        """Scores by layer, and how often features are active."""
        return {"quality": self._quality, "feature_density": self._density}

    def _told(self) -> str:
        n = {score.n_features for score in self.scores}
        features = f"{n.pop():,} features each" if len(n) == 1 else "of several sizes"
        saes = f"{len(self.scores)} SAEs, {features}"
        return f"{short_name(self.lm)}; {saes}; {self.n_tokens:,} held-out tokens"

    def _quality(self) -> Figure:
        layers = sorted({score.layer for score in self.scores})
        width = min(max(3.2, 1.6 + 0.16 * len(layers)), 6.0)
        figure = new_figure(2 * width + 0.6, 5.2, "Sparse autoencoders by layer", self._told())
        panels = figure.subplots(2, 2, sharex=True)
        for panel, (name, (title, label)) in zip(panels.flat, _PANELS.items(), strict=True):
            self._panel(panel, name, len(layers) == 1)
            panel.set_title(title, loc="left", fontsize=10, color=INK)
            panel.set_ylabel(label, fontsize=8, color=INK)
        for panel in panels[1]:
            panel.set_xlabel("layer", fontsize=8, color=INK)
        # Where there is room: what is worth showing explains most.
        panels[0, 0].legend(loc="lower left", frameon=False, fontsize=8, labelcolor=INK)
        return finish(figure)

    def _panel(self, axes: Axes, name: str, single: bool) -> None:
        kinds = [kind for kind in _LOOKS if any(score.kind == kind for score in self.scores)]
        known = []
        for i, kind in enumerate(kinds):
            colour, marker, label = _LOOKS[kind]
            points = [
                (score.layer, getattr(score, name)) for score in self.scores if score.kind == kind
            ]
            points = [(layer, value) for layer, value in points if value is not None]
            known += [value for _, value in points]
            # Side by side, where one layer alone would put them on top of each other.
            shift = (i - (len(kinds) - 1) / 2) * 0.2 if single else 0.0
            axes.plot(
                [layer + shift for layer, _ in points], [value for _, value in points],
                color=colour, marker=marker, markersize=5.5, linewidth=1.5, label=label,
                clip_on=not points, zorder=3,  # nothing at all has no extent that could be laid out
            )  # fmt: skip
        axes.xaxis.set_major_locator(MaxNLocator(10, integer=True))
        if single:
            layer = self.scores[0].layer
            axes.set_xlim(layer - 0.6, layer + 0.6)
            axes.set_xticks([layer])
        if name in _SHARES:
            axes.set_ylim(min(0.0, *known) if known else 0.0, max(1.0, *known) if known else 1.0)
        else:
            axes.set_ylim(0, 1.15 * max(known))
        axes.grid(color=PALE, linewidth=0.6)
        axes.set_axisbelow(True)
        axes.tick_params(labelsize=8, length=2, color=GREY, labelcolor=INK)
        axes.spines[["top", "right"]].set_visible(False)
        axes.spines[["left", "bottom"]].set_color(GREY)

    def _density(self) -> Figure:
        n_rows, n_columns = self.density.shape
        row = min(max(6 / n_rows, 0.14), 0.3)  # inches
        title = "How often features are active"
        figure = new_figure(7.2, 0.8 + max(row * n_rows, 1.2), title, self._told())
        axes = figure.subplots()
        image = axes.imshow(
            self.density, cmap="viridis", vmin=0, aspect="auto", interpolation="nearest"
        )
        axes.set_yticks(
            range(n_rows), [s.hook_point for s in self.scores], fontsize=min(8, 260 / n_rows)
        )
        # Edges of the half decades, but the lowest, where the column of those that never are ends.
        edges = [i for i in range(2, n_columns + 1) if (DENSITY_EDGES[i - 1]).is_integer()]
        axes.set_xticks(
            [0, *(i - 0.5 for i in edges)],
            ["never", *(f"{10 ** DENSITY_EDGES[i - 1]:g}" for i in edges)], fontsize=8,
        )  # fmt: skip
        axes.axvline(0.5, color="white", linewidth=2)
        axes.set_xlabel("share of the tokens at which a feature is active", fontsize=8, color=INK)
        axes.tick_params(length=2, color=GREY, labelcolor=INK)
        axes.spines[:].set_visible(False)
        bar = figure.colorbar(image, ax=axes, fraction=0.05, pad=0.02)
        bar.set_label("share of the features", fontsize=8, color=INK)
        bar.ax.tick_params(labelsize=8, length=2, color=GREY, labelcolor=INK)
        bar.outline.set_visible(False)  # type: ignore[operator]
        return finish(figure)


def densities(frequency: npt.NDArray[np.float64], n_features: Sequence[int]) -> npt.NDArray[Any]:
    """Features by how often they are active, as `SAEReport.density`.

    Args:
        frequency: Share of the tokens at which each is active, ``(n_places, most_features)``.
        n_features: Features of each place; what stands beyond them is none.

    Example:
        >>> densities(np.array([[0.0, 0.5, 1.0, 0.0002]]), [4])[0, [0, 3, -1]]
        array([0.25, 0.25, 0.5 ])
    """
    rows = []
    for shares, n in zip(frequency, n_features, strict=True):
        own = shares[:n]
        active = own[own > 0]
        # Those below the lowest edge, and those that are active at every token, count as well.
        logs = np.clip(np.log10(active), DENSITY_EDGES[0], DENSITY_EDGES[-1])
        counts, _ = np.histogram(logs, DENSITY_EDGES)
        rows.append(np.array([n - len(active), *counts]) / n)
    return np.stack(rows)


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return float(np.mean(known)) if known else None
