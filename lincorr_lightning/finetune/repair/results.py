"""Tables, figure and `Results` of a repair."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from matplotlib.figure import Figure as MatplotlibFigure
from matplotlib.ticker import PercentFormatter
from scipy.stats import binomtest

from lincorr_lightning.finetune.repair.batches import HELD_OUT, SHOWN, RepairDataset
from lincorr_lightning.functional import Outcome
from lincorr_lightning.results.results import Figure, Results
from lincorr_lightning.results.style import BLUE, GREY, ORANGE, bare_axes, finish, new_figure
from lincorr_lightning.results.table import Column, Table

_PARTS = (SHOWN, HELD_OUT)


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
    found: dict[str, dict[str, Any]] = {}
    for part in _PARTS:
        own = [edit for edit in edits if edit.part == part]
        if not own:
            continue
        n = len(own)
        found[part] = {
            "n": n,
            "source_learned": sum(edit.source_learned for edit in own) / n,
            **_outcome_shares(own),
            "right_before": sum(edit.right_before for edit in own) / n,
            "in_context": sum(edit.in_context for edit in own) / n,
            "random": sum(edit.random for edit in own) / n,
            "controls": {
                name: sum(edit.unchanged[name] for edit in own) / n for name in own[0].unchanged
            },
        }
        new = [edit for edit in own if not edit.target_shown]
        if new:
            found[part]["new_targets"] = {"n": len(new), **_outcome_shares(new)}
    return found


def _outcome_shares(edits: Sequence[MeasuredEdit]) -> dict[str, float]:
    return {o.value: sum(edit.outcome == o for edit in edits) / len(edits) for o in Outcome}


def repair_results(
    before: Sequence[MeasuredEdit],
    after: Sequence[MeasuredEdit],
    perplexity: Mapping[str, float],
    callback_results: Sequence[Results],
    lm: Mapping[str, Any],
    settings: Mapping[str, Any],
    n_steps: int,
    dataset: RepairDataset | None,
) -> Results:
    """Return the results of a repair.

    Args:
        before: Edits measured before the repair.
        after: The same edits after it.
        perplexity: Perplexity of other texts, ``before`` and ``after``.
        callback_results: Results of callbacks.
        lm: Description of the LM.
        settings: Settings of the run.
        n_steps: Optimizer steps of the repair.
        dataset: The examples, and the source answers of each part; None if unknown.
    """
    summaries = {"before": summarize_edits(before), "after": summarize_edits(after)}
    values: dict[str, Any] = {
        part: {stage: summaries[stage][part] for stage in summaries if part in summaries[stage]}
        for part in _PARTS
    }
    values |= {"perplexity": dict(perplexity), "n_steps": n_steps}
    for results in callback_results:
        values |= {key: value for key, value in results.values.items() if key not in values}
    tables = [_summary_table(summaries, perplexity), _edits_table(before, after)]
    if dataset is not None:
        tables += [_answers_table(dataset), _examples_table(dataset)]
    figures = [
        Figure(
            "repair",
            "Outcomes of edits before and after the repair.",
            partial(repair_figure, summaries),
        )
    ]
    return Results(
        "repair",
        values,
        tables=[*tables, *(table for results in callback_results for table in results.tables)],
        figures=[*figures, *(figure for results in callback_results for figure in results.figures)],
        lm=lm,
        settings=settings,
    )


def _summary_table(
    summaries: Mapping[str, Mapping[str, Mapping[str, Any]]], perplexity: Mapping[str, float]
) -> Table:
    controls = {
        name for parts in summaries.values() for one in parts.values() for name in one["controls"]
    }
    shares = ("source_learned", "generalized", "hallucinated")
    others = ("unchanged", "right_before", "in_context")
    rows = []
    for part in _PARTS:
        for stage, parts in summaries.items():
            if part not in parts:
                continue
            one = parts[part]
            rows.append(
                [part, stage, one["n"], *(one[name] for name in shares),
                 *hallucinated_interval(one), *(one[name] for name in others),
                 *(one["controls"][name] for name in sorted(controls)), perplexity.get(stage)]
            )  # fmt: skip
    return Table.from_rows(
        "repair",
        ["part", "stage", "n", *(Column(name, format=".0%") for name in shares),
         Column("hallucinated_low", "from", ".0%"), Column("hallucinated_high", "to", ".0%"),
         *(Column(name, format=".0%") for name in others),
         *(Column(f"{name}_unchanged", format=".0%") for name in sorted(controls)),
         Column("perplexity", format=".1f")],
        rows,
        "Edits before and after the repair: of source answers that are in the examples (shown), "
        "and of others (held_out).",
        "right_before: the reference leads without the edit. in_context: the LM gives it when the "
        "new answer is stated before the target prompt. from, to: interval of hallucinated, 95 % "
        "over edits (Wilson). "
        "perplexity: of other texts, those of the tiny world unless data.texts is set.",
        headline=True,
    )  # fmt: skip


def hallucinated_interval(summary: Mapping[str, Any]) -> tuple[float, float]:
    """Return the 95 % interval of the share of hallucinated edits, over edits (Wilson 1927)."""
    n = summary["n"]
    found = binomtest(round(summary["hallucinated"] * n), n).proportion_ci(method="wilson")
    return float(found.low), float(found.high)


def _answers_table(dataset: RepairDataset) -> Table:
    return Table.from_rows(
        "answers",
        ("answer", "part"),
        [(answer, part) for part, own in dataset.split.items() for answer in own],
        "Source answers of the examples (shown), and those held out.",
    )


def _examples_table(dataset: RepairDataset) -> Table:
    texts = dataset.relation.target.texts
    return Table.from_rows(
        "examples",
        ("subject", "source_answer", "reference"),
        [
            (edit.subject, edit.answer, "|".join(texts[i].strip() for i in edit.reference))
            for edit in dataset.examples
        ],
        "The examples that the repair trains on.",
    )


def _edits_table(before: Sequence[MeasuredEdit], after: Sequence[MeasuredEdit]) -> Table:
    names = (
        "subject", "source_answer", "reference", "answer_before", "answer_after", "outcome",
        "source_learned", "target_shown", "in_context",
    )  # fmt: skip
    controls = sorted({name for edit in before for name in edit.unchanged})
    return Table.from_rows(
        "cases",
        ["part", "stage", *names, *(f"{name}_unchanged" for name in controls)],
        [
            (
                e.part,
                stage,
                *(getattr(e, name) for name in names),
                *(e.unchanged[name] for name in controls),
            )
            for stage, edits in (("before", before), ("after", after))
            for e in edits
        ],
        "What each edit did, before and after the repair.",
    )


def repair_figure(summaries: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> MatplotlibFigure:
    """Draw the shares of the outcomes of each part, before and after."""
    rows = [
        (part, stage, parts[part])
        for part in _PARTS
        for stage, parts in summaries.items()
        if part in parts
    ]
    colours = {Outcome.GENERALIZED: BLUE, Outcome.HALLUCINATED: ORANGE, Outcome.UNCHANGED: GREY}
    figure = new_figure(
        7.5,
        0.5 * len(rows) + 0.7,
        "Outcomes of edits before and after the repair",
        "blue: generalized; orange: hallucinated; grey: unchanged",
    )
    axes = figure.add_subplot()
    for y, (_, _, one) in enumerate(rows):
        left = 0.0
        for outcome, colour in colours.items():
            share = one[outcome.value]
            axes.barh(y, share, left=left, height=0.62, color=colour, zorder=2)
            if share > 0.06:
                axes.text(left + share / 2, y, f"{share:.0%}", ha="center", va="center",
                          fontsize=9, color="white", zorder=3)  # fmt: skip
            left += share
    axes.set_yticks(
        range(len(rows)),
        [f"{part.replace('_', ' ')} ({one['n']}), {stage}" for part, stage, one in rows],
        fontsize=9.5,
    )
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set_xlim(0, 1)
    axes.xaxis.set_major_formatter(PercentFormatter(1))
    bare_axes(axes)
    return finish(figure)
