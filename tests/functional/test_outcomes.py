import math

import pytest
import torch
from pandas import DataFrame

from lincorr_lightning.functional import (
    Cause,
    Outcome,
    attribute_causes,
    macro_mean,
    outcome_codes,
    reference_scores,
)


def random_edits(n: int, n_target: int, seed: int) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(seed)
    before, after = torch.randint(n_target, (2, n), generator=generator)
    right = torch.rand(n, n_target, generator=generator) < 0.3
    # Every edit has a reference, as edits have.
    right[torch.arange(n), torch.randint(n_target, (n,), generator=generator)] = True
    return before, after, right


def test_equal_weights_are_not_imprecise() -> None:
    weight = torch.tensor([[0.5], [0.5]])
    right = torch.tensor([[True, False]])
    learned = torch.tensor([True])
    assert attribute_causes(weight, torch.tensor([0]), right, learned) == [Cause.LOW_PRIOR]
    nobody = torch.tensor([], dtype=torch.long)
    assert attribute_causes(weight, nobody, right[:0], learned[:0]) == []


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
