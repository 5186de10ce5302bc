"""Checkpoints are written completely or not at all; unusable ones are refused in one line."""

import os
import pickle
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO

from lincorr_lightning.checkpoints import AtomicCheckpointIO, check_checkpoint
from lincorr_lightning.cli import main
from lincorr_lightning.errors import CheckpointError, ConfigError, OutputError
from lincorr_lightning.lightning_cli import LincorrCLI
from tests.toys import quiet_trainer

OPTIONS = [
    "--config", "pretraining.yaml", "--data.world.n_people=24", "--data.world.nicknames=false",
    "--data.world.cities_per_country=1", "--data.knowledge=[city]", "--data.repeats={}",
    "--model.size.hidden_size=16", "--model.size.intermediate_size=24", "--model.size.n_heads=2",
    "--trainer.check_val_every_n_epoch=1", "--trainer.logger=false", "--trainer.max_epochs=3",
    "--trainer.enable_progress_bar=false",
]  # fmt: skip
SETTINGS = {"size", "learning_rate"}


def checkpoint_of(hyper_parameters: Any = None) -> dict[str, Any]:
    """The keys that every checkpoint of a run has."""
    kept = {} if hyper_parameters is None else {"hyper_parameters": hyper_parameters}
    return {"state_dict": {}, "pytorch-lightning_version": "2.6.0", **kept}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoint of a short pre-training."""
    folder = tmp_path_factory.mktemp("run")
    cli = main(["fit", *OPTIONS, f"--trainer.default_root_dir={folder}"])
    assert type(cli.trainer.strategy.checkpoint_io) is AtomicCheckpointIO
    (path,) = folder.rglob("*.ckpt")
    return path


# -- writing -----------------------------------------------------------------------------------


@pytest.fixture
def written(tmp_path: Path) -> Path:
    """An earlier checkpoint."""
    AtomicCheckpointIO().save_checkpoint(checkpoint_of() | {"step": 1}, tmp_path / "last.ckpt")
    return tmp_path / "last.ckpt"


def assert_unharmed(path: Path) -> None:
    assert [file.name for file in path.parent.iterdir()] == [path.name]
    assert AtomicCheckpointIO().load_checkpoint(path)["step"] == 1


def test_an_interrupted_write_leaves_the_earlier_checkpoint(
    written: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(obj: Any, file: Any) -> None:
        del obj
        file.write(b"half")
        raise KeyboardInterrupt

    monkeypatch.setattr(torch, "save", interrupted)
    with pytest.raises(KeyboardInterrupt):
        AtomicCheckpointIO().save_checkpoint(checkpoint_of() | {"step": 2}, written)
    assert_unharmed(written)


def test_a_full_disk_leaves_the_earlier_checkpoint(written: Path) -> None:
    """A limit of the file's size stands for the disk; torch hides the error that it gives."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, limits[1]))
    try:
        with pytest.raises(OutputError, match=r"cannot write .*last\.ckpt: File too large"):
            AtomicCheckpointIO().save_checkpoint({"weight": torch.zeros(100_000)}, written)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert_unharmed(written)


def test_a_checkpoint_io_of_the_user_is_kept(tmp_path: Path) -> None:
    from lincorr_lightning.checkpoints import set_up_checkpoints

    class Own(TorchCheckpointIO):
        pass

    trainer = quiet_trainer(tmp_path, plugins=[Own()])
    set_up_checkpoints(trainer)
    assert type(trainer.strategy.checkpoint_io) is Own


# -- reading -----------------------------------------------------------------------------------


def _cut(n: int) -> Callable[[Path, Path], None]:
    return lambda path, whole: (path.write_bytes(whole.read_bytes()[:n]), None)[1]


def _saved(content: Any) -> Callable[[Path, Path], None]:
    return lambda path, _: torch.save(content, path)


class Harmful:
    """An object that runs code when it is unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, ("harm",)


DAMAGED: dict[str, tuple[Callable[[Path, Path], Any], str]] = {
    "empty": (_cut(0), "damaged, truncated or not a checkpoint"),
    "half": (_cut(5000), "damaged, truncated or not a checkpoint"),
    "all but a few bytes": (_cut(-5), "damaged, truncated or not a checkpoint"),
    "a text": (lambda path, _: path.write_text("state_dict: 1"), "damaged, truncated or"),
    "a folder": (lambda path, _: path.mkdir(), "is not a file"),
    "a pipe": (lambda path, _: os.mkfifo(path), "is not a file"),
    "nothing": (lambda path, _: None, "does not exist"),
    "a pickle": (lambda path, _: path.write_bytes(pickle.dumps(Harmful())), "damaged, truncated"),
    "an object": (_saved(Harmful()), "other objects than tensors and plain data"),
    "an object inside": (_saved(checkpoint_of() | {"x": Harmful()}), "other objects than tensors"),
    "a list": (_saved([1, 2]), "it has no state_dict"),
    "a tensor": (_saved(torch.zeros(3)), "it has no state_dict"),
    "weights": (_saved({"weight": torch.zeros(3)}), "it has no state_dict"),
    "a state_dict": (_saved({"state_dict": {}}), "it has no pytorch-lightning_version"),
    "another class": (
        _saved(checkpoint_of({"_class_path": "lincorr_lightning.probe.LinearProbe"})),
        "is of LinearProbe, not of Pretraining",
    ),
    "other settings' names": (_saved(checkpoint_of({"mapping": []})), "is not one of Pretraining"),
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
        check_checkpoint(str(path), "Pretraining", SETTINGS)
    text = str(error.value)
    assert str(path) in text and "weights_only" not in text and "\n" not in text
    assert not Path("harm").exists()


@pytest.mark.parametrize("kind", ["half", "an object", "a list"])
def test_what_lightning_finds_itself_is_refused_too(kind: str, run: Path, tmp_path: Path) -> None:
    """As the newest checkpoint of ``--ckpt_path last``."""
    make, message = DAMAGED[kind]
    path = tmp_path / "last.ckpt"
    make(path, run)
    with pytest.raises(CheckpointError, match=message) as error:
        AtomicCheckpointIO().load_checkpoint(path)
    assert str(path) in str(error.value) and "weights_only" not in str(error.value)
    assert not Path("harm").exists()


def test_out_of_memory_is_not_reported_as_damage(
    written: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: Any, **more: Any) -> None:
        raise MemoryError

    monkeypatch.setattr(torch, "load", fail)
    with pytest.raises(MemoryError):
        AtomicCheckpointIO().load_checkpoint(written)


@pytest.mark.parametrize(
    "path",
    [
        "best",
        "last",
        "hpc",
        "registry",
        "registry:name",
        "s3://bucket/last.ckpt",
        "https://host/x.ckpt",
    ],
)
def test_special_paths_are_left_to_lightning(path: str) -> None:
    check_checkpoint(path, "Pretraining", SETTINGS)


def test_a_folder_of_shards_is_left_to_lightning(tmp_path: Path) -> None:
    (tmp_path / "meta.pt").touch()
    check_checkpoint(tmp_path, "Pretraining", SETTINGS)


@pytest.mark.parametrize("command", ["fit", "validate", "test", "predict"])
def test_every_command_checks_before_anything_is_loaded(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LincorrCLI, "instantiate_classes", lambda self: pytest.fail("too late"))
    path = tmp_path / "bad.ckpt"
    torch.save([1], path)
    with pytest.raises(CheckpointError, match=r"bad\.ckpt is not the checkpoint of a run"):
        main([command, "--config", "linear_probe.yaml", f"--ckpt_path={path}"])


@pytest.mark.parametrize(
    ("option", "error", "message"),
    [
        ("--model.size.intermediate_size=32", CheckpointError,
         r"does not fit Pretraining .*: lm\.model\.\S+ has the shape \[24, 16\], that of this run "
         r"\[32, 16\]\. Use the settings"),
        ("--model.size.n_layers=2", CheckpointError, "it has other tensors"),
        ("--model.size.hidden_size=32", ConfigError, "the checkpoint's embedding is"),
        ("--trainer.max_epochs=1", CheckpointError, "restored a checkpoint with current_epoch=2"),
    ],
)  # fmt: skip
def test_a_checkpoint_of_other_settings_is_refused(
    option: str, error: type[Exception], message: str, run: Path, tmp_path: Path
) -> None:
    with pytest.raises(error, match=message) as raised:
        main(
            [
                "fit",
                *OPTIONS,
                f"--trainer.default_root_dir={tmp_path}",
                f"--ckpt_path={run}",
                option,
            ]
        )
    assert str(run) in str(raised.value) and "\n" not in str(raised.value)
    assert not list(tmp_path.rglob("results.json"))


def test_weights_alone_are_not_resumed(run: Path, tmp_path: Path) -> None:
    checkpoint = torch.load(run, weights_only=True)
    for key in ("optimizer_states", "lr_schedulers"):
        del checkpoint[key]
    path = tmp_path / "weights.ckpt"
    torch.save(checkpoint, path)
    with pytest.raises(CheckpointError, match="checkpoint contains only the model"):
        main(["fit", *OPTIONS, f"--trainer.default_root_dir={tmp_path}", f"--ckpt_path={path}",
              "--trainer.max_epochs=3"])  # fmt: skip


def test_other_errors_are_not_blamed_on_the_checkpoint(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from lincorr_lightning.pretraining import Pretraining

    def fail(self: Any) -> None:
        raise ValueError("of the user's own")

    monkeypatch.setattr(Pretraining, "on_train_start", fail)
    with pytest.raises(ValueError, match="own"):
        main(["fit", *OPTIONS, f"--trainer.default_root_dir={tmp_path}", f"--ckpt_path={run}",
              "--trainer.max_epochs=3"])  # fmt: skip
