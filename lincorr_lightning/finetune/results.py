"""What edits of a source did to its target, case by case, and all forms in which it is told."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import astuple, dataclass, fields
from functools import partial
from itertools import chain, zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from lincorr_lightning.functional.outcomes import Outcome
from lincorr_lightning.io import write_csv
from lincorr_lightning.knowledge import Completeness
from lincorr_lightning.results.base import Drawings, Pictured
from lincorr_lightning.results.numbers import number
from lincorr_lightning.results.tables import markdown_table

if TYPE_CHECKING:
    from lincorr_lightning.knowledge import TokenizedRelation

_FLOATS = npt.NDArray[np.floating[Any]]

IMPRECISE, LOW_PRIOR = "imprecise W", "low prior"
NOT_LEARNED = "source not learned"
_MARKS = {Outcome.GENERALIZED: " ✓", Outcome.HALLUCINATED: " ✗", Outcome.UNCHANGED: ""}


@dataclass(frozen=True, slots=True)
class EditCase:
    """What one edit did (paper, table 6). Numbers are None where there are none.

    Attributes:
        subject: X.
        source_answer: What the LM was taught of it, or says of it where it was taught nothing.
        reference: Labels that are then right in the target, joined by ``|``.
        answer_before: The target's label before training.
        answer_after: The same after it.
        outcome: As in `Outcome`.
        source_learned: Whether the LM gives the source answer that it was taught.
        weight_reference: Highest W among right labels, in the column of the source answer's label.
        weight_answer: W of `answer_after` in that column.
        weight_max: The column's maximum.
        prior_reference: Highest target logit before training among right labels.
        prior_winner: Target logit before training of `answer_after`.
        probability_reference_before: Of all right labels, in a softmax over the target's labels.
        probability_reference_after: The same after training.
        cause: Of a hallucination, ``imprecise W`` or ``low prior``, or ``source not learned``,
            where W has nothing to answer for; else empty.
        completeness: How much the label of the reference says of it: ``whole``, ``phrase`` or
            ``subword``; of several right labels the one that says most. Empty without a reference.
    """

    subject: str
    source_answer: str
    reference: str
    answer_before: str
    answer_after: str
    outcome: str
    source_learned: bool
    weight_reference: float | None
    weight_answer: float | None
    weight_max: float | None
    prior_reference: float | None
    prior_winner: float | None
    probability_reference_before: float | None
    probability_reference_after: float | None
    cause: str
    completeness: str = ""


COLUMNS = tuple(field.name for field in fields(EditCase))


@dataclass(frozen=True)
class EditReport(Pictured):
    """All cases of a run.

    Attributes:
        cases: In the order of the edits.
        relation: As ``city->country``.
        numbers: Of cases whose source was learned, ``weight_reference`` (n and median in
            generalized and in hallucinated ones, p of a Mann-Whitney test between them) and
            ``given_learned`` (share of each outcome); ``causes`` of hallucinations; outcomes by
            ``completeness`` of the reference's label; as JSON has them.
        random: Share of edits that a random label would be right for; None without cases.
        taught: Whether the LM was taught anything; else its subjects were watched only.
    """

    cases: tuple[EditCase, ...]
    relation: str
    numbers: dict[str, Any]
    random: float | None
    taught: bool

    @classmethod
    def of(
        cls,
        asked: TokenizedRelation,
        subjects: Sequence[str],
        answers: Sequence[str] | None,
        labels: Sequence[int],
        right: npt.NDArray[np.bool_],
        target_before: _FLOATS,
        target_after: _FLOATS,
        outcomes: Sequence[Outcome],
        learned: Sequence[bool],
        weight: _FLOATS,
    ) -> EditReport:
        """Put the cases together.

        Args:
            asked: The relation, n_source and n_target labels.
            subjects: X of each edit, n of them.
            answers: What was taught of each; None if subjects were watched without edits.
            labels: Index of each answer's label in the source.
            right: Which target labels are right for each edit, ``(n, n_target)``.
            target_before: Target logits before training, ``(n, n_target)``.
            target_after: The same after it.
            outcomes: What became of each.
            learned: Whether the source answer was learned.
            weight: W, ``(n_target, n_source)``.
        """
        source, target = asked.source.texts, asked.target.texts
        kinds = asked.target.completeness
        before, after = target_before.argmax(1), target_after.argmax(1)
        chance_before, chance_after = _softmax(target_before), _softmax(target_after)
        cases = []
        for i, subject in enumerate(subjects):
            rights, column = right[i], weight[:, labels[i]]
            hallucinated = outcomes[i] is Outcome.HALLUCINATED
            cases.append(
                EditCase(
                    subject=subject,
                    source_answer=source[labels[i]] if answers is None else answers[i],
                    reference="|".join(target[t] for t in np.flatnonzero(rights)),
                    answer_before=target[before[i]],
                    answer_after=target[after[i]],
                    outcome=outcomes[i].value,
                    source_learned=bool(learned[i]),
                    weight_reference=_highest(column[rights]),
                    weight_answer=number(column[after[i]]),
                    weight_max=_highest(column),
                    prior_reference=_highest(target_before[i, rights]),
                    prior_winner=number(target_before[i, after[i]]),
                    probability_reference_before=number(chance_before[i, rights].sum()),
                    probability_reference_after=number(chance_after[i, rights].sum()),
                    cause=_cause(column, rights, bool(learned[i])) if hallucinated else "",
                    completeness=_most_complete(kinds, rights),
                )
            )
        random = number(right.mean()) if right.size else None
        return cls(tuple(cases), asked.name, _numbers(cases), random, answers is not None)

    def write(self, folder: str | Path, suffix: str = "") -> None:
        """Write ``tables/cases.csv`` and the figures.

        Args:
            folder: The run's folder.
            suffix: Behind the files' names, where another report takes these.

        Raises:
            OutputError: It cannot be written.
        """
        folder = Path(folder)
        write_csv(folder / "tables" / f"cases{suffix}.csv", COLUMNS, map(astuple, self.cases))
        self.write_pictures(folder, suffix)

    def drawings(self) -> Drawings:
        """The figures, by their file names without suffix."""
        from lincorr_lightning.finetune import figures as edit_figures

        return {
            "reference_weights": partial(edit_figures.reference_weights_figure, self),
            "outcomes": partial(edit_figures.outcomes_figure, self),
        }

    def of_outcome(self, outcome: Outcome) -> list[EditCase]:
        """The cases that ended so."""
        return [case for case in self.cases if case.outcome == outcome]

    def markdown(self, limit: int = 30) -> str:
        """The case table (paper, table 6), hallucinations first; right answers are ticked.

        Args:
            limit: How many cases it shows at most; each outcome gets its share of them.
        """
        order = (Outcome.HALLUCINATED, Outcome.GENERALIZED, Outcome.UNCHANGED)
        groups = [self.of_outcome(outcome) for outcome in order]
        # In turn, so that many hallucinations do not hide all that went well.
        in_turn = [case for case in chain.from_iterable(zip_longest(*groups)) if case is not None]
        shown = sorted(in_turn[:limit], key=lambda case: order.index(Outcome(case.outcome)))
        table = markdown_table(
            ("subject", "taught" if self.taught else "source", "reference", "before", "after",
             "W of reference", "W of answer", "maximum of W", "logit of reference before",
             "logit of answer before", "p of reference before", "after training", "cause"),
            [_line(case) for case in shown],
        )  # fmt: skip
        n = len(self.cases)
        note = "" if len(shown) == n else f"\n\n{len(shown)} of {n} cases; all: tables/cases.csv"
        return table + note


def _line(case: EditCase) -> list[Any]:
    answer_after = case.answer_after + _MARKS[Outcome(case.outcome)]
    return [
        case.subject, case.source_answer, case.reference, case.answer_before, answer_after,
        case.weight_reference, case.weight_answer, case.weight_max,
        case.prior_reference, case.prior_winner,
        case.probability_reference_before, case.probability_reference_after, case.cause,
    ]  # fmt: skip


def _cause(column: _FLOATS, right: npt.NDArray[np.bool_], learned: bool) -> str:
    """Why a target went wrong (paper, section 5).

    Args:
        column: W of each target label for the source answer, ``(n_target,)``.
        right: Which of them are right.
        learned: Whether the source went where it was to go.

    Returns:
        ``imprecise W`` if some wrong label has a higher weight than every right one: moving the
        source moves the wrong label more. Else ``low prior``: the reference was moved most, and
        began too far behind.
    """
    if not learned:
        return NOT_LEARNED
    wrong = column[~right].max(initial=-np.inf)
    return IMPRECISE if wrong > column[right].max(initial=-np.inf) else LOW_PRIOR


def _most_complete(kinds: Sequence[Completeness], right: npt.NDArray[np.bool_]) -> str:
    found = {kinds[int(t)] for t in np.flatnonzero(right)}
    return next((str(kind) for kind in Completeness if kind in found), "")


def _by_completeness(cases: Sequence[EditCase]) -> dict[str, dict[str, float | int]]:
    """How many generalized, by what the label of the reference says of it (paper, table 18)."""
    outcomes: dict[str, list[str]] = {}
    for kind in Completeness:
        mine = [case.outcome for case in cases if case.completeness == kind]
        if mine:
            outcomes[str(kind)] = mine
    return {
        kind: {"n": len(mine), **{o.value: mine.count(o) / len(mine) for o in Outcome}}
        for kind, mine in outcomes.items()
    }


def _numbers(cases: Sequence[EditCase]) -> dict[str, Any]:
    weights = {
        outcome: [
            case.weight_reference
            for case in cases
            if case.outcome == outcome and case.source_learned and case.weight_reference is not None
        ]
        for outcome in (Outcome.GENERALIZED, Outcome.HALLUCINATED)
    }
    found: dict[str, Any] = {
        outcome.value: {"n": len(w), "median": number(float(np.median(w))) if w else None}
        for outcome, w in weights.items()
    }
    found["rank_test_p"] = _rank_test(*weights.values())
    causes = Counter(case.cause for case in cases)
    learned = [case.outcome for case in cases if case.source_learned]
    return {
        "weight_reference": found,
        "causes": {cause: causes[cause] for cause in (IMPRECISE, LOW_PRIOR, NOT_LEARNED)},
        "completeness": _by_completeness(cases),
        "given_learned": {
            "n": len(learned),
            **{o.value: learned.count(o) / len(learned) if learned else None for o in Outcome},
        },
    }


def _rank_test(one: Sequence[float], other: Sequence[float]) -> float | None:
    """Two-sided p of a Mann-Whitney test; None if a side is empty."""
    if not one or not other:
        return None
    from scipy.stats import mannwhitneyu

    return number(mannwhitneyu(one, other, alternative="two-sided").pvalue)


def _highest(values: _FLOATS) -> float | None:
    return number(values.max()) if values.size else None


def _softmax(logits: _FLOATS) -> _FLOATS:
    powers = np.exp(logits - logits.max(axis=1, keepdims=True))
    return powers / powers.sum(axis=1, keepdims=True)
