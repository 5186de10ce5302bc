"""Each workaround does what Lightning does not; once Lightning does it, its test here fails."""

import enum
import multiprocessing
import resource
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import yaml
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.strategies import SingleDeviceStrategy
from lightning.pytorch.utilities import rank_zero_only

from lincorr_lightning.errors import OutputError
from lincorr_lightning.lightning_workarounds import (
    AtomicCheckpointIO,
    RunLogger,
    after_signal_handlers,
    after_train_end,
    replace_fit_loop,
    settle_processes,
    write_configs_as_they_are_read,
)
from tests.toys import quiet_trainer

# -- checkpoints -------------------------------------------------------------------------------


def test_lightning_writes_a_checkpoint_elsewhere_and_moves_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    moved: list[Path] = []
    move = shutil.move

    def note(source: str, target: str) -> None:
        moved.append(Path(source))
        move(source, target)

    monkeypatch.setattr(shutil, "move", note)
    TorchCheckpointIO().save_checkpoint({}, tmp_path / "last.ckpt")
    assert [path.parent == tmp_path for path in moved] == [False]


def test_a_full_disk_leaves_the_earlier_checkpoint(tmp_path: Path) -> None:
    """A limit of the file's size stands for a full disk; torch hides the error that it gives."""
    path, writer = tmp_path / "last.ckpt", AtomicCheckpointIO()
    writer.save_checkpoint({"step": 1}, path)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, limits[1]))
    try:
        with pytest.raises(OutputError, match=f"cannot write {path}: File too large"):
            writer.save_checkpoint({"weight": torch.zeros(100_000)}, path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert [file.name for file in tmp_path.iterdir()] == ["last.ckpt"]
    assert writer.load_checkpoint(path)["step"] == 1


def test_a_checkpoint_io_of_the_user_is_kept(tmp_path: Path) -> None:
    class Own(TorchCheckpointIO):
        pass

    trainer = quiet_trainer(tmp_path, plugins=[Own()])
    replace_fit_loop(trainer)
    assert type(trainer.strategy.checkpoint_io) is Own


# -- resuming ----------------------------------------------------------------------------------


class Hooks(L.Callback):
    """Saves a checkpoint in one of the hooks at the end of an epoch, and counts some hooks."""

    def __init__(self, path: Path, saves_in: str) -> None:
        self.path = path
        self.saves_in = saves_in
        self.called: list[str] = []

    def save(self, trainer: L.Trainer, hook: str) -> None:
        if hook == self.saves_in and trainer.is_last_batch and not self.path.exists():
            trainer.save_checkpoint(self.path)

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        self.save(trainer, "on_train_batch_end")

    def on_train_epoch_end(self, trainer: L.Trainer, *_: Any) -> None:
        self.save(trainer, "on_train_epoch_end")

    def on_validation_epoch_end(self, *_: Any) -> None:
        self.called.append("validation")

    def on_train_end(self, *_: Any) -> None:
        self.called.append("train end")


@pytest.mark.parametrize(
    ("saves_in", "by_lightning", "by_ours"),
    [
        ("on_train_batch_end", ["train end"], ["validation", "train end"]),
        ("on_train_epoch_end", [], ["validation", "train end"]),
    ],
)
def test_a_run_resumed_after_its_last_step_is_finished(
    saves_in: str, by_lightning: list[str], by_ours: list[str], tmp_path: Path
) -> None:
    path = tmp_path / "last.ckpt"

    def fit(resumes: bool, replaces: bool = False) -> list[str]:
        hooks = Hooks(path, saves_in)
        options = {"limit_train_batches": 2, "limit_val_batches": 1, "num_sanity_val_steps": 0}
        trainer = quiet_trainer(tmp_path, callbacks=[hooks], max_epochs=1, **options)
        if replaces:
            replace_fit_loop(trainer)
        trainer.fit(BoringModel(), ckpt_path=path if resumes else None)
        return hooks.called

    assert fit(resumes=False) == ["validation", "train end"]
    assert fit(resumes=True) == by_lightning
    assert fit(resumes=True, replaces=True) == by_ours


# -- signals and hooks -------------------------------------------------------------------------


@pytest.mark.parametrize("installs", [False, True])
def test_a_trainer_replaces_signal_handlers(installs: bool, tmp_path: Path) -> None:
    def handle(signum: int, frame: Any) -> None:
        del signum, frame

    def install() -> None:
        signal.signal(signal.SIGTERM, handle)

    seen: list[Any] = []

    class Look(L.Callback):
        def on_train_start(self, *_: Any) -> None:
            seen.append(signal.getsignal(signal.SIGTERM))

    before = signal.getsignal(signal.SIGTERM)
    trainer = quiet_trainer(tmp_path, callbacks=[Look()], max_steps=1)
    try:
        install()
        if installs:
            after_signal_handlers(trainer, install)
        trainer.fit(BoringModel())
    finally:
        signal.signal(signal.SIGTERM, before)
    assert [handler is handle for handler in seen] == [installs]


def test_there_is_no_hook_between_the_last_train_end_and_the_move_to_the_cpu(
    tmp_path: Path,
) -> None:
    order: list[str] = []

    class Device(SingleDeviceStrategy):
        def teardown(self) -> None:
            order.append("moved to the CPU")
            super().teardown()

    class Later(L.Callback):
        def on_train_end(self, *_: Any) -> None:
            order.append("train end")

        def on_fit_end(self, *_: Any) -> None:
            order.append("fit end")

    trainer = quiet_trainer(tmp_path, strategy=Device(), callbacks=[Later()], max_steps=1)
    after_train_end(trainer, lambda: order.append("called"))
    trainer.fit(BoringModel())
    assert order == ["train end", "called", "moved to the CPU", "fit end"]


# -- loggers -----------------------------------------------------------------------------------


def claim(make: Callable[..., TensorBoardLogger], root: Path, start: Any, found: Any) -> None:
    logger = make(root, name="study")
    start.wait()
    found.put(logger.log_dir)


@pytest.mark.parametrize(("make", "n_folders"), [(TensorBoardLogger, 1), (RunLogger, 4)])
def test_runs_that_start_together_share_no_folder(
    make: Callable[..., TensorBoardLogger], n_folders: int, tmp_path: Path
) -> None:
    context = multiprocessing.get_context("fork")
    start, found = context.Barrier(4), context.Queue()
    processes = [
        context.Process(target=claim, args=(make, tmp_path, start, found)) for _ in range(4)
    ]
    for process in processes:
        process.start()
    folders = {found.get(timeout=60) for _ in processes}
    for process in processes:
        process.join()
    assert folders == {str(tmp_path / "study" / f"version_{i}") for i in range(n_folders)}


# -- configs -----------------------------------------------------------------------------------


def test_a_trainer_leaves_the_rank_that_variables_gave(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rank_zero_only, "rank", 1)  # as with LOCAL_RANK=1
    trainer = quiet_trainer(tmp_path)
    assert trainer.is_global_zero and rank_zero_only.rank == 1
    settle_processes(trainer)
    assert rank_zero_only.rank == 0


WRITE = """
import enum, yaml
class Interval(enum.Enum):
    step = "step"
print(yaml.safe_dump("1e3").split()[0], flush=True)
yaml.safe_dump(Interval.step)
"""


def test_configs_are_written_as_they_are_read() -> None:
    """Not so in a process that has not imported this package."""
    done = subprocess.run([sys.executable, "-c", WRITE], capture_output=True, text=True)
    assert done.stdout.strip() == "1e3" and "RepresenterError" in done.stderr

    class Interval(enum.Enum):
        step = "step"

    write_configs_as_they_are_read()
    assert yaml.safe_dump(Interval.step).split()[0] == "step"
    assert yaml.safe_dump("1e3").split()[0] == "'1e3'"
