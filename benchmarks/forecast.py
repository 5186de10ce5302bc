"""Forecasts of edits on pretrained LMs, beside the outcomes of their training.

    python benchmarks/real_lms.py FOLDER --only "[outcomes]"    # trains the edits
    python benchmarks/forecast.py FOLDER                        # forecasts them, prints the tables
    python benchmarks/forecast.py FOLDER --show true            # prints the tables
    python benchmarks/forecast.py FOLDER --fit true             # writes the package's OutcomeModel

FOLDER holds a folder for each LM. For each run of edits RUN, ``benchmarks/results/real_lms/LM/``
holds its cases, RUN.csv, and what was forecast of each, RUN.npz: a new forecaster is judged on
these in seconds.
"""

from __future__ import annotations

import csv
import time
from collections.abc import Sequence
from functools import partial
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import torch
from forecast_baselines import BASELINES
from forecast_scores import load, stored_model
from forecast_tables import tables
from jsonargparse import auto_cli
from numbers_file import write_numbers
from real_lm_tables import edits_of
from real_lms import RESULTS

from lincorr_lightning.finetune.edits import Edit, resolve_edits
from lincorr_lightning.finetune.forecasts import forecast_edits, logits_in_context
from lincorr_lightning.finetune.optimizer_step import STEP_SCALE, EditTraining, logits_after_step
from lincorr_lightning.functional import Outcome
from lincorr_lightning.io import atomic_write
from lincorr_lightning.knowledge import Catalogue, TokenizedRelation
from lincorr_lightning.lm.language_model import LanguageModel

RIDGES = (0.0, "auto")
OTHER_SCALES = (4.0, 8.0, 16.0, 32.0)
TRAINING = {"lora": EditTraining("lora", 2e-3), "full": EditTraining("full", 5e-5)}
N_SUBJECTS = 1000


def collect(lm: LanguageModel, relation: str, method: str, cases: Path) -> dict[str, Any]:
    """Return the forecasts of some edits, and the outcomes of their training.

    Returns:
        ``before`` and ``predicted/NAME``, target logits ``(n, n_target)``; ``reference``, the same
        shape, bool; ``after`` and ``outcome``, ``(n,)``, the target label after the training and
        the position in `Outcome`; ``risk/NAME``, ``(n,)``; ``seconds/NAME``.
    """
    tokenized = TokenizedRelation.of(relation, Catalogue.load(), lm.tokenizer)
    with cases.open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    raw = [{"subject": row["subject"], "answer": row["source_answer"]} for row in rows]
    edits: Sequence[Edit] = resolve_edits(raw, tokenized, lm)
    start = time.perf_counter()
    forecasts = forecast_edits(lm, edits, tokenized, RIDGES, n_subjects=N_SUBJECTS)
    seconds = {"maps": time.perf_counter() - start}
    prompts = [
        ask([edit.subject for edit in edits])
        for ask in (tokenized.source_prompts, tokenized.target_prompts)
    ]
    start = time.perf_counter()
    logits_in_context(lm, edits, tokenized)  # read once more, to be timed
    seconds["in_context"] = time.perf_counter() - start
    seconds["maps"] -= seconds["in_context"]
    step = partial(
        logits_after_step, lm, edits, *prompts, tokenized.target.token_ids, TRAINING[method]
    )
    start = time.perf_counter()
    steps = {STEP_SCALE: step()[0]}
    seconds["step"] = time.perf_counter() - start
    steps |= zip(OTHER_SCALES, step(scales=OTHER_SCALES), strict=True)
    predicted = dict(forecasts.predicted)
    predicted |= {f"step_{scale:g}": logits for scale, logits in steps.items()}
    found = {f"predicted/{name}": logits.numpy() for name, logits in predicted.items()}
    for name, baseline in BASELINES.items():
        start = time.perf_counter()
        found[f"risk/{name}"] = baseline(lm, edits, tokenized).numpy()
        seconds[name] = time.perf_counter() - start
    outcomes = [Outcome(row["outcome"]).code for row in rows]
    after = [tokenized.target.texts.index(row["answer_after"]) for row in rows]
    return {
        "before": forecasts.before.numpy(),
        "reference": forecasts.reference_mask.numpy(),
        "after": np.array(after, dtype=np.int16),
        "outcome": np.array(outcomes, dtype=np.int8),
        **found,
        **{f"seconds/{name}": np.float32(value) for name, value in seconds.items()},
    }


def save(arrays: dict[str, Any], file: Path) -> None:
    """Write arrays, those of float64 as float16."""
    small = {
        name: value.astype(np.float16) if value.dtype == np.float64 else value
        for name, value in arrays.items()
    }
    with atomic_write(file) as temporary, temporary.open("wb") as stream:
        np.savez_compressed(stream, **small)


def main(
    folder: str,
    only: tuple[str, ...] = (),
    show: bool = False,
    fit: bool = False,
    output: str = str(RESULTS),
) -> None:
    """Forecast the edits that have been trained, and print the tables.

    Args:
        folder: Folder that holds a folder for each LM.
        only: Beginnings of names of runs, such as outcomes_lora; null takes all.
        show: Whether to print the tables of what there is, and forecast nothing.
        fit: Whether to fit the model of outcomes that ships on all edits, and forecast nothing.
        output: Folder of the results.
    """
    results = Path(output)
    if fit:
        everything = load(results)
        models = {
            method: {
                **stored_model(everything, method),
                "training": one.summary,
                "step_scale": STEP_SCALE,
            }
            for method, one in TRAINING.items()
            # The edits of one LM alone say nothing of others.
            if len({run.lm for run in everything if run.method == method}) > 1
        }
        file = Path(str(files("lincorr_lightning.finetune") / "outcome_model.json"))
        write_numbers(file, models)
        return
    torch.set_float32_matmul_precision("medium")
    for config in sorted(Path(folder).glob("**/config.json")) if not show else ():
        lm = None
        for cases in sorted((results / config.parent.name).glob("outcomes_*.csv")):
            if cases.with_suffix(".npz").exists() or (only and not cases.stem.startswith(only)):
                continue
            print(f"{config.parent.name}: {cases.stem}", flush=True)
            lm = lm or LanguageModel.from_pretrained(
                str(config.parent), dtype="float32", attn_implementation="eager"
            )
            method, relation = edits_of(cases.stem)
            arrays = collect(lm, relation, method, cases)
            save(arrays, cases.with_suffix(".npz"))
    print(tables(results))


if __name__ == "__main__":
    auto_cli(main)
