"""Features on texts: their groups, their activity, and the variance they explain elsewhere.

The group of a feature at a token is which of its matched predecessors are active with it (arXiv
2502.03032, figures 3 to 5, 12 to 14, 18). Transition matrices carry features on (figures 21 to 23).
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import combinations, permutations
from typing import Any

import scipy
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from lincorr_lightning.flow.graph import GROUPS, DecoderMatcher, Matches, match_features
from lincorr_lightning.functional.auroc import counted_auroc
from lincorr_lightning.functional.significance import adjust_for_many
from lincorr_lightning.lm.language_model import LanguageModel
from lincorr_lightning.results.table import column, number
from lincorr_lightning.sae.forwards import Forward, Rows, run_with_hooks
from lincorr_lightning.sae.hook_points import KINDS, Feature, HookPoint
from lincorr_lightning.sae.sparse_autoencoder import SAEs

TRANSITION_K = (1, 2, 5, 10, 20)  #: Numbers of sources per target whose fit is measured.
_N_SAMPLED = 2048
MIN_FEATURES = 5  #: Minimum number of features of a group whose cosines are compared.


class TextStatistics:
    """Statistics of the features on texts, batch by batch."""

    def __init__(self, lm: LanguageModel, saes: SAEs, matcher: DecoderMatcher) -> None:
        self._lm, self._saes = lm, saes
        self.groups = {
            hook_point: FeatureGroups(hook_point, matcher.match(hook_point))
            for hook_point in matcher.decoders
            if matcher.predecessors(hook_point)
        }
        self.activity = {at: FeatureActivity(sae.n_features) for at, sae in saes.items()}
        self.n_texts = 0
        self.sample = {at: torch.empty(0, sae.width) for at, sae in saes.items()}
        """First activations at each hook point, ``(n_tokens, width)``, float32 on the CPU."""

    @property
    def n_tokens(self) -> int:
        """Number of tokens counted."""
        return next(iter(self.activity.values())).n_tokens

    def update(self, rows: Rows, n_skipped: int = 0) -> None:
        """Read some texts, of which the first `n_skipped` tokens do not count."""

        def count(forward: Forward) -> None:
            counted = forward.counted(n_skipped)
            missing, predicted = _N_SAMPLED - self.n_tokens, forward.logits.argmax(-1)
            states = {at: forward.at[at][counted] for at in self._saes}
            # All before the first is counted: where memory runs out, the texts are read again.
            features = {at: sae.encode(states[at]) for at, sae in self._saes.items()}
            for at, x in states.items():
                if missing > 0:
                    self.sample[at] = torch.cat([self.sample[at], x[:missing].float().cpu()])
                self.activity[at].update(features[at], forward.ids, counted, predicted)
            for groups in self.groups.values():
                groups.update(features)

        self.n_texts += len(rows)
        run_with_hooks(self._lm, rows, count, hook_points=list(self._saes))

    def names(self, features: Iterable[Feature]) -> dict[str, str]:
        """Return the names of features that have one, by their ids."""
        tokenizer = self._lm.tokenizer
        names = {f.id: self.activity[f.hook_point].name(f.index, tokenizer) for f in features}
        return {key: name for key, name in names.items() if name is not None}


class FeatureActivity:
    """How often and how strongly the features of one hook point are active, and where most.

    ``n_active`` has at how many of ``n_tokens`` tokens each was active, ``(n_features,)``.
    """

    def __init__(self, n_features: int, n_context: int = 2) -> None:
        self.n_tokens = 0
        self.n_active = torch.zeros(n_features, dtype=torch.int64)
        self._sum, self._peak = torch.zeros(2, n_features, dtype=torch.float64)
        self._context = torch.full((n_features, n_context), -1, dtype=torch.int64)
        self._predicted = torch.full((n_features,), -1, dtype=torch.int64)

    def update(self, features: Tensor, ids: Tensor, mask: Tensor, predicted: Tensor) -> None:
        """Add some texts, padded on the right, with the most likely next token at each position.

        `features`, ``(n_tokens, n_features)``, are those at the tokens that `mask` counts, text
        after text; `ids`, `mask` and `predicted` are ``(n_texts, longest)``.
        """
        text, position = mask.nonzero(as_tuple=True)
        self.n_tokens += len(features)
        self.n_active += (features > 0).sum(0).cpu()
        self._sum += features.sum(0, dtype=torch.float64).cpu()
        value, token = (part.cpu() for part in features.max(0))
        higher = (value.double() > self._peak).nonzero()[:, 0]
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

    def name(self, index: int, tokenizer: PreTrainedTokenizerBase) -> str | None:
        """Return a name such as ``Paris is → in``; None for a feature that is never active.

        It has the last tokens where the feature is most active, and the most likely next one.
        """
        if not self.n_active[index]:
            return None
        context = [token for token in self._context[index].tolist() if token >= 0]
        texts = tokenizer.batch_decode([context, [int(self._predicted[index])]])
        return " → ".join(text.strip() for text in texts)


class FeatureGroups:
    """Counts how often each feature of a hook point is active in each group.

    There are eight counts per feature. Of the matches in each predecessor, see
    `DecoderMatcher.match`, only the best is used.
    """

    def __init__(self, hook_point: HookPoint, matches: Mapping[HookPoint, Matches]) -> None:
        self.hook_point, self.matches = hook_point, matches
        indices = next(iter(matches.values())).indices
        # Activations of each feature in each group, in the order of `GROUPS`.
        shape = (len(indices), len(GROUPS))
        self.counts = torch.zeros(shape, dtype=torch.int64, device=indices.device)

    def codes(self, features: Mapping[HookPoint, Tensor]) -> Tensor:
        """Return the code of `GROUPS` of each feature at each token, if it were active there.

        `features` are those of this hook point and its predecessors, ``(n_tokens, n_features)``.
        """
        codes = torch.zeros_like(features[self.hook_point], dtype=torch.int64)
        for source, match in self.matches.items():
            index = match.indices[:, 0]
            active = (features[source] > 0)[:, index.clamp(min=0)] & (index >= 0)
            codes += active.long() << KINDS.index(source.kind)
        return codes

    def update(self, features: Mapping[HookPoint, Tensor]) -> None:
        """Count the activations of some tokens; features are as for `codes`."""
        token, feature = (features[self.hook_point] > 0).nonzero(as_tuple=True)
        codes = self.codes(features)[token, feature]
        counts = torch.bincount(feature * len(GROUPS) + codes, minlength=self.counts.numel())
        self.counts += counts.reshape(self.counts.shape).to(self.counts)

    def shares(self) -> dict[str, float]:
        """Return the share of each group among all activations; empty if there were none."""
        total = self.counts.sum(0)
        shares = (total.double() / total.sum()).tolist()
        return dict(zip(GROUPS, shares, strict=True)) if total.any() else {}

    def auroc(self, source: HookPoint) -> float:
        """Return how well the cosine predicts that the predecessor is active at activations.

        NaN if it always or never is.
        """
        bit = 1 << KINDS.index(source.kind)
        together = self.counts[:, [code for code in range(len(GROUPS)) if code & bit]].sum(1)
        cosines = self.matches[source].cosines[:, 0]
        return counted_auroc(cosines, together, self.counts.sum(1) - together)

    def pairs(self) -> Iterator[dict[str, Any]]:
        """Yield how many features of each group are in each `other`, too (figure 13).

        A feature is in a group if it ever is at a token: `n` are in `group`, a `share` of them in
        both. It is `expected` if each activation were in a group at random, as often as all are.
        """
        counts = self.counts.double().cpu()
        is_in, n = (counts > 0).double(), counts.sum(1)
        p = counts.sum(0) / n.sum()
        not_in = (1 - p) ** n[:, None]
        in_neither = (1 - p[:, None] - p).clamp(min=0) ** n[:, None, None]
        both = (1 - not_in[:, :, None] - not_in[:, None] + in_neither).sum(0)
        for a, b in permutations(counts.sum(0).nonzero()[:, 0].tolist(), 2):
            yield {
                "group": GROUPS[a],
                "other": GROUPS[b],
                "n": int(is_in[:, a].sum()),
                "share": float(is_in[:, a] @ is_in[:, b] / is_in[:, a].sum()),
                "expected": float(both[a, b] / (1 - not_in[:, a]).sum()),
            }

    def summarize(self) -> dict[str, Any]:
        """Return the counts of this layer as plain data."""
        return {
            "layer": self.hook_point.layer,
            "n_activations": int(self.counts.sum()),
            "shares": self.shares(),
            "auroc": {source.kind: number(self.auroc(source)) for source in self.matches},
            "pairs": list(self.pairs()),
        }


def compare_cosines(groups: Iterable[FeatureGroups]) -> list[dict[str, Any]]:
    """Test whether cosines to predecessors tell groups of features apart (figures 4, 14).

    A feature counts once, in the group that it is in most often; groups need `MIN_FEATURES`. Two
    groups, of `n` and `n_other` features, have a row for each kind of predecessors, `source`:
    `auroc` is the probability that one of `other` has the higher cosine, `p` of a two-sided
    Mann-Whitney test, and `q` adjusted for all tests.
    """
    rows = []
    for layer, (source, match) in ((one, each) for one in groups for each in one.matches.items()):
        code, cosines = layer.counts.argmax(1), match.cosines[:, 0]
        known = layer.counts.any(1) & ~cosines.isnan()
        members = {name: cosines[known & (code == i)].cpu() for i, name in enumerate(GROUPS)}
        large = (name for name, values in members.items() if len(values) >= MIN_FEATURES)
        for a, b in combinations(large, 2):
            n, n_other = len(members[a]), len(members[b])
            u, p = map(float, scipy.stats.mannwhitneyu(members[b], members[a]))
            where = {"layer": layer.hook_point.layer, "source": source.kind, "group": a, "other": b}
            rows.append({**where, "n": n, "n_other": n_other, "auroc": u / (n * n_other), "p": p})
    adjusted = adjust_for_many(torch.tensor([row["p"] for row in rows])).tolist()
    return [{**row, "q": q} for row, q in zip(rows, adjusted, strict=True)]


def control_features(
    features: Iterable[Feature], activations: Mapping[HookPoint, Tensor], generator: torch.Generator
) -> dict[Feature, Feature]:
    """Draw another feature of the same hook point for each, that is active about as often.

    It is one of the 20 neither given nor drawn with the closest numbers of `activations`,
    ``(n_features,)`` each; a feature has none if there is no such one.
    """
    drawn: dict[Feature, Feature] = {}
    for feature in (features := sorted(features)):
        at = feature.hook_point
        count = activations[at].double().cpu()
        difference = (count - count[feature.index]).abs()
        taken = [f.index for f in (*features, *drawn.values()) if f.hook_point == at]
        difference[taken] = torch.inf
        if n := min(20, int(difference.isfinite().sum())):
            rank = torch.randint(n, (1,), generator=generator)
            drawn[feature] = Feature(at, int(difference.argsort(stable=True)[rank]))
    return drawn


@dataclass(frozen=True)
class Transition:
    """Variance that the features of one SAE, `source`, explain at another hook point, `target`.

    Features are matched by their cosines in the weights `compared`, ``decoder`` or ``encoder``, k
    sources per target. `own` is what the target's SAE explains; None for constant activations.
    """

    source: str
    target: str
    kind: str
    compared: str
    k: int
    explained_variance: float | None = column(format=".3f")
    own: float | None = column(format=".3f")


def carried_features(features: Tensor, indices: Tensor) -> Iterator[Tensor]:
    """Yield the features of one SAE carried to a later one by 1, 2, ... k sources per target.

    That is ``f T`` with ``T = indicator(top-k of W_dec(source)ᵀ W_dec(target))``: a target is the
    sum of its k most similar sources. `features` are ``(n, n_sources)`` and `indices` the sources
    of each target, ``(n_targets, k)``, -1 for none; the result, ``(n, n_targets)``, can be decoded.
    """
    carried = features.new_zeros(len(features), len(indices))
    for source in indices.T:
        carried = carried + features[:, source.clamp(min=0)] * (source >= 0)
        yield carried


@torch.no_grad()
def measure_transitions(
    saes: SAEs, matcher: DecoderMatcher, sample: Mapping[HookPoint, Tensor]
) -> list[Transition]:
    """Carry the features of every predecessor to the next residual stream, by each of TRANSITION_K.

    `sample` holds activations of the same tokens at each hook point, ``(n, width)``. The explained
    variance is ``1 - Σ|x - x̂|² / Σ|x - mean|²`` over all rows and columns, in float64.
    """
    transitions = []
    for target in matcher.decoders:
        target_sae = saes[target]
        x = sample[target].to(target_sae.decoder.device)
        total = (x.double() - x.double().mean(0)).square().sum()

        def explained(predicted: Tensor, x: Tensor = x, total: Tensor = total) -> float | None:
            return number(float(1 - (x.double() - predicted.double()).square().sum() / total))

        own = explained(target_sae(x))
        for source in matcher.predecessors(target):
            source_sae = saes[source]
            features = source_sae.encode(sample[source])
            for compared in ("decoder", "encoder"):
                weights = getattr(target_sae, compared), getattr(source_sae, compared)
                indices = match_features(*weights, max(TRANSITION_K)).indices
                for k, carried in enumerate(carried_features(features, indices), 1):
                    if k in TRANSITION_K:
                        ends = str(source), str(target), source.kind
                        variance = explained(target_sae.decode(carried))
                        transitions.append(Transition(*ends, compared, k, variance, own))
    return transitions
