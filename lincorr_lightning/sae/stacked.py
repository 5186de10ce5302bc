"""Train the SAEs of all hook points at once, as tensors with a leading hook point dimension."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding_bag

from lincorr_lightning.errors import ConfigError, require
from lincorr_lightning.functional.geometric_median import geometric_median
from lincorr_lightning.sae.hook_points import KINDS, HookPoint
from lincorr_lightning.sae.sparse_autoencoder import SparseAutoencoder

TrainedActivation = Literal["topk", "batchtopk", "relu"]
Center = Literal["geometric_median", "mean", "zero"]
# Number of steps over which batchtopk's threshold is averaged.
_THRESHOLD_STEPS = 100


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
        """Check the settings."""
        for name, value, known in (
            ("activation", self.activation, get_args(TrainedActivation)),
            ("center", self.center, get_args(Center)),
        ):
            if value not in known:
                raise ConfigError(
                    f"model.sae.{name} is {value!r}; SAEs are trained with {', '.join(known)}."
                )
        for name in ("n_features", "k", "dead_after_steps", "aux_k"):
            value = getattr(self, name)
            require(f"model.sae.{name}", value, at_least=1)
            if not isinstance(value, int):
                raise ConfigError(f"model.sae.{name} is {value}; it must be a whole number.")
        for name in ("l1_coef", "aux_loss_coef"):
            require(f"model.sae.{name}", getattr(self, name), at_least=0)
        if self.activation != "relu" and self.k > self.n_features:
            raise ConfigError(
                f"model.sae.k is {self.k}, but there are {self.n_features} features. Set a "
                "smaller k, or more model.sae.n_features."
            )


class StepLosses(NamedTuple):
    """Losses and statistics of one step, ``(n_hook_points,)``."""

    total: Tensor
    """Loss to minimise, summed over the hook points."""
    unexplained: Tensor
    """Squared error as a share of the batch's variance."""
    l0: Tensor
    """Mean number of active features per token."""
    active: Tensor
    """Number of tokens at which each feature is active, ``(n_hook_points, n_features)``."""
    least: Tensor
    """Smallest pre-activation of a chosen feature; zeros for relu."""


class StackedAutoencoders(nn.Module):
    """Independent SAEs of one size at several hook points.

    Each is a `SparseAutoencoder` with ``subtract_decoder_bias``: it reads ``s x - b_D``, with s
    such that the activations' mean distance to the initial b_D is 1. Decoder rows have norm 1. The
    loss of a hook point is its squared error as a share of the variance, so that all hook points
    have equal weight; dead features learn the error by an auxiliary loss (Gao et al., 2024, arXiv
    2406.04093, section 2.4).
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
        decoder = torch.stack(
            [
                torch.randn(
                    n_features, width,
                    generator=torch.Generator().manual_seed(_seed_of(p, seed)),
                )
                for p in self.hook_points
            ]
        )  # fmt: skip
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
            is_mean = self.settings.center == "mean"
            center = sample.mean(1) if is_mean else geometric_median(sample)
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
            entries, least = self._choose(before)
            values = self._values(inputs, before, entries)
            rebuilt = _decode_entries(values, self.decoder, entries) + self.decoder_bias[:, None]
            is_active = values.detach() > 0
            active = torch.bincount(
                entries.features[is_active], minlength=self.encoder_bias.numel()
            )
            active = active.view(self.encoder_bias.shape)
        error = inputs - rebuilt
        unexplained = error.square().sum(-1).mean(1) / variance
        total = unexplained.sum()
        if is_relu:
            # Inputs have norm 1 on average at each hook point, so one coefficient fits all.
            total = total + self.settings.l1_coef * features.sum(-1).mean(1).sum()
        if self.settings.aux_loss_coef:
            auxiliary = self._auxiliary(inputs, before.detach(), error.detach())
            total = total + self.settings.aux_loss_coef * auxiliary
        return StepLosses(
            total, unexplained.detach(), active.sum(1) / inputs.shape[1], active, least
        )

    def _values(self, inputs: Tensor, before: Tensor, entries: _Entries) -> Tensor:
        n_features = before.shape[-1]
        known = before.view(-1)[entries.rows * n_features + entries.features % n_features]
        return _encode_entries(
            inputs, self.encoder, self.encoder_bias, self.decoder_bias, known, entries
        ).relu()

    def _choose(self, before: Tensor) -> tuple[_Entries, Tensor]:
        """Return the active features, and the smallest pre-activation of each hook point."""
        n_hook_points, n, n_features = before.shape
        k = self.settings.k
        if self.settings.activation == "topk":
            values, columns = before.topk(k, dim=-1, sorted=False)
            return _even_entries(columns, n_features), values.relu().amin((1, 2))
        # The n * k largest of the batch; some of them may not be positive.
        chosen = [
            _largest(values, n * k, self.threshold[i] / 2)
            for i, values in enumerate(before.view(n_hook_points, n * n_features))
        ]
        least = torch.stack([value for _, value in chosen])
        return _entries_of([where for where, _ in chosen], n, n_features), least

    def _auxiliary(self, inputs: Tensor, before: Tensor, error: Tensor) -> Tensor:
        """Return the share of the error that dead features leave, summed over the hook points."""
        dead = self.idle >= self.settings.dead_after_steps
        n_dead = dead.sum(1)
        most = min(self.settings.aux_k, int(n_dead.max()))
        if most == 0:
            return inputs.new_zeros(())
        values, columns = before.masked_fill(~dead[:, None], -torch.inf).topk(most, sorted=False)
        n_features = before.shape[-1]
        entries = _even_entries(columns, n_features)
        values = values.masked_fill(values == -torch.inf, 0.0).flatten()
        found = _encode_entries(
            inputs, self.encoder, self.encoder_bias, self.decoder_bias, values, entries
        )
        is_dead = dead.view(-1)[entries.features]
        guess = _decode_entries(found.relu() * is_dead, self.decoder, entries)
        squares = (guess - error).square().sum(-1).mean(1)
        shares = squares / error.square().sum(-1).mean(1).clamp(min=torch.finfo(error.dtype).tiny)
        return (shares * (n_dead > 0)).sum()

    def nonfinite_hook_point(self, losses: StepLosses) -> HookPoint | None:
        """Return the first hook point whose loss is NaN or infinite, if there is one."""
        bad = (~losses.unexplained.isfinite()).nonzero()
        return self.hook_points[int(bad[0])] if len(bad) else None

    @torch.no_grad()
    def remember(self, active: Tensor, least: Tensor) -> None:
        """Update the steps since each feature's last activation, and the threshold.

        `active` and `least` are those of `StepLosses`.
        """
        self.idle.add_(1).masked_fill_(active > 0, 0)
        self.n_averaged.add_(1)
        share = 1.0 / self.n_averaged.clamp(max=_THRESHOLD_STEPS)
        self.threshold.lerp_(least.to(self.threshold), share)

    @torch.no_grad()
    def project_gradient(self) -> None:
        """Remove the component of the decoder's gradient that only changes the norms of rows."""
        gradient = self.decoder.grad
        if gradient is not None:
            along = (gradient * self.decoder).sum(-1, keepdim=True)
            gradient.sub_(along * self.decoder)

    @torch.no_grad()
    def normalize(self) -> None:
        """Scale every decoder row to norm 1."""
        norm = self.decoder.norm(dim=-1, keepdim=True)
        self.decoder.div_(norm.clamp(min=torch.finfo(norm.dtype).tiny))

    @torch.no_grad()
    def export(self, lm: str | None = None) -> dict[HookPoint, SparseAutoencoder]:
        """Return a copy of each SAE, as used after training."""
        activation = self.settings.activation
        saes = {}
        for i, hook_point in enumerate(self.hook_points):
            threshold = None
            if activation == "batchtopk":
                threshold = self.threshold[i].repeat(self.settings.n_features)
            saes[hook_point] = SparseAutoencoder(
                hook_point=hook_point,
                encoder=self.encoder[i].clone(),
                decoder=self.decoder[i].clone(),
                encoder_bias=self.encoder_bias[i].clone(),
                decoder_bias=self.decoder_bias[i].clone(),
                activation=activation,
                threshold=threshold,
                k=None if activation == "relu" else self.settings.k,
                input_scale=float(self.input_scale[i]),
                subtract_decoder_bias=True,
                lm=lm,
            ).eval()
        return saes


def _largest(values: Tensor, count: int, guess: Tensor) -> tuple[Tensor, Tensor]:
    """Return where the `count` largest values above 0 are, with their equals, and the least one.

    Values below the guess, which is at least 0, are only looked at if too few lie above it.
    """
    where = (values > guess).nonzero()[:, 0]
    if len(where) < count:
        where = (values > 0).nonzero()[:, 0]
        if len(where) < count:
            return where, values.new_zeros(())
    above = values[where]
    least = above.kthvalue(len(above) - count + 1).values
    return where[above >= least], least


def _seed_of(hook_point: HookPoint, seed: int) -> int:
    return (seed * 10_000 + hook_point.layer) * len(KINDS) + KINDS.index(hook_point.kind)


# -- sparse products -----------------------------------------------------------------------------
#
# A training step takes five products: the encoder's forward and its weights' gradient; the
# decoder's forward and the gradients of features and weights. Only the encoder's forward needs all
# features; the others are sums of rows (`torch.nn.functional.embedding_bag`). With 12 of 512
# features active, a training run is about 1.4 times as fast as with dense products on a CPU core.


class _Entries(NamedTuple):
    """Active features of several SAEs, sorted by row."""

    rows: Tensor
    """``hook_point * n + row``, ascending, ``(n_entries,)``."""
    features: Tensor
    """``hook_point * n_features + feature``, ``(n_entries,)``."""
    starts: Tensor
    """Index of each row's first entry, ``(n_hook_points * n,)``."""


def _entries_of(chosen: Sequence[Tensor], n: int, n_features: int) -> _Entries:
    """Return the entries of active features: ascending indices ``row * n_features + feature``.

    They are given for each hook point, which has n rows.
    """
    flat = torch.cat([where + i * n * n_features for i, where in enumerate(chosen)])
    rows = flat.div(n_features, rounding_mode="floor")
    counts = torch.bincount(rows, minlength=len(chosen) * n)
    first = rows.div(n, rounding_mode="floor") * n_features
    return _Entries(rows, first + flat % n_features, counts.cumsum(0) - counts)


def _encode_entries(
    inputs: Tensor, encoder: Tensor, bias: Tensor, center: Tensor, values: Tensor, entries: _Entries
) -> Tensor:
    """Make known pre-activations differentiable with respect to encoder, bias and center.

    They are `values`, ``(inputs - center) encoderᵀ + bias`` of the entries, ``(n_entries,)``. Other
    shapes are ``(n_hook_points, n, width)`` of the inputs and ``(n_hook_points, n_features,
    width)`` of the encoders.
    """
    return _EncodeEntries.apply(inputs, encoder, bias, center, values, entries)  # type: ignore[no-untyped-call]


class _EncodeEntries(torch.autograd.Function):
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
        del bias
        ctx.save_for_backward(inputs, encoder, center, *entries)
        return values.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        (gradient,) = gradients
        inputs, encoder, center, rows, features, _ = ctx.saved_tensors
        n_hook_points, n_features, width = encoder.shape
        order = features.argsort(stable=True)
        counts = torch.bincount(features, minlength=n_hook_points * n_features)
        read = (inputs - center[:, None]).flatten(0, 1)
        to_encoder = embedding_bag(
            rows[order], read, counts.cumsum(0) - counts, mode="sum",
            per_sample_weights=gradient[order],
        ).view(n_hook_points, n_features, width)  # fmt: skip
        # Not index_add, whose atomic additions would make runs differ on a GPU.
        sums = embedding_bag(
            torch.arange(len(order), device=order.device), gradient[order, None],
            counts.cumsum(0) - counts, mode="sum",
        ).view(n_hook_points, 1, n_features)  # fmt: skip
        to_center = -torch.bmm(sums, encoder)[:, 0]
        return None, to_encoder, sums[:, 0], to_center, None, None


def _decode_entries(values: Tensor, decoder: Tensor, entries: _Entries) -> Tensor:
    """Return sums of decoder rows, ``(n_hook_points, n, width)``, weighted by `values`.

    They are differentiable with respect to the values, ``(n_entries,)``, and the decoders,
    ``(n_hook_points, n_features, width)``.
    """
    n_hook_points, _, width = decoder.shape
    rows = embedding_bag(
        entries.features, decoder.flatten(0, 1), entries.starts, mode="sum",
        per_sample_weights=values,
    )  # fmt: skip
    return rows.view(n_hook_points, -1, width)


def _even_entries(columns: Tensor, n_features: int) -> _Entries:
    """Return the entries of k features per row, ``(n_hook_points, n, k)``."""
    n_hook_points, n, k = columns.shape
    rows = torch.arange(n_hook_points * n, device=columns.device)
    first = torch.arange(n_hook_points, device=columns.device)[:, None, None] * n_features
    return _Entries(rows.repeat_interleave(k), (columns + first).flatten(), rows * k)
