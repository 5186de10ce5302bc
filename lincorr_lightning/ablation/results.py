"""Tables and figures of the vocabulary ablation (paper, table 7)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from lincorr_lightning.results.base import Drawings, Pictured
from lincorr_lightning.results.loggers import tensorboard_writers
from lincorr_lightning.results.style import (
    BLUE,
    GREY,
    INK,
    ORANGE,
    PALE,
    finish,
    new_figure,
)
from lincorr_lightning.results.tables import markdown_table
from lincorr_lightning.results.training_curves import training_curves

if TYPE_CHECKING:
    import lightning as L

PAPER: Mapping[str, Mapping[str, float]] = {
    "city->country": {"reference": 0.9766, "permuted": 0.2266, "letters": 0.3672},
    "country->continent": {"reference": 0.7812},
    "ceo->company": {"reference": 0.5859},
    "X+1->X+2": {"reference": 0.0938},
}
"""The paper's table 7, of the vocabulary of Llama-3."""

_PALE_BLUE = "#9DC3E6"
_SHARES = ("source_learned", "generalized", "unrestricted", "says_source")
_PHASES = {
    "uncomposed": ("source_learned", "generalized"),
    "compose": ("source_learned", "target_learned"),
    "learn": ("source_learned", "generalized"),
}
_TITLES = {
    "source_learned": "source learned",
    "target_learned": "target learned",
    "generalized": "generalized",
}


@dataclass(frozen=True)
class RunScores:
    """What one network says of the new subjects.

    Attributes:
        mapping: Under which it was trained.
        seed: Of its subjects, permutation and weights.
        source_learned: Share whose source text it completes as taught, of all candidates.
        generalized: Share whose target text it completes rightly, of the target's domain.
        unrestricted: The same, of all candidates.
        says_source: Share whose target text it completes with the source answer.
    """

    mapping: str
    seed: int
    source_learned: float
    generalized: float
    unrestricted: float
    says_source: float


@dataclass(frozen=True)
class AblationReport(Pictured):
    """What all networks of a run say.

    Attributes:
        relation: As ``city->country``.
        lm: Whose vocabulary.
        mappings: In their order.
        composed: Scores after both phases.
        uncomposed: Scores without the compose phase; empty if that was not asked for.
        random: Share that an answer drawn from the domain gets right, by mapping.
        majority: Share that the most frequent right answer gets, by mapping.
        n_new: New subjects of a run.
        history: (step, share) by ``phase/what/mapping``.
    """

    relation: str
    lm: str
    mappings: tuple[str, ...]
    composed: tuple[RunScores, ...]
    uncomposed: tuple[RunScores, ...]
    random: tuple[float, ...]
    majority: tuple[float, ...]
    n_new: int
    history: Mapping[str, Sequence[tuple[int, float]]]

    def results(self) -> dict[str, Any]:
        """For ``results.json``: the first mapping's numbers, then all."""
        summary = self.summary()
        first = summary[0]
        return {
            "mapping": first["mapping"],
            "source_learned": first["source_learned"],
            "generalized": first["generalized"],
            "n": self.n_new,
            "random": first["random"],
            "majority": first["majority"],
            "unrestricted": first["unrestricted"],
            "uncomposed": first["uncomposed"],
            "gain": first["gain"],
            "mappings": summary,
            "runs": [dict(zip(*row, strict=True)) for row in self._runs()],
        }

    def summary(self) -> list[dict[str, Any]]:
        """Mean and standard deviation over seeds, of each mapping."""
        rows = []
        for mapping, random, majority in zip(
            self.mappings, self.random, self.majority, strict=True
        ):
            own = [asdict(s) for s in self.composed if s.mapping == mapping]
            bare = [s.generalized for s in self.uncomposed if s.mapping == mapping]
            means = {name: float(np.mean([s[name] for s in own])) for name in _SHARES}
            without = float(np.mean(bare)) if bare else None
            rows.append(
                {
                    "mapping": mapping,
                    "n_seeds": len(own),
                    **means,
                    # Of a sample; nothing can be said of one.
                    "std": float(np.std([s["generalized"] for s in own], ddof=1))
                    if len(own) > 1
                    else None,
                    "random": random,
                    "majority": majority,
                    "uncomposed": without,
                    "gain": None if without is None else means["generalized"] - without,
                    "paper": PAPER.get(self.relation, {}).get(mapping),
                }
            )
        return rows

    def _runs(self) -> Iterator[tuple[Sequence[str], Sequence[Any]]]:
        columns = ("mapping", "seed", "composed", *_SHARES)
        for composed, scores in ((True, self.composed), (False, self.uncomposed)):
            for score in scores:
                shares = [getattr(score, name) for name in _SHARES]
                yield columns, (score.mapping, score.seed, composed, *shares)

    def runs_table(self) -> tuple[Sequence[str], list[Sequence[Any]]]:
        """A row per network."""
        rows = list(self._runs())
        return rows[0][0], [row for _, row in rows]

    def summary_table(self) -> tuple[Sequence[str], list[Sequence[Any]]]:
        """A row per mapping."""
        rows = self.summary()
        return list(rows[0]), [list(row.values()) for row in rows]

    def markdown(self) -> str:
        """The summary, to be read."""
        columns = (
            "mapping", "source learned", "generalized", "compose skipped", "gain",
            "of all candidates", "says the source", "chance", "majority", "paper",
        )  # fmt: skip
        return markdown_table(
            columns,
            [
                (
                    row["mapping"],
                    _percent(row["source_learned"]),
                    _percent(row["generalized"], row["std"]),
                    _percent(row["uncomposed"]),
                    _points(row["gain"]),
                    _percent(row["unrestricted"]),
                    _percent(row["says_source"]),
                    _percent(row["random"]),
                    _percent(row["majority"]),
                    _percent(row["paper"]),
                )
                for row in self.summary()
            ],
        )

    # -- figures ---------------------------------------------------------------------------------

    def drawings(self) -> Drawings:
        """The bars, and the curves of training."""
        history = {
            # A panel for each phase and side, the mappings over each other.
            f"{title}/{mapping}": self.history[f"{prefix}{mapping}"]
            for title, prefix in self._panels()
            for mapping in self.mappings
        }
        drawings: dict[str, Callable[[], Figure]] = {"generalization": self._bars}
        if history:
            title = f"{self.relation}: what is composed from the vocabulary of {self.lm}"
            told = "share of the new subjects (compose: of the paired texts)"
            drawings["training"] = partial(training_curves, history, title, told)
        return drawings

    def _panels(self) -> Iterator[tuple[str, str]]:
        """Title, and what tags begin with, of each panel there are points for."""
        for phase, whats in _PHASES.items():
            for what in whats:
                if f"{phase}/{what}/{self.mappings[0]}" in self.history:
                    yield f"{phase}: {_TITLES[what]}", f"{phase}/{what}/"

    def _bars(self) -> Figure:
        rows = self.summary()
        n_seeds = rows[0]["n_seeds"]
        subtitle = (
            f"vocabulary of {self.lm}; {self.n_new} new subjects; right answer within the domain; "
            + (f"mean and standard deviation of {n_seeds} seeds" if n_seeds > 1 else "one seed")
        )
        figure = new_figure(
            max(4.6, 1.7 * len(rows) + 2.4), 3.4, f"{self.relation}: generalized", subtitle
        )
        axes = figure.add_subplot()
        for x, row in enumerate(rows):
            _bars_of(axes, x, row)
        axes.set_xticks(range(len(rows)), [row["mapping"] for row in rows], fontsize=9.5)
        axes.set_xlim(-0.62, len(rows) - 0.38)
        axes.set_ylim(0, 1.08)
        axes.yaxis.set_major_formatter(PercentFormatter(1.0))
        axes.tick_params(labelsize=8.5, length=0, labelcolor=INK)
        axes.set_yticks([0, 0.25, 0.5, 0.75, 1.0])
        axes.grid(axis="y", color=PALE, linewidth=0.6)
        axes.set_axisbelow(True)
        axes.spines[["top", "right", "left"]].set_visible(False)
        handles = dict(zip(*reversed(axes.get_legend_handles_labels()), strict=True))
        axes.legend(
            list(handles.values()), list(handles), loc="upper left", bbox_to_anchor=(1.01, 1.0),
            frameon=False, fontsize=8.5, labelcolor=INK,
        )  # fmt: skip
        return finish(figure)

    # -- TensorBoard -----------------------------------------------------------------------------

    def show(self, trainer: L.Trainer) -> None:
        """Add the table and the figures, and lay curves over each other.

        Args:
            trainer: The run's trainer; its global step is theirs.
        """
        charts = {
            title: ["Multiline", [f"{prefix}{mapping}" for mapping in self.mappings]]
            for title, prefix in self._panels()
        }
        for writer in tensorboard_writers(trainer):
            writer.add_custom_scalars({self.relation: charts})  # type: ignore[no-untyped-call]
            writer.add_text("summary", self.markdown(), trainer.global_step)  # type: ignore[no-untyped-call]
        self.show_pictures(trainer, trainer.global_step)


def _bars_of(axes: Axes, x: float, row: Mapping[str, Any]) -> None:
    """One mapping: with and without the compose phase, beside chance and the paper."""
    skipped = row["uncomposed"]
    here, std = (x if skipped is None else x - 0.2), row["std"]
    axes.bar(here, row["generalized"], 0.36, color=BLUE, label="composed")
    if std is not None:
        axes.errorbar(here, row["generalized"], std, color=INK, capsize=3, linewidth=1)
    _tell(axes, here, row["generalized"] + (std or 0.0), row["generalized"])
    if skipped is not None:
        axes.bar(x + 0.2, skipped, 0.36, color=_PALE_BLUE, label="compose phase skipped")
        _tell(axes, x + 0.2, skipped, skipped)
    ends = (x - 0.42, x + 0.42)
    axes.plot(ends, [row["random"]] * 2, ":", color=GREY, linewidth=1.4, label="chance")
    axes.plot(
        ends, [row["majority"]] * 2, "--", color=GREY, linewidth=1.4, label="most frequent answer"
    )
    if row["paper"] is not None:
        axes.plot(
            x - 0.42, row["paper"], marker=">", color=ORANGE, markersize=8, linestyle="",
            label="paper (Llama-3)", clip_on=False, zorder=4,
        )  # fmt: skip


def _tell(axes: Axes, x: float, y: float, value: float) -> None:
    axes.annotate(
        f"{value:.0%}", (x, y), xytext=(0, 3), textcoords="offset points",
        ha="center", va="bottom", fontsize=8.5, color=INK, zorder=5,
        bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.6, "alpha": 0.85},
    )  # fmt: skip


def _percent(value: float | None, std: float | None = None) -> str:
    if value is None:
        return ""
    return f"{value:.0%}" if std is None else f"{100 * value:.0f} ± {100 * std:.0f}%"


def _points(value: float | None) -> str:
    return "" if value is None else f"{100 * value:+.0f}"
