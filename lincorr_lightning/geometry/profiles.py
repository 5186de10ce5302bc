"""Token geometry over prompts, shuffling levels and layers, and its correlations with the loss."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from lincorr_lightning.geometry.intrinsic_dimension import cloud_dimension
from lincorr_lightning.geometry.mantel import CorrelationTest, Floats, correlation_test
from lincorr_lightning.geometry.token_clouds import CloudSettings, PromptGeometry

_PAPER_K = 2  # size of the neighborhood in the paper's figures
MIN_CORPORA = 4
"""Number of corpora that a correlation over corpora needs."""


class ObservedPrompt(NamedTuple):
    """A prompt at one shuffling level."""

    number: int
    level: int
    name: str
    corpus: str
    geometry: PromptGeometry


class Curve(NamedTuple):
    """An observable by layer.

    Attributes:
        name: The observable, as ``dimension``.
        setting: Range scaling or size of the neighborhood, as ``n2=2`` or ``k=2``; else empty.
        layers: Numbers of the layers; of an overlap, that of the first of its two layers.
        values: ``(n_prompts, n_levels, n_layers)``.
    """

    name: str
    setting: str
    layers: Sequence[int]
    values: Floats


@dataclass(frozen=True)
class TokenProfiles:
    """What is observed of all prompts at all shuffling levels.

    Attributes:
        n_tokens: Number of tokens of a prompt.
        n_skipped: Number of texts that were too short.
        prompts: Names of the prompts.
        corpora: Corpus of each prompt.
        shuffles: Shuffling levels S.
        layers: Numbers of the layers; 0 is the token embedding.
        range_scalings: Range scalings n2 of the intrinsic dimension.
        ks: Sizes of the neighborhoods.
        dimension: Intrinsic dimension, ``(n_prompts, n_levels, n_layers, n_scalings)``.
        overlap: Overlap with the next layer, ``(n_prompts, n_levels, n_layers - 1, n_ks)``.
        profiles: Mean and standard deviation of cosines and angles by name, each
            ``(n_prompts, n_levels, n_layers)``.
        logits_dimension: Intrinsic dimension of the cloud of next-token probabilities,
            ``(n_prompts, n_levels, n_scalings)``.
        loss: Mean cross-entropy in nats, ``(n_prompts, n_levels)``.
        entropy: Mean contextual entropy in nats, ``(n_prompts, n_levels)``.
        corpus_dimension: Intrinsic dimension of the cloud of a corpus's unshuffled prompts, each by
            its last token, ``(n_corpora, n_layers, n_scalings)``; NaN if there are too few prompts.
        corpus_loss: Mean loss of each of these corpora, ``(n_corpora,)``.
    """

    n_tokens: int
    n_skipped: int
    prompts: Sequence[str]
    corpora: Sequence[str]
    shuffles: Sequence[int]
    layers: Sequence[int]
    range_scalings: Sequence[int]
    ks: Sequence[int]
    dimension: Floats
    overlap: Floats
    profiles: Mapping[str, Floats]
    logits_dimension: Floats
    loss: Floats
    entropy: Floats
    corpus_dimension: Floats
    corpus_loss: Floats

    @property
    def paper_k(self) -> int:
        """Position of the paper's k, or of the first one."""
        return list(self.ks).index(_PAPER_K) if _PAPER_K in self.ks else 0

    def curves(self) -> Iterator[Curve]:
        """Yield each observable by layer."""
        for i, n2 in enumerate(self.range_scalings):
            yield Curve("dimension", f"n2={n2}", self.layers, self.dimension[..., i])
        for i, k in enumerate(self.ks):
            yield Curve("overlap", f"k={k}", self.layers[:-1], self.overlap[..., i])
        for name, values in self.profiles.items():
            yield Curve(name, "", self.layers, values)

    def dimension_loss(self, level: int, layer: int, scaling: int) -> CorrelationTest | None:
        """Correlate log ID and log loss over prompts."""
        dimension, loss = self.dimension[:, level, layer, scaling], self.loss[:, level]
        return correlation_test(_log(dimension), _log(loss))


def stack_prompts(
    observed: Sequence[ObservedPrompt],
    settings: CloudSettings,
    n_tokens: int,
    n_skipped: int,
    device: torch.device,
) -> TokenProfiles:
    """Stack what was observed of each prompt at each level."""
    observed = sorted(observed, key=lambda one: one[:2])
    levels = sorted({one.level for one in observed})
    prompts = [one for one in observed if one.level == levels[0]]
    found = [one.geometry for one in observed]
    clouds = [one.clouds for one in found]

    def stack(parts: Sequence[Tensor | float]) -> Floats:
        tensors = [torch.as_tensor(part, dtype=torch.float64) for part in parts]
        array: Floats = torch.stack(tensors).numpy()
        return array.reshape(len(prompts), len(levels), *array.shape[1:])

    loss = stack([one.loss for one in found])
    names = ("cosine_mean", "cosine_std", "angle_mean", "angle_std")
    corpora = [one.corpus for one in prompts]
    members = [[i for i, c in enumerate(corpora) if c == one] for one in sorted(set(corpora))]
    if levels[0] != 0 or len(members) < MIN_CORPORA:
        members = []
    n_layers, n_scalings = clouds[0].dimension.shape
    return TokenProfiles(
        n_tokens=n_tokens,
        n_skipped=n_skipped,
        prompts=[one.name for one in prompts],
        corpora=corpora,
        shuffles=levels,
        layers=settings.layers(n_layers),
        range_scalings=settings.range_scalings,
        ks=settings.ks,
        dimension=stack([cloud.dimension for cloud in clouds]),
        overlap=stack([cloud.overlap for cloud in clouds]),
        profiles={name: stack([getattr(cloud, name) for cloud in clouds]) for name in names},
        logits_dimension=stack([one.logits_dimension for one in found]),
        loss=loss,
        entropy=stack([one.entropy for one in found]),
        corpus_dimension=np.array(
            [_corpus_dimension([prompts[i] for i in part], settings, device) for part in members]
        ).reshape(-1, n_layers, n_scalings),
        corpus_loss=np.array([loss[part, 0].mean() for part in members]),
    )


def _corpus_dimension(
    prompts: Sequence[ObservedPrompt], settings: CloudSettings, device: torch.device
) -> Floats:
    """Return the ID of the last tokens of some prompts, ``(n_layers, n_scalings)``."""
    states = [prompt.geometry.last for prompt in prompts]
    cloud = torch.stack([state for state in states if state is not None], dim=1)
    dimension: Floats = cloud_dimension(cloud.to(device), settings.range_scalings).cpu().numpy()
    return dimension


def _log(values: Floats) -> Floats:
    """Return the logarithm, NaN where there is none."""
    return np.log(np.where(values > 0, values, np.nan))
