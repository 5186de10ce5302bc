"""Peak memory of each study, and of a probe by its number of subjects, on the tiny world.

    python -m benchmarks.speed.memory
    python -m benchmarks.speed.memory --n_subjects "[10000, 100000]"

runs `lincorr` on each config in a process of its own, as it ships; trainings of many minutes
(see `CUT`) are cut short, which does not change their peak. Most of the memory of a small study is
the libraries': the first row is a process that only imports them. With numbers of subjects, it runs
a probe of city and country with each of them instead.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Mapping, Sequence

from jsonargparse import auto_cli

from benchmarks.common import QUIET, ROOT, cost_of, markdown_table
from lincorr_lightning.results.saved_run import config_verb

STUDIES = (
    "linear_probe", "correlation_matrix", "resilience", "source_finetune", "source_finetune_lora",
    "forecast", "vocabulary_ablation", "token_geometry", "knowledge_geometry", "pretraining",
    "formation", "sparse_autoencoders", "feature_flow",
)  # fmt: skip
CUT = {
    "pretraining": ("--trainer.max_steps=100", "--trainer.limit_val_batches=2"),
    "formation": ("--trainer.max_epochs=2", "--trainer.check_val_every_n_epoch=2"),
}
PROBE = (
    "fit", "--config=linear_probe.yaml", "--model.knowledge=[city, country]",
    "--model.require_reference=[]", "--data.words_per_subject=2",
)  # fmt: skip


def main(
    studies: tuple[str, ...] = STUDIES,
    n_subjects: tuple[int, ...] = (),
    options: tuple[str, ...] = (),
) -> None:
    """Print the table.

    Args:
        studies: Names of configs.
        n_subjects: Numbers of subjects of the probe; none measures the studies.
        options: Options added to each command, such as --trainer.max_steps=10.
    """
    commands: Mapping[str, Sequence[str]] = {
        f"{n:,} subjects": (*PROBE, f"--data.n_subjects={n}") for n in n_subjects
    } or {
        f"{study} (cut short)" if study in CUT else study: (
            config_verb((ROOT / "configs" / f"{study}.yaml").read_text(encoding="utf-8")),
            f"--config={study}.yaml", *CUT.get(study, ()),
        )
        for study in studies
    }  # fmt: skip
    libraries = cost_of([sys.executable, "-c", "import lincorr_lightning.lightning_cli"])
    rows = [["(libraries alone)", f"{libraries.peak_mib:.0f} MiB", f"{libraries.wall:.0f}"]]
    for name, command in commands.items():
        with tempfile.TemporaryDirectory() as folder:
            lincorr = [sys.executable, "-m", "lincorr_lightning", *command, QUIET]
            cost = cost_of([*lincorr, f"--trainer.default_root_dir={folder}", *options])
        rows.append([name, f"{cost.peak_mib:.0f} MiB", f"{cost.wall:.0f}"])
    print(markdown_table(("study", "peak memory", "seconds"), rows))


if __name__ == "__main__":
    auto_cli(main)
