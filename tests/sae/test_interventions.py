"""Rescaling and adding features, against hooks of the test's own on a random Llama."""

import numpy as np
import pytest
import torch

from lincorr_lightning.errors import SparseAutoencoderError
from lincorr_lightning.lm.language_model import LanguageModel
from lincorr_lightning.sae.forwards import (
    add_features,
    remove_everywhere,
    rescale_at,
    run_with_hooks,
)
from lincorr_lightning.sae.hook_points import Feature, HookPoint
from lincorr_lightning.sae.sparse_autoencoder import SparseAutoencoder

WIDTH, N = 16, 40
HOOK_POINTS = [HookPoint(0, "residual"), HookPoint(0, "mlp_out"), HookPoint(1, "attention_out")]
TEXTS = ["name1 lives in the city of Paris", "name2 speaks", "Paris is in the country of France"]


def make_sae(hook_point: HookPoint, seed: int = 0, scale: float = 1.7) -> SparseAutoencoder:
    random = torch.Generator().manual_seed(seed)
    return SparseAutoencoder(
        hook_point=hook_point,
        encoder=torch.randn(N, WIDTH, generator=random),
        decoder=torch.randn(N, WIDTH, generator=random),
        encoder_bias=torch.randn(N, generator=random) * 0.1,
        decoder_bias=torch.randn(WIDTH, generator=random) * 0.1,
        input_scale=scale,
    ).eval()


def _module(lm: LanguageModel, hook_point: HookPoint) -> torch.nn.Module:
    layer = lm.model.model.layers[hook_point.layer]
    parts = {"mlp_out": "mlp", "attention_out": "self_attn"}
    return layer if hook_point.kind == "residual" else getattr(layer, parts[hook_point.kind])


def _naive(lm, hook_point, ids, change):
    """Logits of one text, with a function of (position, vector) applied by a bare hook."""

    def hook(module, args, output):
        x = output[0] if isinstance(output, tuple) else output
        new = x.clone()
        for position in range(x.shape[1]):
            new[0, position] = torch.from_numpy(change(position, x[0, position].numpy()))
        return (new, *output[1:]) if isinstance(output, tuple) else new

    handle = _module(lm, hook_point).register_forward_hook(hook)
    with torch.no_grad():
        logits = lm.model(input_ids=torch.tensor([ids])).logits[0]
    handle.remove()
    return logits.numpy()


def _read(lm, edits):
    found = {}

    def look(forward):
        for row, case in enumerate(forward.cases):
            found[case] = forward.logits[row, : int(forward.mask[row].sum())].numpy()

    run_with_hooks(lm, lm.rows(TEXTS), look, interventions=edits)
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
@pytest.mark.parametrize("r", [0.0, 0.4, 1.0])
def test_rescaled_at_one_position_of_each_text(
    small_lm: str, hook_point: HookPoint, r: float
) -> None:
    lm = LanguageModel.from_pretrained(small_lm)
    sae = make_sae(hook_point)
    positions = torch.tensor([3, 0, 6])
    chosen = torch.tensor([[1, 5, 7], [2, -1, -1], [-1, -1, 39]])
    rows = lm.rows(TEXTS)

    def edits(cases: list[int]):
        factor = torch.full((len(cases),), r)
        return {hook_point: rescale_at(sae, positions[cases], chosen[cases], factor)}

    for i, (found, ids) in enumerate(zip(_read(lm, edits), rows, strict=True)):
        own = [int(f) for f in chosen[i] if f >= 0]
        expected = _naive(
            lm,
            hook_point,
            ids,
            lambda p, x, i=i, own=own: _without(sae, x, own, 1 - r) if p == positions[i] else x,
        )
        np.testing.assert_allclose(found, expected, atol=2e-4)
        clean = _naive(lm, hook_point, ids, lambda p, x: x)
        # Nothing before the token changes, and something after it does.
        np.testing.assert_allclose(found[: positions[i]], clean[: positions[i]], atol=1e-5)
        assert (np.abs(found - clean).max() > 1e-3) == (r < 1)


@pytest.mark.parametrize("hook_point", HOOK_POINTS, ids=str)
def test_removed_and_added_everywhere(small_lm: str, hook_point: HookPoint) -> None:
    lm = LanguageModel.from_pretrained(small_lm)
    sae = make_sae(hook_point)
    chosen = [0, 3, 11]
    cut = _read(lm, {hook_point: remove_everywhere(sae, chosen)})
    steps = {Feature(hook_point, 4): 1.5, Feature(hook_point, 9): -0.5}
    steered = _read(lm, add_features({hook_point: sae}, steps))
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


def test_r_of_each_row() -> None:
    sae = make_sae(HOOK_POINTS[0])
    x = torch.randn(3, 2, WIDTH)
    at, chosen = torch.tensor([0, 1, 1]), torch.tensor([[1], [2], [3]])
    together = rescale_at(sae, at, chosen, torch.tensor([0.0, 0.5, 1.0]))(x)
    for row, r in enumerate([0.0, 0.5, 1.0]):
        one = slice(row, row + 1)
        alone = rescale_at(sae, at[one], chosen[one], torch.tensor([r]))(x[one])
        torch.testing.assert_close(together[row : row + 1], alone)
    assert torch.equal(together[2], x[2])


def test_unknown_features_and_hook_points_are_refused() -> None:
    sae = make_sae(HOOK_POINTS[0])
    missing = Feature(HookPoint(7, "mlp_out"), 0)
    with pytest.raises(SparseAutoencoderError, match="no SAE for the mlp_out of layer 7; there"):
        add_features({HOOK_POINTS[0]: sae}, {missing: 1.0})
