"""Train the SAEs of all hook points at once, as tensors with a leading hook point dimension."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import embedding_bag

from lincorr_lightning.data.texts import TextBlocks, TokenStep
from lincorr_lightning.errors import require
from lincorr_lightning.lm.language_model import LanguageModel
from lincorr_lightning.progress import progress
from lincorr_lightning.sae.forwards import BlockActivations
from lincorr_lightning.sae.hook_points import KINDS, HookPoint
from lincorr_lightning.sae.hooks import find_hook_points, width_of
from lincorr_lightning.sae.sparse_autoencoder import SparseAutoencoder

LEARNING_RATE = 4e-3  #: Default peak learning rate of Adam.
_WARMUP_SHARE = 0.05  # of the steps, with a linearly increasing learning rate
_DECAY_SHARE = 0.4  # of the steps, at the end, with one that decreases linearly to 0
_AUX_LOSS_COEF = 1 / 32
_THRESHOLD_STEPS = 100  # number of steps over which the threshold is averaged


@dataclass(frozen=True)
class SAESettings:
    """Size of each SAE, and which of its features count as dead in training."""

    n_features: int = 512
    """Number of features of each SAE."""
    k: int = 12
    """Mean number of active features per token."""
    dead_after_steps: int = 50
    """Number of steps without activation after which a feature counts as dead in training."""
    aux_k: int = 64
    """Number of dead features per token that learn the reconstruction error."""

    def __post_init__(self) -> None:
        require("model.sae.n_features", self.n_features, at_least=1)
        require("model.sae.k", self.k, at_least=1, at_most=self.n_features)
        require("model.sae.dead_after_steps", self.dead_after_steps, at_least=1)
        require("model.sae.aux_k", self.aux_k, at_least=1)


class StepLosses(NamedTuple):
    """Losses and statistics of one training step."""

    total: Tensor  #: Loss to minimise, summed over the hook points.
    unexplained: Tensor  #: Squared error as a share of the variance, ``(n_hook_points,)``.
    n_active: Tensor  #: Tokens at which each feature is active, ``(n_hook_points, n_features)``.
    least: Tensor  #: Smallest pre-activation of an active feature, ``(n_hook_points,)``.


class StackedAutoencoders(nn.Module):
    """Independent batch-top-k SAEs of one size at several hook points.

    Of a batch of n tokens the n k largest pre-activations of an SAE are its features; their
    smallest one, averaged over steps, is the threshold after training (Bussmann et al., 2024,
    arXiv 2412.06410). Each SAE reads ``s x - b_D``, with s such that the activations' mean distance
    to the initial b_D, their geometric median, is 1. Decoder rows have norm 1. The loss is the
    squared error as a share of the variance, so that hook points have equal weight; dead features
    learn the error by an auxiliary loss (Gao et al., 2024, arXiv 2406.04093, section 2.4).

    The initial weights of a hook point follow from the `seed`, whatever the others are.
    """

    input_scale: Tensor
    threshold: Tensor
    idle: Tensor
    n_averaged: Tensor

    def __init__(
        self, hook_points: Sequence[HookPoint], width: int, settings: SAESettings, seed: int = 0
    ) -> None:
        super().__init__()
        self.hook_points = tuple(hook_points)
        self.settings = settings
        n = len(self.hook_points)
        n_features = settings.n_features
        decoder = torch.empty(n, n_features, width)
        for at, rows in zip(self.hook_points, decoder, strict=True):
            number = (seed * 10_000 + at.layer) * len(KINDS) + KINDS.index(at.kind)
            rows.normal_(generator=torch.Generator().manual_seed(number))
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
        center = geometric_median(sample)
        distance = (sample - center[:, None]).norm(dim=-1).mean(1)
        # Constant activations are not scaled.
        self.input_scale.copy_(torch.where(distance > 0, distance.reciprocal(), 1.0))
        self.decoder_bias.copy_(center * self.input_scale[:, None])

    def forward(self, activations: Tensor) -> StepLosses:
        """Return the losses of a batch of activations, ``(n_hook_points, n, width)``."""
        inputs = activations.to(self.encoder.dtype) * self.input_scale[:, None, None]
        variance = (inputs - inputs.mean(1, keepdim=True)).square().sum(-1).mean(1)
        with torch.no_grad():  # only the chosen features have gradients
            pre_activations = torch.baddbmm(
                self.encoder_bias[:, None],
                inputs - self.decoder_bias[:, None],
                self.encoder.transpose(1, 2),
            )
            least = self._least_chosen(pre_activations)
            chosen = (pre_activations >= least[:, None, None]) & (pre_activations > 0)
        features, entries = self._features(inputs, pre_activations, chosen)
        rebuilt = _decode(features, self.decoder, entries) + self.decoder_bias[:, None]
        error = inputs - rebuilt
        unexplained = error.square().sum(-1).mean(1) / _positive(variance)
        auxiliary = self._auxiliary_loss(inputs, pre_activations, error.detach())
        total = unexplained.sum() + _AUX_LOSS_COEF * auxiliary
        return StepLosses(total, unexplained.detach(), chosen.sum(1), least)

    def _least_chosen(self, pre_activations: Tensor) -> Tensor:
        """Return the level that the n k largest pre-activations of a hook point reach."""
        n = pre_activations.shape[1] * self.settings.k
        flat = pre_activations.flatten(1)
        if flat.is_cpu:  # Seven times as fast: with topk a training step takes a third longer.
            return torch.from_numpy(np.partition(flat.numpy(), -n, axis=1)[:, -n]).relu()
        return flat.topk(n, sorted=False).values.amin(1).relu()

    def _features(
        self, inputs: Tensor, pre_activations: Tensor, chosen: Tensor
    ) -> "tuple[Tensor, _Entries]":
        """Return the features at the chosen entries of the pre-activations, with gradients."""
        hook_point, row, feature = chosen.nonzero(as_tuple=True)
        n_hook_points, n, n_features = chosen.shape
        rows = hook_point * n + row
        counts = torch.bincount(rows, minlength=n_hook_points * n)
        entries = _Entries(rows, hook_point * n_features + feature, counts.cumsum(0) - counts)
        values = _KnownPreActivations.apply(
            inputs,
            self.encoder,
            self.encoder_bias,
            self.decoder_bias,
            pre_activations.flatten(0, 1)[rows, feature],
            entries,
        )  # type: ignore[no-untyped-call]
        return values.relu(), entries

    def _auxiliary_loss(self, inputs: Tensor, pre_activations: Tensor, error: Tensor) -> Tensor:
        """Return the share of the error that dead features leave, summed over the hook points."""
        dead = self.idle >= self.settings.dead_after_steps
        n_dead = dead.sum(1)
        most = min(self.settings.aux_k, int(n_dead.max()))
        if most == 0:
            return inputs.new_zeros(())
        of_dead = pre_activations.masked_fill(~dead[:, None], -torch.inf)
        columns = of_dead.topk(most, sorted=False).indices
        chosen = torch.zeros_like(of_dead, dtype=torch.bool).scatter(-1, columns, True)
        features, entries = self._features(inputs, pre_activations, chosen & dead[:, None])
        left = (_decode(features, self.decoder, entries) - error).square().sum(-1).mean(1)
        return (left / _positive(error.square().sum(-1).mean(1)) * (n_dead > 0)).sum()

    @torch.no_grad()
    def remember(self, n_active: Tensor, least: Tensor) -> None:
        """Update the idle steps of features, and the threshold, by those of `StepLosses`."""
        self.idle.add_(1).masked_fill_(n_active > 0, 0)
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
        self.decoder.div_(_positive(self.decoder.norm(dim=-1, keepdim=True)))

    @torch.no_grad()
    def export(self, lm: str | None = None) -> dict[HookPoint, SparseAutoencoder]:
        """Return a copy of each SAE, as used after training."""
        return {
            hook_point: SparseAutoencoder(
                hook_point=hook_point,
                **{name: each[i].clone() for name, each in self.named_parameters()},
                activation="batchtopk",
                threshold=self.threshold[i].clone(),
                k=self.settings.k,
                input_scale=float(self.input_scale[i]),
                subtract_decoder_bias=True,
                lm=lm,
            ).eval()
            for i, hook_point in enumerate(self.hook_points)
        }


def _positive(tensor: Tensor) -> Tensor:
    """Return numbers of at least 0 as divisors."""
    return tensor.clamp(min=torch.finfo(tensor.dtype).tiny)


def learning_rate_factor(step: int, n_steps: float) -> float:
    """Return the learning rate of a step, counted from 0, as a share of its peak."""
    up = (step + 1) / max(_WARMUP_SHARE * n_steps, 1.0)
    down = (n_steps - step) / max(_DECAY_SHARE * n_steps, 1.0)
    return max(min(1.0, up, down), 0.0)


def train_saes(
    lm: LanguageModel, steps: TextBlocks | Sequence[TokenStep], settings: SAESettings, seed: int
) -> dict[HookPoint, SparseAutoencoder]:
    """Train SAEs at all hook points of a loaded LM, as `SparseAutoencoders` does by default."""
    # Lightning tests in inference mode, whose tensors cannot be trained.
    with torch.inference_mode(False), torch.enable_grad():
        saes = StackedAutoencoders(find_hook_points(lm.model), width_of(lm.model), settings, seed)
        saes = saes.to(lm.model.device)
        optimizer = torch.optim.Adam(saes.parameters(), lr=LEARNING_RATE)
        activations = BlockActivations(lm, saes.hook_points)
        for i in progress(range(len(steps)), "training SAEs, step"):
            batch = activations.read(steps[i])
            if i == 0:
                saes.fit_input(activations.block)
            for group in optimizer.param_groups:
                group["lr"] = LEARNING_RATE * learning_rate_factor(i, len(steps))
            losses = saes(batch)
            saes.remember(losses.n_active, losses.least)
            optimizer.zero_grad()
            losses.total.backward()
            saes.project_gradient()
            optimizer.step()
            saes.normalize()
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
        entries: _Entries,
    ) -> Tensor:
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
        starts = counts.cumsum(0) - counts
        read = (inputs - center[:, None]).flatten(0, 1)
        weights = gradient[order]
        to_encoder = embedding_bag(
            rows[order], read, starts, mode="sum", per_sample_weights=weights
        ).view(n_hook_points, n_features, width)
        # Not index_add, whose atomic additions would make runs differ on a GPU.
        numbers = torch.arange(len(order), device=order.device)
        sums = embedding_bag(numbers, weights[:, None], starts, mode="sum")
        to_bias = sums.view(n_hook_points, 1, n_features)
        to_center = -torch.bmm(to_bias, encoder)[:, 0]
        return None, to_encoder, to_bias[:, 0], to_center, None, None


def _decode(features: Tensor, decoder: Tensor, entries: _Entries) -> Tensor:
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
