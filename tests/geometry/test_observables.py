"""Neighbors, overlaps, angles, shuffles and losses, against scipy, torch and loops."""

import numpy as np
import pytest
import torch
from scipy.spatial.distance import cdist
from scipy.stats import entropy as scipy_entropy

from lincorr_lightning.geometry.observables import (
    nearest_tokens,
    neighbor_angles,
    neighborhood_overlap,
    next_tokens,
    shuffle_blocks,
)
from tests.geometry.conftest import naive_distances, naive_neighborhoods, naive_overlap


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def with_copies() -> torch.Tensor:
    """Layers in which other tokens are copies, and one without."""
    hidden = normal(4, 150, 32)
    hidden[0] = hidden[0, torch.arange(150) % 20]
    hidden[1, 50:90] = hidden[1, :40]
    hidden[1, 149] = hidden[1, 0]
    hidden[3, 7] = hidden[3, 3]
    return hidden


def with_peaked_probabilities() -> torch.Tensor:
    """Next-token probabilities of which 80 are so alike that their products are equal."""
    logits = 2 * normal(1, 120, 300)
    logits[:, :80, 7] += 30
    return logits.softmax(-1)


CLUSTERS = normal(1, 40, 64)[:, torch.arange(400) % 40]
CLOUDS = {
    "normal": normal(3, 120, 48),
    "about a far point": normal(2, 300, 64) + 100 * normal(1, 1, 64, seed=1),
    "clustered": CLUSTERS + 1e-4 * normal(1, 400, 64, seed=1),
    "very clustered": CLUSTERS.double() + 1e-9 * normal(1, 400, 64, seed=1),
    "peaked probabilities": with_peaked_probabilities(),
    "line": normal(2, 300, 1),
    "float64 about a far point": normal(2, 200, 3).double() + 1e6,
    "bfloat16": normal(2, 200, 32).bfloat16(),
    "grid": (3 * normal(2, 300, 3)).round(),  # distances that are exactly equal, and copies
    "copies": with_copies(),
    "huge": 1e25 * normal(1, 100, 8),
    "tiny": 1e-25 * normal(1, 100, 8),
    "one point": torch.ones(1, 30, 4),
}


@pytest.mark.parametrize("name", CLOUDS)
def test_neighborhoods_are_the_naive_ones(name: str) -> None:
    hidden = CLOUDS[name]
    before = hidden.clone()
    near = nearest_tokens(hidden, max_rank=20).neighborhoods[..., :10].numpy()
    assert torch.equal(hidden, before)
    for tokens, found in zip(hidden, near, strict=True):
        distances = naive_distances(tokens)
        if name == "grid":  # any order of neighbors at one distance
            assert all(len(set(row)) == 10 for row in found)
            found = np.take_along_axis(distances, found, axis=1)
            np.testing.assert_array_equal(found, np.sort(distances, axis=1)[:, :10])
        else:
            np.testing.assert_array_equal(found, naive_neighborhoods(tokens, 10))


@pytest.mark.parametrize("name", CLOUDS)
def test_distances_are_those_between_distinct_tokens(name: str) -> None:
    hidden = CLOUDS[name]
    nearest = nearest_tokens(hidden, max_rank=20)
    for layer, tokens in enumerate(hidden.double().numpy()):
        first = np.sort(np.unique(tokens, axis=0, return_index=True)[1])
        np.testing.assert_array_equal(np.flatnonzero(nearest.distinct[layer]), first)
        distances = cdist(tokens, tokens[first])
        distances[distances == 0] = np.inf
        expected = np.full((len(tokens), 20), np.inf)
        expected[:, : len(first)] = np.sort(distances, axis=1)[:, :20]
        np.testing.assert_allclose(nearest.distances[layer], expected, rtol=2e-9)
        # Indices are those of the distances, and of first ones.
        there = nearest.indices[layer] >= 0
        np.testing.assert_array_equal(there, np.isfinite(expected))
        token = there.nonzero()[:, 0].numpy()
        other = nearest.indices[layer][there].numpy()
        assert set(other) <= set(first)
        direct = np.linalg.norm(tokens[token] - tokens[other], axis=1)
        np.testing.assert_allclose(nearest.distances[layer][there], direct, rtol=2e-9)


def test_layers_do_not_depend_on_each_other_nor_on_autocast() -> None:
    hidden = normal(6, 80, 16)
    hidden[5, 5] = hidden[5, 9]
    together = nearest_tokens(hidden, max_rank=8)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        for part in (slice(3), slice(3, 6)):
            alone = nearest_tokens(hidden[part], max_rank=8)
            for one, other in zip(together, alone, strict=True):
                assert torch.equal(one[part], other)


@pytest.mark.parametrize("name", ["normal", "copies", "bfloat16"])
def test_overlap_is_the_naive_count(name: str) -> None:
    hidden = CLOUDS[name]
    mixed = hidden + 0.3 * hidden.roll(1, 0)
    ks = (1, 2, 5, 31)
    near_a, near_b = (nearest_tokens(x, max_rank=31).neighborhoods for x in (hidden, mixed))
    found = neighborhood_overlap(near_a, near_b, ks).mean(1)
    expected = [[naive_overlap(a, b, k) for k in ks] for a, b in zip(hidden, mixed, strict=True)]
    np.testing.assert_allclose(found, expected, rtol=1e-12)
    assert 0 < found.mean() < 1


@pytest.mark.parametrize("name", ["normal", "copies", "clustered", "line"])
def test_angles_are_those_between_differences(name: str) -> None:
    hidden = CLOUDS[name]
    found = neighbor_angles(hidden, nearest_tokens(hidden, max_rank=4))
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


# -- prompts ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("level", [0, 1, 3])
def test_blocks_change_places_and_stay_whole(level: int) -> None:
    order = shuffle_blocks(64, level, [3, 1]).numpy()
    blocks = order.reshape(4**level, -1)
    assert sorted(order) == list(range(64))
    assert (np.diff(blocks, axis=1) == 1).all()
    assert (blocks[:, 0] % (64 // 4**level) == 0).all()
    assert (order == np.arange(64)).all() == (level == 0)


def test_each_prompt_has_an_order_of_its_own_everywhere() -> None:
    seeds = [[s, n, 3] for s in (0, 1) for n in range(50)]
    assert len({tuple(shuffle_blocks(64, 3, seed).tolist()) for seed in seeds}) == 100
    again = shuffle_blocks(64, 3, [0, 7, 3])
    with torch.random.fork_rng():
        torch.manual_seed(1)
        assert torch.equal(again, shuffle_blocks(64, 3, [0, 7, 3]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_loss_and_entropy(dtype: torch.dtype) -> None:
    logits = (normal(3, 10, 20) * 4).to(dtype)
    logits[0, 0, 5] = -torch.inf
    tokens = torch.randint(20, (3, 10), generator=torch.Generator().manual_seed(0))
    tokens[0, 1] = 4
    loss, entropy = next_tokens(logits, tokens)
    expected = torch.nn.functional.cross_entropy(
        logits[:, :-1].double().flatten(0, 1), tokens[:, 1:].flatten(), reduction="none"
    )
    assert torch.allclose(loss.flatten(), expected, atol=1e-5)
    p = logits.double().softmax(-1).numpy()
    assert entropy.numpy() == pytest.approx(scipy_entropy(p, axis=-1), abs=1e-5)
    assert loss.dtype == entropy.dtype == torch.float64
