"""Choose the defaults of the vocabulary ablation.

    python benchmarks/ablation_defaults.py [--lm FOLDER]

varies the settings of configs/vocabulary_ablation.yaml, on source answers and seeds that a run with
the defaults does not use, and prints the generalized shares of each variant.
"""

from __future__ import annotations

import json
import tempfile
import time
from pathlib import Path
from typing import Any

from jsonargparse import auto_cli

from lincorr_lightning.ablation.datamodule import PairedTextsDataModule
from lincorr_lightning.ablation.module import VocabularyAblation
from lincorr_lightning.ablation.token_embedding import read_token_embedding
from lincorr_lightning.cli import main as lincorr
from lincorr_lightning.lm.config import LMConfig
from lincorr_lightning.results.table import markdown_table

VARIANTS = {
    "default": [],
    "input_rms 0.15": ["--model.network.input_rms=0.15"],
    "input_rms 0.6": ["--model.network.input_rms=0.6"],
    "not centered": ["--model.network.center=false"],
    "not residual": ["--model.network.residual=false"],
    "width 2d": ["--model.network.width={2d}"],
    "no weight decay": ["--model.compose.weight_decay=0", "--model.learn.weight_decay=0"],
    "weight decay 1": ["--model.compose.weight_decay=1", "--model.learn.weight_decay=1"],
    "compose 20 epochs": ["--model.compose.epochs=20"],
    "compose 80 epochs": ["--model.compose.epochs=80"],
    "learn 100 epochs": ["--model.learn.epochs=100"],
    "learn 400 epochs": ["--model.learn.epochs=400"],
    "learn at 1e-3": ["--model.learn.learning_rate=1e-3"],
    "learn at 1e-2": ["--model.learn.learning_rate=1e-2"],
}


def others(lm: str, most: int) -> tuple[list[str], int]:
    """Return the source answers that a run with the defaults does not use, and the width."""
    plan = VocabularyAblation(LMConfig(lm)).plan

    def names(max_source_labels: int | None) -> set[str]:
        data = PairedTextsDataModule(plan, max_source_labels=max_source_labels)
        data.setup()
        labels = data.corpus.labels
        return {labels.source_text(i) for i in range(len(labels))}

    width = read_token_embedding(LMConfig(lm)).weight.shape[1]
    return sorted(names(None) - names(most)), width


def main(
    lm: str = "tiny-world",
    most: int = 20,
    seeds: list[int] | None = None,
    only: list[str] | None = None,
) -> None:
    """Print the table.

    Args:
        lm: LM whose vocabulary is used: a folder, a hub id or tiny-world.
        most: Number of source labels.
        seeds: Seeds of the runs; not those of the config.
        only: Variants to run; null runs all.
    """
    names, d = others(lm, most)
    rows: list[list[Any]] = []
    for name, options in VARIANTS.items():
        if only is not None and name not in only:
            continue
        options = [option.replace("{2d}", str(2 * d)) for option in options]
        with tempfile.TemporaryDirectory() as folder:
            began = time.monotonic()
            cli = lincorr(
                ["fit", "--config", "configs/vocabulary_ablation.yaml",
                 f"--model.lm.name_or_path={lm}", "--model.mapping=[reference, permuted]",
                 "--model.skip_compose_baseline=false", f"--model.seeds={seeds or [100]}",
                 f"--data.max_source_labels={min(most, len(names))}", "--data.seed=100",
                 f"--data.source_labels={json.dumps(names)}", *options,
                 f"--trainer.default_root_dir={folder}", "--trainer.enable_progress_bar=false"]
            )  # fmt: skip
            seconds = time.monotonic() - began
            results = json.loads((Path(cli.trainer.log_dir) / "results.json").read_text())
        found = {row["mapping"]: row for row in results["mappings"]}
        reference, permuted = found["reference"], found["permuted"]
        rows.append(
            [name, f"{reference['generalized']:.0%}", f"{reference['unrestricted']:.0%}",
             f"{permuted['generalized']:.0%}",
             f"{reference['generalized'] - permuted['generalized']:+.0%}", f"{seconds:.0f} s"]
        )  # fmt: skip
    columns = ["setting", "reference", "of all candidates", "permuted", "difference", "time"]
    print(markdown_table(columns, rows))


if __name__ == "__main__":
    auto_cli(main)
