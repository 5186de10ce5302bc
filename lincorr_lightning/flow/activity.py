"""How often and how strongly features are active, and where most: what to call them."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Peak(NamedTuple):
    """Where a feature is most active.

    Attributes:
        activation: Its value there.
        context: Token ids of the text up to there.
        predicted: The token that the LM finds most likely next.
    """

    activation: float
    context: list[int]
    predicted: int


class FeatureActivity:
    """Activity of the features of one place on texts; what is kept does not grow with these.

    Args:
        n_features: Of the SAE.
        n_context: Tokens kept of the text before a peak.

    Attributes:
        n_tokens: Tokens seen.
        n_active: At how many of them each feature was active, ``(n_features,)``, int64.
    """

    def __init__(self, n_features: int, n_context: int = 8) -> None:
        self.n_tokens = 0
        self.n_active = torch.zeros(n_features, dtype=torch.int64)
        self._sum = torch.zeros(n_features, dtype=torch.float64)
        self._peak = torch.zeros(n_features, dtype=torch.float64)
        self._context = torch.full((n_features, n_context), -1, dtype=torch.int64)
        self._predicted = torch.full((n_features,), -1, dtype=torch.int64)

    def update(self, features: Tensor, ids: Tensor, mask: Tensor, predicted: Tensor) -> None:
        """Look at some texts.

        Args:
            features: At their true tokens, one text after the other, ``(n_tokens, n_features)``.
            ids: Tokens, padded on the right, ``(n_texts, longest)``.
            mask: Which are true ones, bool, likewise.
            predicted: The token found most likely after each, likewise.
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
        """Mean activation of each feature where it is active, ``(n_features,)``; 0 if it never is.

        In float64.
        """
        return self._sum / self.n_active.clamp(min=1)

    def peak(self, index: int) -> Peak | None:
        """Where a feature is most active; None if it never is."""
        if not self.n_active[index]:
            return None
        context = [token for token in self._context[index].tolist() if token >= 0]
        return Peak(float(self._peak[index]), context, int(self._predicted[index]))
