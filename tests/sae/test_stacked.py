"""Stacked SAEs against one SAE at a time in plain torch, and on activations with a known answer."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from scipy.optimize import minimize
from torch import Tensor

from lincorr_lightning.errors import ConfigError
from lincorr_lightning.sae.hook_points import HookPoint
from lincorr_lightning.sae.stacked import SAESettings, StackedAutoencoders, geometric_median

HOOK_POINTS = [HookPoint(0, "residual"), HookPoint(0, "mlp_out"), HookPoint(1, "residual")]
WIDTH, N_FEATURES, K = 10, 24, 4


def _settings(activation: str, **changes: Any) -> SAESettings:
    defaults = {
        "n_features": N_FEATURES,
        "k": K,
        "dead_after_steps": 3,
        "aux_k": 5,
        "l1_coef": 0.05,
    }
    return SAESettings(activation=activation, **defaults | changes)


def _batches(n_steps: int, n: int = 40) -> Tensor:
    generator = torch.Generator().manual_seed(7)
    mixing = torch.randn(3, WIDTH, WIDTH, generator=generator, dtype=torch.float64)
    x = torch.randn(n_steps, 3, n, WIDTH, generator=generator, dtype=torch.float64).relu()
    return (x @ mixing + torch.arange(3.0)[:, None, None]) * torch.tensor([1.0, 5, 0.2])[
        :, None, None
    ]


def _plain_training(
    saes: StackedAutoencoders, hook_point: int, batches: Tensor, settings: SAESettings, lr: float
) -> dict[str, Tensor]:
    """One SAE by autograd over dense features, written from the papers' formulas."""
    e, d, be, bd = (
        getattr(saes, name).detach()[hook_point].clone().requires_grad_()
        for name in ("encoder", "decoder", "encoder_bias", "decoder_bias")
    )
    s = saes.input_scale[hook_point].clone()
    optimizer = torch.optim.Adam([e, d, be, bd], lr=lr)
    idle = torch.zeros(N_FEATURES, dtype=torch.long)
    leasts: list[float] = []
    losses: list[float] = []
    for batch in batches[:, hook_point]:
        x = batch * s
        before = (x - bd) @ e.T + be
        if settings.activation == "topk":
            mask = torch.zeros_like(before, dtype=torch.bool)
            for row in range(len(x)):
                mask[row, before[row].argsort(descending=True)[: settings.k]] = True
        elif settings.activation == "batchtopk":
            mask = torch.zeros(before.numel(), dtype=torch.bool)
            mask[before.flatten().argsort(descending=True)[: settings.k * len(x)]] = True
            mask = mask.view_as(before)
        else:
            mask = torch.ones_like(before, dtype=torch.bool)
        features = before.relu() * mask
        error = x - (features @ d + bd)
        variance = ((x - x.mean(0)) ** 2).sum() / len(x)
        loss = (error**2).sum() / len(x) / variance
        losses.append(loss.item())
        if settings.activation == "relu":
            loss = loss + settings.l1_coef * features.sum() / len(x)
        dead = idle >= settings.dead_after_steps
        if dead.any() and settings.aux_loss_coef:
            taken = torch.zeros_like(before)
            n_dead = int(dead.sum())
            for row in range(len(x)):
                own = torch.where(dead, before[row].detach(), -math.inf)
                chosen = own.argsort(descending=True)[: min(settings.aux_k, n_dead)]
                taken[row, chosen] = 1.0
            guess = (before.relu() * taken) @ d
            target = error.detach()
            loss = loss + settings.aux_loss_coef * ((guess - target) ** 2).sum() / (target**2).sum()
        optimizer.zero_grad()
        loss.backward()
        d.grad -= (d.grad * d.detach()).sum(1, keepdim=True) * d.detach()
        optimizer.step()
        with torch.no_grad():
            d /= d.norm(dim=1, keepdim=True)
        on = features > 0
        idle = torch.where(on.any(0), 0, idle + 1)
        leasts.append(features[mask].min().item() if settings.activation != "relu" else 0.0)
    return {
        "encoder": e,
        "decoder": d,
        "encoder_bias": be,
        "decoder_bias": bd,
        "idle": idle,
        "threshold": torch.tensor(np.mean(leasts)),
        "losses": torch.tensor(losses, dtype=torch.float64),
        "l0": on.sum().double() / len(x),
        "dead": (idle >= settings.dead_after_steps).sum(),
    }


@pytest.mark.parametrize("activation", ["topk", "batchtopk", "relu"])
@pytest.mark.parametrize("aux_loss_coef", [0.0, 0.5])
def test_equals_one_sae_at_a_time(activation: str, aux_loss_coef: float) -> None:
    settings = _settings(activation, aux_loss_coef=aux_loss_coef)
    saes = StackedAutoencoders(HOOK_POINTS, WIDTH, settings, seed=3).double()
    batches = _batches(12)
    saes.fit_input(batches[0])
    with torch.no_grad():  # some that will not be active, of themselves
        saes.encoder_bias[:, :6] = -4.0
    expected = [_plain_training(saes, i, batches, settings, 1e-2) for i in range(3)]
    assert any(one["dead"] > 0 for one in expected)

    optimizer = torch.optim.Adam(saes.parameters(), lr=1e-2)
    unexplained = []
    for batch in batches:
        losses = saes(batch)
        optimizer.zero_grad()
        losses.total.backward()
        saes.project_gradient()
        optimizer.step()
        saes.normalize()
        saes.remember(losses.active, losses.least)
        unexplained.append(losses.unexplained)
    for i, one in enumerate(expected):
        for name in ("encoder", "decoder", "encoder_bias", "decoder_bias"):
            torch.testing.assert_close(getattr(saes, name)[i], one[name], atol=1e-8, rtol=1e-7)
        torch.testing.assert_close(torch.stack(unexplained)[:, i], one["losses"])
        assert saes.idle[i].tolist() == one["idle"].tolist()
        torch.testing.assert_close(saes.threshold[i], one["threshold"].double())
        torch.testing.assert_close(losses.l0[i].double(), one["l0"], atol=1e-6, rtol=0)


@pytest.mark.parametrize("activation", ["topk", "batchtopk", "relu"])
def test_what_is_exported_computes_what_was_trained(activation: str) -> None:
    saes = StackedAutoencoders(HOOK_POINTS, WIDTH, _settings(activation), seed=1).double()
    (batch,) = _batches(1)
    saes.fit_input(batch)
    losses = saes(batch)
    # Its own batch's threshold, a little below the least that was kept.
    saes.remember(losses.active, losses.least * (1 - 1e-9))
    for i, sae in enumerate(saes.export("an LM").values()):
        assert (sae.hook_point, sae.lm, sae.activation) == (HOOK_POINTS[i], "an LM", activation)
        x = batch[i]
        error = (sae(x) - x) * sae.input_scale
        y = x * sae.input_scale
        unexplained = error.square().sum() / (y - y.mean(0)).square().sum()
        torch.testing.assert_close(unexplained.detach(), losses.unexplained[i])
        assert (sae.encode(x) > 0).sum(1).double().mean() == pytest.approx(float(losses.l0[i]))
        torch.testing.assert_close(sae.decoder.norm(dim=1), torch.ones(N_FEATURES).double())


def test_a_hook_point_does_not_depend_on_the_others() -> None:
    alone = StackedAutoencoders(HOOK_POINTS[2:], WIDTH, _settings("topk"), seed=3)
    among = StackedAutoencoders(HOOK_POINTS, WIDTH, _settings("topk"), seed=3)
    torch.testing.assert_close(alone.decoder[0], among.decoder[2], rtol=0, atol=0)
    assert not torch.allclose(among.decoder[0], among.decoder[1])


def test_inputs_are_scaled_to_unit_distance_from_the_center() -> None:
    (batch,) = _batches(1, 200)
    for center, expected in (
        ("mean", batch.mean(1)),
        ("geometric_median", geometric_median(batch)),
        ("zero", torch.zeros(3, WIDTH, dtype=torch.float64)),
    ):
        saes = StackedAutoencoders(HOOK_POINTS, WIDTH, _settings("topk", center=center)).double()
        saes.fit_input(batch)
        scaled = batch * saes.input_scale[:, None, None]
        distance = (scaled - saes.decoder_bias[:, None]).norm(dim=-1).mean(1)
        torch.testing.assert_close(distance, torch.ones(3).double())
        torch.testing.assert_close(saes.decoder_bias.detach(), expected * saes.input_scale[:, None])


def test_geometric_median_is_where_the_mean_distance_is_least() -> None:
    points = np.random.default_rng(0).normal(size=(60, 3)) ** 3
    found = minimize(lambda m: np.linalg.norm(points - m, axis=1).mean(), points.mean(0), tol=1e-12)
    median = geometric_median(torch.from_numpy(points), n_steps=500, tolerance=1e-10)
    np.testing.assert_allclose(median.numpy(), found.x, atol=1e-5)
    # On a point itself, and where all are one.
    same = torch.ones(5, 3)
    assert geometric_median(same).tolist() == [1.0, 1.0, 1.0]


@pytest.mark.parametrize("activation", ["topk", "batchtopk", "relu"])
def test_a_planted_dictionary_is_found(activation: str) -> None:
    """Sparse sums of known directions: each is found by some feature."""
    width, n_true, k_true = 24, 40, 3
    generator = torch.Generator().manual_seed(12345)  # not that of the SAEs' own weights
    true = torch.nn.functional.normalize(torch.randn(2, n_true, width, generator=generator), dim=-1)
    offset = torch.randn(2, 1, width, generator=generator)

    def draw(n: int) -> Tensor:
        chosen = torch.rand(2, n, n_true, generator=generator).topk(k_true).indices
        size = 0.5 + torch.rand(2, n, k_true, generator=generator)
        return 7 * (torch.zeros(2, n, n_true).scatter(2, chosen, size) @ true + offset)

    settings = SAESettings(
        n_features=64, activation=activation, k=k_true, l1_coef=0.08, dead_after_steps=50, aux_k=16
    )
    saes = StackedAutoencoders(HOOK_POINTS[:2], width, settings)
    saes.fit_input(draw(2000))
    optimizer = torch.optim.Adam(saes.parameters(), lr=3e-3)
    for _ in range(1600 if activation == "relu" else 800):
        losses = saes(draw(256))
        optimizer.zero_grad()
        losses.total.backward()
        saes.project_gradient()
        optimizer.step()
        saes.normalize()
        saes.remember(losses.active, losses.least)
    cosines = (true @ saes.decoder.detach().transpose(1, 2)).amax(-1).mean(-1)
    assert cosines.min() > 0.9, cosines
    # Directions of before training are far from them.
    start = StackedAutoencoders(HOOK_POINTS[:2], width, settings).decoder.detach()
    assert (true @ start.transpose(1, 2)).amax(-1).mean() < 0.65


def test_bad_settings() -> None:
    with pytest.raises(ConfigError, match="activation is 'softmax'; it must be topk"):
        SAESettings(activation="softmax")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="k is 30, but there are 20 features"):
        SAESettings(n_features=20, k=30)
    with pytest.raises(ConfigError, match="n_features is 0"):
        SAESettings(n_features=0)
    with pytest.raises(ConfigError, match="center is 'middle'"):
        SAESettings(center="middle")  # type: ignore[arg-type]
