"""What each edit of a source did to its target, also by step (paper, section 5 and table 6)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from statistics import fmean, median
from typing import TYPE_CHECKING, Any

import scipy
import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor

from lincorr_lightning import functional
from lincorr_lightning.errors import DomainError
from lincorr_lightning.finetune.edit_files import SEPARATOR
from lincorr_lightning.finetune.edits import Edit, reference_mask, taught_labels
from lincorr_lightning.functional.outcomes import Cause, Outcome
from lincorr_lightning.functional.significance import jackknife_interval, mean_interval
from lincorr_lightning.knowledge import Catalogue, Completeness, Domain, TokenizedRelation
from lincorr_lightning.results.table import column, number

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

CONTROLS = ("color",)  #: Kinds of knowledge that an edit should not change, by default.
DEFAULT_FORECAST = "causal_inner_product"  #: Name of the forecast by the nearest word.
LEAK = "generalization/leak"
SPECIFIC = "generalization/specific"
BY_REFERENCE = (LEAK, SPECIFIC)  #: Numbers that are reported as means by reference.
CONTROL = "control_unchanged/"  #: Beginning of the keys of controls.
_LEARNED = "generalization/source_learned"
_GENERALIZED = "generalization/generalized"
SIDES = ("source", "target")

Logits = dict[str, Tensor]
"""What an LM answers about n subjects, by the name of a prompt (see `edit_domains`).

Domain logits are ``(n, n_labels)``, float64 on the CPU. ``others/target`` and, where they are read,
``others/source`` are the leading labels of m subjects without an edit, ``(n, m)``.
"""


def edit_domains(
    relation: TokenizedRelation,
    controls: Sequence[str],
    catalogue: Catalogue,
    tokenizer: PreTrainedTokenizerBase,
) -> dict[str, Domain]:
    """Return the prompts that an LM is measured at, by their names in `Logits`.

    They are ``source`` and ``target``, and the controls, of which those that the vocabulary has no
    labels for are left out, with a warning.
    """
    domains = {"source": relation.source, "target": relation.target}
    ends = relation.name.split("->")
    for name in controls:
        if name in ends:
            continue
        try:
            control = TokenizedRelation.of(f"{ends[0]}->{name}", catalogue, tokenizer)
            domains[f"{CONTROL}{name}"] = control.target
        except DomainError as error:
            rank_zero_warn(f"{name} is left out of the controls: {error}")
    return domains


def rows_of(logits: Logits, rows: Sequence[int]) -> Logits:
    """Return the logits of some of the subjects."""
    return {name: part[list(rows)] for name, part in logits.items()}


def concatenate(parts: Sequence[Logits]) -> Logits:
    """Return the logits of the subjects of all parts, at least one."""
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


@dataclass(frozen=True)
class EditAnswers:
    """What an LM answers about the subjects of n edits, before and after them.

    `labels`, ``(n,)``, are the source labels that the edits teach; `reference`, ``(n, n_target)``
    bool, has the target labels that are right for them.
    """

    before: Logits
    after: Logits
    labels: Tensor
    reference: Tensor

    @classmethod
    def of(cls, edits: Sequence[Edit], before: Logits, after: Logits) -> EditAnswers:
        """Return the answers about some edits, a row each."""
        reference = reference_mask(edits, before["target"].shape[1])
        return cls(before, after, taught_labels(edits), reference)

    @property
    def learned(self) -> Tensor:
        """Whether the new source answer leads after the edit, ``(n,)`` bool."""
        return self.after["source"].argmax(1) == self.labels

    @property
    def references(self) -> list[tuple[int, ...]]:
        """The right target labels of each edit."""
        return [tuple(row.nonzero().flatten().tolist()) for row in self.reference]

    @property
    def codes(self) -> Tensor:
        """The outcome of each edit, see `outcome_codes`, ``(n,)``."""
        before = self.before["target"].argmax(1)
        after = self.after["target"].argmax(1)
        return functional.outcome_codes(before, after, self.reference)

    @property
    def outcomes(self) -> list[Outcome]:
        """The outcome of each edit."""
        return [list(Outcome)[code] for code in self.codes.tolist()]

    def values(self) -> dict[str, Tensor]:
        """Return every measured number of each edit by log key, ``(n,)``.

        It is NaN where it does not exist. A number that is added here is logged, and is in
        ``results.json``.
        """
        codes = self.codes
        learned = self.learned
        probability = self.after["target"].softmax(1)
        old_answer = self.before["target"].argmax(1, keepdim=True)
        has = {outcome: (codes == outcome.code).double() for outcome in Outcome}
        values = {f"generalization/{outcome}": hits for outcome, hits in has.items()}
        values["generalization/source_learned"] = learned
        for outcome in (Outcome.GENERALIZED, Outcome.HALLUCINATED):
            of_learned = has[outcome].where(learned, torch.nan)
            values[f"generalization/{outcome}_of_learned"] = of_learned
        values["probability/reference"] = (probability * self.reference).sum(1)
        values["probability/old_answer"] = probability.gather(1, old_answer)[:, 0]
        for name in self.after:
            if name.startswith(CONTROL):
                values[name] = self.before[name].argmax(1) == self.after[name].argmax(1)
        for side in SIDES:
            if (key := f"others/{side}") in self.after:
                same = self.before[key] == self.after[key]
                values[f"neighbours/{side}_unchanged"] = same.double().mean(1)
        if (key := "others/target") in self.after:
            values[LEAK] = functional.leaks(self.before[key], self.after[key], self.reference)
            values[SPECIFIC] = has[Outcome.GENERALIZED] - values[LEAK]
        return {key: value.double() for key, value in values.items()}

    def means(self) -> dict[str, float]:
        """Return the mean of every number by log key, and what shares are compared with.

        Leak and specific are means by reference.
        """
        references = self.references
        means = {
            key: functional.macro_mean(value.tolist(), references)
            if key in BY_REFERENCE
            else value.nanmean().item()
            for key, value in self.values().items()
        }
        scores = functional.reference_scores(self.outcomes, references)
        return means | {f"generalization/{name}": score for name, score in scores.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class EditCase:
    """What one edit did, a row of the table ``cases``; numbers are None where they do not exist.

    Weights stand in W's column of the source answer, priors are target logits before training. Of
    several labels in the reference, the highest weight and prior count, and the most complete one.
    """

    subject: str
    source_answer: str = column("taught")
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
    nearest_risk: float | None = column("risk by the nearest word", ".3f")
    """How much nearer a wrong target label is to the answer than a right one, in the LM's head."""
    leak: float | None = column("", ".0%")  #: See `leaks`.
    cause: str  #: A value of `Cause` for a hallucination, else empty.
    completeness: str = ""  #: A value of `Completeness`; empty without a reference.


def edit_cases(
    relation: TokenizedRelation,
    edits: Sequence[Edit],
    answers: EditAnswers,
    weight: Tensor,
    nearness: Tensor | None = None,
) -> list[EditCase]:
    """Return the case of each of n edits.

    W and the `nearness` of labels are ``(n_target, n_source)``.
    """
    reference = answers.reference
    labels = answers.labels
    before, after = answers.before["target"], answers.after["target"]
    winners = after.argmax(1, keepdim=True)
    weights = weight.T[labels]
    causes = functional.attribute_causes(weight, labels, reference, answers.learned)
    risks = None if nearness is None else functional.risk(nearness.T[labels], reference)

    def best(scores: Tensor) -> Tensor:
        return scores.masked_fill(~reference, -torch.inf).amax(1)

    unknown = torch.full((len(edits),), torch.nan)
    numbers = {
        "weight_reference": best(weights),
        "weight_answer": weights.gather(1, winners)[:, 0],
        "weight_max": weights.amax(1),
        "prior_reference": best(before),
        "prior_winner": before.gather(1, winners)[:, 0],
        "probability_reference_before": (before.softmax(1) * reference).sum(1),
        "probability_reference_after": (after.softmax(1) * reference).sum(1),
        "nearest_risk": unknown if risks is None else risks,
        "leak": answers.values().get(LEAK, unknown),
    }
    texts = relation.target.texts
    kinds = relation.target.completeness
    cases = []
    for i, (edit, outcome) in enumerate(zip(edits, answers.outcomes, strict=True)):
        right = reference[i].nonzero().flatten().tolist()
        kinds_of_right = {kinds[label] for label in right}
        cases.append(
            EditCase(
                subject=edit.subject,
                source_answer=edit.answer,
                reference=SEPARATOR.join(texts[label] for label in right),
                answer_before=texts[before[i].argmax()],
                answer_after=texts[winners[i, 0]],
                outcome=outcome.value,
                source_learned=bool(answers.learned[i]),
                **{name: number(values[i].item()) for name, values in numbers.items()},
                cause=causes[i].value if outcome is Outcome.HALLUCINATED else "",
                completeness=next((k.value for k in Completeness if k in kinds_of_right), ""),
            )
        )
    return cases


def case_statistics(cases: Sequence[EditCase]) -> dict[str, Any]:
    """Return numbers over all cases, as ``results.json`` has them.

    ``weight_reference`` is that of cases whose source was learned, by outcome, with the two-sided p
    of a Mann-Whitney test; ``causes`` are numbers of hallucinations; ``completeness`` is that of
    the reference's label (paper, table 18). ``nearest`` has the share of edits whose answer is
    nearest to a ``right`` target label in the LM's head, ``macro``, the mean over references, and
    under ``wrong`` what became of the others. ``forecast`` says how well this forecasts which edits
    do not generalize: ``auroc`` is over all edits that were not right before, with its interval
    over references, and ``auroc_within`` over pairs of edits with the same reference; None if all
    of them, or none, generalized. Both are None for a head without rows. ``above_best_baseline``
    has the edits that were not right before, in means over references.
    """
    weights = {
        outcome: [
            case.weight_reference
            for case in cases
            if case.outcome == outcome and case.source_learned and case.weight_reference is not None
        ]
        for outcome in (Outcome.GENERALIZED, Outcome.HALLUCINATED)
    }
    p = None
    if all(weights.values()):
        p = number(scipy.stats.mannwhitneyu(*weights.values(), alternative="two-sided").pvalue)
    by_outcome: dict[str, Any] = {
        outcome.value: {"n": len(values), "median": number(median(values)) if values else None}
        for outcome, values in weights.items()
    }
    causes = Counter(case.cause for case in cases)
    kinds = {kind: [case for case in cases if case.completeness == kind] for kind in Completeness}
    return {
        "weight_reference": {**by_outcome, "rank_test_p": p},
        "causes": {cause.value: causes[cause.value] for cause in Cause},
        "completeness": {kind.value: _shares(group) for kind, group in kinds.items() if group},
        **_nearest_word_scores(cases),
        "above_best_baseline": _above_best_baseline(cases),
    }


def _shares(group: Sequence[EditCase]) -> dict[str, Any]:
    n = len(group)
    counts = Counter(case.outcome for case in group)
    return {"n": n, **{each.value: counts[each] / n if n else None for each in Outcome}}


def _above_best_baseline(cases: Sequence[EditCase]) -> dict[str, Any] | None:
    judged = [case for case in cases if case.reference and case.outcome != Outcome.RIGHT_BEFORE]
    if not judged:
        return None
    references = [case.reference for case in judged]
    labels = {reference: reference.split(SEPARATOR) for reference in references}
    ((constant, _),) = Counter(chain.from_iterable(labels.values())).most_common(1)
    hits = {"constant": [float(constant in labels[reference]) for reference in references]}
    risks = [case.nearest_risk for case in judged]
    if None not in risks:
        hits[DEFAULT_FORECAST] = [float(risk < 0) for risk in risks]  # type: ignore[operator]
    hits["generalized"] = [float(case.outcome == Outcome.GENERALIZED) for case in judged]
    macro = {name: functional.macro_mean(each, references) for name, each in hits.items()}
    best = max([*hits][:-1], key=lambda name: macro[name])
    difference = torch.tensor(hits["generalized"]) - torch.tensor(hits[best])
    return {
        "baseline": best,
        "macro": macro[best],
        "generalized": macro["generalized"],
        **interval_by_reference(difference, references),
    }


def _nearest_word_scores(cases: Sequence[EditCase]) -> dict[str, Any]:
    known = [case for case in cases if case.nearest_risk is not None]
    if not known:
        return dict.fromkeys(("nearest", "vocabulary", "forecast", "forecast_default"))
    is_right = [case.nearest_risk < 0 for case in known]  # type: ignore[operator]
    macro = functional.macro_mean(list(map(float, is_right)), [case.reference for case in known])
    wrong = [case for case, right in zip(known, is_right, strict=True) if not right]
    right = fmean(is_right)
    return {
        "nearest": {"right": right, "macro": macro, "wrong": _shares(wrong)},
        "vocabulary": {"right": right, "macro_right": macro},  # as earlier versions
        "forecast": {DEFAULT_FORECAST: _forecast_scores(known)},
        "forecast_default": DEFAULT_FORECAST,
    }


def _forecast_scores(cases: Sequence[EditCase]) -> dict[str, float | None]:
    """Return the AUROC of the nearest word's risk, with intervals over references."""
    cases = [case for case in cases if case.outcome != Outcome.RIGHT_BEFORE]
    risks = torch.tensor([case.nearest_risk for case in cases], dtype=torch.float64)
    failed = torch.tensor([case.outcome != Outcome.GENERALIZED for case in cases])
    references = [case.reference for case in cases]
    distinct = list(dict.fromkeys(references))
    pairs = set(zip(references, failed.tolist(), strict=True))
    mixed = [each for each in distinct if {(each, True), (each, False)} <= pairs]
    everyone = list(range(len(cases)))
    scores: dict[str, float | None] = {}
    for name, units, groups in (
        ("auroc", distinct, [""] * len(cases)),
        ("auroc_within", mixed, references),
    ):
        rows_without = ([i for i in everyone if references[i] != unit] for unit in units)
        value, *without = (
            functional.auroc_within(risks[rows], failed[rows], [groups[i] for i in rows])
            for rows in chain([everyone], rows_without)
        )
        low, high = jackknife_interval(value, torch.tensor(without, dtype=torch.float64))
        # min and max keep their first argument where it is NaN.
        ends = {f"{name}_low": max(low, 0.0), f"{name}_high": min(high, 1.0)}
        scores |= {key: number(x) for key, x in {name: value, **ends}.items()}
    return scores


def outcome_values(
    relation: str, answers: EditAnswers, cases: Sequence[EditCase], n_others: int
) -> dict[str, Any]:
    """Return what ``results.json`` has of edits; `n_others` is the number of other subjects."""
    groups: dict[str, dict[str, Any]] = {}
    for key, value in answers.means().items():
        group, name = key.split("/", 1)
        groups.setdefault(group, {})[name] = number(value)
    shares = groups["generalization"]
    macro = [name for name in shares if name.startswith("macro_")]
    values = answers.values()
    of_others = {
        key.partition("/")[2]: interval_by_reference(values[key], answers.references)
        if key in values and cases
        else None
        for key in (SPECIFIC, LEAK)
    }
    return {
        "relation": relation,
        "n_edits": len(cases),
        "random": number(answers.reference.double().mean().item()),
        "macro": {name.removeprefix("macro_"): shares.pop(name) for name in macro},
        **shares,
        **of_others,
        **{f"probability_{name}": value for name, value in groups["probability"].items()},
        "controls": {
            name: {"unchanged": share} for name, share in groups.get(CONTROL[:-1], {}).items()
        },
        "n_others": n_others,
        **({"neighbours": {**groups["neighbours"], "n": n_others}} if n_others else {}),
        **case_statistics(cases),
    }


StepValues = tuple[list[int], dict[str, Tensor]]
"""Numbers of some edits after a step: their positions in the run, and ``(n,)`` by key."""


def step_values(ids: Sequence[int], values: Mapping[str, Tensor]) -> StepValues:
    """Return those numbers of edits that are reported by step."""
    keys = (_LEARNED, _GENERALIZED, *BY_REFERENCE)
    return list(ids), {k: x for k, x in values.items() if k in keys or k.startswith(CONTROL)}


def interval_by_reference(values: Tensor, references: Sequence[Hashable]) -> dict[str, Any]:
    """Return the mean by reference of a number of each edit, and its 95 % interval over them."""
    means = torch.tensor(functional.group_means(values.tolist(), references), dtype=torch.float64)
    low, high = mean_interval(means)
    return {"mean": number(means.mean().item()), "low": number(low), "high": number(high)}


def row_at_learned(
    by_step: Mapping[int, StepValues], references: Sequence[Hashable]
) -> dict[str, Any] | None:
    """Return the `step_row` of each edit at its first step with the source learned.

    Edits that were never learned do not count, and ``step`` is a mean; None if none was learned.
    """
    steps: dict[int, int] = {}
    taken: dict[str, list[Tensor]] = {}
    for step, (ids, values) in sorted(by_step.items()):
        for row, edit in enumerate(ids):
            if edit not in steps and values[_LEARNED][row]:
                steps[edit] = step
                for key, column_ in values.items():
                    taken.setdefault(key, []).append(column_[row])
    if not steps:
        return None
    numbers = list(steps), {key: torch.stack(rows) for key, rows in taken.items()}
    return step_row(sum(steps.values()) / len(steps), numbers, references)


def step_row(step: float, numbers: StepValues, references: Sequence[Hashable]) -> dict[str, Any]:
    """Return what edits did after a step, see `StepRow`; ``controls`` is a mapping.

    `references` are those of all edits of the run, by their position.
    """
    ids, values = numbers
    groups = [references[edit] for edit in ids]
    shares = {key: number(x.nanmean().item()) for key, x in values.items()}
    macro = {key: number(functional.macro_mean(x.tolist(), groups)) for key, x in values.items()}
    specific = interval_by_reference(values[SPECIFIC], groups) if SPECIFIC in values else {}
    return {
        "step": step,
        "n_edits": len(ids),
        "source_learned": shares[_LEARNED],
        "generalized": shares[_GENERALIZED],
        "macro_generalized": macro[_GENERALIZED],
        "leak": macro.get(LEAK),
        "specific": specific.get("mean"),
        "specific_low": specific.get("low"),
        "specific_high": specific.get("high"),
        "controls": {
            key.removeprefix(CONTROL): share
            for key, share in shares.items()
            if key.startswith(CONTROL)
        },
    }
