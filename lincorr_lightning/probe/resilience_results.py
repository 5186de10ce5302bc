"""The results of the resilience study (paper, figures 8, 9, 19 to 21)."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from lincorr_lightning.results.pair_matrix import PairMatrix
from lincorr_lightning.results.results import Figure, Results
from lincorr_lightning.results.table import Column, Table

# Below this r a fraction of it means nothing.
_MIN_R = 0.2
_COLUMNS = ("before", "after", "difference", "refitted", "kept")
_KEYS = ("source", "target", *_COLUMNS, "after_std", "n_labels")
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
        refitted: r on the new LM of a map fitted on it.
        after_std: Standard deviation of `after` over labels.
        n_labels: Number of target labels.
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
        """`after` minus `before`."""
        return None if self.before is None or self.after is None else self.after - self.before

    @property
    def kept(self) -> float | None:
        """`after` as a fraction of `refitted`; None where that is close to zero."""
        if self.after is None or self.refitted is None or self.refitted < _MIN_R:
            return None
        return self.after / self.refitted

    def to_json(self) -> dict[str, Any]:
        """Return the entry of the pair in ``results.json``."""
        return {key: getattr(self, key) for key in _KEYS}


def resilience_results(
    pairs: Sequence[PairResilience],
    *,
    lm_before: str,
    n_fit: int,
    n_test: int,
    dtypes: Mapping[str, str],
    warning: str | None,
    lm: Mapping[str, Any],
    settings: Mapping[str, Any],
) -> Results:
    """Build the results of the resilience study."""
    entries = [pair.to_json() for pair in pairs]
    mean = {name: _mean([entry[name] for entry in entries]) for name in _COLUMNS}
    matrices = {
        name: PairMatrix.of({(e["source"], e["target"]): e[name] for e in entries})
        for name in _MATRICES
        if mean.get(name, True) is not None
    }
    return Results(
        study="resilience",
        values={
            "lm_before": lm_before, "dtypes": dict(dtypes), "warning": warning, "n_fit": n_fit,
            "n_test": n_test, "mean": mean, "pairs": entries,
        },
        scalars={f"test/{name}": v for name, v in mean.items() if v is not None},
        tables=[
            _summary(entries, n_test, warning),
            Table.from_dicts("pairs", entries, list(entries[0]), caption="Scores of every pair"),
            *(m.table(f"{name}_matrix", _MATRICES[name]) for name, m in matrices.items()),
        ],
        figures=list(_figures(matrices, lm_before, str(lm["name_or_path"]), n_fit, n_test)),
        lm=lm,
        settings=settings,
    )  # fmt: skip


def _summary(entries: Sequence[Mapping[str, Any]], n_test: int, warning: str | None) -> Table:
    """Return the summary table, with the pairs that keep least first."""
    ordered = sorted(entries, key=lambda e: math.inf if e["kept"] is None else e["kept"])
    return Table.from_dicts(
        "summary",
        [{"pair": f"{e['source']}->{e['target']}", **e} for e in ordered],
        [Column("pair"), *(Column(name, format=".2f") for name in _COLUMNS)],
        caption=f"Label-wise r of the old maps on {n_test:,} held-out subjects",
        note=" ".join(
            ["By the fraction of the refitted map's r that the old map keeps.", warning or ""]
        ).strip(),
        headline=True,
    )


def _figures(
    matrices: Mapping[str, PairMatrix],
    lm_before: str,
    lm: str,
    n_fit: int,
    n_test: int,
) -> Iterator[Figure]:
    # matplotlib takes long to import, and not every run draws.
    from lincorr_lightning.results.heat_maps import correlation_heatmap
    from lincorr_lightning.results.style import short_name

    note = (
        f"map of {short_name(lm_before)}, on {short_name(lm)}; {n_test:,} held-out subjects; "
        f"refitted on {n_fit:,}"
    )
    for name, (sources, targets, cells) in matrices.items():
        what, label, least = _MATRICES[name], "label-wise Pearson r", ""
        options: dict[str, Any] = {}
        if name == "kept":
            label, least = "fraction of r", f"; pairs with a refitted r of {_MIN_R:g} or more"
        elif name == "after_std":
            label = "standard deviation of r"
            options = {"limit": max(float(np.nan_to_num(cells).max()), 0.01)}
        yield Figure(
            f"{name}_matrix",
            f"{what}: label-wise correlation of every ordered pair.",
            partial(
                correlation_heatmap, cells, sources, targets, what, note + least, label, **options
            ),
        )


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return float(np.mean(known)) if known else None
