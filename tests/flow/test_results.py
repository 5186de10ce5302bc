"""Summaries, tables and figures of the feature flow from measurements made by hand."""

import json
import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from pandas import DataFrame

from lincorr_lightning.flow.deactivation import CutEffect
from lincorr_lightning.flow.graph import GROUPS, Edge, FlowGraph
from lincorr_lightning.flow.relation import AnswerFeature, AnswerPair, RelationCut, RelationFlow
from lincorr_lightning.flow.results import (
    best_steering,
    feature_flow_results,
    flow_figure,
    groups_figure,
    summarize_cuts,
    write_graphs,
)
from lincorr_lightning.flow.steering import SteeringPoint, SteeringSettings
from lincorr_lightning.flow.text_statistics import Transition
from lincorr_lightning.results.plots import to_png
from lincorr_lightning.results.results import Results
from lincorr_lightning.results.table import Table
from lincorr_lightning.sae.hook_points import KINDS, Feature, HookPoint

MLP, STREAM = HookPoint(0, "mlp_out"), HookPoint(0, "residual")


def _cut(layer: int, cut: str, success: float, n: int, r: float = 0.0, **more) -> CutEffect:
    values = {"method": "top-1", "sources": "all", "group": "all", "loss_change": 0.1} | more
    return CutEffect(
        layer=layer, cut=cut, success=success, n=n, r=r, activation_change=-success, **values
    )


CUTS = [
    _cut(0, "matched", 0.5, 30),
    _cut(0, "random", 0.1, 30),
    _cut(1, "matched", 0.2, 10, loss_change=None),
    _cut(1, "random", 0.0, 10),
    # None of these counts: of one group, of one hook point, or with a higher r.
    _cut(0, "matched", 0.9, 30, group="From MLP"),
    _cut(0, "matched", 0.9, 30, sources="mlp_out"),
    _cut(0, "matched", 0.3, 30, r=0.5),
    _cut(0, "random", 0.05, 30, r=0.5),
]
POINTS = [
    SteeringPoint(
        label,
        "residual.2.1",
        strategy,
        control,
        strength,
        4,
        behaviour / (5 if control else 1),
        0.5,
        behaviour / (0.1 if control else 2),
        behaviour / (10 if control else 1),
        20 + strength + control,
    )
    for label, plus in (("France", 0.0), ("Italy", 0.2))
    for control in (False, True)
    for strategy, least in (("single", 0.1), ("linear", 0.3))
    for strength, behaviour in ((0.0, 0.0), (1.0, least + plus), (2.0, least / 2 + plus))
]
GRAPH = FlowGraph(Feature(STREAM, 3), (), {}, {})


def _relation() -> RelationFlow:
    """Paris and Rome in France and Italy; only Paris and France share a carrier and flow."""
    relation = SimpleNamespace(
        name="city->country",
        source=SimpleNamespace(texts=["Paris", "Rome"]),
        target=SimpleNamespace(texts=["France", "Italy"], token_ids=[7, 8]),
        target_prompts=lambda subjects: [f"{subject} is in" for subject in subjects],
    )
    shared = Feature(MLP, 5)
    pairs = [
        AnswerPair(s, t, s == t, (shared,) if s == t == 0 else (), (shared,) if s == t == 0 else ())
        for s in range(2)
        for t in range(2)
    ]
    features = {
        side: {
            at: {0: AnswerFeature(Feature(at, 5), 1.0), 1: AnswerFeature(Feature(at, 6), 0.8)}
            for at in (MLP, STREAM)
        }
        for side in ("source", "target")
    }
    cuts = [
        RelationCut(cut, control, n, 0.9, None, -0.1, 0.7, 0.8)
        for cut, control, n in (("none", False, 0), ("carriers", False, 1), ("carriers", True, 1))
    ]
    cuts.append(RelationCut("carriers", True, 1, 0.6, None, -0.3, 0.5, 0.6))  # another draw
    logits = SimpleNamespace(target=torch.tensor([[1.0, 0], [0, 1], [0, 1], [0, 1]]))
    subjects = ["a", "b", "c", "d"]
    return RelationFlow(relation, subjects, 2, logits, features, STREAM, pairs, cuts)  # type: ignore[arg-type]


def _results(**more) -> Results:
    groups = {
        "layer": 0,
        "n_activations": 1000,
        "shares": dict.fromkeys(GROUPS, 0.125),
        "auroc": {"mlp_out": 0.75, "attention_out": None},
        "pairs": [{"group": GROUPS[0], "other": GROUPS[2], "n": 9, "share": 0.5, "expected": 0.7}],
    }
    transitions = [Transition("a", "b", "mlp_out", "decoder", 1, 0.5, 0.9)]
    found = {"transitions": transitions, "cuts": CUTS, "steering": POINTS, "relation": _relation()}
    statistics: Any = SimpleNamespace(
        n_texts=20,
        n_tokens=200,
        groups={STREAM: SimpleNamespace(summarize=lambda: groups, matches={})},
        names=lambda features: {},
    )
    return feature_flow_results("some/where/my-lm", [MLP, STREAM], statistics, **found | more)


def test_cuts_are_averaged_over_cases() -> None:
    frame = Table.of("cuts", CUTS).frame
    (found,) = summarize_cuts(frame, "method").to_dict("records")
    assert (found["method"], found["n"], found["r"]) == ("top-1", 40, 0.0)
    assert found["matched_success"] == pytest.approx((0.5 * 30 + 0.2 * 10) / 40)
    assert found["random_success"] == pytest.approx(0.1 * 30 / 40)
    assert found["times_random"] == pytest.approx(17 / 3)
    assert found["matched_activation_change"] == pytest.approx(-17 / 40)
    assert found["matched_loss_change"] == pytest.approx(0.1)
    (rescaled,) = summarize_cuts(frame[frame["r"] == 0.5], "method").to_dict("records")
    assert rescaled["matched_success"] == pytest.approx(0.3)
    assert summarize_cuts(frame.head(0), "method").empty
    first, second = summarize_cuts(frame, "layer", "method").to_dict("records")
    assert (first["layer"], first["method"], first["n"]) == (0, "top-1", 30)
    assert (first["matched_success"], first["times_random"]) == (0.5, pytest.approx(5.0))
    # A control that switches nothing off cannot be divided by.
    assert (second["layer"], second["matched_success"]) == (1, 0.2)
    assert math.isnan(second["times_random"])


def test_steering_is_averaged_over_answers() -> None:
    found = best_steering(Table.of("steering", POINTS).frame).to_dict("records")
    assert [row.pop("strategy") for row in found] == ["none", "single", "linear"]
    none, single, linear = found
    # The strength is chosen without the control, whose score is higher.
    assert linear == pytest.approx(
        {
            "strength": 1.0,
            "n_answers": 2,
            "behaviour": 0.4,
            "coherence": 0.5,
            "score": 0.2,
            "named": 0.4,
            "perplexity": 21,
            "control_behaviour": 0.08,
            "control_coherence": 0.5,
            "control_score": 4.0,
            "control_named": 0.04,
            "control_perplexity": 22,
        }
    )
    assert single["score"] == pytest.approx(0.1)
    assert (none["strength"], none["behaviour"], none["perplexity"]) == (0, 0, 20)
    assert math.isnan(none["control_behaviour"])


def test_values_of_a_relation_compare_pairs_of_the_reference_with_others() -> None:
    relation = _results().values["relation"]
    assert (relation["n_fit"], relation["n_test"]) == (2, 2)
    assert (relation["n_reference_pairs"], relation["n_other_pairs"]) == (2, 2)
    assert relation["same_carrier"] == {"mlp_out.0": 0.5}
    assert relation["same_carrier_permuted"] == {"mlp_out.0": 0.0}
    assert (relation["shared_flow"], relation["shared_flow_permuted"]) == (0.5, 0.0)
    assert relation["cuts"][0] == {
        "cut": "none",
        "control": False,
        "n_features": 0,
        "fixed": 0.9,
        "target_only": None,
        "refitted": -0.1,
        "recall": 0.7,
        "kept": 0.8,
    }


def test_tables_hold_the_measurements() -> None:
    results = _results()
    assert [table.name for table in results.tables if table.headline] == [
        "groups",
        "deactivation_summary",
        "relation_cuts",
        "steering_summary",
    ]
    (row,) = results.table("groups").frame.to_dict("records")
    assert [row[key] for key in ("layer", "n_activations", *GROUPS)] == [0, 1000, *[0.125] * 8]
    assert list(row)[-2:] == ["auroc_mlp_out", "auroc_attention_out"]
    assert row["auroc_mlp_out"] == 0.75 and row["auroc_attention_out"] is None
    assert results.table("groups").titles[2:5] == ["no predecessor", "residual stream", "MLP"]
    assert results.table("deactivation_summary").texts() == [
        ["top-1", "0.00", "40", "42.5%", "7.5%", "5.7", "10.0%"]
    ]
    assert len(results.table("deactivation_layers")) == 2
    assert list(results.table("deactivation").frame.iloc[0]) == [
        0,
        "top-1",
        "matched",
        "all",
        0.0,
        "all",
        30,
        0.5,
        -0.5,
        0.1,
    ]
    assert len(results.table("steering")) == len(POINTS)
    (pair,) = results.table("group_pairs").texts()
    assert pair == ["0", "From nowhere", "From MLP", "9", "50.0%", "70.0%"]
    assert list(results.table("answer_features").frame.iloc[1]) == [
        "source",
        "Rome",
        "mlp_out.0",
        "mlp_out.0.6",
        0.8,
    ]
    assert results.table("answer_pairs").frame.to_numpy().tolist() == [
        ["Paris", "France", "mlp_out.0.5", "mlp_out.0.5"],
        ["Rome", "Italy", "", ""],
    ]


def test_scalars_leave_out_what_is_not_known() -> None:
    scalars = _results().scalars
    assert scalars["deactivation/top-1/matched"] == pytest.approx(17 / 40)
    assert scalars["steering/linear/score"] == pytest.approx(0.2)
    assert scalars["auroc/mlp_out/layer_0"] == 0.75
    assert "auroc/attention_out/layer_0" not in scalars
    assert scalars["relation/r/none"] == 0.9
    assert scalars["relation/recall/carriers_control"] == pytest.approx(0.6)
    assert len([key for key in scalars if key.startswith("relation/")]) == 3 * 3


def test_files(tmp_path) -> None:
    flows = {"Paris->France": [GRAPH, GRAPH]}
    results = _results(flows=flows)
    results.write(tmp_path)
    write_graphs(flows, tmp_path / "graphs")
    content = json.loads((tmp_path / "results.json").read_text())
    assert content["study"] == "feature_flow" and content["saes"] == ["mlp_out.0", "residual.0"]
    assert set(content["groups"][0]) == {"layer", "n_activations", "shares", "auroc", "pairs"}
    assert (tmp_path / "figures" / "flow_Paris-France.png").is_file()
    assert {path.name for path in (tmp_path / "graphs").iterdir()} == {
        "residual.0.3.json",
        "residual.0.3.graphml",
    }


def test_flows_to_draw_and_answers_to_steer_towards() -> None:
    relation = _relation()
    assert relation.starts_to_draw(1) == {"Paris->France": [Feature(STREAM, 5)]}
    lm = SimpleNamespace(rows=lambda prompts: [[i] for i in range(len(prompts))])
    matcher = SimpleNamespace(follow=lambda start, thresholds: (start, thresholds))
    # Italy's feature has an AUROC below 0.9.
    how = SteeringSettings(n_answers=4, n_prompts=2)
    (answer,) = relation.answers_to_steer(lm, matcher, 0.3, how)  # type: ignore[arg-type]
    assert (answer.label, answer.token_id, answer.prompts) == ("France", 7, [[1], [2]])
    assert answer.graph == (Feature(STREAM, 5), 0.3)
    low = relation.answers_to_steer(lm, matcher, 0.3, replace(how, min_auroc=0.8))  # type: ignore[arg-type]
    assert [each.label for each in low] == ["France", "Italy"]


# -- figures -------------------------------------------------------------------------------------


def _groups(n_layers: int) -> DataFrame:
    shares = np.random.default_rng(0).dirichlet(np.ones(8), n_layers)
    frame = DataFrame(shares, columns=list(GROUPS)).assign(layer=range(n_layers))
    return frame.assign(**{f"auroc_{k}": None if k == "residual" else 0.75 for k in KINDS})


def _shown(figure) -> str:
    return " ".join(text.get_text() for text in figure.texts).replace("\n", " ")


def test_nothing_leaves_a_figure_and_folders_are_named_by_their_last_part() -> None:
    results = _results(flows={"residual.2.0": [_wide_graph(0)]})
    drawn = {one.name: one.draw() for one in results.figures}
    assert set(drawn) == {
        "groups",
        "deactivation",
        "rescaling",
        "steering",
        "relation",
        "flow_residual.2.0",
    }
    drawn["wide"] = groups_figure(_groups(26), "some/where/my-lm", 200)
    for name, figure in drawn.items():
        to_png(figure)
        box = figure.get_tightbbox()  # in inches
        width, height = figure.get_size_inches()
        assert box.x0 >= -0.01 and box.x1 <= width + 0.01, name
        assert box.y0 >= -0.01 and box.y1 <= height + 0.01, name
        assert "my-lm" in _shown(figure) and "some/where" not in _shown(figure), name


def test_figures_show_means_at_the_lowest_r_and_leave_unknown_scores_out() -> None:
    results = _results()
    figure = results.figure("deactivation").draw()
    heights = [bar.get_height() for bar in figure.axes[0].patches]
    assert heights == pytest.approx([(0.5 * 30 + 0.2 * 10) / 40, 0.9])
    assert "r = 0)" in _shown(figure)
    behaviour = results.figure("steering").draw().axes[0]
    lines = [line for line in behaviour.get_lines() if len(line.get_xdata())]
    assert len(lines) == 2 * 2 + 1  # dotted: controls
    single, linear = (line for line in lines if line.get_linestyle() == "-")
    unsteered = lines[-1]
    np.testing.assert_allclose(single.get_xydata(), [[0, 0], [1, 0.2], [2, 0.15]])
    np.testing.assert_allclose(linear.get_xydata(), [[0, 0], [1, 0.4], [2, 0.25]])
    assert unsteered.get_ydata()[0] == 0
    axes = results.figure("relation").draw().axes[0]
    heights = sorted(bar.get_height() for bar in axes.patches)  # of controls: means of the draws
    assert heights == pytest.approx([-0.2, -0.1, -0.1, 0.6, 0.7, 0.7, 0.75, 0.9, 0.9])
    assert len(axes.get_xticks()) == 3


# -- flow graphs ---------------------------------------------------------------------------------


def _feature(layer: int, index: int, kind: str = "residual") -> Feature:
    return Feature(HookPoint(layer, kind), index)  # type: ignore[arg-type]


def _graph(start: int) -> FlowGraph:
    """Three layers; more sources than are drawn; two features that both starts share."""
    top, middle = _feature(2, start), _feature(1, 0)
    edges = [Edge(_feature(2, 10 * start + i, "mlp_out"), top, 0.9 - 0.1 * i) for i in range(6)]
    edges += [
        Edge(middle, top, 0.8),
        Edge(_feature(1, 3 + start, "attention_out"), middle, 0.4),
        Edge(_feature(0, 7), middle, 0.7),
    ]
    return FlowGraph(top, tuple(sorted(edges)), {}, {})


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
    return FlowGraph(start, tuple(sorted(edges)), {}, {})


def _boxes(figure) -> dict[str, object]:
    """Boxes by the name in their first line, as ``RES 7``."""
    to_png(figure)
    (axes,) = figure.axes
    boxes = [text for text in axes.texts if text.get_text()[:3] in ("RES", "MLP", "ATT")]
    return {text.get_text().split("\n")[0]: text for text in boxes}


def test_boxes_of_a_flow_mark_starts_and_shared_features() -> None:
    graphs = [_graph(1), _graph(2)]
    names = {f.id: f"a rather long name → next {f.index}" for g in graphs for f in g.features}
    figure = flow_figure(graphs, "Flow of two", names, "some-lm")
    boxes = _boxes(figure)
    # Of the 12 features of the MLP the three most similar, the lower number first.
    assert set(boxes) == {
        "RES 1",
        "RES 2",
        "RES 0",
        "RES 7",
        "ATT 4",
        "ATT 5",
        "MLP 10",
        "MLP 20",
        "MLP 11",
    }
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
    figure = flow_figure([graph], "Flow", {}, "lm")
    boxes = _boxes(figure)
    extents = [text.get_bbox_patch().get_window_extent() for text in boxes.values()]
    for i, one in enumerate(extents):
        assert figure.bbox.x0 <= one.x0 and one.x1 <= figure.bbox.x1
        assert not any(one.overlaps(other) for other in extents[:i])
    number = {text.get_position(): name for name, text in boxes.items()}
    (axes,) = figure.axes
    ends = {tuple(number[tuple(end)] for end in line.get_xydata()) for line in axes.get_lines()}
    label = {
        f: f"{dict(zip(KINDS, ('RES', 'MLP', 'ATT'), strict=True))[f.hook_point.kind]} {f.index}"
        for f in graph.features
    }
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
