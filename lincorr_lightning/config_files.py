"""Checks of config files before the command line is parsed."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, NoReturn

import yaml
from jsonargparse import get_loader, set_loader

from lincorr_lightning.errors import ConfigError

# C code that builds deeper values overflows its stack.
_MAX_DEPTH = 64
# Aliases can make a few lines stand for billions of values.
_MAX_NODES = 1_000_000
_Loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


@dataclass
class _Collection:
    """A mapping or sequence whose end has not been read yet."""

    is_mapping: bool
    anchor: str | None
    keys: set[str] = field(default_factory=set)
    n_children: int = 0
    n_nodes: int = 1


def check_yaml(text: str) -> None:
    """Refuse YAML or JSON with repeated keys, deep nesting, or aliases that multiply its size.

    PyYAML takes the last of repeated keys without a word, and deep nesting ends the process.

    Raises:
        yaml.YAMLError: The text is one of these, or not YAML.
    """
    stack: list[_Collection] = []
    sizes: dict[str, int] = {}
    for event in yaml.parse(text, Loader=_Loader):
        if isinstance(event, yaml.CollectionStartEvent):
            if len(stack) == _MAX_DEPTH:
                _refuse(f"values are nested more than {_MAX_DEPTH} deep", event)
            stack.append(_Collection(isinstance(event, yaml.MappingStartEvent), event.anchor))
            continue
        if isinstance(event, yaml.CollectionEndEvent):
            closed = stack.pop()
            anchor, n_nodes = closed.anchor, closed.n_nodes
        elif isinstance(event, yaml.AliasEvent):
            if event.anchor not in sizes:
                _refuse(f"the alias *{event.anchor} stands for nothing, or for itself", event)
            anchor, n_nodes = None, sizes[event.anchor]
        elif isinstance(event, yaml.ScalarEvent):
            anchor, n_nodes = event.anchor, 1
        else:
            continue
        if anchor is not None:
            sizes[anchor] = n_nodes
        if stack:
            _add_child(stack[-1], event, n_nodes)


def _add_child(parent: _Collection, event: yaml.Event, n_nodes: int) -> None:
    is_key = parent.is_mapping and parent.n_children % 2 == 0
    parent.n_children += 1
    parent.n_nodes += n_nodes
    if parent.n_nodes > _MAX_NODES:
        _refuse(f"there are more than {_MAX_NODES} values", event)
    if is_key and isinstance(event, yaml.ScalarEvent):
        if event.value in parent.keys:
            _refuse(f"the key {event.value!r} is given twice", event)
        parent.keys.add(event.value)


def _refuse(problem: str, event: yaml.Event) -> NoReturn:
    mark: Any = event.start_mark
    raise yaml.MarkedYAMLError(problem=problem, problem_mark=mark)


@cache
def use_checked_loader() -> None:
    """Let jsonargparse check all that it reads as YAML, in values and config files."""
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
        ConfigError: A file is missing, is no text, no YAML or no mapping, or has an empty section
            of an unknown name, which jsonargparse ignores; the message names the file.
    """
    for value in _config_values(args):
        if "://" in value:  # jsonargparse reads those of a server
            continue
        unknown = [key for key, content in read_config(value).items() if not content]
        for key in set(unknown) - set(sections):
            raise ConfigError(
                f"the config {value} has the section {key}, which is unknown. The sections are "
                f"{', '.join(sorted(sections))}."
            )


def read_config(value: str) -> dict[str, Any]:
    """Return the content of a config.

    Args:
        value: Path of the file, or the config itself as YAML or JSON text.

    Raises:
        ConfigError: It cannot be read, or is no mapping.
    """
    is_text = value.lstrip().startswith("{") or "\n" in value
    name = "the config on the command line" if is_text else f"the config {value}"
    try:
        text = value if is_text else Path(value).read_text(encoding="utf-8")
        check_yaml(text)
        content = yaml.load(text, Loader=_Loader)
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


def _reason(error: OSError | ValueError) -> str:
    if isinstance(error, UnicodeDecodeError):
        return "it is not text in UTF-8"
    return getattr(error, "strerror", None) or str(error)


def _yaml_reason(error: yaml.YAMLError) -> str:
    mark = getattr(error, "problem_mark", None)
    where = f" in line {mark.line + 1}" if mark is not None else ""
    return f"{getattr(error, 'problem', None) or error}{where}"
