"""Neighbors, overlaps, angles and cosines against scipy and loops."""

import numpy as np
import pytest
import torch
from scipy.spatial.distance import cdist, pdist

from lincorr_lightning.errors import ConfigError
from lincorr_lightning.geometry.distances import nearest_tokens
from lincorr_lightning.geometry.neighborhoods import (
    consecutive_overlap,
    cosine_statistics,
    neighbor_angles,
    neighborhood_overlap,
    neighborhoods,
)


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def with_massive_token() -> torch.Tensor:
    hidden = normal(2, 200, 96)
    hidden[:, :, 5] *= 100
    hidden[:, 0] *= 1000
    return hidden


def clustered() -> torch.Tensor:
    """Forty clusters so tight that float32 products see a point in each."""
    return normal(1, 40, 64)[:, torch.arange(400) % 40] + 1e-4 * normal(1, 400, 64, seed=1)


def with_copies() -> torch.Tensor:
    """Layers in which other tokens are copies, and one without."""
    hidden = normal(4, 150, 32)
    hidden[0] = hidden[0, torch.arange(150) % 20]
    hidden[1, 50:90] = hidden[1, :40]
    hidden[1, 149] = hidden[1, 0]
    hidden[3, 7] = hidden[3, 3]
    return hidden


CLOUDS = {
    "one strip": normal(3, 120, 48),
    "many strips": normal(2, 700, 40),  # 512 tokens and more are multiplied in strips
    "wide": normal(1, 60, 9000),  # more columns than are taken at a time
    "about a far point": normal(2, 300, 64) + 100 * normal(1, 1, 64, seed=1),
    "massive token": with_massive_token(),
    "clustered": clustered(),
    "line": normal(2, 300, 1),
    "float64 about a far point": normal(2, 200, 3).double() + 1e6,
    "bfloat16": normal(2, 200, 32).bfloat16(),
    "grid": (3 * normal(2, 300, 3)).round(),  # distances that are exactly equal, and copies
    "copies": with_copies(),
    "huge": 1e25 * normal(1, 100, 8),
    "tiny": 1e-25 * normal(1, 100, 8),
    "one point": torch.ones(1, 30, 4),
}


def naive_distances(tokens: torch.Tensor) -> np.ndarray:
    distances = cdist(*[tokens.double().numpy()] * 2)
    np.fill_diagonal(distances, np.inf)
    return distances


def naive_neighborhoods(tokens: torch.Tensor, k: int) -> np.ndarray:
    return np.argsort(naive_distances(tokens), axis=1, kind="stable")[:, :k]


def naive_overlap(a: np.ndarray, b: np.ndarray, k: int) -> list[float]:
    return [len(set(x[:k]) & set(y[:k])) / k for x, y in zip(a, b, strict=True)]


@pytest.mark.parametrize("name", CLOUDS)
def test_neighborhoods_are_the_naive_ones(name: str) -> None:
    hidden = CLOUDS[name]
    before = hidden.clone()
    found = neighborhoods(nearest_tokens(hidden, max_rank=20, k=10), k=10)
    expected = np.stack([naive_neighborhoods(layer, 10) for layer in hidden])
    np.testing.assert_array_equal(found, expected)
    assert torch.equal(hidden, before)


@pytest.mark.parametrize("name", CLOUDS)
def test_distances_are_those_between_distinct_tokens(name: str) -> None:
    hidden = CLOUDS[name]
    nearest = nearest_tokens(hidden, max_rank=20, k=2)
    for layer, tokens in enumerate(hidden.double().numpy()):
        unique = np.unique(tokens, axis=0, return_index=True, return_inverse=True)
        first, group = unique[1], unique[2].ravel()  # numpy 2.0 gives a column
        np.testing.assert_array_equal(nearest.first[layer], first[group])
        distances = cdist(tokens, tokens[np.sort(first)])
        distances[np.arange(len(tokens)), np.searchsorted(np.sort(first), first[group])] = np.inf
        expected = np.full((len(tokens), 20), np.inf)
        expected[:, : len(first)] = np.sort(distances, axis=1)[:, :20]
        np.testing.assert_allclose(nearest.distances[layer], expected, rtol=5e-4)
        # Indices are those of the distances, and of first ones.
        there = nearest.indices[layer] >= 0
        np.testing.assert_array_equal(there, np.isfinite(expected))
        token, _ = there.nonzero(as_tuple=True)
        other = nearest.indices[layer][there].numpy()
        np.testing.assert_array_equal(nearest.first[layer][other], other)
        direct = np.linalg.norm(tokens[token.numpy()] - tokens[other], axis=1)
        np.testing.assert_allclose(nearest.distances[layer][there], direct, rtol=5e-4)
        assert (direct > 0).all()


def test_all_ranks_in_order_unless_k_is_given() -> None:
    hidden = CLOUDS["many strips"]
    nearest = nearest_tokens(hidden, max_rank=300)
    for layer in range(2):
        expected = naive_neighborhoods(hidden[layer], 300)
        np.testing.assert_array_equal(nearest.indices[layer], expected)


def test_prompts_in_one_batch_equal_each_prompt() -> None:
    hidden = normal(6, 80, 16).reshape(2, 3, 80, 16)
    hidden[1, 2, 5] = hidden[1, 2, 9]
    together = nearest_tokens(hidden, max_rank=8)
    assert together.indices.shape == (2, 3, 80, 8) and together.distinct.sum() == 6 * 80 - 1
    overlap = consecutive_overlap(together, ks=(2, 8))
    assert overlap.shape == (2, 2, 80, 2)
    for prompt in range(2):
        alone = nearest_tokens(hidden[prompt], max_rank=8)
        assert torch.equal(together.indices[prompt], alone.indices)
        assert torch.equal(overlap[prompt], consecutive_overlap(alone, ks=(2, 8)))


def test_reduced_precision_of_the_session_is_kept_out_and_left_alone() -> None:
    hidden = normal(2, 600, 64)
    expected = nearest_tokens(hidden, max_rank=8)
    torch.set_float32_matmul_precision("medium")
    try:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            found = nearest_tokens(hidden, max_rank=8)
            cosines = cosine_statistics(hidden)
        assert torch.get_float32_matmul_precision() == "medium"
    finally:
        torch.set_float32_matmul_precision("highest")
    assert torch.equal(found.indices, expected.indices)
    assert torch.equal(found.distances, expected.distances)
    assert torch.equal(cosines[1], cosine_statistics(hidden)[1])


@pytest.mark.parametrize("name", ["one strip", "copies", "grid", "bfloat16"])
def test_overlap_is_the_naive_count(name: str) -> None:
    hidden, ks = CLOUDS[name], (1, 2, 5, 31)
    mixed = hidden + 0.3 * hidden.roll(1, 0)
    near_a, near_b = (nearest_tokens(x, max_rank=31) for x in (hidden, mixed))
    found = neighborhood_overlap(neighborhoods(near_a, 31), neighborhoods(near_b, 31), ks)
    for layer in range(len(hidden)):
        a, b = (naive_neighborhoods(x[layer], 31) for x in (hidden, mixed))
        expected = [naive_overlap(a, b, k) for k in ks]
        np.testing.assert_array_equal(found[layer].T, expected)
    assert 0 < found.mean() < 1


@pytest.mark.parametrize("name", ["one strip", "copies", "clustered", "line"])
def test_angles_are_those_between_differences(name: str) -> None:
    hidden = CLOUDS[name]
    found = neighbor_angles(hidden, nearest_tokens(hidden, max_rank=4, k=2))
    for layer, tokens in enumerate(hidden.double().numpy()):
        distances = naive_distances(hidden[layer])
        _, first = np.unique(tokens, axis=0, return_index=True)
        distances[:, np.setdiff1d(np.arange(len(tokens)), first)] = np.inf
        distances[distances == 0] = np.inf
        one, two = np.argsort(distances, axis=1, kind="stable")[:, :2].T
        u, v = tokens[one] - tokens, tokens[two] - tokens
        lengths = np.linalg.norm(u, axis=1) * np.linalg.norm(v, axis=1)
        cosine = np.clip((u * v).sum(1) / lengths, -1, 1)
        np.testing.assert_allclose(found[layer], np.degrees(np.arccos(cosine)), atol=1e-5)


def test_a_straight_line_has_no_angle_but_0_and_180() -> None:
    line = torch.tensor([0.0, 1.0, 2.1, 3.3])[None, :, None] * normal(1, 1, 7)
    found = neighbor_angles(line, nearest_tokens(line, max_rank=2))
    np.testing.assert_allclose(found, [[0.0, 180.0, 180.0, 0.0]], atol=1e-4)


@pytest.mark.parametrize("name", ["one strip", "wide", "about a far point", "copies", "bfloat16"])
def test_cosines_are_those_of_all_pairs(name: str) -> None:
    hidden = CLOUDS[name]
    mean, std = cosine_statistics(hidden)
    for layer, tokens in enumerate(hidden.double().numpy()):
        cosines = 1 - pdist(tokens, "cosine")
        np.testing.assert_allclose(mean[layer], cosines.mean(), rtol=1e-6, atol=1e-7)
        np.testing.assert_allclose(std[layer], cosines.std(), rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize(
    ("leading", "named"), [((6,), "layer 4 "), ((2, 3), "layer 1 of prompt 1 ")]
)
def test_error_names_the_layer_with_nan_or_infinite_states(
    value: float, leading: tuple[int, ...], named: str
) -> None:
    hidden = normal(6, 30, 8)
    hidden[4, 7, 3] = value
    with pytest.raises(ValueError, match=f"{named}.*NaN or infinite"):
        nearest_tokens(hidden.reshape(*leading, 30, 8), max_rank=2)
    with pytest.raises(ValueError, match=f"token 7 of {named}.*no direction"):
        cosine_statistics(hidden.reshape(*leading, 30, 8))


def test_error_names_the_layer_with_states_too_large_to_be_squared() -> None:
    with pytest.raises(ValueError, match="layer 0 are too large to be squared"):
        nearest_tokens(1e200 * normal(1, 30, 8).double(), max_rank=2)


@pytest.mark.parametrize(
    ("hidden", "max_rank", "k", "message"),
    [
        (normal(1, 8, 4), 8, None, "8 neighbors need 9 tokens, but there are 8"),
        (normal(1, 8, 4), 4, 5, "k is 5; it must be at least 1 and at most 4"),
        (normal(1, 8, 4), 4, 0, "k is 0"),
        (normal(8, 4), 2, None, r"hidden states \(8, 4\)"),
        (torch.ones(1, 8, 4, dtype=torch.int64), 2, None, "torch.int64 must be floating-point"),
    ],
)
def test_clouds_without_neighbors_are_refused(
    hidden: torch.Tensor, max_rank: int, k: int | None, message: str
) -> None:
    with pytest.raises((ConfigError, ValueError), match=message):
        nearest_tokens(hidden, max_rank, k)


def test_neighborhoods_beyond_the_order_are_refused() -> None:
    nearest = nearest_tokens(normal(2, 20, 4), max_rank=8, k=3)
    with pytest.raises(ConfigError, match=r"k is 4; it must be at least 1 and at most 3"):
        neighborhoods(nearest, 4)
    with pytest.raises(ConfigError, match=r"k is 0; it must be at least 1 and at most 3"):
        consecutive_overlap(nearest, ks=(0, 3))
    with pytest.raises(ValueError, match="must be of one shape"):
        neighborhood_overlap(nearest.indices[0], nearest.indices[1, :5], ks=(1,))


def test_undefined_angles_and_cosines_are_refused() -> None:
    hidden = normal(2, 20, 4)
    with pytest.raises(ValueError, match="need two neighbors"):
        neighbor_angles(hidden, nearest_tokens(hidden, max_rank=1))
    with pytest.raises(ValueError, match="need two neighbors"):
        neighbor_angles(hidden[:1], nearest_tokens(hidden, max_rank=2))
    hidden[1, 2:] = hidden[1, 1]
    with pytest.raises(ValueError, match=r"layer 1 .*fewer than three distinct tokens"):
        neighbor_angles(hidden, nearest_tokens(hidden, max_rank=2))
    hidden[1, 4] = 0
    with pytest.raises(ValueError, match="token 4 of layer 1"):
        cosine_statistics(hidden)
    with pytest.raises(ValueError, match="at least two tokens"):
        cosine_statistics(hidden[:, :1])
