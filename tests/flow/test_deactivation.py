"""Deactivation where the predecessors are known: layers that pass the stream on as it is."""

import numpy as np
import pytest
import torch

from lincorr_lightning.flow.deactivation import (
    METHODS,
    draw_active,
    find_cases,
    predecessors_by_method,
    run_cuts,
    summarize_outcomes,
)
from lincorr_lightning.flow.graph import DecoderMatcher
from lincorr_lightning.flow.text_statistics import TextStatistics
from lincorr_lightning.lm.language_model import LanguageModel
from lincorr_lightning.sae.forwards import rescale_at
from lincorr_lightning.sae.hook_points import HookPoint
from lincorr_lightning.sae.hooks import captured, edited
from lincorr_lightning.sae.sparse_autoencoder import SparseAutoencoder
from tests.toys import replaced_output, toy_sae

WIDTH = 16
BELOW, STREAM = HookPoint(0, "residual"), HookPoint(1, "residual")
TEXTS = [f"name{i} lives in the city of {c}" for i in range(6) for c in ("Paris", "Rome", "Oslo")]


@pytest.fixture(scope="module")
def passing(small_lm: str) -> LanguageModel:
    """A Llama whose second layer adds nothing to the stream."""
    lm = LanguageModel.from_pretrained(small_lm)
    layer = lm.model.model.layers[1]
    torch.nn.init.zeros_(layer.self_attn.o_proj.weight)
    torch.nn.init.zeros_(layer.mlp.down_proj.weight)
    return lm


@pytest.fixture(scope="module")
def saes() -> dict[HookPoint, SparseAutoencoder]:
    """Each feature is a coordinate where it is above 0; those below are in another order."""
    order = torch.randperm(WIDTH, generator=torch.Generator().manual_seed(1))
    eye = torch.eye(WIDTH)
    return {BELOW: toy_sae(BELOW, eye[order]), STREAM: toy_sae(STREAM, eye)}


def _cases(lm, saes, n=200, seed=0):
    """Cases, and the predecessors of their features by method."""
    matcher = DecoderMatcher(saes)
    statistics = TextStatistics(lm, matcher, n_kept=len(TEXTS))
    statistics.update(lm.rows(TEXTS))
    generator = torch.Generator().manual_seed(seed)
    cases = find_cases(statistics, statistics.groups[STREAM], n, generator)
    chosen = {
        method: {at: index[cases.features] for at, index in predecessors.items()}
        for method, predecessors in predecessors_by_method(matcher, STREAM).items()
    }
    return cases, chosen


def test_planted_predecessors_switch_features_off_and_others_do_not(passing, saes) -> None:
    cases, chosen = _cases(passing, saes)
    controls = {m: cases.control(chosen[m], torch.Generator().manual_seed(0)) for m in METHODS}
    cuts = [({}, 1.0), (chosen["top-1"], 0.5)]
    cuts += [(features, 0.0) for m in METHODS for features in (chosen[m], controls[m])]
    (before, half, *others), _ = run_cuts(passing, saes, cases, cuts, 0)
    assert len(cases) == 200 and (before > 0).all()
    torch.testing.assert_close(half, before / 2)
    for method, removed, control in zip(METHODS, others[::2], others[1::2], strict=True):
        np.testing.assert_allclose(removed, 0, atol=1e-6)
        torch.testing.assert_close(control, before)
        # As many others as were active and cut, none of them and none that is inactive.
        for row in range(len(cases)):
            active = {f for f in range(WIDTH) if cases.active[BELOW][row, f]}
            cut = {int(f) for f in chosen[method][BELOW][row]}
            drawn = [int(f) for f in controls[method][BELOW][row] if f >= 0]
            assert set(drawn) <= active - cut
            assert len(drawn) == len(set(drawn)) == min(len(cut & active), len(active - cut))


def test_drawn_at_random_among_the_active() -> None:
    generator = torch.Generator().manual_seed(0)
    active = torch.rand(500, 9, generator=generator) < 0.4
    n = torch.randint(0, 4, (500,), generator=generator)
    drawn = draw_active(active, n, torch.Generator().manual_seed(3))
    for row, among, count in zip(drawn.tolist(), active, n.tolist(), strict=True):
        kept = [f for f in row if f >= 0]
        assert len(kept) == len(set(kept)) == min(count, int(among.sum()))
        assert all(among[f] for f in kept)
    assert torch.equal(drawn, draw_active(active, n, torch.Generator().manual_seed(3)))
    assert not torch.equal(drawn, draw_active(active, n, torch.Generator().manual_seed(4)))
    # Each as often as the others: 2,000 draws of one of three.
    three = torch.tensor([[True, False, True, True]]).expand(2000, 4)
    single = draw_active(three, torch.ones(2000, dtype=torch.long), generator)[:, 0]
    assert torch.bincount(single, minlength=4)[[0, 2, 3]].min() > 580


def test_losses_are_those_of_a_naive_forward(passing, saes) -> None:
    """Of the text after the token, the edit made by a hook of the test's own."""
    cases, chosen = _cases(passing, saes, n=25)
    cut = chosen["top-1"], 0.3
    _, (found,) = run_cuts(passing, saes, cases, [cut], len(cases))
    order = saes[BELOW].decoder.argmax(1)
    for case in range(len(cases)):
        ids, position = cases.texts[case], int(cases.positions[case])
        coordinate = int(order[chosen["top-1"][BELOW][case, 0]])

        def change(x, position=position, coordinate=coordinate):
            x[0, position, coordinate] *= 0.3
            return x

        with torch.no_grad(), replaced_output(passing.model, BELOW, change):
            logits = passing.model(input_ids=torch.tensor([ids])).logits[0].double()
        losses = [-logits[i].log_softmax(0)[ids[i + 1]] for i in range(position, len(ids) - 1)]
        expected = float(np.mean(losses)) if losses else float("nan")
        assert found[case].item() == pytest.approx(expected, abs=1e-4, nan_ok=True)
    assert 0 < found.isnan().sum() < len(cases)  # some tokens are the last of their text


def test_activations_are_those_of_a_whole_forward(small_lm) -> None:
    """Cuts below the layer and at both of its outputs, in one case each and together."""
    lm = LanguageModel.from_pretrained(small_lm)
    generator = torch.Generator().manual_seed(0)
    points = [BELOW, STREAM, HookPoint(1, "mlp_out"), HookPoint(1, "attention_out")]
    saes = {at: toy_sae(at, torch.randn(24, WIDTH, generator=generator)) for at in points}
    cases, by_method = _cases(lm, saes, n=40)
    chosen = by_method["top-5"]
    assert len(chosen) == 3
    cuts = [({}, 1.0), (chosen, 0.0), *(({at: index}, 0.5) for at, index in chosen.items())]
    found, losses = run_cuts(lm, saes, cases, cuts, n_losses=7)
    assert int(losses.isfinite().sum(1).max()) <= 7
    for (features, r), activations in zip(cuts, found, strict=True):
        for case in range(len(cases)):
            position = cases.positions[case : case + 1]
            changes = {
                at: rescale_at(saes[at], position, index[case : case + 1], r)
                for at, index in features.items()
            }
            ids = torch.tensor([cases.texts[case]])
            with torch.no_grad(), edited(lm.model, changes), captured(lm.model, [STREAM]) as at:
                lm.model(input_ids=ids)
            x = at[STREAM][0, position]
            expected = saes[STREAM].encode(x)[0, cases.features[case]].detach()
            assert activations[case].item() == pytest.approx(float(expected), abs=1e-4)
    assert all(not torch.equal(found[0], other) for other in found[1:])


def test_cases_are_seeded(passing, saes) -> None:
    def rows(seed: int) -> list[tuple[object, ...]]:
        cases, _ = _cases(passing, saes, n=50, seed=seed)
        columns = cases.positions.tolist(), cases.features.tolist()
        return list(zip(map(tuple, cases.texts), *columns, strict=True))

    assert rows(0) == rows(0) != rows(1)
    assert len(set(rows(0))) == 50


def test_summary_of_some_cases() -> None:
    nan = float("nan")
    activations = torch.tensor([[2.0, 4.0, 1.0], [0.0, 1.0, 0.0]])
    losses = torch.tensor([[1.0, 3.0, nan], [2.0, 4.0, nan]])
    some = torch.tensor([True, True, False])
    effects = summarize_outcomes(activations, losses, some)
    assert effects == (2, 0.5, pytest.approx((-1 - 0.75) / 2), pytest.approx((6 - 4) / 4))
    assert summarize_outcomes(activations, losses, ~some) == (1, 1.0, -1.0, None)
