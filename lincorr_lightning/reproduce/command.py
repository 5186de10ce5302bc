"""The command ``lincorr reproduce``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lightning.pytorch.utilities import rank_zero_only

from lincorr_lightning.errors import ConfigError
from lincorr_lightning.io import check_writable, safe_names
from lincorr_lightning.lm.config import LMConfig
from lincorr_lightning.lm.fingerprint import fingerprint_tokenizer
from lincorr_lightning.lm.language_model import LanguageModel
from lincorr_lightning.lm.shared_weights import weights_read_once
from lincorr_lightning.lm.vocabulary import count_subjects
from lincorr_lightning.reproduce.items import select_items
from lincorr_lightning.reproduce.page import write_reproduction
from lincorr_lightning.reproduce.plan import LMPlan, describe, packaged, plan_lm
from lincorr_lightning.reproduce.runner import (
    State,
    do_runs,
    is_finished,
    is_first_process,
    minutes,
    saved_runs,
)
from lincorr_lightning.reproduce.settings import Settings, read_settings
from lincorr_lightning.reproduce.tables import LMRuns
from lincorr_lightning.reproduce.trial import time_lm
from lincorr_lightning.results.style import short_name

CONFIG = "reproduce.yaml"
_MAX_SUBJECTS = 10_000  # the paper's


def reproduce(args: Sequence[str]) -> Path | None:
    """Reproduce the paper's tables and figures as the command line says; return the page.

    Raises:
        ConfigError: A setting is not valid, a table or figure does not exist, the tuned LM has
            another tokenizer, or the folder is of other settings.
        LanguageModelError: An LM cannot be read.
    """
    options = vars(_parser().parse_args(args))
    config, only_plan = options.pop("config"), options.pop("plan")
    options["only"] = [one for part in options["only"] or () for one in part.split(",")] or None
    settings = read_settings(packaged(config), options)
    items = select_items(settings.only)
    folder = Path(settings.output)
    names = list(safe_names(map(short_name, settings.lm)).values())
    if len(set(names)) < len(settings.lm):
        raise ConfigError(f"two of the LMs have one name: {', '.join(settings.lm)}.")
    plans, trials, prints = [], {}, {}
    with weights_read_once():
        for i, (name, path) in enumerate(zip(names, settings.lm, strict=True)):
            lm = LanguageModel(_lm_config(path, settings))
            after = settings.after[i] if settings.after else None
            if after is not None:
                _check_tokenizer(lm, LanguageModel(_lm_config(after, settings)))
            plan = LMPlan(path, after, name)
            plan_lm(plan, items, settings, lm.tokenizer, folder / "runs" / name,
                    _n_subjects(settings, lm))  # fmt: skip
            plans.append(plan)
            lm.load()
            prints[name] = lm.info["fingerprint"]
            trials[name] = time_lm(lm)
        state = State(folder, {**_kept_settings(settings), "lms": prints})
        _show_plan(plans, trials)
        if only_plan:
            return None
        check_writable(folder)
        state.write()
        do_runs(plans, trials, state)
    errors = {
        plan.name: {
            run.name: state.runs[f"{plan.name}/{run.name}"].get("error", "not finished")
            for run in plan.runs
            if not is_finished(run) and f"{plan.name}/{run.name}" in state.runs
        }
        for plan in plans
    }
    if not is_first_process():
        return None
    found = [LMRuns(plan, saved_runs(plan), errors[plan.name]) for plan in plans]
    page = write_reproduction(items, found, settings, folder)
    sys.stdout.write(f"Page: {page}\n")
    return page


def _kept_settings(settings: Settings) -> dict[str, Any]:
    """Return the settings that must not change when a reproduction is resumed."""
    return {
        "size": settings.size,
        "overlays": list(settings.overlays),
        "options": dict(settings.options),
        "studies": {
            name: {"config": one.config, **one.options} for name, one in settings.studies.items()
        },
    }


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
    parser.add_argument("--top", type=int, help="labels in the tables of influences")
    parser.add_argument("--output", help="folder of the runs and of the page")
    parser.add_argument("--overlays", action="append", metavar="CONFIG",
                        help="config that is laid over those of all runs, such as "
                        "trainer/gpu.yaml")  # fmt: skip
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
    return LMConfig(path, **options)


def _check_tokenizer(lm: LanguageModel, after: LanguageModel) -> None:
    prints = [fingerprint_tokenizer(one.tokenizer, one.prefix) for one in (lm, after)]
    if prints[0] != prints[1]:
        raise ConfigError(
            f"{after.config.name_or_path} has another tokenizer than {lm.config.name_or_path}, so "
            "that maps of one have no meaning for the other. Pass the tuned version of the same LM "
            "as --after."
        )


def _n_subjects(settings: Settings, lm: LanguageModel) -> int:
    wanted = settings.studies["probe"].options.get("data.n_subjects") or _MAX_SUBJECTS
    return min(int(wanted), count_subjects(lm.tokenizer))


@rank_zero_only
def _show_plan(plans: Sequence[LMPlan], trials: Any) -> None:
    for line in describe(plans):
        sys.stdout.write(f"{line}\n")
    seconds = sum(
        trials[plan.name].seconds(run)
        for plan in plans
        for run in plan.runs
        if not is_finished(run)
    )
    n_done = sum(is_finished(run) for plan in plans for run in plan.runs)
    total = sum(len(plan.runs) for plan in plans)
    sys.stdout.write(f"{total} runs, {n_done} of them finished; about {minutes(seconds)}.\n")
    sys.stdout.flush()
