"""Matching and transitions against numpy, scipy and all permutations; planted flow graphs."""

import json
from collections import Counter
from collections.abc import Callable
from itertools import permutations
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
import torch
from scipy.optimize import linear_sum_assignment

from lincorr_lightning.errors import LincorrError, OutputError, SparseAutoencoderError
from lincorr_lightning.flow.graph import (
    GROUPS,
    DecoderMatcher,
    Edge,
    Feature,
    assign_features,
    match_features,
)
from lincorr_lightning.flow.results import write_graphs
from lincorr_lightning.flow.text_statistics import (
    TRANSITION_K,
    carried_features,
    measure_transitions,
)
from lincorr_lightning.sae.hook_points import HookPoint
from tests.toys import toy_sae

Planted = tuple[dict[HookPoint, torch.Tensor], set[tuple[Feature, Feature]]]

N_LAYERS, N_FEATURES, WIDTH = 4, 120, 256


def _unit(vectors: np.ndarray) -> np.ndarray:
    return vectors / np.linalg.norm(vectors, axis=-1, keepdims=True)


def _noisy(direction: np.ndarray, noise: float, rng: np.random.Generator) -> np.ndarray:
    """A direction whose cosine to the given one is ``1 - noise``."""
    other = rng.normal(size=WIDTH)
    other -= (other @ direction) * direction
    cosine = 1 - noise
    return cosine * direction + np.sqrt(1 - cosine**2) * _unit(other)


def _plant(noise: float, seed: int = 0) -> Planted:
    """Every residual feature persists, is born from MLP or attention or nowhere, or is mixed."""
    rng = np.random.default_rng(seed)
    decoders: dict[HookPoint, np.ndarray] = {}
    edges: set[tuple[Feature, Feature]] = set()
    for layer in range(N_LAYERS):
        sources = {HookPoint(layer, "mlp_out"): 0, HookPoint(layer, "attention_out"): 0}
        for hook_point in sources:
            decoders[hook_point] = _unit(rng.normal(size=(N_FEATURES, WIDTH)))
        if layer:
            sources[HookPoint(layer - 1, "residual")] = 0
        here = np.empty((N_FEATURES, WIDTH))
        # Each predecessor is used at most once: a permutation with gaps.
        order = {hook_point: iter(rng.permutation(N_FEATURES)) for hook_point in sources}
        for index in range(N_FEATURES):
            n_parts = rng.choice(4, p=[0.15, 0.45, 0.25, 0.15])
            chosen = rng.permutation(len(sources))[:n_parts]
            parts = [list(sources)[i] for i in chosen]
            ends = [Feature(hook_point, int(next(order[hook_point]))) for hook_point in parts]
            direction = rng.normal(size=WIDTH) if not ends else np.zeros(WIDTH)
            for end in ends:
                direction = direction + decoders[end.hook_point][end.index]
            here[index] = _noisy(_unit(direction), noise, rng)
            edges |= {(end, Feature(HookPoint(layer, "residual"), index)) for end in ends}
        decoders[HookPoint(layer, "residual")] = here
    scales = {hook_point: rng.uniform(0.2, 5, (N_FEATURES, 1)) for hook_point in decoders}
    return {
        hook_point: torch.from_numpy(decoder * scales[hook_point]).float()
        for hook_point, decoder in decoders.items()
    }, edges


def _pairs(edges: tuple[Edge, ...]) -> set[tuple[Feature, Feature]]:
    return {(edge.source, edge.target) for edge in edges}


def _reached(edges: set[tuple[Feature, Feature]], start: Feature, end: int) -> set:
    """Edges that lead to (end 1) or from (end 0) a feature, by a search of its own."""
    found, waiting = set(), [start]
    while waiting:
        feature = waiting.pop()
        step = {edge for edge in edges if edge[end] == feature} - found
        found |= step
        waiting += [edge[1 - end] for edge in step]
    return found


@pytest.mark.parametrize("direction", ["backward", "forward", "both"])
def test_a_whole_flow_is_the_planted_one(direction: str) -> None:
    """With little noise every ancestor and descendant is found, and nothing else."""
    decoders, planted = _plant(noise=0.02)
    flow = DecoderMatcher(decoders)
    layer = {"backward": 3, "forward": 0, "both": 2}[direction]
    longest = 0
    for index in range(30):
        start = Feature(HookPoint(layer, "residual"), index)
        graph = flow.follow(start, direction=direction, thresholds=0.4)
        expected: set[tuple[Feature, Feature]] = set()
        if direction != "forward":
            expected |= _reached(planted, start, 1)
        if direction != "backward":
            expected |= _reached(planted, start, 0)
        assert _pairs(graph.edges) == expected
        assert set(graph.features) == {start} | {f for edge in expected for f in edge}
        longest = max(longest, len(expected))
    assert longest >= 3


def test_groups_are_the_planted_ones() -> None:
    decoders, planted = _plant(noise=0.02)
    flow = DecoderMatcher(decoders)
    short = {"residual": "RES", "mlp_out": "MLP", "attention_out": "ATT"}
    seen = Counter()
    for index in range(N_FEATURES):
        start = Feature(HookPoint(3, "residual"), index)
        graph = flow.follow(start, direction="backward", thresholds=0.4)
        for feature, group in graph.groups.items():
            kinds = {source.hook_point.kind for source, target in planted if target == feature}
            names = [name for kind, name in short.items() if kind in kinds]
            assert group == "From " + (" & ".join(names) or "nowhere")
            seen[group] += 1
        outputs = [f for f in graph.features if f.hook_point.kind != "residual"]
        assert not graph.groups.keys() & set(outputs)
    assert set(seen) == set(GROUPS)


def _hook_point(layer: int, kind: str = "residual") -> HookPoint:
    return HookPoint(layer, kind)  # type: ignore[arg-type]


def test_thresholds_are_those_of_the_sources_kind() -> None:
    half = torch.tensor([[1.0, 1.0]])
    decoders = {
        _hook_point(0): torch.tensor([[1.0, 0.0]]),
        _hook_point(1): half,
        _hook_point(1, "mlp_out"): torch.tensor([[0.0, 1.0]]),
    }
    flow = DecoderMatcher(decoders)
    start = Feature(_hook_point(1), 0)
    graph = flow.follow(start, thresholds={"residual": 0.8, "mlp_out": 0.6})
    assert [(e.source.id, e.target.id) for e in graph.edges] == [("mlp_out.1.0", "residual.1.0")]
    assert graph.edges[0].cosine == pytest.approx(0.5**0.5)
    assert graph.thresholds["attention_out"] == 0.25
    # Forward, too, an edge is held against the threshold of where it comes from.
    from_below = flow.follow(
        Feature(_hook_point(0), 0), direction="forward", thresholds={"residual": 0.8}
    )
    assert not from_below.edges
    from_mlp = flow.follow(Feature(_hook_point(1, "mlp_out"), 0), thresholds={"residual": 0.8})
    assert _pairs(from_mlp.edges) == {(Feature(_hook_point(1, "mlp_out"), 0), start)}


def test_more_than_one_predecessor_at_a_hook_point() -> None:
    eye = torch.eye(4)
    target = torch.tensor([[1.1, 1.0, 0.0, 0.0]])
    flow = DecoderMatcher({_hook_point(0): eye, _hook_point(1): eye, _hook_point(2): target})
    graph = flow.follow(Feature(_hook_point(2), 0), k=5)
    assert [e.source.id for e in graph.edges] == [
        "residual.0.0",
        "residual.0.1",
        "residual.1.0",
        "residual.1.1",
    ]
    assert list(flow.decoders) == [_hook_point(0), _hook_point(1), _hook_point(2)]
    assert flow.match(_hook_point(2), k=2)[_hook_point(1)].indices.tolist() == [[0, 1]]


def test_zero_columns_are_never_matched() -> None:
    below = torch.eye(3)
    below[1] = 0
    flow = DecoderMatcher({_hook_point(0): below, _hook_point(1): torch.eye(3)})
    graph = flow.follow(Feature(_hook_point(1), 1))
    assert not graph.edges and graph.groups == {Feature(_hook_point(1), 1): "From nowhere"}
    with pytest.raises(SparseAutoencoderError, match=r"feature 1 .* decoder row is zero"):
        flow.follow(Feature(_hook_point(0), 1))


def test_json_and_graphml_agree(tmp_path: Path) -> None:
    decoders, _ = _plant(noise=0.02)
    matcher = DecoderMatcher(decoders)
    starts = [Feature(HookPoint(2, "residual"), i) for i in range(20)]
    graphs = [matcher.follow(start, thresholds=0.4) for start in starts]
    graph = max(graphs, key=lambda graph: len(graph.edges))
    write_graphs({"flow": [graph]}, tmp_path)
    content = json.loads((tmp_path / f"{graph.start.id}.json").read_text())
    assert content["start"] == graph.start.id and len(content["edges"]) == len(graph.edges) > 3

    space = {"g": "http://graphml.graphdrawing.org/xmlns"}
    root = ElementTree.parse(tmp_path / f"{graph.start.id}.graphml").getroot()
    kinds = {key.get("id"): key.get("attr.type") for key in root.iterfind("g:key", space)}
    read = {"long": int, "double": float, "string": str}

    def data(element: ElementTree.Element) -> dict:
        found = element.iterfind("g:data", space)
        return {d.get("key"): read[kinds[d.get("key")]](d.text) for d in found}

    nodes = [{"id": n.get("id"), **data(n)} for n in root.iterfind("g:graph/g:node", space)]
    assert nodes == [{k: v for k, v in n.items() if v is not None} for n in content["nodes"]]
    edges = [{**e.attrib, **data(e)} for e in root.iterfind("g:graph/g:edge", space)]
    assert edges == content["edges"]
    (tmp_path / "file").touch()
    with pytest.raises(OutputError, match="cannot write"):
        graph.write_graphml(tmp_path / "file" / "flow.graphml")


FLOW = DecoderMatcher({_hook_point(1): torch.eye(3), _hook_point(2): torch.eye(3)})
START = Feature(_hook_point(1), 0)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: FLOW.follow(Feature(_hook_point(5), 0)), "no SAE for the residual of layer 5; th"),
        (lambda: FLOW.follow(Feature(_hook_point(1), 3)), "no feature 3; it has 3, counted from 0"),
        (lambda: FLOW.follow(START, direction="up"), "backward, forward or both"),
        (lambda: FLOW.follow(START, k=0), "k is 0; it must be at least 1"),
        (lambda: FLOW.follow(START, thresholds={"mlp": 0.1}), "'mlp', which is no kind of hook"),
        (lambda: FLOW.follow(START, thresholds=2.0), "of residual is 2.0; it must be at least -1"),
        (lambda: DecoderMatcher({}), "no SAE"),
        (lambda: DecoderMatcher({_hook_point(i): torch.eye(3 + i) for i in (0, 1)}), "some 4 wide"),
        (lambda: DecoderMatcher({_hook_point(i): torch.eye(3) for i in (0, 2)}), "layer 1, betw"),
        (
            lambda: HookPoint(0, "mlp"),
            "there is no mlp of layer 0: .* kinds of hook points are res",
        ),
    ],
)
def test_invalid_input_is_refused(call: Callable[[], object], message: str) -> None:
    with pytest.raises(LincorrError, match=message):
        call()


# -- matching and transitions ---------------------------------------------------------------------


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
    matches = match_features(targets, sources, 11)  # more than there are
    assert (matches.indices[[1, 4]] == -1).all() and (matches.indices[:, 6:] == -1).all()
    torch.testing.assert_close(matches.cosines.isnan(), matches.indices == -1)
    kept_t, kept_s = [0, 2, 3, 5], [1, 2, 4, 5, 6, 7]
    cosines = _cosines(targets[kept_t].numpy(), sources[kept_s].numpy())
    order = np.argsort(-cosines, axis=1)
    np.testing.assert_array_equal(matches.indices[kept_t, :6], np.array(kept_s)[order])


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
    features = torch.rand(8, 53)
    *_, carried = carried_features(features, matches.indices)
    torch.testing.assert_close(carried, features @ torch.from_numpy(indicator))


def test_a_permuted_decoder_is_a_perfect_transcoder() -> None:
    """Features of one hook point in another's order give its activations, with one source each."""
    generator = torch.Generator().manual_seed(0)
    above = torch.linalg.qr(torch.randn(64, 40, generator=generator)).Q.T
    order = torch.randperm(40, generator=generator)
    points = [_hook_point(0), _hook_point(1)]
    saes = dict(
        zip(points, (toy_sae(points[0], above[order]), toy_sae(points[1], above)), strict=True)
    )
    x = torch.rand(200, 40, generator=generator) @ above
    matcher = DecoderMatcher({at: sae.decoder for at, sae in saes.items()})
    sample = dict.fromkeys(points, x)
    found = {(one.compared, one.k): one for one in measure_transitions(saes, matcher, sample)}
    assert set(found) == {(name, k) for name in ("decoder", "encoder") for k in TRANSITION_K}
    assert found["decoder", 1].explained_variance == pytest.approx(1)
    cosines = (above @ above[order].T).numpy()
    nearest = np.argsort(-cosines, axis=1)[:, :2]
    features = (x @ above[order].T).clamp(min=0).numpy().astype(float)
    wrong = features[:, nearest].sum(2) @ above.numpy()
    total = (x.var(0, correction=0) * len(x)).sum().item()
    by_hand = 1 - np.square(x.numpy() - wrong).sum() / total
    assert found["decoder", 2].explained_variance == pytest.approx(by_hand, rel=1e-4)
    assert found["decoder", 2].own == pytest.approx(1)
    constant = measure_transitions(saes, matcher, dict.fromkeys(points, torch.ones(3, 64)))
    assert {one.explained_variance for one in constant} == {None}
