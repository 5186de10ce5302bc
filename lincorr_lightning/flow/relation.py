"""Feature flow of a relation: features that carry its answers, what they share, ablations."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lincorr_lightning.flow.graph import DecoderMatcher
from lincorr_lightning.flow.steering import SteeredAnswer, SteeringSettings
from lincorr_lightning.flow.text_statistics import control_features
from lincorr_lightning.functional import labelwise_pearson, moments_of, summarize
from lincorr_lightning.functional.auroc import class_auroc
from lincorr_lightning.knowledge import TokenizedRelation
from lincorr_lightning.linear_map.layout import RelationLogits, relation_logits
from lincorr_lightning.linear_map.solver import RidgeSolver, Solution
from lincorr_lightning.lm.language_model import LanguageModel
from lincorr_lightning.progress import progress
from lincorr_lightning.results.table import column, number
from lincorr_lightning.sae.forwards import last_activations, remove_features
from lincorr_lightning.sae.hook_points import Feature, HookKind, HookPoint
from lincorr_lightning.sae.hooks import edited
from lincorr_lightning.sae.sparse_autoencoder import SAEs

MIN_SUBJECTS = 3  #: Minimum number of subjects with a label as their answer, in each half.
N_CONTROLS = 5  #: Number of draws of other features.


@dataclass(frozen=True)
class RelationCut:
    """A relation with some features removed, on held-out subjects.

    A `cut` is ``none``, ``carriers`` of both answers of a pair, or features in the ``flow`` of
    both; a `control` removes as many others, about as often active. `fixed` is the mean label-wise
    r of the unchanged LM's linear map, `target_only` the same with features removed in the target's
    prompt alone, `refitted` that of a new map; None if no label varies. `recall` is the share of
    subjects whose target answer is a reference answer for the source answer of the unchanged LM
    (None without a reference), `kept` that of unchanged target answers.
    """

    cut: str
    control: bool
    n_features: int = column("features")
    fixed: float | None = column("r, unchanged map", ".3f")
    target_only: float | None = column("r, removed in the target's prompt", ".3f")
    refitted: float | None = column("r, refitted map", ".3f")
    recall: float | None = column("recall", ".3f")
    kept: float = column("answers kept", ".3f")


class AnswerFeature(NamedTuple):
    """The feature of a hook point that best predicts an answer, and its AUROC on other subjects."""

    feature: Feature
    auroc: float


AnswerFeatures = Mapping[HookPoint, Mapping[int, AnswerFeature]]
"""Features by hook point and label; a label that is too few subjects' answer has none."""


class AnswerPair(NamedTuple):
    """A source and a target label, the features in the flow of both, and those that carry both."""

    source: int
    target: int
    is_reference: bool
    shared: tuple[Feature, ...]
    carriers: tuple[Feature, ...]


@dataclass(frozen=True)
class RelationFlow:
    """What the features of a relation's answers have in common, and what depends on them.

    Features and maps are fitted on the first `n_fit` subjects. `logits` are the unchanged LM's;
    `features` are those of the labels by side, ``source`` or ``target``; `last` is the last stream
    that has an SAE, and `pairs` have features there. The first of the `cuts` removes nothing.
    """

    relation: TokenizedRelation
    subjects: Sequence[str]
    n_fit: int
    logits: RelationLogits
    features: Mapping[str, AnswerFeatures]
    last: HookPoint
    pairs: Sequence[AnswerPair]
    cuts: Sequence[RelationCut]

    def starts_to_draw(self, n: int) -> dict[str, list[Feature]]:
        """Return pairs of answers, one per target, and their features in the last residual stream.

        Pairs of two features come first, then those that share most.
        """

        def starts(pair: AnswerPair) -> list[Feature]:
            ends = (("source", pair.source), ("target", pair.target))
            return list(dict.fromkeys(self.features[s][self.last][i].feature for s, i in ends))

        best: dict[int, AnswerPair] = {}
        pairs = [pair for pair in self.pairs if pair.is_reference]
        pairs.sort(key=lambda x: (-len(starts(x)), -len(x.shared), -len(x.carriers)))
        for pair in pairs:
            best.setdefault(pair.target, pair)
        source, target = self.relation.source.texts, self.relation.target.texts
        return {
            f"{source[pair.source]}->{target[pair.target]}": starts(pair)
            for pair in list(best.values())[:n]
        }

    def answers_to_steer(
        self,
        lm: LanguageModel,
        matcher: DecoderMatcher,
        thresholds: Mapping[HookKind, float] | float,
        settings: SteeringSettings,
    ) -> list[SteeredAnswer]:
        """Return target answers that a feature carries, spread evenly over the labels.

        The flow of the feature is followed with one predecessor per hook point: adding many
        features of an LM at once does not steer it.
        """
        target = self.features["target"][self.last]
        carried = [label for label, best in target.items() if best.auroc >= settings.min_auroc]
        n = min(settings.n_answers, len(carried))
        rows = lm.rows(self.relation.target_prompts(self.subjects))
        answers, domain = self.logits.target.argmax(1), self.relation.target
        steered = []
        for label in (carried[i * len(carried) // n] for i in range(n)):
            graph = matcher.follow(target[label].feature, thresholds=thresholds)
            others = (answers != label).nonzero()[: settings.n_prompts, 0].tolist()
            what = domain.texts[label], domain.token_ids[label], graph
            steered.append(SteeredAnswer(*what, [rows[i] for i in others]))
        return steered


@torch.no_grad()
def measure_relation(
    lm: LanguageModel,
    saes: SAEs,
    matcher: DecoderMatcher,
    relation: TokenizedRelation,
    subjects: Sequence[str],
    thresholds: Mapping[HookKind, float] | float,
    k: int,
    generator: torch.Generator,
    answer_share: float | None = None,
) -> RelationFlow:
    """Find the features of a relation's answers, follow them back, and remove what they share.

    They are fitted, as maps are, on the first half of the subjects and scored on the second;
    `answer_share` is that of `answer_members`.
    """
    n_fit = len(subjects) // 2
    logits = relation_logits(lm, relation, subjects)
    by_side: dict[str, dict[HookPoint, dict[int, AnswerFeature]]] = {"source": {}, "target": {}}
    n_active = {at: torch.zeros(sae.n_features) for at, sae in saes.items()}
    prompts = relation.source_prompts(subjects), relation.target_prompts(subjects)
    for found, texts, domain_logits in zip(by_side.values(), prompts, logits, strict=True):
        activations = last_activations(lm, lm.rows(texts), list(saes))
        members = answer_members(domain_logits, n_fit, answer_share)
        for at, sae in saes.items():
            features = sae.encode(activations[at]).cpu()
            found[at] = find_answer_features(at, features, members, n_fit)
            n_active[at] += (features > 0).sum(0)
    pairs = compare_answers(
        matcher,
        by_side["source"],
        by_side["target"],
        torch.from_numpy(relation.reference_mask),
        thresholds,
        k,
    )
    reference = [pair for pair in pairs if pair.is_reference]
    shared = {
        "carriers": {f for pair in reference for f in pair.carriers},
        "flow": {f for pair in reference for f in pair.shared if f.hook_point != matcher.last},
    }
    cuts = [RelationCut("none", False, 0, **score_relation(relation, logits, logits, n_fit))]
    plan = [x for x in product(shared, (False, *[True] * N_CONTROLS)) if shared[x[0]]]
    for name, control in progress(plan, f"cutting {relation.name}", unit="cut"):
        removed = sorted(shared[name])
        if control:
            removed = [*control_features(removed, n_active, generator).values()]
        with edited(lm.model, remove_features(saes, removed)):
            after = relation_logits(lm, relation, subjects)
        scores = score_relation(relation, logits, after, n_fit)
        cuts.append(RelationCut(name, control, len(removed), **scores))
    return RelationFlow(relation, subjects, n_fit, logits, by_side, matcher.last, pairs, cuts)


def score_relation(
    relation: TokenizedRelation, before: RelationLogits, after: RelationLogits, n_fit: int
) -> dict[str, Any]:
    """Return the scores of a `RelationCut` on subjects after the first `n_fit`, which fit maps."""
    old, new = _fit(before, n_fit), _fit(after, n_fit)
    (source, target), (source_now, target_now) = (
        (logits.source[n_fit:], logits.target[n_fit:]) for logits in (before, after)
    )
    now, then = target_now.argmax(1), target.argmax(1)
    correct = torch.from_numpy(relation.reference_mask)[now, source.argmax(1)]

    def r(linear_map: Solution, source: Tensor) -> float | None:
        return number(summarize(labelwise_pearson(linear_map(source), target_now)).mean)

    return {
        "fixed": r(old, source_now),
        "target_only": r(old, source),
        "refitted": r(new, source_now),
        "recall": float(correct.double().mean()) if relation.has_reference else None,
        "kept": float((now == then).double().mean()),
    }


def _fit(logits: RelationLogits, n_fit: int) -> Solution:
    moments = moments_of(torch.cat([logits.source[:n_fit], logits.target[:n_fit]], 1))
    columns, n_source = torch.arange(len(moments.mean)), logits.source.shape[1]
    return RidgeSolver(moments, columns[:n_source], y=columns[n_source:]).solve(0.0)


def answer_members(logits: Tensor, n_fit: int, share: float | None) -> Tensor:
    """Return for which subjects each label counts as the answer, bool, shaped as the `logits`.

    A `share` takes so many of either half of the subjects, of which the first has `n_fit`: those
    with the highest logit of the label relative to the mean of all labels. None takes the subjects
    whose most likely answer the label is. All are ``(n_subjects, n_labels)``.
    """
    if share is None:
        return torch.nn.functional.one_hot(logits.argmax(1), logits.shape[1]).bool()
    relative = logits - logits.mean(1, keepdim=True)
    members = torch.zeros_like(logits, dtype=torch.bool)
    for half in (slice(0, n_fit), slice(n_fit, None)):
        scores = relative[half]
        highest = scores.topk(max(1, round(share * len(scores))), dim=0).indices
        members[half] = members[half].scatter(0, highest, True)
    return members


def find_answer_features(
    hook_point: HookPoint, features: Tensor, members: Tensor, n_fit: int
) -> dict[int, AnswerFeature]:
    """Choose for each label the feature with the highest AUROC on the first `n_fit` subjects.

    `features` are those at the end of each subject's prompt, ``(n_subjects, n_features)``, and
    `members` of `answer_members`. Labels of under `MIN_SUBJECTS` subjects in a half have none.
    """
    fit, test = members[:n_fit], members[n_fit:]
    labels = ((fit.sum(0) >= MIN_SUBJECTS) & (test.sum(0) >= MIN_SUBJECTS)).nonzero()[:, 0].tolist()
    chosen = class_auroc(features[:n_fit], fit[:, labels]).nan_to_num(0.5).argmax(1)
    aurocs = class_auroc(features[n_fit:, chosen], test[:, labels]).diagonal()
    return {
        label: AnswerFeature(Feature(hook_point, index), auroc)
        for label, index, auroc in zip(labels, chosen.tolist(), aurocs.tolist(), strict=True)
    }


def compare_answers(
    matcher: DecoderMatcher,
    source: AnswerFeatures,
    target: AnswerFeatures,
    reference: Tensor,
    thresholds: Mapping[HookKind, float] | float,
    k: int = 1,
) -> list[AnswerPair]:
    """Follow the features of all source and target answers back, and see where they meet.

    The flow of an answer starts at its feature in the last residual stream, which all pairs have.
    Pairs outside the reference, ``(n_target, n_source)`` bool, are the chance level.
    """
    last = matcher.last
    below = [at for at in matcher.decoders if at != last]

    def flow(start: Feature) -> set[Feature]:
        return set(matcher.follow(start, direction="backward", thresholds=thresholds, k=k).features)

    source_flows = {label: flow(best.feature) for label, best in source[last].items()}
    target_flows = {label: flow(best.feature) for label, best in target[last].items()}
    pairs = []
    for s, t in product(source_flows, target_flows):
        both = ((source[at].get(s), target[at].get(t)) for at in below)
        carriers = tuple(
            one.feature for one, other in both if one and other and one.feature == other.feature
        )
        shared = tuple(sorted(source_flows[s] & target_flows[t]))
        pairs.append(AnswerPair(s, t, bool(reference[t, s]), shared, carriers))
    return pairs
