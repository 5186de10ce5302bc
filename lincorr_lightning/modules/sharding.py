"""Which of Lightning's strategies a study can run under, and its LM in pieces."""

from __future__ import annotations

from typing import Any

import lightning as L
from lightning.pytorch.strategies import (
    DDPStrategy,
    ModelParallelStrategy,
    SingleDeviceStrategy,
)

from lincorr_lightning.errors import ConfigError
from lincorr_lightning.lm import LanguageModel


def check_strategy(trainer: Any) -> None:
    """Refuse a strategy under which the LM's numbers would not be its own.

    Raises:
        ConfigError: It says which strategies there are.
    """
    strategy = trainer.strategy
    if isinstance(strategy, ModelParallelStrategy):
        if strategy._tensor_parallel_size not in (1, "auto") and trainer.world_size > 1:
            raise ConfigError(
                "trainer.strategy.tensor_parallel_size is "
                f"{strategy._tensor_parallel_size}, but an LM's matrices are not split here, only "
                "its layers' weights. Set it to 1 and data_parallel_size to the number of "
                "processes, as configs/trainer/fsdp.yaml does."
            )
        return
    if not isinstance(strategy, (DDPStrategy, SingleDeviceStrategy)):
        raise ConfigError(
            f"trainer.strategy is {type(strategy).__name__}, which cannot split an LM that is "
            "asked outside of its training step. Lay configs/trainer/fsdp.yaml over the study "
            "(pieces of the LM on each GPU), or configs/trainer/ddp.yaml (all of it on each)."
        )


def is_sharded(trainer: L.Trainer) -> bool:
    """Whether each process holds a piece of the LM."""
    return isinstance(trainer.strategy, ModelParallelStrategy)


def shard_if_asked(lm: LanguageModel, module: L.LightningModule) -> None:
    """Split a loaded LM over the processes, if the strategy is to; does nothing the second time."""
    mesh = module.device_mesh
    if mesh is not None and not lm.is_sharded:
        lm.shard(mesh["data_parallel"])
