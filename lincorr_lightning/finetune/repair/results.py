"""Tables, figure and `Results` of a repair."""

from collections import ChainMap, Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from statistics import fmean
from typing import Any

import numpy as np
import scipy
from matplotlib.figure import Figure as MatplotlibFigure
from pandas import DataFrame

from lincorr_lightning.finetune.edit_files import SEPARATOR
from lincorr_lightning.finetune.repair.datamodule import HELD_OUT, SHOWN, RepairDataset
from lincorr_lightning.finetune.results import BY_REFERENCE, OUTCOME_MEANS
from lincorr_lightning.functional import Outcome, outcome_shares, reference_scores
from lincorr_lightning.results.differences import difference_of_means
from lincorr_lightning.results.plots import bars
from lincorr_lightning.results.results import Figure, Results
from lincorr_lightning.results.table import Table

_PARTS = {SHOWN: "answers of the repair's examples", HELD_OUT: "other answers"}


def summarize_cases(cases: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return the shares of the edits of each part that has some, from rows of the table ``cases``.

    ``source_learned``: the taught label leads after the edit; ``right_before``: the reference leads
    without it; ``in_context``: it leads when the new answer is stated before the target prompt;
    ``random``: mean share of the target labels that are in the reference; ``constant``: share of
    the edits for which the best constant label is right; ``macro``: means over distinct references;
    ``controls``: unchanged answers by kind; ``new_targets``: of edits whose target no example has.
    """

    def outcomes(group: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        return {"n": len(group), **outcome_shares([case["outcome"] for case in group])}

    summaries: dict[str, dict[str, Any]] = {}
    for part in _PARTS:
        if not (group := [case for case in cases if case["part"] == part]):
            continue
        controls = _controls(group)
        names = ("source_learned", "right_before", "in_context", "random", *controls)
        shares = {name: fmean(case[name] for case in group) for name in names}
        kept = {name.removesuffix("_unchanged"): shares.pop(name) for name in controls}
        references = [case["reference"].split(SEPARATOR) for case in group]
        scores = reference_scores([case["outcome"] for case in group], references)
        summaries[part] = {
            **outcomes(group), **shares, "constant": scores.pop("constant"),
            "macro": {name.removeprefix("macro_"): one for name, one in scores.items()},
            "controls": kept,
        }  # fmt: skip
        if new := [case for case in group if not case["target_shown"]]:
            summaries[part]["new_targets"] = outcomes(new)
    return summaries


def _controls(cases: Sequence[Mapping[str, Any]]) -> list[str]:
    return [name for name in (cases[0] if cases else ()) if name.endswith("_unchanged")]


def repair_results(
    cases: Mapping[str, Sequence[Mapping[str, Any]]], perplexity: Mapping[str, float],
    n_steps: int, dataset: RepairDataset | None, callbacks: Sequence[Results] = (),
) -> Results:  # fmt: skip
    """Return the results of a repair.

    `cases` are what each measured edit did, ``before`` and ``after`` the repair, and `perplexity`
    is that of other texts; `dataset` has the examples, None if unknown. The values of the results
    of `callbacks` stand among the repair's own.
    """
    summaries = {stage: summarize_cases(rows) for stage, rows in cases.items()}
    rows = [{"part": part, "stage": stage, **parts[part]} for part in _PARTS
            for stage, parts in summaries.items() if part in parts]  # fmt: skip
    tables = [_summary_table(rows, perplexity, _verdict(cases)), _cases_table(cases)]
    values = dict(ChainMap(*(dict(one.values) for one in callbacks)))
    values |= {part: {stage: parts[part] for stage, parts in summaries.items() if part in parts}
               for part in _PARTS}  # fmt: skip
    values |= {"perplexity": dict(perplexity), "n_steps": n_steps}
    if dataset is not None:
        answers = [(answer, part) for part, texts in dataset.split.items() for answer in texts]
        texts = dataset.relation.target.texts
        examples = [
            (edit.subject, edit.answer, SEPARATOR.join(texts[i].strip() for i in edit.reference))
            for edit in dataset.examples
        ]
        tables += [
            Table.of("answers", answers, ("answer", "part"),
                     "Source answers of the examples (shown), and those held out."),
            Table.of("examples", examples, ("subject", "source_answer", "reference"),
                     "The examples that the repair trains on."),
        ]  # fmt: skip
        values["example_references"] = dict(Counter(row[-1] for row in examples).most_common())
    caption = "Outcomes of edits before and after the repair."
    figure = Figure("repair", caption, partial(repair_figure, rows))
    included = [replace(one, values={k: v for k, v in one.values.items() if values[k] is not v})
                for one in callbacks]  # fmt: skip
    return Results("repair", values, tables=tables, figures=[figure], included=included)


def _verdict(cases: Mapping[str, Sequence[Mapping[str, Any]]]) -> str:
    """Return whether fewer edits hallucinate after the repair, and why others than its own do.

    Each reference counts once: of all edits, the few most frequent ones would decide.
    """
    if not all(cases.values()):  # as in a dry run
        return ""
    rows = [
        (case["part"], case["reference"], stage, case["outcome"] == Outcome.HALLUCINATED)
        for stage, own in cases.items() for case in own
    ]  # fmt: skip
    frame = DataFrame(rows, columns=["part", "reference", "stage", "wrong"])
    shares = frame.groupby(list(frame)[:3])["wrong"].mean().unstack()[["before", "after"]]
    both = {part: own.to_numpy(float) for part, own in shares.groupby("part") if len(own) > 1}
    changes = {part: difference_of_means(own, np.ones_like(own)) for part, own in both.items()}
    if (other := changes.get(HELD_OUT)) is None:
        return ""
    effect = "helps" if other.high < 0 else "harms" if other.low > 0 else "does not help"
    points = [f"{100 * number:+.0f}" for number in (other.value, other.low, other.high)]
    text = (
        f"The repair {effect} other answers (hallucinated {points[0]} points, 95 % {points[1]} to "
        f"{points[2]}, over {len(both[HELD_OUT])} references). "
    )
    if other.high < 0 or SHOWN not in changes:
        return text.strip() + "\n"
    helped = changes[SHOWN].high < 0
    own = "It helps those of its examples" if helped else "Nor does it help those of its examples"
    return f"{text}{own} (95 %): see docs/repair.md.\n"


def _summary_table(
    rows: Sequence[Mapping[str, Any]], perplexity: Mapping[str, float], verdict: str
) -> Table:
    controls = sorted({f"{name}_unchanged" for row in rows for name in row["controls"]})
    shares = [
        "source_learned", "generalized", "macro_generalized", "constant", "hallucinated",
        "hallucinated_low", "hallucinated_high", "macro_hallucinated", *list(Outcome)[2:],
        "right_before", "in_context", *controls,
    ]  # fmt: skip
    cells = []
    for row in rows:
        low, high = hallucinated_interval(row)
        kept = {f"{name}_unchanged": share for name, share in row["controls"].items()}
        macro = {f"macro_{name}": share for name, share in row["macro"].items()}
        cells.append({**row, **kept, **macro, "hallucinated_low": low, "hallucinated_high": high,
                      "perplexity": perplexity.get(row["stage"])})  # fmt: skip
    table = Table.of(
        "repair", cells, ["part", "stage", "n", *shares, "perplexity"],
        "Edits before and after the repair",
        f"{verdict}Right before the edit: the reference leads without it. Right in context: it "
        "leads when the new answer is stated before the target prompt. By reference: the mean over "
        "distinct references. Best constant: the one target label that is right most often. "
        "Perplexity: of other texts, those of the tiny world unless data.texts is set.",
        headline=True,
        headings=BY_REFERENCE | {
            "part": "edits of", "n": "edits", "hallucinated_low": "hallucinated, 95 % from",
            "hallucinated_high": "to", "right_before": "right before the edit",
            "in_context": "right in context",
        },
        formats={**dict.fromkeys(shares, ".0%"), "perplexity": ".1f"},
    )  # fmt: skip
    return replace(table, words=_PARTS)


def hallucinated_interval(summary: Mapping[str, Any]) -> tuple[float, float]:
    """Return the 95 % interval of the share of hallucinated edits, over edits (Wilson 1927)."""
    test = scipy.stats.binomtest(round(summary["hallucinated"] * summary["n"]), summary["n"])
    low, high = test.proportion_ci(method="wilson")
    return float(low), float(high)


def _cases_table(cases: Mapping[str, Sequence[Mapping[str, Any]]]) -> Table:
    names = [
        "part", "stage", "subject", "source_answer", "reference", "answer_before", "answer_after",
        "outcome", "source_learned", "target_shown", "in_context",
    ]  # fmt: skip
    controls = sorted(_controls(cases["before"]))
    return Table.of(
        "cases", [{**row, "stage": stage} for stage, rows in cases.items() for row in rows],
        [*names, *controls], "What each edit did, before and after the repair.",
    ).sampled(
        "subject", "source_answer", **OUTCOME_MEANS, in_context="in_context",
        **{one: one for one in controls},
    )  # fmt: skip


def repair_figure(rows: Sequence[Mapping[str, Any]]) -> MatplotlibFigure:
    """Draw the shares of the outcomes of each part, before and after."""
    parts = [
        {"outcome": name.value, "edits": f"{_PARTS[row['part']]} ({row['n']}), {row['stage']}",
         "share": row[name.value]}
        for name in Outcome for row in rows
    ]  # fmt: skip
    return bars(
        DataFrame(parts, columns=["outcome", "edits", "share"]), "outcome", "share", "edits",
        title="Outcomes of edits before and after the repair", label="share of edits",
    )  # fmt: skip
