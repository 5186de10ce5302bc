"""How often and how strongly features are active on texts, and where most: names for features."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from lincorr_lightning.sae.hook_points import Feature, HookPoint

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class Peak(NamedTuple):
    """The token at which a feature is most active."""

    activation: float
    context: list[int]
    predicted: int


class FeatureActivity:
    """Activity of the features of one hook point; memory does not grow with the number of texts.

    Attributes:
        n_tokens: Number of tokens seen.
        n_active: Number of tokens at which each feature was active, ``(n_features,)``, int64.
    """

    def __init__(self, n_features: int, n_context: int = 8) -> None:
        self.n_tokens = 0
        self.n_active = torch.zeros(n_features, dtype=torch.int64)
        self._sum = torch.zeros(n_features, dtype=torch.float64)
        self._peak = torch.zeros(n_features, dtype=torch.float64)
        self._context = torch.full((n_features, n_context), -1, dtype=torch.int64)
        self._predicted = torch.full((n_features,), -1, dtype=torch.int64)

    def update(self, features: Tensor, ids: Tensor, mask: Tensor, predicted: Tensor) -> None:
        """Add some texts.

        Args:
            features: Features at the counted tokens, text after text, ``(n_tokens, n_features)``.
            ids: Token ids, padded on the right, ``(n_texts, longest)``.
            mask: Which tokens are counted, bool, same shape.
            predicted: Most likely next token at each position, same shape.
        """
        text, position = mask.nonzero(as_tuple=True)
        self.n_tokens += len(features)
        self.n_active += (features > 0).sum(0).cpu()
        self._sum += features.double().sum(0).cpu()
        value, token = (part.cpu() for part in features.max(0))
        higher = (value.double() > self._peak).nonzero()[:, 0]
        if not len(higher):
            return
        at = token[higher].to(ids.device)
        row, end = text[at], position[at]
        back = end[:, None] - torch.arange(self._context.shape[1] - 1, -1, -1, device=ids.device)
        context = ids[row[:, None], back.clamp(min=0)]
        self._peak[higher] = value[higher].double()
        self._context[higher] = torch.where(back >= 0, context, -1).cpu()
        self._predicted[higher] = predicted[row, end].cpu()

    @property
    def mean(self) -> Tensor:
        """Mean activation of each feature where it is active, ``(n_features,)`` float64; else 0."""
        return self._sum / self.n_active.clamp(min=1)

    def peak(self, index: int) -> Peak | None:
        """Return where a feature is most active; None if it never is."""
        if not self.n_active[index]:
            return None
        context = [token for token in self._context[index].tolist() if token >= 0]
        return Peak(float(self._peak[index]), context, int(self._predicted[index]))


def name_features(
    tokenizer: PreTrainedTokenizerBase,
    activity: Mapping[HookPoint, FeatureActivity],
    features: Sequence[Feature],
) -> dict[str, str]:
    """Name features by the last tokens where each is most active, and the most likely next one.

    Names such as ``Paris is → in`` are given by the feature's id; features that are never active
    have none.
    """
    names = {}
    for feature in features:
        peak = activity[feature.hook_point].peak(feature.index)
        if peak is not None:
            texts = tokenizer.batch_decode([peak.context[-2:], [peak.predicted]])
            names[feature.id] = " → ".join(text.strip() for text in texts)
    return names
