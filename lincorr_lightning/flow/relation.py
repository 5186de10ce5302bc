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
from lincorr_lightning.sae.hook_points import Feature, HookPoint
from lincorr_lightning.sae.hooks import edited

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
        starts: dict[AnswerPair, list[Feature]] = {}
        for pair in filter(lambda pair: pair.is_reference, self.pairs):
            source = self.features["source"][self.last][pair.source].feature
            target = self.features["target"][self.last][pair.target].feature
            starts[pair] = list(dict.fromkeys((source, target)))
        pairs = sorted(starts, key=lambda x: (-len(starts[x]), -len(x.shared), -len(x.carriers)))
        best: dict[int, AnswerPair] = {}
        for pair in pairs:
            best.setdefault(pair.target, pair)
        sources = self.relation.source.texts
        targets = self.relation.target.texts
        return {
            f"{sources[pair.source]}->{targets[pair.target]}": starts[pair]
            for pair in list(best.values())[:n]
        }

    def answers_to_steer(
        self, lm: LanguageModel, matcher: DecoderMatcher, settings: SteeringSettings
    ) -> list[SteeredAnswer]:
        """Return target answers that a feature carries, spread evenly over the labels."""
        target = self.features["target"][self.last]
        carried = [label for label, best in target.items() if best.auroc >= settings.min_auroc]
        n = min(settings.n_answers, len(carried))
        rows = lm.rows(self.relation.target_prompts(self.subjects))
        answers = self.logits.target.argmax(1)
        domain = self.relation.target
        steered = []
        for label in (carried[i * len(carried) // n] for i in range(n)):
            graph = matcher.follow(target[label].feature)
            others = (answers != label).nonzero()[: settings.n_prompts, 0].tolist()
            prompts = [rows[i] for i in others]
            steered.append(
                SteeredAnswer(domain.texts[label], domain.token_ids[label], graph, prompts)
            )
        return steered


@torch.no_grad()
def measure_relation(
    lm: LanguageModel,
    matcher: DecoderMatcher,
    relation: TokenizedRelation,
    subjects: Sequence[str],
    generator: torch.Generator,
    answer_share: float | None = None,
) -> RelationFlow:
    """Find the features of a relation's answers, follow them back, and remove what they share.

    They are fitted, as maps are, on the first half of the subjects and scored on the second;
    `answer_share` is that of `answer_members`.
    """
    saes = matcher.saes
    n_fit = len(subjects) // 2
    logits = relation_logits(lm, relation, subjects)
    by_side: dict[str, dict[HookPoint, dict[int, AnswerFeature]]] = {"source": {}, "target": {}}
    n_active = {at: torch.zeros(sae.n_features) for at, sae in saes.items()}
    prompts = relation.source_prompts(subjects), relation.target_prompts(subjects)
    for answers, texts, domain_logits in zip(by_side.values(), prompts, logits, strict=True):
        activations = last_activations(lm, lm.rows(texts), list(saes))
        members = answer_members(domain_logits, n_fit, answer_share)
        for at, sae in saes.items():
            features = sae.encode(activations[at]).cpu()
            answers[at] = find_answer_features(at, features, members, n_fit)
            n_active[at] += (features > 0).sum(0)
    reference = torch.from_numpy(relation.reference_mask)
    pairs = compare_answers(matcher, by_side["source"], by_side["target"], reference)
    removed = {
        "carriers": {f for pair in pairs if pair.is_reference for f in pair.carriers},
        "flow": {f for pair in pairs if pair.is_reference for f in pair.shared},
    }
    removed["flow"] = {f for f in removed["flow"] if f.hook_point != matcher.last}
    cuts = [RelationCut("none", False, 0, **score_relation(relation, logits, logits, n_fit))]
    plan = [cut for cut in product(removed, (False, *[True] * N_CONTROLS)) if removed[cut[0]]]
    for name, control in progress(plan, f"cutting {relation.name}", unit="cut"):
        cut = sorted(removed[name])
        if control:
            cut = list(control_features(cut, n_active, generator).values())
        with edited(lm.model, remove_features(saes, cut)):
            after = relation_logits(lm, relation, subjects)
        scores = score_relation(relation, logits, after, n_fit)
        cuts.append(RelationCut(name, control, len(cut), **scores))
    return RelationFlow(relation, subjects, n_fit, logits, by_side, matcher.last, pairs, cuts)


def score_relation(
    relation: TokenizedRelation, before: RelationLogits, after: RelationLogits, n_fit: int
) -> dict[str, Any]:
    """Return the scores of a `RelationCut` on subjects after the first `n_fit`, which fit maps."""
    old = _fit(before, n_fit)
    new = _fit(after, n_fit)
    source = before.source[n_fit:]
    source_now = after.source[n_fit:]
    target_now = after.target[n_fit:]
    now = target_now.argmax(1)
    correct = torch.from_numpy(relation.reference_mask)[now, source.argmax(1)]

    def r(linear_map: Solution, source: Tensor) -> float | None:
        return number(summarize(labelwise_pearson(linear_map(source), target_now)).mean)

    return {
        "fixed": r(old, source_now),
        "target_only": r(old, source),
        "refitted": r(new, source_now),
        "recall": float(correct.double().mean()) if relation.has_reference else None,
        "kept": float((now == before.target[n_fit:].argmax(1)).double().mean()),
    }


def _fit(logits: RelationLogits, n_fit: int) -> Solution:
    moments = moments_of(torch.cat([logits.source[:n_fit], logits.target[:n_fit]], 1))
    columns = torch.arange(len(moments.mean))
    n_source = logits.source.shape[1]
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
    fit = members[:n_fit]
    test = members[n_fit:]
    labels = ((fit.sum(0) >= MIN_SUBJECTS) & (test.sum(0) >= MIN_SUBJECTS)).nonzero()[:, 0].tolist()
    chosen = class_auroc(features[:n_fit], fit[:, labels]).nan_to_num(0.5).argmax(1)
    aurocs = class_auroc(features[n_fit:, chosen], test[:, labels]).diagonal()
    return {
        label: AnswerFeature(Feature(hook_point, index), auroc)
        for label, index, auroc in zip(labels, chosen.tolist(), aurocs.tolist(), strict=True)
    }


def compare_answers(
    matcher: DecoderMatcher, source: AnswerFeatures, target: AnswerFeatures, reference: Tensor
) -> list[AnswerPair]:
    """Follow the features of all source and target answers back, and see where they meet.

    The flow of an answer starts at its feature in the last residual stream, which all pairs have.
    Pairs outside the reference, ``(n_target, n_source)`` bool, are the chance level.
    """
    last = matcher.last

    def flows(answers: AnswerFeatures) -> dict[int, set[Feature]]:
        return {
            label: set(matcher.follow(best.feature, forward=False).features)
            for label, best in answers[last].items()
        }

    source_flows = flows(source)
    target_flows = flows(target)
    pairs = []
    for s, t in product(source_flows, target_flows):
        both = ((source[at].get(s), target[at].get(t)) for at in matcher.saes if at != last)
        carriers = tuple(a.feature for a, b in both if a and b and a.feature == b.feature)
        shared = tuple(sorted(source_flows[s] & target_flows[t]))
        pairs.append(AnswerPair(s, t, bool(reference[t, s]), shared, carriers))
    return pairs
