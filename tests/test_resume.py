"""Every study that trains, resumed at several steps: bit for bit the uninterrupted run."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from lincorr_lightning.cli import main
from lincorr_lightning.errors import CheckpointError
from tests.toys import NAMES

EDITS = ["--model.learning_rate=0.01", "--model.steps_per_edit=3", "--data.n_edits=5"]
JOINT = [*EDITS, "--model.protocol=joint", "--model.edits_per_step=2", "--trainer.max_epochs=2"]
WORLD = [
    "--data.world.n_people=24", "--data.world.cities_per_country=1", "--data.world.nicknames=false",
    "--data.knowledge=[city, country, color]", "--data.repeats={}", "--data.batch_size=64",
    "--model.size.hidden_size=32", "--model.size.intermediate_size=48", "--model.size.n_heads=2",
    "--trainer.max_epochs=3", "--trainer.check_val_every_n_epoch=1",
]  # fmt: skip
SGD = [
    "--model.knowledge=[city, country]", "--model.require_reference=[]", "--model.solver=sgd",
    "--data.n_subjects=200", "--data.batch_size=40", "--trainer.max_epochs=3",
]  # fmt: skip

# Config, options, and the checkpoints to resume at: those of a step, after validation (v) and at
# the end of an epoch (e).
STUDIES = {
    "independent": ("source_finetune.yaml", EDITS, ["s4", "s6"]),
    "stacked": ("source_finetune_lora.yaml", [*EDITS, "--model.edits_per_step=2"],
                ["s2", "s3", "s9", "e0"]),
    "joint": ("source_finetune.yaml", JOINT, ["s2", "s3", "e0"]),
    "joint LoRA": ("source_finetune_lora.yaml", JOINT, ["s2", "s3", "e0", "s6", "e1"]),
    # Steps 1 to 8 are of the phase uncomposed, 9 to 23 of compose, 24 to 31 of learn.
    "ablation": (
        "vocabulary_ablation.yaml",
        ["--model.mapping=[reference, permuted]", "--data.n_paired=40", "--data.n_new=12",
         "--data.max_source_labels=null", "--model.compose.epochs=3", "--model.score_every=2",
         "--model.compose.batch_size=16", "--model.learn.epochs=4", "--model.learn.batch_size=8"],
        ["s4", "s8", "s12", "s23", "s26", "s31", "e0"],
    ),
    # Blocks of four steps.
    "SAEs": (
        "sparse_autoencoders.yaml",
        ["--data.n_tokens=384", "--data.batch_tokens=32", "--data.block_steps=4",
         "--data.n_held_out=20", "--model.sae.n_features=32", "--model.sae.k=4",
         "--model.layers=[1]", "--model.sae.dead_after_steps=5", "--data.texts={texts}"],
        ["s3", "s4", "s12", "v0", "e0"],
    ),
    "pretraining": ("pretraining.yaml", WORLD, ["s2", "s3", "e1", "s9", "v2", "e2"]),
    "formation": ("formation.yaml", [*WORLD, "--trainer.callbacks.init_args.every_n_steps=2"],
                  ["s1", "s2", "e1", "s6", "v2", "e2"]),
    "probe": ("linear_probe.yaml", SGD, ["e0", "s6", "v1"]),
}  # fmt: skip
OF_A_FOLDER = {"seconds", "settings", "versions", "name_or_path", "model"}


def run(study: str, root: Path, lm: str, *more: str) -> tuple[dict[str, Any], ...]:
    """Return weights, results and tables of a run."""
    config, options, _ = STUDIES[study]
    texts = root.parent / "texts.txt"
    texts.write_text("\n".join(f"{name} lives in the city of Paris" for name in NAMES))
    if "pretraining" not in config and "formation" not in config:
        options = [f"--model.lm.name_or_path={lm}", *options]
    cli = main([
        "fit", "--config", config, *(option.replace("{texts}", str(texts)) for option in options),
        f"--trainer.default_root_dir={root}", "--trainer.enable_progress_bar=false",
        "--trainer.enable_checkpointing=true", "--trainer.logger=false",
        "--trainer.log_every_n_steps=1", *more,
    ])  # fmt: skip
    (path,) = root.rglob("results.json")
    tables = {table.name: table.read_text() for table in root.rglob("tables/*.csv")}
    return cli.model.state_dict(), _comparable(json.loads(path.read_text())), tables


def _comparable(results: Any) -> Any:
    """Results without what differs between two equal runs."""
    if not isinstance(results, dict):
        return results
    return {k: _comparable(value) for k, value in results.items() if k not in OF_A_FOLDER}


def keeping(folder: Path) -> list[str]:
    """Options that keep a checkpoint of every step, validation and epoch."""
    kinds = {
        "s{step}": ["every_n_train_steps=1"],
        "e{epoch}": ["every_n_epochs=1", "save_on_train_epoch_end=true"],
        # With another mode, because Lightning takes no two of the same settings.
        "v{epoch}": ["every_n_epochs=1", "save_on_train_epoch_end=false", "mode=max"],
    }
    common = [f"dirpath={folder}", "auto_insert_metric_name=false", "save_top_k=-1"]
    return [
        option
        for name, own in kinds.items()
        for option in (
            "--trainer.callbacks+=ModelCheckpoint",
            *(f"--trainer.callbacks.{one}" for one in [f"filename={name}", *common, *own]),
        )
    ]


@pytest.mark.slow
@pytest.mark.parametrize(
    "study",
    [
        pytest.param(study, marks=pytest.mark.nightly)
        if study in ("joint LoRA", "formation")
        else study
        for study in STUDIES
    ],
)
def test_a_resumed_run_equals_an_uninterrupted_one(
    study: str, small_lm: str, tmp_path: Path
) -> None:
    kept = tmp_path / "kept"
    weights, results, tables = run(study, tmp_path / "whole", small_lm, *keeping(kept))
    for name in STUDIES[study][2]:
        ours = run(study, tmp_path / name, small_lm, f"--ckpt_path={kept / name}.ckpt")
        assert weights.keys() == ours[0].keys()
        assert not [k for k in weights if not torch.equal(weights[k], ours[0][k])], name
        assert ours[1:] == (results, tables), name


def test_a_probe_is_not_resumed_without_its_statistics(small_lm: str, tmp_path: Path) -> None:
    run("probe", tmp_path / "whole", small_lm, *keeping(tmp_path))
    for name, message in (("s4", "middle of an epoch"), ("e2", "has all 3 epochs")):
        with pytest.raises(CheckpointError, match=rf"{name}\.ckpt: the checkpoint .*{message}"):
            run("probe", tmp_path / name, small_lm, f"--ckpt_path={tmp_path / name}.ckpt")
