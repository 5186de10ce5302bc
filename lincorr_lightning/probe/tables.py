"""Which tables a probe leaves behind."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from lincorr_lightning.probe.ranking import RANKING, ranking
from lincorr_lightning.results.numbers import Rates, number, rates_as_json
from lincorr_lightning.results.tables import INFLUENCE_COLUMNS, label_wise_rows

if TYPE_CHECKING:
    from lincorr_lightning.probe.results import ProbeReport

# A run over all knowledges has thousands of pairs with a reference.
_MOST_INFLUENCE_TABLES = 100
_HITS = ("1", "3", "5")


def tables_of(
    report: ProbeReport,
) -> Iterator[tuple[str, Sequence[str], Iterable[Sequence[Any]]]]:
    """Name, columns and rows of every table of a probe.

    Args:
        report: What the probe found.
    """
    nested = ("precision", "completeness")
    plain = [column for column in report.pairs[0].results() if column not in nested]
    hits = [f"{way}_{n}" for way in ("influenced", "influencing") for n in (*_HITS, "n")]
    yield (
        "pairs",
        (*plain, *hits),
        (
            [*(score.results()[column] for column in plain), *_hits(score.precision)]
            for score in report.pairs
        ),
    )
    yield (
        "label_wise",
        ("pair", "label", "r"),
        (
            row
            for score in report.pairs
            for row in label_wise_rows(score.name, report.labels[score.target], score.label_r)
        ),
    )
    for name, value in (
        ("correlation_matrix", lambda score: score.label_mean),
        ("std_matrix", lambda score: score.label_std),
        ("instance_matrix", lambda score: score.instance_mean),
        ("permuted_matrix", lambda score: score.permuted_label_mean),
        ("control_matrix", lambda score: score.control_label_mean),
    ):
        sources, targets, matrix = report.matrix(value)
        if not np.isnan(matrix).all() or name == "correlation_matrix":
            yield (
                name,
                ("source", *targets),
                (
                    [source, *map(number, row)]
                    for source, row in zip(sources, matrix.tolist(), strict=True)
                ),
            )
    if report.ridge_path:
        yield (
            "ridge_path",
            ("pair", "ridge", "label_mean", *hits),
            (
                (
                    pair,
                    number(point.ridge),
                    number(point.label_mean),
                    *_hits({"influenced": point.influenced, "influencing": point.influencing}),
                )
                for pair, path in report.ridge_path.items()
                for point in path
            ),
        )
    if any(score.p is not None for score in report.pairs):
        yield (
            "ties",
            RANKING,
            (
                [rank, *(score.results()[column] for column in RANKING[1:])]
                for rank, score in enumerate(ranking(report.pairs), start=1)
            ),
        )
    if any(score.completeness for score in report.pairs):
        yield (
            "completeness",
            ("pair", "completeness", "n_labels", "label_mean", *hits[: len(_HITS) + 1]),
            (
                [score.name, kind, one.n_labels, number(one.label_mean),
                 *_hits({"influenced": one.influenced})[: len(_HITS) + 1]]
                for score in report.pairs
                for kind, one in score.completeness.items()
            ),
        )  # fmt: skip
    if report.compositions:
        columns = list(report.compositions[0].results())
        yield (
            "transitivity",
            columns,
            ([one.results()[c] for c in columns] for one in report.compositions),
        )
    yield (
        "influences",
        ("pair", *INFLUENCE_COLUMNS),
        (
            (score.name, *row)
            for score in report.notable(_MOST_INFLUENCE_TABLES)
            for row in report.influences(score)
        ),
    )


def _hits(precision: Mapping[str, Rates | None] | None) -> list[Any]:
    cells: list[Any] = []
    for way in ("influenced", "influencing"):
        rates = (precision or {}).get(way)
        cells += [None] * (len(_HITS) + 1) if rates is None else rates_as_json(rates).values()
    return cells
