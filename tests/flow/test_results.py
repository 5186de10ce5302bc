"""Summaries, tables and figures of the feature flow from measurements made by hand."""

import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from pandas import DataFrame

from lincorr_lightning.flow.deactivation import CutEffect
from lincorr_lightning.flow.effects import best_steering, summarize_cuts
from lincorr_lightning.flow.figures import flow_figure
from lincorr_lightning.flow.graph import GROUPS, Edge, FlowGraph
from lincorr_lightning.flow.relation import AnswerFeature, AnswerPair, RelationCut, RelationFlow
from lincorr_lightning.flow.results import feature_flow_results
from lincorr_lightning.flow.steering import SteeringPoint, SteeringSettings
from lincorr_lightning.flow.text_statistics import GroupPair
from lincorr_lightning.results.results import Results
from lincorr_lightning.results.table import Table
from lincorr_lightning.sae.hook_points import Feature, HookPoint

MLP, STREAM = HookPoint(0, "mlp_out"), HookPoint(0, "residual")


def _cut(layer: int, cut: str, success: float, n: int, r: float = 0.0, **more) -> CutEffect:
    values = {"method": "top-1", "group": "all", "loss_change": 0.1} | more
    return CutEffect(
        layer=layer, cut=cut, success=success, n=n, r=r, activation_change=-success, **values
    )


CUTS = [
    _cut(0, "matched", 0.5, 30),
    _cut(0, "random", 0.1, 30),
    _cut(1, "matched", 0.2, 10, loss_change=None),
    _cut(1, "random", 0.0, 10),
    # None of these counts: of one group, or with a higher r.
    _cut(0, "matched", 0.9, 30, group="From MLP"),
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


def _relation() -> RelationFlow:
    """Paris and Rome in France and Italy; only Paris and France share a carrier and flow."""
    relation = SimpleNamespace(
        name="city->country",
        source=SimpleNamespace(texts=["Paris", "Rome"]),
        target=SimpleNamespace(texts=["France", "Italy"], token_ids=[7, 8]),
        target_prompts=lambda subjects: [f"{subject} is in" for subject in subjects],
    )
    shared = {(0, 0): (Feature(MLP, 5),)}
    pairs = [
        AnswerPair(s, t, s == t, shared.get((s, t), ()), shared.get((s, t), ()))
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


def _feature(layer: int, index: int, kind: str = "residual") -> Feature:
    return Feature(HookPoint(layer, kind), index)  # type: ignore[arg-type]


def _graph(start: int) -> FlowGraph:
    """Three layers; both starts share two features."""
    top, middle = _feature(2, start), _feature(1, 0)
    edges = [
        Edge(_feature(2, 10 * start, "mlp_out"), top, 0.9),
        Edge(middle, top, 0.8),
        Edge(_feature(1, 3 + start, "attention_out"), middle, 0.4),
        Edge(_feature(0, 7), middle, 0.7),
    ]
    return FlowGraph(top, tuple(sorted(edges)))


@pytest.fixture(scope="module")
def results() -> Results:
    pair = GroupPair(0, GROUPS[0], GROUPS[2], 9, 0.5, 0.7)
    groups = {
        "layer": 0,
        "n_activations": 1000,
        "shares": dict.fromkeys(GROUPS, 0.125),
        "auroc": {"mlp_out": 0.75, "attention_out": None},
        "pairs": [],
    }
    layer = SimpleNamespace(
        summarize=lambda: groups, pairs=lambda: [pair], matches={}, counts=torch.zeros(1, 8)
    )
    statistics: Any = SimpleNamespace(
        lm=SimpleNamespace(config=SimpleNamespace(name_or_path="some/where/my-lm")),
        n_texts=20,
        n_tokens=200,
        groups={STREAM: layer},
        activity=[MLP, STREAM],
        names=lambda features: {},
    )
    flows = {"Paris->France": [_graph(1), _graph(2)]}
    return feature_flow_results(statistics, CUTS, POINTS, _relation(), flows)


def test_cuts_are_averaged_over_cases() -> None:
    frame = Table.of("cuts", CUTS).frame
    (found,) = summarize_cuts(frame, "method").to_dict("records")
    assert (found["method"], found["n"], found["r"]) == ("top-1", 40, 0.0)
    assert found["matched_success"] == pytest.approx((0.5 * 30 + 0.2 * 10) / 40)
    assert found["random_success"] == pytest.approx(0.1 * 30 / 40)
    assert found["times_random"] == pytest.approx(17 / 3)
    assert found["matched_activation_change"] == pytest.approx(-17 / 40)
    assert found["matched_loss_change"] == pytest.approx(0.1)
    assert summarize_cuts(frame.head(0), "method").empty
    first, second = summarize_cuts(frame, "layer", "method").to_dict("records")
    assert (first["layer"], first["n"], first["matched_success"]) == (0, 30, 0.5)
    # A control that switches nothing off cannot be divided by.
    assert (second["layer"], second["matched_success"]) == (1, 0.2)
    assert math.isnan(second["times_random"])


def test_steering_is_averaged_over_answers() -> None:
    found = best_steering(Table.of("steering", POINTS).frame).to_dict("records")
    assert [row.pop("strategy") for row in found] == ["none", "single", "linear"]
    none, single, linear = found
    # The strength is chosen without the control, whose score is higher.
    expected = {
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
    assert linear == pytest.approx(expected)
    assert single["score"] == pytest.approx(0.1)
    assert (none["strength"], none["behaviour"], none["perplexity"]) == (0, 0, 20)
    assert math.isnan(none["control_behaviour"])


def test_values_of_a_relation_compare_pairs_of_the_reference_with_others(results: Results) -> None:
    relation = results.values["relation"]
    assert (relation["n_fit"], relation["n_test"]) == (2, 2)
    assert (relation["n_reference_pairs"], relation["n_other_pairs"]) == (2, 2)
    assert relation["same_carrier"] == {"mlp_out.0": 0.5}
    assert relation["same_carrier_permuted"] == {"mlp_out.0": 0.0}
    assert (relation["shared_flow"], relation["shared_flow_permuted"]) == (0.5, 0.0)


def test_tables_hold_the_measurements(results: Results) -> None:
    headlines = [table.name for table in results.tables if table.headline]
    assert headlines == ["groups", "deactivation_summary", "relation_cuts", "steering_summary"]
    (row,) = results.table("groups").frame.to_dict("records")
    assert [row[key] for key in ("layer", "n_activations", *GROUPS)] == [0, 1000, *[0.125] * 8]
    assert row["auroc_mlp_out"] == 0.75 and row["auroc_attention_out"] is None
    assert results.table("deactivation_summary").texts() == [
        ["top-1", "0.00", "40", "42.5%", "7.5%", "5.7", "10.0%"]
    ]
    assert len(results.table("deactivation")) == len(CUTS)
    assert len(results.table("steering")) == len(POINTS)
    (pair,) = results.table("group_pairs").texts()
    assert pair == ["0", "From nowhere", "From MLP", "9", "50.0%", "70.0%"]
    feature = results.table("answer_features").frame.iloc[1].tolist()
    assert feature == ["source", "Rome", "mlp_out.0", "mlp_out.0.6", 0.8]
    assert results.table("answer_pairs").frame.to_numpy().tolist() == [
        ["Paris", "France", "mlp_out.0.5", "mlp_out.0.5"],
        ["Rome", "Italy", "", ""],
    ]
    edges = results.table("flow_edges").frame
    assert len(edges) == 4 + 4 and set(edges["flow"]) == {"Paris->France"}
    assert len(edges[["source", "target"]].drop_duplicates()) == 3 + 3 + 1, "one is in both"


def test_scalars_leave_out_what_is_not_known(results: Results) -> None:
    scalars = results.scalars
    assert scalars["deactivation/top-1/matched"] == pytest.approx(17 / 40)
    assert scalars["steering/linear/score"] == pytest.approx(0.2)
    assert scalars["auroc/mlp_out/layer_0"] == 0.75
    assert "auroc/attention_out/layer_0" not in scalars
    assert scalars["relation/r/none"] == 0.9
    assert scalars["relation/recall/carriers_control"] == pytest.approx(0.6)
    assert len([key for key in scalars if key.startswith("relation/")]) == 3 * 3


def test_flows_to_draw_and_answers_to_steer_towards() -> None:
    relation = _relation()
    assert relation.starts_to_draw(1) == {"Paris->France": [Feature(STREAM, 5)]}
    lm: Any = SimpleNamespace(rows=lambda prompts: [[i] for i in range(len(prompts))])
    matcher: Any = SimpleNamespace(follow=lambda start: start)
    # Italy's feature has an AUROC below 0.9.
    how = SteeringSettings(n_answers=4, n_prompts=2)
    (answer,) = relation.answers_to_steer(lm, matcher, how)
    assert (answer.label, answer.token_id, answer.prompts) == ("France", 7, [[1], [2]])
    assert answer.graph == Feature(STREAM, 5)
    low = relation.answers_to_steer(lm, matcher, replace(how, min_auroc=0.8))
    assert [each.label for each in low] == ["France", "Italy"]


def _shown(figure) -> str:
    return " ".join(text.get_text() for text in figure.texts).replace("\n", " ")


def test_figures_name_an_lm_by_the_last_part_of_its_folder(results: Results) -> None:
    drawn = {each.name: each.matplotlib() for each in results.figures}
    assert set(drawn) == {"deactivation", "flow_Paris-France"}
    for figure in drawn.values():
        assert "my-lm" in _shown(figure) and "some/where" not in _shown(figure)


def test_a_figure_shows_means_at_the_lowest_r(results: Results) -> None:
    figure = results.figure("deactivation")
    heights = [bar.get_height() for bar in figure.axes[0].patches]
    assert heights == pytest.approx([(0.5 * 30 + 0.2 * 10) / 40, 0.9])
    assert "r = 0)" in _shown(figure)


def test_boxes_of_a_flow_mark_starts_and_shared_features() -> None:
    graphs = [_graph(1), _graph(2)]
    names = {f.id: f"a rather long name → next {f.index}" for g in graphs for f in g.features}
    edges = [
        ("a->b", graph.start.id, edge.source.id, edge.target.id, edge.cosine)
        for graph in graphs
        for edge in graph.edges
    ]
    frame = DataFrame(edges, columns=["flow", "start", "source", "target", "cosine"])
    starts = [graph.start.id for graph in graphs]
    (axes,) = flow_figure(frame, "a->b", starts, names, "some-lm").axes
    boxes = {
        text.get_text().split("\n")[0]: text.get_bbox_patch()
        for text in axes.texts
        if "a rather l… → next" in text.get_text()
    }
    assert set(boxes) == set("RES 1,RES 2,RES 0,RES 7,ATT 4,ATT 5,MLP 10,MLP 20".split(","))
    shaded = {n for n, patch in boxes.items() if patch.get_facecolor()[:3] != (1.0, 1.0, 1.0)}
    thick = {n for n, patch in boxes.items() if math.isclose(patch.get_linewidth(), 2.6)}
    assert (shaded, thick) == ({"RES 0", "RES 7"}, {"RES 1", "RES 2"})
    assert len(axes.get_lines()) == 3 + 3 + 1
