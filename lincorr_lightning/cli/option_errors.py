"""One line for a wrong option, class or value: what is wrong, and the config file that has it."""

import pkgutil
import re
from argparse import ArgumentError
from collections.abc import Collection, Iterator, Sequence
from difflib import get_close_matches
from inspect import signature
from pathlib import Path
from typing import Any

from jsonargparse import ArgumentParser

from lincorr_lightning.cli.config import SAFE

_MAX_LENGTH = 400  # longer messages of libraries are truncated
# Phrases of jsonargparse.
_UNKNOWN_OPTION = re.compile(
    r"(?:Group '(\S+)' does not accept )?[Oo]ption '([^']+)'|unrecognized arguments: --([^\s=]+)"
)
_UNKNOWN_CLASS = re.compile(
    r"dot import path string: (\w+)|No module named '([^']+)'|has no attribute '(\w+)'"
)
_LOOSE_WORD = re.compile(r"unrecognized arguments: ([^-]\S*)")
_NO_GROUP = re.compile(r'Unable to load config "([^"]*)"')
_EXPECTED = re.compile(r"Expected an? (?:typing\.Literal\[(.*?)\]|<class '(\w+)'>)")
_GIVEN = re.compile(r"(?:Given|Got) value: (.*)")
_TYPES = {
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "str": "text",
    "NoneType": "null",
}


def explain(error: ArgumentError, args: Sequence[str], parser: ArgumentParser) -> str:
    """Return one line about a wrong option, class or value of a command line.

    What is no unknown option, no unknown class and no wrong type stays jsonargparse's own message.
    """
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
        name = ".".join(filter(None, option.groups())).replace("init_args.", "")
        if of_class := re.findall(r"class_path '([^']+)'", message[: option.start()]):
            parser = ArgumentParser()
            parser.add_class_arguments(pkgutil.resolve_name(of_class[-1]), fail_untyped=False)
        known = [known.removeprefix("--") for known in parser._option_string_actions]
        prefix = f"{key}." if key else ""
        way_out = _suggest(name, known, prefix) or (
            f"; did you mean {' or '.join(places)}?"
            if not prefix and (places := list(_places(name)))
            else "; `lincorr COMMAND --help` and `--model.help CLASS` list them."
        )
        return f"there is no option {prefix}{name}{_origin(name, args)}{way_out}"
    if word := _LOOSE_WORD.search(message):
        return _explain_loose_word(word[1], args, "--lm" in parser._option_string_actions)
    if (group := _NO_GROUP.search(reason)) and key.rpartition(".")[2] in ("lm", "before"):
        return f"{key} has settings of its own. Give an LM's name as {key}.name_or_path {group[1]}."
    if unknown := _UNKNOWN_CLASS.search(message):
        import lightning as L  # here: `lincorr audit` does without it

        name = next(filter(None, unknown.groups()))
        bases = {"model": L.LightningModule, "data": L.LightningDataModule}
        classes = [kind.__name__ for kind in subclasses(bases.get(key, L.Callback))]
        way_out = _suggest(name, classes) or ". Give a class as module.Class."
        return f"{key}: there is no class or module {name}{_origin(name, args)}{way_out}"
    given = _GIVEN.search(reason)
    expected = _EXPECTED.findall(reason[: given.start()] if given else "")
    names = [literals or _TYPES.get(name, name) for literals, name in expected]
    if key and given and set(names) - {"null"}:
        allowed = " or ".join(dict.fromkeys(names)).replace("'", "")
        return one_line(f"{key} is {given[1]}{_origin(key, args)}; it must be {allowed}.")
    return one_line(f"{key}: {reason.strip().partition(chr(10))[0]}" if key else message)


def _places(name: str) -> Iterator[str]:
    """Yield options of the Trainer, and of some study or its data, that end in a name."""
    import lightning as L

    kinds = {"model": L.LightningModule, "data": L.LightningDataModule}
    for part, base in kinds.items():
        own = (kind for kind in subclasses(base) if kind.__module__.startswith("lincorr_lightning"))
        if any(name in signature(kind).parameters for kind in own):
            yield f"{part}.{name}"
    if name in signature(L.Trainer).parameters:
        yield f"trainer.{name}"


def _explain_loose_word(word: str, args: Sequence[str], takes_lm: bool) -> str:
    """Return what to do with a word that belongs to no option."""
    before = [arg for arg in args[: args.index(word)] if arg[:1] == "-"]
    if not before:
        name = word if word.endswith((".yaml", ".yml")) else f"configs/{word}.yaml"
        meant = f"--lm {word}" if takes_lm else f"--config {name}"
        return f"{word!r} belongs to no option. Did you mean {meant}?"
    option = before[-1]
    value = f'{option.partition("=")[0]} "[{args[args.index(word) - 1]}, {word}]"'
    return f"{word!r} belongs to no option. Write a list in brackets and quotes: {value}"


def one_line(text: object) -> str:
    """Return a message in one line, without Python's notation of classes and objects."""
    line = re.sub(r"<(?:class ')?(?:\w+\.)*(\w+)(?:'| object at 0x\w+)>", r"\1", str(text))
    line = " ".join(line.replace("typing.", "").split())
    return line if len(line) <= _MAX_LENGTH else f"{line[:_MAX_LENGTH]} …"


def _suggest(name: str, known: Collection[str], prefix: str = "") -> str:
    similar = get_close_matches(name, known, 1, cutoff=0.75)
    return f"; did you mean {prefix}{similar[0]}?" if similar else ""


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
