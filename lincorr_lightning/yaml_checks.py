"""Checks of YAML text before it is loaded."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NoReturn

import yaml

# C code that builds deeper values overflows its stack.
_MAX_DEPTH = 64
_TOO_DEEP = f"values are nested more than {_MAX_DEPTH} deep"
# Aliases can make a few lines stand for billions of values.
_MAX_NODES = 1_000_000
SafeLoader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
"""PyYAML's safe loader, in C if PyYAML was built with libyaml."""


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

    PyYAML silently keeps the last of repeated keys, and deep nesting crashes the process.

    Raises:
        yaml.YAMLError: The text has one of these, or is not YAML.
    """
    stack: list[_Collection] = []
    sizes: dict[str, int] = {}
    for event in _events(text):
        if isinstance(event, yaml.CollectionStartEvent):
            if len(stack) == _MAX_DEPTH:
                _refuse(_TOO_DEEP, event)
            stack.append(_Collection(isinstance(event, yaml.MappingStartEvent), event.anchor))
            continue
        if isinstance(event, yaml.CollectionEndEvent):
            closed = stack.pop()
            anchor, n_nodes = closed.anchor, closed.n_nodes
        elif isinstance(event, yaml.AliasEvent):
            if event.anchor not in sizes:
                _refuse(f"the alias *{event.anchor} is undefined or refers to itself", event)
            anchor, n_nodes = None, sizes[event.anchor]
        elif isinstance(event, yaml.ScalarEvent):
            anchor, n_nodes = event.anchor, 1
        else:
            continue
        if anchor is not None:
            sizes[anchor] = n_nodes
        if stack:
            _add_child(stack[-1], event, n_nodes)


def _events(text: str) -> Iterator[yaml.Event]:
    try:
        yield from yaml.parse(text, Loader=SafeLoader)
    except yaml.MarkedYAMLError as error:
        # The libyaml of PyYAML 6.0.4 reads ahead, and has a higher limit of its own.
        if error.problem != "exceeded maximum nesting depth":
            raise
        raise yaml.MarkedYAMLError(problem=_TOO_DEEP, problem_mark=error.problem_mark) from None


def load_yaml(text: str, loader: Any = SafeLoader) -> Any:
    """Check and load YAML or JSON.

    Raises:
        yaml.YAMLError: See `check_yaml`.
        ValueError: A value is not valid for its YAML type, such as a date.
    """
    check_yaml(text)
    return yaml.load(text, Loader=loader)


def _add_child(parent: _Collection, event: yaml.Event, n_nodes: int) -> None:
    is_key = parent.is_mapping and parent.n_children % 2 == 0
    parent.n_children += 1
    parent.n_nodes += n_nodes
    if parent.n_nodes > _MAX_NODES:
        _refuse(f"there are more than {_MAX_NODES:,} values", event)
    if is_key and isinstance(event, yaml.ScalarEvent):
        if event.value in parent.keys:
            _refuse(f"the key {event.value!r} is given twice", event)
        parent.keys.add(event.value)


def _refuse(problem: str, event: yaml.Event) -> NoReturn:
    mark: Any = event.start_mark
    raise yaml.MarkedYAMLError(problem=problem, problem_mark=mark)
