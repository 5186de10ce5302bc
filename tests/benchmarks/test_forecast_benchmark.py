"""The scripts that forecast edits of pretrained LMs and score the forecasts."""

import csv
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.metrics import roc_auc_score

from benchmarks.real_lms import forecast, forecast_baselines, forecast_tables
from benchmarks.real_lms import forecast_scores as scores
from lincorr_lightning.finetune.edits import sample_edits
from lincorr_lightning.knowledge import Catalogue, TokenizedRelation
from lincorr_lightning.lm import LanguageModel


def edits(lm: str, seed: int, n: int = 80, relation: str = "city->country") -> Any:
    """Edits whose outcome follows the step's forecast, but for some noise."""
    rng = np.random.default_rng(seed)
    before, by_map, in_context, by_step = rng.normal(scale=2, size=(4, n, 5))
    reference = np.eye(5, dtype=bool)[rng.integers(5, size=n)]
    reference[np.arange(n), before.argmax(1)] = False
    reference[~reference.any(1), 0] = True
    after = (by_step + rng.normal(scale=1.0, size=(n, 5))).argmax(1)
    right = reference[np.arange(n), after]
    outcome = np.where(right, 0, np.where(after == before.argmax(1), 2, 1))
    arrays = {
        "before": before, "reference": reference, "after": after, "outcome": outcome,
        "predicted/map_0": by_map, "predicted/map_auto": by_map,
        "predicted/in_context": in_context,
        f"predicted/{scores.STEP}": by_step,
        **{f"risk/{name}": rng.normal(size=n) for name in scores.BASELINES},
    }  # fmt: skip
    unknown = np.full((n, 3), np.nan)
    return scores.ForecastRun(lm, "lora", relation, arrays, unknown, unknown)


def test_risks_and_accuracies_equal_the_definition() -> None:
    one = edits("a", 0)
    logits = one.arrays[f"predicted/{scores.STEP}"]
    for i, risk in enumerate(one.risk("optimizer_step")):
        groups: dict[bool, list[float]] = {True: [], False: []}
        for value, is_right in zip(logits[i], one.arrays["reference"][i], strict=True):
            groups[bool(is_right)].append(value)
        assert risk == pytest.approx(max(groups[False]) - max(groups[True]))
    hits = [max(range(5), key=lambda j, row=row: row[j]) == after
            for row, after in zip(logits, one.arrays["after"], strict=True)]  # fmt: skip
    assert one.hits("optimizer_step").tolist() == hits
    assert one.is_judged


def test_nothing_is_fitted_on_what_it_is_judged_on() -> None:
    everything = [
        edits(lm, seed, relation=relation)
        for seed, (lm, relation) in enumerate(
            [("a", "city->country"), ("b", "ceo->company"), ("c", "X+1->X+2")]
        )
    ]
    found = scores.probabilities(everything[0], everything)
    np.testing.assert_allclose(found.sum(1), 1)
    assert roc_auc_score(everything[0].failed, -found[:, 0]) > 0.7
    turned = everything[0].arrays["outcome"].copy()
    everything[0].arrays["outcome"] = 2 - turned
    np.testing.assert_array_equal(scores.probabilities(everything[0], everything), found)
    everything[1].arrays["outcome"] = 2 - everything[1].arrays["outcome"]
    assert np.abs(scores.probabilities(everything[0], everything) - found).max() > 0.01
    for same in (edits("a", 9, relation="X+1->X+2"), edits("b", 9)):
        assert np.isnan(scores.probabilities(everything[0], [everything[0], same])).all()


def test_the_interval_holds_the_area_and_narrows_with_edits() -> None:
    widths = []
    for n in (60, 600):
        one = edits("a", 3, n)
        area, low, high = scores.interval([one.failed], [one.risk("optimizer_step")])
        assert low < area < high
        widths.append(high - low)
    assert widths[1] < widths[0] / 2


def test_two_forecasters_are_compared_on_the_same_samples() -> None:
    one = edits("a", 5, 300)
    area, other, low = scores.compare([one], "optimizer_step", "map_0")
    assert area == pytest.approx(roc_auc_score(one.failed, one.risk("optimizer_step")))
    assert area > other
    assert 0 < low < area - other
    assert scores.compare([one], "map_0", "optimizer_step")[2] < 0
    assert scores.compare([one], "map_0", "map_0")[2] == 0


def test_areas_are_those_of_scikit_learn() -> None:
    rng = np.random.default_rng(0)
    truth, values = rng.random((5, 40)) < 0.4, rng.integers(9, size=(5, 40)).astype(float)
    expected = [roc_auc_score(*each) for each in zip(truth, values, strict=True)]
    np.testing.assert_allclose(scores.areas(truth, values), expected)
    assert np.isnan(scores.areas(np.full(3, True), np.arange(3.0)))


def test_tables_of_all_scores(rows: Callable[[str], list[list[str]]], tmp_path: Path) -> None:
    runs = [
        edits("a", 0, 400), edits("b", 1, 400, "ceo->company"),
        edits("c", 2, 400, "X+1->X+2"),
    ]  # fmt: skip
    outcome = runs[0].arrays["outcome"]
    runs[0] = replace(runs[0], repeated=(-1.0 * (outcome != 0), outcome))
    runs = scores.with_probabilities(runs)
    times = {"n_edits": 32, "training": 100, "optimizer_step": 4, "in_context": 1, "maps": 9.375,
             "gradient_similarity": 30, "activation_similarity": 2}  # fmt: skip
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "forecast_costs.json").write_text(json.dumps({"lora": times}))
    cells = rows("\n\n".join(forecast_tables.tables(runs, tmp_path).values()))
    area = roc_auc_score(runs[0].failed, runs[0].risk("map_0"))
    assert any(f"{area:.2f}" in row for row in cells if row[:3] == ["a", "lora", "city→country"])
    assert any(row[4:6] == ["100%", "1.00"] for row in cells)
    p = runs[0].probabilities
    areas = [roc_auc_score(runs[0].failed, -p[:, 0]), roc_auc_score(runs[0].hallucinated, p[:, 1])]
    own = [row for row in cells if row[0] == "probability"]  # not generalized, hallucinated
    for row, area in zip(own, areas, strict=True):
        assert row[1].startswith(f"{area:.2f} (")
    (goals,) = [row for row in cells if row[0] == "a, lora" and row[1] == "1"]
    assert goals[2].startswith(f"{areas[0]:.2f} (")
    assert goals[-1] == "0.04", "of the costs"
    brier = np.mean([sum((row[k] - (k == one)) ** 2 for k in range(3))
                     for row, one in zip(p, outcome, strict=True)])  # fmt: skip
    assert any(row[-2].startswith(f"{brier:.2f} (") for row in cells)
    assert any(row[:3] == ["a", "lora", "32"] and row[-1] == "0.02" for row in cells)
    (left,) = [row for row in cells if row[0] == "a, lora" and row[1] == "400"]
    kept = outcome[runs[0].probabilities[:, 1] <= 0.5]
    shares = [f"{np.mean(kept == code):.0%}" for code in (1, 0)]
    assert left[4] == f"{', '.join(shares)} of {len(kept) / 400:.0%} kept"
    assert float(left[4].split("%")[0]) < float(left[2].split("%")[0]), "fewer hallucinate"


def test_edits_are_forecast_from_their_cases(small_lm: str, tmp_path: Path) -> None:
    lm = LanguageModel.from_pretrained(small_lm)
    relation = TokenizedRelation.of("city->country", Catalogue.load(), lm.tokenizer)
    some = sample_edits(relation, lm, 5)
    folder = tmp_path / "small"
    folder.mkdir()
    cases = folder / "outcomes_lora_city_to_country.csv"
    with cases.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["subject", "source_answer", "answer_after", "outcome"])
        for edit in some:
            after = relation.target.texts[edit.reference[0]]
            writer.writerow([edit.subject, edit.answer, after, "generalized"])
    forecast.save(forecast.collect(lm, "city->country", "lora", cases), cases.with_suffix(".npz"))
    (found,) = scores.load(tmp_path)
    assert (found.lm, found.method, found.relation) == ("small", "lora", "city->country")
    assert not found.failed.any()
    subjects = [edit.subject for edit in some]
    before = lm.domain_logits(relation.target_prompts(subjects), relation.target.token_ids)
    np.testing.assert_allclose(found.logits("answer_before"), before.numpy(), rtol=1e-3, atol=1e-3)
    for i, edit in enumerate(some):
        assert set(found.arrays["reference"][i].nonzero()[0]) == set(edit.reference)
    assert {"map_0", "map_auto"} <= {n.removeprefix("predicted/") for n in found.arrays}
    times = forecast.measure_costs(Path(small_lm), "lora")
    assert times["n_edits"] == 32
    assert all(times[name] > 0 for name in ("training", "optimizer_step", "in_context", "maps"))


def test_gradient_similarity_equals_the_definition(small_lm: str) -> None:
    lm = LanguageModel.from_pretrained(small_lm)
    relation = TokenizedRelation.of("city->country", Catalogue.load(), lm.tokenizer)
    some = sample_edits(relation, lm, 2)
    found = forecast_baselines.gradient_similarity(lm, some, relation)
    assert not any(p.requires_grad for p in lm.model.parameters())
    lm.model.requires_grad_(True)
    for edit, risk in zip(some, found.tolist(), strict=True):
        gradients = []
        for prompt, token in (
            (f"{edit.subject} lives in the city of", edit.tokens[0]),
            (f"{edit.subject} lives in the country of",
             relation.target.token_ids[edit.reference[0]]),
        ):  # fmt: skip
            lm.model.zero_grad()
            logits = lm.model(**lm.tokenizer(prompt, return_tensors="pt")).logits[0, -1]
            (-logits.log_softmax(0)[token]).backward()
            gradients.append(torch.cat([p.grad.flatten() for p in lm.model.parameters()]))
        expected = torch.cosine_similarity(*gradients, dim=0).item()
        assert risk == pytest.approx(-expected, rel=1e-3)
