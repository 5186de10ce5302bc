"""Why a network between token embeddings also learns permuted pairs: one setting at a time.

    python benchmarks/permuted_ablation.py --lm FOLDER --output FILE.json

runs configs/vocabulary_ablation.yaml with the paper's 1,024 paired subjects, on another choice of
source labels and other seeds than the config, and prints what is generalized under the reference
and under a permuted mapping. With any number of paired subjects the compose phase has 320 steps.
Numbers that are in the file already are not measured again.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import lightning as L
from jsonargparse import auto_cli
from numbers_file import read_numbers, write_numbers

from lincorr_lightning.ablation.batches import TextBatch
from lincorr_lightning.cli import main as lincorr
from lincorr_lightning.results.table import markdown_table

MAPPINGS = ("reference", "permuted")
SHARES = ("source_learned", "generalized", "std", "unrestricted", "says_source", "random")


def size(n_labels: int | None, n_paired: int) -> list[str]:
    """Return options for a number of labels and of paired subjects, at 320 compose steps."""
    return [
        f"--data.max_source_labels={'null' if n_labels is None else n_labels}",
        f"--data.n_paired={n_paired}",
        f"--model.compose.epochs={40 * 1024 // n_paired}",
    ]


BASE = size(20, 1024)
CALLBACK = f"--trainer.callbacks+={Path(__file__).stem}.LearnWith"
FIRST_LAYER = [CALLBACK, "--trainer.callbacks.layer=in"]
SECOND_LAYER = [CALLBACK, "--trainer.callbacks.layer=out"]

# Options beside those of BASE.
VARIANTS: dict[str, list[str]] = {
    "1,024 paired subjects": [],
    "128 paired subjects": size(20, 128),
    "256 paired subjects": size(20, 256),
    "80 labels": size(80, 1024),
    "80 labels, 4,096 paired subjects": size(80, 4096),
    "all labels": size(None, 1024),
    "learn with the first layer": FIRST_LAYER,
    "learn with the second layer": SECOND_LAYER,
    "not centered": ["--model.network.center=false"],
    "not residual": ["--model.network.residual=false"],
    "five times the epochs": ["--model.compose.epochs=200", "--model.learn.epochs=1000"],
    "loss over the vocabulary": ["--model.candidates=vocabulary"],
}


class LearnWith(L.Callback):
    """Train only one layer in the phase of the new subjects."""

    def __init__(self, layer: str) -> None:
        self.layer = layer

    def on_train_batch_start(
        self, trainer: Any, pl_module: Any, batch: TextBatch, batch_idx: int
    ) -> None:
        """Freeze the other layer at the beginning of the phase."""
        if batch.begins and batch.phase == "learn":
            for name, parameter in pl_module.networks.named_parameters():
                parameter.requires_grad_(name.endswith(f"_{self.layer}"))


def ablate(lm: str, seeds: list[int], options: list[str]) -> dict[str, Any]:
    """Run the ablation and return what is generalized under both mappings."""
    with tempfile.TemporaryDirectory() as folder:
        cli = lincorr(
            ["fit", "--config", "configs/vocabulary_ablation.yaml",
             f"--model.lm.name_or_path={lm}", "--model.lm.dtype=float32",
             f"--model.mapping=[{', '.join(MAPPINGS)}]", f"--model.seeds={seeds}",
             "--model.skip_compose_baseline=false", "--data.seed=100",
             f"--trainer.default_root_dir={folder}", "--trainer.enable_progress_bar=false",
             "--matmul_precision=medium", *BASE, *options]
        )  # fmt: skip
        results = read_numbers(Path(cli.trainer.log_dir) / "results.json")
        history = cli.model.history
    found = {one["mapping"]: one for one in results["mappings"]}
    return {
        "n_source_labels": results["n_source_labels"],
        "n_target_labels": results["n_target_labels"],
        "n_paired": results["n_paired"],
        "n_seeds": len(seeds),
        **{
            name: {key: found[name][key] for key in SHARES}
            | {"paired_learned": history[f"val/compose/target_learned/{name}"][-1][1]}
            for name in MAPPINGS
        },
    }


def row(name: str, found: dict[str, Any]) -> list[str]:
    """Return a row of the table."""
    return [
        name,
        f"{found['n_source_labels']} / {found['n_target_labels']}",
        f"{found['n_paired'] / found['n_source_labels']:.0f}",
        f"{found['permuted']['paired_learned']:.0%}",
        f"{found['permuted']['source_learned']:.0%}",
        *(f"{found[m]['generalized']:.0%} ± {100 * (found[m]['std'] or 0):.0f}" for m in MAPPINGS),
        f"{found['reference']['random']:.0%}",
    ]


def main(
    lm: str = "tiny-world",
    only: tuple[str, ...] = (),
    n_seeds: int = 2,
    output: str | None = None,
    options: tuple[str, ...] = (),
) -> None:
    """Print the table.

    Args:
        lm: LM whose vocabulary is used: a folder, a .gguf file, a hub id or tiny-world.
        only: Names of variants to run; none runs all.
        n_seeds: Number of runs of each mapping.
        output: File of the numbers, JSON; null writes none.
        options: Options of `lincorr` for every run.
    """
    found: dict[str, dict[str, Any]] = {}
    if output is not None and Path(output).exists():
        found = read_numbers(Path(output))
    for name, own in VARIANTS.items():
        if name in found or (only and name not in only):
            continue
        found[name] = ablate(lm, list(range(100, 100 + n_seeds)), [*own, *options])
        print(row(name, found[name]), flush=True)
        if output is not None:
            write_numbers(output, {name: found[name] for name in VARIANTS if name in found})
    columns = (
        "setting", "source / target labels", "paired per label", "paired learned", "new learned",
        *MAPPINGS, "chance",
    )  # fmt: skip
    rows = [row(name, found[name]) for name in VARIANTS if name in found]
    print(f"{Path(lm).name}, {n_seeds} seeds\n\n{markdown_table(columns, rows)}")


if __name__ == "__main__":
    auto_cli(main)
