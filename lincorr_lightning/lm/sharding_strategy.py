"""Lightning strategies that studies support, and the one that shards the LM."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import lightning as L
from lightning.pytorch.strategies import (
    DDPStrategy,
    ModelParallelStrategy,
    SingleDeviceStrategy,
)

from lincorr_lightning.errors import ConfigError, require
from lincorr_lightning.lm.language_model import LanguageModel

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


class ShardedStrategy(ModelParallelStrategy):
    """`ModelParallelStrategy` whose sizes may be ``auto``.

    Args:
        data_parallel_size: Number of data shards, over which each layer's weights are sharded;
            ``auto`` takes world size / `tensor_parallel_size`.
        tensor_parallel_size: Number of ranks that share a matrix product; ``auto`` takes the ranks
            of one machine.
        save_distributed_checkpoint: Whether a checkpoint is a folder of shards, instead of one file
            that loads at any world size.
    """

    def __init__(
        self,
        data_parallel_size: Literal["auto"] | int = "auto",
        tensor_parallel_size: Literal["auto"] | int = 1,
        save_distributed_checkpoint: bool = False,
    ) -> None:
        super().__init__(data_parallel_size, tensor_parallel_size, save_distributed_checkpoint)

    def setup_environment(self) -> None:
        """Resolve ``auto`` sizes.

        Raises:
            ConfigError: A size is below 1, or their product is not the world size.
        """
        for name in ("data_parallel_size", "tensor_parallel_size"):
            size = getattr(self, f"_{name}")
            if size != "auto":
                require(f"trainer.strategy.{name}", size, at_least=1)
        n = self.num_nodes * self.num_processes
        tensor = self._tensor_parallel_size
        if tensor == "auto":
            tensor = self.num_processes
        data = n // tensor if self._data_parallel_size == "auto" else self._data_parallel_size
        if data * tensor != n:
            raise ConfigError(
                f"trainer.strategy has data_parallel_size {data} times tensor_parallel_size "
                f"{tensor}, but the world size is {n}. Set data_parallel_size to auto and "
                f"tensor_parallel_size to a divisor of {n}, or change trainer.devices."
            )
        self._data_parallel_size, self._tensor_parallel_size = data, tensor
        super().setup_environment()


def check_strategy(trainer: Any) -> None:
    """Check that a study can run under the Trainer's strategy.

    Raises:
        ConfigError: The strategy is not supported; the message names those that are.
    """
    strategy = trainer.strategy
    if not isinstance(strategy, (ModelParallelStrategy, DDPStrategy, SingleDeviceStrategy)):
        raise ConfigError(
            f"trainer.strategy is {type(strategy).__name__}, which does not support forward passes "
            "outside of training_step. Add --config configs/trainer/fsdp.yaml or "
            "configs/trainer/tensor_parallel.yaml (the LM sharded over GPUs), or "
            "configs/trainer/ddp.yaml (the whole LM on each GPU)."
        )


def refuse_sharding(trainer: Any, what: str) -> None:
    """Refuse a study or setting that needs the whole LM on each rank.

    Raises:
        ConfigError: The strategy shards the LM.
    """
    if is_sharded(trainer):
        raise ConfigError(
            f"{what} does not support a sharded LM (trainer.strategy). Add --config "
            "configs/trainer/ddp.yaml, which gives each rank the whole LM."
        )


def is_sharded(trainer: L.Trainer) -> bool:
    """Return whether the Trainer's strategy shards the LM over ranks."""
    return isinstance(trainer.strategy, ModelParallelStrategy)


def shard_lm(lm: LanguageModel, mesh: DeviceMesh | None) -> None:
    """Shard a loaded LM over a device mesh; does nothing without a mesh or if it is sharded.

    Raises:
        ConfigError: The LM is compiled and the mesh has tensor parallelism.
        LanguageModelError: The LM cannot be sharded.
    """
    if mesh is None or lm.is_sharded:
        return
    if lm.config.compile and mesh["tensor_parallel"].size() > 1:
        raise ConfigError(
            "model.lm.compile is true, which tensor parallelism does not support. Set it to false, "
            "or use configs/trainer/fsdp.yaml."
        )
    lm.shard(mesh)
