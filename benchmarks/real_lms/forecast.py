"""Forecasts of edits on pretrained LMs, beside the outcomes of their training.

    python -m benchmarks.real_lms.run FOLDER --only "[outcomes]"    # trains the edits
    python -m benchmarks.real_lms.forecast FOLDER                   # forecasts them
    python -m benchmarks.real_lms.forecast FOLDER --fit true        # the package's OutcomeModel
    python -m benchmarks.real_lms.forecast FOLDER --costs true      # times forecasts and training
    python -m benchmarks.real_lms.findings                          # the tables

FOLDER holds a folder for each LM. For each run of edits RUN, ``benchmarks/results/real_lms/LM/``
holds its cases, RUN.csv, and what was forecast of each, RUN.npz: a new forecaster is judged on
these in seconds. forecast_costs.json has the times, of a few edits in one process.
"""

from __future__ import annotations

import csv
import time
from collections.abc import Callable, Sequence
from functools import partial
from importlib.resources import files
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import lightning as L
import numpy as np
import torch
from jsonargparse import auto_cli

from benchmarks.common import lms_in, write_numbers
from benchmarks.real_lms.forecast_baselines import BASELINES, gradient_similarity
from benchmarks.real_lms.forecast_scores import STEP, load, stored_model
from benchmarks.real_lms.tables import REAL_LMS, edits_of
from lincorr_lightning.finetune import Edit, EditsDataModule, EditTraining, SourceFinetune
from lincorr_lightning.finetune.edit_files import RawEdit
from lincorr_lightning.finetune.edits import resolve_edits, sample_edits
from lincorr_lightning.finetune.forecasts import N_SUBJECTS as FITTED_SUBJECTS
from lincorr_lightning.finetune.forecasts import forecast_edits, logits_in_context
from lincorr_lightning.finetune.optimizer_step import STEP_SCALE, logits_after_step
from lincorr_lightning.functional import Outcome
from lincorr_lightning.knowledge import Catalogue, TokenizedRelation
from lincorr_lightning.linear_map import fit_linear_maps
from lincorr_lightning.lm import LanguageModel, LMConfig, sample_up_to

RIDGES = (0.0, "auto")
TRAINING = {"lora": EditTraining("lora", 2e-3), "full": EditTraining("full", 5e-5)}
MAP_SUBJECTS = 1000  # half as many as by default


def collect(lm: LanguageModel, relation: str, method: str, cases: Path) -> dict[str, Any]:
    """Return the forecasts of some edits, and the outcomes of their training.

    Returns:
        ``before`` and ``predicted/NAME``, target logits ``(n, n_target)``; ``reference``, the same
        shape, bool; ``after`` and ``outcome``, ``(n,)``, the target label after the training and
        the position in `Outcome`; ``risk/NAME``, ``(n,)``.
    """
    tokenized = TokenizedRelation.of(relation, Catalogue.load(), lm.tokenizer)
    with cases.open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    raw = [RawEdit(str(cases), row["subject"], row["source_answer"]) for row in rows]
    edits: Sequence[Edit] = resolve_edits(raw, tokenized, lm).edits
    forecasts = forecast_edits(lm, edits, tokenized, RIDGES, n_subjects=MAP_SUBJECTS)
    by_step = logits_after_step(lm, edits, tokenized, TRAINING[method])
    predicted = {**forecasts.predicted, STEP: by_step}
    found = {f"predicted/{name}": logits.numpy() for name, logits in predicted.items()}
    for name, baseline in BASELINES.items():
        found[f"risk/{name}"] = baseline(lm, edits, tokenized).numpy()
    outcomes = [Outcome(row["outcome"]).code for row in rows]
    after = [tokenized.target.texts.index(row["answer_after"]) for row in rows]
    return {
        "before": forecasts.before.numpy(),
        "reference": forecasts.reference_mask.numpy(),
        "after": np.array(after, dtype=np.int16),
        "outcome": np.array(outcomes, dtype=np.int8),
        **found,
    }


class TrainingTime(L.Callback):
    """Measures the processor time of a training, without what is before it."""

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Start the clock."""
        self.start = time.process_time()

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Stop it."""
        self.seconds = time.process_time() - self.start


def measure_costs(folder: Path, method: str) -> dict[str, float]:
    """Return the processor time of forecasts and of the training of a few edits, in one process.

    ``training``, without callbacks, of ``n_edits``; and the seconds of forecasters and baselines.
    """
    n, relation = 32 if method == "lora" else 8, "city->country"
    options = {"dtype": "float32", "attn_implementation": "eager"}
    lm = LanguageModel.from_pretrained(str(folder), **options)
    tokenized = TokenizedRelation.of(relation, Catalogue.load(), lm.tokenizer)
    edits = sample_edits(tokenized, lm, n)
    others = sample_up_to(lm.tokenizer, FITTED_SUBJECTS, [edit.subject for edit in edits])
    forecasters: dict[str, Callable[[], object]] = {
        "in_context": partial(logits_in_context, lm, edits, tokenized),
        "optimizer_step": partial(logits_after_step, lm, edits, tokenized, TRAINING[method]),
        "maps": partial(fit_linear_maps, lm, tokenized, others, RIDGES),
        "gradient_similarity": partial(gradient_similarity, lm, edits, tokenized),
    }
    found: dict[str, float] = {"n_edits": n}
    forecasters["optimizer_step"]()  # the first call allocates memory
    for name, forecast in forecasters.items():
        start = time.process_time()
        forecast()
        found[name] = round(time.process_time() - start, 4)
    timer, training = TrainingTime(), TRAINING[method]
    module = SourceFinetune(
        LMConfig(str(folder), **options), method=training.method,
        learning_rate=training.learning_rate, forecast=False,
    )  # fmt: skip
    with TemporaryDirectory() as scratch:
        trainer = L.Trainer(
            max_epochs=1, accelerator="cpu", default_root_dir=scratch, logger=False,
            enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
            callbacks=[timer],
        )  # fmt: skip
        trainer.fit(module, EditsDataModule(module.lm, relation, n, training=module.edit_training))
    return found | {"training": round(timer.seconds, 2)}


def save(arrays: dict[str, Any], file: Path) -> None:
    """Write arrays, those of float64 as float16."""
    small = {
        name: value.astype(np.float16) if value.dtype == np.float64 else value
        for name, value in arrays.items()
    }
    part = file.with_name(f".{file.name}.part")
    with part.open("wb") as stream:
        np.savez_compressed(stream, **small)
    part.replace(file)


def main(folder: str, only: tuple[str, ...] = (), fit: bool = False, costs: bool = False) -> None:
    """Forecast the edits that have been trained.

    Args:
        folder: Folder that holds a folder for each LM.
        only: Beginnings of names of runs, such as outcomes_lora or balanced; empty takes all.
        fit: Whether to fit the model of outcomes that ships on all edits, and forecast nothing.
        costs: Whether to time forecasts and training, and forecast nothing.
    """
    if fit:
        everything = load(REAL_LMS)
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
    paths = lms_in(folder)
    for path in paths if costs else ():
        methods = [run.method for run in load(REAL_LMS) if run.lm == path.name]
        found = {method: measure_costs(path, method) for method in dict.fromkeys(methods)}
        write_numbers(REAL_LMS / path.name / "forecast_costs.json", found)
    for path in paths if not costs else ():
        lm = None
        own = REAL_LMS / path.name
        for cases in sorted([*own.glob("outcomes_*.csv"), *own.glob("balanced*.csv")]):
            if cases.with_suffix(".npz").exists() or (only and not cases.stem.startswith(only)):
                continue
            print(f"{path.name}: {cases.stem}", flush=True)
            lm = lm or LanguageModel.from_pretrained(
                str(path), dtype="float32", attn_implementation="eager"
            )
            method, relation = edits_of(cases.stem)
            save(collect(lm, relation, method, cases), cases.with_suffix(".npz"))


if __name__ == "__main__":
    auto_cli(main)
