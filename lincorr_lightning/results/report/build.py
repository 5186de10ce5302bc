"""Putting a page together."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import groupby
from typing import Any

from lincorr_lightning.errors import ReportError
from lincorr_lightning.results.report.beside import beside_paper
from lincorr_lightning.results.report.checks import PACKAGE
from lincorr_lightning.results.report.comparison import column_names
from lincorr_lightning.results.report.document import (
    Column,
    Command,
    Document,
    Facts,
    Listing,
    Paragraph,
    Part,
    Pictures,
    Section,
    Table,
)
from lincorr_lightning.results.report.runs import Run
from lincorr_lightning.results.report.studies import STUDIES, pictures, study_of
from lincorr_lightning.version import __version__

_NOT_RECORDED = "not recorded"


def build(runs: Sequence[Run]) -> Document:
    """Lay out runs as a page, studies in their order and small LMs first.

    Args:
        runs: Any.

    Raises:
        ReportError: A run's files are damaged.
    """
    order = list(STUDIES)

    def place(run: Run) -> tuple[Any, ...]:
        known = order.index(run.study) if run.study in order else len(order)
        return known, run.study, run.lm.order

    ordered = sorted(runs, key=place)
    numbers = {id(run): i for i, run in enumerate(ordered, start=1)}
    sections = [
        _study_section(name, list(own), numbers)
        for name, own in groupby(ordered, key=lambda run: run.study)
    ]
    return Document(
        "How knowledge is tied in " + _listed(list(dict.fromkeys(r.lm.short for r in ordered))),
        [*_head(ordered), _runs_table(ordered)],
        sections,
    )


def _listed(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def _head(runs: Sequence[Run]) -> list[Part]:
    parts: list[Part] = [
        Paragraph(
            f"Written by lincorr-lightning {__version__} from the folders of "
            + (f"{len(runs)} runs." if len(runs) > 1 else "one run.")
            + " The paper is “Linear Correlation in LM’s Compositional Generalization and "
            "Hallucination” (arXiv 2502.04520)."
        )
    ]
    silent = [str(run.folder) for run in runs if PACKAGE not in run.versions]
    if silent and len(runs) > 1:
        parts.append(
            Paragraph(
                f"The version that ran {_listed(silent)} was not recorded, so it is not known "
                "whether it is that of the others."
            )
        )
    return parts


def _runs_table(runs: Sequence[Run]) -> Table:
    rows = [
        [
            i,
            study_of(run.study).title,
            run.relation,
            run.lm.label,
            run.lm.size.removesuffix(" parameters"),
            run.versions.get(PACKAGE, _NOT_RECORDED),
            str(run.folder),
        ]
        for i, run in enumerate(runs, start=1)
    ]
    names = ("run", "study", "relation", "LM", "parameters", "version", "folder")
    return Table("Runs", [Column(name) for name in names], rows, exported=False)


def _study_section(name: str, runs: Sequence[Run], numbers: dict[int, int]) -> Section:
    study = study_of(name)
    anchor = "study-" + (re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-") or "unnamed")
    try:
        parts: list[Part] = [
            Paragraph(study.told),
            *study.overview(runs),
            *beside_paper(runs, study.numbers),
        ]
    except (KeyError, TypeError, AttributeError, ValueError, IndexError) as error:
        if len(runs) == 1:
            raise _not_as_written(runs[0], error) from error
        for run in runs:  # find the one
            _study_section(name, [run], numbers)
            _run_section(run, numbers[id(run)], run.lm.label)
        raise
    labels = column_names(runs)
    return Section(
        study.title,
        anchor,
        parts,
        [
            _run_section(run, numbers[id(run)], label)
            for run, label in zip(runs, labels, strict=True)
        ],
    )


def _run_section(run: Run, number: int, label: str) -> Section:
    study = study_of(run.study)
    told = f"{run.relation}, {label}" if run.relation else label
    facts = [
        ("LM", run.lm.label),
        ("Size", run.lm.size),
        ("dtype", run.lm.dtype or "not known"),
    ]
    try:
        facts += study.facts(run)
        parts = study.details(run)
    except (KeyError, TypeError, AttributeError, ValueError, IndexError) as error:
        raise _not_as_written(run, error) from error
    facts += [
        ("Seeds", ", ".join(f"{k} {_plain(v)}" for k, v in run.seeds.items()) or _NOT_RECORDED),
        ("Versions", ", ".join(f"{k} {v}" for k, v in run.versions.items()) or _NOT_RECORDED),
    ]
    if isinstance(run.results.get("seconds"), (int, float)):
        facts.append(("Took", f"{run.results['seconds']:,.0f} s"))
    facts.append(("Folder", str(run.folder)))
    shown = pictures(run)
    if shown:
        parts = [*parts, Pictures(shown)]
    again: list[Part] = []
    if run.command is not None:
        again = [
            Command(run.command, "The same run again:"),
            Listing("All settings (config.yaml)", run.config_text()),
        ]
    return Section(f"Run {number}: {told}", f"run-{number}", [Facts(facts), *parts, *again])


def _plain(value: Any) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)


def _not_as_written(run: Run, error: Exception) -> ReportError:
    what = f"key {error} is missing" if isinstance(error, KeyError) else str(error)
    return ReportError(
        f"{run.folder / 'results.json'} is not what {run.study} of this version writes: {what}. "
        "The file was changed, or is of another version: run the study again."
    )
