"""What must not stand on one page: it would compare what cannot be compared."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations
from typing import Any

from lincorr_lightning.errors import ReportError
from lincorr_lightning.results.report.runs import Run

PACKAGE = "lincorr_lightning"
# Another machine rounds otherwise; another LM says something else.
_R_TOLERANCE, _SHARE_TOLERANCE = 0.02, 0.1
# What a trainer's settings change in the numbers; folders and progress bars do not.
_TRAINER = (
    "max_epochs", "max_steps", "precision", "fast_dev_run", "limit_train_batches",
    "limit_test_batches", "accumulate_grad_batches", "gradient_clip_val",
)  # fmt: skip
_SHARES = ("source_learned", "generalized", "hallucinated", "unchanged")


def check_together(runs: Sequence[Run]) -> None:
    """Refuse runs that cannot stand on one page.

    Args:
        runs: All of a page.

    Raises:
        ReportError: They are of different versions of this package, or two LMs had one name.
    """
    _check_versions(runs)
    for one, other in combinations(runs, 2):
        if one.lm.key == other.lm.key and "pretraining" not in (one.study, other.study):
            _check_fingerprints(one, other)
            _check_numbers(one, other)


def _check_versions(runs: Sequence[Run]) -> None:
    first: dict[str, Run] = {}
    for run in runs:
        if PACKAGE in run.versions:
            first.setdefault(run.versions[PACKAGE], run)
    if len(first) > 1:
        told = ", ".join(f"{run.folder} ({version})" for version, run in first.items())
        raise ReportError(
            f"these runs are of different versions of lincorr-lightning: {told}. Their numbers "
            "may have come about in different ways. Run the older ones again, or write a page "
            "for each version."
        )


def _check_fingerprints(one: Run, other: Run) -> None:
    ours, theirs = one.lm.fingerprint, other.lm.fingerprint
    # In another dtype the same LM has other bits.
    same_dtype = ours.get("dtype") == theirs.get("dtype")
    asked = ("tokenizer", "config", "weights") if same_dtype else ("tokenizer", "config")
    differ = [key for key in asked if key in ours and key in theirs and ours[key] != theirs[key]]
    if differ:
        raise ReportError(
            f"{one.folder} and {other.folder} are of two LMs under one name, {one.lm.label!r}: "
            f"their {' and '.join(differ)} differ (fingerprint in linear_map/config.json or "
            f"settings). {_way_out(one, other)}"
        )


def _way_out(one: Run, other: Run) -> str:
    return (
        "Give each LM a folder of its own and run one of them again, or write a page for each: "
        f"lincorr report {shlex.quote(str(one.folder))}; "
        f"lincorr report {shlex.quote(str(other.folder))}"
    )


def _check_numbers(one: Run, other: Run) -> None:
    """Two runs of one LM under the same settings must have found the same."""
    known = one.lm.fingerprint and one.lm.fingerprint == other.lm.fingerprint
    if known or one.study != other.study or _settings(one) != _settings(other):
        return
    theirs = dict(_numbers(other))
    for what, (mine, tolerance) in _numbers(one):
        found, _ = theirs.get(what, (mine, 0.0))
        if abs(mine - found) > tolerance:
            raise ReportError(
                f"{one.folder} and {other.folder} ran {one.study} on {one.lm.label!r} under the "
                f"same settings and found other numbers ({what}: {mine:.3f} and {found:.3f}): two "
                f"LMs seem to have had this name. {_way_out(one, other)}"
            )


def _settings(run: Run) -> str:
    if run.config:
        trainer = run.config.get("trainer")
        told: Any = {
            **{key: run.config.get(key) for key in ("model", "data", "seed_everything")},
            "trainer": {key: trainer.get(key) for key in _TRAINER}
            if isinstance(trainer, Mapping)
            else None,
            "study": run.study,
        }
    else:
        skipped = ("fingerprint", "lm_fingerprint", "versions")
        told = {key: value for key, value in run.settings.items() if key not in skipped}
    return json.dumps([told, run.relation], sort_keys=True, default=str)


def _numbers(run: Run) -> Iterator[tuple[str, tuple[float, float]]]:
    """Headline numbers by name, and how far another machine may be off."""
    for pair in run.results.get("pairs") or ():
        for key in ("label_mean", "after"):
            value = pair.get(key) if isinstance(pair, Mapping) else None
            if isinstance(value, (int, float)):
                name = f"r of {pair.get('source')}->{pair.get('target')}"
                yield name, (float(value), _R_TOLERANCE)
    n = run.results.get("n_edits") or run.results.get("n") or 0
    for key in _SHARES:
        value = run.results.get(key)
        if isinstance(value, (int, float)):
            # Two edits of few may fall the other way.
            coarse = 2 / n if isinstance(n, (int, float)) and n > 0 else 0.0
            yield key, (float(value), _SHARE_TOLERANCE + coarse)
    foreseen = run.results.get("foreseen")
    for name, shares in foreseen.items() if isinstance(foreseen, Mapping) else ():
        value = shares.get("generalized") if isinstance(shares, Mapping) else None
        if isinstance(value, (int, float)):
            yield f"foreseen by {name}", (float(value), _SHARE_TOLERANCE)
