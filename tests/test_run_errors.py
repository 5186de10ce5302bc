"""Errors of a run that no study foresees: unusable checkpoints, and too little memory."""

import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from lincorr_lightning.cli import main
from lincorr_lightning.errors import CheckpointError, LanguageModelError
from lincorr_lightning.finetune.module import SourceFinetune
from lincorr_lightning.lightning_workarounds import AtomicCheckpointIO
from lincorr_lightning.lm.batching import oom_reason
from lincorr_lightning.pretraining import Pretraining
from tests.small_runs import SMALL_RUNS, make_inputs


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoint of a short pre-training."""
    folder = tmp_path_factory.mktemp("run")
    words = SMALL_RUNS["pretraining"].command(folder, folder, "--trainer.logger=false")
    cli = main(words)
    assert type(cli.trainer.strategy.checkpoint_io) is AtomicCheckpointIO
    return next(folder.rglob("*.ckpt"))


def resume(checkpoint: Path, folder: Path) -> None:
    options = ("--trainer.logger=false", f"--ckpt_path={checkpoint}")
    main(SMALL_RUNS["pretraining"].command(folder, folder, *options))


class Harmful:
    """An object that runs code when it is unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, ("harm",)


def _without(*keys: str) -> Callable[[Path, Path], None]:
    def make(path: Path, whole: Path) -> None:
        content = torch.load(whole, weights_only=True)
        torch.save({key: value for key, value in content.items() if key not in keys}, path)

    return make


DAMAGED: dict[str, Callable[[Path, Path], Any]] = {
    "half": lambda path, whole: path.write_bytes(whole.read_bytes()[:5000]),
    "a pipe": lambda path, _: os.mkfifo(path),
    "nothing": lambda path, _: None,
    "a pickle": lambda path, _: path.write_bytes(pickle.dumps(Harmful())),
    "an object": lambda path, _: torch.save({"state_dict": Harmful()}, path),
    "a state_dict": lambda path, _: torch.save({"state_dict": {}}, path),
    "no optimizer": _without("optimizer_states", "lr_schedulers"),
}


@pytest.mark.parametrize("kind", DAMAGED)
def test_a_file_that_is_no_checkpoint_is_refused(
    kind: str, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "bad.ckpt"
    DAMAGED[kind](path, run)
    with pytest.raises(CheckpointError) as raised:
        resume(path, tmp_path)
    message = str(raised.value)
    assert str(path) in message and "\n" not in message
    assert not Path("harm").exists() and not list(tmp_path.rglob("results.json"))


def test_other_errors_are_not_blamed_on_the_checkpoint(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: Any) -> None:
        raise ValueError("of the user's own")

    monkeypatch.setattr(Pretraining, "on_train_start", fail)
    with pytest.raises(ValueError, match="own"):
        resume(run, tmp_path)


def test_out_of_memory_in_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object, **more: object) -> None:
        raise torch.OutOfMemoryError("no room. Tried to allocate 2 GiB")

    make_inputs(tmp_path)
    monkeypatch.setattr(SourceFinetune, "backward", fail)
    message = r"the memory: no room\. Lower model\.edits_per_step \(it is 2\)"
    with pytest.raises(LanguageModelError, match=message):
        main(SMALL_RUNS["full, joint"].command(tmp_path, tmp_path))
    assert not list(tmp_path.rglob("results.json"))


def test_allocators_without_an_exception_of_their_own() -> None:
    cpu = "[enforce fail at alloc_cpu.cpp:118] . DefaultCPUAllocator: can't allocate memory"
    cublas = "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"
    assert oom_reason(RuntimeError(cpu)) == oom_reason(RuntimeError(cublas))
    assert oom_reason(RuntimeError(cpu))
    assert oom_reason(RuntimeError("shapes differ")) is None


@pytest.mark.parametrize("logger", [[], ["--trainer.logger=false"]], ids=["TensorBoard", "none"])
@pytest.mark.parametrize("error", [MemoryError("of the machine"), KeyboardInterrupt()], ids=repr)
@pytest.mark.parametrize(
    ("hook", "is_kept"),
    [
        ("on_fit_start", False),
        ("on_train_start", False),  # the config has been written, and event files are open
        ("on_train_batch_start", True),
    ],
)
def test_a_run_that_fails_before_its_first_batch_leaves_no_folder(
    hook: str,
    is_kept: bool,
    error: BaseException,
    logger: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (earlier := tmp_path / "pretraining" / "version_0").mkdir(
        parents=True
    )  # empty, but not its own

    def fail(*args: Any) -> None:
        assert list(tmp_path.rglob("config.yaml")) == [earlier.parent / "version_1/config.yaml"]
        raise error

    monkeypatch.setattr(Pretraining, hook, fail, raising=False)
    with pytest.raises((LanguageModelError, SystemExit)):
        main(SMALL_RUNS["pretraining"].command(tmp_path, tmp_path, *logger))
    left = {path.name for path in earlier.parent.iterdir()}
    assert left == {"version_0", *["version_1"] * is_kept}
