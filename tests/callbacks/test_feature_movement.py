"""Which features move, against reading them one prompt at a time."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from pandas import read_csv

from lincorr_lightning.callbacks import FeatureMovement
from lincorr_lightning.errors import SparseAutoencoderError
from lincorr_lightning.sae.hook_points import HookPoint
from lincorr_lightning.sae.sparse_autoencoder import SparseAutoencoder
from tests.callbacks import naive
from tests.toys import toy_sae

SUBJECTS = [f"name{i}" for i in range(30, 36)]
HOOK_POINTS = [HookPoint(0, "mlp_out"), HookPoint(1, "residual")]
N, WIDTH = 24, 16


def _sae(hook_point: HookPoint, width: int = WIDTH) -> SparseAutoencoder:
    random = torch.Generator().manual_seed(hook_point.layer)
    encoder, decoder = (torch.randn(N, width, generator=random) for _ in range(2))
    bias = torch.randn(N, generator=random) * 0.1
    return toy_sae(hook_point, decoder, encoder=encoder, encoder_bias=bias)


@pytest.fixture
def folder(tmp_path: Path) -> str:
    for hook_point in HOOK_POINTS:
        _sae(hook_point).save(tmp_path / "saes" / hook_point.id)
    return str(tmp_path / "saes")


def _naive_features(model, tokenizer, hook_point, prompts):
    """One prompt at a time by a bare hook, decoder norms taken into the features."""
    sae = _sae(hook_point)
    layer = model.model.layers[hook_point.layer]
    module = layer if hook_point.kind == "residual" else layer.mlp
    seen = []
    hook = module.register_forward_hook(
        lambda m, a, o: seen.append((o[0] if isinstance(o, tuple) else o)[0, -1])
    )
    with torch.no_grad():
        for prompt in prompts:
            model.eval()(**tokenizer(prompt, return_tensors="pt"))
        hook.remove()
        x = torch.stack(seen)
        features = (x @ sae.encoder.T + sae.encoder_bias).relu() * sae.decoder.norm(dim=1)
        rebuilt = (x @ sae.encoder.T + sae.encoder_bias).relu() @ sae.decoder
    return features.double().numpy(), x.double().numpy(), rebuilt.double().numpy()


@pytest.mark.parametrize("every", [1, 3])
def test_movement_is_that_of_naive_reading(small_lm, folder, every, fit):
    module = naive.Module(small_lm)
    states = naive.Loop(module, list(naive.sentences(small_lm))).states
    watch = FeatureMovement(folder, "city->country", SUBJECTS, every_n_steps=every)
    trainer = fit(watch, module=module)
    steps = [step for step, _ in watch.history["features/residual.1/source/change"]]
    assert steps == ([0, 1, 2, 3, 4] if every == 1 else [0, 3, 4])
    for hook_point in HOOK_POINTS:
        old_new = {}
        for side, what in (("source", "city"), ("target", "country")):
            prompts = [f"{x} lives in the {what} of" for x in SUBJECTS]
            (old, *_), (new, x, rebuilt) = (
                _naive_features(states[i], module.tokenizer, hook_point, prompts) for i in (0, -1)
            )
            old_new[side] = old, new
            found = watch.results[hook_point.id][side]
            moved = np.abs(new - old).mean(0)
            explained = 1 - ((x - rebuilt) ** 2).sum() / (x**2).sum()
            assert found["change"] == pytest.approx(moved.sum() / old.mean(0).sum(), rel=1e-3)
            assert found["on"] == pytest.approx(((old <= 0) & (new > 0)).sum(1).mean())
            assert found["off"] == pytest.approx(((old > 0) & (new <= 0)).sum(1).mean())
            assert found["explained"] == pytest.approx(explained, abs=1e-3)
            best = np.argsort(-moved)[:10]
            for row, i in zip(found["top"], best, strict=True):
                assert row["feature"] == f"{hook_point.id}.{i}"
                assert row["change"] == pytest.approx(moved[i], rel=1e-3)
                assert row["before"] == pytest.approx(old[:, i].mean(), rel=1e-3)
                assert row["after"] == pytest.approx(new[:, i].mean(), rel=1e-3, abs=1e-5)
        base = np.concatenate([old for old, _ in old_new.values()])
        least = 0.1 * base.sum() / (base > 0).sum()
        for side, (old, new) in old_new.items():
            n_moved = (np.abs(new - old).mean(0) > least).sum()
            assert watch.results[hook_point.id][side]["moved"] == n_moved > 0
    (path,) = Path(trainer.default_root_dir).rglob("feature_movement.csv")
    assert list(read_csv(path)["step"].unique()) == steps[:0:-1]
    assert json.dumps(watch.results)


def test_unusable_saes_are_refused(tmp_path, fit):
    _sae(HOOK_POINTS[0], width=8).save(tmp_path / "other" / "a")
    with pytest.raises(SparseAutoencoderError, match=r"is 8 wide, but .* is 16 wide"):
        fit(FeatureMovement(str(tmp_path / "other")))
