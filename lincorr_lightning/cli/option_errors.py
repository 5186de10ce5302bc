"""Error messages for wrong options, classes and values, in one line of plain words."""

import pkgutil
import re
from argparse import ArgumentError
from collections.abc import Collection, Iterator, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from jsonargparse import ArgumentParser

from lincorr_lightning.cli.config import SAFE

_MAX_LENGTH = 400  # longer messages of libraries are truncated
# Phrases of jsonargparse.
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


def explain(error: ArgumentError, args: Sequence[str], parser: ArgumentParser) -> str:
    """Return one line about a wrong option, class or value, and the config file that has it."""
    message = str(error)
    # From the setting of the command down to the one that is wrong.
    *heads, reason = re.split(r'Parser key "([^"]+)":', message)
    key = ".".join(dict.fromkeys(heads[1::2]))
    if denied := re.search(r"Importing '([^']+)' is not allowed", message):
        return (
            f"{SAFE} refuses {denied[1]}{_origin(denied[1], args)}: it is no class of this "
            f"package, Lightning or torch that is allowed. Leave {SAFE} out for a config you trust."
        )
    if option := _UNKNOWN_OPTION.search(message):
        parts = [option["group"], option["key"] or option["argument"]]
        name = ".".join(part for part in parts if part).replace("init_args.", "")
        if of_class := re.findall(r"class_path '([^']+)'", message[: option.start()]):
            parser = ArgumentParser()
            parser.add_class_arguments(pkgutil.resolve_name(of_class[-1]), fail_untyped=False)
        known = [option.removeprefix("--") for option in parser._option_string_actions]
        prefix = f"{key}." if key else ""
        near = _suggest(name, known, prefix)
        fallback = "; `lincorr COMMAND --help` and `--model.help CLASS` list them."
        return f"there is no option {prefix}{name}{_origin(name, args)}{near or fallback}"
    if unknown := _UNKNOWN_CLASS.search(message):
        name = next(filter(None, unknown.groups()))
        import lightning as L  # here: `lincorr audit` does without it

        bases = {"model": L.LightningModule, "data": L.LightningDataModule}
        known = [kind.__name__ for kind in subclasses(bases.get(key, L.Callback))]
        near = _suggest(name, known) or ". Give a class as module.Class."
        return f"{key}: there is no class or module {name}{_origin(name, args)}{near}"
    if missing := re.search(r"the following arguments are required: .*", message):
        way_out = " Pass a study's config, as --config configs/linear_probe.yaml."
        return f"{key}: {missing[0]}." if key else missing[0] + "." + way_out * ("model" in message)
    reason, _, value = re.sub("Given value type: .*", "", reason).partition(" value: ")
    wanted = [one_line("".join(names)) for names in _EXPECTED.findall(reason)]
    if not (key and value and set(wanted) - {"NoneType"}):
        return one_line(f"{key}: {reason.strip().partition(chr(10))[0]}" if key else message)
    literals = (name.removeprefix("Literal").strip("[]").replace("'", "") for name in wanted)
    allowed = " or ".join(dict.fromkeys(_WORDS.get(name, name) for name in literals))
    given = value.partition("\n")[0]
    return one_line(f"{key} is {given}{_origin(key, args)}; it must be {allowed}.")


def one_line(text: object) -> str:
    """Return a message in one line, without Python's notation of classes and objects."""
    line = re.sub(r"<(?:class ')?(?:\w+\.)*(\w+)(?:'| object at 0x\w+)>", r"\1", str(text))
    line = " ".join(line.replace("typing.", "").split())
    return line if len(line) <= _MAX_LENGTH else f"{line[:_MAX_LENGTH]} …"


def _suggest(name: str, known: Collection[str], prefix: str = "") -> str:
    head, dot, rest = name.partition(".")
    heads = {each.partition(".")[0] for each in known}
    if dot and head not in heads:  # a section that is written wrongly
        near = [f"{match}.{rest}" for match in get_close_matches(head, heads, 1)]
    else:
        near = get_close_matches(name, known, 1)
    return f"; did you mean {prefix}{near[0]}?" if near else ""


def subclasses(kind: type[Any]) -> Iterator[type[Any]]:
    """Yield all direct and indirect subclasses of a class."""
    for below in type.__subclasses__(kind):
        yield below
        yield from subclasses(below)


def _origin(key: str, args: Sequence[str]) -> str:
    """Name the config file that has an option or class, unless the command line has it."""
    word = re.compile(rf"\b{re.escape(key.rpartition('.')[2])}\b")
    is_file = re.compile(r"\.ya?ml$").search
    if any(word.search(arg) for arg in args if not is_file(arg)):
        return ""
    for path in (Path(arg.rpartition("=")[2]) for arg in reversed(args) if is_file(arg)):
        text = path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""
        if word.search(re.sub(r"#.*", "", text)):
            return f" (in {path})"
    return ""
