"""Results of edits that were made elsewhere: outcomes, and what else the edits reach."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor

from lincorr_lightning.finetune.cases import SIDES, EditAnswers, Logits, edit_cases, outcome_values
from lincorr_lightning.finetune.edits import ResolvedEdits, skip_counts, taught_labels
from lincorr_lightning.finetune.results import edits_results, outcomes_tables
from lincorr_lightning.functional import Outcome
from lincorr_lightning.lm.fingerprint import fingerprint_data
from lincorr_lightning.results.results import Results
from lincorr_lightning.results.table import Table, column, number


@dataclass(frozen=True)
class Reading:
    """What LMs answer about edits: logits, and whether a right label leads in other words.

    `paraphrases` are by side, ``(n_prompts,)`` bool.
    """

    logits: Logits
    paraphrases: dict[str, Tensor]


@dataclass(frozen=True)
class ReachRow:
    """What edits reach, a row of the table ``reach`` for each kind of prompts."""

    prompts: str
    n: int | None = column("", ",d")
    n_target: int | None = column("n target", ",d")
    source_learned: float | None = column("learned", ".0%")
    generalized: float | None = column("", ".0%")
    source_unchanged: float | None = column("source stays", ".0%")
    target_unchanged: float | None = column("target stays", ".0%")


def edited_results(
    edits: ResolvedEdits,
    before: Reading,
    after: Reading,
    maps: tuple[Tensor, Tensor | None],
    lms: Sequence[Mapping[str, Any]],
    n_others: int,
) -> Results:
    """Return the results of what LMs answer before and after edits.

    `maps` are W and the `nearness` of labels; `lms` are the infos of the LM before, and of the
    edited ones.
    """
    relation = edits.relation
    answers = EditAnswers.of(edits.edits, before.logits, after.logits)
    cases = edit_cases(relation, edits.edits, answers, *maps)
    unedited = replace(answers, after=before.logits).means()
    warning = _warning(*lms)
    if warning:
        rank_zero_warn(warning)
    values: dict[str, Any] = {
        **outcome_values(relation.name, answers, cases, neighbours=n_others),
        "n_others": n_others,
        "paraphrases": _paraphrases(after),
        "before": {
            "source_learned": number(unedited["generalization/source_learned"]),
            "generalized": number(unedited["generalization/right_before"]),
            "paraphrases": _paraphrases(before),
        },
        "skipped": skip_counts(edits.skipped),
        "lm_before": lms[0],
        "warning": warning,
        "edited_lms": {
            "n": len(lms) - 1,
            "fingerprint": fingerprint_data([lm["fingerprint"] for lm in lms[1:]]),
        },
    }
    scalars = {f"test/{name}": values[name] for name in ("source_learned", *Outcome)}
    results = edits_results("edited_lm", values, cases, scalars, edits.skipped)
    table, *skipped = results.tables
    # Of an answer of several tokens, the first is its label.
    texts = relation.source.texts
    sources = [logits["source"].argmax(1).tolist() for logits in (before.logits, after.logits)]
    frame = table.frame.assign(
        id=[row.id for row in edits.rows],
        source_label=[texts[label] for label in taught_labels(edits.edits).tolist()],
        source_before=[texts[label] for label in sources[0]],
        source_after=[texts[label] for label in sources[1]],
    )
    summary, outcomes = outcomes_tables([results])
    cases_table = replace(table, frame=frame)
    tables = [summary, _reach_table(values), outcomes, cases_table, *skipped]
    figures = [replace(figure, tables=[cases_table]) for figure in results.figures]
    verdict = [*filter(None, [warning]), *results.verdict]
    return replace(results, tables=tables, figures=figures, verdict=verdict)


def _paraphrases(reading: Reading) -> dict[str, Any]:
    learned, generalized = (reading.paraphrases[side].double() for side in SIDES)
    return {
        "source_learned": number(learned.mean().item()),
        "generalized": number(generalized.mean().item()),
        "n": len(learned),
        "n_target": len(generalized),
    }


def _warning(before: Mapping[str, Any], *edited: Mapping[str, Any]) -> str:
    """Return what is wrong with the edited LMs, or with some of them; empty if nothing."""
    kinds = ("dtype", "quantization")
    weights = before["fingerprint"]["weights"]
    wrong = {
        "different dtypes or quantizations: part of what changed is rounding.": [
            lm for lm in edited if any(lm.get(kind) != before.get(kind) for kind in kinds)
        ],
        "the same weights: nothing was edited.": [
            lm for lm in edited if lm["fingerprint"]["weights"] == weights
        ],
    }
    return " ".join(
        f"model.before and {len(lms)} of {len(edited)} edited LMs, such as "
        f"{lms[0]['name_or_path']}, have {what}"
        for what, lms in wrong.items()
        if lms
    )


def _reach_table(values: Mapping[str, Any]) -> Table:
    before = values["before"]
    n = {"n": values["n_edits"]}
    rows = [
        {"prompts": "before", **before, **n},
        {"prompts": "after", **values, **n},
        {"prompts": "paraphrases before", **before["paraphrases"]},
        {"prompts": "paraphrases", **values["paraphrases"]},
        {"prompts": "neighbours", **values.get("neighbours", {"n": 0})},
    ]
    n_skipped = sum(values["skipped"].values())
    notes = [
        "paraphrases: other wordings of source (n) and target (n target); neighbours: subjects "
        "without an edit. generalized: of before and of paraphrases, all right targets. The "
        "editing literature calls learned paraphrases generalization, and neighbours that stay "
        "locality.",
        f"Rows that are no edit: {n_skipped} (tables/skipped.csv)." if n_skipped else "",
        values["warning"],
    ]
    return Table.of(
        "reach",
        [row for row in rows if row["n"]],
        ReachRow,
        f"What the edits of {values['relation']} reach.",
        " ".join(filter(None, notes)),
        headline=True,
    )
