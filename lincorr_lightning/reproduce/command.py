"""The command ``lincorr reproduce``."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lightning.pytorch.utilities import rank_zero_only
from transformers.utils.logging import disable_progress_bar

from lincorr_lightning import termination
from lincorr_lightning.config import find_config, load_yaml
from lincorr_lightning.errors import ConfigError, ReportError
from lincorr_lightning.io import check_writable, safe_names
from lincorr_lightning.lm.config import LMConfig
from lincorr_lightning.lm.fingerprint import fingerprint_tokenizer
from lincorr_lightning.lm.language_model import LanguageModel
from lincorr_lightning.lm.loading import weights_read_once
from lincorr_lightning.reproduce.measured import LMRuns
from lincorr_lightning.reproduce.page import write_reproduction
from lincorr_lightning.reproduce.plan import (
    Item,
    LMPlan,
    all_items,
    describe,
    plan_runs,
    select_items,
)
from lincorr_lightning.reproduce.runner import (
    State,
    check_command_lines,
    print_line,
    run_all,
    saved_run,
)
from lincorr_lightning.reproduce.settings import Settings, read_settings
from lincorr_lightning.results.table import short_name

CONFIG = "reproduce.yaml"


def reproduce(args: Sequence[str]) -> Path | None:
    """Reproduce the paper's tables and figures, as the command line behind the name says.

    Returns:
        The page; None where only the plan is shown, and on ranks other than 0.
    """
    changed = vars(_parser().parse_args(args))
    config, only_plan = find_config(changed.pop("config")), changed.pop("plan")
    if changed["only"] is not None:
        changed["only"] = [key for part in changed["only"] for key in part.split(",") if key]
        if not changed["only"]:
            raise ConfigError("--only names no table or figure; leave it out for all.")
    options = dict(map(_option, changed.pop("option") or ()))
    settings = read_settings(config, changed, options)
    chosen = select_items(settings.only)
    folder = Path(settings.output)
    state = State(folder)
    # Tables of earlier calls stay on the page, and need their runs.
    items = [item for item in all_items() if item in chosen or item.keys[0] in state.tables]
    state.tables = [item.keys[0] for item in items]
    disable_progress_bar()  # type: ignore[no-untyped-call]  # of reading weights
    with weights_read_once():
        plans = _plan(settings, items, folder)
        state.check(plans)
        check_command_lines(plans)
        for plan in plans:
            finished = {run.name for run in plan.runs if saved_run(run) is not None}
            print_line("\n".join(describe(plan, items, settings, finished)))
        if len(items) > len(chosen):
            print_line(f"{len(items) - len(chosen)} more tables or figures were asked for earlier.")
        if not any(plan.runs for plan in plans):
            raise ReportError(
                "there is nothing to run; the plan says why all that was asked for is left out."
            )
        if only_plan:
            return None
        check_writable(folder)
        state.write()
        termination.current.is_resumable = True
        run_all(plans, state)
    return _write(plans, state, items, settings)


@rank_zero_only
def _write(
    plans: Sequence[LMPlan], state: State, items: Sequence[Item], settings: Settings
) -> Path:
    """Write the page of the runs that are finished."""
    lms = [_finished(plan, state) for plan in plans]
    failed = [f"{lm.name}: {name}: {error}" for lm in lms for name, error in lm.errors.items()]
    if failed and not any(lm.runs for lm in lms):
        raise ReportError(f"all runs failed. {failed[0]}")
    if failed:
        print_line(f"{len(failed)} runs failed; the page has the reasons. The first: {failed[0]}")
    page = write_reproduction(items, lms, settings, state.path.parent)
    print_line(f"Page: {page}")
    return page


def _plan(settings: Settings, items: Sequence[Item], folder: Path) -> list[LMPlan]:
    """Return the plan of each LM, with its fingerprint."""
    names = [short_name(path) for path in settings.lm]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise ConfigError(f"two of the LMs have the name {twice}. Rename one of the folders.")
    plans = []
    for i, name in enumerate(safe_names(names).values()):
        lm = LanguageModel(_lm_config(settings.lm[i], settings))
        plan = LMPlan(name, settings.lm[i], settings.after[i] if settings.after else None)
        # Before the LM, which is in memory then as the runs start.
        if plan.after is not None:
            plan.after_fingerprint = _tuned_fingerprint(plan.after, lm, settings)
        plan_runs(plan, lm, items, settings, folder / "runs" / name)
        plan.fingerprint = dict(lm.load().info["fingerprint"])
        plans.append(plan)
    return plans


def _lm_config(path: str, settings: Settings) -> LMConfig:
    """Return how an LM is read, as in the runs."""
    prefix = "model.lm."
    options: dict[str, Any] = {
        k.removeprefix(prefix): v for k, v in settings.options.items() if k.startswith(prefix)
    }
    try:
        return LMConfig(path, **options)
    except TypeError as error:
        raise ConfigError(f"options: {str(error).partition(' ')[2]} of {prefix}*") from error


def _tuned_fingerprint(path: str, lm: LanguageModel, settings: Settings) -> dict[str, Any]:
    """Return the fingerprint of a tuned LM, whose tokenizer must be that of the LM."""
    after = LanguageModel(_lm_config(path, settings))
    before, tuned = (fingerprint_tokenizer(each.tokenizer, each.prefix) for each in (lm, after))
    if before != tuned:
        raise ConfigError(
            f"{after.config.name_or_path} has another tokenizer than {lm.config.name_or_path}, so "
            "that maps of one have no meaning for the other. Pass the tuned version of the same LM "
            "as --after."
        )
    return dict(after.load().info["fingerprint"])


def _finished(plan: LMPlan, state: State) -> LMRuns:
    """Return the finished runs of an LM, and why others are missing."""
    saved = {run.name: saved_run(run) for run in plan.runs}
    runs = {name: run for name, run in saved.items() if run is not None}
    entries = {run.name: state.entry(plan, run) for run in plan.runs}
    errors = {n: one.get("error", "not finished") for n, one in entries.items() if n not in runs}
    return LMRuns(plan, runs, errors, {n: one.get("seconds", 0.0) for n, one in entries.items()})


def _option(text: str) -> tuple[str, Any]:
    """Return an option of the runs, given as ``key=value``."""
    key, equals, value = text.partition("=")
    if not equals:
        raise ConfigError(f"--option {text}: write KEY=VALUE, as in model.lm.dtype=bfloat16.")
    return key.removeprefix("--"), load_yaml(value)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="lincorr reproduce",
        description="Reproduce the paper's tables and figures on an LM: one page, beside the "
        "paper's numbers. Runs that are finished in the output folder are not repeated.",
    )
    for name, metavar, text in (
        ("lm", "NAME_OR_PATH", "LM: a folder, a .gguf file, a hub id or tiny-world; repeat it for "
         "several"),
        ("after", "TUNED", "the same LM after post-training; once for each --lm"),
        ("only", "table5,figure3", "tables and figures; default: all"),
        ("overlays", "CONFIG", "config that is laid over those of all runs, such as "
         "trainer/gpu.yaml"),
        ("option", "KEY=VALUE", "option of all runs, such as model.lm.dtype=bfloat16, or of one "
         "study, such as edits.data.n_edits=64"),
    ):  # fmt: skip
        parser.add_argument(f"--{name}", action="append", metavar=metavar, help=text)
    parser.add_argument("--size", help="quick, paper, or another size of the config")
    parser.add_argument("--top", type=int, help="labels in influences_*.csv")
    parser.add_argument("--output", help="folder of the runs and of the page")
    parser.add_argument("--config", default=CONFIG, help="all settings (default: the packaged "
                        "configs/reproduce.yaml)")  # fmt: skip
    parser.add_argument("--plan", action="store_true", help="show the plan, and run nothing")
    return parser
