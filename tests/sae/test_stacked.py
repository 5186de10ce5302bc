"""Stacked SAEs against one SAE at a time in plain torch, and on activations with a known answer."""

import math

import numpy as np
import pytest
import torch
from scipy.optimize import minimize
from torch import Tensor

from lincorr_lightning.errors import ConfigError
from lincorr_lightning.sae.hook_points import HookPoint
from lincorr_lightning.sae.stacked import (
    SAESettings,
    StackedAutoencoders,
    StepLosses,
    geometric_median,
)

HOOK_POINTS = [HookPoint(0, "residual"), HookPoint(0, "mlp_out"), HookPoint(1, "residual")]
WIDTH, N_FEATURES, K = 10, 24, 4
SETTINGS = SAESettings(n_features=N_FEATURES, k=K, dead_after_steps=3, aux_k=5)
PARAMETERS = ("encoder", "decoder", "encoder_bias", "decoder_bias")


def _batches(n_steps: int, n: int = 40) -> Tensor:
    generator = torch.Generator().manual_seed(7)
    mixing = torch.randn(3, WIDTH, WIDTH, generator=generator, dtype=torch.float64)
    x = torch.randn(n_steps, 3, n, WIDTH, generator=generator, dtype=torch.float64).relu()
    sizes = torch.tensor([1.0, 5, 0.2])[:, None, None]
    return (x @ mixing + torch.arange(3.0)[:, None, None]) * sizes


def _step(saes: StackedAutoencoders, optimizer: torch.optim.Optimizer, batch: Tensor) -> StepLosses:
    losses: StepLosses = saes(batch)
    optimizer.zero_grad()
    losses.total.backward()
    saes.project_gradient()
    optimizer.step()
    saes.normalize()
    saes.remember(losses.n_active, losses.least)
    return losses


def _plain_training(
    saes: StackedAutoencoders, hook_point: int, batches: Tensor, lr: float
) -> dict[str, Tensor]:
    """One SAE by autograd over dense features, written from the papers' formulas."""
    e, d, be, bd = (
        getattr(saes, name).detach()[hook_point].clone().requires_grad_() for name in PARAMETERS
    )
    s = saes.input_scale[hook_point].clone()
    optimizer = torch.optim.Adam([e, d, be, bd], lr=lr)
    idle = torch.zeros(N_FEATURES, dtype=torch.long)
    leasts: list[float] = []
    losses: list[float] = []
    for batch in batches[:, hook_point]:
        x = batch * s
        before = (x - bd) @ e.T + be
        mask = torch.zeros(before.numel(), dtype=torch.bool)
        mask[before.flatten().argsort(descending=True)[: K * len(x)]] = True
        features = before.relu() * mask.view_as(before)
        error = x - (features @ d + bd)
        variance = ((x - x.mean(0)) ** 2).sum() / len(x)
        loss = (error**2).sum() / len(x) / variance
        losses.append(loss.item())
        dead = idle >= SETTINGS.dead_after_steps
        if dead.any():
            taken = torch.zeros_like(before)
            for row in range(len(x)):
                of_dead = torch.where(dead, before[row].detach(), -math.inf)
                chosen = of_dead.argsort(descending=True)[: min(SETTINGS.aux_k, int(dead.sum()))]
                taken[row, chosen] = 1.0
            guess = (before.relu() * taken) @ d
            target = error.detach()
            loss = loss + ((guess - target) ** 2).sum() / (target**2).sum() / 32
        optimizer.zero_grad()
        loss.backward()
        d.grad -= (d.grad * d.detach()).sum(1, keepdim=True) * d.detach()
        optimizer.step()
        with torch.no_grad():
            d /= d.norm(dim=1, keepdim=True)
        idle = torch.where((features > 0).any(0), 0, idle + 1)
        leasts.append(features.flatten()[mask].min().item())
    return {
        "encoder": e,
        "decoder": d,
        "encoder_bias": be,
        "decoder_bias": bd,
        "idle": idle,
        "threshold": torch.tensor(np.mean(leasts)),
        "losses": torch.tensor(losses, dtype=torch.float64),
    }


def test_equals_one_sae_at_a_time() -> None:
    saes = StackedAutoencoders(HOOK_POINTS, WIDTH, SETTINGS, seed=3).double()
    batches = _batches(12)
    saes.fit_input(batches[0])
    with torch.no_grad():  # some that will not be active, of themselves
        saes.encoder_bias[:, :6] = -4.0
    expected = [_plain_training(saes, i, batches, 1e-2) for i in range(3)]
    assert any((each["idle"] >= SETTINGS.dead_after_steps).any() for each in expected)

    optimizer = torch.optim.Adam(saes.parameters(), lr=1e-2)
    unexplained = torch.stack([_step(saes, optimizer, batch).unexplained for batch in batches])
    for i, each in enumerate(expected):
        for name in PARAMETERS:
            torch.testing.assert_close(getattr(saes, name)[i], each[name], atol=1e-8, rtol=1e-7)
        torch.testing.assert_close(unexplained[:, i], each["losses"])
        assert saes.idle[i].tolist() == each["idle"].tolist()
        torch.testing.assert_close(saes.threshold[i], each["threshold"].double())


def test_what_is_exported_computes_what_was_trained() -> None:
    saes = StackedAutoencoders(HOOK_POINTS, WIDTH, SETTINGS, seed=1).double()
    (batch,) = _batches(1)
    saes.fit_input(batch)
    losses = saes(batch)
    # Its own batch's threshold, a little below the least that was kept.
    saes.remember(losses.n_active, losses.least * (1 - 1e-9))
    for i, sae in enumerate(saes.export("an LM").values()):
        assert (sae.hook_point, sae.lm, sae.activation) == (HOOK_POINTS[i], "an LM", "batchtopk")
        x = batch[i]
        error = (sae(x) - x) * sae.input_scale
        y = x * sae.input_scale
        unexplained = error.square().sum() / (y - y.mean(0)).square().sum()
        torch.testing.assert_close(unexplained.detach(), losses.unexplained[i])
        assert torch.equal((sae.encode(x) > 0).sum(0), losses.n_active[i])
        torch.testing.assert_close(sae.decoder.norm(dim=1), torch.ones(N_FEATURES).double())


def test_a_hook_point_does_not_depend_on_the_others() -> None:
    alone = StackedAutoencoders(HOOK_POINTS[2:], WIDTH, SETTINGS, seed=3)
    among = StackedAutoencoders(HOOK_POINTS, WIDTH, SETTINGS, seed=3)
    torch.testing.assert_close(alone.decoder[0], among.decoder[2], rtol=0, atol=0)
    assert not torch.allclose(among.decoder[0], among.decoder[1])


def test_inputs_are_scaled_to_unit_distance_from_the_geometric_median() -> None:
    (batch,) = _batches(1, 200)
    saes = StackedAutoencoders(HOOK_POINTS, WIDTH, SETTINGS).double()
    saes.fit_input(batch)
    scaled = batch * saes.input_scale[:, None, None]
    distance = (scaled - saes.decoder_bias[:, None]).norm(dim=-1).mean(1)
    torch.testing.assert_close(distance, torch.ones(3).double())
    expected = geometric_median(batch) * saes.input_scale[:, None]
    torch.testing.assert_close(saes.decoder_bias.detach(), expected)


def test_geometric_median_is_where_the_mean_distance_is_least() -> None:
    points = np.random.default_rng(0).normal(size=(60, 3)) ** 3
    least = minimize(lambda m: np.linalg.norm(points - m, axis=1).mean(), points.mean(0), tol=1e-12)
    median = geometric_median(torch.from_numpy(points), n_steps=500, tolerance=1e-10)
    np.testing.assert_allclose(median.numpy(), least.x, atol=1e-5)
    # On a point itself, where all are the same.
    assert geometric_median(torch.ones(5, 3)).tolist() == [1.0, 1.0, 1.0]


def test_bad_settings() -> None:
    with pytest.raises(ConfigError, match=r"k is 30; .* at most 20"):
        SAESettings(n_features=20, k=30)
