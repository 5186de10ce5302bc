"""Tables, figures and `Results` of edits and of their forecasts."""

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from statistics import fmean
from typing import Any

from lincorr_lightning.finetune import figures as drawing
from lincorr_lightning.finetune.batches import EditDataset
from lincorr_lightning.finetune.cases import EditCase
from lincorr_lightning.finetune.edit_files import SEPARATOR
from lincorr_lightning.finetune.edits import Skipped, skip_counts
from lincorr_lightning.finetune.forecasts import Forecasts
from lincorr_lightning.functional.outcomes import Outcome, outcome_shares
from lincorr_lightning.results.plots import training_curves
from lincorr_lightning.results.results import Figure, Results
from lincorr_lightning.results.table import Mean, Table, number

_CORRELATIONS = {
    "gradient_correlation": "gradient r", "permuted_gradient_correlation": "permuted",
    "gradient_correlation_auto": "ridge auto", "logit_correlation": "logit r",
}  # fmt: skip
_OUTCOMES = [outcome.value for outcome in Outcome]
_WORDS = {
    "map": "the given W", "same_reference": "edits with the same reference*",
    "minus_reference_weight": "W of the reference*", "vocabulary": "the vocabulary alone*",
    "answer_before": "answer before training*", "most_frequent": "most frequent answer*",
}  # fmt: skip
BY_REFERENCE = {
    "macro_generalized": "generalized, by reference",
    "macro_hallucinated": "hallucinated, by reference", "constant": "best constant",
    "vocabulary": "the vocabulary alone", "macro_vocabulary": "the same, by reference",
}  # fmt: skip
"""Headings of `reference_scores`."""
OUTCOME_MEANS: Mapping[str, Mean] = {
    **{outcome: Mean("outcome", outcome) for outcome in _OUTCOMES},
    **{f"macro_{outcome}": Mean("outcome", outcome, per="reference") for outcome in _OUTCOMES},
    "source_learned": Mean("source_learned"),
}
"""Numbers that are means over a table of edits."""


def case_results(
    cases: Sequence[EditCase], relation: str, random: float | None = None, taught: bool = True,
    suffix: str = "",
) -> tuple[Table, list[Figure]]:  # fmt: skip
    """Return the table ``cases`` (paper, table 6) and its figures (figure 5 is one of them).

    `random` is the share of edits for which a random label would be right; `taught` is False if
    subjects were watched without edits; `suffix` is appended to all names where a run has several.
    """
    table = Table.of(
        f"cases{suffix}", cases, EditCase,
        f"What {'each edit' if taught else 'training'} did to the target of {relation} (paper, "
        "table 6).",
        "W stands in the column of the source answer; logits are those before training.",
        headings={"source_answer": "taught" if taught else "source answer"},
    ).sampled(
        "subject", "source_answer", **OUTCOME_MEANS,
        probability_reference="probability_reference_after",
    )  # fmt: skip
    return table, [
        Figure(f"reference_weights{suffix}",
               f"W of the reference in generalized and in hallucinated edits of {relation} (paper, "
               "figure 5).",
               partial(drawing.reference_weights_figure, cases, relation, taught)),
        Figure(f"outcomes{suffix}", f"Share of each outcome of the edits of {relation}.",
               partial(drawing.outcomes_figure, cases, relation, random, taught)),
    ]  # fmt: skip


def forecast_table(
    forecasts: Forecasts, after: tuple[Sequence[str], Sequence[str]] | None = None,
    max_risk: float | None = None,
) -> Table:  # fmt: skip
    """Return the table ``forecast`` with a row per edit.

    `after` are the answers and outcomes after training; with `max_risk`, the table says which edits
    are more likely to hallucinate than that.
    """
    cells: dict[str, Sequence[Any]] = {
        "subject": forecasts.subjects, "source_answer": forecasts.source_answers,
        "reference": forecasts.references, "answer_before": forecasts.leading(forecasts.before),
        "expected_answer": forecasts.leading(forecasts.predicted[forecasts.default]),
    }  # fmt: skip
    headings = {
        "source_answer": "new answer", "answer_before": "before", "answer_after": "after",
        "above_max_risk": "above max_risk", "answer": "expected answer",
    }  # fmt: skip
    formats = {}
    for name, logits in forecasts.predicted.items():
        cells[f"{name}_answer"] = forecasts.leading(logits)
        cells[f"{name}_risk"] = [number(risk) for risk in forecasts.risks(name)]
        headings |= {f"{name}_answer": f"{name}: answer", f"{name}_risk": "risk"}
        formats[f"{name}_risk"] = ".2f"
    cells |= forecasts.baselines
    formats |= dict.fromkeys(forecasts.baselines, ".3g")
    if forecasts.probabilities is not None:
        for outcome in Outcome:
            cells[f"p_{outcome}"] = forecasts.probability(outcome)
            formats[f"p_{outcome}"] = ".0%"
    if max_risk is not None:
        risks = forecasts.probability(Outcome.HALLUCINATED)
        cells["above_max_risk"] = [risk > max_risk for risk in risks]
    if forecasts.causes:
        cells["cause"] = forecasts.causes
    if after is not None:
        cells["answer_after"], cells["outcome"] = after
    return Table.of(
        "forecast", zip(*cells.values(), strict=True), list(cells),
        f"Forecast of each edit of {forecasts.relation}: predicted answer and risk.",
        "The risk is how far the best wrong label is predicted ahead of the reference, in logits.",
        headings=headings, formats=formats,
    ).sampled(
        "subject", "source_answer", **{one: f"p_{one}" for one in _OUTCOMES if f"p_{one}" in cells},
    )  # fmt: skip


def _riskiest_table(forecasts: Forecasts, every: Table, n: int = 10) -> Table:
    """Return the n edits that are most likely to hallucinate, of the table of all forecasts."""
    names = ["subject", "source_answer", "reference", "answer", "p_hallucinated", "cause",
             "above_max_risk"]  # fmt: skip
    frame = every.frame.sort_values("p_hallucinated", ascending=False, kind="stable").head(n)
    frame = frame.rename(columns={"expected_answer": "answer"})
    frame = frame if "cause" in frame else frame.assign(cause="")
    return replace(
        every, name="riskiest", frame=frame[[name for name in names if name in frame]],
        caption=f"The edits of {forecasts.relation} that are most likely to hallucinate.",
        note="", headline=True, means={},
    )  # fmt: skip


def forecast_results(
    forecasts: Forecasts, max_risk: float | None = None, skipped: Sequence[Skipped] = ()
) -> Results:
    """Return the results of a forecast without training; for `max_risk` see `forecast_table`."""
    n, shares = len(forecasts.subjects), _predicted_shares(forecasts)
    rows: list[dict[str, Any]] = [{"forecaster": name, **row} for name, row in shares.items()]
    every = forecast_table(forecasts, max_risk=max_risk)
    tables = [every, *skipped_tables(skipped)]
    words = drawing.forecaster_words(shares) | _WORDS
    note = f"Expected answers: {words.get(forecasts.default, forecasts.default)}. "
    expected = n_above = None
    if forecasts.probabilities is None:
        note += "There are no probabilities: they need model.optimizer_step true."
    else:
        expected = {outcome.value: fmean(forecasts.probability(outcome)) for outcome in Outcome}
        rows.append({"forecaster": "mean probability", **expected})
        note += f"Probabilities: {forecasts.probabilities_from}."
        tables.insert(0, _riskiest_table(forecasts, every))
    if max_risk is not None:
        n_above = int(every.frame["above_max_risk"].sum())
        note += f" {n_above} of {n} edits hallucinate with a probability above {max_risk:g}."
    outcomes = Table.of(
        "forecast_outcomes", rows, ["forecaster", *_OUTCOMES],
        f"Predicted outcomes of {n} edits of {forecasts.relation}, by forecaster.", note,
        headline=True, formats=dict.fromkeys(_OUTCOMES, ".1%"),
    )  # fmt: skip
    outcomes = replace(outcomes, words=words)
    values = {
        "relation": forecasts.relation, "n_edits": n, "skipped": skip_counts(skipped),
        "predicted_outcomes": shares, "mean_probability": expected,
        "forecast_default": forecasts.default, "probabilities_from": forecasts.probabilities_from,
        "n_above_max_risk": n_above,
    }  # fmt: skip
    figures = [_risk_figure(forecasts)]
    return Results("forecast", values, tables=[outcomes, *tables], figures=figures)


def _risk_figure(forecasts: Forecasts, outcomes: Sequence[str] = ()) -> Figure:
    caption = f"Risks of {len(forecasts.subjects)} edits of {forecasts.relation}, by forecaster"
    caption += ", against their outcomes." if outcomes else "."
    return Figure("forecast", caption, partial(drawing.risk_figure, forecasts, outcomes))


def _predicted_shares(forecasts: Forecasts) -> dict[str, dict[str, float | None]]:
    return {name: outcome_shares(forecasts.outcomes(name)) for name in forecasts.predicted}


def finetune_results(
    measured: Sequence[Results], forecasts: Forecasts | None, run: Mapping[str, Any],
    dataset: EditDataset | None, history: Mapping[str, Sequence[tuple[int, float]]], subtitle: str,
) -> Results:  # fmt: skip
    """Return the results of a fine-tune, with those of its callbacks.

    The values of the ``generalization`` on the run's own relation, and the correlations of the
    ``gradient_correlation`` on it, stand at the top level.

    `run` has values of the run itself: ``protocol``, ``n_steps``, ``n_edits``, ...; `dataset` is
    None if the run's dataset lists no edits; `history` has ``(step, value)`` pairs by log key that
    callbacks measured; `subtitle` says what was trained, and how, for the figure.
    """
    outcomes = _of_kind(measured, "generalization")
    gradients = _of_kind(measured, "gradient_correlation")
    name = outcomes[0].values["relation"] if outcomes else None
    name = name if dataset is None else dataset.relation.name
    own = next((one for one in outcomes if one.values.get("relation") == name), None)
    by_relation = _by_relation(gradients)
    correlations = by_relation.get(name or "", {})
    values: dict[str, Any] = {
        "relation": name, **run,
        **dict.fromkeys(("source_learned", *_OUTCOMES, "random", "constant", "macro", "controls")),
        "skipped": {} if dataset is None else skip_counts(dataset.skipped),
        **({} if own is None else own.values),
        **{key: correlations.get(key) for key in ("gradient_correlation", "logit_correlation")},
        "gradients": by_relation, "forecast": None,
        "forecast_default": forecasts and forecasts.default,
        "probabilities_from": forecasts and forecasts.probabilities_from,
        "n_left_out": 0 if dataset is None else len(dataset.left_out),
    }  # fmt: skip
    if others := _by_relation([one for one in outcomes if one is not own]):
        values["generalizations"] = others
    tables = [outcomes_table(outcomes, own)] if outcomes else []
    if gradients:
        tables.append(Table.of(
            "correlations", [{"relation": name, **row} for name, row in by_relation.items()],
            ["relation", *_CORRELATIONS],
            "Label-wise r between the predicted and the measured change of the target logits "
            "(paper, table 4).",
            "permuted: with the rows of W permuted.",
            headline=True, headings=_CORRELATIONS, formats=dict.fromkeys(_CORRELATIONS, ".2f"),
        ))  # fmt: skip
    figures = [_training_figure(history, name or "the source", subtitle)] if history else []
    if forecasts is not None:
        if (after := _after_training(forecasts, own)) is None:
            values["predicted_outcomes"] = _predicted_shares(forecasts)
        else:
            values["forecast"] = forecasts.scores(*after)
            tables.append(_scores_table(values["forecast"], forecasts))
        tables.append(forecast_table(forecasts, after))
        figures.append(_risk_figure(forecasts, after[1] if after else ()))
    if dataset is not None:
        tables += _edits_tables(dataset)
    merged = {one.study for one in (*outcomes, *gradients)}  # their values are among those above
    included = [replace(one, values={}) if one.study in merged else one for one in measured]
    return Results("source_finetune", values, tables=tables, figures=figures, included=included)


def _of_kind(measured: Sequence[Results], study: str) -> list[Results]:
    return [one for one in measured if re.fullmatch(rf"{study}(_\d+)?", one.study)]


def _by_relation(measured: Sequence[Results]) -> dict[str, dict[str, Any]]:
    values: dict[str, dict[str, Any]] = {}
    counts: Counter[str] = Counter()
    for one in measured:
        relation = one.values["relation"]
        counts[relation] += 1
        key = relation if counts[relation] == 1 else f"{relation} ({counts[relation]})"
        values[key] = {name: value for name, value in one.values.items() if name != "relation"}
    return values


def _after_training(
    forecasts: Forecasts, own: Results | None
) -> tuple[list[str], list[str]] | None:
    """Return answers and outcomes after training, if a callback measured the forecast edits."""
    if own is None:
        return None
    cases = own.tables[0].frame.to_dict("list")
    edits = list(forecasts.subjects), list(forecasts.source_answers)
    same = (cases["subject"], cases["source_answer"]) == edits
    return (cases["answer_after"], cases["outcome"]) if same else None


def _edits_tables(dataset: EditDataset) -> Iterator[Table]:
    relation, edits, left_out = dataset.relation, dataset.edits, dataset.left_out
    if edits:
        source, target = relation.source.texts, relation.target.texts
        rows = [
            (one.subject, one.answer, SEPARATOR.join(target[i] for i in one.reference),
             source[one.source_before], target[one.target_before])
            for one in edits
        ]  # fmt: skip
        yield Table.of(
            "edits", rows, ("subject", "answer", "reference", "source_before", "target_before"),
            f"The edits of {relation.name}, with the LM's answers before training.",
        )  # fmt: skip
    if left_out:
        yield Table.of(
            "left_out", left_out, (),
            f"The {len(left_out)} of {len(edits) + len(left_out)} edits that are left out, because "
            "they are forecast to hallucinate (data.max_risk).",
            headings={"p_hallucinated": "p hallucinated"}, formats={"p_hallucinated": ".0%"},
        )  # fmt: skip
    yield from skipped_tables(dataset.skipped)


def skipped_tables(skipped: Sequence[Skipped]) -> Iterator[Table]:
    """Yield the table ``skipped`` of the rows of a file that are no edit, if there are any."""
    if skipped:
        yield Table.of(
            "skipped", skipped, Skipped._fields, "Rows of the file that are no edit, and why.",
            headings={"where": "file and row"},
        )  # fmt: skip


def outcomes_table(outcomes: Sequence[Results], own: Results | None) -> Table:
    """Return the shares of the outcomes of each of some results, `own` first."""
    shares = [
        "source_learned", "generalized", "macro_generalized", "constant", "vocabulary",
        "macro_vocabulary", "random", "hallucinated", "macro_hallucinated", *list(Outcome)[2:],
    ]  # fmt: skip
    rows = []
    for one in sorted(outcomes, key=lambda one: one is not own):
        kept = {f"{n}_unchanged": c["unchanged"] for n, c in one.values.get("controls", {}).items()}
        macro = {f"macro_{n}": share for n, share in one.values.get("macro", {}).items()}
        near = one.values.get("vocabulary") or {}
        macro["macro_vocabulary"] = near.get("macro_right")
        rows.append({**one.values, **macro, **kept, "vocabulary": near.get("right")})
        shares += [key for key in kept if key not in shares]
    return Table.of(
        "outcomes", rows, ["relation", "n_edits", *shares],
        "Share of edits by outcome (paper, table 5).",
        "by reference: the mean over distinct references. best constant: the one target label that "
        "is right most often; the vocabulary alone: the one nearest to the new answer in the LM's "
        "head is right; random: a random one is; color_unchanged: an unrelated answer stays.",
        headline=True, headings={"n_edits": "edits", **BY_REFERENCE},
        formats=dict.fromkeys(shares, ".1%"),
    )  # fmt: skip


def _scores_table(scores: Mapping[str, Mapping[str, Any]], forecasts: Forecasts) -> Table:
    origin = forecasts.probabilities_from
    table = Table.of(
        "forecast_scores", [{"forecaster": name, **row} for name, row in scores.items()],
        ["forecaster", "auroc", "auroc_within", "accuracy", "brier"],
        f"Scores of the forecasts of {len(forecasts.subjects)} edits.",
        "Within: among edits of the same reference. *: without a forecast."
        + (f" Probabilities: {origin}." if origin else ""),
        headline=True,
        headings={"auroc": "AUROC of the risk", "auroc_within": "within a reference",
                  "accuracy": "accuracy of the answer", "brier": "Brier score"},
        formats={"auroc": ".2f", "auroc_within": ".2f", "accuracy": ".1%", "brier": ".2f"},
    )  # fmt: skip
    return replace(table, words=drawing.forecaster_words(scores) | _WORDS)


def _training_figure(
    history: Mapping[str, Sequence[tuple[int, float]]], relation: str, subtitle: str
) -> Figure:
    curves: dict[str, list[tuple[int, float]]] = {}
    for key, points in history.items():
        if "/macro_" in key or key.endswith("_of_learned"):
            continue  # near the shares of all edits, in the same panel
        curves.setdefault(_panel(key, relation), []).extend(points)
    return Figure(
        "training", "Outcomes, probabilities and correlations in the course of training.",
        partial(training_curves, curves, f"Training on edits of {relation}", subtitle),
    )  # fmt: skip


def _panel(key: str, relation: str) -> str:
    """Return a key whose first part names its panel: one per relation's correlations."""
    group, _, name = key.removeprefix("edit_step/").rpartition("/")
    if group in ("probability", "control_unchanged"):
        return f"{group}/{name}".replace("_", " ")
    if "correlation" in group:
        return f"r, {name}/{group.replace('_', ' ')}"
    panel, name = f"share of edits, {relation}", name.replace("_", " ")
    return f"{panel}/{name}" if key.startswith("edit_step/") else key
