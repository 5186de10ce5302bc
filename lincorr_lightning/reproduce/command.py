"""The command ``lincorr reproduce``: its runs in one process, without those that are finished."""

from __future__ import annotations

import argparse
import ctypes
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
from functools import partial
from hashlib import file_digest, sha256
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.utilities import rank_zero_only
from transformers.utils.logging import disable_progress_bar

from lincorr_lightning import io as files
from lincorr_lightning.cli import termination
from lincorr_lightning.cli.config import WRITTEN, find_config, leaves, read_config
from lincorr_lightning.cli.lightning_cli import run_lightning_cli
from lincorr_lightning.errors import ConfigError, LincorrError, ReportError
from lincorr_lightning.finetune.stacked_lora import StackedLoRA
from lincorr_lightning.lm.config import LMConfig
from lincorr_lightning.lm.language_model import LanguageModel
from lincorr_lightning.lm.loading import weights_read_once
from lincorr_lightning.reproduce import plan as planning
from lincorr_lightning.reproduce.page import write_reproduction
from lincorr_lightning.reproduce.plan import Item, LMRuns, PlannedRun, Settings
from lincorr_lightning.results.results import RESULTS_FILE
from lincorr_lightning.results.saved_run import SavedRun
from lincorr_lightning.results.table import short_name
from lincorr_lightning.terminal import write_out
from lincorr_lightning.version import __version__

CONFIG = "reproduce.yaml"
STATE = "reproduction.json"
# Settings that name folders which a run writes, and its LM, which is known by its fingerprint.
_NOT_READ = {*WRITTEN, "name_or_path", "class_path"}
_STATE_CACHE = "model.lm.state_cache"


def reproduce(args: Sequence[str]) -> Path | None:
    """Reproduce the paper's tables and figures, as the command line behind the name says.

    Returns:
        The page; None where only the plan is shown, and on ranks other than 0.
    """
    changed = vars(_parser().parse_args(args))
    config = find_config(changed.pop("config"))
    only_plan = changed.pop("plan")
    options = dict(map(_option, changed.pop("option")))
    if changed["only"] is not None:
        changed["only"] = [key for key in ",".join(changed["only"]).split(",") if key]
    settings = planning.read_settings(config, changed, options)
    items = planning.select_items(settings.only)
    folder = Path(settings.output)
    if not only_plan:
        settings.options.setdefault(_STATE_CACHE, str(folder / "states"))
    state = read_state(folder / STATE)
    disable_progress_bar()  # type: ignore[no-untyped-call]  # of reading weights
    with weights_read_once():
        plans = _plan(settings, items, folder)
        for plan in plans:
            for run in plan.runs:
                check_inputs(run, plan, state.get(run.key, {}).get("inputs"))
            print_line("\n".join(planning.describe(plan, items, settings)))
        if not any(plan.runs for plan in plans):
            reason = "the plan says why all that was asked for is left out"
            raise ReportError(f"there is nothing to run; {reason}.")
        if only_plan:
            return None
        files.check_writable(folder)
        termination.current.is_resumable = True
        run_all(plans, state, folder / STATE)
    return _write(plans, state, items, settings, folder)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="lincorr reproduce",
        description="Reproduce the paper's tables and figures on an LM: one page, beside the "
        "paper's numbers. Runs that are finished in the output folder are not repeated.",
    )
    repeat = partial(parser.add_argument, action="append")
    repeat(
        "--lm", metavar="NAME_OR_PATH", help="a folder, .gguf file, hub id or tiny-world; repeat"
    )
    repeat("--after", metavar="TUNED", help="the LM after post-training; once for each --lm")
    repeat("--only", metavar="table5,figure3", help="tables and figures; default: all")
    repeat(
        "--overlays", metavar="CONFIG", help="config over those of all runs, as trainer/gpu.yaml"
    )
    option = "option of all runs, as model.lm.dtype=bfloat16, or of one, as edits.data.n_edits=64"
    repeat("--option", metavar="KEY=VALUE", default=[], help=option)
    parser.add_argument("--size", help="quick, paper, or another size of the config")
    parser.add_argument("--output", help="folder of the runs and of the page")
    config = "all settings (default: the packaged configs/reproduce.yaml)"
    parser.add_argument("--config", default=CONFIG, help=config)
    parser.add_argument("--plan", action="store_true", help="show the plan, and run nothing")
    return parser


def _option(text: str) -> tuple[str, Any]:
    key, equals, value = text.partition("=")
    if not equals:
        raise ConfigError(f"--option {text}: write KEY=VALUE, as in model.lm.dtype=bfloat16.")
    return key.removeprefix("--"), files.load_yaml(value)


@rank_zero_only
def _write(
    plans: list[LMRuns],
    state: Mapping[str, Mapping[str, Any]],
    items: list[Item],
    settings: Settings,
    folder: Path,
) -> Path:
    for plan in plans:
        plan.collect(state)
    failed = [f"{plan.name}: {run}: {why}" for plan in plans for run, why in plan.errors.items()]
    if failed and not any(plan.finished for plan in plans):
        raise ReportError(f"all runs failed. {failed[0]}")
    if failed:
        print_line(f"{len(failed)} runs failed; the page has the reasons. The first: {failed[0]}")
    page = write_reproduction(items, plans, settings, folder)
    print_line(f"Page: {page}")
    return page


def _plan(settings: Settings, items: Sequence[Item], folder: Path) -> list[LMRuns]:
    names = [short_name(path) for path in settings.lm]
    plans = []
    if twice := [name for name in names if names.count(name) > 1]:
        raise ConfigError(f"two of the LMs have the name {twice[0]}. Rename one of the folders.")
    for i, name in enumerate(files.safe_names(names).values()):
        lm = LanguageModel(_lm_config(settings.lm[i], settings))
        plan = LMRuns(name, settings.lm[i], settings.after[i] if settings.after else None)
        planning.plan_runs(plan, lm, items, settings, folder / "runs" / name)
        if plan.after is not None:  # before the LM, which is in memory then as the runs start
            after = LanguageModel(_lm_config(plan.after, settings))
            planning.check_tuned(plan, after)
            plan.after_fingerprint = dict(after.load().info["fingerprint"])
        plan.fingerprint = dict(lm.load().info["fingerprint"])
        plans.append(plan)
    return plans


def _lm_config(path: str, settings: Settings) -> LMConfig:
    prefix = "model.lm."
    options = {
        k.removeprefix(prefix): v for k, v in settings.options.items() if k.startswith(prefix)
    }
    try:
        return LMConfig(path, **options)
    except TypeError as error:
        raise ConfigError(f"options: {str(error).partition(' ')[2]} of model.lm.*") from error


def read_state(path: Path) -> dict[str, dict[str, Any]]:
    """Return what has been done in a folder, by `PlannedRun.key`, of ``reproduction.json``.

    A run has an entry: how it was made (`run_inputs`), its seconds, and its error if any.
    """
    way_out = "Remove the folder, or name another one."
    return files.read_json(path, ConfigError, way_out)["runs"] if path.is_file() else {}


def check_inputs(run: PlannedRun, plan: LMRuns, earlier: Mapping[str, str] | None) -> None:
    """Refuse to go on with a finished run that was made in another way."""
    # Whatever version of this package wrote the results.
    if earlier is None or not list(run.folder.glob(f"*/{RESULTS_FILE}")):
        return
    now = run_inputs(run, plan)
    changed = [
        f"{key} was {earlier.get(key)} and is {now.get(key)}"
        for key in {**earlier, **now}
        if earlier.get(key) != now.get(key)
    ]
    if changed:
        raise ConfigError(
            f"{run.folder.parent} holds {run.name} with other settings: {'; '.join(changed[:5])}. "
            "Name another folder as --output, or go on with the same settings."
        )


def run_inputs(run: PlannedRun, plan: LMRuns) -> dict[str, str]:
    """Return all that a run's numbers depend on: version, LM, settings, and contents of files.

    Settings whose text is the path of a file or folder have a hash of its content.
    """
    settings: dict[str, list[str]] = {}
    for source in (*map(read_config, run.configs), run.options):
        by_key: dict[str, list[str]] = {}
        for key, value in leaves(source):
            by_key.setdefault(key, []).append(_with_content(key, value, run.folder.parent))
        settings |= by_key
    fingerprint = plan.after_fingerprint if run.study == "after" else plan.fingerprint
    return {
        "lincorr-lightning": __version__,
        **{f"{part} of the LM": value for part, value in fingerprint.items()},
        # The states that are kept change a number's rounding at most.
        **{k: ", ".join(v) for k, v in settings.items() if not k.startswith(_STATE_CACHE)},
    }


def _with_content(key: str, value: Any, home: Path) -> str:
    """Return a setting as text, with a hash if it names a file that the run reads.

    Runs in the folder `home`, which may be moved, have inputs of their own.
    """
    text = str(value)
    if isinstance(value, str) and value and key.rpartition(".")[2] not in _NOT_READ:
        with suppress(OSError, ValueError):  # such as of a text that is no path
            place, root = Path(value).resolve(), home.resolve()
            if root not in (place, *place.parents) and place not in root.parents:
                return f"{text} ({_digest(place)})"
    return text.replace(str(home), "")


def _digest(path: Path) -> str:
    if path.is_dir():
        digests = {file.name: _digest(file) for file in sorted(path.iterdir())}
        return sha256(json.dumps(digests).encode()).hexdigest()[:12]
    with files.regular_file(path).open("rb") as file:
        return file_digest(file, "sha256").hexdigest()[:12]


def run_all(plans: Sequence[LMRuns], state: dict[str, dict[str, Any]], path: Path) -> None:
    """Make the runs that are not finished. The error of a run is kept, and the others go on."""
    todo = [(plan, run) for plan in plans for run in plan.runs if run.saved() is None]
    total = sum(len(plan.runs) for plan in plans)
    for number, (plan, run) in enumerate(todo, start=total - len(todo) + 1):
        print_line(f"[{number}/{total}] {plan.name}: {run.name}")
        if torch.distributed.is_initialized():
            torch.distributed.barrier()  # until rank 0 has written what comes before
        start = time.perf_counter()
        entry: dict[str, Any] = {"inputs": run_inputs(run, plan)}
        try:
            _make(run, plan)
        except Exception as error:
            entry["error"] = str(error)
            if not isinstance(error, LincorrError):
                traceback.print_exc()
                if torch.distributed.is_initialized():
                    raise  # the other ranks would wait for this one
                entry["error"] = f"{type(error).__name__}: {error}"
            print_line(f"  failed: {entry['error']}")
        gc.collect()  # modules and trainers refer to each other
        _trim_heap()
        entry["seconds"] = round(time.perf_counter() - start, 1)
        state[run.key] = entry
        rank_zero_only(files.write_json)(path, {"runs": state})


def _trim_heap() -> None:
    """Give memory that a run has freed back to the system: glibc keeps some of it."""
    with suppress(AttributeError, OSError, TypeError):  # of another C library
        ctypes.CDLL(None).malloc_trim(0)


def _make(run: PlannedRun, plan: LMRuns) -> None:
    rank_zero_only(shutil.rmtree)(run.folder, ignore_errors=True)  # of a run that was stopped
    lm = plan.after if run.study == "after" and plan.after else plan.lm
    command = [*run.arguments, f"--model.lm.name_or_path={lm}"]
    if run.probe is not None:
        frame = SavedRun.read(run.probe).table("subjects").frame
        subjects = [str(subject) for subject in frame["subject"][frame["half"] != "fit"]]
        if not run.answers:
            candidates = run.folder.with_suffix(".txt")
            with files.atomic_write(candidates) as part:
                part.write_text("\n".join(subjects), encoding="utf-8")
            command.append(f"--data.subjects={candidates}")
        elif len(subjects) < len(run.answers):
            raise ReportError(
                f"{run.name} needs {len(run.answers)} subjects that its maps were not fitted on, "
                f"but the probe has {len(subjects)}. Raise data.n_subjects of the probe."
            )
        else:
            edits = run.folder.with_suffix(".csv")
            files.write_csv(edits, ("subject", "answer"), zip(subjects, run.answers, strict=False))
            command.append(f"--data.edits_file={edits}")
    with _quiet():
        cli = run_lightning_cli(command)
    for module in cli.model.modules():
        if isinstance(module, StackedLoRA):
            module.remove()  # so that the next run can use the LM


@contextmanager
def _quiet() -> Iterator[None]:
    logging.disable(logging.INFO)
    try:
        with redirect_stdout(io.StringIO()), warnings.catch_warnings():
            # Hundreds of labels are in other scripts, and edits are read without the states.
            warnings.filterwarnings("ignore", "Glyph .* missing from font|The LM is read without")
            yield
    finally:
        logging.disable(logging.NOTSET)


@rank_zero_only
def print_line(text: str) -> None:
    """Print a line on rank 0, at once."""
    write_out(f"{text}\n")
    sys.stdout.flush()
