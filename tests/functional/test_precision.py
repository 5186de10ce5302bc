import numpy as np
import pytest
import torch

from lincorr_lightning.functional import hit_rates, random_hit_rates


def _naive(weight: np.ndarray, right: np.ndarray, n: int) -> tuple[float, int]:
    hits = []
    for row, allowed in zip(weight, right, strict=True):
        if allowed.any():
            best = np.argsort(-row, kind="stable")[:n]
            hits.append(bool(allowed[best].any()))
    return float(np.mean(hits)), len(hits)


def test_equals_the_naive_way() -> None:
    rng = np.random.default_rng(0)
    weight, right = rng.normal(size=(9, 14)), rng.random((9, 14)) < 0.15
    for w, r in ((weight.T, right.T), (weight, right)):
        found = hit_rates(*(torch.from_numpy(side.T) for side in (w, r)))
        for n in (1, 3, 5):
            assert (found[str(n)], found["n"]) == pytest.approx(_naive(w, r, n))


def test_a_row_of_zeros_is_no_hit() -> None:
    found = hit_rates(torch.zeros(6, 6), torch.eye(6, dtype=torch.bool))
    assert found == {"1": 0, "3": 0, "5": 0, "n": 6}
    nothing = hit_rates(torch.zeros(6, 6), torch.zeros(6, 6, dtype=torch.bool))
    assert nothing == {"1": None, "3": None, "5": None, "n": 0}


def test_random_rates_are_those_of_weights_in_random_order() -> None:
    right = torch.from_numpy(np.random.default_rng(0).random((7, 12)) < 0.2)
    weights = torch.rand(3_000, 7, 12, generator=torch.Generator().manual_seed(0))
    drawn = [hit_rates(weight, right) for weight in weights]
    expected = {key: np.mean([each[key] for each in drawn]) for key in drawn[0]}
    assert random_hit_rates(right) == pytest.approx(expected, abs=0.015)
