"""The command ``lincorr reproduce``: its runs in one process, without those that are finished."""

from __future__ import annotations

import argparse
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
from hashlib import file_digest, sha256
from pathlib import Path
from typing import Any

import torch
import yaml
from lightning.pytorch.utilities import rank_zero_only
from transformers.utils.logging import disable_progress_bar

from lincorr_lightning import io as files
from lincorr_lightning.cli import termination
from lincorr_lightning.cli.config import WRITTEN, find_config, leaves, read_config
from lincorr_lightning.cli.lightning_cli import run_lightning_cli
from lincorr_lightning.errors import ConfigError, LincorrError, ReportError
from lincorr_lightning.finetune.stacked_lora import StackedLoRA
from lincorr_lightning.lm.config import LMConfig
from lincorr_lightning.lm.fingerprint import fingerprint_tokenizer
from lincorr_lightning.lm.language_model import LanguageModel
from lincorr_lightning.lm.loading import weights_read_once
from lincorr_lightning.reproduce import plan as planning
from lincorr_lightning.reproduce.page import write_reproduction
from lincorr_lightning.reproduce.plan import Item, LMRuns, PlannedRun, Settings
from lincorr_lightning.results.saved_run import SavedRun
from lincorr_lightning.results.table import short_name
from lincorr_lightning.version import __version__

CONFIG, STATE = "reproduce.yaml", "reproduction.json"
# Settings that name folders which a run writes, and its LM, which is known by its fingerprint.
_NOT_READ = {*WRITTEN, "name_or_path", "class_path"}
_STATE_CACHE = "model.lm.state_cache"


def reproduce(args: Sequence[str]) -> Path | None:
    """Reproduce the paper's tables and figures, as the command line behind the name says.

    Returns:
        The page; None where only the plan is shown, and on ranks other than 0.
    """
    changed = vars(_parser().parse_args(args))
    config, only_plan = find_config(changed.pop("config")), changed.pop("plan")
    if changed["only"] is not None:
        changed["only"] = [key for key in ",".join(changed["only"]).split(",") if key]
        if not changed["only"]:
            raise ConfigError("--only names no table or figure; leave it out for all.")
    options = dict(map(_option, changed.pop("option") or ()))
    settings = planning.read_settings(config, changed, options)
    files.refuse_url(settings.output, "--output")
    chosen, folder = planning.select_items(settings.only), Path(settings.output)
    if not only_plan:
        settings.options.setdefault(_STATE_CACHE, str(folder / "states"))
    state = State(folder)
    # Tables of earlier calls stay on the page, and need their runs.
    items = [
        item for item in planning.all_items() if item in chosen or item.keys[0] in state.tables
    ]
    state.tables = [item.keys[0] for item in items]
    disable_progress_bar()  # type: ignore[no-untyped-call]  # of reading weights
    with weights_read_once():
        plans = _plan(settings, items, folder)
        state.check(plans)
        check_command_lines(plans)
        for plan in plans:
            print_line("\n".join(planning.describe(plan, items, settings)))
        if n_earlier := len(items) - len(chosen):
            print_line(f"{n_earlier} more tables or figures were asked for earlier.")
        if not any(plan.runs for plan in plans):
            reason = "the plan says why all that was asked for is left out"
            raise ReportError(f"there is nothing to run; {reason}.")
        if only_plan:
            return None
        files.check_writable(folder)
        state.write()
        termination.current.is_resumable = True
        run_all(plans, state)
    return _write(plans, state, items, settings)


@rank_zero_only
def _write(plans: list[LMRuns], state: State, items: list[Item], settings: Settings) -> Path:
    for plan in plans:
        state.fill_in(plan)
    failed = [f"{plan.name}: {run}: {why}" for plan in plans for run, why in plan.errors.items()]
    if failed and not any(plan.finished for plan in plans):
        raise ReportError(f"all runs failed. {failed[0]}")
    if failed:
        print_line(f"{len(failed)} runs failed; the page has the reasons. The first: {failed[0]}")
    page = write_reproduction(items, plans, settings, state.path.parent)
    print_line(f"Page: {page}")
    return page


def _plan(settings: Settings, items: Sequence[Item], folder: Path) -> list[LMRuns]:
    names, plans = [short_name(path) for path in settings.lm], []
    if len(twice := [name for name in names if names.count(name) > 1]):
        raise ConfigError(f"two of the LMs have the name {twice[0]}. Rename one of the folders.")
    for i, name in enumerate(files.safe_names(names).values()):
        lm = LanguageModel(_lm_config(settings.lm[i], settings))
        plan = LMRuns(name, settings.lm[i], settings.after[i] if settings.after else None)
        if plan.after is not None:  # before the LM, which is in memory then as the runs start
            plan.after_fingerprint = _tuned_fingerprint(plan.after, lm, settings)
        planning.plan_runs(plan, lm, items, settings, folder / "runs" / name)
        plan.fingerprint = dict(lm.load().info["fingerprint"])
        plans.append(plan)
    return plans


def _lm_config(path: str, settings: Settings) -> LMConfig:
    of_lm = {k: v for k, v in settings.options.items() if k.startswith("model.lm.")}
    options: dict[str, Any] = {k.removeprefix("model.lm."): v for k, v in of_lm.items()}
    try:
        return LMConfig(path, **options)
    except TypeError as error:
        raise ConfigError(f"options: {str(error).partition(' ')[2]} of model.lm.*") from error


def _tuned_fingerprint(path: str, lm: LanguageModel, settings: Settings) -> dict[str, Any]:
    """Return the fingerprint of a tuned LM, whose tokenizer must be that of the LM."""
    after = LanguageModel(_lm_config(path, settings))
    before, tuned = (fingerprint_tokenizer(each.tokenizer, each.prefix) for each in (lm, after))
    if before != tuned:
        raise ConfigError(
            f"{after.config.name_or_path} has another tokenizer than {lm.config.name_or_path}. "
            "Pass the tuned version of the same LM as --after."
        )
    return dict(after.load().info["fingerprint"])


def _option(text: str) -> tuple[str, Any]:
    key, equals, value = text.partition("=")
    if not equals:
        raise ConfigError(f"--option {text}: write KEY=VALUE, as in model.lm.dtype=bfloat16.")
    return key.removeprefix("--"), files.load_yaml(value)


def _parser() -> argparse.ArgumentParser:
    about = planning.plan_data("command")
    parser = argparse.ArgumentParser(prog="lincorr reproduce", description=about["description"])
    for name, (metavar, text) in about["repeated"].items():
        parser.add_argument(f"--{name}", action="append", metavar=metavar, help=text)
    parser.add_argument("--size", help="quick, paper, or another size of the config")
    parser.add_argument("--top", type=int, help="labels in influences_*.csv")
    parser.add_argument("--output", help="folder of the runs and of the page")
    config = "all settings (default: the packaged configs/reproduce.yaml)"
    parser.add_argument("--config", default=CONFIG, help=config)
    parser.add_argument("--plan", action="store_true", help="show the plan, and run nothing")
    return parser


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
            old = files.read_json(self.path, ConfigError, "Remove the folder, or name another one.")
            self.runs, self.tables, self.lms = old["runs"], old["tables"], old["lms"]

    def entry(self, plan: LMRuns, run: PlannedRun) -> Mapping[str, Any]:
        """Return what is known of a run; empty if it was not begun."""
        return self.runs.get(f"{plan.name}/{run.name}", {})

    def fill_in(self, plan: LMRuns) -> None:
        """Add the finished runs of an LM to its plan, and why others are missing."""
        for run in plan.runs:
            entry, saved = self.entry(plan, run), run.saved()
            plan.seconds[run.name] = entry.get("seconds", 0.0)
            if saved is not None:
                plan.finished[run.name] = saved
            else:
                plan.errors[run.name] = entry.get("error", "not finished")

    def check(self, plans: Sequence[LMRuns]) -> None:
        """Refuse to go on with finished runs that were made in another way, or of other LMs."""
        names = [plan.name for plan in plans]
        if self.lms and not set(names) & set(self.lms):
            raise ConfigError(
                f"{self.path.parent} holds a reproduction of {' and '.join(self.lms)}. Name "
                "another folder as --output; for one page of several LMs, repeat --lm for each."
            )
        for plan, run in ((one, run) for one in plans for run in one.runs):
            earlier = self.entry(plan, run).get("inputs")
            if earlier is None or not run.results_file.is_file():
                continue
            inputs = run_inputs(run, plan)
            both = ((key, earlier.get(key), inputs.get(key)) for key in {**earlier, **inputs})
            if differ := [(key, json.dumps(a), json.dumps(b)) for key, a, b in both if a != b]:
                changed = "; ".join(f"{key} was {was} and is {now}" for key, was, now in differ[:5])
                raise ConfigError(
                    f"{self.path.parent} holds {run.name} of {plan.name} with other settings: "
                    f"{changed}. Name another folder as --output, or go on with the same settings."
                )
        self.lms = list(dict.fromkeys([*self.lms, *names]))

    @rank_zero_only
    def write(self) -> None:
        """Write the file."""
        files.write_json(self.path, {"lms": self.lms, "tables": self.tables, "runs": self.runs})


def run_inputs(run: PlannedRun, plan: LMRuns) -> dict[str, str]:
    """Return all that a run's numbers depend on: version, LM, options, and contents of files."""
    inputs, home = {"lincorr-lightning": __version__}, run.folder.parent.resolve()
    prints = plan.after_fingerprint if run.study == "after" else plan.fingerprint
    inputs |= {f"{part} of the LM": value for part, value in prints.items()}
    for argument in run.arguments:
        key, equals, value = argument.partition("=")
        if key.startswith(f"--{_STATE_CACHE}"):  # which changes their rounding at most
            continue
        name = key if equals else f"argument {argument}"
        inputs[name] = value.replace(str(run.folder.parent), "")  # the folder may be moved
    for path in dict.fromkeys(_read_paths(run)):
        with suppress(OSError, ValueError):  # such as of a text that is no path
            place = Path(path).resolve()
            # Other runs of the folder have inputs of their own.
            if home not in (place, *place.parents) and place not in home.parents:
                name = f"content of {place.name}"
                inputs[f"content of {path}" if name in inputs else name] = _digest(place)
    return inputs


def _read_paths(run: PlannedRun) -> Iterator[str]:
    """Yield a run's configs, and all texts among its settings that may be paths to read."""
    words = iter(run.arguments[1:])
    for word in words:
        key, _, text = word.removeprefix("--").partition("=")
        content: Any = {key: text}
        if word == "--config":
            yield (path := next(words))
            content = read_config(path)
        else:
            with suppress(ValueError, yaml.YAMLError):
                content = {key: files.load_yaml(text)}
        for key, value in leaves(content):
            # An empty text is no path, though it would be that of the working directory.
            if value and isinstance(value, str) and key.rpartition(".")[2] not in _NOT_READ:
                yield value


def _digest(path: Path) -> str:
    if path.is_dir():
        digests = {file.name: _digest(file) for file in sorted(path.iterdir())}
        return sha256(json.dumps(digests).encode()).hexdigest()[:12]
    with files.regular_file(path).open("rb") as file:
        return file_digest(file, "sha256").hexdigest()[:12]


def run_all(plans: Sequence[LMRuns], state: State) -> None:
    """Make the runs that are not finished. The error of a run is kept, and the others go on."""
    todo = [(plan, run) for plan in plans for run in plan.runs if run.saved() is None]
    total = sum(len(plan.runs) for plan in plans)
    for number, (plan, run) in enumerate(todo, start=total - len(todo) + 1):
        print_line(f"[{number}/{total}] {plan.name}: {run.name}")
        if torch.distributed.is_initialized():
            torch.distributed.barrier()  # until rank 0 has written what comes before
        start, entry = time.perf_counter(), dict[str, Any](inputs=run_inputs(run, plan))
        try:
            _make(run, plan)
        except Exception as error:
            entry["error"] = str(error)
            if not isinstance(error, LincorrError):
                traceback.print_exc()
                entry["error"] = f"{type(error).__name__}: {error}"
            print_line(f"  failed: {entry['error']}")
        gc.collect()  # modules and trainers refer to each other
        entry["seconds"] = round(time.perf_counter() - start, 1)
        state.runs[f"{plan.name}/{run.name}"] = entry
        state.write()


def check_command_lines(plans: Sequence[LMRuns]) -> None:
    """Parse a command line of each study, before anything runs."""
    for study, run in {run.study: run for plan in plans for run in plan.runs}.items():
        try:
            with redirect_stdout(io.StringIO()), suppress(SystemExit):  # after it has printed
                run_lightning_cli([*run.arguments, "--print_config"])
        except ConfigError as error:
            raise ConfigError(
                f"options of the runs, {study}: {error} An option of one study is written as "
                "--option STUDY.KEY=VALUE, as in edits.data.n_edits=64."
            ) from error


def _make(run: PlannedRun, plan: LMRuns) -> None:
    rank_zero_only(shutil.rmtree)(run.folder, ignore_errors=True)  # of a run that was stopped
    lm = plan.after if run.study == "after" and plan.after else plan.lm
    lines = "false" if sys.stderr.isatty() else "true"  # of progress, for the log of a long run
    command = [*run.arguments, f"--model.lm.name_or_path={lm}"]
    command.append(f"--trainer.enable_progress_bar={lines}")
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
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()
