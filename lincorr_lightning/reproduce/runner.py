"""Doing the runs of a plan in one process, and skipping those that are finished."""

from __future__ import annotations

import io
import json
import logging
import shutil
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.utilities import rank_zero_only

from lincorr_lightning.errors import ConfigError, LincorrError, ReportError
from lincorr_lightning.finetune.stacked_lora import StackedLoRA
from lincorr_lightning.io import read_json, write_json
from lincorr_lightning.lightning_cli import run_lightning_cli
from lincorr_lightning.reproduce.plan import VERSION, LMPlan, PlannedRun
from lincorr_lightning.reproduce.trial import Trial
from lincorr_lightning.results.results import RESULTS_FILE
from lincorr_lightning.results.saved_run import SavedRun
from lincorr_lightning.version import __version__

STATE = "reproduction.json"
_MAX_NAMED = 5
_LOGGERS = ("lightning.pytorch", "lightning.fabric", "lightning.pytorch.utilities.rank_zero")


class State:
    """What has been done in a folder, kept in ``reproduction.json``.

    Args:
        folder: The folder.
        settings: What must not change when the reproduction is resumed: settings and LMs.

    Raises:
        ConfigError: The folder is of other settings or LMs; the message says which differ.
    """

    def __init__(self, folder: Path, settings: Mapping[str, Any]) -> None:
        self.path = folder / STATE
        self.runs: dict[str, dict[str, Any]] = {}
        self._settings: dict[str, Any] = {"lincorr-lightning": __version__, **settings}
        if self.path.is_file():
            kept = read_json(self.path, ConfigError, "Remove the folder, or name another one.")
            self._check(kept["settings"])
            self.runs = kept["runs"]

    def _check(self, theirs: Mapping[str, Any]) -> None:
        ours, kept = _flatten(self._settings), _flatten(theirs)
        differ = [
            key
            for key in {**kept, **ours}
            if ours.get(key) != kept.get(key)
            # LMs may be added and left out.
            and not (key.startswith("lms.") and (key not in ours or key not in kept))
        ]
        if differ:
            shown = ", ".join(f"{k} ({kept.get(k)} / {ours.get(k)})" for k in differ[:_MAX_NAMED])
            raise ConfigError(
                f"{self.path.parent} holds a reproduction with other settings: {shown}. Name "
                "another folder as --output, or go on with the same settings."
            )
        self._settings["lms"] = {**theirs["lms"], **self._settings["lms"]}

    @rank_zero_only
    def write(self) -> None:
        """Write the file."""
        write_json(self.path, {"settings": self._settings, "runs": self.runs})


def _flatten(values: Mapping[str, Any], key: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in values.items():
        full = f"{key}{name}"
        if isinstance(value, Mapping):
            found |= _flatten(value, f"{full}.")
        else:
            found[full] = value
    return found


def run_folder_of(run: PlannedRun) -> Path:
    """Return the folder of a run's results."""
    return run.folder / VERSION


def is_finished(run: PlannedRun) -> bool:
    """Return whether a run has complete results."""
    return (run_folder_of(run) / RESULTS_FILE).is_file()


def do_runs(plans: Sequence[LMPlan], trials: Mapping[str, Trial], state: State) -> None:
    """Do the runs that are not finished; an error of one is kept, and the others go on.

    Raises:
        ConfigError: A command line is not valid.
    """
    todo = [(p, run) for p in plans for run in p.runs if not is_finished(run)]
    total = sum(len(plan.runs) for plan in plans)
    left = [trials[plan.name].seconds(run) for plan, run in todo]
    measured, estimated = 0.0, 0.0
    for number, (plan, run) in enumerate(todo):
        # What is left, by how far the estimates were off so far.
        factor = measured / estimated if estimated else 1.0
        _say(
            f"[{total - len(todo) + number + 1}/{total}] {plan.name}: {run.name}; about "
            f"{minutes(factor * sum(left[number:]))} left"
        )
        if torch.distributed.is_initialized():
            torch.distributed.barrier()  # until the first process has written what comes before
        start = time.perf_counter()
        entry: dict[str, Any] = {}
        try:
            _do(run, plan)
        except (LincorrError, SystemExit) as error:
            entry["error"] = str(error)
            _say(f"  not done: {error}")
        entry["seconds"] = round(time.perf_counter() - start, 1)
        measured, estimated = measured + entry["seconds"], estimated + left[number]
        state.runs[f"{plan.name}/{run.name}"] = entry
        state.write()


def _do(run: PlannedRun, plan: LMPlan) -> None:
    if is_first_process():
        shutil.rmtree(run.folder, ignore_errors=True)  # of a run that was stopped
    lm = plan.after if run.study == "after" and plan.after else plan.lm
    command = [
        *run.arguments, f"--model.lm.name_or_path={lm}", "--trainer.enable_progress_bar=false",
    ]  # fmt: skip
    if run.probe is not None:
        command.append(f"--data.subjects={json.dumps(_held_out_subjects(run.probe))}")
    with redirect_stdout(io.StringIO()), _quiet():
        cli = run_lightning_cli(command, launched_with=sys.argv[1:])
    for module in cli.model.modules():
        if isinstance(module, StackedLoRA):
            module.remove()  # so that the next run can use the LM


def _held_out_subjects(probe: Path) -> list[str]:
    """Return the subjects of a probe that its maps were not fitted on."""
    table = next(t for t in SavedRun.read(probe).tables if t.name == "subjects")
    return [subject for subject, half in table.rows if half != "fit"]


@contextmanager
def _quiet() -> Iterator[None]:
    """Leave out what Lightning and this package say at the start of each run, but no warnings."""
    loggers = [logging.getLogger(name) for name in _LOGGERS]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.WARNING)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def saved_runs(plan: LMPlan) -> dict[str, SavedRun]:
    """Return the finished runs of an LM by name."""
    return dict(_saved_runs(plan))


def _saved_runs(plan: LMPlan) -> Iterator[tuple[str, SavedRun]]:
    for run in plan.runs:
        if is_finished(run):
            try:
                yield run.name, SavedRun.read(run_folder_of(run))
            except ReportError as error:
                plan.left_out[run.name] = str(error)


def minutes(seconds: float) -> str:
    """Return a time in words.

    Example:
        >>> minutes(42), minutes(600), minutes(7300)
        ('42 s', '10 min', '2.0 h')
    """
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"


def is_first_process() -> bool:
    """Return whether this process writes the files."""
    return int(getattr(rank_zero_only, "rank", None) or 0) == 0


@rank_zero_only
def _say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()
