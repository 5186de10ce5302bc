"""Cases of edits and numbers over them, against the same worked out one by one."""

import json
import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import mannwhitneyu
from sklearn.metrics import roc_auc_score

from lincorr_lightning.finetune.cases import (
    EditCase,
    case_statistics,
    edit_cases,
    forecast_scores,
)
from lincorr_lightning.functional.outcomes import Outcome
from lincorr_lightning.knowledge import Completeness

CITIES = ["Paris", "Zürich", "$x_1$"]
COUNTRIES = ["France", "Switzerland", "法国", "a|b *c*"]
G, H, U = Outcome


def relation(sources: list[str], targets: list[str]) -> Any:
    # In turn whole, of a phrase, and subwords.
    kinds = [list(Completeness)[i % 3] for i in range(len(targets))]
    return SimpleNamespace(
        name="city->country",
        source=SimpleNamespace(texts=sources),
        target=SimpleNamespace(texts=targets, completeness=kinds),
        ambiguous_mask=np.zeros((len(targets), len(sources)), dtype=bool),
    )


def worked_example(**changes: Any) -> list[EditCase]:
    """Five edits whose numbers can be read off."""
    values: dict[str, Any] = {
        "relation": relation(CITIES, COUNTRIES),
        "subjects": ["Ann", "Bob", "Cy", "Di", "$Ed$"],
        "answers": ["Paris", "Zürich HB", "Paris", "$x_1$", "Paris"],
        "labels": [0, 1, 0, 2, 0],
        "reference_mask": [[1, 0, 1, 0], [0, 1, 0, 0], [1, 0, 1, 0], [0, 0, 0, 1], [1, 0, 1, 0]],
        "target_before": [
            [0, 3, 1, 2],
            [4, -1, 0, 0],
            [0, 9, -5, 2],
            [1, 2, 3, 0.5],
            [0, 0, 0, 9.0],
        ],
        "target_after": [
            [0, 3, 7, 2],
            [4, 3, 5, 0],
            [0, 9, 2, 2],
            [5, 2, 3, 0.5],
            [0, 8, 0, 7.0],
        ],
        "learned": [True, True, False, True, True],
        #          Paris Zürich $x_1$
        "weight": [[0.1, 0.2, 0.3], [0.4, 0.3, 0.1], [0.7, 0.5, 0.0], [0.0, 0.0, 0.25]],
    }
    values |= changes
    types = {"labels": torch.long, "reference_mask": torch.bool, "learned": torch.bool}
    for name in ("labels", "reference_mask", "learned", "target_before", "target_after", "weight"):
        values[name] = torch.as_tensor(values[name], dtype=types.get(name, torch.float64))
    return edit_cases(**values)


def random_cases(n: int = 60) -> tuple[list[EditCase], dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(3)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    mask = torch.rand(n, 5, generator=generator) < 0.3
    mask[:, 4] = False
    mask[:, 0] |= ~mask.any(1)
    before, after = 3 * normal(n, 5), 3 * normal(n, 5)
    after[::3] = before[::3]
    given = {
        "reference_mask": mask,
        "target_before": before,
        "target_after": after,
        "labels": torch.randint(9, (n,), generator=generator),
        "weight": normal(5, 9),
    }
    named = relation([f"city{i}" for i in range(9)], [f"land{i}" for i in range(5)])
    subjects = [f"x{i}" for i in range(n)]
    learned = torch.ones(n, dtype=torch.bool)
    return edit_cases(named, subjects, None, learned=learned, **given), given


def test_answers_that_may_mean_something_right():
    assert worked_example()[1].source_answer == "Zürich HB", "the whole answer, not its label"
    georgia = relation(CITIES, COUNTRIES)
    georgia.ambiguous_mask[[1, 2], [0, 0]] = True  # "Switzerland" and the reference, for "Paris"
    cases = worked_example(relation=georgia)
    assert [case.ambiguous for case in cases] == [False, False, True, False, True]
    assert cases[4].answer_after == "Switzerland"
    wrong = [case for case in cases if case.outcome == H]
    assert case_statistics(cases)["ambiguous_hallucinated"] == 1 / len(wrong)


def test_outcomes_by_completeness():
    cases = worked_example()
    # France is whole, Switzerland of a phrase, 法国 a subword, the fourth whole again.
    assert [case.completeness for case in cases] == ["whole", "phrase", "whole", "whole", "whole"]
    assert case_statistics(cases)["completeness"] == {
        "whole": {"n": 4, "generalized": 1 / 4, "hallucinated": 2 / 4, "unchanged": 1 / 4},
        "phrase": {"n": 1, "generalized": 0.0, "hallucinated": 1.0, "unchanged": 0.0},
    }


def test_w_explains_nothing_that_was_not_learned():
    cases = worked_example(learned=[True, False, False, True, False])
    assert [case.cause for case in cases] == [
        "",
        "source not learned",
        "",
        "imprecise W",
        "source not learned",
    ]
    numbers = case_statistics(cases)
    assert numbers["causes"] == {"imprecise W": 1, "low prior": 0, "source not learned": 2}
    assert numbers["weight_reference"]["hallucinated"]["n"] == 1
    assert numbers["given_learned"] == {
        "n": 2,
        "generalized": 0.5,
        "hallucinated": 0.5,
        "unchanged": 0.0,
    }


def test_the_vocabulary_alone():
    near = [[0.9, 0.1, 0.0], [0.2, 0.8, 0.7], [0.3, 0.85, 0.1], [0.1, 0.0, 0.6]]
    cases = worked_example(nearness=torch.tensor(near, dtype=torch.float64))
    # Paris is nearest to France, Zürich to 法国, and $x_1$ to Switzerland.
    expected = [0.2 - 0.9, 0.85 - 0.8, 0.2 - 0.9, 0.7 - 0.6, 0.2 - 0.9]
    assert [case.vocabulary_risk for case in cases] == pytest.approx(expected)
    numbers = case_statistics(cases)["vocabulary"]
    assert numbers == pytest.approx({"right": 3 / 5, "macro_right": (1 + 0 + 0) / 3})
    assert case_statistics(worked_example())["vocabulary"] is None, "of a head without rows"


def test_the_nearest_word_is_scored_against_the_outcomes():
    near = [[0.9, 0.1, 0.0], [0.2, 0.8, 0.7], [0.3, 0.85, 0.1], [0.1, 0.0, 0.6]]
    cases = worked_example(nearness=torch.tensor(near, dtype=torch.float64))
    failed = [case.outcome != G for case in cases]
    scores = forecast_scores(cases)["vocabulary"]
    assert scores["auroc"] == roc_auc_score(failed, [-0.7, 0.05, -0.7, 0.1, -0.7])
    # The three edits of Paris have one risk, and no other two share a reference.
    assert scores["auroc_within"] == 0.5
    assert forecast_scores(worked_example()) is None, "of a head without rows"
    (alike,) = forecast_scores(cases[1:3]).values()
    assert alike == {"auroc": None, "auroc_within": None}


def test_numbers_against_one_by_one():
    cases, given = random_cases()
    weight, weights = given["weight"].tolist(), {G: [], H: []}  # type: ignore[var-annotated]
    causes = {"imprecise W": 0, "low prior": 0, "source not learned": 0}
    for i, case in enumerate(cases):
        rights = [t for t in range(5) if given["reference_mask"][i, t]]
        column = [weight[t][int(given["labels"][i])] for t in range(5)]
        before, after = (given[f"target_{when}"][i].tolist() for when in ("before", "after"))
        best, leads = max(column[t] for t in rights), after.index(max(after))
        was = before.index(max(before))
        outcome = G if leads in rights else U if leads == was else H
        assert case.outcome == outcome
        assert case.source_answer == f"city{given['labels'][i]}", "without edits: the label"
        assert (case.weight_reference, case.weight_max) == (best, max(column))
        assert case.prior_reference == max(before[t] for t in rights)
        assert (case.weight_answer, case.prior_winner) == (column[leads], before[leads])
        assert case.reference == "|".join(f"land{t}" for t in rights)
        assert (case.answer_before, case.answer_after) == (f"land{was}", f"land{leads}")
        for logits, found in (
            (before, case.probability_reference_before),
            (after, case.probability_reference_after),
        ):
            share = sum(math.exp(logits[t]) for t in rights) / sum(map(math.exp, logits))
            assert found == pytest.approx(share, abs=1e-12)
        if outcome in weights:
            weights[outcome].append(best)
        if outcome is H:
            causes["imprecise W" if max(column) > best else "low prior"] += 1
    numbers = case_statistics(cases)
    assert min(causes["imprecise W"], causes["low prior"]) > 0
    assert numbers["causes"] == causes
    found = numbers["weight_reference"]
    for outcome, values in weights.items():
        assert found[outcome.value] == {"n": len(values), "median": np.median(values)}
    p = mannwhitneyu(weights[G], weights[H], alternative="two-sided").pvalue
    assert found["rank_test_p"] == pytest.approx(p)


def test_numbers_are_json_without_nan_when_a_side_is_empty():
    nobody = worked_example(reference_mask=torch.zeros(5, 4))
    for cases in (
        [replace(case, outcome=G, cause="") for case in worked_example()],
        worked_example(target_after=torch.full((5, 4), torch.nan)),
        nobody,
        [],
    ):
        json.dumps(case_statistics(cases), allow_nan=False)
    found = case_statistics(nobody)["weight_reference"]
    assert found["generalized"] == found["hallucinated"] == {"n": 0, "median": None}
    assert (nobody[0].weight_reference, nobody[0].reference) == (None, "")
