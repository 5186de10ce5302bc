"""Runs that a page must not compare."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from itertools import combinations

from lincorr_lightning.errors import ReportError
from lincorr_lightning.results.saved_run import PACKAGE, SavedRun


def check_together(runs: Sequence[SavedRun]) -> None:
    """Refuse runs that do not belong on one page.

    Raises:
        ReportError: The runs are of different versions of this package, or two LMs have one name.
    """
    _check_versions(runs)
    for one, other in combinations(runs, 2):
        if one.lm and one.lm_name == other.lm_name:
            _check_fingerprints(one, other)


def _check_versions(runs: Sequence[SavedRun]) -> None:
    first: dict[str, SavedRun] = {}
    for run in runs:
        first.setdefault(run.versions.get(PACKAGE, "an unknown version"), run)
    if len(first) > 1:
        listed = ", ".join(f"{run.folder} ({version})" for version, run in first.items())
        raise ReportError(
            f"these runs are of different versions of {PACKAGE}: {listed}. Their numbers may have "
            "come about in different ways. Run the older ones again, or write a page for each "
            "version."
        )


def _check_fingerprints(one: SavedRun, other: SavedRun) -> None:
    ours, theirs = one.fingerprint, other.fingerprint
    # Weights in another dtype have other bits.
    same_dtype = ours.get("dtype") == theirs.get("dtype")
    compared = ("tokenizer", "config", "weights") if same_dtype else ("tokenizer", "config")
    differ = [key for key in compared if key in ours and key in theirs and ours[key] != theirs[key]]
    if differ:
        raise ReportError(
            f"{one.folder} and {other.folder} are of two LMs under one name, {one.lm_name!r}: "
            f"their {' and '.join(differ)} differ (lm.fingerprint in results.json). Give each LM a "
            "folder of its own and run one of them again, or write a page for each: lincorr report "
            f"{shlex.quote(str(one.folder))}; lincorr report {shlex.quote(str(other.folder))}"
        )
