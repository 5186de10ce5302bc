"""What Lightning 2.6 lacks or does otherwise than this package needs, each in one place.

Every entry names the report in Lightning's repository, where there is one, and
``tests/test_lightning_workarounds.py`` shows Lightning's own behaviour: that test fails once an
entry is no longer needed.
"""

import os
import pickle
import re
import shutil
from collections import Counter
from collections.abc import Callable
from enum import Enum
from functools import partial
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import lightning as L
import torch
import yaml
from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from lightning.fabric.utilities.cloud_io import _is_local_file_protocol
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.loops.fit_loop import _FitLoop
from lightning.pytorch.strategies.launchers.multiprocessing import _MultiProcessingLauncher
from lightning.pytorch.utilities import rank_zero_only

from lincorr_lightning.errors import ConfigError
from lincorr_lightning.io import as_output_error, atomic_write, new_version

# A text such as 1e3, which YAML 1.1 takes for a text and jsonargparse for a number.
_E_NUMBER = re.compile(r"[-+]?\d[\d_]*(\.[\d_]*)?[eE][-+]?\d+$")


class AtomicCheckpointIO(TorchCheckpointIO):
    """Writes a checkpoint completely or not at all (Lightning #19970).

    Lightning's own copies the file from the system's temporary folder: if the process is killed
    meanwhile or the disk is full, a truncated file is left under the final name.
    """

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any = None
    ) -> None:
        if storage_options is not None or not _is_local_file_protocol(path):
            super().save_checkpoint(checkpoint, path, storage_options)
            return
        with atomic_write(path) as part, part.open("wb") as file:
            torch.save(checkpoint, file)


class ResumableFitLoop(_FitLoop):
    """Lightning's fit loop, also for runs that are resumed after the last step of an epoch.

    Lightning skips the validation of that epoch and, after the last epoch, the hooks at the end of
    training, in which studies write their results (compare Lightning #14579).
    """

    @property
    def skip(self) -> bool:
        """Whether there is nothing to train or to finish."""
        return super().skip and not (self.is_resuming and self.trainer.limit_train_batches)

    def on_run_start(self) -> None:
        """Call the hooks, and run the validation that follows the last step of an epoch."""
        super().on_run_start()
        steps = self.epoch_loop
        epochs: Any = self.epoch_progress.current
        is_last = 0 < (self.max_epochs or 0) <= epochs.processed
        if not steps.batch_progress.is_last_batch or not (
            steps.restarted_on_train_batch_end or (self.is_resuming and is_last)
        ):
            return
        epochs.completed -= 1  # Lightning counts the epoch as completed already
        if steps._should_check_val_epoch():
            self.trainer.validating = True
            steps.val_loop.restarting = False
            steps.val_loop.run()
            self.trainer.training = True
        epochs.completed += 1


class RunLogger(TensorBoardLogger):
    """TensorBoardLogger with a folder of its own for each run.

    Lightning's own takes the first free version, which runs that start at the same time all do;
    this one makes the folder, also again where it was moved or removed during the run, or raises
    `OutputError`. (No report in Lightning.)
    """

    _claimed: int | None = None
    returned = ("_claimed",)

    @property
    def version(self) -> int | str:
        """Number of the run's folder, which rank 0 makes at the first call."""
        # Folders of the other ranks are those of rank 0, see `Trainer.log_dir`.
        if rank_zero_only.rank != 0:  # type: ignore[attr-defined]
            return super().version
        if self._claimed is None:
            self._claimed = int(new_version(Path(self.root_dir)).name.removeprefix("version_"))
        return self._claimed

    @property
    def has_folder(self) -> bool:
        """Whether this logger has made its folder."""
        return self._claimed is not None

    @property
    def experiment(self) -> Any:
        """The writer, which would fail without its folder."""
        if self._experiment is not None:
            with as_output_error(Path(self.log_dir)):
                Path(self.log_dir).mkdir(parents=True, exist_ok=True)
        return super().experiment


def settle_processes(trainer: L.Trainer) -> None:
    """Refuse a run of which a launcher started another number of processes than its Trainer has.

    Lightning would wait for processes that nobody starts, or run each of them alone. And it takes
    from variables such as LOCAL_RANK, which may be those of another program, whether a process
    writes and logs; here the Trainer decides. (No report in Lightning.)
    """
    environment = trainer._accelerator_connector.cluster_environment
    started = n = trainer.num_devices * trainer.num_nodes
    is_launched = environment.creates_processes_externally
    if isinstance(environment, SLURMEnvironment):  # SLURM_NTASKS is of the job, not of the step
        started = int(os.environ.get("SLURM_STEP_NUM_TASKS", 1))
    elif is_launched and not isinstance(environment, LightningEnvironment):
        started = environment.world_size()
    elif is_launched and n > 1:  # LOCAL_RANK is set, as Lightning does for processes it starts
        started = int(os.environ.get("WORLD_SIZE", n)) if "MASTER_PORT" in os.environ else 1
    if started != n or trainer.global_rank >= n:
        raise ConfigError(
            f"the Trainer is of {n} processes (trainer.devices times trainer.num_nodes), but by "
            f"its environment this is process {trainer.global_rank} of {started}. Start {n} by "
            "torchrun or srun, or unset LOCAL_RANK, NODE_RANK and SLURM_NTASKS to let the Trainer "
            "start them."
        )
    rank_zero_only.rank = trainer.global_rank  # type: ignore[attr-defined]


def replace_fit_loop(trainer: L.Trainer) -> None:
    """Let a Trainer finish a run that is resumed at its end, and write checkpoints atomically.

    A `CheckpointIO` that the user passed is kept.
    """
    if type(trainer.strategy.checkpoint_io) is TorchCheckpointIO:
        trainer.strategy.checkpoint_io = AtomicCheckpointIO()
    loop = trainer.fit_loop  # Lightning has no public way to change it
    trainer.fit_loop = ResumableFitLoop(trainer, loop.min_epochs, loop.max_epochs)
    trainer.fit_loop.epoch_loop = loop.epoch_loop


def after_signal_handlers(trainer: L.Trainer, install: Callable[[], None]) -> None:
    """Call `install` whenever a Trainer has replaced the process's signal handlers (#1455)."""
    connector: Any = trainer._signal_connector
    register = connector.register_signal_handlers
    connector.register_signal_handlers = partial(_call_both, register, install)


def _call_both(first: Callable[[], None], second: Callable[[], None]) -> None:
    """Call two functions; unlike a function within another, it can go to a spawned process."""
    first()
    second()


def after_train_end(trainer: L.Trainer, call: Callable[[], object]) -> None:
    """Call a function once after the last ``on_train_end``, with the LM still on its device.

    Lightning has no hook there: in the next one the LM has been moved to the CPU.
    """
    strategy = trainer.strategy
    on_train_end = strategy.on_train_end

    def run() -> None:
        cancel_after_train_end(trainer)
        call()
        on_train_end()

    vars(strategy)["on_train_end"] = run


def cancel_after_train_end(trainer: L.Trainer) -> None:
    """Forget what `after_train_end` was given, if anything."""
    vars(trainer.strategy).pop("on_train_end", None)


def return_attributes() -> None:
    """Let ``ddp_spawn``, ``ddp_fork`` and ``ddp_notebook`` return attributes of module and others.

    The processes that they start train copies, of which Lightning returns the weights and
    ``callback_metrics`` alone (#18775). The module, callbacks and loggers name in ``returned``
    the attributes that the caller's objects take over from those of rank 0.
    """
    launcher: Any = _MultiProcessingLauncher
    if hasattr(launcher, "_returns_attributes"):
        return
    get, update = launcher.get_extra_results, launcher.update_main_process_results

    def get_extra_results(self: Any, trainer: L.Trainer) -> dict[str, Any]:
        returned = {
            key: {name: getattr(owner, name) for name in owner.returned}
            for key, owner in _returning(trainer).items()
        }
        # Lightning's queue waits for ever if it holds over 64 kB, such as some hundred metrics.
        file = Path(mkdtemp()) / "extra.pickle"
        file.write_bytes(pickle.dumps((get(self, trainer), returned)))
        return {"file": file}

    def update_main_process_results(self: Any, trainer: L.Trainer, extra: dict[str, Any]) -> None:
        metrics, returned = pickle.loads(extra["file"].read_bytes())
        shutil.rmtree(extra["file"].parent)
        update(self, trainer, metrics)
        owners = _returning(trainer)
        for key, values in returned.items():
            if key in owners:  # a callback that the module makes is in the other process alone
                vars(owners[key]).update(values)

    launcher.get_extra_results = get_extra_results
    launcher.update_main_process_results = update_main_process_results
    launcher._returns_attributes = True


def _returning(trainer: Any) -> dict[tuple[str, int], Any]:
    """Return what has ``returned``, by class and number in it: a run may sort its callbacks."""
    owners: dict[tuple[str, int], Any] = {}
    counts: Counter[str] = Counter()
    for owner in (trainer.lightning_module, *trainer.callbacks, *trainer.loggers):
        if hasattr(owner, "returned"):
            kind = type(owner).__qualname__
            owners[kind, counts[kind]] = owner
            counts[kind] += 1
    return owners


def write_configs_as_they_are_read() -> None:
    """Let ``config.yaml`` hold enums as their values, and quote texts such as ``1e3``.

    Defaults of Lightning's classes may be enums, such as `Timer`'s, which PyYAML does not write.
    (Reports of the kind: Lightning #18731, #19681.)
    """
    yaml.SafeDumper.add_multi_representer(
        Enum, lambda dumper, member: dumper.represent_data(member.value)
    )
    tag = "tag:yaml.org,2002:float"
    yaml.SafeDumper.add_implicit_resolver(tag, _E_NUMBER, list("-+0123456789"))
