"""Results of the feature flow: summaries, tables and figures from measurements made by hand."""

import json
from types import SimpleNamespace

import pytest
import torch

from lincorr_lightning.flow.deactivation import CutEffect
from lincorr_lightning.flow.graph import GROUPS, FlowGraph
from lincorr_lightning.flow.relation import AnswerFeature, AnswerPair, RelationCut, RelationFlow
from lincorr_lightning.flow.results import (
    best_steering,
    feature_flow_results,
    summarize_cuts,
    write_graphs,
)
from lincorr_lightning.flow.steering import SteeringPoint
from lincorr_lightning.flow.text_statistics import Transition
from lincorr_lightning.results.results import Results
from lincorr_lightning.results.table import Table
from lincorr_lightning.sae.hook_points import Feature, HookPoint

MLP, STREAM = HookPoint(0, "mlp_out"), HookPoint(0, "residual")


def _cut(layer: int, cut: str, success: float, n: int, r: float = 0.0, **more) -> CutEffect:
    values = {"method": "top-1", "sources": "all", "group": "all", "loss_change": 0.1} | more
    return CutEffect(layer=layer, cut=cut, success=success, n=n, r=r, activation_change=-success,
                     **values)  # fmt: skip


CUTS = [
    _cut(0, "matched", 0.5, 30), _cut(0, "random", 0.1, 30),
    _cut(1, "matched", 0.2, 10, loss_change=None), _cut(1, "random", 0.0, 10),
    # None of these counts: of one group, of one hook point, or with a higher r.
    _cut(0, "matched", 0.9, 30, group="From MLP"), _cut(0, "matched", 0.9, 30, sources="mlp_out"),
    _cut(0, "matched", 0.3, 30, r=0.5), _cut(0, "random", 0.05, 30, r=0.5),
]  # fmt: skip
POINTS = [
    SteeringPoint(label, "residual.2.1", strategy, strength, 4, behaviour, 0.5, behaviour / 2)
    for label, plus in (("France", 0.0), ("Italy", 0.2))
    for strategy, least in (("single", 0.1), ("linear", 0.3))
    for strength, behaviour in ((0.0, 0.0), (1.0, least + plus), (2.0, least / 2 + plus))
]
GRAPH = FlowGraph(Feature(STREAM, 3), (), {}, {}, {})


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
        for s in range(2) for t in range(2)
    ]  # fmt: skip
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
    logits = SimpleNamespace(target=torch.tensor([[1.0, 0], [0, 1], [0, 1], [0, 1]]))
    subjects = ["a", "b", "c", "d"]
    return RelationFlow(relation, subjects, 2, logits, features, STREAM, pairs, cuts)  # type: ignore[arg-type]


def _results(**more) -> Results:
    groups = {
        "layer": 0, "n_activations": 1000, "shares": dict.fromkeys(GROUPS, 0.125),
        "auroc": {"mlp_out": 0.75, "attention_out": None}, "zero_norm": {"residual.0": 2},
    }  # fmt: skip
    histograms = {"mlp_out": torch.ones(8, 2), "attention_out": torch.ones(8, 2)}
    transitions = [Transition("a", "b", "mlp_out", "decoder", 1, 0.5, 0.9)]
    found = {"transitions": transitions, "cuts": CUTS, "steering": POINTS, "relation": _relation()}
    return feature_flow_results(
        lm_name="some/where/my-lm", saes=[MLP, STREAM], n_texts=20, n_tokens=200, groups=[groups],
        histograms=histograms, **found | more,
    )  # fmt: skip


def test_cuts_are_averaged_over_cases() -> None:
    frame = Table.of("cuts", CUTS).frame
    (found,) = summarize_cuts(frame, "method")
    assert (found["method"], found["n"], found["r"]) == ("top-1", 40, 0.0)
    assert found["matched_success"] == pytest.approx((0.5 * 30 + 0.2 * 10) / 40)
    assert found["random_success"] == pytest.approx(0.1 * 30 / 40)
    assert found["times_random"] == pytest.approx(17 / 3)
    assert found["matched_activation_change"] == pytest.approx(-17 / 40)
    assert found["matched_loss_change"] == pytest.approx(0.1)
    (rescaled,) = summarize_cuts(frame[frame["r"] == 0.5], "method")
    assert rescaled["matched_success"] == pytest.approx(0.3)
    assert summarize_cuts(frame.head(0), "method") == []
    first, second = summarize_cuts(frame, "layer", "method")
    assert (first["layer"], first["method"], first["n"]) == (0, "top-1", 30)
    assert (first["matched_success"], first["times_random"]) == (0.5, pytest.approx(5.0))
    # A control that switches nothing off cannot be divided by.
    assert (second["layer"], second["matched_success"], second["times_random"]) == (1, 0.2, None)


def test_steering_is_averaged_over_answers() -> None:
    single, linear = best_steering(Table.of("steering", POINTS).frame)
    assert linear.pop("strategy") == "linear"
    assert linear == pytest.approx(
        {"strength": 1.0, "n_answers": 2, "behaviour": 0.4, "coherence": 0.5, "score": 0.2}
    )
    assert single["score"] == pytest.approx(0.1)


def test_values_of_a_relation_compare_pairs_of_the_reference_with_others() -> None:
    relation = _results().values["relation"]
    assert (relation["n_fit"], relation["n_test"]) == (2, 2)
    assert (relation["n_reference_pairs"], relation["n_other_pairs"]) == (2, 2)
    assert relation["same_carrier"] == {"mlp_out.0": 0.5}
    assert relation["same_carrier_permuted"] == {"mlp_out.0": 0.0}
    assert (relation["shared_flow"], relation["shared_flow_permuted"]) == (0.5, 0.0)
    assert relation["cuts"][0] == {
        "cut": "none", "control": False, "n_features": 0, "fixed": 0.9, "target_only": None,
        "refitted": -0.1, "recall": 0.7, "kept": 0.8,
    }  # fmt: skip


def test_tables_hold_the_measurements() -> None:
    results = _results()
    assert [table.name for table in results.tables if table.headline] == [
        "groups", "deactivation_summary", "relation_cuts", "steering_summary"
    ]  # fmt: skip
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
        0, "top-1", "matched", "all", 0.0, "all", 30, 0.5, -0.5, 0.1
    ]  # fmt: skip
    assert len(results.table("steering")) == len(POINTS)
    assert list(results.table("answer_features").frame.iloc[1]) == [
        "source", "Rome", "mlp_out.0", "mlp_out.0.6", 0.8
    ]  # fmt: skip
    assert results.table("answer_pairs").frame.to_numpy().tolist() == [
        ["Paris", "France", "mlp_out.0.5", "mlp_out.0.5"], ["Rome", "Italy", "", ""]
    ]  # fmt: skip


def test_scalars_leave_out_what_is_not_known() -> None:
    scalars = _results().scalars
    assert scalars["deactivation/top-1/matched"] == pytest.approx(17 / 40)
    assert scalars["steering/linear/score"] == pytest.approx(0.2)
    assert scalars["auroc/mlp_out/layer_0"] == 0.75
    assert "auroc/attention_out/layer_0" not in scalars
    assert scalars["relation/r/none"] == 0.9
    assert scalars["relation/recall/carriers_control"] == 0.7
    assert len([key for key in scalars if key.startswith("relation/")]) == 3 * 3


def test_files(tmp_path) -> None:
    flows = {"Paris->France": [GRAPH, GRAPH]}
    results = _results(flows=flows)
    results.write(tmp_path)
    write_graphs(flows, tmp_path / "graphs")
    content = json.loads((tmp_path / "results.json").read_text())
    assert content["study"] == "feature_flow" and content["saes"] == ["mlp_out.0", "residual.0"]
    assert set(content["groups"][0]) == {
        "layer", "n_activations", "shares", "auroc", "zero_norm"
    }  # fmt: skip
    assert {path.stem for path in (tmp_path / "figures").iterdir()} == {
        "groups", "cosines", "transitions", "deactivation", "deactivation_layers",
        "rescaling", "steering", "relation", "flow_Paris-France",
    }  # fmt: skip
    assert {path.name for path in (tmp_path / "graphs").iterdir()} == {
        "residual.0.3.json", "residual.0.3.graphml"
    }  # fmt: skip


def test_flows_to_draw_and_answers_to_steer_towards() -> None:
    relation = _relation()
    assert relation.starts_to_draw(1) == {"Paris->France": [Feature(STREAM, 5)]}
    lm = SimpleNamespace(rows=lambda prompts: [[i] for i in range(len(prompts))])
    matcher = SimpleNamespace(follow=lambda start, thresholds: (start, thresholds))
    # Italy's feature has an AUROC below 0.9.
    (answer,) = relation.answers_to_steer(lm, matcher, 0.3, n_answers=4, n_prompts=2)  # type: ignore[arg-type]
    assert (answer.label, answer.token_id, answer.prompts) == ("France", 7, [[1], [2]])
    assert answer.graph == (Feature(STREAM, 5), 0.3)
