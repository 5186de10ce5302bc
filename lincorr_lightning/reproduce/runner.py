"""Doing the runs of a plan in one process, and skipping those that are finished."""

from __future__ import annotations

import gc
import io
import json
import logging
import shutil
import sys
import time
import traceback
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout, suppress
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.utilities import rank_zero_only

from lincorr_lightning.errors import ConfigError, LincorrError, ReportError
from lincorr_lightning.finetune.stacked_lora import StackedLoRA
from lincorr_lightning.io import read_json, write_csv, write_json
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

    Attributes:
        runs: Seconds, and the error if there was one, of each run.
        tables: Tables and figures of the page, also those asked for earlier.

    Raises:
        ConfigError: The file is damaged.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder / STATE
        self.runs: dict[str, dict[str, Any]] = {}
        self.tables: list[str] = []
        self._settings: dict[str, Any] = {}
        if self.path.is_file():
            kept = read_json(self.path, ConfigError, "Remove the folder, or name another one.")
            self._settings, self.runs, self.tables = kept["settings"], kept["runs"], kept["tables"]

    def set_settings(self, settings: Mapping[str, Any]) -> None:
        """Take over what must not change when a reproduction is resumed: settings and LMs.

        Raises:
            ConfigError: The folder has runs of other settings or LMs; the message says which.
        """
        earlier = self._settings
        self._settings = {"lincorr-lightning": __version__, **settings}
        if earlier and any((self.path.parent / "runs").glob(f"**/{RESULTS_FILE}")):
            self._check(earlier)

    def _check(self, theirs: Mapping[str, Any]) -> None:
        ours, kept = _flatten(self._settings), _flatten(theirs)
        differ = [
            key
            for key in {**kept, **ours}
            if ours.get(key) != kept.get(key)
            # LMs may be added and left out.
            and not (key.startswith("lms.") and (key not in ours or key not in kept))
        ]
        if not set(self._settings["lms"]) & set(theirs["lms"]):
            names = " and ".join(theirs["lms"])
            raise ConfigError(
                f"{self.path.parent} holds a reproduction of {names}. Name another folder as "
                "--output; for one page of several LMs, repeat --lm for each."
            )
        if differ:
            said = list(dict.fromkeys(_in_words(key, kept, ours) for key in _causes(differ)))
            more = f"; and {len(said) - _MAX_NAMED} more" if len(said) > _MAX_NAMED else ""
            shown = "; ".join(said[:_MAX_NAMED]) + more
            raise ConfigError(
                f"{self.path.parent} holds a reproduction with other settings: {shown}. Name "
                "another folder as --output, or go on with the same settings."
            )
        # Also the tuned LM of an earlier call, whose runs are still there.
        lms = self._settings["lms"]
        both = {name: {**theirs["lms"].get(name, {}), **own} for name, own in lms.items()}
        self._settings["lms"] = {**theirs["lms"], **both}

    @rank_zero_only
    def write(self) -> None:
        """Write the file."""
        write_json(
            self.path, {"settings": self._settings, "tables": self.tables, "runs": self.runs}
        )


def _causes(differ: Sequence[str]) -> list[str]:
    """Return the settings that differ, without those that follow from others."""
    if "size" in differ:
        differ = [key for key in differ if not key.startswith("studies.")]
    dtypes = [key.removesuffix("dtype") for key in differ if key.endswith(".dtype")]
    return [key for key in differ if not any(key == f"{one}weights" for one in dtypes)]


def _in_words(key: str, earlier: Mapping[str, Any], settings: Mapping[str, Any]) -> str:
    """Return which setting differs, and how; of hashes, what has changed."""
    part, _, rest = key.partition(".")
    if part == "lms":
        name, _, what = rest.rpartition(".")
        name = f"tuned LM of {name.removesuffix('.after')}" if ".after" in name else f"LM {name}"
        return f"the {name} has other {what}"
    if part == "studies" and key.endswith(".text"):
        return f"the content of {settings.get(key.removesuffix('text') + 'config')} has changed"
    if part == "overlays":
        return f"the overlay {rest} is new, left out, or has changed"
    was, now = (json.dumps(one.get(key)) for one in (earlier, settings))
    return f"{key} was {was} and is {now}"


def _flatten(values: Mapping[str, Any], key: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in values.items():
        full = f"{key}{name}"
        if isinstance(value, Mapping):
            found |= _flatten(value, f"{full}.")
        else:
            found[full] = value
    return found


def saved_run(run: PlannedRun) -> SavedRun | None:
    """Return a finished run; None if it is not finished, or its files are damaged."""
    folder = run.folder / VERSION
    try:
        return SavedRun.read(folder) if (folder / RESULTS_FILE).is_file() else None
    except ReportError:
        return None


def run_all(plans: Sequence[LMPlan], trials: Mapping[str, Trial], state: State) -> None:
    """Make the runs that are not finished. The error of a run is kept, and the others go on.

    Args:
        plans: The plans of the LMs.
        trials: What the LMs take, by the names of the plans.
        state: What has been done; written after each run.
    """
    todo = [(p, run) for p in plans for run in p.runs if saved_run(run) is None]
    total = sum(len(plan.runs) for plan in plans)
    left = [trials[plan.name].seconds(run) for plan, run in todo]
    measured, estimated = 0.0, 0.0
    for number, (plan, run) in enumerate(todo):
        # What is left, by how far the estimates were off so far.
        factor = measured / estimated if estimated else 1.0
        print_line(
            f"[{total - len(todo) + number + 1}/{total}] {plan.name}: {run.name}; about "
            f"{minutes(factor * sum(left[number:]))} left"
        )
        if torch.distributed.is_initialized():
            torch.distributed.barrier()  # until rank 0 has written what comes before
        start = time.perf_counter()
        entry: dict[str, Any] = {}
        try:
            _make(run, plan)
        except LincorrError as error:
            entry["error"] = str(error)
        except Exception as error:
            traceback.print_exc()
            entry["error"] = f"{type(error).__name__}: {error}"
        gc.collect()  # modules and trainers refer to each other
        if "error" in entry:
            print_line(f"  failed: {entry['error']}")
        entry["seconds"] = round(time.perf_counter() - start, 1)
        measured, estimated = measured + entry["seconds"], estimated + left[number]
        state.runs[f"{plan.name}/{run.name}"] = entry
        state.write()


def check_command_lines(plans: Sequence[LMPlan]) -> None:
    """Parse a command line of each study, before anything runs.

    Raises:
        ConfigError: One is not valid.
    """
    found = {run.study: run for plan in plans for run in plan.runs}
    for study, run in found.items():
        try:
            with redirect_stdout(io.StringIO()), suppress(SystemExit):  # after it has printed
                run_lightning_cli([*run.arguments, "--print_config"])
        except ConfigError as error:
            raise ConfigError(
                f"options of the runs, {study}: {error} An option of one study is written as "
                "--option STUDY.KEY=VALUE, as in edits.data.n_edits=64."
            ) from error


def _make(run: PlannedRun, plan: LMPlan) -> None:
    if is_rank_zero():
        shutil.rmtree(run.folder, ignore_errors=True)  # of a run that was stopped
    lm = plan.after if run.study == "after" and plan.after else plan.lm
    command = [
        *run.arguments, f"--model.lm.name_or_path={lm}", "--trainer.enable_progress_bar=false",
    ]  # fmt: skip
    if run.probe is not None:
        subjects = _held_out_subjects(run.probe)
        if run.answers:
            n = len(run.answers)
            if len(subjects) < n:
                raise ReportError(
                    f"{run.name} needs {n} subjects that its maps were not fitted on, but the "
                    f"probe has {len(subjects)}. Raise data.n_subjects of the probe."
                )
            edits = run.folder.with_suffix(".csv")
            write_csv(edits, ("subject", "answer"), zip(subjects[:n], run.answers, strict=True))
            command.append(f"--data.edits_file={edits}")
        else:
            command.append(f"--data.subjects={json.dumps(subjects, ensure_ascii=False)}")
    with redirect_stdout(io.StringIO()), _quiet():
        cli = run_lightning_cli(command)
    for module in cli.model.modules():
        if isinstance(module, StackedLoRA):
            module.remove()  # so that the next run can use the LM


def _held_out_subjects(probe: Path) -> list[str]:
    """Return the subjects of a probe that its maps were not fitted on."""
    for table in SavedRun.read(probe).tables:
        if table.name == "subjects":
            return [subject for subject, half in table.rows if half != "fit"]
    raise ReportError(f"{probe} has no table of its subjects. Remove the folder, and start again.")


@contextmanager
def _quiet() -> Iterator[None]:
    """Return a context without the messages at the start of each run; warnings are shown."""
    loggers = [logging.getLogger(name) for name in _LOGGERS]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.WARNING)
    try:
        with warnings.catch_warnings():
            # Hundreds of labels are in other scripts.
            warnings.filterwarnings("ignore", message="Glyph .* missing from font")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def minutes(seconds: float) -> str:
    """Return a time in words.

    Example:
        >>> minutes(42), minutes(600), minutes(7300)
        ('42 s', '10 min', '2.0 h')
    """
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"


def is_rank_zero() -> bool:
    """Return whether this process writes the files."""
    return int(getattr(rank_zero_only, "rank", None) or 0) == 0


@rank_zero_only
def print_line(text: str) -> None:
    """Print a line on rank 0, at once."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()
