"""Forecasts of edits: what is predicted, how it is scored, and what `lincorr predict` writes."""

import json
import math
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
import torch
from sklearn.linear_model import LinearRegression, LogisticRegression, Ridge
from sklearn.metrics import roc_auc_score
from torch.utils.data import DataLoader

from lincorr_lightning.cli import main
from lincorr_lightning.errors import ConfigError, LinearMapError, SubjectsError
from lincorr_lightning.finetune.adapters import AdapterSettings
from lincorr_lightning.finetune.batches import EditTraining
from lincorr_lightning.finetune.datamodule import EditsDataModule
from lincorr_lightning.finetune.edits import Edit
from lincorr_lightning.finetune.forecasts import (
    OutcomeModel,
    forecast_edits,
    outcome_features,
    outcome_model,
)
from lincorr_lightning.finetune.module import EditForecast
from lincorr_lightning.finetune.optimizer_step import STEP_SCALE
from lincorr_lightning.finetune.results import forecast_results
from lincorr_lightning.functional import Outcome
from lincorr_lightning.lm.config import LMConfig
from lincorr_lightning.lm.vocabulary import sample_subjects


@pytest.fixture(scope="module")
def edits(lm) -> list[Edit]:
    return EditsDataModule(lm, n_edits=12).prepare_edits()


@pytest.fixture(scope="module")
def forecasts(lm, edits, relation):
    return forecast_edits(
        lm, edits, relation, ridges=[0.0, 10.0, "auto"], n_subjects=300, training=EditTraining()
    )


# -- what is predicted --------------------------------------------------------------------------


def naive_logits(lm, prompts, token_ids):
    rows = []
    for prompt in prompts:
        ids = lm.tokenizer(prompt, return_tensors="pt")["input_ids"]
        with torch.no_grad():
            rows.append(lm.model(ids).logits[0, -1, token_ids].double())
    return torch.stack(rows).numpy()


@pytest.mark.parametrize(("name", "fit"), [
    ("map_0", LinearRegression()), ("map_10", Ridge(alpha=10.0)),
])  # fmt: skip
def test_maps_carry_the_least_change_that_teaches_the_answer(
    lm, edits, relation, forecasts, name, fit
):
    cities, countries = relation.source, relation.target
    edited = {edit.subject for edit in edits}
    inputs = [x for x in sample_subjects(lm.tokenizer, 312) if x not in edited][:300]
    fit.fit(
        naive_logits(lm, [f"{x} lives in the city of" for x in inputs], cities.token_ids),
        naive_logits(lm, [f"{x} lives in the country of" for x in inputs], countries.token_ids),
    )
    for row, edit in enumerate(edits):
        source = naive_logits(lm, [f"{edit.subject} lives in the city of"], cities.token_ids)[0]
        target = naive_logits(lm, [f"{edit.subject} lives in the country of"], countries.token_ids)
        raised = source.copy()
        raised[edit.label] = source.max()
        moved = fit.predict(raised[None]) - fit.predict(source[None])
        expected = torch.from_numpy(target[0] + moved[0])
        torch.testing.assert_close(forecasts.predicted[name][row], expected, atol=1e-3, rtol=1e-3)
        if name == "map_0":
            weight = max(fit.coef_[label, edit.label] for label in edit.reference)
            own = forecasts.baselines["minus_reference_weight"][row]
            assert own == pytest.approx(-weight, rel=1e-3, abs=1e-4)
        mask = forecasts.reference_mask[row]
        assert set(mask.nonzero().squeeze(1).tolist()) == set(edit.reference)


def test_maps_and_the_gradient_are_used_on_request_only(lm, edits, relation, forecasts, tmp_path):
    unmapped = forecast_edits(lm, edits, relation, ridges=(), training=EditTraining())
    assert set(unmapped.predicted) == {"in_context", "optimizer_step"} and not unmapped.causes
    with pytest.raises(LinearMapError):
        forecast_edits(lm, edits, relation, linear_map=str(tmp_path / "nowhere"))
    assert forecasts.default == "optimizer_step"
    without = forecast_edits(lm, edits, relation, ridges=[0.0], n_subjects=100)
    assert set(without.predicted) == {"map_0", "in_context"}
    assert without.default == "in_context"
    assert (without.probabilities_from, without.probabilities) == ("", None)
    # An edit that is expected to generalize has no cause.
    answers = without.leading(without.predicted["in_context"])
    for edit, answer, cause in zip(edits, answers, without.causes, strict=True):
        assert (cause == "") == (relation.target.texts.index(answer) in edit.reference)


def test_in_context_logits_are_those_after_the_statement(lm, edits, relation, forecasts):
    source, target = relation.relation.source.template, relation.relation.target.template
    prompts = [f"{source} {e.answer}. {target}".replace("{}", e.subject) for e in edits]
    expected = naive_logits(lm, prompts, relation.target.token_ids)
    assert forecasts.predicted["in_context"].numpy() == pytest.approx(expected, abs=1e-4)


# -- scores -----------------------------------------------------------------------------------


def test_forecasts_are_scored_as_scikit_learn_does(forecasts):
    # Three edits of each reference, with different outcomes.
    forecasts = replace(forecasts, references=[f"land{row % 4}" for row in range(12)])
    labels = list(forecasts.labels)
    after, outcomes = [], []
    for row in range(12):
        right = forecasts.reference_mask[row].nonzero()[0].item()
        wrong = (right + 1) % len(labels)
        before = int(forecasts.before[row].argmax())
        # In turn: the reference, another label, the one before.
        after.append(labels[(right, wrong, before)[row % 3]])
        outcomes.append(("generalized", "hallucinated", "unchanged")[row % 3])
    scores = forecasts.scores(after, outcomes)
    baselines = {"answer_before", "same_reference", "minus_reference_weight", "most_frequent",
                 "vocabulary"}  # fmt: skip
    assert set(scores) == {*forecasts.predicted, *baselines}
    failed = [outcome != "generalized" for outcome in outcomes]
    for name, logits in (*forecasts.predicted.items(), ("answer_before", forecasts.before)):
        hits, risks = 0, []
        for row, right, answer in zip(
            logits.tolist(), forecasts.reference_mask.tolist(), after, strict=True
        ):
            hits += labels[row.index(max(row))] == answer
            best = [max(v for v, r in zip(row, right, strict=True) if r is is_right)
                    for is_right in (True, False)]  # fmt: skip
            risks.append(best[1] - best[0])
        assert scores[name]["accuracy"] == pytest.approx(hits / 12)
        assert scores[name]["auroc"] == pytest.approx(roc_auc_score(failed, risks))
        wins = [
            (risks[i] > risks[j]) + (risks[i] == risks[j]) / 2
            for i in range(12) for j in range(12)
            if failed[i] and not failed[j] and forecasts.references[i] == forecasts.references[j]
        ]  # fmt: skip
        assert scores[name]["auroc_within"] == pytest.approx(sum(wins) / len(wins))
    p = forecasts.probabilities
    errors = [sum((p[i, k].item() - (k == i % 3)) ** 2 for k in range(3)) for i in range(12)]
    assert scores["optimizer_step"]["brier"] == pytest.approx(sum(errors) / 12)
    most_frequent = max(after.count(label) for label in labels)
    expected = {"accuracy": most_frequent / 12, "auroc": 0.5, "auroc_within": 0.5}
    assert scores["most_frequent"] == expected
    for name, risks in forecasts.baselines.items():
        assert scores[name]["auroc"] == pytest.approx(roc_auc_score(failed, risks))
        assert scores[name]["accuracy"] is None
    assert scores["answer_before"]["accuracy"] >= 4 / 12
    alike = forecasts.scores([labels[0]] * 12, ["hallucinated"] * 12)
    assert alike["map_0"]["auroc"] is None and alike["map_0"]["auroc_within"] is None
    apart = replace(forecasts, references=list(map(str, range(12)))).scores(after, outcomes)
    assert apart["map_0"]["auroc"] == scores["map_0"]["auroc"]
    assert apart["map_0"]["auroc_within"] is None
    assert alike["most_frequent"]["accuracy"] == 1.0


def test_results_before_training_are_shares_of_the_predicted_outcomes(forecasts):
    results = forecast_results(forecasts)
    assert results.values["n_edits"] == 12
    for name, shares in results.values["predicted_outcomes"].items():
        assert sum(shares.values()) == pytest.approx(1), name
        leading = forecasts.predicted[name].argmax(1)
        right = forecasts.reference_mask[torch.arange(12), leading].double().mean().item()
        assert shares["generalized"] == pytest.approx(right)
    expected = dict(zip(Outcome, forecasts.probabilities.mean(0).tolist(), strict=True))
    assert results.values["mean_probability"] == pytest.approx(expected)
    frame = results.table("forecast").frame
    assert frame["map_0_risk"].tolist() == forecasts.risks("map_0")
    highest = sorted(forecasts.probabilities[:, 1].tolist(), reverse=True)[:10]
    assert results.table("riskiest").frame["p_hallucinated"].tolist() == highest
    assert set(frame["cause"]) <= {"", "imprecise W", "low prior", "ambiguous reference"}
    assert results.figures[0].png.startswith(b"\x89PNG")


# -- lincorr predict ---------------------------------------------------------------------------


def predict(small_lm, folder, *more):
    cli = main(
        ["predict", "--config", "forecast.yaml", f"--model.lm.name_or_path={small_lm}",
         f"--trainer.default_root_dir={folder}", "--trainer.enable_progress_bar=false",
         "--data.n_edits=7", *more]
    )  # fmt: skip
    return cli.trainer


def test_the_fine_tune_of_the_same_edits_forecasts_the_same(small_lm, tmp_path, finetune):
    predict(small_lm, tmp_path / "ahead")
    (path,) = (tmp_path / "ahead").rglob("results.json")
    results = json.loads(path.read_text(), parse_constant=pytest.fail)
    assert (results["study"], results["relation"], results["n_edits"]) == (
        "forecast", "city->country", 7,
    )  # fmt: skip
    assert (path.parent / "figures" / "forecast.png").read_bytes().startswith(b"\x89PNG")
    run = finetune({"n_edits": 7}, forecast=True)
    ahead, ours = (
        pd.read_csv(next(folder.rglob("forecast.csv")))
        for folder in (tmp_path / "ahead", run.folder)
    )
    names = [name for name in ahead if "answer" in name]
    pd.testing.assert_frame_equal(ahead[names], ours[names])


def test_a_plain_loader_over_an_edit_dataset_is_forecast(small_lm, make_trainer):
    module = EditForecast(LMConfig(small_lm), ridges=[0.0], n_subjects=100, optimizer_step=False)
    module.lm.load()
    data = EditsDataModule(module.lm, n_edits=5)
    dataset = data.predict_dataloader().dataset
    make_trainer().predict(module, DataLoader(dataset, batch_size=None))
    assert module.forecasts.subjects == [edit.subject for edit in data.prepare_edits()]
    assert set(module.forecasts.predicted) == {"map_0", "in_context"}
    with pytest.raises(ConfigError, match="EditForecast needs an EditDataset"):
        make_trainer().predict(module, DataLoader([0]))


# -- leaving risky edits out --------------------------------------------------------------------


def test_edits_above_a_risk_are_left_out(lm, edits, relation):
    training = EditTraining("lora", learning_rate=1e-3, n_steps=3)
    forecasts = forecast_edits(lm, edits, relation, ["auto"], training=training)
    risks = forecasts.probabilities[:, 1].tolist()
    limit = sorted(risks)[6]
    data = EditsDataModule(lm, n_edits=12, max_risk=limit, training=training)
    expected = [edit for edit, risk in zip(edits, risks, strict=True) if risk <= limit]
    assert data.prepare_edits() == expected
    assert 0 < len(expected) < 12
    labels = relation.target.texts
    left = [
        {"subject": edit.subject, "source_answer": edit.answer,
         "reference": "|".join(labels[i] for i in edit.reference), "p_hallucinated": risk}
        for edit, risk in zip(edits, risks, strict=True) if risk > limit
    ]  # fmt: skip
    dataset = data.train_dataloader().dataset
    assert dataset.left_out == left
    again = EditsDataModule(lm, n_edits=12, max_risk=limit, training=training)
    again.load_state_dict(data.state_dict())
    assert again.train_dataloader().dataset.left_out == dataset.left_out


def test_a_prediction_marks_the_edits_above_a_risk(small_lm, tmp_path):
    def table(folder, name):
        return pd.read_csv(next((tmp_path / folder).rglob(f"{name}.csv"))).set_index("subject")

    predict(small_lm, tmp_path / "all")
    risks = table("all", "forecast")["p_hallucinated"]
    limit = risks.sort_values().iloc[3]
    predict(small_lm, tmp_path / "some", f"--data.max_risk={limit}")
    results = json.loads(next((tmp_path / "some").rglob("results.json")).read_text())
    assert (results["n_edits"], results["n_above_max_risk"]) == (7, 3)
    assert table("some", "forecast")["above_max_risk"].to_dict() == (risks > limit).to_dict()
    assert table("some", "riskiest")["above_max_risk"].tolist() == [True] * 3 + [False] * 4


@pytest.mark.parametrize(("options", "message"), [
    (["--model.ridges=[best]"], r"model\.ridges is .*must be a number or auto"),
    (["--model.ridges=[-1]"], r"model\.ridges.*-1"),
    (["--data.max_risk=0.5", "--model.optimizer_step=false"],
     r"data\.max_risk needs model\.optimizer_step true"),
])  # fmt: skip
def test_settings_that_cannot_be(small_lm, tmp_path, options, message):
    with pytest.raises(ConfigError, match=message):
        predict(small_lm, tmp_path, *options)


def test_a_risk_that_leaves_no_edit_is_refused(lm):
    data = EditsDataModule(lm, n_edits=4, max_risk=0.0, training=EditTraining())
    with pytest.raises(SubjectsError, match=r"max_risk is 0, .* 0\.\d\d or more\. Raise it"):
        data.prepare_edits()
    with pytest.raises(ConfigError, match=r"data\.max_risk"):
        EditsDataModule(lm, max_risk=1.1)


def test_probabilities_say_what_training_they_were_fitted_on(lm, edits, relation):
    model, same = outcome_model("lora"), EditTraining("lora", 2e-3, 10)
    assert model.training == same.summary
    adapter = AdapterSettings(rank=4, target_modules=["q_proj", "v_proj"])
    text = model.describe("city->country", EditTraining("lora", 1e-3, 7, adapter).summary)
    how = "lora of rank 4, alpha 16 in q_proj, v_proj, 7 steps at 0.001"
    assert f"{model.training}; these are trained by {how}" in text
    assert "all edits together at" in EditTraining(protocol="joint").summary
    assert "landmark->country is not among them" in model.describe("landmark->country", "")
    text = forecast_edits(lm, edits[:2], relation, [], training=same).probabilities_from
    assert text == model.describe("city->country", same.summary)
    assert text.startswith(f"fitted on {model.n_edits} edits of ") and "these are" not in text


# -- probabilities of outcomes -----------------------------------------------------------------


def test_probabilities_are_those_of_the_regression():
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(90, 5)), rng.integers(3, size=90)
    theirs = LogisticRegression().fit(x, y)
    ours = OutcomeModel(theirs.coef_, theirs.intercept_, 90, ("a",), ("b->c",), "", STEP_SCALE)
    found = ours.probabilities(torch.tensor(x)).numpy()
    np.testing.assert_allclose(found, theirs.predict_proba(x), atol=1e-9)


def test_features_equal_the_definition():
    rng = np.random.default_rng(1)
    before, by_step = rng.normal(scale=3, size=(2, 20, 6))
    mask = rng.random((20, 6)) < 0.3
    mask[:, 0] = True
    found = outcome_features(*map(torch.tensor, (before, by_step, mask)))
    for i in range(20):
        old = max(range(6), key=lambda j, row=before[i]: row[j])
        expected = []
        weights = [math.exp(value) for value in by_step[i]]
        for chosen in ([j for j in range(6) if mask[i, j]], [old]):
            p = sum(weights[j] for j in chosen) / sum(weights)
            expected.append(math.log(p / (1 - p)))
        assert found[i].tolist() == pytest.approx(expected)
    logits = torch.tensor([[1e3, 0.0]])
    bounded = outcome_features(logits, -logits, torch.tensor([[False, True]]))
    assert bounded.abs().max() < 14


@pytest.mark.parametrize("method", ["full", "lora"])
def test_the_shipped_models_agree_with_common_sense(method):
    model = outcome_model(method)
    assert model.n_edits and model.lms and model.relations and model.training
    before = torch.tensor([[4.0, 0.0, 0.0]]).expand(3, -1)
    after = torch.tensor([[0.0, 6.0, 0.0], [0.0, 0.0, 6.0], [6.0, 0.0, 0.0]])
    mask = torch.tensor([[False, True, False]]).expand(3, -1)
    p = model.probabilities(outcome_features(before, after, mask))
    torch.testing.assert_close(p.sum(1), torch.ones(3, dtype=torch.float64))
    # An edit that is seen to reach its reference is the most likely to generalize.
    assert p[:, 0].argmax() == 0
    assert p[2, 2] == p[:, 2].max()
    assert model.step_scale == STEP_SCALE
