"""Rescaling and adding features, against hooks of the test's own on a random Llama."""

import numpy as np
import pytest
import torch

from lincorr_lightning.errors import SparseAutoencoderError
from lincorr_lightning.lm.language_model import LanguageModel
from lincorr_lightning.sae.forwards import add_features, remove_features, rescale_at, run_with_hooks
from lincorr_lightning.sae.hook_points import Feature, HookPoint
from lincorr_lightning.sae.hooks import edited
from lincorr_lightning.sae.sparse_autoencoder import SparseAutoencoder
from tests.toys import replaced_output, toy_sae

WIDTH, N = 16, 40
HOOK_POINTS = [HookPoint(0, "residual"), HookPoint(0, "mlp_out"), HookPoint(1, "attention_out")]
TEXTS = [
    "name1 lives in the city of Paris",
    "name2 speaks",
    "Paris is in the country of France",
    "name3 lives in the city of Rome",
]


def _sae(hook_point: HookPoint) -> SparseAutoencoder:
    random = torch.Generator().manual_seed(0)
    encoder, decoder = (torch.randn(N, WIDTH, generator=random) for _ in range(2))
    return toy_sae(
        hook_point,
        decoder,
        encoder=encoder,
        input_scale=1.7,
        encoder_bias=torch.randn(N, generator=random) * 0.1,
        decoder_bias=torch.randn(WIDTH, generator=random) * 0.1,
    )


def _naive(lm, hook_point, ids, change):
    """Logits of one text, with a function of (position, vector) applied to one after the other."""

    def change_all(x):
        rows = [change(position, vector.numpy()) for position, vector in enumerate(x[0])]
        return torch.from_numpy(np.stack(rows))[None]

    with torch.no_grad(), replaced_output(lm.model, hook_point, change_all):
        return lm.model(input_ids=torch.tensor([ids])).logits[0].numpy()


def _read(lm, edits):
    found = {}

    def look(forward):
        for row, case in enumerate(forward.cases):
            found[case] = forward.logits[row, : int(forward.mask[row].sum())].numpy()

    run_with_hooks(lm, lm.rows(TEXTS), look, context=lambda cases: edited(lm.model, edits(cases)))
    return [found[i] for i in range(len(TEXTS))]


def _without(sae, x, chosen, share):
    """x less a share of some features' contribution, one at a time."""
    x = x.astype(np.float64)
    e, d = sae.encoder.detach().double().numpy(), sae.decoder.detach().double().numpy()
    new = x.copy()
    for feature in chosen:
        value = max(0.0, e[feature] @ (sae.input_scale * x) + float(sae.encoder_bias[feature]))
        new -= share * value * d[feature] / sae.input_scale
    return new.astype(np.float32)


@pytest.mark.parametrize("hook_point", HOOK_POINTS, ids=str)
def test_rescaled_at_one_position_of_each_text(small_lm: str, hook_point: HookPoint) -> None:
    lm = LanguageModel.from_pretrained(small_lm)
    sae = _sae(hook_point)
    positions = torch.tensor([3, 0, 6, 1])
    chosen = torch.tensor([[1, 5, 7], [2, -1, -1], [-1, -1, 39], [-1, -1, -1]])

    def edits(cases: list[int]):
        return {hook_point: rescale_at(sae, positions[cases], chosen[cases], 0.4)}

    for i, (found, ids) in enumerate(zip(_read(lm, edits), lm.rows(TEXTS), strict=True)):

        def change(position, x, i=i):
            own = [int(f) for f in chosen[i] if f >= 0]
            return _without(sae, x, own, 0.6) if position == positions[i] else x

        np.testing.assert_allclose(found, _naive(lm, hook_point, ids, change), atol=2e-4)
        clean = _naive(lm, hook_point, ids, lambda p, x: x)
        # Nothing before the token changes, and something after it does.
        np.testing.assert_allclose(found[: positions[i]], clean[: positions[i]], atol=1e-5)
        assert (np.abs(found - clean).max() > 1e-3) == (i < 3)


@pytest.mark.parametrize("hook_point", HOOK_POINTS, ids=str)
def test_removed_and_added_everywhere(small_lm: str, hook_point: HookPoint) -> None:
    lm = LanguageModel.from_pretrained(small_lm)
    sae = _sae(hook_point)
    chosen = [0, 3, 11]
    removal = remove_features({hook_point: sae}, [Feature(hook_point, i) for i in chosen])
    cut = _read(lm, lambda cases: removal)
    steps = {Feature(hook_point, 4): 1.5, Feature(hook_point, 9): -0.5}
    steering = add_features({hook_point: sae}, steps)
    steered = _read(lm, lambda cases: steering)
    d = sae.decoder.detach().numpy() / sae.input_scale
    for i, ids in enumerate(lm.rows(TEXTS)):
        np.testing.assert_allclose(
            cut[i],
            _naive(lm, hook_point, ids, lambda p, x: _without(sae, x, chosen, 1.0)),
            atol=2e-4,
        )
        added = (1.5 * d[4] - 0.5 * d[9]).astype(np.float32)
        np.testing.assert_allclose(
            steered[i], _naive(lm, hook_point, ids, lambda p, x, a=added: x + a), atol=2e-4
        )


def test_unknown_features_and_hook_points_are_refused() -> None:
    at = HOOK_POINTS[0]
    saes = {at: _sae(at)}
    for feature, match in (
        (Feature(HookPoint(7, "mlp_out"), 0), "no SAE for the mlp_out of layer 7"),
        (Feature(at, 40), "no feature 40; it has 40"),
        (Feature(at, -1), "no feature -1; it has 40, counted from 0"),
    ):
        with pytest.raises(SparseAutoencoderError, match=match):
            add_features(saes, {feature: 1.0})
        with pytest.raises(SparseAutoencoderError, match=match):
            remove_features(saes, [feature])
