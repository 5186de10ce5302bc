"""Controls of wording, rounded weights, draws of cities, directions: against plain definitions."""

from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats

from benchmarks.common import Estimate
from benchmarks.real_lms import causal, nearest_words, perturbations, wording
from benchmarks.real_lms.tables import PairScores
from lincorr_lightning.finetune.interventions import EditStates, TargetSpace
from lincorr_lightning.lm import LanguageModel


def pair(name: str, r: float, excess: float = 0.0, is_known: bool = False) -> PairScores:
    above = Estimate(excess, excess - 0.1, excess + 0.1)
    about: dict[str, Any] = {"lm": "a", "pair": name, "layer": "all", "is_known": is_known}
    return PairScores(
        **about,
        r=r,
        source_words=r - 0.1,
        target_words=r - 0.2,
        above_source_words=above,
        above_target_words=above,
        partial=r / 2,
    )


RELATED = [("city→country", 0.9, 0.7, 0.6), ("ceo→company", 0.5, 0.2, 0.6)]
"""Related pairs, their r, and the mean r of controls in the place of their source and target."""


@pytest.fixture
def rows() -> list[PairScores]:
    found = []
    for name, r, as_source, as_target in RELATED:
        source, target = name.split("→")
        found.append(pair(name, r, excess=0.2, is_known=True))
        controls = wording.SENTENCES[source], wording.SENTENCES[target]
        for i, (near, others) in enumerate(zip((as_source, as_target), controls, strict=True)):
            # Controls of one sentence differ, by the same above and below their mean.
            spread = np.linspace(-0.05, 0.05, len(others)) if len(others) > 1 else [0.0]
            for one, off in zip(others, spread, strict=True):
                found.append(pair(f"{source}→{one}" if i else f"{one}→{target}", near + off))
    return [*found, pair("city→pet", 0.3), pair("pet→food", 0.1, excess=0.15)]


def test_related_pairs_stand_beside_controls(rows: list[PairScores]) -> None:
    row = wording.wording_of("a", rows)
    r, as_source, as_target = np.array([one[1:] for one in RELATED]).T
    assert (row.pairs, row.n_above) == (2, 1)
    assert (row.r, row.as_source, row.as_target) == pytest.approx(
        (r.mean(), as_source.mean(), as_target.mean())
    )
    # Both pairs share no kind: a sample in fifteen has the one or the other alone.
    leads = r - as_source
    assert row.lead_source == pytest.approx((leads.mean(), leads.min(), leads.max()))
    assert row.lead_without_sums == row.lead_target  # there are no sums
    assert row.partial == pytest.approx(r.mean() / 2)
    assert row.partial_unrelated == pytest.approx((0.3 + 0.1) / 4)


def test_pairs_that_exceed_random_words_are_counted_by_kind(rows: list[PairScores]) -> None:
    row = wording.exceeding_of("a", rows)
    n_controls = len(rows) - len(RELATED) - 2
    assert (row.related, row.unrelated) == ("2 of 2", "1 of 2")
    assert row.controls == f"0 of {n_controls}"
    related = [one.is_known for one in rows]
    excess = [one.above_source_words.value for one in rows]
    assert row.r_related == pytest.approx(stats.pearsonr(related, excess).statistic)
    assert 0 < row.p_given_overlap <= 1


def test_overlap_is_that_of_sets_of_four_letters() -> None:
    assert wording.overlap("abcde", "abcdf") == pytest.approx(1 / 3)  # abcd, bcde, bcdf


def test_rounded_weights_are_multiples_of_the_scale_of_their_block() -> None:
    """All but the head: within half a unit, whose 127 or 7 are the largest of a block."""
    lm = LanguageModel.from_pretrained("tiny-world").load()
    before = {name: value.clone() for name, value in lm.model.state_dict().items()}
    perturbations.round_weights(lm.model, 4)
    head = lm.model.get_output_embeddings().weight
    n_changed = 0
    for name, module in lm.model.named_modules():
        if isinstance(module, torch.nn.Linear) and module.weight is not head:
            old = before[f"{name}.weight"].reshape(-1, perturbations.BLOCK)
            new = module.weight.reshape(-1, perturbations.BLOCK)
            unit = old.abs().amax(1, keepdim=True) / 7
            assert ((new - old).abs() <= unit / 2 + 1e-6).all()
            assert torch.allclose(new / unit, (new / unit).round(), atol=1e-4)
            n_changed += int((new != old).any())
    assert n_changed
    assert torch.equal(head, before["lm_head.weight"])


def test_each_draw_has_one_source_of_each_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two sources of one answer and one of two others: the mean over both draws, by cosines."""
    monkeypatch.setattr(nearest_words, "N_DRAWS", 1000)
    mask = np.array([[True, True, False, False], [False, False, True, False], [0, 0, 0, 1]]) > 0
    rng = np.random.default_rng(6)
    source, target = rng.normal(size=(4, 3)), rng.normal(size=(3, 3))
    shares = []
    for chosen in ([0, 2, 3], [1, 2, 3]):
        rows = [x - x.mean(0) for x in (source[chosen], target)]
        rows = [x / np.linalg.norm(x, axis=1, keepdims=True) for x in rows]
        shares.append((np.argmax(rows[1] @ rows[0].T, 0) == np.arange(3)).mean())
    assert shares[0] != shares[1]
    of = [torch.from_numpy(x) for x in (source, target)]
    estimate = nearest_words.draws(of, mask, None)
    assert estimate.value == pytest.approx(np.mean(shares), abs=0.03)
    assert (estimate.low, estimate.high) == pytest.approx((min(shares), max(shares)))


def test_the_nearest_word_is_taken_out_as_the_others_are() -> None:
    """On made-up states: the share after a direction is out, by plain projection."""
    rng = np.random.default_rng(0)
    n, t, d = 12, 5, 4
    to_logits = rng.normal(size=(t, d))
    before, after = (rng.normal(size=(n, t)) for _ in range(2))
    mask = np.eye(t, dtype=bool)[rng.integers(t, size=n)]
    weights = {arm: torch.from_numpy(rng.normal(size=(1, n, t))) for arm in causal.MAPS.values()}
    space = TargetSpace(torch.from_numpy(to_logits))
    groups = [str(i % 6) for i in range(n)]
    edits = EditStates(
        space,
        torch.from_numpy(before),
        torch.from_numpy(after),
        torch.from_numpy(mask),
        groups,
        weights,
    )
    found = causal.taken_out(edits)
    assert set(found) >= {causal.NOTHING, "W, where nearest word is out"}

    def share(*arms: str) -> float:
        centred = to_logits - to_logits.mean(0)
        hits = []
        for i in range(n):
            old, new = (
                np.linalg.lstsq(centred, x[i] - x[i].mean(), rcond=None)[0] for x in (before, after)
            )
            change = new - old
            some = np.stack([centred.T @ weights[arm][0, i].numpy() for arm in arms], 1)
            change = change - some @ np.linalg.lstsq(some, change, rcond=None)[0]
            hits.append(mask[i, (centred @ (old + change)).argmax()])
        ok = np.array(hits) & ~mask[np.arange(n), before.argmax(1)]
        return float(np.mean([ok[np.array(groups) == g].mean() for g in sorted(set(groups))]))

    both, alone = share("nearest word", "W"), share("nearest word")
    assert found["W, where nearest word is out"].value == pytest.approx(both - alone)
