"""Figures of a reproduction: those of runs, and those over several LMs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial

import numpy as np
from pandas import DataFrame

from lincorr_lightning.knowledge import Catalogue
from lincorr_lightning.reproduce.items import after_run, probe_run
from lincorr_lightning.reproduce.lm_runs import LMRuns
from lincorr_lightning.results.heat_maps import correlation_heatmap
from lincorr_lightning.results.plots import curves
from lincorr_lightning.results.report.comparison import short_size
from lincorr_lightning.results.results import Figure
from lincorr_lightning.results.saved_run import SavedFigure
from lincorr_lightning.results.style import BLUE, GREY

ENGLISH = "en"


def figures_of_runs(lms: Sequence[LMRuns], run: str, name: str, place: str) -> list[SavedFigure]:
    """Return a figure of a run of each LM.

    Args:
        lms: The LMs.
        run: Name of the run.
        name: Name of the figure.
        place: Figure of the paper, for the caption.
    """
    return [
        replace(figure, caption=f"{place}, {lm.name}: {figure.caption}")
        for lm in lms
        for figure in (lm.runs[run].figures if run in lm.runs else ())
        if figure.name == name
    ]


def languages_figures(lms: Sequence[LMRuns]) -> Iterator[Figure]:
    """Yield the mean label-wise r between languages of each LM (figure 22)."""
    catalogue = Catalogue.load()
    for lm in lms:
        run = lm.runs.get(probe_run("cross_language"))
        cells: dict[tuple[str, str], list[float]] = {}
        for pair in run.values["pairs"] if run is not None else ():
            ends = tuple(catalogue[pair[end]].language for end in ("source", "target"))
            if pair["label_mean"] is not None:
                cells.setdefault((ends[0], ends[1]), []).append(float(pair["label_mean"]))
        if not cells:
            continue
        names = [ENGLISH, *sorted({end for pair in cells for end in pair} - {ENGLISH})]
        matrix = np.array(
            [[np.mean(cells.get((row, column), [np.nan])) for column in names] for row in names]
        )
        title = f"Mean label-wise r between languages in {lm.name}"
        note = "mean over kinds of knowledge; source in rows, target in columns"
        frame = DataFrame(matrix, names, names)
        draw = partial(correlation_heatmap, frame, title, note, value_label="Pearson r")
        yield Figure("languages", f"Figure 22, {lm.name}: {title}.", draw)


def resilience_over_sizes(lms: Sequence[LMRuns]) -> list[Figure]:
    """Return the mean r of the maps before and after post-training, by LM (figure 20)."""
    rows = []
    for lm in lms:
        run, probe = (lm.runs.get(name("attribute")) for name in (after_run, probe_run))
        if run is None or probe is None:
            continue
        before = {(p["source"], p["target"]): p["label_mean"] for p in probe.values["pairs"]}
        after = {(p["source"], p["target"]): p["after"] for p in run.values["pairs"]}
        both = [(before[pair], r) for pair, r in after.items() if None not in (before.get(pair), r)]
        if both:
            rows.append((lm.name, run.n_parameters or 0, *np.array(both, dtype=float).mean(0)))
    if len(rows) < 2:
        return []
    frame = DataFrame(rows, columns=["lm", "size", "before", "after"]).sort_values("size")
    frame["x"] = range(len(frame))
    names = [
        f"{lm}\n{short_size(size)}" for lm, size in zip(frame["lm"], frame["size"], strict=True)
    ]
    draw = partial(
        curves,
        frame.melt(["x"], ["before", "after"], "when", "r"), "x", "r", "when",
        title="Label-wise r after post-training", colours={"before": GREY, "after": BLUE},
        labels=("", "mean label-wise r"),
        each=lambda axes, *_: axes.set_xticks(range(len(names)), names, fontsize=8),
    )  # fmt: skip
    caption = (
        "Figure 20: mean label-wise r of attributes, before post-training and of the same maps "
        "after it."
    )
    return [Figure("resilience", caption, draw)]
