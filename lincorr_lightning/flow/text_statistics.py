"""One pass over texts: groups and activity of the features, and a sample of activations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from lincorr_lightning.flow.activity import FeatureActivity
from lincorr_lightning.flow.groups import FeatureGroups
from lincorr_lightning.flow.matcher import DecoderMatcher
from lincorr_lightning.lm.language_model import LanguageModel
from lincorr_lightning.sae.forwards import Forward, run_with_hooks
from lincorr_lightning.sae.hook_points import HookPoint
from lincorr_lightning.sae.sparse_autoencoder import SparseAutoencoder

_N_SAMPLED = 2048


class TextStatistics:
    """Statistics of the features on texts, batch by batch."""

    def __init__(
        self,
        lm: LanguageModel,
        saes: Mapping[HookPoint, SparseAutoencoder],
        matcher: DecoderMatcher,
    ) -> None:
        self._lm = lm
        self._saes = saes
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

    def update(self, rows: Sequence[Sequence[int]], n_skipped: int = 0) -> None:
        """Read some texts."""
        self.n_texts += len(rows)
        run_with_hooks(
            self._lm,
            rows,
            lambda forward: self._count(forward, forward.counted(n_skipped)),
            hook_points=list(self._saes),
        )

    def _count(self, forward: Forward, counted: Tensor) -> None:
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
