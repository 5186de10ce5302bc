"""Tables, figures and `Results` of edits."""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from lincorr_lightning.finetune.cases import EditCase
from lincorr_lightning.finetune.edit_files import SEPARATOR, RawEdit
from lincorr_lightning.finetune.edits import ResolvedEdits, skip_counts
from lincorr_lightning.finetune.verdict import BASELINES, edits_verdict, gradients_verdict
from lincorr_lightning.functional.outcomes import Outcome
from lincorr_lightning.results.results import Figure, Results
from lincorr_lightning.results.table import Mean, Table, column, columns_of

_OUTCOMES = [outcome.value for outcome in Outcome]
_CONTRACT = (
    "source_learned",
    *_OUTCOMES,
    "specific",
    "leak",
    "by_step",
    "at_learned",
    "nearest",
    "above_best_baseline",
    "random",
    "constant",
    "macro",
    "controls",
    "forecast",
    "forecast_default",
)
"""Keys of ``results.json`` that are null where nothing measured them."""


@dataclass(frozen=True)
class SummaryRow:
    """What the edits of a relation did, a row of the table ``summary``."""

    relation: str
    n_edits: int = column("edits", "d")
    source_learned: float | None = column("learned", ".1%")
    generalized: float | None = column("", ".1%")
    macro_generalized: float | None = column("by answer", ".1%")
    nearest_macro: float | None = column("nearest word", ".1%")
    hallucinated: float | None = column("", ".1%")
    specific: float | None = column("", ".1%")


@dataclass(frozen=True, kw_only=True)
class StepRow:
    """What edits did after an optimizer step, a row of the table ``by_step``.

    All but `source_learned` are means by reference, with the 95 % interval of `specific` over
    references; some are None without other subjects. Unchanged controls stand in further columns.
    """

    step: int = column("", "d")
    source_learned: float | None = column("learned", ".0%")
    macro_generalized: float | None = column("generalized", ".0%")
    leak: float | None = column("said of others", ".0%")
    specific: float | None = column("", ".0%")
    specific_low: float | None = column("low", ".0%")
    specific_high: float | None = column("high", ".0%")


@dataclass(frozen=True)
class CorrelationRow:
    """The correlations of a relation, a row of the table ``correlations``."""

    relation: str
    gradient_correlation: float | None = column("r of the change", ".2f")
    gradient_correlation_error: float | None = column("±", ".2f")
    permuted_gradient_correlation: float | None = column("W permuted", ".2f")
    logit_correlation: float | None = column("r of the value", ".2f")
    ridge: float | None = column("ridge", ".3g")


def edits_results(
    name: str,
    values: Mapping[str, Any],
    cases: Sequence[EditCase],
    scalars: Mapping[str, float],
    skipped: Sequence[RawEdit] = (),
    **more: Sequence[str],
) -> Results:
    """Return the results of edits: the table ``cases`` (paper, table 6) and its figures.

    `values` are those of ``results.json``, `skipped` the rows of a file that are no edit; `more`
    are further columns of the table.
    """
    # matplotlib takes long to import, and not every run draws.
    from lincorr_lightning.finetune import figures as drawing

    relation = values["relation"]
    cases_table = Table.of(
        "cases",
        cases,
        EditCase,
        f"What each edit did to the target of {relation} (paper, table 6).",
        "W stands in the column of the taught answer; logits are those before training.",
    ).sampled(
        "subject",
        "source_answer",
        **{outcome: Mean("outcome", outcome) for outcome in _OUTCOMES},
        **{f"macro_{outcome}": Mean("outcome", outcome, per="reference") for outcome in _OUTCOMES},
        source_learned="source_learned",
        probability_reference="probability_reference_after",
    )
    cases_table = replace(cases_table, frame=cases_table.frame.assign(**more))
    tables = [cases_table, *skipped_tables(skipped)]
    figures = []
    about = {"relation": relation}
    if steps := values.get("by_step"):
        tables.insert(0, _by_step_table(steps, relation))
        best = values["above_best_baseline"]
        nulls = {BASELINES[best["baseline"]]: best["macro"]} if best else {}
        caption = f"The edits of {relation} after each optimizer step."
        drawn = Figure(
            "by_step", caption, drawing.by_step_figure, tables[:1], {**about, "nulls": nulls}
        )
        figures += [drawn] if len(steps) > 1 else []
    caption = f"Outcomes of the edits of {relation}, and for which the nearest word is right."
    figures.append(Figure("outcomes", caption, drawing.outcomes_figure, [cases_table], about))
    caption = f"W of the reference by outcome of the edits of {relation} (paper, figure 5)."
    options = {**about, "p": values["weight_reference"]["rank_test_p"]}
    draw = drawing.reference_weights_figure
    figures.append(Figure("reference_weights", caption, draw, [cases_table], options))
    verdict = edits_verdict(values)
    return Results(name, values, scalars, tables=tables, figures=figures, verdict=verdict)


def _by_step_table(rows: Sequence[Mapping[str, Any]], relation: str) -> Table:
    controls = dict.fromkeys(f"{name}_unchanged" for row in rows for name in row["controls"])
    names, headings, formats = columns_of(StepRow)
    return Table.of(
        "by_step",
        [{**row, **{f"{k}_unchanged": x for k, x in row["controls"].items()}} for row in rows],
        [*names, *controls],
        f"The edits of {relation} after each step",
        "generalized: mean by right answer; said of others (leak): share of other people of whom "
        "the LM then says the same; specific: generalized minus leak, with its 95 % interval.",
        headline=True,
        headings=headings,
        formats=formats | dict.fromkeys(controls, ".0%"),
    )


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
    from lincorr_lightning.finetune import figures as drawing

    outcomes = _of_kind(measured, "generalization")
    gradients = _of_kind(measured, "gradient_correlation")
    moved = _of_kind(measured, "intervention")
    relation = outcomes[0].values["relation"] if outcomes else None
    if edits is not None:
        relation = edits.relation.name
    outcomes.sort(key=lambda each: bool(each.values["relation"] != relation))
    main = next((each for each in outcomes if each.values["relation"] == relation), None)
    others = outcomes[main is not None :]
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
    tables = [summary_table(outcomes)] if outcomes else []
    if gradients:
        tables.append(
            Table.of(
                "correlations",
                [{"relation": name, **row} for name, row in correlations.items()],
                CorrelationRow,
                "r of the target logits' change by a step, predicted by W and measured "
                "(paper, table 4)",
                "r per answer, at the first step of edits that are trained alone; W permuted: the "
                "null; r of the value: of the logits themselves.",
                headline=True,
            )
        )
    if edits is not None:
        tables += _edits_tables(edits)
    figures = []
    if history:
        rows = [(*point, key) for key, points in history.items() for point in points]
        columns = ("step", "value", "number")
        tables.append(Table.of("training", rows, columns, "What callbacks logged, by step"))
        caption = "Outcomes, probabilities and correlations in the course of training."
        options = {"relation": relation or "the source", "subtitle": subtitle}
        draw = drawing.training_figure
        figures.append(Figure("training", caption, draw, tables[-1:], options))
    merged = {each.study for each in (*outcomes, *gradients)}  # their values are among those above
    rest = [each for each in measured if each.study not in merged and each not in moved]
    verdict = [sentence for each in (*moved, *outcomes) for sentence in each.verdict]
    verdict += gradients_verdict(correlations)
    verdict += [sentence for each in rest for sentence in each.verdict]
    included = [
        replace(each, values={} if each.study in merged else each.values, verdict=())
        for each in measured
    ]
    return Results(
        "source_finetune",
        values,
        tables=tables,
        figures=figures,
        included=included,
        verdict=verdict,
    )


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


def skipped_tables(skipped: Sequence[RawEdit]) -> list[Table]:
    """Return the table ``skipped`` of the rows of a file that are no edit, if there are any."""
    if not skipped:
        return []
    return [
        Table.of(
            "skipped",
            [(row.where, row.subject, row.answer, row.problem) for row in skipped],
            ("where", "subject", "answer", "reason"),
            "Rows of the file that are no edit, and why.",
            headings={"where": "file and row"},
        )
    ]


def summary_table(outcomes: Sequence[Results]) -> Table:
    """Return the main shares of some results of edits, with their null."""
    rows = [
        {
            **values,
            "macro_generalized": values["macro"]["generalized"],
            "nearest_macro": (values.get("nearest") or {}).get("macro"),
            "specific": (values.get("specific") or {}).get("mean"),
        }
        for values in (each.values for each in outcomes)
    ]
    return Table.of(
        "summary",
        rows,
        SummaryRow,
        "Share of all edits by outcome, after their last step (paper, table 5)",
        "learned: reliability in the editing literature; generalized: portability; by answer: "
        "its mean by right answer, as those of the nearest word in the LM's head; specific: by "
        "answer, minus the share of other people of whom the LM then says the same.",
        headline=True,
    )
