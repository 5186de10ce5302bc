"""Features on texts: their groups, and how often and where they are active.

The group of a feature at a token is which of its matched predecessors are active with it (arXiv
2502.03032, figures 3 to 5, 12 to 14, 18).
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import combinations, permutations
from typing import Any

import scipy
import torch
from torch import Tensor

from lincorr_lightning.flow.graph import GROUPS, DecoderMatcher, Matches
from lincorr_lightning.functional.auroc import counted_auroc
from lincorr_lightning.functional.significance import adjust_for_many
from lincorr_lightning.lm.language_model import LanguageModel
from lincorr_lightning.results.table import column, number
from lincorr_lightning.sae.forwards import Forward, Rows, run_with_hooks
from lincorr_lightning.sae.hook_points import KINDS, Feature, HookPoint

MIN_FEATURES = 5  #: Minimum number of features of a group whose cosines are compared.
N_CONTEXT = 2  #: Number of tokens that name a feature.


@dataclass(eq=False)
class TextStatistics:
    """Statistics of the features on texts, batch by batch."""

    lm: LanguageModel
    matcher: DecoderMatcher
    n_kept: int = 0
    """Number of texts that later measurements read again, at least, if there are so many."""

    def __post_init__(self) -> None:
        saes = self.matcher.saes
        self.groups = {
            hook_point: FeatureGroups(hook_point, self.matcher.match(hook_point))
            for hook_point in saes
            if self.matcher.predecessors(hook_point)
        }
        self.activity = {at: FeatureActivity(sae.n_features) for at, sae in saes.items()}
        self.n_texts = 0
        self.n_skipped = 0
        """Number of tokens at the beginning of a text that do not count."""
        self.kept_rows: list[Sequence[int]] = []
        """Token ids of the first texts."""

    @property
    def n_tokens(self) -> int:
        """Number of tokens counted."""
        return next(iter(self.activity.values())).n_tokens

    def update(self, rows: Rows, n_skipped: int = 0) -> None:
        """Read some texts, of which the first `n_skipped` tokens do not count."""
        saes = self.matcher.saes

        def count(forward: Forward) -> None:
            counted = forward.counted(n_skipped)
            predicted = forward.logits.argmax(-1)
            # All before the first is counted: where memory runs out, the texts are read again.
            features = {at: sae.encode(forward.at[at][counted]) for at, sae in saes.items()}
            for at, activity in self.activity.items():
                activity.update(features[at], forward.ids, counted, predicted)
            for groups in self.groups.values():
                groups.update(features)

        self.n_texts += len(rows)
        self.n_skipped = n_skipped
        if len(self.kept_rows) < self.n_kept:
            self.kept_rows += rows
        run_with_hooks(self.lm, rows, count, hook_points=list(saes))

    def names(self, features: Iterable[Feature]) -> dict[str, str]:
        """Return the names of features that have one, by their ids."""
        names = {f.id: self.activity[f.hook_point].name(f.index, self.lm) for f in features}
        return {key: name for key, name in names.items() if name is not None}


class FeatureActivity:
    """How often and how strongly the features of one hook point are active, and where most.

    ``n_active`` has at how many of ``n_tokens`` tokens each was active, ``(n_features,)``.
    """

    def __init__(self, n_features: int) -> None:
        self.n_tokens = 0
        self.n_active = torch.zeros(n_features, dtype=torch.int64)
        self._sum = torch.zeros(n_features, dtype=torch.float64)
        self._peak = torch.zeros(n_features, dtype=torch.float64)
        self._context = torch.full((n_features, N_CONTEXT), -1, dtype=torch.int64)
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
        row = text[at]
        end = position[at]
        back = end[:, None] - torch.arange(N_CONTEXT, device=ids.device).flip(0)
        context = ids[row[:, None], back.clamp(min=0)]
        self._peak[higher] = value[higher].double()
        self._context[higher] = torch.where(back >= 0, context, -1).cpu()
        self._predicted[higher] = predicted[row, end].cpu()

    @property
    def mean(self) -> Tensor:
        """Mean activation of each feature where it is active, ``(n_features,)`` float64; else 0."""
        return self._sum / self.n_active.clamp(min=1)

    def name(self, index: int, lm: LanguageModel) -> str | None:
        """Return a name such as ``Paris is → in``; None for a feature that is never active.

        It has the last tokens where the feature is most active, and the most likely next one.
        """
        if not self.n_active[index]:
            return None
        context = [token for token in self._context[index].tolist() if token >= 0]
        texts = lm.tokenizer.batch_decode([context, [int(self._predicted[index])]])
        return " → ".join(text.strip() for text in texts)


@dataclass(frozen=True)
class GroupPair:
    """How many features of a group are in an `other`, too (figure 13).

    A feature is in a group if it ever is at a token: `n` are in `group`, a `share` of them in both.
    It is `expected` if each activation were in a group at random, as often as all are.
    """

    layer: int
    group: str
    other: str
    n: int = column(format=",")
    share: float = column(format=".1%")
    expected: float = column(format=".1%")


@dataclass(frozen=True)
class CosineTest:
    """Whether cosines to predecessors of a kind, `source`, tell two groups of features apart.

    A feature counts once, in the group that it is in most often. `auroc` is the probability that
    one of the `n_other` features of `other` has the higher cosine than one of the n of `group`, `p`
    of a two-sided Mann-Whitney test, and `q` adjusted for all tests (figures 4, 14).
    """

    layer: int
    source: str
    group: str
    other: str
    n: int = column(format=",")
    n_other: int = column(format=",")
    auroc: float = column(format=".2f")
    p: float = column(format=".2g")
    q: float = column(format=".2g", default=1.0)


class FeatureGroups:
    """Counts how often each feature of a hook point is active in each group.

    There are eight counts per feature. Of the matches in each predecessor, see
    `DecoderMatcher.match`, only the best is used.
    """

    def __init__(self, hook_point: HookPoint, matches: Mapping[HookPoint, Matches]) -> None:
        self.hook_point = hook_point
        self.matches = matches
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

    def pairs(self) -> Iterator[GroupPair]:
        """Yield how many features of each group are in each other, too."""
        counts = self.counts.double().cpu()
        is_in = (counts > 0).double()
        n = counts.sum(1)
        p = counts.sum(0) / n.sum()
        not_in = (1 - p) ** n[:, None]
        in_neither = (1 - p[:, None] - p).clamp(min=0) ** n[:, None, None]
        both = (1 - not_in[:, :, None] - not_in[:, None] + in_neither).sum(0)
        for a, b in permutations(counts.sum(0).nonzero()[:, 0].tolist(), 2):
            yield GroupPair(
                self.hook_point.layer,
                GROUPS[a],
                GROUPS[b],
                n=int(is_in[:, a].sum()),
                share=float(is_in[:, a] @ is_in[:, b] / is_in[:, a].sum()),
                expected=float(both[a, b] / (1 - not_in[:, a]).sum()),
            )

    def summarize(self) -> dict[str, Any]:
        """Return the counts of this layer as plain data."""
        return {
            "layer": self.hook_point.layer,
            "n_activations": int(self.counts.sum()),
            "shares": self.shares(),
            "auroc": {source.kind: number(self.auroc(source)) for source in self.matches},
            "pairs": [
                {key: value for key, value in asdict(pair).items() if key != "layer"}
                for pair in self.pairs()
            ],
        }


def compare_cosines(groups: Iterable[FeatureGroups]) -> list[CosineTest]:
    """Test every two groups of at least `MIN_FEATURES` features, for each kind of predecessors."""
    tests = []
    for layer in groups:
        code = layer.counts.argmax(1)
        for source, match in layer.matches.items():
            cosines = match.cosines[:, 0]
            known = layer.counts.any(1) & ~cosines.isnan()
            members = {name: cosines[known & (code == i)].cpu() for i, name in enumerate(GROUPS)}
            large = [name for name, values in members.items() if len(values) >= MIN_FEATURES]
            for a, b in combinations(large, 2):
                u, p = map(float, scipy.stats.mannwhitneyu(members[b], members[a]))
                n = len(members[a])
                n_other = len(members[b])
                auroc = u / (n * n_other)
                at = layer.hook_point.layer
                tests.append(CosineTest(at, source.kind, a, b, n, n_other, auroc, p))
    adjusted = adjust_for_many(torch.tensor([test.p for test in tests])).tolist()
    return [replace(test, q=q) for test, q in zip(tests, adjusted, strict=True)]


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
        n_active = activations[at].double().cpu()
        difference = (n_active - n_active[feature.index]).abs()
        taken = [f.index for f in (*features, *drawn.values()) if f.hook_point == at]
        difference[taken] = torch.inf
        if n := min(20, int(difference.isfinite().sum())):
            rank = torch.randint(n, (1,), generator=generator)
            drawn[feature] = Feature(at, int(difference.argsort(stable=True)[rank]))
    return drawn
