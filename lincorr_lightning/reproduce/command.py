"""The command ``lincorr reproduce``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from lightning.pytorch.utilities import rank_zero_only
from transformers.utils.logging import disable_progress_bar

from lincorr_lightning import termination
from lincorr_lightning.config import load_yaml
from lincorr_lightning.errors import ConfigError, ReportError
from lincorr_lightning.io import check_writable, safe_names
from lincorr_lightning.knowledge.yaml_file import suggest
from lincorr_lightning.lm.config import LMConfig
from lincorr_lightning.lm.fingerprint import fingerprint_tokenizer
from lincorr_lightning.lm.language_model import LanguageModel
from lincorr_lightning.lm.loading import weights_read_once
from lincorr_lightning.lm.vocabulary import count_subjects
from lincorr_lightning.reproduce.items import ITEMS, Item, item_keys, select_items
from lincorr_lightning.reproduce.lm_runs import LMRuns
from lincorr_lightning.reproduce.page import write_reproduction
from lincorr_lightning.reproduce.plan import LMPlan, describe, packaged, plan_lm, study_setting
from lincorr_lightning.reproduce.runner import (
    State,
    check_command_lines,
    is_rank_zero,
    print_line,
    run_all,
    saved_run,
)
from lincorr_lightning.reproduce.settings import Settings, read_settings, with_options
from lincorr_lightning.results.style import short_name

CONFIG = "reproduce.yaml"
_MAX_SUBJECTS = 10_000  # the paper's


def reproduce(args: Sequence[str]) -> Path | None:
    """Reproduce the paper's tables and figures.

    Args:
        args: The command line behind ``lincorr reproduce``.

    Returns:
        The page; None where only the plan is shown, and on ranks other than 0.

    Raises:
        ConfigError: A setting is not valid, a table or figure does not exist, the tuned LM has
            another tokenizer, or the folder is of other settings.
        LanguageModelError: An LM cannot be read.
        ReportError: All runs failed.
    """
    options = vars(_parser().parse_args(args))
    config, only_plan = options.pop("config"), options.pop("plan")
    if options["only"] is not None:
        options["only"] = [one for part in options["only"] for one in part.split(",") if one]
        if not options["only"]:
            raise ConfigError("--only names no table or figure; leave it out for all.")
    own = _options(options.pop("option") or ())
    settings = with_options(read_settings(packaged(config), options), own)
    asked = select_items(settings.only)
    folder = Path(settings.output)
    state = State(folder)
    # Tables of earlier calls stay on the page, and need their runs.
    items = [item for item in ITEMS if item in asked or item.keys[0] in state.tables]
    state.tables = item_keys(items)
    disable_progress_bar()  # type: ignore[no-untyped-call]  # of reading weights
    with weights_read_once():
        plans = _plan(settings, items, folder)
        state.check(plans)
        check_command_lines(plans)
        _show(plans, items)
        if len(items) > len(asked):
            print_line(f"{len(items) - len(asked)} more tables or figures were asked for earlier.")
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
    if not is_rank_zero():
        return None
    lms = [_runs(plan, state) for plan in plans]
    failed = [f"{lm.name}: {name}: {error}" for lm in lms for name, error in lm.errors.items()]
    if failed:
        print_line(f"{len(failed)} runs failed; the page has the reasons. The first: {failed[0]}")
    if failed and not any(lm.runs for lm in lms):
        raise ReportError(f"all runs failed. {failed[0]}")
    page = write_reproduction(items, lms, settings, folder)
    print_line(f"Page: {page}")
    return page


def _plan(settings: Settings, items: Sequence[Item], folder: Path) -> list[LMPlan]:
    """Return the plan of each LM, with its fingerprint."""
    names = [short_name(path) for path in settings.lm]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise ConfigError(f"two of the LMs have the name {twice}. Rename one of the folders.")
    plans = []
    for i, path in enumerate(settings.lm):
        lm = LanguageModel(_lm_config(path, settings))
        after = settings.after[i] if settings.after else None
        # Before the LM, which is in memory then as the runs start.
        tuned = {} if after is None else _tuned_fingerprint(after, lm, settings)
        plan = LMPlan(path, after, safe_names(names)[names[i]], after_fingerprint=tuned)
        wanted, n_subjects = _n_subjects(settings, lm)
        runs = folder / "runs" / plan.name
        plan_lm(plan, items, settings, lm.tokenizer, runs, n_subjects)
        if n_subjects < wanted:
            plan.too_few_subjects = (
                f"probes: all {n_subjects:,} subjects that the vocabulary has, not {wanted:,}"
            )
        plan.fingerprint = dict(lm.load().info["fingerprint"])
        plans.append(plan)
    return plans


def _runs(plan: LMPlan, state: State) -> LMRuns:
    """Return the finished runs of an LM, and why others are missing."""
    runs, errors, seconds = {}, {}, {}
    for run in plan.runs:
        saved = saved_run(run)
        seconds[run.name] = state.runs.get(f"{plan.name}/{run.name}", {}).get("seconds", 0.0)
        if saved is None:
            entry = state.runs.get(f"{plan.name}/{run.name}", {})
            errors[run.name] = entry.get("error", "not finished")
        else:
            runs[run.name] = saved
    return LMRuns(plan, runs, errors, seconds)


def _options(texts: Sequence[str]) -> dict[str, Any]:
    """Return options of the runs, given as ``key=value``."""
    found = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not equals:
            raise ConfigError(f"--option {text}: write KEY=VALUE, as in model.lm.dtype=bfloat16.")
        found[key.removeprefix("--")] = load_yaml(value)
    return found


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="lincorr reproduce",
        description="Reproduce the paper's tables and figures on an LM: one page, beside the "
        "paper's numbers. Runs that are finished in the output folder are not repeated.",
    )
    parser.add_argument("--lm", action="append", metavar="NAME_OR_PATH",
                        help="LM: a folder, a .gguf file, a hub id or tiny-world; repeat it for "
                        "several")  # fmt: skip
    parser.add_argument("--after", action="append", metavar="TUNED",
                        help="the same LM after post-training; once for each --lm")  # fmt: skip
    parser.add_argument("--size", help="quick, paper, or another size of the config")
    parser.add_argument("--only", action="append", metavar="table5,figure3",
                        help="tables and figures; default: all")  # fmt: skip
    parser.add_argument("--top", type=int, help="labels in influences_*.csv")
    parser.add_argument("--output", help="folder of the runs and of the page")
    parser.add_argument("--overlays", action="append", metavar="CONFIG",
                        help="config that is laid over those of all runs, such as "
                        "trainer/gpu.yaml")  # fmt: skip
    parser.add_argument("--option", action="append", metavar="KEY=VALUE",
                        help="option of all runs, such as model.lm.dtype=bfloat16, or of one "
                        "study, such as edits.data.n_edits=64")  # fmt: skip
    parser.add_argument("--config", default=CONFIG, help="all settings (default: the packaged "
                        "configs/reproduce.yaml)")  # fmt: skip
    parser.add_argument("--plan", action="store_true", help="show the plan, and run nothing")
    return parser


def _lm_config(path: str, settings: Settings) -> LMConfig:
    """Return how an LM is read, as in the runs."""
    options: dict[str, Any] = {
        key.removeprefix("model.lm."): value
        for key, value in settings.options.items()
        if key.startswith("model.lm.")
    }
    try:
        return LMConfig(path, **options)
    except TypeError as error:
        names = [field.name for field in fields(LMConfig)]
        unknown = next((name for name in options if name not in names), "")
        hint = suggest(unknown, names, f" There are {', '.join(names)}.")
        raise ConfigError(f"options: there is no option model.lm.{unknown}.{hint}") from error


def _tuned_fingerprint(path: str, lm: LanguageModel, settings: Settings) -> dict[str, Any]:
    """Return the fingerprint of a tuned LM.

    Raises:
        ConfigError: Its tokenizer is not that of the LM.
    """
    after = LanguageModel(_lm_config(path, settings))
    prints = [fingerprint_tokenizer(one.tokenizer, one.prefix) for one in (lm, after)]
    if prints[0] != prints[1]:
        raise ConfigError(
            f"{after.config.name_or_path} has another tokenizer than {lm.config.name_or_path}, so "
            "that maps of one have no meaning for the other. Pass the tuned version of the same LM "
            "as --after."
        )
    after.load()
    return dict(after.info["fingerprint"])


def _n_subjects(settings: Settings, lm: LanguageModel) -> tuple[int, int]:
    """Return how many subjects the probes ask for, and how many the vocabulary has for them."""
    given, words, kind = (
        study_setting(settings, "probe", "data", name)
        for name in ("n_subjects", "words_per_subject", "subject_kind")
    )
    if given is not None and not isinstance(given, int):
        raise ConfigError(f"data.n_subjects is {given!r}; it must be a whole number or null.")
    available = count_subjects(lm.tokenizer, words or 1, kind or "any")
    return (_MAX_SUBJECTS, min(available, _MAX_SUBJECTS)) if given is None else (given, available)


@rank_zero_only
def _show(plans: Sequence[LMPlan], items: Sequence[Item]) -> None:
    for plan in plans:
        finished = {run.name for run in plan.runs if saved_run(run) is not None}
        sys.stdout.writelines(f"{line}\n" for line in describe(plan, items, len(plans), finished))
