import math

import pytest
import torch
from pandas import DataFrame

from lincorr_lightning.functional import (
    Cause,
    Outcome,
    attribute_causes,
    leaks,
    macro_mean,
    outcome_codes,
    reference_scores,
    risk,
)


def random_edits(n: int, n_target: int, seed: int) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(seed)
    before, after = torch.randint(n_target, (2, n), generator=generator)
    right = torch.rand(n, n_target, generator=generator) < 0.3
    # Every edit has a reference, as edits have.
    right[torch.arange(n), torch.randint(n_target, (n,), generator=generator)] = True
    return before, after, right


def test_outcomes_equal_the_definitions_written_out() -> None:
    before, after, right = random_edits(200, 4, 0)
    codes = outcome_codes(before, after, right)
    seen = set()
    for i, code in enumerate(codes.tolist()):
        references = {j for j in range(4) if right[i, j]}
        if int(before[i]) in references:
            expected = Outcome.RIGHT_BEFORE
        elif int(after[i]) in references:
            expected = Outcome.GENERALIZED
        elif int(after[i]) == int(before[i]):
            expected = Outcome.UNCHANGED
        else:
            expected = Outcome.HALLUCINATED
        assert list(Outcome)[code] == expected
        seen.add(expected)
    assert seen == set(Outcome)


def test_leaks_equal_the_definition_written_out() -> None:
    _, _, right = random_edits(50, 4, 0)
    generator = torch.Generator().manual_seed(1)
    before, after = torch.randint(4, (2, 50, 9), generator=generator)
    for i, share in enumerate(leaks(before, after, right).tolist()):
        new = [
            bool(right[i, now]) and not right[i, then]
            for then, now in zip(before[i], after[i], strict=True)
        ]
        assert share == pytest.approx(sum(new) / 9)


def test_causes_equal_the_definitions_written_out() -> None:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(4, 6, generator=generator)
    taught = torch.randint(6, (100,), generator=generator)
    _, _, right = random_edits(100, 4, 0)
    right[:, 0] = False
    right[:, 3] |= ~right.any(1)
    learned = torch.arange(100) % 5 > 0
    causes = attribute_causes(weight, taught, right, learned)
    for i, cause in enumerate(causes):
        if not learned[i]:
            assert cause == Cause.NOT_LEARNED
            continue
        column = weight[:, taught[i]].tolist()
        highest = max(range(4), key=lambda j: column[j])
        assert cause == (Cause.LOW_PRIOR if right[i, highest] else Cause.IMPRECISE)
    assert set(causes) == set(Cause)


def test_equal_weights_are_not_imprecise() -> None:
    weight = torch.tensor([[0.5], [0.5]])
    right = torch.tensor([[True, False]])
    learned = torch.tensor([True])
    assert attribute_causes(weight, torch.tensor([0]), right, learned) == [Cause.LOW_PRIOR]
    nobody = torch.tensor([], dtype=torch.long)
    assert attribute_causes(weight, nobody, right[:0], learned[:0]) == []


def test_risk_equals_the_definition() -> None:
    generator = torch.Generator().manual_seed(5)
    target = torch.randn(60, 4, generator=generator, dtype=torch.float64)
    right = torch.rand(60, 4, generator=generator) < 0.4
    right[:, 0] = True
    right[:, 1] = False
    for i, value in enumerate(risk(target, right).tolist()):
        of = {
            kind: [float(t) for t, r in zip(target[i], right[i], strict=True) if r == kind]
            for kind in (True, False)
        }
        assert value == max(of[False]) - max(of[True])
        assert (value > 0) == (not right[i, target[i].argmax()])


def test_scores_by_reference_are_those_of_pandas() -> None:
    before, after, right = random_edits(300, 4, 5)
    outcomes = [list(Outcome)[code] for code in outcome_codes(before, after, right).tolist()]
    references = [set(row.nonzero().flatten().tolist()) for row in right]
    rows = DataFrame({"outcome": outcomes, "reference": [str(sorted(one)) for one in references]})
    scores = reference_scores(outcomes, references)
    assert scores.pop("constant") == pytest.approx(right.double().mean(0).max().item())
    for name, score in scores.items():
        hits = (rows["outcome"] == name.removeprefix("macro_")).groupby(rows["reference"])
        assert score == pytest.approx(hits.mean().mean())
        assert score != pytest.approx((rows["outcome"] == name.removeprefix("macro_")).mean())
    # An edit without a reference counts for the best constant, which is wrong there, alone.
    more = reference_scores([*outcomes, Outcome.UNCHANGED], [*references, set()])
    assert {name: more[name] for name in scores} == scores
    assert more["constant"] == pytest.approx(right.double().mean(0).max().item() * 300 / 301)
    assert all(map(math.isnan, reference_scores([], []).values()))
    assert math.isnan(macro_mean([], []))
