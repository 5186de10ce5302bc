"""SAEs of many places, trained as one: a leading dimension of places."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor, nn

from lincorr_lightning.errors import ConfigError
from lincorr_lightning.functional.geometric_median import geometric_median
from lincorr_lightning.sae.hook_points import KINDS, HookPoint
from lincorr_lightning.sae.sparse_autoencoder import SparseAutoencoder
from lincorr_lightning.sae.sparse_products import (
    Entries,
    decode_entries,
    encode_entries,
    entries_of,
)

TrainedActivation = Literal["topk", "batchtopk", "relu"]
Center = Literal["geometric_median", "mean", "zero"]
# Steps over which batchtopk's threshold is averaged.
_THRESHOLD_MEMORY = 100


@dataclass(frozen=True)
class SAESettings:
    """How SAEs are built and what they are trained for."""

    n_features: int = 512
    """Features of each."""

    activation: TrainedActivation = "batchtopk"
    """topk, batchtopk (as many on average, by a threshold that is learned), or relu (L1)."""

    k: int = 12
    """Features that are active at a token; relu has none of it."""

    l1: float = 0.02
    """Weight of the sum of features, of relu alone."""

    center: Center = "geometric_median"
    """Where the decoder's bias begins: geometric_median or mean of activations, or zero."""

    dead_after_steps: int = 50
    """A feature that was active in none of so many steps counts as dead while training."""

    aux_loss_coef: float = 1 / 32
    """Weight of the loss by which dead features learn what the others leave; 0 leaves them dead."""

    aux_k: int = 64
    """Dead features that are made to take part at a token."""

    def __post_init__(self) -> None:
        """Refuse what no SAE can be."""
        for name, value, known in (
            ("activation", self.activation, get_args(TrainedActivation)),
            ("center", self.center, get_args(Center)),
        ):
            if value not in known:
                raise ConfigError(
                    f"model.sae.{name} is {value!r}; SAEs are trained with {', '.join(known)}."
                )
        for name in ("n_features", "k", "dead_after_steps", "aux_k"):
            if getattr(self, name) < 1:
                raise ConfigError(f"model.sae.{name} is {getattr(self, name)}; it must be above 0.")
        if self.activation != "relu" and self.k > self.n_features:
            raise ConfigError(
                f"model.sae.k is {self.k}, but there are {self.n_features} features. Set a "
                "smaller k, or more model.sae.n_features."
            )
        for name in ("l1", "aux_loss_coef"):
            if getattr(self, name) < 0:
                raise ConfigError(
                    f"model.sae.{name} is {getattr(self, name)}; it must be 0 or more."
                )


class StepLosses(NamedTuple):
    """What one step gives, of each place.

    Attributes:
        total: What is minimised, all places together.
        unexplained: Squared error as a share of the batch's variance, ``(n_places,)``.
        l0: Active features of a token, ``(n_places,)``.
        active: How often each feature was active, ``(n_places, n_features)``.
        least: Least activation that was kept, ``(n_places,)``; of relu zeros.
    """

    total: Tensor
    unexplained: Tensor
    l0: Tensor
    active: Tensor
    least: Tensor


class StackedAutoencoders(nn.Module):
    """SAEs of one size at several places, which do not see each other.

    Each is `SparseAutoencoder` with ``subtract_decoder_bias``: it reads ``s x - b_D``, with s such
    that the mean distance of activations to where b_D begins is 1. Decoder rows have the norm 1.
    The loss of a place is its squared error as a share of the variance, so that all places count
    alike; dead features learn the error by an auxiliary loss (Gao et al., 2024, arXiv 2406.04093,
    section 2.4).

    Args:
        hook_points: Where.
        width: Of the activations.
        settings: Of each SAE.
        seed: Of the initial weights; a place's do not depend on which other places there are.
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
        """Set scale and decoder bias by a sample.

        Args:
            activations: ``(n_places, n, width)``, as they are in the LM.
        """
        sample = activations.to(self.encoder.dtype)
        center = torch.zeros_like(sample[:, 0])
        if self.settings.center != "zero":
            is_mean = self.settings.center == "mean"
            center = sample.mean(1) if is_mean else geometric_median(sample)
        distance = (sample - center[:, None]).norm(dim=-1).mean(1)
        # A place that does not vary has nothing to be scaled by.
        self.input_scale.copy_(torch.where(distance > 0, distance.reciprocal(), 1.0))
        self.decoder_bias.copy_(center * self.input_scale[:, None])

    # -- one step --------------------------------------------------------------------------------

    def forward(self, activations: Tensor) -> StepLosses:
        """Losses of one batch; differentiable.

        Args:
            activations: ``(n_places, n, width)``, as they are in the LM.
        """
        inputs = activations.to(self.encoder.dtype) * self.input_scale[:, None, None]
        variance = (inputs - inputs.mean(1, keepdim=True)).square().sum(-1).mean(1)
        variance = variance.clamp(min=torch.finfo(inputs.dtype).tiny)
        if self.settings.activation == "relu":
            return self._dense_step(inputs, variance)
        with torch.no_grad():
            before = torch.baddbmm(
                self.encoder_bias[:, None],
                inputs - self.decoder_bias[:, None],
                self.encoder.transpose(1, 2),
            )
        entries, least = self._choose(before)
        values = self._values(inputs, before, entries)
        rebuilt = decode_entries(values, self.decoder, entries) + self.decoder_bias[:, None]
        error = inputs - rebuilt
        unexplained = error.square().sum(-1).mean(1) / variance
        total = unexplained.sum()
        if self.settings.aux_loss_coef:
            total = total + self.settings.aux_loss_coef * self._auxiliary(
                inputs, before, error.detach()
            )
        n_hook_points, n_features = self.encoder_bias.shape
        is_active = values.detach() > 0
        active = torch.bincount(entries.features[is_active], minlength=n_hook_points * n_features)
        active = active.view(n_hook_points, n_features)
        return StepLosses(
            total, unexplained.detach(), active.sum(1) / inputs.shape[1], active, least
        )

    def _dense_step(self, inputs: Tensor, variance: Tensor) -> StepLosses:
        before = torch.baddbmm(
            self.encoder_bias[:, None],
            inputs - self.decoder_bias[:, None],
            self.encoder.transpose(1, 2),
        )
        features = before.relu()
        rebuilt = torch.baddbmm(self.decoder_bias[:, None], features, self.decoder)
        error = inputs - rebuilt
        unexplained = error.square().sum(-1).mean(1) / variance
        # In units of the loss, the same at every place: activations are about 1 long everywhere.
        sparsity = features.sum(-1).mean(1)
        total = unexplained.sum() + self.settings.l1 * sparsity.sum()
        if self.settings.aux_loss_coef:
            before = before.detach()
            total = total + self.settings.aux_loss_coef * self._auxiliary(
                inputs, before, error.detach()
            )
        active = (features.detach() > 0).sum(1)
        l0 = active.sum(1) / inputs.shape[1]
        return StepLosses(total, unexplained.detach(), l0, active, torch.zeros_like(l0))

    def _values(self, inputs: Tensor, before: Tensor, entries: Entries) -> Tensor:
        n_features = before.shape[-1]
        known = before.view(-1)[entries.rows * n_features + entries.features % n_features]
        return encode_entries(
            inputs, self.encoder, self.encoder_bias, self.decoder_bias, known, entries
        ).relu()

    def _choose(self, before: Tensor) -> tuple[Entries, Tensor]:
        """Active features, and the least activation among those of each place."""
        n_hook_points, n, n_features = before.shape
        k = self.settings.k
        if self.settings.activation == "topk":
            values, columns = before.topk(k, dim=-1, sorted=False)
            return _even_entries(columns, n_features), values.relu().amin((1, 2))
        # The n*k largest of the whole batch; among them may be some that are not above 0.
        least = torch.stack(
            [
                _largest(values, n * k, self.threshold[i] / 2)
                for i, values in enumerate(before.view(n_hook_points, n * n_features))
            ]
        )
        return entries_of((before >= least[:, None, None]) & (before > 0)), least

    def _auxiliary(self, inputs: Tensor, before: Tensor, error: Tensor) -> Tensor:
        """What dead features do not explain of the error, as a share of it, all places together."""
        dead = self.idle >= self.settings.dead_after_steps
        n_dead = dead.sum(1)
        most = min(self.settings.aux_k, int(n_dead.max()))
        if most == 0:
            return inputs.new_zeros(())
        values, columns = before.masked_fill(~dead[:, None], -torch.inf).topk(most, sorted=False)
        n_features = before.shape[-1]
        entries = _even_entries(columns, n_features)
        values = values.masked_fill(values == -torch.inf, 0.0).flatten()
        found = encode_entries(
            inputs, self.encoder, self.encoder_bias, self.decoder_bias, values, entries
        )
        is_dead = dead.view(-1)[entries.features]
        guess = decode_entries(found.relu() * is_dead, self.decoder, entries)
        squares = (guess - error).square().sum(-1).mean(1)
        shares = squares / error.square().sum(-1).mean(1).clamp(min=torch.finfo(error.dtype).tiny)
        return (shares * (n_dead > 0)).sum()

    # -- between steps ---------------------------------------------------------------------------

    @torch.no_grad()
    def remember(self, active: Tensor, least: Tensor) -> None:
        """Count for how long features have been idle, and move the threshold.

        Args:
            active: How often each was active in this step, ``(n_places, n_features)``.
            least: Least activation that was kept, ``(n_places,)``.
        """
        self.idle.add_(1).masked_fill_(active > 0, 0)
        self.n_averaged.add_(1)
        share = 1.0 / self.n_averaged.clamp(max=_THRESHOLD_MEMORY)
        self.threshold.lerp_(least.to(self.threshold), share)

    @torch.no_grad()
    def project_gradient(self) -> None:
        """Take off the decoder's gradient what would only change its rows' norms."""
        gradient = self.decoder.grad
        if gradient is not None:
            along = (gradient * self.decoder).sum(-1, keepdim=True)
            gradient.sub_(along * self.decoder)

    @torch.no_grad()
    def normalize(self) -> None:
        """Give every decoder row the norm 1."""
        norm = self.decoder.norm(dim=-1, keepdim=True)
        self.decoder.div_(norm.clamp(min=torch.finfo(norm.dtype).tiny))

    @torch.no_grad()
    def export(self, lm: str | None = None) -> dict[HookPoint, SparseAutoencoder]:
        """Copy each SAE, as it is used after training.

        Args:
            lm: Name of the LM.
        """
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


def _largest(values: Tensor, count: int, guess: Tensor) -> Tensor:
    """The count-th largest of some values, 0 if it is below.

    Only those above a guess are sorted, unless they are too few.
    """
    above = values[values > guess]
    if len(above) < count:
        above = values
    return above.kthvalue(len(above) - count + 1).values.relu()


def _seed_of(hook_point: HookPoint, seed: int) -> int:
    return (seed * 10_000 + hook_point.layer) * len(KINDS) + KINDS.index(hook_point.kind)


def _even_entries(columns: Tensor, n_features: int) -> Entries:
    """Entries of as many features in each row, ``(n_places, n, k)``."""
    n_hook_points, n, k = columns.shape
    rows = torch.arange(n_hook_points * n, device=columns.device)
    first = torch.arange(n_hook_points, device=columns.device)[:, None, None] * n_features
    return Entries(rows.repeat_interleave(k), (columns + first).flatten(), rows * k)
