"""Foretelling edits: what is foreseen, how it is judged, and what `lincorr predict` writes."""

import csv
import json
from dataclasses import replace

import pytest
import torch
from sklearn.linear_model import LinearRegression, Ridge
from sklearn.metrics import roc_auc_score

from lincorr_lightning.cli import main
from lincorr_lightning.errors import ConfigError, LinearMapError
from lincorr_lightning.finetune.datamodule import EditsDataModule
from lincorr_lightning.finetune.forecast_module import EditForecast
from lincorr_lightning.finetune.forecasts import EditForecasts
from lincorr_lightning.lm.config import LMConfig
from lincorr_lightning.lm.language_model import LanguageModel
from lincorr_lightning.lm.vocabulary import sample_subjects


@pytest.fixture(scope="module")
def lm(small_lm):
    return LanguageModel.from_pretrained(small_lm)


@pytest.fixture(scope="module")
def data(lm):
    made = EditsDataModule(n_edits=12)
    made.prepare_edits(lm)
    return made


@pytest.fixture(scope="module")
def forecasts(lm, data):
    return EditForecasts.make(lm, data, ridges=[0.0, 10.0, "auto"], n_subjects=300)


# -- what is foreseen --------------------------------------------------------------------------


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
def test_maps_carry_the_least_change_that_teaches_the_answer(lm, data, forecasts, name, fit):
    cities, countries = data.asked.source, data.asked.target
    inputs = sample_subjects(lm.tokenizer, 300)
    fit.fit(
        naive_logits(lm, [f"{x} lives in the city of" for x in inputs], cities.token_ids),
        naive_logits(lm, [f"{x} lives in the country of" for x in inputs], countries.token_ids),
    )
    for row, edit in enumerate(data.edits):
        source = naive_logits(lm, [f"{edit.subject} lives in the city of"], cities.token_ids)[0]
        target = naive_logits(lm, [f"{edit.subject} lives in the country of"], countries.token_ids)
        raised = source.copy()
        raised[edit.label] = source.max()
        moved = fit.predict(raised[None]) - fit.predict(source[None])
        expected = torch.from_numpy(target[0] + moved[0])
        torch.testing.assert_close(forecasts.predicted[name][row], expected, atol=1e-3, rtol=1e-3)
        assert forecasts.edits[row][:2] == (edit.subject, edit.answer)
        assert set(forecasts.right[row].nonzero().squeeze(1).tolist()) == set(edit.rights)


def test_the_lm_is_left_as_it_was(small_lm, data):
    from transformers import AutoModelForCausalLM

    lm = LanguageModel.from_pretrained(small_lm)
    stream = torch.get_rng_state()
    EditForecasts.make(lm, data, ridges=["auto"], n_subjects=100)
    assert torch.equal(torch.get_rng_state(), stream)
    before = AutoModelForCausalLM.from_pretrained(small_lm, dtype=torch.float32).state_dict()
    after = lm.model.state_dict()
    assert all(torch.equal(after[name], before[name]) for name in before)
    assert not any(p.requires_grad or p.grad is not None for p in lm.model.parameters())


def test_the_gradient_is_followed_on_request_only(lm, data, forecasts):
    assert {"first_order", "virtual_step"} <= set(forecasts.predicted)
    without = EditForecasts.make(lm, data, ridges=[0.0], n_subjects=100, first_order=False)
    assert set(without.predicted) == {"map_0"}


def test_a_map_of_other_labels_is_refused(lm, data, tmp_path):
    with pytest.raises(LinearMapError):
        EditForecasts.make(lm, data, linear_map=str(tmp_path / "nowhere"))


# -- judging -----------------------------------------------------------------------------------


def test_forecasts_are_scored_as_scikit_learn_does(forecasts):
    labels = list(forecasts.labels)
    after, outcomes = [], []
    for row in range(12):
        right = forecasts.right[row].nonzero()[0].item()
        wrong = (right + 1) % len(labels)
        before = int(forecasts.before[row].argmax())
        # In turn: the reference, another label, the one before.
        after.append(labels[(right, wrong, before)[row % 3]])
        outcomes.append(("generalized", "hallucinated", "unchanged")[row % 3])
    scores = forecasts.scores(after, outcomes)
    assert set(scores) == {*forecasts.predicted, "answer_before", "most_frequent"}
    failed = [outcome != "generalized" for outcome in outcomes]
    for name, logits in (*forecasts.predicted.items(), ("answer_before", forecasts.before)):
        hits, risks = 0, []
        for row, right, said in zip(logits.tolist(), forecasts.right.tolist(), after, strict=True):
            hits += labels[row.index(max(row))] == said
            best = [max(v for v, r in zip(row, right, strict=True) if r is is_right)
                    for is_right in (True, False)]  # fmt: skip
            risks.append(best[1] - best[0])
        assert scores[name]["accuracy"] == pytest.approx(hits / 12)
        assert scores[name]["auroc"] == pytest.approx(roc_auc_score(failed, risks))
    commonest = max(after.count(label) for label in labels)
    assert scores["most_frequent"] == {"accuracy": commonest / 12, "auroc": 0.5}
    assert scores["answer_before"]["accuracy"] >= 4 / 12


def test_where_all_edits_end_alike_there_is_no_auroc(forecasts):
    scores = forecasts.scores([forecasts.labels[0]] * 12, ["hallucinated"] * 12)
    assert scores["map_0"]["auroc"] is None
    assert scores["most_frequent"]["accuracy"] == 1.0


def test_a_checkpoint_gives_them_back(forecasts, tmp_path):
    torch.save(forecasts.state(), tmp_path / "state.pt")
    again = EditForecasts.restored(torch.load(tmp_path / "state.pt", weights_only=True))
    assert again.edits == forecasts.edits
    assert list(again.labels) == list(forecasts.labels)
    assert again.predicted.keys() == forecasts.predicted.keys()
    after, outcomes = [forecasts.labels[0]] * 12, ["generalized", "unchanged"] * 6
    assert again.scores(after, outcomes) == forecasts.scores(after, outcomes)
    assert torch.equal(again.before, forecasts.before)


def test_without_an_end_nothing_is_judged(forecasts, tmp_path):
    told = forecasts.write(tmp_path, None)
    assert set(told) == {"foreseen"}
    for name, shares in told["foreseen"].items():
        assert sum(shares.values()) == pytest.approx(1), name
        said = forecasts.predicted[name].argmax(1)
        right = forecasts.right[torch.arange(12), said].double().mean().item()
        assert shares["generalized"] == pytest.approx(right)


# -- lincorr predict ---------------------------------------------------------------------------


def predict(small_lm, folder, *more):
    cli = main(
        ["predict", "--config", "forecast.yaml", f"--model.lm.name_or_path={small_lm}",
         f"--trainer.default_root_dir={folder}", "--trainer.enable_progress_bar=false",
         "--data.n_edits=7", *more]
    )  # fmt: skip
    return cli.trainer


def test_predict_writes_a_row_an_edit_and_a_picture(small_lm, tmp_path):
    predict(small_lm, tmp_path, "--model.ridges=[0, auto, 10]", "--model.n_subjects=200")
    (path,) = tmp_path.rglob("results.json")
    results = json.loads(path.read_text(), parse_constant=pytest.fail)
    assert (results["study"], results["relation"]) == ("forecast", "city->country")
    assert results["n_edits"] == 7
    names = {"map_0", "map_auto", "map_10", "first_order", "virtual_step"}
    assert set(results["foreseen"]) == names
    with (path.parent / "tables" / "forecast.csv").open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 7
    expected = EditsDataModule(n_edits=7).prepare_edits(LanguageModel.from_pretrained(small_lm))
    assert [row["subject"] for row in rows] == [edit.subject for edit in expected]
    for name in names:
        assert any(name in column for column in rows[0]), name
    picture = path.parent / "figures" / "forecast.png"
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_the_fine_tune_of_the_same_edits_foresees_the_same(small_lm, tmp_path, finetune):
    predict(small_lm, tmp_path / "ahead")
    (ahead,) = (tmp_path / "ahead").rglob("forecast.csv")
    run = finetune({"n_edits": 7}, forecast=True)
    with ahead.open(newline="") as one, (run.folder / "tables" / "forecast.csv").open() as other:
        for ours, theirs in zip(csv.DictReader(one), csv.DictReader(other), strict=True):
            shared = {name for name in ours if "answer" in name and ours[name]}
            assert {name: ours[name] for name in shared} == {name: theirs[name] for name in shared}


def test_fast_dev_run_leaves_nothing(small_lm, tmp_path):
    predict(small_lm, tmp_path, "--trainer.fast_dev_run=true", "--model.first_order=false")
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_other_data_is_refused(small_lm, make_trainer):
    module = EditForecast(LMConfig(small_lm))
    with pytest.raises(ConfigError, match="EditForecast foretells edits of an EditsDataModule"):
        make_trainer().predict(module, torch.utils.data.DataLoader([0]))


def test_forecasts_of_other_edits_are_not_judged(forecasts, data, tmp_path):
    from lincorr_lightning.finetune.results import EditReport
    from lincorr_lightning.functional import Outcome

    def report(subjects):
        n = len(subjects)
        said = forecasts.before.numpy()[:n]
        return EditReport.of(
            data.asked, subjects, [edit.answer for edit in data.edits][:n],
            [edit.label for edit in data.edits][:n], forecasts.right.numpy()[:n], said, said,
            [Outcome.UNCHANGED] * n, [True] * n,
            torch.eye(forecasts.right.shape[1], len(data.asked.source.labels)).numpy(),
        )  # fmt: skip

    subjects = [edit.subject for edit in data.edits]
    judged = forecasts.write(tmp_path / "same", report(subjects))
    assert judged["answer_before"]["accuracy"] == 1.0
    for name, others in (("fewer", subjects[:5]), ("other", subjects[::-1])):
        assert set(forecasts.write(tmp_path / name, report(others))) == {"foreseen"}
    shorter = replace(forecasts, edits=list(forecasts.edits))
    assert shorter.write(tmp_path / "again", report(subjects)) == judged
