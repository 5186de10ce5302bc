"""What the report of a feature flow adds up, and its figures."""

import math

import numpy as np
import pytest
from matplotlib.patches import FancyBboxPatch

from lincorr_lightning.reporting.feature_flow_report import (
    CutEffect,
    FeatureFlowReport,
    LayerGroups,
    RelationFlow,
    SteeringPoint,
    Transition,
)
from lincorr_lightning.reporting.flow_graph_figure import flow_graph_figure
from lincorr_lightning.sae import GROUPS, Edge, Feature, FlowGraph, Place

KINDS = ("residual", "mlp_out", "attention_out")


def _layer(layer: int, n_bins: int = 20) -> LayerGroups:
    random = np.random.default_rng(layer)
    shares = random.dirichlet(np.ones(8)).tolist()
    kinds = KINDS if layer else KINDS[1:]
    return LayerGroups(
        layer, 1000, dict(zip(GROUPS, shares, strict=True)),
        {k: None if k == "residual" else 0.75 for k in kinds},
        {k: {g: random.integers(0, 9, n_bins).tolist() for g in GROUPS} for k in kinds},
        {k: [None, *random.random(n_bins - 1).tolist()] for k in kinds}, 2,
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
    for name, figure in _report(n_layers).figures().items():
        figure.canvas.draw()
        drawn = figure.get_tightbbox()  # in inches
        width, height = figure.get_size_inches()
        assert drawn.x0 >= -0.01 and drawn.x1 <= width + 0.01, name
        assert drawn.y0 >= -0.01 and drawn.y1 <= height + 0.01, name


def _feature(layer: int, index: int, kind: str = "residual") -> Feature:
    return Feature(Place(layer, kind), index)  # type: ignore[arg-type]


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
    assert "8 features with lower cosines left out" in told.replace("\n", " ")


def test_one_feature_alone_can_be_drawn() -> None:
    graph = FlowGraph(_feature(0, 3), (), {}, {}, {})
    figure = flow_graph_figure([graph], "Flow of nothing")
    assert len([p for p in figure.axes[0].patches if isinstance(p, FancyBboxPatch)]) == 1
