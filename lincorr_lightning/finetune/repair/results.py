"""Tables, figure and `Results` of a repair."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import fmean
from typing import TYPE_CHECKING, Any

from lincorr_lightning.finetune.repair.batches import HELD_OUT, SHOWN, RepairDataset
from lincorr_lightning.functional import Outcome
from lincorr_lightning.results.results import Figure, Results
from lincorr_lightning.results.table import Table

if TYPE_CHECKING:
    from matplotlib.figure import Figure as MatplotlibFigure

_PARTS = {SHOWN: "answers of the repair's examples", HELD_OUT: "other answers"}
_OUTCOMES = [outcome.value for outcome in Outcome]


@dataclass(frozen=True)
class MeasuredEdit:
    """What one edit did, before or after the repair.

    Attributes:
        part: ``shown`` or ``held_out``.
        number: Its position among the edits of this part.
        subject: The subject.
        source_answer: The source answer that was taught.
        reference: Target labels in the reference, joined by ``|``.
        answer_before: Target label that leads before the edit.
        answer_after: Target label that leads after it.
        outcome: A value of `Outcome`.
        source_learned: Whether the taught label leads after the edit.
        target_shown: Whether an example has a target label of its reference.
        in_context: Whether the LM gives the reference when the new answer is stated before the
            target prompt, without an edit.
        random: Share of the target labels that are in the reference.
        unchanged: Whether the leading label of each control stayed.
    """

    part: str
    number: int
    subject: str
    source_answer: str
    reference: str
    answer_before: str
    answer_after: str
    outcome: str
    source_learned: bool
    target_shown: bool
    in_context: bool
    random: float
    unchanged: dict[str, bool]

    @property
    def right_before(self) -> bool:
        """Whether the reference leads without the edit, which then shows nothing."""
        return self.answer_before in self.reference.split("|")


def summarize_edits(edits: Sequence[MeasuredEdit]) -> dict[str, dict[str, Any]]:
    """Return the shares of each part's edits.

    Returns:
        Part -> ``n``, ``source_learned``, ``generalized``, ``hallucinated``, ``unchanged``,
        ``right_before``, ``in_context``, ``random``, ``controls``, the share of unchanged answers
        by kind of knowledge, and ``new_targets``, the same outcomes of those edits whose target no
        example has. Parts without edits are left out.
    """
    summaries: dict[str, dict[str, Any]] = {}
    for part in _PARTS:
        group = [edit for edit in edits if edit.part == part]
        if not group:
            continue
        shares = ("source_learned", "right_before", "in_context", "random")
        summaries[part] = {
            "n": len(group),
            **{name: fmean(getattr(edit, name) for edit in group) for name in shares},
            **_outcome_shares(group),
            "controls": {
                name: fmean(edit.unchanged[name] for edit in group) for name in group[0].unchanged
            },
        }
        new = [edit for edit in group if not edit.target_shown]
        if new:
            summaries[part]["new_targets"] = {"n": len(new), **_outcome_shares(new)}
    return summaries


def _outcome_shares(edits: Sequence[MeasuredEdit]) -> dict[str, float]:
    return {name: fmean(edit.outcome == name for edit in edits) for name in _OUTCOMES}


def repair_results(
    before: Sequence[MeasuredEdit],
    after: Sequence[MeasuredEdit],
    perplexity: Mapping[str, float],
    n_steps: int,
    dataset: RepairDataset | None,
    measured: Sequence[Results] = (),
) -> Results:
    """Return the results of a repair.

    Args:
        before: Edits measured before the repair.
        after: The same edits after it.
        perplexity: Perplexity of other texts, ``before`` and ``after``.
        n_steps: Optimizer steps of the repair.
        dataset: The examples, and the source answers of each part; None if unknown.
        measured: Results of callbacks, whose values stand among the repair's own.
    """
    summaries = {"before": summarize_edits(before), "after": summarize_edits(after)}
    rows = [
        {"part": part, "stage": stage, **parts[part]}
        for part in _PARTS
        for stage, parts in summaries.items()
        if part in parts
    ]
    tables = [_summary_table(rows, perplexity), _edits_table(before, after)]
    if dataset is not None:
        answers = [(answer, part) for part, texts in dataset.split.items() for answer in texts]
        texts = dataset.relation.target.texts
        examples = [
            (edit.subject, edit.answer, "|".join(texts[i].strip() for i in edit.reference))
            for edit in dataset.examples
        ]
        tables += [
            Table.of("answers", answers, ("answer", "part"),
                     "Source answers of the examples (shown), and those held out."),
            Table.of("examples", examples, ("subject", "source_answer", "reference"),
                     "The examples that the repair trains on."),
        ]  # fmt: skip
    values = {
        **{part: {one: summaries[one][part] for one in summaries if part in summaries[one]}
           for part in _PARTS},
        "perplexity": dict(perplexity),
        "n_steps": n_steps,
    }  # fmt: skip
    for one in measured:
        values = {**one.values, **values}
    caption = "Outcomes of edits before and after the repair."
    figure = Figure("repair", caption, partial(repair_figure, rows))
    included = [replace(one, values={}) for one in measured]
    return Results("repair", values, tables=tables, figures=[figure], included=included)


def _summary_table(rows: Sequence[Mapping[str, Any]], perplexity: Mapping[str, float]) -> Table:
    controls = sorted({f"{name}_unchanged" for row in rows for name in row["controls"]})
    shares = [
        "source_learned", "generalized", "hallucinated", "hallucinated_low", "hallucinated_high",
        "unchanged", "right_before", "in_context", *controls,
    ]  # fmt: skip
    cells = []
    for row in rows:
        low, high = hallucinated_interval(row)
        interval = {"hallucinated_low": low, "hallucinated_high": high}
        kept = {f"{name}_unchanged": share for name, share in row["controls"].items()}
        cells.append({**row, **interval, **kept, "perplexity": perplexity.get(row["stage"])})
    return Table.of(
        "repair", cells, ["part", "stage", "n", *shares, "perplexity"],
        "Edits before and after the repair: of source answers that are in the examples (shown), "
        "and of others (held_out).",
        "right_before: the reference leads without the edit. in_context: the LM gives it when the "
        "new answer is stated before the target prompt. from, to: interval of hallucinated, 95 % "
        "over edits (Wilson). "
        "perplexity: of other texts, those of the tiny world unless data.texts is set.",
        headline=True,
        headings={"hallucinated_low": "from", "hallucinated_high": "to"},
        formats={**dict.fromkeys(shares, ".0%"), "perplexity": ".1f"},
    )  # fmt: skip


def hallucinated_interval(summary: Mapping[str, Any]) -> tuple[float, float]:
    """Return the 95 % interval of the share of hallucinated edits, over edits (Wilson 1927)."""
    from scipy.stats import binomtest

    n = summary["n"]
    interval = binomtest(round(summary["hallucinated"] * n), n).proportion_ci(method="wilson")
    return float(interval.low), float(interval.high)


def _edits_table(before: Sequence[MeasuredEdit], after: Sequence[MeasuredEdit]) -> Table:
    names = [
        "subject", "source_answer", "reference", "answer_before", "answer_after", "outcome",
        "source_learned", "target_shown", "in_context",
    ]  # fmt: skip
    controls = sorted({name for edit in before for name in edit.unchanged})
    rows = [
        [edit.part, stage, *(getattr(edit, name) for name in names),
         *(edit.unchanged[name] for name in controls)]
        for stage, edits in (("before", before), ("after", after)) for edit in edits
    ]  # fmt: skip
    return Table.of(
        "cases", rows, ["part", "stage", *names, *(f"{name}_unchanged" for name in controls)],
        "What each edit did, before and after the repair.",
    )  # fmt: skip


def repair_figure(rows: Sequence[Mapping[str, Any]]) -> MatplotlibFigure:
    """Draw the shares of the outcomes of each part, before and after."""
    from pandas import DataFrame

    from lincorr_lightning.results.plots import bars

    parts = [
        {"outcome": name, "edits": f"{_PARTS[row['part']]} ({row['n']}), {row['stage']}",
         "share": row[name]}
        for name in _OUTCOMES for row in rows
    ]  # fmt: skip
    return bars(
        DataFrame(parts, columns=["outcome", "edits", "share"]), "outcome", "share", "edits",
        title="Outcomes of edits before and after the repair", label="share of edits",
    )  # fmt: skip
