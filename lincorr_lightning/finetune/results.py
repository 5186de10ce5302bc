"""Tables, figures and `Results` of edits and of their forecasts.

`cases_table`, `outcome_figures` and `outcome_charts` serve callbacks that measure what edits do,
in any run; `finetune_results` and `forecast_results` are those of the two studies.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import astuple, fields
from functools import partial
from typing import Any

from lincorr_lightning.finetune import figures
from lincorr_lightning.finetune.cases import EditCase
from lincorr_lightning.functional.outcomes import Outcome
from lincorr_lightning.results.results import Column, Figure, Table

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


def cases_table(
    cases: Sequence[EditCase], relation: str, taught: bool = True, suffix: str = ""
) -> Table:
    """Return the table ``cases`` with a row per edit, in the order of the edits (paper, table 6).

    Args:
        cases: The cases of a run.
        relation: Name of the relation, for the caption.
        taught: Whether the LM was taught; False if its subjects were watched without edits.
        suffix: Appended to the table's name where a run has several.
    """
    formats = _LOGITS | _WEIGHTS | _SHARES
    names = [field.name for field in fields(EditCase)]
    headings = _HEADINGS | {"source_answer": "taught" if taught else "source answer"}
    columns = [Column(name, headings.get(name, ""), formats.get(name, "")) for name in names]
    what = "each edit" if taught else "training"
    return Table(
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

    Args:
        cases: The cases of a run.
        relation: Name of the relation, for titles.
        random: Share of edits for which a random label would be right; None if unknown.
        taught: Whether the LM was taught; False if its subjects were watched without edits.
        suffix: Appended to the figures' names where a run has several.
    """
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

    Args:
        relation: Name of the relation; it becomes the group.
        controls: Kinds of knowledge that must not change.
        prefix: Prefix of the log keys of outcomes and controls, where several relations are
            measured.
        by_edit_step: Whether the x axis is the step within an edit, as for independent edits.

    Returns:
        Group -> chart -> regular expressions of log keys, as TensorBoard takes them.
    """
    steps = "edit_step/" if by_edit_step else ""
    outcomes = f"{prefix}{steps}" + ("" if by_edit_step else "generalization/")
    correlations = (
        "gradient_correlation", "gradient_correlation_auto", "permuted_gradient_correlation",
        "logit_correlation",
    )  # fmt: skip
    keys = {
        "generalized and hallucinated": [
            f"{outcomes}{o}" for o in (Outcome.GENERALIZED, Outcome.HALLUCINATED)
        ],
        "all outcomes": [f"{outcomes}{name}" for name in (*Outcome, "source_learned")],
        "probability": [f"{prefix}{steps}probability/{p}" for p in ("reference", "old_answer")],
        "controls unchanged": [f"{prefix}{steps}control_unchanged/{name}" for name in controls],
        "correlation": [f"{steps}{name}/{relation}" for name in correlations],
    }
    after = " after each step of an edit" if by_edit_step else ""
    # TensorBoard takes all log keys that a pattern matches from their beginning.
    charts = {
        f"{title}{after}": [f"{re.escape(key)}$" for key in chosen]
        for title, chosen in keys.items()
        if chosen
    }
    return {relation: charts}
