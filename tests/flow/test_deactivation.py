"""Deactivation where the predecessors are known: layers that pass the stream on as it is."""

from types import SimpleNamespace

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
from lincorr_lightning.flow.text_statistics import FeatureGroups
from lincorr_lightning.lm.language_model import LanguageModel
from lincorr_lightning.sae.forwards import rescale_at
from lincorr_lightning.sae.hook_points import HookPoint
from lincorr_lightning.sae.hooks import captured, edited
from lincorr_lightning.sae.sparse_autoencoder import SparseAutoencoder
from tests.toys import replaced_output, toy_sae

WIDTH = 16
BELOW, HERE = HookPoint(0, "residual"), HookPoint(1, "residual")
TEXTS = [f"name{i} lives in the city of {c}" for i in range(6) for c in ("Paris", "Rome", "Oslo")]


@pytest.fixture
def passing(small_lm: str) -> LanguageModel:
    """A Llama whose second layer adds nothing to the stream."""
    lm = LanguageModel.from_pretrained(small_lm)
    layer = lm.model.model.layers[1]
    torch.nn.init.zeros_(layer.self_attn.o_proj.weight)
    torch.nn.init.zeros_(layer.mlp.down_proj.weight)
    return lm


@pytest.fixture
def saes() -> dict[HookPoint, SparseAutoencoder]:
    """Each feature is a coordinate where it is above 0; those below are in another order."""
    order = torch.randperm(WIDTH, generator=torch.Generator().manual_seed(1))
    eye = torch.eye(WIDTH)
    return {BELOW: toy_sae(BELOW, eye[order]), HERE: toy_sae(HERE, eye)}


def _cases(lm, saes, n=200, seed=0):
    flow = DecoderMatcher({at: sae.decoder for at, sae in saes.items()})
    groups = FeatureGroups(HERE, flow.match(HERE))
    generator = torch.Generator().manual_seed(seed)
    return flow, find_cases(lm, saes, lm.rows(TEXTS), groups, n, generator)


def run_cases(lm, saes, cases, chosen=None, r=0.0):
    """Activations and losses of one cut; without features the LM is as it is."""
    ((activation,), (loss,)) = run_cuts(lm, saes, cases, [(chosen or {}, r)], len(cases))
    return SimpleNamespace(activation=activation, loss=loss)


def test_planted_predecessors_switch_features_off_and_others_do_not(passing, saes) -> None:
    flow, cases = _cases(passing, saes)
    by_method = predecessors_by_method(flow, HERE)
    assert len(cases) == 200
    before = run_cases(passing, saes, cases)
    assert (before.activation > 0).all()
    for method in METHODS:
        chosen = {
            hook_point: index[cases.features] for hook_point, index in by_method[method].items()
        }
        after = run_cases(passing, saes, cases, chosen)
        np.testing.assert_allclose(after.activation, 0, atol=1e-6)
        control = cases.control(chosen, torch.Generator().manual_seed(0))
        others = run_cases(passing, saes, cases, control)
        torch.testing.assert_close(others.activation, before.activation)
        # One was active and cut, so one other is.
        if method != "top-5":
            assert all((row >= 0).sum() == 1 for row in control[BELOW])
    half = run_cases(passing, saes, cases, chosen, r=0.5)
    torch.testing.assert_close(half.activation, before.activation / 2)


def test_a_control_draws_neither_the_chosen_nor_the_inactive(passing, saes) -> None:
    flow, cases = _cases(passing, saes)
    chosen = {p: i[cases.features] for p, i in predecessors_by_method(flow, HERE)["top-5"].items()}
    control = cases.control(chosen, torch.Generator().manual_seed(0))[BELOW]
    for row in range(len(cases)):
        active = {f for f in range(WIDTH) if cases.active[BELOW][row, f]}
        cut = {int(f) for f in chosen[BELOW][row]}
        drawn = [int(f) for f in control[row] if f >= 0]
        assert set(drawn) <= active - cut
        assert len(drawn) == len(set(drawn)) == min(len(cut & active), len(active - cut))


def test_drawn_at_random_among_the_active() -> None:
    generator = torch.Generator().manual_seed(0)
    active = torch.rand(500, 9, generator=generator) < 0.4
    n = torch.randint(0, 4, (500,), generator=generator)
    drawn = draw_active(active, n, torch.Generator().manual_seed(3))
    for row, own, count in zip(drawn.tolist(), active, n.tolist(), strict=True):
        kept = [f for f in row if f >= 0]
        assert len(kept) == len(set(kept)) == min(count, int(own.sum()))
        assert all(own[f] for f in kept)
    again = draw_active(active, n, torch.Generator().manual_seed(3))
    assert torch.equal(drawn, again)
    assert not torch.equal(drawn, draw_active(active, n, torch.Generator().manual_seed(4)))
    # Each as often as the others: 2,000 draws of one of three.
    three = torch.tensor([[True, False, True, True]]).expand(2000, 4)
    ones = draw_active(three, torch.ones(2000, dtype=torch.long), generator)[:, 0]
    assert torch.bincount(ones, minlength=4)[[0, 2, 3]].min() > 580
    assert draw_active(three, torch.zeros(2000, dtype=torch.long), generator).shape == (2000, 0)


def test_losses_are_those_of_a_naive_forward(passing, saes) -> None:
    """Of the text after the token, the edit made by a hook of the test's own."""
    flow, cases = _cases(passing, saes, n=25)
    chosen = {p: i[cases.features] for p, i in predecessors_by_method(flow, HERE)["top-1"].items()}
    found = run_cases(passing, saes, cases, chosen, r=0.3)
    order = saes[BELOW].decoder.argmax(1)
    n_last = 0
    for case in range(len(cases)):
        ids, position = cases.texts[case], int(cases.positions[case])
        coordinate = int(order[chosen[BELOW][case, 0]])

        def change(x, position=position, coordinate=coordinate):
            x[0, position, coordinate] *= 0.3
            return x

        with torch.no_grad(), replaced_output(passing.model, BELOW, change):
            logits = passing.model(input_ids=torch.tensor([ids])).logits[0].double()
        losses = [-logits[i].log_softmax(0)[ids[i + 1]] for i in range(position, len(ids) - 1)]
        if losses:
            assert found.loss[case].item() == pytest.approx(float(np.mean(losses)), abs=1e-4)
        else:
            n_last += 1
            assert found.loss[case].isnan()
    assert 0 < n_last < len(cases)


def test_activations_are_those_of_a_whole_forward(small_lm) -> None:
    """Cuts below the layer and at both of its outputs, in one case each and together."""
    lm = LanguageModel.from_pretrained(small_lm)
    generator = torch.Generator().manual_seed(0)
    points = [BELOW, HERE, HookPoint(1, "mlp_out"), HookPoint(1, "attention_out")]
    saes = {at: toy_sae(at, torch.randn(24, WIDTH, generator=generator)) for at in points}
    flow, cases = _cases(lm, saes, n=40)
    chosen = {
        at: index[cases.features]
        for at, index in predecessors_by_method(flow, HERE)["top-5"].items()
    }
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
            with edited(lm.model, changes), captured(lm.model, [HERE]) as at, torch.no_grad():
                lm.model(input_ids=ids)
            x = at[HERE][0, position]
            expected = saes[HERE].encode(x)[0, cases.features[case]].detach()
            assert activations[case].item() == pytest.approx(float(expected), abs=1e-4)
    again, unread = run_cuts(lm, saes, cases, cuts, n_losses=0)
    assert torch.equal(again, found) and unread.isnan().all()
    assert all(not torch.equal(found[0], other) for other in found[1:])


def test_cases_are_seeded_and_do_not_depend_on_how_texts_are_batched(passing, saes) -> None:
    _, one = _cases(passing, saes, n=50)
    _, same = _cases(passing, saes, n=50)
    _, other = _cases(passing, saes, n=50, seed=1)

    def rows(cases):
        return list(
            zip(
                map(tuple, cases.texts),
                cases.positions.tolist(),
                cases.features.tolist(),
                strict=True,
            )
        )

    assert rows(one) == rows(same) != rows(other)
    assert len(set(rows(one))) == 50


def test_summary_by_group() -> None:
    nan = float("nan")
    outcomes = torch.tensor(
        [
            [[2.0, 4.0, 1.0], [9.0, 9.0, 9.0], [0.0, 1.0, 0.0]],
            [[1.0, 3.0, nan], [9.0, 9.0, nan], [2.0, 4.0, nan]],
        ]
    )
    chosen = torch.tensor([True, True, False])
    effect = summarize_outcomes(outcomes, 2, chosen)
    assert effect == {
        "n": 2,
        "success": 0.5,
        "activation_change": pytest.approx((-1 - 0.75) / 2),
        "loss_change": pytest.approx((6 - 4) / 4),
    }
    last = summarize_outcomes(outcomes, 2, ~chosen)
    assert (last["n"], last["success"], last["loss_change"]) == (1, 1.0, None)
