"""What the report of a feature flow adds up, and its figures."""

import math
from dataclasses import replace

import numpy as np
import pytest
from matplotlib.patches import FancyBboxPatch

from lincorr_lightning.flow.graph import GROUPS, Edge, Feature, FlowGraph
from lincorr_lightning.flow.graph_figure import flow_graph_figure
from lincorr_lightning.flow.results import (
    CutEffect,
    FeatureFlowReport,
    LayerGroups,
    RelationFlow,
    SteeringPoint,
    Transition,
)
from lincorr_lightning.sae.hook_points import HookPoint

KINDS = ("residual", "mlp_out", "attention_out")


def _layer(layer: int, n_bins: int = 20) -> LayerGroups:
    random = np.random.default_rng(layer)
    shares = random.dirichlet(np.ones(8)).tolist()
    kinds = KINDS if layer else KINDS[1:]
    return LayerGroups(
        layer, 1000, dict(zip(GROUPS, shares, strict=True)),
        {k: None if k == "residual" else 0.75 for k in kinds},
        {k: {g: random.integers(0, 9, n_bins).tolist() for g in GROUPS} for k in kinds},
        {k: [None, *random.random(n_bins - 1).tolist()] for k in kinds},
        {f"residual.{layer}": 2},
    )  # fmt: skip


def _cut(layer: int, cut: str, success: float, n: int, r: float = 0.0, **more) -> CutEffect:
    values = {"method": "top-1", "sources": "all", "group": "all", "loss_change": 0.1} | more
    return CutEffect(layer=layer, cut=cut, success=success, n=n, r=r, activation_change=-success,
                     **values)  # fmt: skip


CUTS = [
    _cut(0, "matched", 0.5, 30), _cut(0, "random", 0.1, 30),
    _cut(1, "matched", 0.2, 10, loss_change=None), _cut(1, "random", 0.0, 10),
    # None of these counts: of one group, of one place, or not removed.
    _cut(0, "matched", 0.9, 30, group="From MLP"), _cut(0, "matched", 0.9, 30, sources="mlp_out"),
    _cut(0, "matched", 0.3, 30, r=0.5), _cut(0, "random", 0.05, 30, r=0.5),
]  # fmt: skip
RELATION = RelationFlow(
    "city->country", 50, 50, [], [], {"mlp_out.0": 0.5}, {"mlp_out.0": 0.0}, 0.5, 0.01, 10, 90,
    [
        {"cut": cut, "control": control, "n_features": n, "fixed": 0.9, "target_only": None,
         "refitted": -0.1, "recall": 0.7, "kept": 0.8}
        for cut, control, n in (("none", False, 0), ("carriers", False, 4), ("carriers", True, 4))
    ],
)  # fmt: skip


def _report(n_layers: int = 3) -> FeatureFlowReport:
    points = [
        SteeringPoint(label, "residual.2.1", strategy, strength, 4, behaviour, 0.5, behaviour / 2)
        for label, plus in (("France", 0.0), ("Italy", 0.2))
        for strategy, least in (("single", 0.1), ("linear", 0.3))
        for strength, behaviour in ((0.0, 0.0), (1.0, least + plus), (2.0, least / 2 + plus))
    ]
    transitions = [
        Transition("a", "b", kind, compared, k, 0.5 / k, 0.9)
        for kind in KINDS for compared in ("decoder", "encoder") for k in (1, 5)
    ]  # fmt: skip
    layers = [_layer(i) for i in range(n_layers)]
    return FeatureFlowReport("some-lm", 20, 200, layers, transitions, CUTS, points, RELATION)


def test_success_is_that_of_all_cases() -> None:
    found = _report().deactivation()["top-1"]
    assert found["n"] == 40
    assert found["matched_success"] == pytest.approx((0.5 * 30 + 0.2 * 10) / 40)
    assert found["random_success"] == pytest.approx(0.1 * 30 / 40)
    assert found["times_random"] == pytest.approx(17 / 3)
    assert found["matched_activation_change"] == pytest.approx(-17 / 40)
    assert found["matched_loss_change"] == pytest.approx(0.1)


def test_steering_is_the_mean_over_answers() -> None:
    best = _report().best_steering()
    assert best["linear"] == pytest.approx(
        {"strength": 1.0, "n_answers": 2, "behaviour": 0.4, "coherence": 0.5, "score": 0.2}
    )
    assert best["single"]["score"] == pytest.approx(0.1)


def test_results_and_files(tmp_path) -> None:
    report = _report()
    results = report.results()
    assert results["study"] == "feature_flow" and "answers" not in results["relation"]
    report.write(tmp_path)
    assert {path.stem for path in (tmp_path / "tables").iterdir()} == {
        "groups", "transitions", "deactivation", "steering", "relation_cuts"
    }  # fmt: skip
    assert "From MLP" in report.markdown()


@pytest.mark.parametrize("n_layers", [1, 3, 26])
def test_nothing_drawn_leaves_a_figure(n_layers: int) -> None:
    for name, draw in _report(n_layers).drawings().items():
        figure = draw()
        figure.canvas.draw()
        drawn = figure.get_tightbbox()  # in inches
        width, height = figure.get_size_inches()
        assert drawn.x0 >= -0.01 and drawn.x1 <= width + 0.01, name
        assert drawn.y0 >= -0.01 and drawn.y1 <= height + 0.01, name


def _feature(layer: int, index: int, kind: str = "residual") -> Feature:
    return Feature(HookPoint(layer, kind), index)  # type: ignore[arg-type]


def _graph(start: int) -> FlowGraph:
    """Three layers; more sources than can be drawn; one feature that both starts share."""
    top = _feature(2, start)
    edges = [Edge(_feature(2, 10 * start + i, "mlp_out"), top, 0.9 - 0.1 * i) for i in range(6)]
    edges += [Edge(_feature(1, 0), top, 0.8), Edge(_feature(1, 3 + start, "attention_out"),
              _feature(1, 0), 0.4), Edge(_feature(0, 7), _feature(1, 0), 0.7)]  # fmt: skip
    return FlowGraph(top, tuple(sorted(edges)), {}, {}, {})


def test_boxes_of_a_flow_graph_stand_apart_and_hold_their_names() -> None:
    graphs = [_graph(1), _graph(2)]
    names = {f.id: f"a rather long name → 什么 {f.index}" for g in graphs for f in g.features}
    figure = flow_graph_figure(graphs, "Flow of two", names, "features of some-lm")
    figure.canvas.draw()
    (axes,) = figure.axes
    boxes = [p for p in axes.patches if isinstance(p, FancyBboxPatch)]
    # 2 starts, 4 of 12 MLP features, one stream below, two of attention, one at the bottom.
    assert len(boxes) == 2 + 4 + 1 + 2 + 1
    extents = [box.get_window_extent() for box in boxes]
    for i, one in enumerate(extents):
        assert one.x0 >= 0 and one.x1 <= figure.bbox.width
        assert one.y0 >= 0 and one.y1 <= figure.bbox.height
        for other in extents[:i]:
            assert not one.overlaps(other)
    inside = [t for t in axes.texts if "→" in t.get_text() or t.get_text().isdigit()]
    assert len(inside) == 2 * len(boxes)
    for text in inside:
        box = text.get_window_extent()
        assert any(
            one.x0 <= box.x0 and box.x1 <= one.x1 and one.y0 <= box.y0 and box.y1 <= one.y1
            for one in extents
        ), text.get_text()
    shaded = sum(box.get_facecolor()[:3] != (1.0, 1.0, 1.0) for box in boxes)
    assert shaded == 2  # the stream of layer 1, and what it comes from
    assert sum(math.isclose(box.get_linewidth(), 2.6) for box in boxes) == 2
    told = " ".join(text.get_text() for text in figure.texts)
    assert "of each place the 4 tied closest to what is drawn, 8 features left out" in told.replace(
        "\n", " "
    )


def _drawn(figure) -> tuple[dict[str, FancyBboxPatch], list[np.ndarray]]:
    """Boxes by the number in them, and the ends of each line between boxes."""
    figure.canvas.draw()
    (axes,) = figure.axes
    boxes = {}
    for box in (p for p in axes.patches if isinstance(p, FancyBboxPatch)):
        extent = box.get_window_extent()
        (number,) = [t.get_text() for t in axes.texts if t.get_text().isdigit()
                     and extent.contains(*t.get_window_extent().get_points().mean(0))]  # fmt: skip
        boxes[number] = box
    lines = [line.get_xydata() for line in axes.get_lines() if not _is_rule(line)]
    return boxes, lines


def _is_rule(line) -> bool:
    """Between two layers."""
    return bool(line.get_xydata()[0][1] == line.get_xydata()[1][1])


def _wide_graph(seed: int, n_layers: int = 5, n: int = 30) -> FlowGraph:
    """Many features in each place, most of them tied to some; from the middle both ways."""
    random = np.random.default_rng(seed)
    start, number = _feature(n_layers // 2, 0), iter(range(1, 10**6))
    edges, reached = [], [start]
    for layer in range(n_layers // 2, -1, -1):
        below = [_feature(layer - 1, next(number)) for _ in range(n)] if layer else []
        for kind in ("mlp_out", "attention_out"):
            below += [_feature(layer, next(number), kind) for _ in range(n)]
        new = []
        for feature in below:
            for target in random.permutation(len(reached))[:3]:
                edges.append(Edge(feature, reached[target], float(random.uniform(0.25, 1))))
            if feature.hook_point.kind == "residual":
                new.append(feature)
        reached = new
    reached = [start]
    for layer in range(n_layers // 2 + 1, n_layers):
        new = [_feature(layer, next(number)) for _ in range(n)]
        for feature in new:
            for source in random.permutation(len(reached))[:3]:
                edges.append(Edge(reached[source], feature, float(random.uniform(0.25, 1))))
        reached = new
    return FlowGraph(start, tuple(sorted(edges)), {}, {}, {})


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_every_box_of_a_flow_has_a_drawn_path_to_the_start(seed: int) -> None:
    graph = _wide_graph(seed)
    figure = flow_graph_figure([graph], "Flow")
    boxes, lines = _drawn(figure)
    ends = []
    for line in lines:
        touched = []
        for point in line:
            (own,) = [name for name, box in boxes.items() if _touches(box, point)]
            touched.append(own)
        ends.append(tuple(touched))
    by_number = {str(f.index): f for f in graph.features}
    real = {(str(e.source.index), str(e.target.index)) for e in graph.edges}
    assert set(ends) <= real
    for side in (0, 1):  # what leads to the start, and what it leads to
        found, waiting = {"0"}, ["0"]
        while waiting:
            name = waiting.pop()
            step = {pair[side] for pair in ends if pair[1 - side] == name} - found
            found |= step
            waiting += step
        if side == 0:
            before = found
    assert before | found == set(boxes)
    # Of each place as many as there is room for, of which there is always more than that.
    for hook_point in {f.hook_point for f in graph.features} - {graph.start.hook_point}:
        assert sum(by_number[name].hook_point == hook_point for name in boxes) == 4
    told = " ".join(text.get_text() for text in figure.texts).replace("\n", " ")
    assert f"{len(graph.features) - len(boxes)} features left out" in told


def _touches(box: FancyBboxPatch, point: np.ndarray) -> bool:
    x, y, width, height = box.get_x(), box.get_y(), box.get_width(), box.get_height()
    inside = x - 1e-9 <= point[0] <= x + width + 1e-9 and y - 1e-9 <= point[1] <= y + height + 1e-9
    return bool(inside)


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_no_line_of_a_flow_passes_behind_a_box_or_a_title(seed: int) -> None:
    figure = flow_graph_figure([_wide_graph(seed)], "Flow")
    boxes, lines = _drawn(figure)
    (axes,) = figure.axes
    titles = [t.get_window_extent() for t in axes.texts
              if t.get_text() in ("attention out", "MLP out", "residual stream")]  # fmt: skip
    assert len(titles) == 5 + 3 + 3
    shapes = [box.get_window_extent() for box in boxes.values()]
    for line in lines:
        points = axes.transData.transform(line)
        between = points[0] + np.linspace(0.005, 0.995, 400)[:, None] * (points[1] - points[0])
        for shape in (*shapes, *titles):
            inside = (between > (shape.x0 + 1, shape.y0 + 1)) & (
                between < (shape.x1 - 1, shape.y1 - 1)
            )
            assert not inside.all(1).any()
    for title in titles:
        assert not any(title.overlaps(shape) for shape in shapes)


def test_a_flow_without_attention_leaves_no_room_for_it() -> None:
    tops = [_feature(0, 1), _feature(0, 2)]
    graphs = [
        FlowGraph(top, tuple(Edge(_feature(0, 10 * i + top.index, "mlp_out"), top, 0.5)
                             for i in range(1, 3)), {}, {}, {})
        for top in tops
    ]  # fmt: skip
    figure = flow_graph_figure(graphs, "Flow of two")
    boxes, _ = _drawn(figure)
    left = min(box.get_x() for box in boxes.values())
    right = max(box.get_x() + box.get_width() for box in boxes.values())
    assert left < 0.4 * (right - left), "two thirds of what is drawn are boxes"


def test_a_figure_names_a_folder_by_its_last_part() -> None:
    report = replace(_report(), lm="/data/some/folder/my-lm")
    assert report.results()["lm"] == "/data/some/folder/my-lm"
    for name, draw in report.drawings().items():
        told = " ".join(t.get_text() for t in draw().texts)
        assert "my-lm" in told.replace("\n", "") and "/data" not in told, name


def test_what_is_left_least_stands_for_all_where_nothing_is_removed() -> None:
    cuts = [_cut(0, "matched", 0.3, 30, r=0.5), _cut(0, "random", 0.05, 30, r=0.5),
            _cut(0, "matched", 0.2, 30, r=0.75), _cut(0, "random", 0.0, 30, r=0.75),
            _cut(0, "matched", 0.9, 30, r=0.25, sources="mlp_out")]  # fmt: skip
    report = replace(_report(), cuts=cuts)
    entry = report.deactivation()["top-1"]
    assert (entry["r"], entry["n"], entry["matched_success"]) == (0.5, 30, 0.3)
    figure = report.drawings()["deactivation"]()
    heights = [bar.get_height() for bar in figure.axes[0].patches]
    assert heights == [0.3]
    assert "r = 0.5" in " ".join(text.get_text() for text in figure.texts)


def test_scalars_tell_of_every_part() -> None:
    scalars = _report().scalars()
    assert scalars["deactivation/top-1/matched"] == pytest.approx(17 / 40)
    assert scalars["steering/linear/score"] == pytest.approx(0.2)
    assert scalars["auroc/mlp_out/layer_2"] == 0.75
    assert "auroc/residual/layer_2" not in scalars, "it is not known"
    assert scalars["relation/r/none"] == 0.9
    assert scalars["relation/recall/carriers_control"] == 0.7
    assert not any(tag.startswith("relation/r_target_only") for tag in scalars)
    assert len([tag for tag in scalars if tag.startswith("relation/")]) == 3 * 3


def test_one_feature_alone_can_be_drawn() -> None:
    graph = FlowGraph(_feature(0, 3), (), {}, {}, {})
    figure = flow_graph_figure([graph], "Flow of nothing")
    assert len([p for p in figure.axes[0].patches if isinstance(p, FancyBboxPatch)]) == 1
