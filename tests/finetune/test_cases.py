"""Cases of edits and numbers over them, against the same worked out one by one."""

import json
import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import mannwhitneyu
from sklearn.metrics import roc_auc_score

from lincorr_lightning.finetune.cases import EditAnswers, EditCase, case_statistics, edit_cases
from lincorr_lightning.finetune.edits import Edit
from lincorr_lightning.functional.outcomes import Outcome
from lincorr_lightning.knowledge import Completeness

CITIES = ["Paris", "Zürich", "$x_1$"]
COUNTRIES = ["France", "Switzerland", "法国", "a|b *c*"]
G, H, U, R = Outcome


def relation(sources: list[str], targets: list[str]) -> Any:
    # In turn whole, of a phrase, and subwords.
    kinds = [list(Completeness)[i % 3] for i in range(len(targets))]
    return SimpleNamespace(
        source=SimpleNamespace(texts=sources),
        target=SimpleNamespace(texts=targets, completeness=kinds),
    )


def make_cases(
    named: Any,
    edits: list[tuple[str, int, tuple[int, ...]]],
    learned: Any,
    before: Any,
    after: Any,
    weight: Any,
    nearness: Any = None,
) -> list[EditCase]:
    """Cases of edits: the answer, its label and its reference."""
    made = [Edit(f"x{i}", *edit[:1], (), *edit[1:], 0, 0) for i, edit in enumerate(edits)]
    labels = torch.tensor([label for _, label, _ in edits], dtype=torch.long)
    source = torch.nn.functional.one_hot(labels, len(named.source.texts) + 1).double()
    source[~torch.as_tensor(learned)] = source[~torch.as_tensor(learned)].roll(1, 1)
    logits = [torch.as_tensor(x, dtype=torch.float64) for x in (before, after)]
    answers = EditAnswers.of(
        made, {"source": source, "target": logits[0]}, {"source": source, "target": logits[1]}
    )
    weight = torch.as_tensor(weight, dtype=torch.float64)
    near = None if nearness is None else torch.tensor(nearness, dtype=torch.float64)
    return edit_cases(named, made, answers, weight, near)


PARIS, ZURICH, X1 = ("Paris", 0, (0, 2)), ("Zürich HB", 1, (1,)), ("$x_1$", 2, (3,))
EDITS = [PARIS, ZURICH, PARIS, X1, PARIS]
BEFORE = [[0, 3, 1, 2], [4, -1, 0, 0], [0, 9, -5, 2], [1, 2, 3, 0.5], [0, 0, 0, 9.0]]
AFTER = [[0, 3, 7, 2], [4, 3, 5, 0], [0, 9, 2, 2], [5, 2, 3, 0.5], [0, 8, 0, 7.0]]
#     Paris Zürich $x_1$
W = [[0.1, 0.2, 0.3], [0.4, 0.3, 0.1], [0.7, 0.5, 0.0], [0.0, 0.0, 0.25]]
NEAR = [[0.9, 0.1, 0.0], [0.2, 0.8, 0.7], [0.3, 0.85, 0.1], [0.1, 0.0, 0.6]]


def worked_example(**changes: Any) -> list[EditCase]:
    """Five edits whose numbers can be read off."""
    options = {
        "named": relation(CITIES, COUNTRIES),
        "edits": EDITS,
        "learned": [True, True, False, True, True],
        "before": BEFORE,
        "after": AFTER,
        "weight": W,
    }
    return make_cases(**options | changes)


def test_outcomes_by_completeness_and_of_learned_edits():
    cases = worked_example(learned=[True, False, False, True, False])
    # France is whole, Switzerland of a phrase, 法国 a subword, the fourth whole again.
    assert [case.completeness for case in cases] == ["whole", "phrase", "whole", "whole", "whole"]
    causes = ["", "source not learned", "", "imprecise W", "source not learned"]
    assert [case.cause for case in cases] == causes
    numbers = case_statistics(cases)
    assert numbers["completeness"] == {
        "whole": {"n": 4, **dict(zip(Outcome, (1 / 4, 2 / 4, 1 / 4, 0.0), strict=True))},
        "phrase": {"n": 1, **dict(zip(Outcome, (0.0, 1.0, 0.0, 0.0), strict=True))},
    }
    assert numbers["causes"] == {"imprecise W": 1, "low prior": 0, "source not learned": 2}
    assert numbers["weight_reference"]["hallucinated"]["n"] == 1


def test_the_nearest_word_and_its_score_as_a_forecast():
    cases = worked_example(nearness=NEAR)
    # Paris is nearest to France, Zürich to 法国, and $x_1$ to Switzerland.
    risks = [0.2 - 0.9, 0.85 - 0.8, 0.2 - 0.9, 0.7 - 0.6, 0.2 - 0.9]
    assert [case.nearest_risk for case in cases] == pytest.approx(risks)
    numbers = case_statistics(cases)
    wrong = numbers["nearest"].pop("wrong")
    assert numbers["nearest"] == pytest.approx({"right": 3 / 5, "macro": 1 / 3})
    assert (wrong["n"], wrong["generalized"]) == (2, 0.0)
    # By reference, where the target was not right before.
    best = numbers["above_best_baseline"]
    assert (best["baseline"], best["low"]) == ("constant", None)
    found = [best[name] for name in ("macro", "generalized", "mean")]
    assert found == pytest.approx([1 / 3, 1 / 9, -2 / 9])
    failed = [case.outcome != G for case in cases]
    # The three edits of Paris have one risk, and no other two share a reference.
    auroc = roc_auc_score(failed, [-0.7, 0.05, -0.7, 0.1, -0.7])
    (forecast,) = numbers["forecast"].values()
    assert (forecast["auroc"], forecast["auroc_within"]) == (auroc, 0.5)
    assert forecast["auroc_low"] is None, "there are three references"
    (alike,) = case_statistics(cases[1:3])["forecast"].values()
    assert set(alike.values()) == {None}
    of_a_head_without_rows = case_statistics(worked_example())
    assert numbers["vocabulary"] == pytest.approx({"right": 3 / 5, "macro_right": 1 / 3})
    assert of_a_head_without_rows["vocabulary"] is of_a_head_without_rows["forecast"] is None


def test_numbers_against_one_by_one():
    rng = np.random.default_rng(3)
    n, n_target = 300, 5
    mask = rng.random((n, n_target)) < 0.3
    mask[:, 4] = False
    mask[:, 0] |= ~mask.any(1)
    before, after = 3 * rng.normal(size=(n, n_target)), 3 * rng.normal(size=(n, n_target))
    after[::3] = before[::3]
    labels, weight = rng.integers(9, size=n).tolist(), rng.normal(size=(n_target, 9))
    named = relation([f"city{i}" for i in range(9)], [f"land{i}" for i in range(n_target)])
    rights = [np.flatnonzero(row).tolist() for row in mask]
    edits = [(f"city{i}", i, tuple(right)) for i, right in zip(labels, rights, strict=True)]
    cases = make_cases(named, edits, [True] * n, before, after, weight)
    weights: dict[Any, list[float]] = {G: [], H: []}
    causes = {"imprecise W": 0, "low prior": 0, "source not learned": 0}
    for i, (case, right) in enumerate(zip(cases, rights, strict=True)):
        column = weight[:, labels[i]]
        best, leads, was = max(column[right]), after[i].argmax(), before[i].argmax()
        outcome = R if was in right else G if leads in right else U if leads == was else H
        assert case.outcome == outcome
        assert (case.weight_reference, case.weight_max) == (best, max(column))
        assert case.prior_reference == max(before[i][right])
        assert (case.weight_answer, case.prior_winner) == (column[leads], before[i][leads])
        assert case.reference == "|".join(f"land{t}" for t in right)
        assert (case.answer_before, case.answer_after) == (f"land{was}", f"land{leads}")
        for logits, found in (
            (before[i], case.probability_reference_before),
            (after[i], case.probability_reference_after),
        ):
            share = sum(math.exp(logits[t]) for t in right) / sum(map(math.exp, logits))
            assert found == pytest.approx(share, abs=1e-12)
        if outcome in weights:
            weights[outcome].append(best)
        if outcome is H:
            causes["imprecise W" if max(column) > best else "low prior"] += 1
    assert {case.outcome for case in cases} == set(Outcome)
    numbers = case_statistics(cases)
    assert min(causes["imprecise W"], causes["low prior"]) > 0
    assert numbers["causes"] == causes
    found = numbers["weight_reference"]
    for outcome, values in weights.items():
        assert found[outcome.value] == {"n": len(values), "median": np.median(values)}
    p = mannwhitneyu(weights[G], weights[H], alternative="two-sided").pvalue
    assert found["rank_test_p"] == pytest.approx(p)


def test_numbers_are_json_without_nan_when_a_side_is_empty():
    nobody = worked_example(edits=[(*edit[:2], ()) for edit in EDITS])
    for cases in (worked_example(after=np.full((5, 4), np.nan)), nobody, []):
        json.dumps(case_statistics(cases), allow_nan=False)
    found = case_statistics(nobody)["weight_reference"]
    assert found["generalized"] == found["hallucinated"] == {"n": 0, "median": None}
    assert (nobody[0].weight_reference, nobody[0].reference) == (None, "")
