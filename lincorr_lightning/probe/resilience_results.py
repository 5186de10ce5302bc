"""The results of the resilience study (paper, figures 8, 9, 19 to 21)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from statistics import fmean
from typing import TYPE_CHECKING, Any

import numpy as np

from lincorr_lightning.results.pair_matrix import matrix_table, pair_matrix
from lincorr_lightning.results.results import Figure, Results
from lincorr_lightning.results.table import Table, column, columns_of

if TYPE_CHECKING:
    from pandas import DataFrame

# Below this r a fraction of it means nothing.
_MIN_R = 0.2
_MATRICES = {
    "before": "The old map on the old LM",
    "after": "The old map on the new LM",
    "difference": "The old map on the new LM, minus on the old LM",
    "refitted": "A map fitted on the new LM itself",
    "kept": "Fraction of the refitted map's r that the old map keeps",
    "after_std": "The old map on the new LM, standard deviation of r over labels",
}


@dataclass(frozen=True)
class PairResilience:
    """How well an old map holds on a new LM; each r is a mean over labels, on held-out subjects.

    Attributes:
        source: Name of the source.
        target: Name of the target.
        before: r of the old map on the LM it was fitted on; None if that is not known.
        after: r of the old map on the new LM.
        difference: `after` minus `before`.
        refitted: r on the new LM of a map fitted on it.
        kept: `after` as a fraction of `refitted`; None where that is close to zero.
        after_std: Standard deviation of `after` over labels.
        n_labels: Number of target labels.
    """

    source: str
    target: str
    before: float | None = column(format=".2f")
    after: float | None = column(format=".2f")
    difference: float | None = column(format=".2f")
    refitted: float | None = column(format=".2f")
    kept: float | None = column(format=".2f")
    after_std: float | None = None
    n_labels: int = 0

    @classmethod
    def of(
        cls, source: str, target: str, before: float | None, after: float | None,
        refitted: float | None, after_std: float | None, n_labels: int,
    ) -> PairResilience:  # fmt: skip
        """Add what follows from the three r."""
        difference = None if before is None or after is None else after - before
        is_small = refitted is None or refitted < _MIN_R
        kept = None if after is None or is_small else after / refitted  # type: ignore[operator]
        return cls(source, target, before, after, difference, refitted, kept, after_std, n_labels)


def resilience_results(
    pairs: Sequence[PairResilience],
    *,
    lm: str,
    lm_before: str,
    n_fit: int,
    n_test: int,
    dtypes: Mapping[str, str],
    warning: str | None,
) -> Results:
    """Build the results of the resilience study."""
    _, _, shown = columns_of(PairResilience)
    mean = {name: _mean([getattr(pair, name) for pair in pairs]) for name in shown}
    matrices = {
        name: pair_matrix({(pair.source, pair.target): getattr(pair, name) for pair in pairs})
        for name in _MATRICES
        if mean.get(name, True) is not None
    }
    return Results(
        study="resilience",
        values={
            "lm_before": lm_before, "dtypes": dict(dtypes), "warning": warning, "n_fit": n_fit,
            "n_test": n_test, "mean": mean, "pairs": [asdict(pair) for pair in pairs],
        },
        scalars={f"test/{name}": v for name, v in mean.items() if v is not None},
        tables=[
            Table.of(
                "summary",
                [
                    {"pair": f"{pair.source}->{pair.target}", **asdict(pair)}
                    for pair in sorted(pairs, key=lambda p: np.inf if p.kept is None else p.kept)
                ],
                ["pair", *shown],
                f"Label-wise r of the old maps on {n_test:,} held-out subjects",
                "By the fraction of the refitted map's r that the old map keeps. "
                f"{warning or ''}".strip(),
                headline=True,
                formats=shown,
            ),
            Table.of("pairs", pairs, PairResilience, "Scores of every pair", formats={}),
            *(matrix_table(m, f"{name}_matrix", _MATRICES[name]) for name, m in matrices.items()),
        ],
        figures=list(_figures(matrices, lm_before, lm, n_fit, n_test)),
    )  # fmt: skip


def _figures(
    matrices: Mapping[str, DataFrame], lm_before: str, lm: str, n_fit: int, n_test: int
) -> Iterator[Figure]:
    # matplotlib takes long to import, and not every run draws.
    from lincorr_lightning.results.heat_maps import correlation_heatmap
    from lincorr_lightning.results.style import short_name

    note = (
        f"map of {short_name(lm_before)}, on {short_name(lm)}; {n_test:,} held-out subjects; "
        f"refitted on {n_fit:,}"
    )
    for name, matrix in matrices.items():
        what, label, least = _MATRICES[name], "label-wise Pearson r", ""
        options: dict[str, Any] = {}
        if name == "kept":
            label, least = "fraction of r", f"; pairs with a refitted r of {_MIN_R:g} or more"
        elif name == "after_std":
            label = "standard deviation of r"
            options = {"limit": max(float(np.nan_to_num(matrix.to_numpy()).max()), 0.01)}
        yield Figure(
            f"{name}_matrix",
            f"{what}: label-wise correlation of every ordered pair.",
            partial(correlation_heatmap, matrix, what, note + least, label, **options),
        )


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return fmean(known) if known else None
