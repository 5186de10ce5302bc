"""Numbers of pairs as matrices over sources and targets: tables and heat maps."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from lincorr_lightning.results.results import Figure
from lincorr_lightning.results.table import Table, number

if TYPE_CHECKING:
    from matplotlib.figure import Figure as MatplotlibFigure
    from pandas import DataFrame


def pair_matrices(
    scores: Sequence[Any], caption_end: str, title_end: str, note: str
) -> Iterator[tuple[Table, Figure]]:
    """Yield table and heat map of each `pair_number` that has a matrix and is known for some pair.

    They have a row per source and a column per target. `scores` are records of one class with
    ``source``, ``target`` and the numbers; a figure's caption and title begin with what it shows.
    """
    from pandas import Series

    names = dict.fromkeys(name for score in scores for name in (score.source, score.target))
    sources, targets = {score.source for score in scores}, {score.target for score in scores}
    rows, columns = ([name for name in names if name in side] for side in (sources, targets))
    for one in fields(scores[0]):
        about = one.metadata
        if not about.get("matrix"):
            continue
        values = {(s.source, s.target): number(getattr(s, one.name)) for s in scores}
        if any(value is not None for value in values.values()):
            frame = Series(values, dtype="float64").unstack().reindex(index=rows, columns=columns)
            name, shows = f"{about['matrix']}_matrix", about["caption"]
            cells = frame.rename_axis("source").reset_index()
            draw = partial(_draw, frame, shows + title_end, note, about)
            yield (
                Table(name, cells, shows, formats=dict.fromkeys(columns, ".2f")),
                Figure(name, shows + caption_end, draw),
            )


def _draw(frame: DataFrame, title: str, note: str, about: Mapping[str, Any]) -> MatplotlibFigure:
    # matplotlib takes long to import, and not every run draws.
    from lincorr_lightning.results.plots import correlation_heatmap

    highest = max(float(np.nanmax(np.abs(frame.to_numpy()))), 0.01)
    limits = -highest if about["is_signed"] else 0.0, highest
    return correlation_heatmap(frame, title, note, about["unit"], limits)
