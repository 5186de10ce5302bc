"""Checks of config files before the command line is parsed."""

from __future__ import annotations

import importlib.resources
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from jsonargparse import get_loader, set_loader

from lincorr_lightning.errors import ConfigError
from lincorr_lightning.yaml_checks import check_yaml, load_yaml


@cache
def use_checked_loader() -> None:
    """Let jsonargparse check all YAML that it loads, in values and config files."""
    load = get_loader("yaml")

    def load_checked(text: str) -> Any:
        check_yaml(text)
        return load(text)

    set_loader("yaml", load_checked, exceptions=(yaml.YAMLError,))


def check_configs(args: Sequence[str], sections: Collection[str]) -> None:
    """Refuse configs of a command line that cannot be read, or have unknown sections.

    Args:
        args: Command line, with configs as files or as YAML text.
        sections: Keys that a config may have.

    Raises:
        ConfigError: A file is missing, is not text, YAML or a mapping, or has an empty section
            with an unknown name, which jsonargparse ignores; the message names the file.
    """
    for value in _config_values(args):
        if "://" in value or _is_pipe(value):  # only jsonargparse reads these
            continue
        unknown = [key for key, content in read_config(value).items() if not content]
        for key in set(unknown) - set(sections):
            raise ConfigError(
                f"the config {value} has the section {key}, which is unknown. The sections are "
                f"{', '.join(sorted(sections))}."
            )


def find_packaged(path: Path) -> Path | None:
    """Return the packaged config that a path such as ``configs/linear_probe.yaml`` names."""
    parts = path.parts[1:] if path.parts[:1] == ("configs",) else path.parts
    found = importlib.resources.files("lincorr_lightning.configs").joinpath(*parts)
    return Path(str(found)) if found.is_file() else None


def read_config(value: str) -> dict[str, Any]:
    """Return the content of a config.

    Args:
        value: Path of the file, or the config itself as YAML or JSON text.

    Raises:
        ConfigError: It cannot be read, or is not a mapping.
    """
    is_text = value.lstrip().startswith("{") or "\n" in value
    name = "the config on the command line" if is_text else f"the config {value}"
    try:
        text = value if is_text else Path(value).read_text(encoding="utf-8")
        content = load_yaml(text)
    except FileNotFoundError:
        raise ConfigError(
            f"{name} does not exist. Pass a file, or one of the package as configs/NAME.yaml; "
            "`lincorr --help` lists them."
        ) from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{name} cannot be read: {_reason(error)}.") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{name} is not valid YAML: {_yaml_reason(error)}.") from error
    if not isinstance(content, dict):
        kind = "is empty" if content is None else f"holds a {type(content).__name__}"
        raise ConfigError(f"{name} {kind}; a config has sections such as trainer, model and data.")
    return content


def _config_values(args: Sequence[str]) -> Iterator[str]:
    for argument, following in zip(args, [*args[1:], "-"], strict=True):
        key, equals, value = argument.partition("=")
        if key in ("--config", "-c") and (equals or not following.startswith("-")):
            yield value if equals else following


def _is_pipe(value: str) -> bool:
    """Return whether a config is a pipe, such as ``<(command)``, which can be read only once."""
    with suppress(OSError):
        return Path(value).is_fifo()
    return False


def _reason(error: OSError | ValueError) -> str:
    if isinstance(error, UnicodeDecodeError):
        return "it is not UTF-8 text"
    return getattr(error, "strerror", None) or str(error)


def _yaml_reason(error: yaml.YAMLError) -> str:
    mark = getattr(error, "problem_mark", None)
    where = f" in line {mark.line + 1}" if mark is not None else ""
    reason = str(getattr(error, "problem", None) or error)
    return f"{' '.join(reason.split())}{where}"
