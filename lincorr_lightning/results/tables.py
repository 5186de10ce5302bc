"""Tables of W and of scores, as rows for CSV and as Markdown."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

INFLUENCE_COLUMNS = ("direction", "label", "rank", "token", "weight", "right")


class Influence(NamedTuple):
    """One of the highest weights of a label.

    Attributes:
        direction: ``influenced``: `label` is a source and `token` a target that it moves;
            ``influencing``: `label` is a target and `token` a source that moves it.
        label: The label asked about.
        rank: 1 for the highest weight.
        token: The label at the other end.
        weight: W between the two.
        right: Whether the two belong together in the world; None where nobody has said so.
    """

    direction: str
    label: str
    rank: int
    token: str
    weight: float
    right: bool | None


def top_influences(
    weight: npt.NDArray[np.floating[Any]],
    source_labels: Sequence[str],
    target_labels: Sequence[str],
    n: int = 5,
    right: npt.NDArray[np.bool_] | None = None,
) -> list[Influence]:
    """The highest weights of every label, both ways.

    Args:
        weight: W, ``(n_target_labels, n_source_labels)``.
        source_labels: Its columns.
        target_labels: Its rows.
        n: How many a label.
        right: Which pairs of labels belong together, shaped like W.

    Returns:
        Influenced targets of every source label, then influencing sources of every target label.

    Example:
        >>> w = np.array([[0.9, 0.1], [0.2, 0.7]])
        >>> [row[1:5] for row in top_influences(w, ["Paris", "Rome"], ["France", "Italy"], n=1)]
        ... # doctest: +NORMALIZE_WHITESPACE
        [('Paris', 1, 'France', 0.9), ('Rome', 1, 'Italy', 0.7),
         ('France', 1, 'Paris', 0.9), ('Italy', 1, 'Rome', 0.7)]
    """
    rows: list[Influence] = []
    ways = (
        ("influenced", source_labels, target_labels, weight.T, None if right is None else right.T),
        ("influencing", target_labels, source_labels, weight, right),
    )
    for direction, labels, tokens, matrix, known in ways:
        order = np.argsort(-matrix, axis=1, kind="stable")[:, :n]
        for i, label in enumerate(labels):
            for rank, j in enumerate(order[i], start=1):
                # A label without any reference is not wrong: nobody knows.
                judged = None if known is None or not known[i].any() else bool(known[i, j])
                rows.append(
                    Influence(direction, label, rank, tokens[j], float(matrix[i, j]), judged)
                )
    return rows


def influence_markdown(rows: Iterable[Influence], limit: int = 25) -> str:
    """Top influences as two Markdown tables, a line a label; right ones are bold and ticked.

    Args:
        rows: What `top_influences` found.
        limit: How many labels each table shows: those with the highest weights.
    """
    parts = []
    kept = list(rows)
    for direction, heading in (
        ("influenced", "source label → targets it moves most"),
        ("influencing", "target label ← sources that move it most"),
    ):
        lines: dict[str, list[Influence]] = {}
        for row in kept:
            if row.direction == direction:
                lines.setdefault(row.label, []).append(row)
        best = sorted(lines.items(), key=lambda line: -line[1][0].weight)[:limit]
        cells = [(escape(label), ", ".join(map(_influence, line))) for label, line in best]
        note = "" if len(best) == len(lines) else f" ({len(best)} of {len(lines)} labels)"
        parts.append(_table((heading + note, "W"), cells))
    return "\n\n".join(parts)


def _influence(row: Influence) -> str:
    text = f"{escape(row.token)} {row.weight:.2f}"
    return f"**{text} ✓**" if row.right else text


def markdown_table(columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    r"""A Markdown table; numbers get three decimals, None an empty cell.

    Args:
        columns: Names of the columns.
        rows: Cells of each row.

    Example:
        >>> print(markdown_table(["pair", "r"], [["city->country", 0.98765], ["a|b", None]]))
        | pair | r |
        | --- | --- |
        | city-\>country | 0.988 |
        | a\|b |  |
    """
    return _table([escape(c) for c in columns], ([_cell(cell) for cell in row] for row in rows))


def _table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _cell(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, (float, np.floating)):
        return f"{value:.3f}"
    return escape(str(value))


def escape(text: str) -> str:
    r"""Text of which Markdown makes nothing.

    Example:
        >>> escape("*a_b*")
        '\\*a\\_b\\*'
    """
    return re.sub(r"([\\`*_\[\]<>|~#$])", r"\\\1", re.sub(r"\s+", " ", text))


def label_wise_rows(
    pair: str, labels: Sequence[str], r: npt.NDArray[np.floating[Any]]
) -> Iterator[tuple[str, str, float | None]]:
    """Pair, target label and label-wise r of each target label; None where it is constant.

    Args:
        pair: As ``city->country``.
        labels: The target's labels, ``(n_target_labels,)``.
        r: Their r, NaN where constant.
    """
    for label, value in zip(labels, r.tolist(), strict=True):
        yield pair, label, None if np.isnan(value) else value
