"""Matching and transitions against numpy, scipy and a search through all permutations."""

from itertools import permutations

import numpy as np
import pytest
import torch
from scipy.optimize import linear_sum_assignment

from lincorr_lightning.flow.graph import assign_features, match_features
from lincorr_lightning.flow.text_statistics import (
    carry_features,
    explained_variance,
    transition_matrix,
)


def _decoders(n_targets: int = 37, n_sources: int = 53, width: int = 11) -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    return [
        rng.normal(size=(n, width)).astype(np.float32) * rng.uniform(0.1, 9, (n, 1))
        for n in (n_targets, n_sources)
    ]


def _cosines(targets: np.ndarray, sources: np.ndarray) -> np.ndarray:
    rows = [
        [float(t @ s / (np.linalg.norm(t) * np.linalg.norm(s))) for s in sources] for t in targets
    ]
    return np.array(rows)


@pytest.mark.parametrize("k", [1, 5])
@pytest.mark.parametrize("tile", [1, 200, 2**24])
def test_the_most_similar_whatever_the_tile(
    k: int, tile: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lincorr_lightning.flow.graph._TILE_SIZE", tile)
    targets, sources = _decoders()
    cosines = _cosines(targets, sources)
    order = np.argsort(-cosines, axis=1)[:, :k]
    before = targets.copy(), sources.copy()
    matches = match_features(torch.from_numpy(targets), torch.from_numpy(sources), k)
    np.testing.assert_array_equal(matches.indices, order)
    np.testing.assert_allclose(matches.cosines, np.take_along_axis(cosines, order, 1), atol=1e-6)
    np.testing.assert_array_equal(before[0], targets)
    np.testing.assert_array_equal(before[1], sources)


def test_half_precision_is_compared_in_single() -> None:
    targets, sources = (torch.from_numpy(d).bfloat16() for d in _decoders())
    matches = match_features(targets, sources, 3)
    exact = match_features(targets.double(), sources.double(), 3)
    assert torch.equal(matches.indices, exact.indices)
    torch.testing.assert_close(matches.cosines, exact.cosines)


def test_columns_of_zero_norm_are_counted_and_left_out() -> None:
    targets, sources = map(torch.from_numpy, _decoders(6, 9))
    targets[[1, 4]] = 0
    sources[[0, 3, 8]] = 0
    matches = match_features(targets, sources, 2)
    assert matches.indices[[1, 4]].tolist() == [[-1, -1], [-1, -1]]
    assert matches.cosines[[1, 4]].isnan().all()
    kept_t, kept_s = [0, 2, 3, 5], [1, 2, 4, 5, 6, 7]
    cosines = _cosines(targets[kept_t].numpy(), sources[kept_s].numpy())
    order = np.argsort(-cosines, axis=1)[:, :2]
    np.testing.assert_array_equal(matches.indices[kept_t], np.array(kept_s)[order])


@pytest.mark.parametrize("n_alive", [0, 2])
def test_fewer_sources_than_k(n_alive: int) -> None:
    targets, sources = map(torch.from_numpy, _decoders(4, 6))
    sources[n_alive:] = 0
    matches = match_features(targets, sources, 3)
    assert (matches.indices[:, n_alive:] == -1).all() and matches.cosines[:, n_alive:].isnan().all()
    assert (matches.indices[:, :n_alive] >= 0).all()


@pytest.mark.parametrize(("n_targets", "n_sources"), [(40, 40), (30, 45), (45, 30)])
def test_assignment_equals_scipy(n_targets: int, n_sources: int) -> None:
    targets, sources = _decoders(n_targets, n_sources)
    cosines = _cosines(targets, sources)
    rows, columns = linear_sum_assignment(-cosines)
    found = assign_features(torch.from_numpy(targets), torch.from_numpy(sources))
    expected = np.full(n_targets, -1)
    expected[rows] = columns
    np.testing.assert_array_equal(found.indices[:, 0], expected)
    np.testing.assert_allclose(found.cosines[rows, 0], cosines[rows, columns], atol=1e-6)
    assert found.cosines.isnan().sum() == n_targets - len(rows)


def test_assignment_is_the_best_permutation_and_leaves_zero_columns_out() -> None:
    targets, sources = _decoders(6, 6)
    cosines = _cosines(targets, sources)
    best = max(permutations(range(6)), key=lambda p: sum(cosines[i, j] for i, j in enumerate(p)))
    found = assign_features(torch.from_numpy(targets), torch.from_numpy(sources))
    assert tuple(found.indices[:, 0].tolist()) == best
    zero = np.zeros((1, 11), np.float32)
    padded = [torch.from_numpy(np.concatenate([zero, d])) for d in (targets, sources)]
    found = assign_features(*padded)
    assert found.indices[:, 0].tolist() == [-1, *(j + 1 for j in best)]


@pytest.mark.parametrize("k", [1, 3])
def test_transition_is_the_indicator_of_the_top_k(k: int) -> None:
    targets, sources = _decoders()
    cosines = _cosines(targets, sources)
    indicator = np.zeros((53, 37), np.float32)
    for target in range(37):
        for source in np.argsort(-cosines[target])[:k]:
            indicator[source, target] = 1
    matches = match_features(torch.from_numpy(targets), torch.from_numpy(sources), k)
    transition = transition_matrix(matches.indices, 53)
    np.testing.assert_array_equal(transition.to_dense(), indicator)
    features = torch.rand(8, 53)
    carried = features @ torch.from_numpy(indicator)
    torch.testing.assert_close(carry_features(features, transition), carried)
    torch.testing.assert_close(carry_features(features, transition.to_dense()), carried)


def test_transition_leaves_out_what_has_no_match() -> None:
    transition = transition_matrix(torch.tensor([[-1], [2]]), 3)
    assert transition.to_dense().tolist() == [[0.0, 0.0], [0.0, 0.0], [0.0, 1.0]]
    with pytest.raises(RuntimeError, match="size is 3 but found index 3"):
        transition_matrix(torch.tensor([[3]]), 3)


def test_a_permuted_decoder_is_a_perfect_transcoder() -> None:
    """Features of one hook point written with another's order come out as its activations."""
    generator = torch.Generator().manual_seed(0)
    target = torch.nn.functional.normalize(torch.randn(40, 64, generator=generator), dim=1)
    order = torch.randperm(40, generator=generator)
    source = target[order]
    features = torch.rand(200, 40, generator=generator) * (
        torch.rand(200, 40, generator=generator) < 0.1
    )
    true = features @ source
    for found in (match_features(target, source), assign_features(target, source)):
        carried = carry_features(features, transition_matrix(found.indices, 40))
        assert explained_variance(true, carried @ target) == pytest.approx(1)
    wrong = carry_features(features, transition_matrix(torch.arange(40)[:, None], 40)) @ target
    x, y = true.numpy().astype(float), wrong.numpy().astype(float)
    by_hand = 1 - np.square(x - y).sum() / (x.var(axis=0) * len(x)).sum()
    assert explained_variance(true, wrong) == pytest.approx(by_hand)
    assert np.isnan(explained_variance(torch.ones(3, 2), torch.ones(3, 2)))
