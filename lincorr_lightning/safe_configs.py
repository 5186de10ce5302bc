"""The option `--safe`: a config may name only known classes, and run no other code."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from typing import Any

import lightning as L
import lightning.pytorch.plugins.environments  # so that its classes can be named
import torch
from jsonargparse import set_parsing_settings
from lightning.fabric.plugins.environments.cluster_environment import ClusterEnvironment
from lightning.pytorch.callbacks import LambdaCallback
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from lightning.pytorch.plugins import (
    CheckpointIO,
    LayerSync,
    Precision,
)
from lightning.pytorch.profilers import Profiler
from lightning.pytorch.strategies import Strategy

from lincorr_lightning.errors import ConfigError
from lincorr_lightning.option_errors import subclasses

_BASES = (
    L.LightningModule,
    L.LightningDataModule,
    L.Callback,
    Strategy,
    Precision,
    CheckpointIO,
    ClusterEnvironment,
    LayerSync,
    Profiler,
    torch.optim.Optimizer,
    torch.optim.lr_scheduler.LRScheduler,
    torch.nn.Module,
    # Other loggers send data to servers that the config names.
    CSVLogger,
    TensorBoardLogger,
)
_PACKAGES = (
    "lincorr_lightning.",
    "lightning.pytorch.",
    "lightning.fabric.",
    "torch.nn.",
    "torch.optim.",
)


def allow_known_classes_only() -> None:
    """Refuse unknown classes and all functions in configs, for the rest of the process.

    They are refused before their modules are imported. The allowed classes are those of this
    package, of Lightning (callbacks, strategies, plugins, profilers, and the loggers that write to
    the disk), and of torch (optimizers, schedulers, layers). Functions are never allowed, so
    options that take a callable cannot be used, nor can `LambdaCallback`.
    """
    set_parsing_settings(
        import_path_denylist=["*"],
        import_path_allowlist=sorted(_allowed_paths()),
        instantiate_subclass_spec_in_any=False,
    )


def check_settings(settings: Iterable[tuple[str, Any]]) -> None:
    """Refuse settings that run code from elsewhere.

    Args:
        settings: Keys and values of a parsed config.

    Raises:
        ConfigError: A setting may run code of an LM, a hub, a checkpoint or the config itself.
    """
    for key, value in settings:
        name = key.rpartition(".")[2]
        if ".dict_kwargs." in key:
            raise ConfigError(f"--safe refuses {key}, which runs code with unchecked arguments.")
        if name == "trust_remote_code" and value:
            raise ConfigError(f"--safe refuses {key}, which runs code that comes with the LM.")
        if name == "attn_implementation" and "/" in str(value):
            raise ConfigError(f"--safe refuses {key} {value}, which runs code from a hub.")
        if name == "weights_only" and value is False:
            raise ConfigError(f"--safe refuses {key}, which runs code from a checkpoint.")


def _allowed_paths() -> Iterator[str]:
    """Yield the paths by which the allowed classes can be imported."""
    allowed = {
        kind
        for base in _BASES
        for kind in (base, *subclasses(base))
        if kind.__module__.startswith(_PACKAGES) and not issubclass(kind, LambdaCallback)
    }
    for name, module in list(sys.modules.items()):
        if f"{name}.".startswith(_PACKAGES):
            for attribute, value in vars(module).items():
                if isinstance(value, type) and value in allowed:
                    yield f"{name}.{attribute}"
