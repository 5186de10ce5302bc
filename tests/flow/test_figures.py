"""Figures of the feature flow: what they show, and that nothing leaves them."""

import math

import numpy as np
import pytest
import torch
from pandas import DataFrame

from lincorr_lightning.flow import figures
from lincorr_lightning.flow.deactivation import CutEffect
from lincorr_lightning.flow.graph import GROUPS, Edge, FlowGraph
from lincorr_lightning.flow.relation import RelationCut
from lincorr_lightning.flow.steering import SteeringPoint
from lincorr_lightning.flow.text_statistics import Transition
from lincorr_lightning.results.plots import to_png
from lincorr_lightning.results.table import Table
from lincorr_lightning.sae.hook_points import KINDS, Feature, HookPoint


def _groups(n_layers: int) -> DataFrame:
    shares = np.random.default_rng(0).dirichlet(np.ones(8), n_layers)
    frame = DataFrame(shares, columns=list(GROUPS)).assign(layer=range(n_layers))
    return frame.assign(**{f"auroc_{k}": None if k == "residual" else 0.75 for k in KINDS})


def _cut(cut: str, r: float, success: float, **more) -> CutEffect:
    values = {"sources": "all", "group": "all", "loss_change": None, "n": 30, "layer": 0} | more
    return CutEffect(method="top-1", cut=cut, r=r, success=success, activation_change=-success,
                     **values)  # fmt: skip


CUTS = Table.of("cuts", [
    _cut("matched", 0.5, 0.3), _cut("random", 0.5, 0.05), _cut("matched", 0.75, 0.2),
    _cut("matched", 0.5, 0.6, layer=1, n=60), _cut("matched", 0.25, 0.9, sources="mlp_out"),
]).frame  # fmt: skip
POINTS = Table.of("points", [
    SteeringPoint(label, "residual.2.1", strategy, strength, 4, strength / 4, 0.5, strength / 8)
    for label in ("France", "Italy")
    for strategy in ("single", "linear")
    for strength in (0.0, 1.0, 2.0)
]).frame  # fmt: skip
TRANSITIONS = Table.of("transitions", [
    Transition("a", "b", kind, compared, k, 0.5 / k, 0.9)
    for kind in KINDS
    for compared in ("decoder", "encoder")
    for k in (1, 5)
]).frame  # fmt: skip
RELATION = Table.of("relation", [
    RelationCut(cut, control, n, 0.9, None, -0.1, 0.7, 0.8)
    for cut, control, n in (("none", False, 0), ("carriers", False, 4), ("carriers", True, 4))
]).frame  # fmt: skip


HISTOGRAMS = {kind: torch.arange(160).view(8, 20) % 9 for kind in KINDS}


def _shown(figure) -> str:
    return " ".join(text.get_text() for text in figure.texts).replace("\n", " ")


def test_nothing_leaves_a_figure_and_folders_are_named_by_their_last_part() -> None:
    lm = "/data/some/folder/my-lm"
    drawn = [
        *(figures.groups_figure(_groups(n), lm, 200) for n in (1, 3, 26)),
        figures.cosines_figure(HISTOGRAMS, _groups(3), lm),
        figures.transitions_figure(TRANSITIONS, lm),
        figures.deactivation_figure(CUTS, lm), figures.rescaling_figure(CUTS, lm),
        figures.steering_figure(POINTS, lm),
        figures.relation_figure(RELATION, lm, "city->country", 50),
        figures.flow_figure([_wide_graph(0)], "Flow", {}, lm),
    ]  # fmt: skip
    for figure in drawn:
        to_png(figure)
        box = figure.get_tightbbox()  # in inches
        width, height = figure.get_size_inches()
        title = figure.texts[0].get_text()
        assert box.x0 >= -0.01 and box.x1 <= width + 0.01, title
        assert box.y0 >= -0.01 and box.y1 <= height + 0.01, title
        assert "my-lm" in _shown(figure) and "/data" not in _shown(figure), title


def test_deactivation_shows_the_mean_over_cases_at_the_lowest_r() -> None:
    figure = figures.deactivation_figure(CUTS, "lm")
    heights = [bar.get_height() for bar in figure.axes[0].patches]
    assert heights == pytest.approx([(0.3 * 30 + 0.6 * 60) / 90])
    assert "r = 0.5" in _shown(figure)


def test_cosines_are_densities_and_name_the_mean_auroc() -> None:
    figure = figures.cosines_figure(HISTOGRAMS, _groups(3), "lm")
    panels = {axes.get_title(loc="left"): axes.get_lines() for axes in figure.axes}
    assert list(panels) == ["residual stream", "MLP, AUROC 0.75", "attention, AUROC 0.75"]
    counts = HISTOGRAMS["residual"][2].numpy()
    np.testing.assert_allclose(
        panels["residual stream"][2].get_xydata(),
        np.column_stack([(np.arange(20) + 0.5) / 20, counts / counts.mean()]),
    )


def test_steering_shows_means_and_the_unsteered_lm() -> None:
    behaviour = figures.steering_figure(POINTS, "lm").axes[0]
    single, linear, unsteered = behaviour.get_lines()
    for line in (single, linear):
        np.testing.assert_allclose(line.get_xydata(), [[0, 0], [1, 0.25], [2, 0.5]])
    assert unsteered.get_ydata()[0] == 0


def test_scores_that_are_not_known_have_no_bars() -> None:
    axes = figures.relation_figure(RELATION, "lm", "city->country", 50).axes[0]
    assert sorted(bar.get_height() for bar in axes.patches) == [-0.1] * 3 + [0.7] * 3 + [0.9] * 3
    assert len(axes.get_xticks()) == 3


# -- flow graphs ---------------------------------------------------------------------------------


def _feature(layer: int, index: int, kind: str = "residual") -> Feature:
    return Feature(HookPoint(layer, kind), index)  # type: ignore[arg-type]


def _graph(start: int) -> FlowGraph:
    """Three layers; more sources than are drawn; two features that both starts share."""
    top, middle = _feature(2, start), _feature(1, 0)
    edges = [Edge(_feature(2, 10 * start + i, "mlp_out"), top, 0.9 - 0.1 * i) for i in range(6)]
    edges += [
        Edge(middle, top, 0.8), Edge(_feature(1, 3 + start, "attention_out"), middle, 0.4),
        Edge(_feature(0, 7), middle, 0.7),
    ]  # fmt: skip
    return FlowGraph(top, tuple(sorted(edges)), {}, {}, {})


def _wide_graph(seed: int, n_layers: int = 5, n: int = 12) -> FlowGraph:
    """Many features at each hook point, connected at random; from the middle both ways."""
    random, numbers = np.random.default_rng(seed), iter(range(1, 10**6))
    start = _feature(n_layers // 2, 0)
    edges: list[Edge] = []

    def connect(new: list[Feature], reached: list[Feature], backward: bool) -> None:
        for feature in new:
            for i in random.permutation(len(reached))[:2]:
                ends = (feature, reached[i]) if backward else (reached[i], feature)
                edges.append(Edge(*ends, float(random.uniform(0.25, 1))))

    reached = [start]
    for layer in range(n_layers // 2, -1, -1):
        for kind in ("mlp_out", "attention_out"):
            connect([_feature(layer, next(numbers), kind) for _ in range(n)], reached, True)
        below = [_feature(layer - 1, next(numbers)) for _ in range(n)] if layer else []
        connect(below, reached, True)
        reached = below
    reached = [start]
    for layer in range(n_layers // 2 + 1, n_layers):
        above = [_feature(layer, next(numbers)) for _ in range(n)]
        connect(above, reached, False)
        reached = above
    return FlowGraph(start, tuple(sorted(edges)), {}, {}, {})


def _boxes(figure) -> dict[str, object]:
    """Boxes by the name in their first line, as ``RES 7``."""
    to_png(figure)
    (axes,) = figure.axes
    boxes = [text for text in axes.texts if text.get_text()[:3] in ("RES", "MLP", "ATT")]
    return {text.get_text().split("\n")[0]: text for text in boxes}


def test_boxes_of_a_flow_mark_starts_and_shared_features() -> None:
    graphs = [_graph(1), _graph(2)]
    names = {f.id: f"a rather long name → next {f.index}" for g in graphs for f in g.features}
    figure = figures.flow_figure(graphs, "Flow of two", names, "some-lm")
    boxes = _boxes(figure)
    # Of the 12 features of the MLP the three most similar, the lower number first.
    assert set(boxes) == {
        "RES 1", "RES 2", "RES 0", "RES 7", "ATT 4", "ATT 5", "MLP 10", "MLP 20", "MLP 11",
    }  # fmt: skip
    patches = {name: text.get_bbox_patch() for name, text in boxes.items()}
    shaded = {n for n, patch in patches.items() if patch.get_facecolor()[:3] != (1.0, 1.0, 1.0)}
    thick = {n for n, patch in patches.items() if math.isclose(patch.get_linewidth(), 2.6)}
    assert (shaded, thick) == ({"RES 0", "RES 7"}, {"RES 1", "RES 2"})
    assert "a rather l… → next" in boxes["RES 0"].get_text()
    assert "of each hook point, 9 more left out" in _shown(figure)
    (axes,) = figure.axes
    assert len(axes.get_lines()) == 3 + 2 + 2 + 1


def test_boxes_of_a_flow_stand_apart_and_all_lead_to_the_start() -> None:
    graph = _wide_graph(0)
    figure = figures.flow_figure([graph], "Flow", {}, "lm")
    boxes = _boxes(figure)
    extents = [text.get_bbox_patch().get_window_extent() for text in boxes.values()]
    for i, one in enumerate(extents):
        assert figure.bbox.x0 <= one.x0 and one.x1 <= figure.bbox.x1
        assert not any(one.overlaps(other) for other in extents[:i])
    number = {text.get_position(): name for name, text in boxes.items()}
    (axes,) = figure.axes
    ends = {tuple(number[tuple(end)] for end in line.get_xydata()) for line in axes.get_lines()}
    label = {f: f"{dict(zip(KINDS, ('RES', 'MLP', 'ATT'), strict=True))[f.hook_point.kind]} "
             f"{f.index}" for f in graph.features}  # fmt: skip
    assert ends <= {(label[e.source], label[e.target]) for e in graph.edges}
    found = set()
    for near, far in ((1, 0), (0, 1)):  # backward and forward
        reached = {"RES 0"}
        while new := {pair[far] for pair in ends if pair[near] in reached} - reached:
            reached |= new
        found |= reached
    assert found == set(boxes)
    kept = {f for f in graph.features if label[f] in boxes}
    for hook_point in {f.hook_point for f in graph.features} - {graph.start.hook_point}:
        assert sum(f.hook_point == hook_point for f in kept) == 3
