"""Error messages for wrong options, classes and values, in one line of plain words."""

from __future__ import annotations

import re
from argparse import ArgumentError
from collections.abc import Collection, Iterator, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NoReturn

from jsonargparse import ArgumentParser

from lincorr_lightning.config import SAFE

# Longer messages of libraries are truncated.
_MAX_LENGTH = 400
_UNKNOWN_OPTION = re.compile(
    r"(?:Group '(?P<group>\S+)' does not accept o|O|o)ption '(?P<key>[^']+)'"
    r"|unrecognized arguments: --(?P<argument>[^\s=]+)"
)
_UNKNOWN_CLASS = re.compile(
    r"dot import path string: (\w+)|No module named '([^']+)'|has no attribute '(\w+)'"
)
_EXPECTED = re.compile(r"Expected an? (typing\.Literal\[.*?\]|<.*?>)|subclass of (\w+)")
_WORDS = {
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "str": "text",
    "NoneType": "null",
    "list": "a list, such as [a, b]",
    "dict": "a mapping, such as {a: 1}",
    "LightningModule": "a study",
    "LightningDataModule": "a datamodule",
    "Callback": "a callback",
}
"""Types as a user would call them."""


class ExplainedParser(ArgumentParser):
    """Parser whose errors carry the parser that found them, of the command or of a class."""

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """Raise an error with an attribute `parser`."""
        error: Any = ArgumentError(None, message)
        error.parser = getattr(ex, "subcommand_parser", None) or self
        raise error from ex


def explain(error: ArgumentError, args: Sequence[str]) -> str:
    """Return one line about a wrong option, class or value.

    Args:
        error: Error of an `ExplainedParser`.
        args: Command line; config files that it names are searched for what is wrong.
    """
    message, links = str(error), list(causes(error))
    # Keys of the settings from the command's down to the one that is wrong.
    found = [re.match(r'\s*Parser key "([^"]+)"', str(cause)) for cause in links]
    path = list(dict.fromkeys(match[1] for match in found if match))
    denied = re.search(r"Importing '([^']+)' is not allowed", message)
    if denied:
        return (
            f"{SAFE} refuses {denied[1]}{_origin(denied[1], args)}: it is no class of this "
            f"package, Lightning or torch that is allowed. Leave {SAFE} out for a config you trust."
        )
    option = _UNKNOWN_OPTION.search(message)
    if option:
        parts = [option["group"], option["key"] or option["argument"]]
        key = ".".join(part for part in parts if part).replace("init_args.", "")
        *_, parser = (cause.parser for cause in links if hasattr(cause, "parser"))
        options = [name.removeprefix("--") for name in parser._option_string_actions]
        full = ".".join([*path, key])
        where = f"there is no option {full}{_origin(key.rpartition('.')[2], args)}"
        fallback = "; `lincorr COMMAND --help` and `--model.help CLASS` list them."
        return where + (suggest(key, options, ".".join([*path, ""])) or fallback)
    unknown = _UNKNOWN_CLASS.search(message)
    if unknown:
        name = next(filter(None, unknown.groups()))
        where = f"{'.'.join(path)}: there is no class or module {name}{_origin(name, args)}"
        return where + (suggest(name, _known_classes(path)) or ". Give a class as module.Class.")
    key = ".".join(path)
    missing = re.search(r"the following arguments are required: .*", message)
    if missing and not key:
        return f"{missing[0]}. Pass a study's config, as --config configs/linear_probe.yaml."
    if missing:
        return f"{key}: {missing[0]}."
    reason = next((str(cause) for cause in reversed(links) if "Parser key" in str(cause)), message)
    value = re.search(r"(?:Got|Given) value: (.*)", reason)
    wanted = [one_line("".join(names)) for names in _EXPECTED.findall(reason)]
    if not (key and value and set(wanted) - {"NoneType"}):
        return one_line(f"{key}: {links[-1]}" if key else message)
    wanted = [
        _WORDS.get(name, name.removeprefix("Literal").strip("[]").replace("'", ""))
        for name in wanted
    ]
    where = _origin(path[-1].rpartition(".")[2], args)
    return one_line(f"{key} is {value[1]}{where}; it must be {' or '.join(dict.fromkeys(wanted))}.")


def one_line(text: object) -> str:
    """Return a message in one line, without Python's notation of classes and objects."""
    line = re.sub(r"<(?:class ')?(?:\w+\.)*(\w+)(?:'| object at 0x\w+)>", r"\1", str(text))
    line = " ".join(re.sub(r'typing\.|Parser key "[^"]+":', "", line).split())
    return line if len(line) <= _MAX_LENGTH else f"{line[:_MAX_LENGTH]} …"


def suggest(name: str, known: Collection[str], prefix: str = "") -> str:
    """Return a question whether the nearest of the known names is meant; empty if none is near."""
    head, dot, rest = name.partition(".")
    heads = {one.partition(".")[0] for one in known}
    if dot and head not in heads:  # a section that is written wrongly
        near = [f"{one}.{rest}" for one in get_close_matches(head, heads, 1)]
    else:
        near = get_close_matches(name, known, 1)
    return f"; did you mean {prefix}{near[0]}?" if near else ""


def _known_classes(path: Sequence[str]) -> list[str]:
    """Return the names of the classes that a setting takes."""
    import lightning as L  # here: `lincorr audit` does without it

    bases = {"model": L.LightningModule, "data": L.LightningDataModule}
    return [kind.__name__ for kind in subclasses(bases.get("".join(path), L.Callback))]


def subclasses(kind: type[Any]) -> Iterator[type[Any]]:
    """Yield all direct and indirect subclasses of a class."""
    for below in type.__subclasses__(kind):
        yield below
        yield from subclasses(below)


def _origin(name: str, args: Sequence[str]) -> str:
    """Name the config file that has an option or class, unless the command line has it."""
    word = re.compile(rf"\b{re.escape(name)}\b")
    if any(word.search(arg) for arg in args if not arg.endswith((".yaml", ".yml"))):
        return ""
    for arg in reversed(args):
        path = Path(arg.rpartition("=")[2])
        if path.suffix in (".yaml", ".yml") and path.is_file():
            text = path.read_text(encoding="utf-8", errors="replace")
            if word.search(re.sub(r"#.*", "", text)):
                return f" (in {path})"
    return ""


def causes(error: BaseException) -> Iterator[Any]:
    """Yield an error and what it was raised from, down to the first one."""
    cause: BaseException | None = error
    while cause is not None:
        yield cause
        cause = cause.__cause__
