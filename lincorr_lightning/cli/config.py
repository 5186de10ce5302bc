"""Configs: YAML that is safe to load, the packaged configs, and what `--safe` allows in one."""

import importlib.resources
import json
import sys
from argparse import Namespace
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import yaml

from lincorr_lightning.errors import ConfigError
from lincorr_lightning.io import load_yaml

SAFE = "--safe"
WRITTEN = frozenset(
    {
        "default_root_dir",
        "save_dir",
        "dirpath",
        "filename",
        "sub_dir",
        "name",
        "version",
        "cache_dir",
        "state_cache",
    }
)
"""Names of settings that say where a run writes."""


def find_config(name: str) -> str:
    """Return the path of a config, of the packaged one if there is no such file here."""
    folder = importlib.resources.files("lincorr_lightning.configs")
    packaged = Path(str(folder), name.removeprefix("configs/"))
    return str(packaged) if packaged.is_file() and not Path(name).exists() else name


def read_config(value: str) -> dict[str, Any]:
    """Return the content of a config: of a file, or of YAML or JSON text itself."""
    is_text = value.lstrip().startswith("{") or "\n" in value
    name = "the config on the command line" if is_text else f"the config {value}"
    try:
        content = load_yaml(value if is_text else Path(value).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        way_out = "Pass a file, or one of the package; `lincorr --help` lists them."
        raise ConfigError(f"{name} cannot be read: {reason}. {way_out}") from error
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        reason = " ".join(str(getattr(error, "problem", None) or error).split())
        where = f" in line {mark.line + 1}" if mark else ""
        raise ConfigError(f"{name} is not valid YAML: {reason}{where}.") from error
    if not isinstance(content, dict):
        kind = "is empty" if content is None else f"holds a {type(content).__name__}"
        raise ConfigError(f"{name} {kind}; a config has sections such as trainer, model and data.")
    return content


def prepare_args(args: Sequence[str]) -> list[str]:
    """Return a command line that jsonargparse can parse, with packaged configs found."""
    passed = []
    rest = iter(args)
    read = "--model.lm", "--model.before", "--model.prefix"
    for argument in rest:
        key, equals, value = argument.partition("=")
        if key not in ("--config", "-c") and not key.startswith(read):
            passed.append(argument)
            continue
        value = value if equals else next(rest, "")
        group, _, name = key.rpartition(".")
        if key in ("--config", "-c"):
            key, value = "--config", _check_config(value)
        elif name == "prefix":  # else a colon would make it a mapping
            key, value = group, json.dumps({"init_args": {name: value}})
        elif group != "--model" and value == "null":  # which jsonargparse takes for a text
            key, value = group, json.dumps({name: None})
        passed.append(f"{key}={value}")
    return passed


def _check_config(value: str) -> str:
    with suppress(OSError):  # such as of a config that is passed as text
        value = find_config(value)
        if "://" in value or Path(value).is_fifo():  # these can be read only once
            return value
    read_config(value)
    return value


def leaves(config: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the settings of a config, and members of lists, with keys such as ``data.seed``."""
    if isinstance(config, Namespace):
        config = vars(config)
    if isinstance(config, Mapping):
        for name, value in config.items():
            # On the command line, keys have no init_args.
            yield from leaves(value, prefix if name == "init_args" else f"{prefix}.{name}")
    elif isinstance(config, list) and config:
        for each in config:
            yield from leaves(each, prefix)
    else:
        yield prefix.removeprefix("."), config


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
    the disk), and of torch (optimizers, schedulers, layers).
    """
    from jsonargparse import set_parsing_settings

    set_parsing_settings(
        import_path_denylist=["*"],
        import_path_allowlist=sorted(_allowed_paths()),
        instantiate_subclass_spec_in_any=False,
        config_read_mode_fsspec_enabled=False,  # LightningCLI enables configs at URLs
    )


def _allowed_paths() -> Iterator[str]:
    import lightning.pytorch as pl
    import torch
    from lightning.fabric.plugins.environments.cluster_environment import ClusterEnvironment
    from lightning.pytorch import callbacks, loggers, plugins, profilers, strategies
    from lightning.pytorch.plugins import environments  # noqa: F401  (its classes can be named)

    bases: tuple[type, ...] = (
        pl.LightningModule,
        pl.LightningDataModule,
        pl.Callback,
        strategies.Strategy,
        plugins.Precision,
        plugins.CheckpointIO,
        plugins.LayerSync,
        ClusterEnvironment,
        profilers.Profiler,
        torch.optim.Optimizer,
        torch.optim.lr_scheduler.LRScheduler,
        torch.nn.Module,
        # Other loggers send data to servers that the config names.
        loggers.CSVLogger,
        loggers.TensorBoardLogger,
    )
    loaded = sys.modules.items()
    modules = {name: each for name, each in loaded if f"{name}.".startswith(_PACKAGES)}
    for name, module in modules.items():
        for attribute, value in list(vars(module).items()):
            if (
                isinstance(value, type)
                and issubclass(value, bases)
                and value.__module__.startswith(_PACKAGES)
                and not issubclass(value, callbacks.LambdaCallback)
            ):
                yield f"{name}.{attribute}"


def check_settings(settings: Iterable[tuple[str, Any]]) -> None:
    """Refuse settings of a parsed config, keys and values, that run foreign code, and URLs."""
    for key, value in settings:
        name = key.rpartition(".")[2]
        if (
            ".dict_kwargs." in key  # arguments of which nobody knows what they are
            or (name == "trust_remote_code" and value)
            or (name == "attn_implementation" and value not in (None, "eager", "sdpa"))
            or (name == "weights_only" and value is False)
        ):
            raise ConfigError(f"{SAFE} refuses {key} {value}, which runs code from elsewhere.")
        text = " ".join(f"{key} {value}".split())
        # Libraries also take chains of protocols, as a::b, and Lightning the names of a registry.
        if "://" in text or "::" in text or text.startswith("ckpt_path registry"):
            raise ConfigError(
                f"{SAFE} refuses {text}: a URL may contact a server. Name a local file or folder."
            )
