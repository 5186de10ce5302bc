"""Source fine-tunes and forecasts: what edits did, and what was foreseen of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain, zip_longest
from typing import Any

from lincorr_lightning.results.paper import is_of, paper_numbers
from lincorr_lightning.results.report.document import Column, Part, Table
from lincorr_lightning.results.report.runs import Run

_MOST_CASES = 15
_WEIGHTS = ("weight_reference", "weight_answer", "weight_max")
_OUTCOMES = ("generalized", "hallucinated", "unchanged")
# Hallucinations are what one reads the table of cases for.
_CASES_ORDER = ("hallucinated", "generalized", "unchanged")


def numbers(run: Run) -> Iterator[tuple[str, str, float | None]]:
    """Relation, quantity and value of all that the paper may have too."""
    name = str(run.results["relation"])
    for key in ("generalized", "random", "gradient_correlation", "logit_correlation"):
        yield name, key, run.results.get(key)
    wanted = {
        number.quantity.partition(":")[2]
        for number in paper_numbers([name])
        if is_of(number, run.lm.name)
    } - {""}
    # Of several edits of one answer, the first; W is the same for all but the answer given.
    cases: dict[str, dict[str, str]] = {}
    for case in run.table("cases") if wanted else ():
        cases.setdefault(case.get("source_answer", ""), case)
    for answer in sorted(wanted & cases.keys()):
        for key in _WEIGHTS:
            yield name, f"{key}:{answer}", to_number(cases[answer].get(key))


def facts(run: Run) -> list[tuple[str, str]]:
    """What was taught, and how."""
    results, settings = run.results, run.settings
    found = [("Relation", str(results["relation"])), ("Edits", f"{results['n_edits']:,}")]
    for key, name in (
        ("protocol", "Protocol"),
        ("method", "Method"),
        ("learning_rate", "Learning rate"),
        ("steps_per_edit", "Steps per edit"),
        ("edits_per_step", "Edits per step"),
    ):
        value = settings.get(key, results.get(key))
        if value is not None:
            found.append((name, str(value)))
    if results.get("n_steps") is not None:
        found.append(("Optimizer steps", f"{results['n_steps']:,}"))
    return found


def overview(runs: Sequence[Run]) -> list[Part]:
    """A row for each run (paper, tables 4 and 5)."""
    controls = list(dict.fromkeys(c for run in runs for c in run.results.get("controls") or {}))
    columns = [
        Column("relation"), Column("LM"), Column("edits", "count"), Column("learned", "share"),
        *(Column(name, "share") for name in ("generalized", "random", "hallucinated", "unchanged")),
        *(Column(f"{control} unchanged", "share") for control in controls),
        Column("gradient r", "r"), Column("logit r", "r"),
    ]  # fmt: skip
    keys = ("n_edits", "source_learned", "generalized", "random", "hallucinated", "unchanged")
    rows = [
        [
            run.relation,
            run.lm.label,
            *(run.results.get(key) for key in keys),
            *(
                ((run.results.get("controls") or {}).get(control) or {}).get("unchanged")
                for control in controls
            ),
            run.results.get("gradient_correlation"),
            run.results.get("logit_correlation"),
        ]
        for run in runs
    ]
    return [
        Table(
            "Edits and what became of the target",
            columns,
            rows,
            "Generalized: the target is then the reference of the answer taught; hallucinated: it "
            "went elsewhere; random: an answer drawn from the domain is right.",
        )
    ]


def details(run: Run) -> list[Part]:
    """Tables of one run."""
    parts: list[Part] = []
    results = run.results
    gradients = {k: v for k, v in (results.get("gradients") or {}).items() if v}
    if gradients:
        keys = {
            "gradient_correlation": "gradient r",
            "permuted_gradient_correlation": "permuted",
            "logit_correlation": "logit r",
        }
        parts.append(
            Table(
                "Correlation of W · ΔF of the source with ΔF of the target",
                [Column("pair"), *(Column(name, "r") for name in keys.values())],
                [[pair, *(told.get(key) for key in keys)] for pair, told in gradients.items()],
                exported=False,
            )
        )
    parts += _causes(results)
    if results.get("forecast"):
        rows = [
            [name, told.get("accuracy"), told.get("auroc")]
            for name, told in results["forecast"].items()
        ]
        parts.append(
            Table(
                "How well the forecasts were",
                [Column("forecaster"), Column("accuracy of the answer", "share"),
                 Column("AUROC of the risk", "r")],
                rows,
                exported=False,
            )
        )  # fmt: skip
    return parts + _cases(run)


def _causes(results: Mapping[str, Any]) -> list[Part]:
    weights = results.get("weight_reference") or {}
    rows: list[list[Any]] = [
        [f"W of the reference where {outcome}", told["n"], told.get("median")]
        for outcome in ("generalized", "hallucinated")
        if (told := weights.get(outcome))
    ]
    rows += [
        [f"hallucinated for {cause}", n, None] for cause, n in (results.get("causes") or {}).items()
    ]
    if not rows:
        return []
    p = weights.get("rank_test_p")
    note = "" if p is None else f"Mann-Whitney test between the two W's: p = {p:.2g}."
    return [
        Table(
            "Why",
            [Column("of the cases"), Column("number", "count"), Column("median of W", "r")],
            rows,
            note,
            exported=False,
        )
    ]


def _cases(run: Run) -> list[Part]:
    cases = run.table("cases")
    if not cases:
        return []
    groups = [[case for case in cases if case.get("outcome") == o] for o in _CASES_ORDER]
    # In turn, so that many hallucinations do not hide all that went well.
    in_turn = [case for case in chain.from_iterable(zip_longest(*groups)) if case is not None]
    shown = sorted(in_turn[:_MOST_CASES], key=lambda case: _CASES_ORDER.index(case["outcome"]))
    rows = [
        [
            *(case.get(key) for key in ("subject", "source_answer", "reference", "answer_before")),
            case.get("answer_after"),
            case.get("outcome"),
            *(to_number(case.get(key)) for key in _WEIGHTS),
            case.get("cause"),
        ]
        for case in shown
    ]
    columns = [
        *(Column(name) for name in ("subject", "taught", "reference", "before", "after")),
        Column("outcome"), Column("W of reference", "r"), Column("W of answer", "r"),
        Column("maximum of W", "r"), Column("cause"),
    ]  # fmt: skip
    note = f"{len(rows)} of {len(cases):,} cases; all: {run.folder / 'tables' / 'cases.csv'}."
    return [
        Table(
            f"Cases of {run.relation}", columns, rows, note if len(rows) < len(cases) else "",
            exported=False,
        )
    ]  # fmt: skip


def to_number(text: str | None) -> float | None:
    """A table's cell as a number; None where it is empty or none."""
    try:
        return float(text) if text else None
    except ValueError:
        return None


def forecast_overview(runs: Sequence[Run]) -> list[Part]:
    """What each forecaster foresees."""
    rows = [
        [run.relation, run.lm.label, name, *(told.get(outcome) for outcome in _OUTCOMES)]
        for run in runs
        for name, told in run.results["foreseen"].items()
    ]
    return [
        Table(
            "What is foreseen of the edits",
            [Column("relation"), Column("LM"), Column("forecaster"),
             *(Column(outcome, "share") for outcome in _OUTCOMES)],
            rows,
        )
    ]  # fmt: skip
