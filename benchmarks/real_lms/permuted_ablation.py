"""Why a network between token embeddings also learns permuted pairs: one setting at a time.

    python -m benchmarks.real_lms.permuted_ablation --lm FOLDER --output FILE.json

runs configs/vocabulary_ablation.yaml on another choice of source labels and other seeds than the
config, and prints what is generalized under the reference and under a permuted mapping. With any
number of paired subjects the compose phase has 320 steps. Numbers that are in the file already are
not measured again.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import lightning as L
from jsonargparse import auto_cli

from benchmarks.common import markdown_table, percent, read_numbers, results_of, write_numbers

MAPPINGS = ("reference", "permuted")
SHARES = ("source_learned", "generalized", "std", "random")


def size(n_labels: int, n_paired: int) -> list[str]:
    """Return options for a number of labels and of paired subjects, at 320 compose steps."""
    return [
        f"--data.max_source_labels={n_labels}",
        f"--data.n_paired={n_paired}",
        f"--model.compose.epochs={40 * 1024 // n_paired}",
    ]


BASE = size(20, 1024)
CALLBACK = "--trainer.callbacks+=benchmarks.real_lms.permuted_ablation.LearnWith"
# Options beside those of BASE.
VARIANTS: dict[str, list[str]] = {
    "1,024 paired subjects": [],
    "learn with the first layer": [CALLBACK, "--trainer.callbacks.layer=in"],
    "learn with the second layer": [CALLBACK, "--trainer.callbacks.layer=out"],
    "128 paired subjects": size(20, 128),
    "80 labels": size(80, 1024),
}


class LearnWith(L.Callback):
    """Train only one layer in the phase of the new subjects."""

    def __init__(self, layer: str) -> None:
        self.layer = layer

    def on_train_batch_start(
        self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int
    ) -> None:
        """Freeze the other layer at the beginning of the phase."""
        if batch.begins and batch.phase == "learn":
            for name, parameter in pl_module.networks.named_parameters():
                parameter.requires_grad_(name.endswith(f"_{self.layer}"))


def ablate(lm: str, seeds: list[int], options: list[str]) -> dict[str, Any]:
    """Run the ablation and return what is generalized under both mappings."""
    with tempfile.TemporaryDirectory() as folder:
        results = results_of(
            "fit", "--config", "configs/vocabulary_ablation.yaml",
            f"--model.lm.name_or_path={lm}", "--model.lm.dtype=float32",
            f"--model.mapping=[{', '.join(MAPPINGS)}]", f"--model.seeds={seeds}",
            "--model.skip_compose_baseline=false", "--data.seed=100",
            f"--trainer.default_root_dir={folder}", "--matmul_precision=medium", *BASE, *options,
        )  # fmt: skip
    found = {one["mapping"]: one for one in results["mappings"]}
    counts = ("n_source_labels", "n_target_labels", "n_paired")
    return {
        **{key: results[key] for key in counts},
        **{name: {key: found[name][key] for key in SHARES} for name in MAPPINGS},
    }


def row(name: str, found: dict[str, Any]) -> list[str]:
    """Return a row of the table."""
    return [
        name,
        f"{found['n_source_labels']} / {found['n_target_labels']}",
        f"{found['n_paired'] / found['n_source_labels']:.0f}",
        percent(found["permuted"]["source_learned"]),
        *(f"{found[m]['generalized']:.0%} ± {100 * (found[m]['std'] or 0):.0f}" for m in MAPPINGS),
        percent(found["reference"]["random"]),
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
    columns = ("setting", "source / target labels", "paired per label", "new learned", *MAPPINGS,
               "chance")  # fmt: skip
    rows = [row(name, found[name]) for name in VARIANTS if name in found]
    print(f"{Path(lm).name}, {n_seeds} seeds\n\n{markdown_table(columns, rows)}")


if __name__ == "__main__":
    auto_cli(main)
