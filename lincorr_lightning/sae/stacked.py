"""Train the SAEs of all hook points at once, as tensors with a leading hook point dimension."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import embedding_bag

from lincorr_lightning.data.texts import TextBlocks, TokenStep
from lincorr_lightning.errors import ConfigError, NonFiniteError, require, require_one_of
from lincorr_lightning.lm.language_model import LanguageModel
from lincorr_lightning.progress import progress
from lincorr_lightning.sae.forwards import BlockActivations
from lincorr_lightning.sae.hook_points import KINDS, HookPoint
from lincorr_lightning.sae.hooks import find_hook_points, width_of
from lincorr_lightning.sae.sparse_autoencoder import SparseAutoencoder

TrainedActivation = Literal["topk", "batchtopk", "relu"]
Center = Literal["geometric_median", "mean", "zero"]
_THRESHOLD_STEPS = 100  # number of steps over which batchtopk's threshold is averaged


@dataclass(frozen=True)
class SAESettings:
    """Size, activation and training losses of each SAE."""

    n_features: int = 512
    """Number of features of each SAE."""
    activation: TrainedActivation = "batchtopk"
    """topk, batchtopk (k on average, by a learned threshold), or relu (with an L1 loss)."""
    k: int = 12
    """Number of active features per token; not used by relu."""
    l1_coef: float = 0.02
    """Weight of the L1 loss, the sum of the features; used by relu only."""
    center: Center = "geometric_median"
    """Initial decoder bias, the geometric_median or mean of the activations, or zero."""
    dead_after_steps: int = 50
    """Number of steps without activation after which a feature counts as dead in training."""
    aux_loss_coef: float = 1 / 32
    """Weight of the auxiliary loss, by which dead features learn the error; 0 leaves them dead."""
    aux_k: int = 64
    """Number of dead features per token that take part in the auxiliary loss."""

    def __post_init__(self) -> None:
        for name, options in (("activation", TrainedActivation), ("center", Center)):
            require_one_of(f"model.sae.{name}", getattr(self, name), get_args(options))
        for name in ("n_features", "k", "dead_after_steps", "aux_k"):
            require(f"model.sae.{name}", getattr(self, name), at_least=1)
        for name in ("l1_coef", "aux_loss_coef"):
            require(f"model.sae.{name}", getattr(self, name), at_least=0)
        if self.activation != "relu" and self.k > self.n_features:
            raise ConfigError(f"model.sae.k is {self.k}, but there are {self.n_features} features.")


class StepLosses(NamedTuple):
    """Losses and statistics of one step, ``(n_hook_points,)``."""

    total: Tensor  #: Loss to minimise, summed over the hook points.
    unexplained: Tensor  #: Squared error as a share of the batch's variance.
    l0: Tensor  #: Mean number of active features per token.
    active: Tensor  #: Tokens at which each feature is active, ``(n_hook_points, n_features)``.
    least: Tensor  #: Smallest pre-activation of a chosen feature; zeros for relu.


class StackedAutoencoders(nn.Module):
    """Independent SAEs of one size at several hook points.

    Each is a `SparseAutoencoder` with ``subtract_decoder_bias``: it reads ``s x - b_D``, with s
    such that the activations' mean distance to the initial b_D is 1. Decoder rows have norm 1. The
    loss is the squared error as a share of the variance, so that hook points have equal weight;
    dead features learn the error by an auxiliary loss (Gao et al., arXiv 2406.04093, 2.4).
    """

    input_scale: Tensor
    threshold: Tensor
    idle: Tensor
    n_averaged: Tensor

    def __init__(
        self, hook_points: Sequence[HookPoint], width: int, settings: SAESettings, seed: int = 0
    ) -> None:
        super().__init__()
        self.hook_points, self.settings = tuple(hook_points), settings
        n, n_features = len(self.hook_points), settings.n_features
        decoder = torch.empty(n, n_features, width)
        for at, rows in zip(self.hook_points, decoder, strict=True):
            of_layer = (seed * 10_000 + at.layer) * len(KINDS)
            rows.normal_(generator=torch.Generator().manual_seed(of_layer + KINDS.index(at.kind)))
        decoder = decoder / decoder.norm(dim=-1, keepdim=True)
        self.encoder = nn.Parameter(decoder.clone())
        self.decoder = nn.Parameter(decoder)
        self.encoder_bias = nn.Parameter(torch.zeros(n, n_features))
        self.decoder_bias = nn.Parameter(torch.zeros(n, width))
        self.register_buffer("input_scale", torch.ones(n))
        self.register_buffer("threshold", torch.zeros(n))
        self.register_buffer("idle", torch.zeros(n, n_features, dtype=torch.long))
        self.register_buffer("n_averaged", torch.zeros((), dtype=torch.long))

    @torch.no_grad()
    def fit_input(self, activations: Tensor) -> None:
        """Set input scale and decoder bias from activations, ``(n_hook_points, n, width)``."""
        sample = activations.to(self.encoder.dtype)
        center = torch.zeros_like(sample[:, 0])
        if self.settings.center != "zero":
            center = sample.mean(1) if self.settings.center == "mean" else geometric_median(sample)
        distance = (sample - center[:, None]).norm(dim=-1).mean(1)
        # Constant activations are not scaled.
        self.input_scale.copy_(torch.where(distance > 0, distance.reciprocal(), 1.0))
        self.decoder_bias.copy_(center * self.input_scale[:, None])

    def forward(self, activations: Tensor) -> StepLosses:
        """Return the losses of a batch of activations, ``(n_hook_points, n, width)``."""
        inputs = activations.to(self.encoder.dtype) * self.input_scale[:, None, None]
        variance = (inputs - inputs.mean(1, keepdim=True)).square().sum(-1).mean(1)
        variance = variance.clamp(min=torch.finfo(inputs.dtype).tiny)
        is_relu = self.settings.activation == "relu"
        # Of the other activations, only the chosen features have gradients.
        with torch.set_grad_enabled(is_relu and torch.is_grad_enabled()):
            before = torch.baddbmm(
                self.encoder_bias[:, None],
                inputs - self.decoder_bias[:, None],
                self.encoder.transpose(1, 2),
            )
        if is_relu:
            features = before.relu()
            rebuilt = torch.baddbmm(self.decoder_bias[:, None], features, self.decoder)
            active = (features.detach() > 0).sum(1)
            least = torch.zeros_like(variance)
        else:
            chosen, least = self._choose(before)
            features, entries = self._features(inputs, before, chosen)
            rebuilt = _decode(features, self.decoder, entries) + self.decoder_bias[:, None]
            active = torch.bincount(
                entries.features[features.detach() > 0], minlength=self.encoder_bias.numel()
            ).view(self.encoder_bias.shape)
        error = inputs - rebuilt
        unexplained = error.square().sum(-1).mean(1) / variance
        total = unexplained.sum()
        if is_relu:
            # Inputs have norm 1 on average at each hook point, so one coefficient fits all.
            total = total + self.settings.l1_coef * features.sum(-1).mean(1).sum()
        if self.settings.aux_loss_coef:
            auxiliary = self._auxiliary(inputs, before.detach(), error.detach())
            total = total + self.settings.aux_loss_coef * auxiliary
        l0 = active.sum(1) / inputs.shape[1]
        return StepLosses(total, unexplained.detach(), l0, active, least)

    def _features(
        self, inputs: Tensor, before: Tensor, chosen: Tensor
    ) -> "tuple[Tensor, _Entries]":
        """Return the features at the chosen entries of the pre-activations, with gradients."""
        hook_point, row, feature = chosen.nonzero(as_tuple=True)
        n_hook_points, n, n_features = chosen.shape
        rows = hook_point * n + row
        counts = torch.bincount(rows, minlength=n_hook_points * n)
        entries = _Entries(rows, hook_point * n_features + feature, counts.cumsum(0) - counts)
        known = before.flatten(0, 1)[rows, feature]
        values = _KnownPreActivations.apply(
            inputs, self.encoder, self.encoder_bias, self.decoder_bias, known, entries
        )  # type: ignore[no-untyped-call]
        return values.relu(), entries

    def _choose(self, before: Tensor) -> tuple[Tensor, Tensor]:
        k = self.settings.k
        if self.settings.activation == "topk":
            values, columns = before.topk(k, dim=-1, sorted=False)
            chosen = torch.zeros_like(before, dtype=torch.bool).scatter(-1, columns, True)
            return chosen, values.relu().amin((1, 2))
        # The n * k largest of the batch and their equals, of which some may not be positive.
        n, flat = before.shape[1] * k, before.flatten(1)
        if flat.is_cpu:  # Seven times as fast: with topk a training step takes a third longer.
            least = torch.from_numpy(np.partition(flat.numpy(), -n, axis=1)[:, -n]).relu()
        else:
            least = flat.topk(n, sorted=False).values.amin(1).relu()
        return (before >= least[:, None, None]) & (before > 0), least

    def _auxiliary(self, inputs: Tensor, before: Tensor, error: Tensor) -> Tensor:
        """Return the share of the error that dead features leave, summed over the hook points."""
        dead = self.idle >= self.settings.dead_after_steps
        n_dead = dead.sum(1)
        most = min(self.settings.aux_k, int(n_dead.max()))
        if most == 0:
            return inputs.new_zeros(())
        columns = before.masked_fill(~dead[:, None], -torch.inf).topk(most, sorted=False).indices
        chosen = torch.zeros_like(before, dtype=torch.bool).scatter(-1, columns, True)
        features, entries = self._features(inputs, before, chosen & dead[:, None])
        squares = (_decode(features, self.decoder, entries) - error).square().sum(-1).mean(1)
        shares = squares / error.square().sum(-1).mean(1).clamp(min=torch.finfo(error.dtype).tiny)
        return (shares * (n_dead > 0)).sum()

    def check_finite(self, losses: StepLosses, way_out: str) -> None:
        """Refuse a loss that is NaN or infinite."""
        for hook_point, loss in zip(self.hook_points, losses.unexplained.tolist(), strict=True):
            if not math.isfinite(loss):
                raise NonFiniteError(f"the loss of the SAE at {hook_point} is {loss}. {way_out}")

    @torch.no_grad()
    def remember(self, active: Tensor, least: Tensor) -> None:
        """Update the idle steps of features, and the threshold, by those of `StepLosses`."""
        self.idle.add_(1).masked_fill_(active > 0, 0)
        self.n_averaged.add_(1)
        share = 1.0 / self.n_averaged.clamp(max=_THRESHOLD_STEPS)
        self.threshold.lerp_(least.to(self.threshold), share)

    @torch.no_grad()
    def project_gradient(self) -> None:
        """Remove the component of the decoder's gradient that only changes the norms of rows."""
        if (gradient := self.decoder.grad) is not None:
            gradient.sub_((gradient * self.decoder).sum(-1, keepdim=True) * self.decoder)

    @torch.no_grad()
    def normalize(self) -> None:
        """Scale every decoder row to norm 1."""
        norm = self.decoder.norm(dim=-1, keepdim=True)
        self.decoder.div_(norm.clamp(min=torch.finfo(norm.dtype).tiny))

    @torch.no_grad()
    def export(self, lm: str | None = None) -> dict[HookPoint, SparseAutoencoder]:
        """Return a copy of each SAE, as used after training."""
        settings = self.settings
        activation, is_batchtopk = settings.activation, settings.activation == "batchtopk"
        return {
            hook_point: SparseAutoencoder(
                hook_point=hook_point,
                **{name: each[i].clone() for name, each in self.named_parameters()},
                activation=activation,
                threshold=self.threshold[i].clone() if is_batchtopk else None,
                k=None if activation == "relu" else settings.k,
                input_scale=float(self.input_scale[i]),
                subtract_decoder_bias=True,
                lm=lm,
            ).eval()
            for i, hook_point in enumerate(self.hook_points)
        }


LEARNING_RATE, WARMUP, DECAY = 4e-3, 0.05, 0.4
"""Defaults of `SparseAutoencoders`: peak learning rate, and shares of the steps."""


def learning_rate_factor(step: int, n_steps: float, warmup: float, decay: float) -> float:
    """Return the learning rate of a step, counted from 0, as a share of its peak.

    It is linear, up over the first `warmup` and down to 0 over the last `decay` of the steps.
    """
    up = (step + 1) / max(warmup * n_steps, 1.0)
    down = (n_steps - step) / max(decay * n_steps, 1.0)
    return max(min(1.0, up, down), 0.0)


def train_saes(
    lm: LanguageModel, steps: TextBlocks | Sequence[TokenStep], settings: SAESettings, seed: int
) -> dict[HookPoint, SparseAutoencoder]:
    """Train SAEs at all hook points of a loaded LM with the defaults of `SparseAutoencoders`."""
    # Lightning tests in inference mode, whose tensors cannot be trained.
    with torch.inference_mode(False), torch.enable_grad():
        saes = StackedAutoencoders(find_hook_points(lm.model), width_of(lm.model), settings, seed)
        saes = saes.to(lm.model.device)
        optimizer = torch.optim.Adam(saes.parameters(), lr=LEARNING_RATE)
        activations = BlockActivations(lm, saes.hook_points)
        n = len(steps)
        for i in progress(range(n), "training SAEs, step"):
            read = activations.read(steps[i])
            if i == 0:
                saes.fit_input(activations.block)
            for group in optimizer.param_groups:
                group["lr"] = LEARNING_RATE * learning_rate_factor(i, n, WARMUP, DECAY)
            losses = saes(read)
            saes.remember(losses.active, losses.least)
            optimizer.zero_grad()
            losses.total.backward()
            saes.project_gradient()
            optimizer.step()
            saes.normalize()
        saes.check_finite(losses, "Set model.lm.dtype to float32, or pass SAEs as model.saes.")
        return saes.export(lm.config.name_or_path)


# -- sparse products -----------------------------------------------------------------------------
#
# Of the five products of a training step (forward and gradients), only the encoder's forward needs
# all features; the others are sums of rows (`torch.nn.functional.embedding_bag`). With 12 of 512
# features active, a training run is about 1.4 times as fast as with dense products on a CPU core.


class _Entries(NamedTuple):
    """Active features of several SAEs, sorted by row."""

    rows: Tensor  #: ``hook_point * n + row``, ascending, ``(n_entries,)``.
    features: Tensor  #: ``hook_point * n_features + feature``, ``(n_entries,)``.
    starts: Tensor  #: Index of each row's first entry, ``(n_hook_points * n,)``.


class _KnownPreActivations(torch.autograd.Function):
    """Makes known pre-activations differentiable by encoder, bias and center.

    They are `values`, ``(inputs - center) encoderᵀ + bias`` of the entries, ``(n_entries,)``, of
    inputs ``(n_hook_points, n, width)`` and encoders ``(n_hook_points, n_features, width)``.
    """

    @staticmethod
    def forward(
        ctx: Any,
        inputs: Tensor,
        encoder: Tensor,
        bias: Tensor,
        center: Tensor,
        values: Tensor,
        entries: "_Entries",
    ) -> Tensor:
        del bias
        ctx.save_for_backward(inputs, encoder, center, *entries)
        return values.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        """Return the gradients of encoder, bias and center."""
        (gradient,) = gradients
        inputs, encoder, center, rows, features, _ = ctx.saved_tensors
        n_hook_points, n_features, width = encoder.shape
        order = features.argsort(stable=True)
        counts = torch.bincount(features, minlength=n_hook_points * n_features)
        read = (inputs - center[:, None]).flatten(0, 1)
        to_encoder = embedding_bag(
            rows[order],
            read,
            counts.cumsum(0) - counts,
            mode="sum",
            per_sample_weights=gradient[order],
        ).view(n_hook_points, n_features, width)
        # Not index_add, whose atomic additions would make runs differ on a GPU.
        sums = embedding_bag(
            torch.arange(len(order), device=order.device),
            gradient[order, None],
            counts.cumsum(0) - counts,
            mode="sum",
        ).view(n_hook_points, 1, n_features)
        return None, to_encoder, sums[:, 0], -torch.bmm(sums, encoder)[:, 0], None, None


def _decode(features: Tensor, decoder: Tensor, entries: "_Entries") -> Tensor:
    n_hook_points, _, width = decoder.shape
    rows = embedding_bag(
        entries.features,
        decoder.flatten(0, 1),
        entries.starts,
        mode="sum",
        per_sample_weights=features,
    )
    return rows.view(n_hook_points, -1, width)


@torch.no_grad()
def geometric_median(points: Tensor, n_steps: int = 50, tolerance: float = 1e-6) -> Tensor:
    """Return the point with the smallest mean distance to all points, by Weiszfeld's iteration.

    Unlike the mean, it is robust to outliers. Of points ``(..., n, d)``: ``(..., d)``. Iterations,
    `n_steps` at most, end when it moves by less than the `tolerance`, a fraction of that distance.
    """
    median = points.mean(-2)
    for _ in range(n_steps):
        distance = (points - median[..., None, :]).norm(dim=-1)
        scale = distance.mean(-1, keepdim=True)
        # A point that coincides with the median would have infinite weight.
        weight = distance.clamp(min=torch.finfo(points.dtype).eps * scale + 1e-30).reciprocal()
        new = (points * weight[..., None]).sum(-2) / weight.sum(-1, keepdim=True)
        moved = (new - median).norm(dim=-1, keepdim=True)
        median = new
        if bool((moved <= tolerance * scale).all()):
            break
    return median
