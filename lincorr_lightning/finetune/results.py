"""Tables, figures and `Results` of edits."""

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from lincorr_lightning.finetune import figures as drawing
from lincorr_lightning.finetune.batches import EditDataset
from lincorr_lightning.finetune.cases import EditCase
from lincorr_lightning.finetune.edit_files import SEPARATOR
from lincorr_lightning.finetune.edits import Skipped, skip_counts
from lincorr_lightning.functional.outcomes import Outcome
from lincorr_lightning.results.plots import training_curves
from lincorr_lightning.results.results import Figure, Results
from lincorr_lightning.results.table import Mean, Table

_CORRELATIONS = {
    "gradient_correlation": "gradient r",
    "permuted_gradient_correlation": "permuted",
    "gradient_correlation_auto": "ridge auto",
    "logit_correlation": "logit r",
}
_OUTCOMES = [outcome.value for outcome in Outcome]
BY_REFERENCE = {
    "macro_generalized": "generalized, by reference",
    "macro_hallucinated": "hallucinated, by reference",
    "constant": "best constant",
    "vocabulary": "the vocabulary alone",
    "macro_vocabulary": "the same, by reference",
    "auroc": "AUROC of the nearest word",
    "auroc_within": "the same, within a reference",
}
"""Headings of `reference_scores` and of the forecast's scores."""
OUTCOME_MEANS: Mapping[str, Mean] = {
    **{outcome: Mean("outcome", outcome) for outcome in _OUTCOMES},
    **{f"macro_{outcome}": Mean("outcome", outcome, per="reference") for outcome in _OUTCOMES},
    "source_learned": Mean("source_learned"),
}
"""Numbers that are means over a table of edits."""


def case_results(
    cases: Sequence[EditCase],
    relation: str,
    random: float | None = None,
    taught: bool = True,
    suffix: str = "",
) -> tuple[Table, list[Figure]]:
    """Return the table ``cases`` (paper, table 6) and its figures (figure 5 is one of them).

    `random` is the share of edits for which a random label would be right; `taught` is False if
    subjects were watched without edits; `suffix` is appended to all names where a run has several.
    """
    table = Table.of(
        f"cases{suffix}",
        cases,
        EditCase,
        f"What {'each edit' if taught else 'training'} did to the target of {relation} (paper, "
        "table 6).",
        "W stands in the column of the source answer; logits are those before training.",
        headings={"source_answer": "taught" if taught else "source answer"},
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
            partial(drawing.reference_weights_figure, cases, relation, taught),
        ),
        Figure(
            f"outcomes{suffix}",
            f"Share of each outcome of the edits of {relation}.",
            partial(drawing.outcomes_figure, cases, relation, random, taught),
        ),
    ]


def finetune_results(
    measured: Sequence[Results],
    run: Mapping[str, Any],
    dataset: EditDataset | None,
    history: Mapping[str, Sequence[tuple[int, float]]],
    subtitle: str,
) -> Results:
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
        "relation": name,
        **run,
        **dict.fromkeys(
            (
                "source_learned",
                *_OUTCOMES,
                "random",
                "constant",
                "macro",
                "controls",
                "forecast",
                "forecast_default",
            )
        ),
        "skipped": {} if dataset is None else skip_counts(dataset.skipped),
        **({} if own is None else own.values),
        **{key: correlations.get(key) for key in ("gradient_correlation", "logit_correlation")},
        "gradients": by_relation,
    }
    if others := _by_relation([one for one in outcomes if one is not own]):
        values["generalizations"] = others
    tables = [outcomes_table(outcomes, own)] if outcomes else []
    if gradients:
        tables.append(
            Table.of(
                "correlations",
                [{"relation": name, **row} for name, row in by_relation.items()],
                ["relation", *_CORRELATIONS],
                "Label-wise r between the predicted and the measured change of the target logits "
                "(paper, table 4).",
                "permuted: with the rows of W permuted.",
                headline=True,
                headings=_CORRELATIONS,
                formats=dict.fromkeys(_CORRELATIONS, ".2f"),
            )
        )
    figures = [_training_figure(history, name or "the source", subtitle)] if history else []
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


def _edits_tables(dataset: EditDataset) -> Iterator[Table]:
    relation, edits = dataset.relation, dataset.edits
    if edits:
        source, target = relation.source.texts, relation.target.texts
        rows = [
            (
                one.subject,
                one.answer,
                SEPARATOR.join(target[i] for i in one.reference),
                source[one.source_before],
                target[one.target_before],
            )
            for one in edits
        ]
        yield Table.of(
            "edits",
            rows,
            ("subject", "answer", "reference", "source_before", "target_before"),
            f"The edits of {relation.name}, with the LM's answers before training.",
        )
    yield from skipped_tables(dataset.skipped)


def skipped_tables(skipped: Sequence[Skipped]) -> Iterator[Table]:
    """Yield the table ``skipped`` of the rows of a file that are no edit, if there are any."""
    if skipped:
        yield Table.of(
            "skipped",
            skipped,
            Skipped._fields,
            "Rows of the file that are no edit, and why.",
            headings={"where": "file and row"},
        )


def outcomes_table(outcomes: Sequence[Results], own: Results | None) -> Table:
    """Return the shares of the outcomes of each of some results, `own` first."""
    shares = [
        "source_learned",
        "generalized",
        "macro_generalized",
        "constant",
        "vocabulary",
        "macro_vocabulary",
        "random",
        "hallucinated",
        "macro_hallucinated",
        *list(Outcome)[2:],
    ]
    scores = ("auroc", "auroc_within")
    rows = []
    for one in sorted(outcomes, key=lambda one: one is not own):
        kept = {f"{n}_unchanged": c["unchanged"] for n, c in one.values.get("controls", {}).items()}
        macro = {f"macro_{n}": share for n, share in one.values.get("macro", {}).items()}
        near = one.values.get("vocabulary") or {}
        macro["macro_vocabulary"] = near.get("macro_right")
        forecast = (one.values.get("forecast") or {}).get("vocabulary", {})
        rows.append({**one.values, **macro, **kept, **forecast, "vocabulary": near.get("right")})
        shares += [key for key in kept if key not in shares]
    return Table.of(
        "outcomes",
        rows,
        ["relation", "n_edits", *shares, *scores],
        "Share of edits by outcome (paper, table 5).",
        "by reference: the mean over distinct references. best constant: the one target label that "
        "is right most often; the vocabulary alone: the one nearest to the new answer in the LM's "
        "head is right; random: a random one is; color_unchanged: an unrelated answer stays. "
        "AUROC: how often an edit that generalizes has a larger margin, by which its nearest word "
        "is right, than one that does not.",
        headline=True,
        headings={"n_edits": "edits", **BY_REFERENCE},
        formats=dict.fromkeys(shares, ".1%") | dict.fromkeys(scores, ".2f"),
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
        partial(training_curves, curves, f"Training on edits of {relation}", subtitle),
    )


def _panel(key: str, relation: str) -> str:
    """Return a key whose first part names its panel: one per relation's correlations."""
    group, _, name = key.removeprefix("edit_step/").rpartition("/")
    if group in ("probability", "control_unchanged"):
        return f"{group}/{name}".replace("_", " ")
    if "correlation" in group:
        return f"r, {name}/{group.replace('_', ' ')}"
    panel, name = f"share of edits, {relation}", name.replace("_", " ")
    return f"{panel}/{name}" if key.startswith("edit_step/") else key
