"""A probe's report over three knowledges, one pair of which has a reference."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from lincorr_lightning.probe.results import PairScore, ProbeReport
from lincorr_lightning.probe.ridge_path import RidgePoint

LABELS = {
    "city": ["Paris", "Rome", "Lyon", "a|b *c*"],
    "country": ["France", "Italy"],
    "X/2": ["1", "2", "3"],
}
RATES = {"1": 0.5, "3": 1.0, "5": 1.0, "n": 3}


def build_report(**changes: Any) -> ProbeReport:
    rng = np.random.default_rng(0)
    pairs = []
    for i, source in enumerate(LABELS):
        for j, target in enumerate(LABELS):
            if source == target:
                continue
            r = rng.uniform(-1, 1, len(LABELS[target]))
            r[0] = math.nan
            pairs.append(
                PairScore(
                    source=source, target=target, label_mean=float(np.nanmean(r)),
                    label_std=float(np.nanstd(r)), instance_mean=0.1 * i + 0.01 * j,
                    n_labels=len(r), n_constant_labels=1, permuted_label_mean=0.01,
                    control_label_mean=0.2, ridge=0.0, label_r=r,
                    precision={"influenced": RATES, "influencing": RATES | {"1": math.nan}}
                    if (source, target) == ("city", "country") else None,
                )
            )  # fmt: skip
    right = np.array([[True, False, True, False], [False, True, False, False]])
    values: dict[str, Any] = {
        "lm": "tiny-world", "n_fit": 100, "n_test": np.int64(50), "pairs": pairs,
        "ridge_path": {
            pair.name: [
                RidgePoint(ridge, 0.9 - ridge / 100, *[RATES if pair.precision else None] * 2)
                for ridge in (0.0, 1.0, 10.0)
            ]
            for pair in pairs
        },
        "weights": {
            p.name: rng.normal(size=(len(LABELS[p.target]), len(LABELS[p.source]))) for p in pairs
        },
        "labels": LABELS,
        "reference": {p.name: right if p.precision else None for p in pairs},
        "settings": {
            "ridge": 0.0, "control": "One day, {} saw a", "ridge_grid": None,
            "knowledges": ["city", "country"], "lm": {"name_or_path": "tiny-world"},
        },
    }  # fmt: skip
    return ProbeReport(**values | changes)


@pytest.fixture(scope="session")
def make_report() -> Callable[..., ProbeReport]:
    """Builds one, with other values where they are given."""
    return build_report


@pytest.fixture(scope="session")
def report() -> ProbeReport:
    return build_report()
