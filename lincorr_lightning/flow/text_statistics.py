"""One pass over texts: groups and activity of the features, and a sample of activations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from lincorr_lightning.flow.graph import DecoderMatcher
from lincorr_lightning.flow.groups import FeatureGroups
from lincorr_lightning.lm.language_model import LanguageModel
from lincorr_lightning.sae.forwards import Forward, Rows, run_with_hooks
from lincorr_lightning.sae.hook_points import Feature, HookPoint
from lincorr_lightning.sae.sparse_autoencoder import SparseAutoencoder

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_N_SAMPLED = 2048


class TextStatistics:
    """Statistics of the features on texts, batch by batch."""

    def __init__(
        self,
        lm: LanguageModel,
        saes: Mapping[HookPoint, SparseAutoencoder],
        matcher: DecoderMatcher,
    ) -> None:
        self._lm, self._saes = lm, saes
        self.groups = {
            hook_point: FeatureGroups(hook_point, matcher.match(hook_point))
            for hook_point in matcher.hook_points
            if matcher.predecessors(hook_point)
        }
        self.activity = {at: FeatureActivity(sae.n_features) for at, sae in saes.items()}
        self.n_texts = 0
        self._sample: dict[HookPoint, list[Tensor]] = {at: [] for at in saes}

    @property
    def n_tokens(self) -> int:
        """Number of tokens counted."""
        return next(iter(self.activity.values())).n_tokens

    @property
    def sample(self) -> dict[HookPoint, Tensor]:
        """First activations at each hook point, ``(n_tokens, width)``, float32 on the CPU."""
        return {at: torch.cat(parts) for at, parts in self._sample.items()}

    def update(self, rows: Rows, n_skipped: int = 0) -> None:
        """Read some texts, of which the first `n_skipped` tokens do not count."""

        def count(forward: Forward) -> None:
            counted = forward.counted(n_skipped)
            missing = _N_SAMPLED - self.n_tokens
            features = {}
            for hook_point, sae in self._saes.items():
                x = forward.at[hook_point][counted]
                features[hook_point] = sae.encode(x)
                if missing > 0:
                    self._sample[hook_point].append(x[:missing].float().cpu())
            for groups in self.groups.values():
                groups.update(features)
            predicted = forward.logits.argmax(-1)
            for hook_point, activity in self.activity.items():
                activity.update(features[hook_point], forward.ids, counted, predicted)

        self.n_texts += len(rows)
        run_with_hooks(self._lm, rows, count, hook_points=list(self._saes))


class Peak(NamedTuple):
    """The token at which a feature is most active."""

    activation: float
    context: list[int]
    predicted: int


class FeatureActivity:
    """How often and how strongly the features of one hook point are active, and where most.

    Memory does not grow with the number of texts. ``n_active`` is the number of tokens at which
    each feature was active, ``(n_features,)``, of ``n_tokens``.
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
