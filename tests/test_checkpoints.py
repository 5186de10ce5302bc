"""Unusable checkpoints are refused in one line."""

import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from lincorr_lightning.cli import main
from lincorr_lightning.cli.checkpoints import check_checkpoint
from lincorr_lightning.errors import CheckpointError
from lincorr_lightning.lightning_workarounds import AtomicCheckpointIO
from lincorr_lightning.pretraining import Pretraining

OPTIONS = [
    "--config",
    "pretraining.yaml",
    "--data.world.n_people=24",
    "--data.world.nicknames=false",
    "--data.world.cities_per_country=1",
    "--data.knowledge=[city]",
    "--data.repeats={}",
    "--model.size.hidden_size=16",
    "--model.size.intermediate_size=24",
    "--model.size.n_heads=2",
    "--trainer.check_val_every_n_epoch=1",
    "--trainer.logger=false",
    "--trainer.max_epochs=3",
    "--trainer.enable_progress_bar=false",
]


def checkpoint_of() -> dict[str, Any]:
    """The keys that every checkpoint of a run has."""
    return {"state_dict": {}, "pytorch-lightning_version": "2.6.0"}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoint of a short pre-training."""
    folder = tmp_path_factory.mktemp("run")
    cli = main(["fit", *OPTIONS, f"--trainer.default_root_dir={folder}"])
    assert type(cli.trainer.strategy.checkpoint_io) is AtomicCheckpointIO
    (path,) = folder.rglob("*.ckpt")
    return path


def _cut(n: int) -> Callable[[Path, Path], None]:
    return lambda path, whole: (path.write_bytes(whole.read_bytes()[:n]), None)[1]


def _saved(content: Any) -> Callable[[Path, Path], None]:
    return lambda path, _: torch.save(content, path)


class Harmful:
    """An object that runs code when it is unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, ("harm",)


DAMAGED: dict[str, tuple[Callable[[Path, Path], Any], str]] = {
    "half": (_cut(5000), "damaged, truncated or not a checkpoint"),
    "all but a few bytes": (_cut(-5), "damaged, truncated or not a checkpoint"),
    "a pipe": (lambda path, _: os.mkfifo(path), "it is a FIFO"),
    "nothing": (lambda path, _: None, "No such file"),
    "a pickle": (lambda path, _: path.write_bytes(pickle.dumps(Harmful())), "damaged, truncated"),
    "an object": (_saved(checkpoint_of() | {"x": Harmful()}), "other objects than tensors"),
    "a list": (_saved([1, 2]), "is not the checkpoint of a run"),
    "a state_dict": (_saved({"state_dict": {}}), "is not the checkpoint of a run"),
}


@pytest.mark.parametrize("kind", DAMAGED)
def test_a_file_that_is_no_checkpoint_is_refused(
    kind: str, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    make, message = DAMAGED[kind]
    path = tmp_path / "bad.ckpt"
    make(path, run)
    with pytest.raises(CheckpointError, match=message) as error:
        check_checkpoint(str(path))
    text = str(error.value)
    assert str(path) in text and "weights_only" not in text and "\n" not in text
    assert not Path("harm").exists()


def test_a_path_that_is_too_long_is_refused() -> None:
    with pytest.raises(
        CheckpointError, match=r"cannot read the checkpoint x.*: File name too long"
    ):
        check_checkpoint("x" * 3000)


def test_special_paths_and_folders_of_shards_are_left_to_lightning(tmp_path: Path) -> None:
    (tmp_path / "meta.pt").touch()
    for path in ("last", "registry:name", "s3://bucket/last.ckpt", tmp_path):
        check_checkpoint(path)


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("--model.size.n_layers=2", "the checkpoint was written with model.size "),
        ("--trainer.max_epochs=1", r"trainer\.max_epochs 3, this run has 1"),
        ("--model.size.intermediate_size=32", r"the run cannot go on: .* size mismatch for lm"),
    ],
)
def test_a_checkpoint_of_other_settings_is_refused(
    option: str, message: str, run: Path, tmp_path: Path
) -> None:
    path = tmp_path / "other.ckpt"
    checkpoint = torch.load(run, weights_only=True)
    if "size mismatch" in message:  # which the settings would tell otherwise
        del checkpoint["study"]["settings"]["model.size"]
    torch.save(checkpoint, path)
    with pytest.raises(CheckpointError, match=message) as raised:
        resume(path, tmp_path, option)
    assert str(path) in str(raised.value) and "\n" not in str(raised.value)
    assert not list(tmp_path.rglob("results.json"))


def resume(checkpoint: Path, folder: Path, *options: str) -> None:
    root = f"--trainer.default_root_dir={folder}"
    main(["fit", *OPTIONS, root, f"--ckpt_path={checkpoint}", *options])


def test_weights_alone_are_not_resumed(run: Path, tmp_path: Path) -> None:
    checkpoint = torch.load(run, weights_only=True)
    for key in ("optimizer_states", "lr_schedulers"):
        del checkpoint[key]
    path = tmp_path / "weights.ckpt"
    torch.save(checkpoint, path)
    with pytest.raises(CheckpointError, match="checkpoint contains only the model"):
        resume(path, tmp_path)


def test_other_errors_are_not_blamed_on_the_checkpoint(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: Any) -> None:
        raise ValueError("of the user's own")

    monkeypatch.setattr(Pretraining, "on_train_start", fail)
    with pytest.raises(ValueError, match="own"):
        resume(run, tmp_path)
