"""What the feature-flow study finds about a relation: carriers, their ties, and cuts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from lincorr_lightning.flow.answer_features import (
    AnswerFeatures,
    LabelTie,
    find_answer_features,
    label_ties,
    last_activations,
)
from lincorr_lightning.flow.matcher import DecoderMatcher
from lincorr_lightning.flow.measurements import progress_bar
from lincorr_lightning.flow.relation_ablation import (
    AskedSubjects,
    ask_subjects,
    control_features,
    cut_edits,
    score_relation,
)
from lincorr_lightning.flow.results import RelationFlow
from lincorr_lightning.knowledge import Domain, TokenizedRelation
from lincorr_lightning.lm.language_model import LanguageModel
from lincorr_lightning.sae import HookKind, HookPoint
from lincorr_lightning.sae.hook_points import Feature
from lincorr_lightning.sae.sparse_autoencoder import SparseAutoencoder

SIDES = ("source", "target")
LEAST_AUROC = 0.9
"""Below this a feature is not said to carry an answer."""


@dataclass(frozen=True)
class RelationMeasurement:
    """A relation's numbers, and what the graphs and steering need of it.

    Attributes:
        result: For the report.
        asked: The relation.
        features: Side -> place -> the features of its labels.
        ties: Pairs of labels that belong together.
        said: What the LM answers.
        subjects: About whom.
    """

    result: RelationFlow
    asked: TokenizedRelation
    features: Mapping[str, Mapping[HookPoint, AnswerFeatures]]
    ties: Sequence[LabelTie]
    said: AskedSubjects
    subjects: Sequence[str]


@torch.no_grad()
def measure_relation(
    lm: LanguageModel,
    saes: Mapping[HookPoint, SparseAutoencoder],
    flow: DecoderMatcher,
    asked: TokenizedRelation,
    subjects: Sequence[str],
    thresholds: Mapping[HookKind, float] | float,
    k: int,
    generator: torch.Generator,
) -> RelationMeasurement:
    """Find the features of a relation's answers, follow them back, and cut what they share.

    Args:
        lm: The LM, loaded.
        saes: At its places.
        flow: Their decoders.
        asked: The relation.
        subjects: The X's; the first half chooses, the second judges.
        thresholds: Least cosine of an edge.
        k: Predecessors looked at in each place.
        generator: Draws controls.
    """
    n_fit = len(subjects) // 2
    # The LM as it is, and two cuts with a control each.
    bar = progress_bar(f"Cutting {asked.name}", 5, "cut")
    said = ask_subjects(lm, asked, subjects)
    bar.update()
    features: dict[str, dict[HookPoint, AnswerFeatures]] = {}
    how_often = {hook_point: torch.zeros(sae.n_features) for hook_point, sae in saes.items()}
    for side, prompts, logits in (
        ("source", asked.source_prompts(subjects), said.source),
        ("target", asked.target_prompts(subjects), said.target),
    ):
        activations = last_activations(lm, lm.rows(prompts), list(saes))
        answers = logits.argmax(1)
        features[side] = {
            hook_point: find_answer_features(
                sae, activations[hook_point], answers, logits.shape[1], n_fit
            )
            for hook_point, sae in saes.items()
        }
        for hook_point, sae in saes.items():
            active = sae.encode(activations[hook_point].to(sae.decoder.device)) > 0
            how_often[hook_point] += active.sum(0).cpu()
    all_ties = label_ties(
        flow, features["source"], features["target"], torch.from_numpy(asked.right), thresholds, k
    )
    right = [tie for tie in all_ties if tie.right]
    wrong = [tie for tie in all_ties if not tie.right]
    last = max(hook_point for hook_point in flow.hook_points if hook_point.kind == "residual")
    below = [hook_point for hook_point in flow.hook_points if hook_point != last]
    scores = [{"cut": "none", "control": False, "n_features": 0}
              | asdict(score_relation(asked, said, said, n_fit))]  # fmt: skip
    shared = {
        "carriers": {f for tie in right for f in tie.carriers},
        "flow": {f for tie in right for f in tie.shared if f.hook_point != last},
    }
    for name, cut in shared.items():
        for is_control in (False, True) if cut else ():
            own = control_features(cut, how_often, generator) if is_control else sorted(cut)
            after = ask_subjects(lm, asked, subjects, cut_edits(saes, own))
            bar.update()
            scores.append(
                {"cut": name, "control": is_control, "n_features": len(own)}
                | asdict(score_relation(asked, said, after, n_fit))
            )
    bar.close()
    result = RelationFlow(
        relation=asked.name,
        n_fit=n_fit,
        n_test=len(subjects) - n_fit,
        answers=list(_answer_rows(asked, features)),
        ties=[_tie_row(asked, tie) for tie in right],
        same_carrier={p.id: _share(right, p) or 0.0 for p in below},
        same_carrier_permuted={p.id: _share(wrong, p) or 0.0 for p in below},
        shared_flow=_mean(bool(tie.shared) for tie in right),
        shared_flow_permuted=_mean(bool(tie.shared) for tie in wrong),
        n_right=len(right),
        n_wrong=len(wrong),
        cuts=scores,
    )
    return RelationMeasurement(result, asked, features, right, said, subjects)


def _answer_rows(
    asked: TokenizedRelation, features: Mapping[str, Mapping[HookPoint, AnswerFeatures]]
) -> Iterable[dict[str, Any]]:
    domains: dict[str, Domain] = {"source": asked.source, "target": asked.target}
    for side in SIDES:
        for hook_point, own in features[side].items():
            for label, text in enumerate(domains[side].texts):
                feature = own.feature(label)
                if feature is not None:
                    yield {
                        "side": side,
                        "label": text,
                        "place": hook_point.id,
                        "feature": feature.id,
                        "auroc": float(own.auroc[label]),
                    }


def _tie_row(asked: TokenizedRelation, tie: LabelTie) -> dict[str, Any]:
    return {
        "source": asked.source.texts[tie.source],
        "target": asked.target.texts[tie.target],
        "same_carrier": " ".join(f.id for f in tie.carriers),
        "shared_flow": " ".join(f.id for f in tie.shared),
    }


def _share(ties: Sequence[LabelTie], hook_point: HookPoint) -> float | None:
    return _mean(any(f.hook_point == hook_point for f in tie.carriers) for tie in ties)


def _mean(values: Iterable[bool]) -> float | None:
    known = list(values)
    return sum(known) / len(known) if known else None


def chosen_starts(found: RelationMeasurement, n: int) -> list[tuple[str, list[Feature]]]:
    """Pairs of answers whose flow is worth a look.

    First those that have a feature each and share most of their flow; one pair for each target.

    Args:
        found: The relation's measurement.
        n: How many pairs.

    Returns:
        Name of each pair, and the features that carry its answers in the last residual stream.
    """
    last = max(
        hook_point for hook_point in found.features["source"] if hook_point.kind == "residual"
    )

    def carriers(tie: LabelTie) -> list[Feature]:
        both = [found.features["source"][last].feature(tie.source),
                found.features["target"][last].feature(tie.target)]  # fmt: skip
        return list(dict.fromkeys(feature for feature in both if feature is not None))

    def order(tie: LabelTie) -> tuple[int, ...]:
        return (-len(carriers(tie)), -len(tie.shared), -len(tie.carriers))

    pairs: list[tuple[str, list[Feature]]] = []
    seen: set[int] = set()
    for tie in sorted(found.ties, key=order):
        if tie.target not in seen and len(pairs) < n:
            seen.add(tie.target)
            names = found.asked.source.texts[tie.source], found.asked.target.texts[tie.target]
            pairs.append(("->".join(names), carriers(tie)))
    return pairs
