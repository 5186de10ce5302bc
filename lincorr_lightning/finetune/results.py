"""Tables, figures and `Results` of edits and of their forecasts.

`cases_table`, `outcome_figures` and `outcome_charts` serve callbacks that measure what edits do,
in any run; `finetune_results` and `forecast_results` are those of the two studies.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import astuple, fields, replace
from functools import partial
from statistics import fmean
from typing import Any

from lincorr_lightning.finetune.cases import EditCase
from lincorr_lightning.finetune.edit_file import SEPARATOR
from lincorr_lightning.finetune.edits import Edit, LeftOut
from lincorr_lightning.finetune.forecasts import Forecasts
from lincorr_lightning.functional.outcomes import Outcome
from lincorr_lightning.knowledge import TokenizedRelation
from lincorr_lightning.results.numbers import number
from lincorr_lightning.results.results import Figure, Results
from lincorr_lightning.results.table import Column, Table

_LOGITS = dict.fromkeys(("prior_reference", "prior_winner"), ".2f")
_WEIGHTS = dict.fromkeys(("weight_reference", "weight_answer", "weight_max"), ".3f")
_SHARES = dict.fromkeys(("probability_reference_before", "probability_reference_after"), ".1%")
_HEADINGS = {
    "answer_before": "before", "answer_after": "after", "source_learned": "learned",
    "weight_reference": "W of reference", "weight_answer": "W of answer",
    "weight_max": "maximum of W", "prior_reference": "logit of reference before",
    "prior_winner": "logit of answer before",
    "probability_reference_before": "p of reference before",
    "probability_reference_after": "p of reference after",
}  # fmt: skip

_CORRELATIONS = {
    "gradient_correlation": "gradient r", "permuted_gradient_correlation": "permuted",
    "gradient_correlation_auto": "ridge auto", "logit_correlation": "logit r",
}  # fmt: skip


def cases_table(
    cases: Sequence[EditCase], relation: str, taught: bool = True, suffix: str = ""
) -> Table:
    """Return the table ``cases`` with a row per edit, in the order of the edits (paper, table 6).

    `taught` is False if subjects were watched without edits; `suffix` is appended to the table's
    name where a run has several.
    """
    formats = _LOGITS | _WEIGHTS | _SHARES
    names = [one.name for one in fields(EditCase)]
    headings = _HEADINGS | {"source_answer": "taught" if taught else "source answer"}
    columns = [Column(name, headings.get(name, ""), formats.get(name, "")) for name in names]
    what = "each edit" if taught else "training"
    return Table.from_rows(
        f"cases{suffix}", columns, [astuple(case) for case in cases],
        f"What {what} did to the target of {relation} (paper, table 6).",
        "W stands in the column of the source answer; logits are those before training.",
    )  # fmt: skip


def outcome_figures(
    cases: Sequence[EditCase],
    relation: str,
    random: float | None = None,
    taught: bool = True,
    suffix: str = "",
) -> list[Figure]:
    """Return the figures ``reference_weights`` (paper, figure 5) and ``outcomes``.

    `random` is the share of edits for which a random label would be right; for `taught` and
    `suffix` see `cases_table`.
    """
    from lincorr_lightning.finetune import figures

    return [
        Figure(
            f"reference_weights{suffix}",
            f"W of the reference in generalized and in hallucinated edits of {relation} (paper, "
            "figure 5).",
            partial(figures.reference_weights_figure, cases, relation, taught),
        ),
        Figure(
            f"outcomes{suffix}",
            f"Share of each outcome of the edits of {relation}.",
            partial(figures.outcomes_figure, cases, relation, random, taught),
        ),
    ]


def outcome_charts(
    relation: str, controls: Sequence[str], prefix: str = "", by_edit_step: bool = False
) -> dict[str, dict[str, list[str]]]:
    """Return the curves of a run that TensorBoard lays over one another, see `Results.charts`.

    `prefix` is that of the log keys of outcomes and controls, where several relations are measured;
    `by_edit_step` is for independent edits, whose x axis is the step within an edit.

    Returns:
        Group -> chart -> regular expressions of log keys, as TensorBoard takes them.
    """
    steps = "edit_step/" if by_edit_step else ""
    outcomes = f"{prefix}{steps}" + ("" if by_edit_step else "generalization/")
    keys = {
        "generalized and hallucinated": [
            f"{outcomes}{o}" for o in (Outcome.GENERALIZED, Outcome.HALLUCINATED)
        ],
        "all outcomes": [f"{outcomes}{name}" for name in (*Outcome, "source_learned")],
        "probability": [f"{prefix}{steps}probability/{p}" for p in ("reference", "old_answer")],
        "controls unchanged": [f"{prefix}{steps}control_unchanged/{name}" for name in controls],
        "correlation": [f"{steps}{name}/{relation}" for name in _CORRELATIONS],
    }
    after = " after each step of an edit" if by_edit_step else ""
    # TensorBoard takes all log keys that a pattern matches from their beginning.
    charts = {
        f"{title}{after}": [f"{re.escape(key)}$" for key in chosen]
        for title, chosen in keys.items()
        if chosen
    }
    return {relation: charts}


# -- forecasts -------------------------------------------------------------------------------------


def forecast_table(
    forecasts: Forecasts,
    answers_after: Sequence[str] | None = None,
    outcomes: Sequence[str] | None = None,
    max_risk: float | None = None,
) -> Table:
    """Return the table ``forecast`` with a row per edit; after training, with what happened.

    With `max_risk`, it says which edits are more likely to hallucinate than that.
    """
    cells: dict[Column, Sequence[Any]] = {
        Column("subject"): forecasts.subjects,
        Column("source_answer", "new answer"): forecasts.source_answers,
        Column("reference"): forecasts.references,
        Column("answer_before", "before"): forecasts.answers_before,
    }
    expected = forecasts.answers(forecasts.default)
    cells[Column("expected_answer", "expected answer")] = expected
    for name in forecasts.predicted:
        cells[Column(f"{name}_answer", f"{name}: answer")] = forecasts.answers(name)
        risks = [number(risk) for risk in forecasts.risks(name)]
        cells[Column(f"{name}_risk", "risk", ".2f")] = risks
    if forecasts.probabilities is not None:
        for outcome in Outcome:
            column = Column(f"p_{outcome}", f"p {outcome}", ".0%")
            cells[column] = forecasts.probability(outcome)
    if max_risk is not None:
        cells[Column("above_max_risk", "above max_risk")] = _above(forecasts, max_risk)
    if forecasts.causes:
        cells[Column("cause")] = forecasts.causes
    if answers_after is not None and outcomes is not None:
        cells[Column("answer_after", "after")] = answers_after
        cells[Column("outcome")] = outcomes
    return Table.from_rows(
        "forecast", list(cells), list(zip(*cells.values(), strict=True)),
        f"Forecast of each edit of {forecasts.relation}: predicted answer and risk.",
        "The risk is how far the best wrong label is predicted ahead of the reference, in logits.",
    )  # fmt: skip


def _above(forecasts: Forecasts, max_risk: float) -> list[bool]:
    return [p > max_risk for p in forecasts.probability(Outcome.HALLUCINATED)]


def riskiest_table(forecasts: Forecasts, max_risk: float | None = None, n: int = 10) -> Table:
    """Return the table ``riskiest``: the n edits that are most likely to hallucinate.

    With `max_risk`, those above it are marked.
    """
    above = None if max_risk is None else _above(forecasts, max_risk)
    p = forecasts.probability(Outcome.HALLUCINATED)
    answers = forecasts.answers(forecasts.default)
    rows = sorted(range(len(p)), key=lambda i: -p[i])[:n]
    return Table.from_rows(
        "riskiest",
        ["subject", Column("source_answer", "new answer"), "reference",
         Column("answer", "expected answer"), Column("p_hallucinated", "p hallucinated", ".0%"),
         "cause", *([] if above is None else [Column("above_max_risk", "above max_risk")])],
        [(forecasts.subjects[i], forecasts.source_answers[i], forecasts.references[i], answers[i],
          p[i], forecasts.causes[i] if forecasts.causes else "",
          *([] if above is None else [above[i]])) for i in rows],
        f"The edits of {forecasts.relation} that are most likely to hallucinate.",
        headline=True,
    )  # fmt: skip


def left_out_table(left_out: Sequence[LeftOut], n_trained: int) -> Table:
    """Return the table ``left_out``: the edits above ``data.max_risk``."""
    return Table.from_rows(
        "left_out",
        [
            "subject",
            "source_answer",
            "reference",
            Column("p_hallucinated", "p hallucinated", ".0%"),
        ],
        [tuple(edit) for edit in left_out],
        f"The {len(left_out)} of {n_trained + len(left_out)} edits that are left out, because they "
        "are forecast to hallucinate (data.max_risk).",
    )


def forecast_results(
    forecasts: Forecasts,
    lm: Mapping[str, Any],
    settings: Mapping[str, Any],
    max_risk: float | None = None,
) -> Results:
    """Return the results of a forecast without training.

    `max_risk` is the probability of a hallucination above which edits are marked.
    """
    n, shares = len(forecasts.subjects), _outcome_shares(forecasts)
    rows = [{"forecaster": name, **row} for name, row in shares.items()]
    note = f"Expected answers are those of {forecasts.default}. "
    expected = n_above = None
    if forecasts.probabilities is None:
        note += "There are no probabilities: they need model.optimizer_step true."
    else:
        expected = {o.value: fmean(forecasts.probability(o)) for o in Outcome}
        rows.append({"forecaster": "mean probability", **expected})
        note += f"Probabilities: {forecasts.probabilities_from}."
    if max_risk is not None:
        n_above = sum(_above(forecasts, max_risk))
        note += f" {n_above} of {n} edits hallucinate with a probability above {max_risk:g}."
    table = Table.from_dicts(
        "forecast_outcomes",
        rows,
        ["forecaster", *(Column(outcome.value, format=".1%") for outcome in Outcome)],
        caption=f"Predicted outcomes of {n} edits of {forecasts.relation}, by forecaster.",
        note=note,
        headline=True,
    )
    return Results(
        "forecast",
        values={
            "relation": forecasts.relation,
            "n_edits": n,
            "predicted_outcomes": shares,
            "mean_probability": expected,
            "forecast_default": forecasts.default,
            "probabilities_from": forecasts.probabilities_from,
            "n_above_max_risk": n_above,
        },
        tables=[
            table,
            *(
                []
                if forecasts.probabilities is None
                else [riskiest_table(forecasts, max_risk=max_risk)]
            ),
            forecast_table(forecasts, max_risk=max_risk),
        ],
        figures=[_risk_figure(forecasts)],
        lm=lm,
        settings=settings,
    )


def _risk_figure(forecasts: Forecasts) -> Figure:
    from lincorr_lightning.finetune.figures import risk_figure

    caption = f"Risks of {len(forecasts.subjects)} edits of {forecasts.relation}, by forecaster."
    return Figure("forecast", caption, partial(risk_figure, forecasts))


def _outcome_shares(forecasts: Forecasts) -> dict[str, dict[str, float]]:
    """Return the share of each predicted outcome by forecaster."""
    found = {}
    for name in list(forecasts.predicted):
        outcomes = forecasts.outcomes(name)
        found[name] = {o.value: outcomes.count(o) / len(outcomes) for o in Outcome}
    return found


# -- a fine-tune -----------------------------------------------------------------------------------


def finetune_results(
    measured: Sequence[Results],
    forecasts: Forecasts | None,
    lm: Mapping[str, Any],
    settings: Mapping[str, Any],
    *,
    n_edits: int,
    n_steps: int,
    seconds: float,
    edits: Sequence[Edit] = (),
    relation: TokenizedRelation | None = None,
    left_out: Sequence[LeftOut] = (),
    history: Mapping[str, Sequence[tuple[int, float]]] | None = None,
) -> Results:
    """Return the results of a fine-tune, with those of its callbacks.

    The values of the ``generalization`` on the run's own relation, and the correlations of the
    ``gradient_correlation`` on it, stand at the top level. All callbacks of these two kinds must
    have a value ``relation``; a table whose name starts with ``cases`` scores the forecasts.

    Args:
        measured: Results of the callbacks.
        forecasts: The forecasts made before training, if any.
        lm: Name, fingerprint and size of the LM.
        settings: The run's settings, among them ``protocol``, ``method`` and ``learning_rate``.
        n_edits: Number of edits.
        n_steps: Optimizer steps of all ranks.
        seconds: Duration of the training.
        edits: The edits; empty if the run's dataset does not list them.
        relation: The relation that they are about; None if the run's dataset does not say.
        left_out: Edits that were not trained.
        history: ``(step, value)`` pairs by log key that callbacks measured.
    """
    outcomes = [one for one in measured if _is_kind(one, "generalization")]
    gradients = [one for one in measured if _is_kind(one, "gradient_correlation")]
    name = None if relation is None else relation.name
    if name is None and outcomes:
        name = outcomes[0].values["relation"]
    own = next((one for one in outcomes if one.values.get("relation") == name), None)
    by_relation = _by_relation(gradients)
    values: dict[str, Any] = {
        "relation": name,
        "n_edits": n_edits,
        "protocol": settings["protocol"],
        "method": settings["method"],
        **dict.fromkeys(("source_learned", *(o.value for o in Outcome), "random", "controls")),
        **({} if own is None else own.values),
        **{
            key: by_relation.get(name or "", {}).get(key)
            for key in ("gradient_correlation", "logit_correlation")
        },
        "gradients": by_relation,
        "forecast": None,
        "forecast_default": None if forecasts is None else forecasts.default,
        "probabilities_from": None if forecasts is None else forecasts.probabilities_from,
        "n_left_out": len(left_out),
    }
    others = _by_relation([one for one in outcomes if one is not own])
    if others:
        values["generalizations"] = others
    tables = [_outcomes_table(outcomes, own)] if outcomes else []
    if gradients:
        tables.append(_gradients_table(by_relation))
    figures = []
    if history:
        figures.append(_training_figure(history, name, lm, settings))
    if forecasts is not None:
        after = _after_training(forecasts, own)
        tables.append(forecast_table(forecasts, *after))
        if after:
            answers, found = after
            scores = forecasts.scores(answers, found)
            values["forecast"] = scores
            tables.insert(-1, _scores_table(scores, forecasts))
        else:
            values["predicted_outcomes"] = _outcome_shares(forecasts)
        figures.append(_risk_figure(forecasts))
    if relation is not None and edits:
        tables.append(edits_table(edits, relation))
    if left_out:
        tables.append(left_out_table(left_out, n_edits))
    values |= {"seconds": round(seconds, 2), "n_steps": n_steps}
    # Values that stand in this study's own are not repeated under the callbacks' names.
    merged = {id(one) for one in (*outcomes, *gradients)}
    return Results(
        "source_finetune",
        values=values,
        tables=tables,
        figures=figures,
        lm=lm,
        settings=settings,
        included=[replace(one, values={}) if id(one) in merged else one for one in measured],
    )


def _is_kind(one: Results, study: str) -> bool:
    """Whether results are of a kind of callback, the second of which is numbered."""
    return re.fullmatch(rf"{study}(_\d+)?", one.study) is not None


def _by_relation(measured: Sequence[Results]) -> dict[str, dict[str, Any]]:
    """Return values by relation; the second result of a relation is numbered."""
    found: dict[str, dict[str, Any]] = {}
    counts: Counter[str] = Counter()
    for one in measured:
        relation = one.values["relation"]
        counts[relation] += 1
        key = relation if counts[relation] == 1 else f"{relation} ({counts[relation]})"
        found[key] = {name: value for name, value in one.values.items() if name != "relation"}
    return found


def _after_training(
    forecasts: Forecasts, own: Results | None
) -> tuple[Sequence[str], Sequence[str]] | tuple[()]:
    """Return answers and outcomes after training if they are those of the forecast edits.

    A callback may measure other edits than those that are trained, or not all of them.
    """
    table = next((t for t in (own.tables if own else ()) if t.name.startswith("cases")), None)
    if table is None:
        return ()
    cells = dict(zip(table.keys, zip(*table.rows, strict=True), strict=False))
    measured = list(zip(cells.get("subject", ()), cells.get("source_answer", ()), strict=True))
    if measured != list(zip(forecasts.subjects, forecasts.source_answers, strict=True)):
        return ()
    return cells["answer_after"], cells["outcome"]


def edits_table(edits: Sequence[Edit], relation: TokenizedRelation) -> Table:
    """Return the table ``edits``, whose CSV file ``data.edits_file`` reads."""
    source, target = relation.source.texts, relation.target.texts
    rows = [
        (one.subject, one.answer, SEPARATOR.join(target[i] for i in one.reference),
         source[one.source_before], target[one.target_before])
        for one in edits
    ]  # fmt: skip
    return Table.from_rows(
        "edits",
        ["subject", "answer", "reference", "source_before", "target_before"],
        rows,
        f"The edits of {relation.name}, with the LM's answers before training.",
    )


def _outcomes_table(outcomes: Sequence[Results], own: Results | None) -> Table:
    rows = []
    controls: dict[str, None] = {}
    for one in sorted(outcomes, key=lambda one: one is not own):
        kept = {f"{n}_unchanged": c["unchanged"] for n, c in one.values.get("controls", {}).items()}
        rows.append({**one.values, **kept})
        controls |= dict.fromkeys(kept)
    shares = ("source_learned", "generalized", "random", "hallucinated", "unchanged", *controls)
    columns: list[Column | str] = ["relation", Column("n_edits", "edits")]
    columns += [Column(share, format=".1%") for share in shares]
    return Table.from_dicts(
        "outcomes", rows, columns, headline=True,
        caption="Share of edits by outcome (paper, table 5).",
        note="random: a random target label is right; color_unchanged: an unrelated answer stays.",
    )  # fmt: skip


def _gradients_table(by_relation: Mapping[str, Mapping[str, Any]]) -> Table:
    return Table.from_dicts(
        "correlations",
        [{"relation": name, **row} for name, row in by_relation.items()],
        ["relation", *(Column(key, heading, ".2f") for key, heading in _CORRELATIONS.items())],
        caption="Label-wise r between the predicted and the measured change of the target logits "
        "(paper, table 4).",
        note="permuted: with the rows of W permuted.",
        headline=True,
    )


def _scores_table(scores: Mapping[str, Mapping[str, Any]], forecasts: Forecasts) -> Table:
    return Table.from_dicts(
        "forecast_scores",
        [{"forecaster": name, **row} for name, row in scores.items()],
        [
            "forecaster",
            Column("auroc", "AUROC of the risk", ".2f"),
            Column("accuracy", "accuracy of the answer", ".1%"),
            Column("brier", "Brier score", ".2f"),
        ],
        caption=f"Scores of the forecasts of {len(forecasts.subjects)} edits.",
        note="answer_before and most_frequent use no forecast."
        + (
            f" Probabilities: {forecasts.probabilities_from}."
            if forecasts.probabilities_from
            else ""
        ),
        headline=True,
    )


def _training_figure(
    history: Mapping[str, Sequence[tuple[int, float]]],
    relation: str | None,
    lm: Mapping[str, Any],
    settings: Mapping[str, Any],
) -> Figure:
    from lincorr_lightning.results.style import short_name
    from lincorr_lightning.results.training_curves import training_curves

    curves: dict[str, list[tuple[int, float]]] = {}
    for key, points in history.items():
        curves.setdefault(_panel(key, relation or "the source"), []).extend(points)
    name = short_name(str(lm["name_or_path"]))
    title = f"{relation}: training of {name}" if relation else f"Training of {name}"
    subtitle = "{protocol}, {method}, learning rate {learning_rate:g}".format_map(settings)
    return Figure(
        "training",
        "Outcomes, probabilities and correlations in the course of training.",
        partial(training_curves, curves, title, subtitle),
    )


def _panel(key: str, relation: str) -> str:
    """Return a key whose first part names its panel: one per relation's correlations."""
    group, _, name = key.removeprefix("edit_step/").rpartition("/")
    if group in ("probability", "control_unchanged"):
        return f"{group.replace('_', ' ')}/{name}"
    if "correlation" in group:
        return f"{name}/{group.replace('_', ' ')}"
    return f"target of {relation}/{name}" if key.startswith("edit_step/") else key
