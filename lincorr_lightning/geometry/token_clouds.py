"""Clouds of tokens in the layers of an LM, and what is observed of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lincorr_lightning.errors import ConfigError, SubjectsError
from lincorr_lightning.geometry.distances import NearestTokens, nearest_tokens
from lincorr_lightning.geometry.intrinsic_dimension import RANGE_SCALINGS, intrinsic_dimension
from lincorr_lightning.geometry.layer_states import read_layers
from lincorr_lightning.geometry.observables import (
    TokenObservables,
    next_tokens,
    token_observables,
)
from lincorr_lightning.lm.language_model import LanguageModel

# Largest neighborhood of the paper.
_MAX_K = 31
# The paper's largest range scaling is a quarter of the tokens: 256 of 1,024.
_TOKENS_PER_SCALING = 4
# Angles need two neighbors.
_MIN_RANK = 2


@dataclass(frozen=True)
class CloudSettings:
    """What is observed of clouds of tokens."""

    range_scalings: tuple[int, ...]
    ks: tuple[int, ...]
    embedding_layer: bool = False

    @classmethod
    def of(
        cls,
        n_tokens: int,
        range_scalings: Sequence[int] | None,
        ks: Sequence[int] | None,
        embedding_layer: bool,
        owner: str,
    ) -> CloudSettings:
        """Check settings and fill in defaults.

        Args:
            n_tokens: Number of tokens of a cloud.
            range_scalings: Range scalings; None takes 2, 4, 8, ... up to a quarter of the tokens,
                at most 256.
            ks: Sizes of the neighborhoods; None takes 1 to 31, or fewer if there are fewer tokens.
            embedding_layer: Whether the token embedding is observed.
            owner: Prefix of the settings in messages, as ``model`` of ``model.ks``.

        Raises:
            ConfigError: A range scaling is odd or needs more tokens, or a k is out of range.
        """
        scalings = range_scalings or [
            n for n in RANGE_SCALINGS if n * _TOKENS_PER_SCALING <= n_tokens
        ]
        sizes = ks or range(1, min(_MAX_K, n_tokens - 1) + 1)
        wrong = [n for n in scalings if n < 2 or n % 2 or n + 1 > n_tokens]
        if wrong or not scalings:
            raise ConfigError(
                f"{owner}.range_scalings has {wrong or 'nothing'}, with {n_tokens} points in a "
                "cloud; each must be even, at least 2, and needs one point more. Take longer texts "
                "or smaller range scalings."
            )
        wrong = [k for k in sizes if not 1 <= k < n_tokens]
        if wrong or not sizes:
            raise ConfigError(
                f"{owner}.ks has {wrong or 'nothing'}; each must be within 1 and "
                f"{n_tokens - 1}, the other points of a cloud."
            )
        return cls(tuple(sorted(set(scalings))), tuple(sorted(set(sizes))), embedding_layer)

    @property
    def max_rank(self) -> int:
        """Number of neighbors that are needed."""
        return max(*self.range_scalings, *self.ks, _MIN_RANK)

    def nearest(self, clouds: Tensor) -> NearestTokens:
        """Find the nearest tokens that the observables of ``(..., n_tokens, d)`` need."""
        return nearest_tokens(clouds, self.max_rank, max(*self.ks, _MIN_RANK))

    def layers(self, n_layers: int) -> list[int]:
        """Return the numbers of the observed layers; 0 is the token embedding."""
        first = 0 if self.embedding_layer else 1
        return list(range(first, first + n_layers))


@dataclass(frozen=True)
class PromptGeometry:
    """What is observed of one prompt; tensors are on the CPU.

    Attributes:
        clouds: Observables of the clouds of hidden states by layer.
        logits_dimension: Intrinsic dimension of the cloud of the tokens' next-token probabilities,
            ``(n_scalings,)``; NaN if it has too few distinct points.
        loss: Mean cross-entropy of the prompt's tokens from the second on, in nats.
        entropy: Mean contextual entropy, in nats.
        last: Hidden state of the last token after each layer, ``(n_layers, d)`` float32; None if it
            was not kept.
    """

    clouds: TokenObservables
    logits_dimension: Tensor
    loss: float
    entropy: float
    last: Tensor | None


@torch.no_grad()
def observe_prompts(
    lm: LanguageModel, tokens: Tensor, prompts: Sequence[str], settings: CloudSettings
) -> list[PromptGeometry]:
    """Observe the clouds of tokens of some prompts, with one forward pass.

    Args:
        lm: The LM.
        tokens: Token ids, ``(n_prompts, n_tokens)``.
        prompts: Names of the prompts, for messages.
        settings: What to observe.

    Raises:
        NonFiniteError: A layer, which is named, has NaN or infinite hidden states.
        SubjectsError: A layer has fewer distinct tokens than a range scaling needs, or a hidden
            state of zeros.
        LanguageModelError: The LM does not return its layers' hidden states.
    """
    states = read_layers(lm, tokens, prompts, settings.embedding_layer)
    assert states.logits is not None
    losses, entropies = next_tokens(states.logits, tokens)
    found = []
    for i, name in enumerate(prompts):
        hidden = states.hidden[i]
        nearest = settings.nearest(hidden)
        _check_layers(hidden, nearest, name, settings)
        clouds = token_observables(hidden, nearest, settings.range_scalings, settings.ks)
        found.append(
            PromptGeometry(
                TokenObservables(*(part.cpu() for part in clouds)),
                _logits_dimension(states.logits[i], settings),
                float(losses[i].mean()),
                float(entropies[i].mean()),
                # A copy, because a view would keep all tokens in memory.
                hidden[:, -1].float().cpu().clone(),
            )
        )
    return found


def _check_layers(
    hidden: Tensor, nearest: NearestTokens, prompt: str, settings: CloudSettings
) -> None:
    needed = max(settings.range_scalings) + 1
    n_distinct = nearest.distinct.sum(-1)
    names = settings.layers(len(hidden))
    for layer in (n_distinct < needed).nonzero()[:1].flatten().tolist():
        raise SubjectsError(
            f"prompt {prompt} has {int(n_distinct[layer])} distinct tokens of {hidden.shape[1]} in "
            f"layer {names[layer]}; range scaling {needed - 1} needs {needed}. Leave the text out, "
            "take longer ones, or name smaller range_scalings."
        )
    for layer, token in (hidden == 0).all(-1).nonzero()[:1].tolist():
        raise SubjectsError(
            f"token {token} of prompt {prompt} has a hidden state of zeros in layer "
            f"{names[layer]}: it has no direction. Leave the text or the embedding layer out."
        )


def _logits_dimension(logits: Tensor, settings: CloudSettings) -> Tensor:
    cloud = logits.float().softmax(-1)[None]
    nearest = nearest_tokens(cloud, max(settings.range_scalings), k=1)
    n_distinct = int(nearest.distinct.sum())
    dimension = torch.full((len(settings.range_scalings),), torch.nan, dtype=torch.float64)
    scalings = [n2 for n2 in settings.range_scalings if n2 < n_distinct]
    if scalings:
        dimension[: len(scalings)] = intrinsic_dimension(nearest, scalings)[0].cpu()
    return dimension
