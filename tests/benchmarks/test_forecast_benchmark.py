"""The scripts that forecast edits of pretrained LMs and score the forecasts."""

import csv
import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from itertools import product
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
        "group": reference.argmax(1),
        **{f"risk/{name}": rng.normal(size=n)
           for name in (*scores.BASELINES, scores.COUNT, scores.WEIGHT, scores.VOCABULARY)},
    }  # fmt: skip
    arrays["risk/same_reference"] = np.bincount(arrays["group"])[arrays["group"]]
    return scores.ForecastRun(lm, "lora", relation, arrays)


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
    assert one.is_judged() and one.is_judged(within=True)
    alone = {**one.arrays, "group": np.arange(80)}
    assert not replace(one, arrays=alone).is_judged(within=True), "no two share a reference"


def test_nothing_is_fitted_on_what_it_is_judged_on() -> None:
    everything = [
        edits(lm, seed, relation=relation)
        for seed, (lm, relation) in enumerate(
            [("a", "city->country"), ("b", "ceo->company"), ("c", "X+1->X+2")]
        )
    ]

    def fitted(everything: list[Any]) -> Any:
        return scores.with_fits(everything)[0].fitted

    found = fitted(everything)
    assert set(found) == set(scores.FITS)
    assert roc_auc_score(everything[0].failed, -found["probability"][:, 0]) > 0.7
    areas = [
        roc_auc_score(everything[0].failed, -found[name][:, 0])
        for name in (scores.BOTH, scores.CHEAP)
    ]
    assert areas[0] > areas[1] + 0.1, "only the step knows"
    everything[0].arrays["outcome"] = 2 - everything[0].arrays["outcome"]
    for name, own in fitted(everything).items():
        np.testing.assert_allclose(own.sum(1), 1)
        np.testing.assert_array_equal(own, found[name])
    everything[1].arrays["outcome"] = 2 - everything[1].arrays["outcome"]
    for name, own in fitted(everything).items():
        assert np.abs(own - found[name]).max() > 0.01
    for same in (edits("a", 9, relation="X+1->X+2"), edits("b", 9)):
        alone = scores.with_fits([everything[0], same])[0]
        assert not alone.fitted
        with pytest.raises(KeyError):
            alone.risk("probability")


def test_inputs_of_a_fit_do_not_depend_on_their_scale() -> None:
    one = edits("a", 1, 30)
    found = one.features(scores.TOGETHER)
    p = torch.from_numpy(one.logits("in_context")).softmax(1).double().numpy()
    right = (p * one.arrays["reference"]).sum(1)
    np.testing.assert_allclose(found[:, 0], np.log(right / (1 - right)), rtol=1e-6)
    one.arrays["risk/popularity"] = np.exp(one.arrays["risk/popularity"])
    np.testing.assert_allclose(one.features(scores.TOGETHER), found)
    assert found[:, 5].argsort().tolist() == one.risk("gradient_similarity").argsort().tolist()
    assert abs(found[:, 5].mean()) < 1e-12 and found[:, 5].std() == pytest.approx(1)


def test_areas_count_pairs_of_edits() -> None:
    """By loops over pairs, each as often as its references are drawn."""
    rng = np.random.default_rng(0)
    truth, values = rng.random(40) < 0.4, rng.integers(9, size=40).astype(float)
    group = rng.integers(6, size=40)
    weights = scores.drawn(group, 3, rng)
    assert (weights[0] == 1).all() and (weights.sum(1) == 6).all()
    for within in (False, True):
        found = scores.areas(truth, values, group, weights, within)
        for area, drawn in zip(found, weights, strict=True):
            won = n = 0.0
            for i, j in product(truth.nonzero()[0], (~truth).nonzero()[0]):
                if not within or group[i] == group[j]:
                    # A reference that is drawn twice has no pairs with its copy.
                    times = drawn[group[i]] * (1 if within else drawn[group[j]])
                    won += times * ((values[i] > values[j]) + (values[i] == values[j]) / 2)
                    n += times
            assert area == pytest.approx(won / n)
    overall = scores.areas(truth, values, group, weights)[0]
    assert overall == pytest.approx(roc_auc_score(truth, values))


def test_intervals_are_over_references_and_relations() -> None:
    """Copies of an edit say no more than the edit; another relation does."""
    one = edits("a", 3, 120)
    many = {name: np.repeat(value, 5, 0) for name, value in one.arrays.items()}
    references = np.arange(120)
    widths = []
    for arrays, group in ((one.arrays, references), (many, np.repeat(references, 5))):
        run = replace(one, arrays={**arrays, "group": group})
        area, low, high = scores.interval(scores.mean_areas([run], "optimizer_step"))
        assert area == pytest.approx(roc_auc_score(run.failed, run.risk("optimizer_step")))
        assert low < area < high
        widths.append(high - low)
    assert widths[1] == pytest.approx(widths[0], rel=0.15)
    # Of two relations with scores 0 and 1, half of the samples have both.
    runs = [replace(one, relation=name) for name in ("a->b", "b->c")]
    found = scores.mean_over_relations(
        runs, lambda run, weights: np.full(len(weights), float(run.relation == "a->b"))
    )
    assert found[0] == 0.5 and set(found[1:]) == {0.0, 0.5, 1.0}
    assert np.mean(found[1:] == 0.5) == pytest.approx(0.5, abs=0.06)


def test_cases_give_counts_weights_and_other_trainings(tmp_path: Path) -> None:
    head = "subject,source_answer,reference,weight_reference,probability_reference_after,"
    head += "vocabulary_risk\n"
    own = "Emma,Paris,France,0.5,0.9,-1\nnull,Lyon,France,-1,0.2,1\nNA,Lima,Peru,0,0.1,2\n"
    file = tmp_path / "outcomes_lora_city_to_country.csv"
    file.write_text(head + own)
    steps = tmp_path / "steps2_lora_city_to_country.csv"
    steps.write_text(head + own.replace("0.9", "0.4"))
    found = {name: value.tolist() for name, value in scores.read_cases(file).items()}
    assert found == {
        "group": [0, 0, 1], "risk/same_reference": [2, 2, 1],
        "risk/minus_reference_weight": [-0.5, 1.0, 0.0], "risk/steps2": [-0.4, -0.2, -0.1],
        "risk/vocabulary": [-1, 1, 2],
    }  # fmt: skip
    for changed in (own.replace("Emma", "Lea"), own.replace("Lima", "Cuzco"), own[:-16]):
        steps.write_text(head + changed)
        with pytest.raises(SystemExit, match=r"steps2.* has other edits than"):
            scores.read_cases(file)


def test_tables_of_all_scores(rows: Callable[[str], list[list[str]]], tmp_path: Path) -> None:
    runs = [
        edits("a", 0, 400), edits("b", 1, 400, "ceo->company"),
        edits("c", 2, 400, "X+1->X+2"),
    ]  # fmt: skip
    runs[0].arrays["risk/steps1"] = runs[0].failed + 0.5
    runs = scores.with_fits(runs)
    times = {"n_edits": 32, "training": 100, "optimizer_step": 4, "in_context": 1, "maps": 9.375,
             "gradient_similarity": 30}  # fmt: skip
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "forecast_costs.json").write_text(json.dumps({"lora": times}))
    made = {name: rows(table) for name, table in forecast_tables.tables(runs, tmp_path).items()}
    own = {name: [row for row in table if row[0] in ("a", "a, lora")]
           for name, table in made.items()}  # fmt: skip
    one, p = runs[0], runs[0].fitted["probability"]
    groups = [one.arrays["group"] == name for name in set(one.arrays["group"].tolist())]
    pairs = [one.failed[group].sum() * (~one.failed[group]).sum() for group in groups]

    def both(risk: Any, truth: Any = one.failed) -> list[str]:
        parts = [roc_auc_score(truth[group], risk[group]) for group in groups]
        return [f"{roc_auc_score(truth, risk):.2f}", f"{np.average(parts, weights=pairs):.2f}"]

    (row,) = own["real_relations"]
    assert row[:5] == ["a", "lora", "city→country", "400", f"{1 - one.failed.mean():.0%}"]
    assert row[5].endswith(", 0.50") and row[12] == ", ".join(both(-p[:, 0]))
    right = (one.logits("optimizer_step").argmax(1) == one.arrays["after"]).mean()
    assert row[15].startswith(f"{roc_auc_score(one.hallucinated, p[:, 1]):.2f}, ")
    assert row[-1] == f"{right:.0%}"
    known = one.arrays["reference"][np.arange(400), one.logits("in_context").argmax(1)]
    raw = one.failed[~known].mean() - one.failed[known].mean()
    assert row[16].replace("−", "-").startswith(f"{raw:+.2f}, ")
    baselines = one.arrays[f"risk/{scores.VOCABULARY}"], -one.fitted[scores.CHEAP][:, 0]
    for cells, baseline in zip(row[13:15], baselines, strict=True):
        (low, high), _ = (cell.split("…") for cell in cells.replace("−", "-").split(", "))
        lead = roc_auc_score(one.failed, -p[:, 0]) - roc_auc_score(one.failed, baseline)
        assert float(low) < lead < float(high)
    leads = {row[0]: row for row in made["real_leads"] if row[1] == "a, lora"}
    cheap = both(-one.fitted[scores.CHEAP][:, 0])
    for place, edited in enumerate(("all", "within a reference")):
        assert leads[edited][5:7] == [cheap[place], both(-p[:, 0])[place]]
        low, high = (float(x.replace("−", "-")) for x in leads[edited][10][7:-1].split("…"))
        assert low < float(leads[edited][6]) - float(leads[edited][5]) < high
    column = [row[1] for row in made["real_within"] if row[0] == "map\\_0"]
    assert column[0].startswith(both(one.risk("map_0"))[1] + " (")
    assert own["real_steps"][0][5:] == ["1.00, 1.00", "", "", ""]
    assert own["real_costs"][0][2:] == ["32", "3.1 s", "0.04", "0.01", "0.30", "0.02"]
    (left,) = own["real_left_out"]
    kept = one.arrays["outcome"][p[:, 1] <= 0.5]
    order = np.argsort(one.fitted[scores.CHEAP][:, 1], kind="stable")
    shares = [", ".join(f"{np.mean(some == code):.0%}" for code in (1, 0))
              for some in (kept, one.arrays["outcome"][order[: len(kept)]])]  # fmt: skip
    text, _, lead = left[4].rpartition("; ")
    assert text == f"{shares[0]} of {len(kept) / 400:.0%} kept; {shares[1]}"
    low, high = map(int, lead.replace("−", "-").partition("(")[2][:-1].split(" to "))
    both_kept = (kept, one.arrays["outcome"][order[: len(kept)]])
    points = 100 * np.subtract(*((some == 1).mean() for some in both_kept[::-1]))
    assert lead.replace("−", "-").startswith(f"{points:z.0f} (") and low < points < high
    forecast_tables.weights_figure(runs).savefig(tmp_path / "weights.png")
    assert (tmp_path / "weights.png").stat().st_size > 10_000


def test_edits_are_forecast_from_their_cases(small_lm: str, tmp_path: Path) -> None:
    lm = LanguageModel.from_pretrained(small_lm)
    relation = TokenizedRelation.of("city->country", Catalogue.load(), lm.tokenizer)
    some = sample_edits(relation, lm, 5)
    folder = tmp_path / "small"
    folder.mkdir()
    cases = folder / "outcomes_lora_city_to_country.csv"
    with cases.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["subject", "source_answer", "reference", "weight_reference",
                         "vocabulary_risk", "answer_after", "outcome"])  # fmt: skip
        for edit in some:
            after = relation.target.texts[edit.reference[0]]
            writer.writerow([edit.subject, edit.answer, after, 0.5, 0.1, after, "generalized"])
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
    for seed, kind in product("12", (".csv", ".npz")):  # new edits of two seeds are one run
        shutil.copy(cases.with_suffix(kind), folder / f"balanced{seed}_lora_city_to_country{kind}")
    (both,) = scores.load_balanced(tmp_path, [found, edits("b", 1, 400, "ceo->company")])
    assert both.risk("map_0").tolist() == found.risk("map_0").tolist() * 2
    assert both.risk(scores.COUNT).tolist() == (2 * found.risk(scores.COUNT)).tolist() * 2
    assert both.fitted[scores.PROBABILITY].sum(1) == pytest.approx(np.ones(10))
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
