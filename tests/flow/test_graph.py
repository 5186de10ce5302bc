"""Matching against numpy, scipy and all permutations; planted flow graphs."""

from collections.abc import Callable
from itertools import permutations

import numpy as np
import pytest
import torch

from lincorr_lightning.errors import LincorrError
from lincorr_lightning.flow.graph import (
    DecoderMatcher,
    Edge,
    Feature,
    assign_features,
    match_features,
)
from lincorr_lightning.sae.hook_points import HookPoint
from tests.toys import toy_sae

N_LAYERS, N_FEATURES, WIDTH = 4, 120, 256


def matcher_of(decoders: dict[HookPoint, torch.Tensor], threshold: float = 0.4) -> DecoderMatcher:
    saes = {at: toy_sae(at, decoder) for at, decoder in decoders.items()}
    return DecoderMatcher(saes, threshold)


def _unit(vectors: np.ndarray) -> np.ndarray:
    return vectors / np.linalg.norm(vectors, axis=-1, keepdims=True)


def _noisy(direction: np.ndarray, noise: float, rng: np.random.Generator) -> np.ndarray:
    """A direction whose cosine to the given one is ``1 - noise``."""
    other = rng.normal(size=WIDTH)
    other -= (other @ direction) * direction
    cosine = 1 - noise
    return cosine * direction + np.sqrt(1 - cosine**2) * _unit(other)


def _plant(noise: float) -> tuple[DecoderMatcher, set[tuple[Feature, Feature]]]:
    """Every residual feature persists, is born from MLP or attention or nowhere, or is mixed."""
    rng = np.random.default_rng(0)
    decoders: dict[HookPoint, np.ndarray] = {}
    edges: set[tuple[Feature, Feature]] = set()
    for layer in range(N_LAYERS):
        sources = [HookPoint(layer, "mlp_out"), HookPoint(layer, "attention_out")]
        for at in sources:
            decoders[at] = _unit(rng.normal(size=(N_FEATURES, WIDTH)))
        if layer:
            sources.append(HookPoint(layer - 1, "residual"))
        stream = np.empty((N_FEATURES, WIDTH))
        # Each predecessor is used at most once: a permutation with gaps.
        order = {at: iter(rng.permutation(N_FEATURES)) for at in sources}
        for index in range(N_FEATURES):
            n_parts = rng.choice(4, p=[0.15, 0.45, 0.25, 0.15])
            parts = [sources[i] for i in rng.permutation(len(sources))[:n_parts]]
            ends = [Feature(at, int(next(order[at]))) for at in parts]
            direction = rng.normal(size=WIDTH) if not ends else np.zeros(WIDTH)
            for end in ends:
                direction = direction + decoders[end.hook_point][end.index]
            stream[index] = _noisy(_unit(direction), noise, rng)
            edges |= {(end, Feature(HookPoint(layer, "residual"), index)) for end in ends}
        decoders[HookPoint(layer, "residual")] = stream
    scaled = {
        at: decoder * rng.uniform(0.2, 5, (N_FEATURES, 1)) for at, decoder in decoders.items()
    }
    return matcher_of({at: torch.from_numpy(d).float() for at, d in scaled.items()}), edges


def _pairs(edges: tuple[Edge, ...]) -> set[tuple[Feature, Feature]]:
    return {(edge.source, edge.target) for edge in edges}


def _reached(edges: set[tuple[Feature, Feature]], start: Feature, end: int) -> set:
    """Edges that lead to (end 1) or from (end 0) a feature, by a search of its own."""
    reached: set[tuple[Feature, Feature]] = set()
    waiting = [start]
    while waiting:
        feature = waiting.pop()
        step = {edge for edge in edges if edge[end] == feature} - reached
        reached |= step
        waiting += [edge[1 - end] for edge in step]
    return reached


@pytest.mark.parametrize(("layer", "forward"), [(3, False), (0, True), (2, True)])
def test_a_whole_flow_is_the_planted_one(layer: int, forward: bool) -> None:
    """With little noise every ancestor and descendant is found, and nothing else."""
    matcher, planted = _plant(noise=0.02)
    longest = 0
    for index in range(30):
        start = Feature(HookPoint(layer, "residual"), index)
        graph = matcher.follow(start, forward)
        expected = _reached(planted, start, 1)
        if forward:
            expected |= _reached(planted, start, 0)
        assert _pairs(graph.edges) == expected
        assert set(graph.features) == {start} | {f for edge in expected for f in edge}
        longest = max(longest, len(expected))
    assert longest >= 3


BELOW, STREAM, MLP = HookPoint(0, "residual"), HookPoint(1, "residual"), HookPoint(1, "mlp_out")


def test_the_threshold_holds_in_both_directions_and_for_the_cosine() -> None:
    decoders = {
        BELOW: torch.tensor([[1.0, 0.0]]),
        STREAM: torch.tensor([[1.0, 2.0]]),
        MLP: torch.tensor([[0.0, 3.0]]),
    }
    matcher = matcher_of(decoders, threshold=0.8)
    start = Feature(STREAM, 0)
    graph = matcher.follow(start)
    assert graph.edges == (Edge(Feature(MLP, 0), start, pytest.approx(2 / 5**0.5)),)
    assert not matcher.follow(Feature(BELOW, 0)).edges
    assert _pairs(matcher.follow(Feature(MLP, 0)).edges) == {(Feature(MLP, 0), start)}
    assert len(matcher_of(decoders).follow(start).edges) == 2


def test_zero_columns_are_never_followed() -> None:
    below = torch.eye(3)
    below[1] = 0
    matcher = matcher_of({BELOW: below, STREAM: torch.eye(3)})
    assert not matcher.follow(Feature(STREAM, 1)).edges
    with pytest.raises(LincorrError, match=r"feature 1 .* decoder row is zero"):
        matcher.follow(Feature(BELOW, 1))


MATCHER = matcher_of({at: torch.eye(3) for at in (BELOW, STREAM)})


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: MATCHER.follow(Feature(MLP, 0)), "no SAE for the mlp_out of layer 1; there"),
        (lambda: MATCHER.follow(Feature(STREAM, 3)), "no feature 3; it has 3, counted from 0"),
        (lambda: MATCHER.follow(Feature(STREAM, -1)), "no feature -1; it has 3"),
        (
            lambda: matcher_of({HookPoint(i, "residual"): torch.eye(3) for i in (0, 2)}),
            "residual of layer 1, between",
        ),
        (lambda: HookPoint(0, "mlp"), "no mlp of layer 0: .* kinds of hook points"),
    ],
)
def test_invalid_input_is_refused(call: Callable[[], object], message: str) -> None:
    with pytest.raises(LincorrError, match=message):
        call()


# -- matching -------------------------------------------------------------------------------------


def _decoders(n_targets: int = 37, n_sources: int = 53) -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    return [
        rng.normal(size=(n, 11)).astype(np.float32) * rng.uniform(0.1, 9, (n, 1))
        for n in (n_targets, n_sources)
    ]


def _cosines(targets: np.ndarray, sources: np.ndarray) -> np.ndarray:
    return _unit(targets) @ _unit(sources).T


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
    matches = match_features(targets, sources, 11)  # more than there are
    assert matches.indices.shape == (6, 9)
    assert (matches.indices[[1, 4]] == -1).all() and (matches.indices[:, 6:] == -1).all()
    torch.testing.assert_close(matches.cosines.isnan(), matches.indices == -1)
    kept_t, kept_s = [0, 2, 3, 5], [1, 2, 4, 5, 6, 7]
    order = np.argsort(-_cosines(targets[kept_t].numpy(), sources[kept_s].numpy()), axis=1)
    np.testing.assert_array_equal(matches.indices[kept_t, :6], np.array(kept_s)[order])


@pytest.mark.parametrize("n_sources", [6, 8])
def test_assignment_is_the_best_permutation_and_leaves_zero_columns_out(n_sources: int) -> None:
    targets, sources = _decoders(6, n_sources)
    cosines = _cosines(targets, sources)
    orders = permutations(range(n_sources), 6)
    best = max(orders, key=lambda p: sum(cosines[i, j] for i, j in enumerate(p)))
    zero = np.zeros((1, 11), np.float32)
    padded = [torch.from_numpy(np.concatenate([zero, d])) for d in (targets, sources)]
    assert assign_features(*padded)[:, 0].tolist() == [-1, *(j + 1 for j in best)]
