"""Doing the runs of a plan in one process, and skipping those that are finished."""

from __future__ import annotations

import gc
import io
import json
import logging
import re
import shutil
import sys
import time
import traceback
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout, suppress
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.utilities import rank_zero_only

from lincorr_lightning.errors import ConfigError, LincorrError, ReportError
from lincorr_lightning.finetune.stacked_lora import StackedLoRA
from lincorr_lightning.io import read_json, write_csv, write_json
from lincorr_lightning.lightning_cli import run_lightning_cli
from lincorr_lightning.reproduce.plan import VERSION, LMPlan, PlannedRun
from lincorr_lightning.results.results import RESULTS_FILE
from lincorr_lightning.results.saved_run import SavedRun
from lincorr_lightning.version import __version__

STATE = "reproduction.json"
_MAX_NAMED = 5


class State:
    """What has been done in a folder, kept in ``reproduction.json``."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / STATE
        # Run -> how it was made (`run_inputs`), its seconds, and its error if there was one.
        self.runs: dict[str, dict[str, Any]] = {}
        # Tables and figures on the page, and names of LMs, also those asked for earlier.
        self.tables: list[str] = []
        self.lms: list[str] = []
        if self.path.is_file():
            kept = read_json(self.path, ConfigError, "Remove the folder, or name another one.")
            self.runs, self.tables, self.lms = kept["runs"], kept["tables"], kept["lms"]

    def entry(self, plan: LMPlan, run: PlannedRun) -> Mapping[str, Any]:
        """Return what is known of a run; empty if it was not begun."""
        return self.runs.get(f"{plan.name}/{run.name}", {})

    def check(self, plans: Sequence[LMPlan]) -> None:
        """Refuse to go on with finished runs that were made in another way, or of other LMs."""
        names = [plan.name for plan in plans]
        if self.lms and not set(names) & set(self.lms):
            raise ConfigError(
                f"{self.path.parent} holds a reproduction of {' and '.join(self.lms)}. Name "
                "another folder as --output; for one page of several LMs, repeat --lm for each."
            )
        for plan in plans:
            for run in plan.runs:
                earlier = self.entry(plan, run).get("inputs")
                if earlier is None or saved_run(run) is None:
                    continue
                inputs = run_inputs(run, plan)
                changed = [
                    f"{key} was {json.dumps(earlier.get(key))} and is {json.dumps(inputs.get(key))}"
                    for key in {**earlier, **inputs}
                    if earlier.get(key) != inputs.get(key)
                ]
                if changed:
                    raise ConfigError(
                        f"{self.path.parent} holds {run.name} of {plan.name} with other settings: "
                        f"{'; '.join(changed[:_MAX_NAMED])}. Name another folder as --output, or "
                        "go on with the same settings."
                    )
        self.lms = list(dict.fromkeys([*self.lms, *names]))

    @rank_zero_only
    def write(self) -> None:
        """Write the file."""
        write_json(self.path, {"lms": self.lms, "tables": self.tables, "runs": self.runs})


def run_inputs(run: PlannedRun, plan: LMPlan) -> dict[str, str]:
    """Return all that a run's numbers depend on: version, LM, options, and contents of files."""
    inputs = {"lincorr-lightning": __version__}
    prints = plan.after_fingerprint if run.study == "after" else plan.fingerprint
    inputs |= {f"{part} of the LM": value for part, value in prints.items()}
    for argument in run.arguments:
        key, equals, value = argument.partition("=")
        name = key if equals else f"argument {argument}"
        inputs[name] = value.replace(str(run.folder.parent), "")  # the folder may be moved
        for path in re.findall(r"[^\s\"\[\],]+", value or argument):
            with suppress(OSError):  # such as a text that is too long for a name
                if Path(path).is_file():
                    digest = sha256(Path(path).read_bytes()).hexdigest()[:12]
                    inputs[f"content of {Path(path).name}"] = digest
    return inputs


def saved_run(run: PlannedRun) -> SavedRun | None:
    """Return a finished run; None if it is not finished, or its files are damaged."""
    folder = run.folder / VERSION
    try:
        return SavedRun.read(folder) if (folder / RESULTS_FILE).is_file() else None
    except ReportError:
        return None


def run_all(plans: Sequence[LMPlan], state: State) -> None:
    """Make the runs that are not finished. The error of a run is kept, and the others go on."""
    todo = [(plan, run) for plan in plans for run in plan.runs if saved_run(run) is None]
    total = sum(len(plan.runs) for plan in plans)
    for number, (plan, run) in enumerate(todo, start=total - len(todo) + 1):
        print_line(f"[{number}/{total}] {plan.name}: {run.name}")
        if torch.distributed.is_initialized():
            torch.distributed.barrier()  # until rank 0 has written what comes before
        start = time.perf_counter()
        entry: dict[str, Any] = {"inputs": run_inputs(run, plan)}
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
        state.runs[f"{plan.name}/{run.name}"] = entry
        state.write()


def check_command_lines(plans: Sequence[LMPlan]) -> None:
    """Parse a command line of each study, before anything runs."""
    by_study = {run.study: run for plan in plans for run in plan.runs}
    for study, run in by_study.items():
        try:
            with redirect_stdout(io.StringIO()), suppress(SystemExit):  # after it has printed
                run_lightning_cli([*run.arguments, "--print_config"])
        except ConfigError as error:
            raise ConfigError(
                f"options of the runs, {study}: {error} An option of one study is written as "
                "--option STUDY.KEY=VALUE, as in edits.data.n_edits=64."
            ) from error


def _make(run: PlannedRun, plan: LMPlan) -> None:
    rank_zero_only(shutil.rmtree)(run.folder, ignore_errors=True)  # of a run that was stopped
    lm = plan.after if run.study == "after" and plan.after else plan.lm
    command = [
        *run.arguments, f"--model.lm.name_or_path={lm}", "--trainer.enable_progress_bar=false",
    ]  # fmt: skip
    if run.probe is not None:
        subjects = _held_out_subjects(run.probe)
        if not run.answers:
            command.append(f"--data.subjects={json.dumps(subjects, ensure_ascii=False)}")
        elif len(subjects) < len(run.answers):
            raise ReportError(
                f"{run.name} needs {len(run.answers)} subjects that its maps were not fitted on, "
                f"but the probe has {len(subjects)}. Raise data.n_subjects of the probe."
            )
        else:
            edits = run.folder.with_suffix(".csv")
            write_csv(edits, ("subject", "answer"), zip(subjects, run.answers, strict=False))
            command.append(f"--data.edits_file={edits}")
    with _quiet():
        cli = run_lightning_cli(command)
    for module in cli.model.modules():
        if isinstance(module, StackedLoRA):
            module.remove()  # so that the next run can use the LM


def _held_out_subjects(probe: Path) -> list[str]:
    """Return the subjects of a probe that its maps were not fitted on."""
    frame = SavedRun.read(probe).table("subjects").frame
    return [str(subject) for subject in frame["subject"][frame["half"] != "fit"]]


@contextmanager
def _quiet() -> Iterator[None]:
    """Hide what each run prints and logs; warnings are shown."""
    logging.disable(logging.INFO)
    try:
        with redirect_stdout(io.StringIO()), warnings.catch_warnings():
            # Hundreds of labels are in other scripts.
            warnings.filterwarnings("ignore", message="Glyph .* missing from font")
            yield
    finally:
        logging.disable(logging.NOTSET)


@rank_zero_only
def print_line(text: str) -> None:
    """Print a line on rank 0, at once."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()
