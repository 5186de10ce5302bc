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


def test_equals_the_naive_way_for_each_of_several_maps() -> None:
    rng = np.random.default_rng(0)
    weights = rng.normal(size=(4, 9, 14))
    right = rng.random((9, 14)) < 0.15
    influenced, influencing = hit_rates(torch.from_numpy(weights), torch.from_numpy(right))
    for g, weight in enumerate(weights):
        for i, n in enumerate((1, 3, 5)):
            for ours, (rate, count) in (
                (influenced, _naive(weight.T, right.T, n)),
                (influencing, _naive(weight, right, n)),
            ):
                assert float(ours.rates[g, i]) == pytest.approx(rate)
                assert ours.n == count


def test_a_row_of_zeros_is_no_hit() -> None:
    influenced, influencing = hit_rates(torch.zeros(6, 6), torch.eye(6, dtype=torch.bool))
    assert influenced.rates.tolist() == [0, 0, 0]
    assert influencing.rates.tolist() == [0, 0, 0]


def test_random_rates_are_those_of_weights_in_random_order() -> None:
    right = torch.from_numpy(np.random.default_rng(0).random((7, 12)) < 0.2)
    weights = torch.rand(5_000, 7, 12, generator=torch.Generator().manual_seed(0))
    for expected, found in zip(random_hit_rates(right), hit_rates(weights, right), strict=True):
        assert expected.rates.tolist() == pytest.approx(found.rates.mean(0).tolist(), abs=0.01)
        assert expected.n == found.n
