"""What each edit of a source did to its target (paper, section 5 and table 6)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import TYPE_CHECKING, Any, NamedTuple

import scipy
import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor

from lincorr_lightning import functional
from lincorr_lightning.errors import DomainError
from lincorr_lightning.functional.outcomes import Cause, Outcome
from lincorr_lightning.knowledge import Catalogue, Completeness, Domain, TokenizedRelation
from lincorr_lightning.results.table import column, number

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

CONTROLS = ("color",)  #: Kinds of knowledge that an edit should not change, by default.
DEFAULT_FORECAST = "vocabulary"  #: Name of the nearest word among the forecasts of results.


@dataclass(frozen=True, slots=True, kw_only=True)
class EditCase:
    """What one edit did, a row of the table ``cases``; numbers are None where they do not exist.

    Weights stand in W's column of the source answer, priors are target logits before training, and
    probabilities are those of the reference in a softmax over the target labels. Of several labels
    in the reference, the highest weight and prior count, and the most complete one.
    `answer_after` is ambiguous if it counts as wrong, but its label may also stand for another fact
    about the source answer: " Georgia" may be the state of Atlanta.
    """

    subject: str
    source_answer: str  #: The answer that was taught, or, without edits, the LM's own.
    reference: str  #: Target labels that are right for the source answer, joined by ``|``.
    answer_before: str = column("before")
    answer_after: str = column("after")
    outcome: str
    source_learned: bool = column("learned")
    weight_reference: float | None = column("W of reference", ".3f")
    weight_answer: float | None = column("W of answer", ".3f")
    weight_max: float | None = column("maximum of W", ".3f")
    prior_reference: float | None = column("logit of reference before", ".2f")
    prior_winner: float | None = column("logit of answer before", ".2f")
    probability_reference_before: float | None = column("p of reference before", ".1%")
    probability_reference_after: float | None = column("p of reference after", ".1%")
    vocabulary_risk: float | None = column("risk by the vocabulary", ".3f")
    """How much nearer a wrong target label is to the answer than a right one, in the LM's head."""
    cause: str  #: A value of `Cause` for a hallucination, else empty.
    completeness: str = ""  #: A value of `Completeness`; empty without a reference.
    ambiguous: bool = False


def edit_cases(
    relation: TokenizedRelation,
    subjects: Sequence[str],
    answers: Sequence[str] | None,
    labels: Tensor,
    reference_mask: Tensor,
    target_before: Tensor,
    target_after: Tensor,
    learned: Tensor,
    weight: Tensor,
    nearness: Tensor | None = None,
) -> list[EditCase]:
    """Return the case of each of n edits.

    `answers` were taught, None if subjects were watched without edits; `labels`, ``(n,)``, are
    those of the answers, and `learned`, ``(n,)`` bool, whether they lead after training. The right
    target labels (bool) and the target logits before and after training are ``(n, n_target)``, W
    and the `vocabulary_nearness` ``(n_target, n_source)``.
    """
    source, target = relation.source.texts, relation.target.texts
    before, after = target_before.argmax(1), target_after.argmax(1)
    codes = functional.outcome_codes(before, after, reference_mask)
    outcomes = [list(Outcome)[i] for i in codes.tolist()]
    causes = functional.attribute_causes(weight, labels, reference_mask, learned)
    ambiguous = torch.from_numpy(relation.ambiguous_mask)
    p_before, p_after = target_before.softmax(1), target_after.softmax(1)
    near = (
        [None] * len(labels)
        if nearness is None
        else functional.risk(nearness.T[labels], reference_mask).tolist()
    )
    cases = []
    for i, subject in enumerate(subjects):
        right, column = reference_mask[i], weight[:, labels[i]]
        of_reference = right.nonzero().flatten().tolist()
        kinds = {relation.target.completeness[t] for t in of_reference}
        cases.append(
            EditCase(
                subject=subject,
                source_answer=source[labels[i]] if answers is None else answers[i],
                reference="|".join(target[t] for t in of_reference),
                answer_before=target[before[i]],
                answer_after=target[after[i]],
                outcome=outcomes[i].value,
                source_learned=bool(learned[i]),
                weight_reference=_max(column[right]),
                weight_max=_max(column),
                weight_answer=number(column[after[i]].item()),
                prior_reference=_max(target_before[i, right]),
                prior_winner=number(target_before[i, after[i]].item()),
                probability_reference_before=number(p_before[i, right].sum().item()),
                probability_reference_after=number(p_after[i, right].sum().item()),
                vocabulary_risk=number(near[i]),
                cause=causes[i].value if outcomes[i] is Outcome.HALLUCINATED else "",
                completeness=next((kind.value for kind in Completeness if kind in kinds), ""),
                ambiguous=bool(ambiguous[after[i], labels[i]]) and not bool(right[after[i]]),
            )
        )
    return cases


def _max(values: Tensor) -> float | None:
    return number(values.max().item()) if len(values) else None


def case_statistics(cases: Sequence[EditCase]) -> dict[str, Any]:
    """Return numbers over all cases, as ``results.json`` has them.

    Of cases whose source was learned, ``weight_reference`` has number and median of W of the
    reference among generalized and among hallucinated ones, and the two-sided p of a Mann-Whitney
    test between them; ``causes`` are numbers of hallucinations; shares of the outcomes come by
    ``completeness`` of the reference's label (paper, table 18), and ``given_learned`` source.
    ``vocabulary`` has the share of edits whose answer is nearest to a ``right`` target label in the
    LM's head, and ``macro_right``, the mean over references; None for a head without rows.
    """

    def shares(group: Sequence[EditCase]) -> dict[str, Any]:
        return {"n": len(group), **functional.outcome_shares([case.outcome for case in group])}

    reference: dict[str, Any] = {
        outcome.value: [case.weight_reference for case in weighed_cases(cases, outcome)]
        for outcome in (Outcome.GENERALIZED, Outcome.HALLUCINATED)
    }
    p = None
    if all(reference.values()):
        p = number(scipy.stats.mannwhitneyu(*reference.values(), alternative="two-sided").pvalue)
    summary = {
        outcome: {"n": len(weights), "median": number(median(weights)) if weights else None}
        for outcome, weights in reference.items()
    }
    causes = Counter(case.cause for case in cases)
    wrong = [case.ambiguous for case in cases if case.outcome == Outcome.HALLUCINATED]
    known = [case for case in cases if case.vocabulary_risk is not None]
    near = [float((case.vocabulary_risk or 0.0) < 0) for case in known]
    macro = functional.macro_mean(near, [case.reference for case in known])
    by_kind = {
        kind.value: [case for case in cases if case.completeness == kind] for kind in Completeness
    }
    return {
        "vocabulary": {"right": fmean(near), "macro_right": macro} if near else None,
        "weight_reference": {**summary, "rank_test_p": p},
        "causes": {cause.value: causes[cause.value] for cause in Cause},
        "completeness": {kind: shares(group) for kind, group in by_kind.items() if group},
        "given_learned": shares([case for case in cases if case.source_learned]),
        "ambiguous_hallucinated": fmean(wrong) if wrong else None,
    }


def forecast_scores(cases: Sequence[EditCase]) -> dict[str, dict[str, float | None]] | None:
    """Return how well the nearest word forecasts which edits do not generalize.

    By name of the forecast, ``auroc`` is that of the `EditCase.vocabulary_risk` over all edits, and
    ``auroc_within`` over pairs of edits with the same reference; None if all edits, or none,
    generalized. The result is None for a head without rows.
    """
    known = [case for case in cases if case.vocabulary_risk is not None]
    if not known:
        return None
    risks = torch.tensor([case.vocabulary_risk for case in known], dtype=torch.float64)
    failed = torch.tensor([case.outcome != Outcome.GENERALIZED for case in known])
    within = functional.auroc_within(risks, failed, [case.reference for case in known])
    scores = {"auroc": number(functional.auroc(risks, failed)), "auroc_within": number(within)}
    return {DEFAULT_FORECAST: scores}


def weighed_cases(cases: Sequence[EditCase], outcome: Outcome) -> list[EditCase]:
    """Return the cases of an outcome whose source was learned and whose reference has a weight."""
    return [
        case
        for case in cases
        if case.outcome == outcome and case.source_learned and case.weight_reference is not None
    ]


class DomainLogits(NamedTuple):
    """Domain logits of an LM for some subjects, ``(n_subjects, n_labels)``, float64 on the CPU."""

    source: Tensor
    target: Tensor
    controls: tuple[Tensor, ...] = ()

    def rows(self, indices: Sequence[int]) -> DomainLogits:
        """Return the logits of some of the subjects."""
        chosen = list(indices)
        return DomainLogits(
            self.source[chosen], self.target[chosen], tuple(part[chosen] for part in self.controls)
        )

    @classmethod
    def stack(cls, parts: Sequence[tuple[Any, ...]]) -> DomainLogits:
        """Return the logits of the subjects of all parts, at least one."""
        source, target, controls = zip(*parts, strict=True)
        columns = zip(*controls, strict=True)
        return cls(torch.cat(source), torch.cat(target), tuple(map(torch.cat, columns)))


def find_controls(
    names: Sequence[str],
    relation: TokenizedRelation,
    catalogue: Catalogue,
    tokenizer: PreTrainedTokenizerBase,
) -> list[Domain]:
    """Return the controls that the vocabulary has labels for; source and target are none."""
    ends, domains = relation.name.split("->"), []
    for name in names:
        if name in ends:
            continue
        try:
            domains.append(TokenizedRelation.of(f"{ends[0]}->{name}", catalogue, tokenizer).target)
        except DomainError as error:
            rank_zero_warn(f"{name} is left out of the controls: {error}")
    return domains


def edit_means(
    before: DomainLogits,
    after: DomainLogits,
    reference_mask: Tensor,
    labels: Tensor | None,
    controls: Sequence[str],
) -> dict[str, float]:
    """Return the mean of every number of some edits, by log key; NaN where there is none.

    Of each edit, `reference_mask`, ``(n, n_target)`` bool, has the right target labels, and
    `labels`, ``(n,)``, the source label that it taught; they are None without edits. Logits of
    paraphrases of the source may follow those of the `controls`.
    """
    leading = before.target.argmax(1), after.target.argmax(1)
    codes = functional.outcome_codes(*leading, reference_mask)
    values = {f"generalization/{name}": codes == i for i, name in enumerate(Outcome)}
    if labels is not None:
        learned = after.source.argmax(1) == labels
        values["generalization/source_learned"] = learned
        for one in (Outcome.GENERALIZED, Outcome.HALLUCINATED):
            values[f"generalization/{one}_of_learned"] = (codes == one.code)[learned]
    probability = after.target.softmax(1)
    old = probability.gather(1, before.target.argmax(1, keepdim=True))
    values["probability/reference"] = (probability * reference_mask).sum(1)
    values["probability/old_answer"] = old[:, 0]
    for name, *pair in zip(controls, before.controls, after.controls, strict=False):
        values[f"control_unchanged/{name}"] = _same_answer(*pair)
    if paraphrases := after.controls[len(controls) :]:
        known = after.source.argmax(1) if labels is None else labels
        values["paraphrases/source_learned"] = torch.stack(paraphrases).argmax(2) == known
    means = {name: value.double().mean().item() for name, value in values.items()}
    scores = functional.reference_scores(
        [list(Outcome)[code] for code in codes.tolist()],
        [row.nonzero().flatten().tolist() for row in reference_mask],
    )
    return means | {f"generalization/{name}": value for name, value in scores.items()}


def neighbour_means(before: DomainLogits, after: DomainLogits) -> dict[str, float]:
    """Return how many subjects without an edit answer as before, by log key."""
    same = _same_answer(before.source, after.source), _same_answer(before.target, after.target)
    names = "neighbours/source_unchanged", "neighbours/target_unchanged"
    return {name: float(one.double().mean()) for name, one in zip(names, same, strict=True)}


def _same_answer(before: Tensor, after: Tensor) -> Tensor:
    return before.argmax(1) == after.argmax(1)


def outcome_values(
    relation: str,
    means: Mapping[str, float],
    reference_mask: Tensor,
    cases: Sequence[EditCase],
    counts: Mapping[str, int],
) -> dict[str, Any]:
    """Return what ``results.json`` has of edits, from their means and those of `counts` others."""
    groups: dict[str, dict[str, Any]] = {}
    for key, value in means.items():
        group, _, name = key.partition("/")
        groups.setdefault(group, {})[name] = number(value)
    shares, unchanged = groups["generalization"], groups.get("control_unchanged", {})
    macro = [name for name in shares if name.startswith("macro_")]
    forecast = forecast_scores(cases)
    return {
        "relation": relation,
        "n_edits": len(cases),
        "random": number(reference_mask.double().mean().item()),
        "macro": {name.removeprefix("macro_"): shares.pop(name) for name in macro},
        **shares,
        **{f"probability_{name}": value for name, value in groups["probability"].items()},
        "controls": {name: {"unchanged": value} for name, value in unchanged.items()},
        **{name: {**groups[name], "n": n} for name, n in counts.items() if name in groups},
        **case_statistics(cases),
        "forecast": forecast,
        "forecast_default": None if forecast is None else DEFAULT_FORECAST,
    }
