"""Flow graphs of SAEs whose features are planted."""

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
import torch

from lincorr_lightning.errors import LincorrError, OutputError, SparseAutoencoderError
from lincorr_lightning.flow.graph import GROUPS, DecoderMatcher, Edge, Feature
from lincorr_lightning.flow.results import write_graphs
from lincorr_lightning.sae.hook_points import HookPoint

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


def test_groups_and_changes_are_the_planted_ones() -> None:
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
            change = "birth" if "RES" not in names else "transformation"
            assert graph.change(feature) == ("persistence" if names == ["RES"] else change)
            seen[group] += 1
        outputs = [f for f in graph.features if f.hook_point.kind != "residual"]
        assert all(f not in graph.groups and graph.change(f) is None for f in outputs)
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
        "residual.0.0", "residual.0.1", "residual.1.0", "residual.1.1"
    ]  # fmt: skip
    assert list(flow.decoders) == [_hook_point(0), _hook_point(1), _hook_point(2)]
    assert flow.match(_hook_point(2), k=2)[_hook_point(1)].indices.tolist() == [[0, 1]]


def test_zero_columns_are_counted_and_never_matched(tmp_path: Path) -> None:
    below = torch.eye(3)
    below[1] = 0
    flow = DecoderMatcher({_hook_point(0): below, _hook_point(1): torch.eye(3)})
    graph = flow.follow(Feature(_hook_point(1), 1))
    assert not graph.edges and graph.groups == {Feature(_hook_point(1), 1): "From nowhere"}
    assert graph.zero_norm == {_hook_point(0): 1}
    assert graph.as_dict()["zero_norm"] == [{"layer": 0, "kind": "residual", "features": 1}]
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
    read = {"int": int, "double": float, "string": str}

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
