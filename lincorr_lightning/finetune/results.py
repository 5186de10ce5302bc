"""Tables, figures and `Results` of edits."""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from lincorr_lightning.finetune import figures as drawing
from lincorr_lightning.finetune.by_step import peak_sentence
from lincorr_lightning.finetune.cases import DEFAULT_FORECAST, EditCase
from lincorr_lightning.finetune.edit_files import SEPARATOR, RawEdit
from lincorr_lightning.finetune.edits import ResolvedEdits, skip_counts
from lincorr_lightning.functional.outcomes import Outcome
from lincorr_lightning.results.plots import training_curves
from lincorr_lightning.results.results import Figure, Results
from lincorr_lightning.results.table import Mean, Table, column, columns_of, history_table

_OUTCOMES = [outcome.value for outcome in Outcome]
OUTCOME_MEANS: Mapping[str, Mean] = {
    **{outcome: Mean("outcome", outcome) for outcome in _OUTCOMES},
    **{f"macro_{outcome}": Mean("outcome", outcome, per="reference") for outcome in _OUTCOMES},
    "source_learned": Mean("source_learned"),
}
"""Numbers that are means over a table of edits."""
_CONTRACT = (
    "source_learned",
    *_OUTCOMES,
    "specific",
    "leak",
    "by_step",
    "at_learned",
    "nearest",
    "random",
    "constant",
    "macro",
    "controls",
    "forecast",
    "forecast_default",
)
"""Keys of ``results.json`` that are null where nothing measured them."""


@dataclass(frozen=True)
class OutcomeRow:
    """What the edits of a relation did, a row of the table ``outcomes``.

    The shares of unchanged controls stand in further columns.
    """

    relation: str
    n_edits: int = column("edits", "d")
    source_learned: float | None = column("learned", ".1%")
    generalized: float | None = column("", ".1%")
    macro_generalized: float | None = column("generalized, by answer", ".1%")
    constant: float | None = column("best constant", ".1%")
    nearest_right: float | None = column("nearest word", ".1%")
    nearest_macro: float | None = column("nearest word, by answer", ".1%")
    random: float | None = column("", ".1%")
    hallucinated: float | None = column("", ".1%")
    macro_hallucinated: float | None = column("hallucinated, by answer", ".1%")
    unchanged: float | None = column("", ".1%")
    right_before: float | None = column("", ".1%")
    specific: float | None = column("", ".1%")
    leak: float | None = column("", ".1%")
    auroc: float | None = column("AUROC of the nearest word", ".2f")
    auroc_within: float | None = column("the same, within an answer", ".2f")


@dataclass(frozen=True, kw_only=True)
class StepRow:
    """What edits did after an optimizer step, a row of the table ``by_step``.

    `leak` and `specific` are means by reference, with the 95 % interval of `specific` over
    references; they are None without other subjects. Unchanged controls stand in further columns.
    """

    step: int = column("", "d")
    n_edits: int = column("edits", "d")
    source_learned: float | None = column("learned", ".0%")
    generalized: float | None = column("", ".0%")
    macro_generalized: float | None = column("by answer", ".0%")
    leak: float | None = column("", ".0%")
    specific: float | None = column("", ".0%")
    specific_low: float | None = column("low", ".0%")
    specific_high: float | None = column("high", ".0%")


@dataclass(frozen=True)
class CorrelationRow:
    """The correlations of a relation, a row of the table ``correlations``."""

    relation: str
    gradient_correlation: float | None = column("r of the change", ".2f")
    permuted_gradient_correlation: float | None = column("the same, W permuted", ".2f")
    logit_correlation: float | None = column("r of the value", ".2f")


def case_results(
    cases: Sequence[EditCase], relation: str, random: float | None, suffix: str = ""
) -> tuple[Table, list[Figure]]:
    """Return the table ``cases`` (paper, table 6) and its figures (figure 5 is one of them).

    `random` is the share of edits for which a random label would be right; `suffix` is appended to
    all names where a run has several.
    """
    table = Table.of(
        f"cases{suffix}",
        cases,
        EditCase,
        f"What each edit did to the target of {relation} (paper, table 6).",
        "W stands in the column of the taught answer; logits are those before training.",
    ).sampled(
        "subject",
        "source_answer",
        **OUTCOME_MEANS,
        probability_reference="probability_reference_after",
    )
    return table, [
        Figure(
            f"reference_weights{suffix}",
            f"W of the reference in generalized and in hallucinated edits of {relation} (paper, "
            "figure 5).",
            partial(drawing.reference_weights_figure, cases, relation),
        ),
        Figure(
            f"outcomes{suffix}",
            f"Share of each outcome of the edits of {relation}.",
            partial(drawing.outcomes_figure, cases, relation, random),
        ),
    ]


def by_step_results(
    rows: Sequence[Mapping[str, Any]], relation: str, nulls: Mapping[str, float], suffix: str = ""
) -> tuple[Table, Figure]:
    """Return the table ``by_step`` and the figure of the same name.

    `nulls` are means by answer that need no training, by what they are, for the figure.
    """
    controls = dict.fromkeys(f"{name}_unchanged" for row in rows for name in row["controls"])
    names, headings, formats = columns_of(StepRow)
    table = Table.of(
        f"by_step{suffix}",
        [{**row, **{f"{k}_unchanged": x for k, x in row["controls"].items()}} for row in rows],
        [*names, *controls],
        peak_sentence(rows, relation) or f"The edits of {relation} after each step.",
        "leak: share of other people of whom the LM gives the edit's reference, and did not "
        "before; specific: generalized by answer minus leak, with the 95 % interval over answers.",
        headline=True,
        headings=headings,
        formats=formats | dict.fromkeys(controls, ".0%"),
    )
    caption = f"The edits of {relation} by optimizer step: learned, generalized, leak and specific."
    drawn = partial(drawing.by_step_figure, rows, relation, nulls)
    return table, Figure(f"by_step{suffix}", caption, drawn)


def finetune_results(
    measured: Sequence[Results],
    run: Mapping[str, Any],
    edits: ResolvedEdits | None,
    history: Mapping[str, Sequence[tuple[int, float]]],
    subtitle: str,
) -> Results:
    """Return the results of a fine-tune, with those of its callbacks.

    The values of the ``generalization`` on the run's own relation, and the correlations of the
    ``gradient_correlation`` on it, stand at the top level.

    `run` has values of the run itself: ``protocol``, ``n_steps``, ``n_edits``, ...; `edits` is None
    if the run's dataset lists none; `history` has ``(step, value)`` pairs by log key that callbacks
    measured; `subtitle` says what was trained, and how, for the figure.
    """
    outcomes = _of_kind(measured, "generalization")
    gradients = _of_kind(measured, "gradient_correlation")
    relation = outcomes[0].values["relation"] if outcomes else None
    if edits is not None:
        relation = edits.relation.name
    main = next((each for each in outcomes if each.values["relation"] == relation), None)
    others = [each for each in outcomes if each is not main]
    correlations = _by_relation(gradients)
    of_relation = correlations.get(relation or "", {})
    values: dict[str, Any] = {
        "relation": relation,
        **run,
        **dict.fromkeys(_CONTRACT),
        "skipped": {} if edits is None else skip_counts(edits.skipped),
        **({} if main is None else main.values),
        **{key: of_relation.get(key) for key in ("gradient_correlation", "logit_correlation")},
        "gradients": correlations,
    }
    if others:
        values["generalizations"] = _by_relation(others)
    # What edits did step by step comes first, in tables and figures.
    tables = [each for each in main.tables if each.name == "by_step"] if main else []
    figures = [each for each in main.figures if each.name == "by_step"] if main else []
    if outcomes:
        tables.append(outcomes_table([each for each in (main, *others) if each is not None]))
    if gradients:
        tables.append(
            Table.of(
                "correlations",
                [{"relation": name, **row} for name, row in correlations.items()],
                CorrelationRow,
                "Label-wise r between the predicted and the measured change of the target logits "
                "(paper, table 4).",
                headline=True,
            )
        )
    if edits is not None:
        tables += _edits_tables(edits)
    if history:
        figures.append(_training_figure(history, relation or "the source", subtitle))
    merged = {each.study for each in (*outcomes, *gradients)}  # their values are among those above
    included = [
        replace(
            each,
            values={},
            tables=[table for table in each.tables if table.name != "by_step"],
            figures=[figure for figure in each.figures if figure.name != "by_step"],
        )
        if each.study in merged
        else each
        for each in measured
    ]
    return Results("source_finetune", values, tables=tables, figures=figures, included=included)


def _of_kind(measured: Sequence[Results], study: str) -> list[Results]:
    return [each for each in measured if re.fullmatch(rf"{study}(_\d+)?", each.study)]


def _by_relation(measured: Sequence[Results]) -> dict[str, dict[str, Any]]:
    values: dict[str, dict[str, Any]] = {}
    counts: Counter[str] = Counter()
    for each in measured:
        relation = each.values["relation"]
        counts[relation] += 1
        key = relation if counts[relation] == 1 else f"{relation} ({counts[relation]})"
        values[key] = {name: value for name, value in each.values.items() if name != "relation"}
    return values


def _edits_tables(edits: ResolvedEdits) -> list[Table]:
    source, target = edits.relation.source.texts, edits.relation.target.texts
    rows = [
        {
            "subject": edit.subject,
            "answer": edit.answer,
            "reference": SEPARATOR.join(target[label] for label in edit.reference),
            "source_before": source[edit.source_before],
            "target_before": target[edit.target_before],
        }
        for edit in edits.edits
    ]
    caption = f"The edits of {edits.relation.name}, with the LM's answers before training."
    return [Table.of("edits", rows, caption=caption), *skipped_tables(edits.skipped)]


def skipped_tables(skipped: Sequence[RawEdit], suffix: str = "") -> list[Table]:
    """Return the table ``skipped`` of the rows of a file that are no edit, if there are any."""
    if not skipped:
        return []
    return [
        Table.of(
            f"skipped{suffix}",
            [(row.where, row.subject, row.answer, row.problem) for row in skipped],
            ("where", "subject", "answer", "reason"),
            "Rows of the file that are no edit, and why.",
            headings={"where": "file and row"},
        )
    ]


def outcomes_table(outcomes: Sequence[Results]) -> Table:
    """Return the shares of the outcomes of each of some results."""
    rows = []
    controls: dict[str, None] = {}
    for each in outcomes:
        values = each.values
        nearest = values.get("nearest") or {}
        of_others = {name: (values.get(name) or {}).get("mean") for name in ("specific", "leak")}
        unchanged = {f"{k}_unchanged": v["unchanged"] for k, v in values["controls"].items()}
        controls |= dict.fromkeys(unchanged)
        rows.append(
            {
                **values,
                **unchanged,
                **of_others,
                **{f"macro_{name}": share for name, share in values["macro"].items()},
                **(values.get("forecast") or {}).get(DEFAULT_FORECAST, {}),
                "nearest_right": nearest.get("right"),
                "nearest_macro": nearest.get("macro"),
            }
        )
    names, headings, formats = columns_of(OutcomeRow)
    return Table.of(
        "outcomes",
        rows,
        [*names, *controls],
        "Share of edits by outcome (paper, table 5).",
        "by answer: the mean over distinct sets of right target answers. best constant: the one "
        "target label that is right most often; nearest word: the target label nearest to the new "
        "answer in the LM's head is right; random: a random label is; color_unchanged: an "
        "unrelated answer stays. leak: share of other people of whom the LM then gives the edit's "
        "reference, too; specific: generalized minus leak, by answer. AUROC: how often an edit "
        "that generalizes has a larger margin, by which its nearest word is right, than one that "
        "does not.",
        headline=True,
        headings=headings,
        formats=formats | dict.fromkeys(controls, ".1%"),
    )


def _training_figure(
    history: Mapping[str, Sequence[tuple[int, float]]], relation: str, subtitle: str
) -> Figure:
    curves: dict[str, list[tuple[int, float]]] = {}
    for key, points in history.items():
        if "/macro_" in key or key.endswith("_of_learned"):
            continue  # near the shares of all edits, in the same panel
        curves.setdefault(_panel(key, relation), []).extend(points)
    return Figure(
        "training",
        "Outcomes, probabilities and correlations in the course of training.",
        partial(
            training_curves,
            history_table(curves).frame,
            f"Training on edits of {relation}",
            subtitle,
        ),
    )


def _panel(key: str, relation: str) -> str:
    """Return a key whose first part names its panel: one per relation's correlations."""
    group, _, name = key.removeprefix("edit_step/").rpartition("/")
    if group in ("probability", "control_unchanged"):
        return f"{group}/{name}".replace("_", " ")
    if "correlation" in group:
        return f"r, {name}/{group.replace('_', ' ')}"
    if key.startswith("edit_step/"):
        return f"share of edits, {relation}/{name.replace('_', ' ')}"
    return key
