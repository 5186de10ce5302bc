"""The SAE against formulas written out in numpy, folding, its folder and its errors."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load, save

from lincorr_lightning.errors import OutputError, SparseAutoencoderError
from lincorr_lightning.sae.formats import load_sae
from lincorr_lightning.sae.hook_points import HookPoint
from lincorr_lightning.sae.sparse_autoencoder import ACTIVATIONS, SparseAutoencoder

N, WIDTH, K = 40, 12, 5
X = np.random.default_rng(1).normal(size=(64, WIDTH)) * 3


def _parts(activation: str, **changes: Any) -> dict[str, Any]:
    rng = np.random.default_rng(0)

    def draw(*shape: int) -> torch.Tensor:
        return torch.from_numpy(rng.normal(size=shape))

    parts = {
        "hook_point": HookPoint(2, "residual"),
        "encoder": draw(N, WIDTH),
        "decoder": draw(N, WIDTH) * draw(N, 1).exp(),
        "encoder_bias": draw(N),
        "decoder_bias": draw(WIDTH),
        "activation": activation,
        "threshold": draw(N).abs() if activation in ("jumprelu", "batchtopk") else None,
        "k": K if activation == "topk" else None,
    }
    return parts | changes


def _oracle(parts: dict[str, Any], x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Features and reconstruction, row by row and feature by feature."""
    e, d, be, bd = (
        parts[name].numpy() for name in ("encoder", "decoder", "encoder_bias", "decoder_bias")
    )
    s = parts.get("input_scale", 1.0)
    features = np.zeros((len(x), N))
    for i, row in enumerate(x):
        read = s * row - (bd if parts.get("subtract_decoder_bias") else 0)
        pre = np.array([read @ e[j] + be[j] for j in range(N)])
        if parts["activation"] == "topk":
            scale = parts.get("score_scale")
            scores = pre * (1 if scale is None else scale.numpy())
            on = {int(j) for j in np.argsort(-scores)[:K]}
        elif parts["threshold"] is not None:
            on = {j for j in range(N) if pre[j] > parts["threshold"][j]}
        else:
            on = set(range(N))
        for j in on:
            features[i, j] = max(pre[j], 0)
    return features, (features @ d + bd) / s


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("normed", [False, True])
def test_equals_the_formula_and_folding_leaves_the_reconstruction(
    activation: str, normed: bool
) -> None:
    changes: dict[str, Any] = {"input_scale": 0.3, "subtract_decoder_bias": True} if normed else {}
    if normed and activation == "topk":
        changes["score_scale"] = torch.rand(N, dtype=torch.float64) + 0.5
    parts = _parts(activation, **changes)
    parts["decoder"][[3, 7]] = 0
    sae = SparseAutoencoder(**parts)
    features, reconstruction = _oracle(parts, X)
    x = torch.from_numpy(X)
    np.testing.assert_allclose(sae.encode(x).detach(), features, atol=1e-10)
    np.testing.assert_allclose(sae(x).detach(), reconstruction, atol=1e-10)
    assert 0.02 < (features > 0).mean() < 0.7

    before = {name: tensor.clone() for name, tensor in sae.state_dict().items()}
    folded = sae.folded()
    np.testing.assert_allclose(folded(x).detach(), reconstruction, atol=1e-10)
    norms = np.isin(np.arange(N), [3, 7], invert=True)
    np.testing.assert_allclose(folded.decoder.detach().norm(dim=1), norms, atol=1e-12)
    assert folded.input_scale == 1 and not folded.subtract_decoder_bias
    # Now a feature is the length of what it adds to the LM's activations.
    lengths = features * np.linalg.norm(parts["decoder"].numpy(), axis=1)
    lengths /= parts.get("input_scale", 1.0)
    np.testing.assert_allclose(folded.encode(x).detach() * norms, lengths, atol=1e-10)
    assert all(torch.equal(before[name], t) for name, t in sae.state_dict().items())
    np.testing.assert_allclose(folded.folded()(x).detach(), reconstruction, atol=1e-10)


def test_any_leading_shape_and_precision() -> None:
    sae = SparseAutoencoder(**_parts("topk")).float()
    x = torch.from_numpy(X).bfloat16()
    single = sae(x)
    assert single.dtype == torch.float32
    torch.testing.assert_close(sae(x.reshape(4, 16, WIDTH)), single.reshape(4, 16, WIDTH))


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_what_is_saved_comes_back(activation: str, tmp_path: Path) -> None:
    folder = tmp_path / "sae"
    changes: dict[str, Any] = {"score_scale": torch.ones(N)} if activation == "topk" else {}
    sae = SparseAutoencoder(
        **_parts(activation, input_scale=0.3, subtract_decoder_bias=True, lm="tiny", **changes)
    ).float()
    sae.save(folder)
    sae.save(folder)  # over its own
    assert sorted(p.name for p in folder.iterdir()) == [
        "config.json",
        "sparse_autoencoder.safetensors",
    ]
    x = torch.from_numpy(X).float()
    for back in (load_sae(folder), SparseAutoencoder.from_pretrained(folder)):
        assert torch.equal(back(x), sae(x)) and not back.training
        names = ("hook_point", "activation", "k", "input_scale", "subtract_decoder_bias", "lm")
        assert all(getattr(back, name) == getattr(sae, name) for name in names)
    (folder / TENSORS).write_bytes(b"")  # what was read is not mapped from it
    assert torch.equal(back(x), sae(x))
    (folder / "notes.txt").touch()
    with pytest.raises(OutputError, match=r"notes\.txt"):
        sae.save(folder)


CONFIG, TENSORS = "config.json", "sparse_autoencoder.safetensors"


@pytest.mark.parametrize(
    ("name", "damage", "message"),
    [
        (CONFIG, lambda old: old.replace(b'"activation"', b'"other"'), r"lack .*'activation'"),
        (CONFIG, lambda old: old.replace(b'version": 2', b'version": 9'), "version 9; .*version 2"),
        (TENSORS, lambda old: save({**load(old), "more": torch.ones(1)}), "lack .*'more'"),
        (TENSORS, lambda old: old[:-10], r"safetensors: it is damaged"),
        (CONFIG, lambda old: b"{", r"config\.json: it is not valid JSON"),
    ],
)
def test_a_damaged_folder(name: str, damage: Any, message: str, tmp_path: Path) -> None:
    SparseAutoencoder(**_parts("relu")).float().save(tmp_path)
    path = tmp_path / name
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(SparseAutoencoderError, match=message):
        SparseAutoencoder.from_pretrained(tmp_path)


@pytest.mark.parametrize(
    ("activation", "changes", "message"),
    [
        ("relu", {"encoder": torch.ones(N, WIDTH + 1)}, r"encoder has the shape \(40, 13\)"),
        ("topk", {"k": 1.5}, r"topk needs a k from 1 to its 40 features, not 1\.5"),
        ("relu", {"threshold": torch.ones(N)}, "activation is 'relu'; .* have a threshold"),
        ("jumprelu", {"threshold": None}, "activation is 'jumprelu'; .* have a threshold"),
        ("gelu", {}, "activation is 'gelu'; there are relu, jumprelu"),
        ("relu", {"input_scale": 0.0}, "input_scale is 0.0"),
        ("relu", {"encoder": torch.full((N, WIDTH), torch.nan)}, "encoder holds NaN"),
    ],
)
def test_parts_that_do_not_belong_together(activation: str, changes: dict, message: str) -> None:
    with pytest.raises(SparseAutoencoderError, match=f"SAE at residual of layer 2: .*{message}"):
        SparseAutoencoder(**_parts(activation, **changes))
