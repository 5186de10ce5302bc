"""Which matched predecessors are active together with a feature: the groups, counted on texts.

"Analyze Feature Flow to Enhance Interpretation and Steering in Language Models" (Laptev et al.,
2025, arXiv 2502.03032), figures 3 to 5, 12, 14 and 18.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from lincorr_lightning.flow.graph import GROUPS, group_codes
from lincorr_lightning.flow.matching import Matches
from lincorr_lightning.functional.separation import counted_auroc
from lincorr_lightning.sae.hook_points import KINDS, HookKind, HookPoint


class FeatureGroups:
    """Counts, for each feature of a place, the groups it is in when it is active.

    What is kept does not grow with the texts: eight numbers for each feature.

    Args:
        hook_point: HookPoint of the features.
        matches: The best match of each of them in each predecessor, as `DecoderMatcher.match` gives
            them; only the first is used.

    Attributes:
        hook_point: As given.
        sources: Places of the predecessors by kind.
        predecessors: Matched predecessor of each feature by kind, ``(n_features,)``; -1 is none.
        cosines: Its cosine, likewise, NaN where there is none.
        counts: How often each feature was active in each group, ``(n_features, 8)``, int64, in
            the order of `GROUPS`.

    Example:
        >>> from lincorr_lightning.flow.matching import match_features
        >>> here, mlp = HookPoint(0, "residual"), HookPoint(0, "mlp_out")
        >>> groups = FeatureGroups(here, {mlp: match_features(torch.eye(2), torch.eye(2))})
        >>> groups.update({here: torch.tensor([[1.0, 2.0]]), mlp: torch.tensor([[3.0, 0.0]])})
        >>> groups.shares()["From MLP"], groups.shares()["From nowhere"]
        (0.5, 0.5)
    """

    def __init__(self, hook_point: HookPoint, matches: Mapping[HookPoint, Matches]) -> None:
        self.hook_point = hook_point
        self.predecessors = {source.kind: found.indices[:, 0] for source, found in matches.items()}
        self.cosines = {source.kind: found.cosines[:, 0] for source, found in matches.items()}
        self.sources = {source.kind: source for source in matches}
        n_features = len(next(iter(self.predecessors.values())))
        device = next(iter(self.predecessors.values())).device
        shape = (n_features, len(GROUPS))
        self.counts = torch.zeros(shape, dtype=torch.int64, device=device)

    @property
    def kinds(self) -> list[HookKind]:
        """Kinds of the predecessors that have an SAE."""
        return [kind for kind in KINDS if kind in self.sources]

    def codes(self, features: Mapping[HookPoint, Tensor]) -> Tensor:
        """Group of every feature at every token, were it active.

        Args:
            features: Of this place and its predecessors, ``(n_tokens, n_features)`` each.

        Returns:
            Codes of `GROUPS`, ``(n_tokens, n_features)``, int64.
        """
        here = features[self.hook_point]
        nothing = torch.zeros_like(here, dtype=torch.bool)
        active = dict.fromkeys(KINDS, nothing)
        for kind, source in self.sources.items():
            index = self.predecessors[kind]
            active[kind] = (features[source] > 0)[:, index.clamp(min=0)] & (index >= 0)
        return group_codes(active["residual"], active["mlp_out"], active["attention_out"])

    def update(self, features: Mapping[HookPoint, Tensor]) -> None:
        """Count some tokens.

        Args:
            features: Of this place and its predecessors, ``(n_tokens, n_features)`` each.
        """
        token, feature = (features[self.hook_point] > 0).nonzero(as_tuple=True)
        codes = self.codes(features)[token, feature]
        flat = feature * len(GROUPS) + codes
        found = torch.bincount(flat, minlength=self.counts.numel())
        self.counts += found.reshape(self.counts.shape).to(self.counts)

    # -- what the counts say ---------------------------------------------------------------------

    def shares(self) -> dict[str, float]:
        """Share of each group among all activations, by its name; empty if there were none."""
        total = self.counts.sum(0)
        if not total.any():
            return {}
        shares = (total.double() / total.sum()).tolist()
        return dict(zip(GROUPS, shares, strict=True))

    def with_predecessor(self, kind: HookKind) -> Tensor:
        """How often each feature was active together with its predecessor, ``(n_features,)``."""
        bit = 1 << KINDS.index(kind)
        return self.counts[:, [code for code in range(len(GROUPS)) if code & bit]].sum(1)

    def auroc(self, kind: HookKind) -> float:
        """How well the cosine alone tells whether the predecessor is active with the feature.

        Args:
            kind: Of the predecessor.

        Returns:
            Area under the ROC curve over all activations; NaN where the predecessor always or
            never is.
        """
        together = self.with_predecessor(kind)
        return counted_auroc(self.cosines[kind], together, self.counts.sum(1) - together)

    def histogram(self, kind: HookKind, n_bins: int = 40) -> Tensor:
        """Activations of each group by the cosine of one predecessor (figures 3, 4, 14).

        Args:
            kind: Of the predecessor.
            n_bins: Bins of equal width from 0 to 1; a cosine below 0 is in the first.

        Returns:
            ``(8, n_bins)``, int64.
        """
        binned = self._bins(kind, n_bins)
        known = binned >= 0
        found = torch.zeros(n_bins, len(GROUPS), dtype=torch.int64, device=self.counts.device)
        return found.index_add_(0, binned[known], self.counts[known]).T

    def joint_activation(self, kind: HookKind, n_bins: int = 20) -> tuple[Tensor, Tensor]:
        """How often the predecessor is active when the feature is, by their cosine.

        Args:
            kind: Of the predecessor.
            n_bins: Bins of equal width from 0 to 1.

        Returns:
            Share of each bin's activations, ``(n_bins,)`` float64, NaN for an empty one; and their
            number, ``(n_bins,)`` int64.
        """
        binned = self._bins(kind, n_bins)
        known = binned >= 0
        active, together = self.counts.sum(1), self.with_predecessor(kind)
        n, both = (
            torch.zeros(n_bins, dtype=torch.int64, device=active.device).index_add_(
                0, binned[known], count[known]
            )
            for count in (active, together)
        )
        return torch.where(n > 0, both.double() / n, torch.nan), n

    def _bins(self, kind: HookKind, n_bins: int) -> Tensor:
        cosines = self.cosines[kind]
        binned = (cosines.nan_to_num() * n_bins).floor().long().clamp(0, n_bins - 1)
        return torch.where(cosines.isnan(), -1, binned)
