"""Every study that trains, resumed at several steps: bit for bit the uninterrupted run."""

import inspect
import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from lincorr_lightning.cli import main
from lincorr_lightning.data.subjects import SubjectsDataModule
from lincorr_lightning.errors import CheckpointError, SubjectsError
from lincorr_lightning.lm.config import LMConfig
from lincorr_lightning.probe.module import LinearProbe
from tests.toys import NAMES, quiet_trainer

EDITS = ["--model.learning_rate=0.01", "--model.steps_per_edit=3", "--data.n_edits=5"]
JOINT = [*EDITS, "--model.protocol=joint", "--model.edits_per_step=2", "--trainer.max_epochs=2"]
WORLD = [
    "--data.world.n_people=24",
    "--data.world.cities_per_country=1",
    "--data.world.nicknames=false",
    "--data.knowledge=[city, country, color]",
    "--data.repeats={}",
    "--data.batch_size=64",
    "--model.size.hidden_size=32",
    "--model.size.intermediate_size=48",
    "--model.size.n_heads=2",
    "--trainer.max_epochs=3",
    "--trainer.check_val_every_n_epoch=1",
]
SGD = [
    "--model.knowledge=[city, country]",
    "--model.require_reference=[]",
    "--model.solver=sgd",
    "--data.n_subjects=200",
    "--data.batch_size=40",
    "--trainer.max_epochs=3",
    "--model.ridge=0",
]

# Config, options, and the checkpoints to resume at: those of a step, after validation (v) and at
# the end of an epoch (e).
STUDIES = {
    "independent": ("source_finetune.yaml", EDITS, ["s4", "s6"]),
    "stacked": (
        "source_finetune_lora.yaml",
        [*EDITS, "--model.edits_per_step=2"],
        ["s2", "s3", "s9", "e0"],
    ),
    "interventions": (
        "causal.yaml",
        [
            *EDITS,
            "--model.edits_per_step=2",
            "--model.learning_rate=0.1",
            "--model.steps_per_edit=5",
        ],
        ["s2", "s7", "e0"],
    ),
    "joint": ("source_finetune.yaml", JOINT, ["s2", "s3", "e0"]),
    "joint LoRA": ("source_finetune_lora.yaml", JOINT, ["s2", "s3", "e0", "s6", "e1"]),
    # Steps 1 to 8 are of the phase uncomposed, 9 to 23 of compose, 24 to 31 of learn.
    "ablation": (
        "vocabulary_ablation.yaml",
        [
            "--model.mapping=[reference, permuted]",
            "--data.n_paired=40",
            "--data.n_new=12",
            "--data.max_source_labels=null",
            "--model.compose.epochs=3",
            "--model.score_every=2",
            "--model.compose.batch_size=16",
            "--model.learn.epochs=4",
            "--model.learn.batch_size=8",
        ],
        ["s4", "s8", "s12", "s23", "s26", "s31", "e0"],
    ),
    # Blocks of four steps.
    "SAEs": (
        "sparse_autoencoders.yaml",
        [
            "--data.n_tokens=384",
            "--data.batch_tokens=32",
            "--data.block_steps=4",
            "--data.n_held_out=20",
            "--model.sae.n_features=32",
            "--model.sae.k=4",
            "--model.layers=[1]",
            "--model.sae.dead_after_steps=5",
            "--data.texts={texts}",
        ],
        ["s3", "s4", "s12", "v0", "e0"],
    ),
    "pretraining": ("pretraining.yaml", WORLD, ["s2", "s3", "e1", "s9", "v2", "e2"]),
    "probe": ("linear_probe.yaml", SGD, ["e0", "s6", "v1"]),
}
OF_A_FOLDER = {"seconds", "settings", "versions", "name_or_path", "model"}


def run(study: str, root: Path, lm: str, *more: str) -> tuple[dict[str, Any], ...]:
    """Return weights, results and tables of a run."""
    config, options, _ = STUDIES[study]
    texts = root.parent / "texts.txt"
    texts.write_text("\n".join(f"{name} lives in the city of Paris" for name in NAMES))
    if "pretraining" not in config:
        options = [f"--model.lm.name_or_path={lm}", *options]
    cli = main(
        [
            "fit",
            "--config",
            config,
            *(option.replace("{texts}", str(texts)) for option in options),
            f"--trainer.default_root_dir={root}",
            "--trainer.enable_progress_bar=false",
            "--trainer.enable_checkpointing=true",
            "--trainer.logger=false",
            "--trainer.log_every_n_steps=1",
            *more,
        ]
    )
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
        pytest.param(study, marks=pytest.mark.nightly) if study == "joint LoRA" else study
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


# -- other settings ------------------------------------------------------------------------------

# Options of studies and data that a resumed run may change: outputs, what makes batches of the same
# rows, and files, whose content is compared. An LM is known by its fingerprint, and the rest of the
# arguments are what the program passes.
FREE = {
    "model.lm",
    "model.save_model",
    "model.saes",
    "data.lm",
    "data.plan",
    "data.training",
    "data.training_tokens",
    "data.edits_file",
    "data.subjects_file",
    "data.texts_file",
    "data.texts",
    "data.knowledge_files",
    "data.eval_batch_size",
}
# These are counted over all ranks; the data of edits has another batch size, of predictions.
OF_ALL_RANKS = {
    "joint": ["model.edits_per_step"],
    "pretraining": ["data.batch_size"],
    "independent": ["model.edits_per_step"],
}
# A checkpoint of each, options that it must not be resumed with, and the old and the new value.
OTHER: dict[str, tuple[str, dict[str, tuple[str, str]]]] = {
    "joint": (
        "e0",
        {
            "model.learning_rate=0.02": ("0.01", "0.02"),
            "model.weight_decay=0.1": ("0.0", "0.1"),
            "model.edits_per_step=5": ("2", "5"),
            "data.seed=1": ("0", "1"),
            "data.n_edits=4": ("5", "4"),
            "trainer.gradient_clip_val=0.5": ("None", "0.5"),
            "trainer.precision=bf16-mixed": ("32-true", "bf16-mixed"),
            "trainer.accumulate_grad_batches=3": ("1", "3"),
            "trainer.limit_train_batches=1": ("1.0", "1"),
            "trainer.max_epochs=1": ("2", "1"),
            "matmul_precision=medium": ("highest", "medium"),
            "seed_everything=7": ("0", "7"),
        },
    ),
    "pretraining": (
        "e1",
        {
            "model.size.n_heads=4": ("'n_heads': 2", "'n_heads': 4"),
            "model.learning_rate=0.001": ("0.003", "0.001"),
            "model.weight_decay=0.1": ("0.3", "0.1"),
            "model.warmup=0.3": ("0.1", "0.3"),
            "model.mixing_epochs=1": ("0", "1"),
            "model.mixing_learning_rate=0.1": ("0.001", "0.1"),
            "model.off_target_penalty=0.0": ("0.1", "0.0"),
            "data.seed=1": ("0", "1"),
            "data.batch_size=32": ("64", "32"),
            "data.mixup_fraction=0.1": ("0.0", "0.1"),
            "data.world.n_people=25": ("'n_people': 24", "'n_people': 25"),
        },
    ),
    "probe": (
        "e0",
        {
            "data.seed=1": ("0", "1"),
            "data.n_subjects=180": ("200", "180"),
            "data.batch_size=50": ("40", "50"),
            "model.learning_rate=0.1": ("0.5", "0.1"),
            "model.momentum=0.5": ("0.9", "0.5"),
            "model.ridge=2.0": ("0.0", "2.0"),
            "trainer.limit_train_batches=2": ("1.0", "2"),
        },
    ),
}
ALWAYS = ("model.learning_rate=0.02", "model.size.n_heads=4", "data.n_subjects=180")


@pytest.fixture(scope="module")
def kept(small_lm: str, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return the checkpoints of a study's run."""

    @cache
    def make(study: str) -> Path:
        folder = tmp_path_factory.mktemp("kept")
        run(study, folder / "whole", small_lm, *keeping(folder))
        return folder

    return make


@pytest.mark.slow
@pytest.mark.parametrize(
    ("study", "option"),
    [
        pytest.param(study, option, marks=() if option in ALWAYS else pytest.mark.nightly)
        for study, (_, options) in OTHER.items()
        for option in options
    ],
)
def test_a_run_of_other_settings_is_not_resumed(
    study: str, option: str, kept: Callable[[str], Path], small_lm: str, tmp_path: Path
) -> None:
    name, options = OTHER[study]
    key, (then, now) = option.partition("=")[0], options[option]
    key = key if key.count(".") < 2 else key.rpartition(".")[0]
    path = kept(study) / f"{name}.ckpt"
    with pytest.raises(CheckpointError) as raised:
        run(study, tmp_path / "again", small_lm, f"--ckpt_path={path}", f"--{option}")
    before, _, after = str(raised.value).partition(", this run has ")
    assert str(path) in before and f" written with {key}" in before and then in before
    assert now in after and "\n" not in after
    assert not list(tmp_path.rglob("results.json"))


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.parametrize("study", STUDIES)
def test_every_option_is_compared(study: str, kept: Callable[[str], Path]) -> None:
    path = next(kept(study).glob("*.ckpt"))
    checkpoint = torch.load(path, weights_only=True)
    classes = {
        "model": checkpoint["hyper_parameters"]["_class_path"],
        "data": checkpoint["datamodule_hyper_parameters"]["_class_path"],
    }
    wanted = {
        f"{owner}.{name}"
        for owner, path in classes.items()
        for name in inspect.signature(_class(path)).parameters
    }
    data = next(value for key, value in checkpoint.items() if key.endswith("DataModule"))
    compared = {*checkpoint["study"]["settings"], *data["determined_by"]}
    named = {key.partition(" ")[0] for key in compared}
    of_files = {"data.batch_size", "data.edits_of_lm"}  # the LM's folder, of which edits are kept
    unused = of_files if "Edits" in classes["data"] else set()
    assert wanted - named <= FREE | unused
    assert {key for key in compared if "of all ranks" in key} == {
        f"{key} of all ranks" for key in OF_ALL_RANKS.get(study, [])
    } or study not in OF_ALL_RANKS


def _class(path: str) -> Any:
    from pkgutil import resolve_name

    return resolve_name(path)


def test_a_probe_is_not_scored_on_what_it_was_trained_on(small_lm: str, tmp_path: Path) -> None:
    """Also if the subjects come from a DataLoader, of which a checkpoint knows nothing."""

    def fit(seed: int, n_epochs: int, ckpt_path: Path | None = None) -> Any:
        probe = LinearProbe(LMConfig(small_lm), solver="sgd", ridge=0.0, random_labels=0)
        data = SubjectsDataModule(probe.lm, n_subjects=80, batch_size=20, seed=seed)
        data.setup("fit")
        trainer = quiet_trainer(tmp_path, max_epochs=n_epochs)
        loaders = [
            DataLoader(data._batches(half), batch_size=None)  # type: ignore[arg-type]
            for half in ("fit", "test")
        ]
        trainer.fit(probe, *loaders, ckpt_path=ckpt_path)
        return trainer, probe, data

    trainer, probe, data = fit(0, 1)
    trainer.save_checkpoint(path := tmp_path / "end.ckpt")
    assert probe.fit_subjects == data.halves["fit"]
    _, again, _ = fit(0, 2, path)
    assert again.fit_subjects == data.halves["fit"]
    with pytest.raises(SubjectsError, match=r"held-out subjects, such as .* were fitted on"):
        fit(1, 2, path)
