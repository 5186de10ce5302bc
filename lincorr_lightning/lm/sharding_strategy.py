"""Lightning strategies that studies support, and the one that shards the LM."""

from typing import Any, Literal

import lightning as L
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy, SingleDeviceStrategy

from lincorr_lightning.errors import ConfigError, require


class ShardedStrategy(ModelParallelStrategy):
    """`ModelParallelStrategy` whose sizes may be ``auto``.

    Args:
        data_parallel_size: Number of data shards, over which each layer's weights are sharded;
            ``auto`` takes world size / `tensor_parallel_size`.
        tensor_parallel_size: Number of ranks that share a matrix product; ``auto``: of one machine.
        save_distributed_checkpoint: Whether a checkpoint is a folder of shards, not one file.
    """

    def __init__(
        self,
        data_parallel_size: Literal["auto"] | int = "auto",
        tensor_parallel_size: Literal["auto"] | int = 1,
        save_distributed_checkpoint: bool = False,
    ) -> None:
        super().__init__(data_parallel_size, tensor_parallel_size, save_distributed_checkpoint)

    def setup_environment(self) -> None:
        """Resolve ``auto`` sizes, and refuse those whose product is not the world size."""
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
    """Refuse a Trainer's strategy that studies do not support."""
    strategy = trainer.strategy
    if not isinstance(strategy, (ModelParallelStrategy, DDPStrategy, SingleDeviceStrategy)):
        raise ConfigError(
            f"trainer.strategy is {type(strategy).__name__}, which does not support forward passes "
            "outside of training_step. Add --config configs/trainer/fsdp.yaml or "
            "configs/trainer/tensor_parallel.yaml (the LM sharded over GPUs), or "
            "configs/trainer/ddp.yaml (the whole LM on each GPU)."
        )


def refuse_sharding(trainer: Any, what: str) -> None:
    """Refuse a sharded LM for a study or setting that needs the whole LM on each rank."""
    if is_sharded(trainer):
        raise ConfigError(
            f"{what} does not support a sharded LM (trainer.strategy). Add --config "
            "configs/trainer/ddp.yaml, which gives each rank the whole LM."
        )


def is_sharded(trainer: L.Trainer) -> bool:
    """Return whether the Trainer's strategy shards the LM over ranks."""
    return isinstance(trainer.strategy, ModelParallelStrategy)
