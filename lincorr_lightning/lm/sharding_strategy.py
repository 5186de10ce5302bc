"""Which of Lightning's strategies a study can run under, and its LM in pieces."""

from __future__ import annotations

from typing import Any, Literal

import lightning as L
from lightning.pytorch.strategies import (
    DDPStrategy,
    ModelParallelStrategy,
    SingleDeviceStrategy,
)

from lincorr_lightning.errors import ConfigError
from lincorr_lightning.lm.language_model import LanguageModel


class ShardedStrategy(ModelParallelStrategy):
    """Lightning's strategy for an LM in pieces, with `auto` for as many processes as there are.

    Args:
        data_parallel_size: Over how many processes, or groups of them, a layer's weights are split
            and X's are dealt out; ``auto`` takes all that `tensor_parallel_size` leaves.
        tensor_parallel_size: How many processes share a matrix product; ``auto`` takes those of one
            machine.
        save_distributed_checkpoint: Whether a checkpoint is a folder of pieces, or one file that
            any number of processes loads.
    """

    def __init__(
        self,
        data_parallel_size: Literal["auto"] | int = "auto",
        tensor_parallel_size: Literal["auto"] | int = 1,
        save_distributed_checkpoint: bool = False,
    ) -> None:
        super().__init__(data_parallel_size, tensor_parallel_size, save_distributed_checkpoint)

    def setup_environment(self) -> None:
        """Find out how many processes there are.

        Raises:
            ConfigError: They cannot be dealt out so.
        """
        n = self.num_nodes * self.num_processes
        together = self._tensor_parallel_size
        if together == "auto":
            together = self.num_processes
        groups = n // together if self._data_parallel_size == "auto" else self._data_parallel_size
        if groups * together != n:
            raise ConfigError(
                f"trainer.strategy splits the LM over {groups} times {together} processes "
                f"(data_parallel_size times tensor_parallel_size), but there are {n}. Set "
                "data_parallel_size to auto and tensor_parallel_size to a divisor of "
                f"{n}, or change trainer.devices."
            )
        self._data_parallel_size, self._tensor_parallel_size = groups, together
        super().setup_environment()


def check_strategy(trainer: Any) -> None:
    """Refuse a strategy under which the LM's numbers would not be its own.

    Raises:
        ConfigError: It says which strategies there are.
    """
    strategy = trainer.strategy
    if not isinstance(strategy, (ModelParallelStrategy, DDPStrategy, SingleDeviceStrategy)):
        raise ConfigError(
            f"trainer.strategy is {type(strategy).__name__}, which cannot split an LM that is "
            "asked outside of its training step. Lay configs/trainer/fsdp.yaml or "
            "configs/trainer/tensor_parallel.yaml over the study (pieces of the LM on each GPU), "
            "or configs/trainer/ddp.yaml (all of it on each)."
        )


def refuse_sharding(trainer: Any, what: str) -> None:
    """Refuse what needs the whole LM, or averages gradients as DDP does.

    Args:
        trainer: The run's trainer.
        what: The study, or a setting.

    Raises:
        ConfigError: The strategy splits the LM.
    """
    if is_sharded(trainer):
        raise ConfigError(
            f"{what} cannot run with the LM in pieces, as trainer.strategy has it. Lay "
            "configs/trainer/ddp.yaml over the study, which gives each process the whole LM."
        )


def is_sharded(trainer: L.Trainer) -> bool:
    """Whether each process holds a piece of the LM."""
    return isinstance(trainer.strategy, ModelParallelStrategy)


def shard_if_asked(lm: LanguageModel, module: L.LightningModule) -> None:
    """Split a loaded LM over the processes, if the strategy is to; does nothing the second time.

    Raises:
        ConfigError: The LM is compiled, and its matrices are to be split.
        LanguageModelError: It cannot be split.
    """
    mesh = module.device_mesh
    if mesh is None or lm.is_sharded:
        return
    if lm.config.compile and mesh["tensor_parallel"].size() > 1:
        raise ConfigError(
            "model.lm.compile is true, but an LM whose matrices are split is not compiled here. "
            "Set it to false, or lay configs/trainer/fsdp.yaml over the study."
        )
    lm.shard(mesh)
