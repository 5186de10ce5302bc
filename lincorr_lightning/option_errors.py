"""Error messages for wrong options, classes and values, in one line of plain words."""

from __future__ import annotations

import difflib
import importlib
import inspect
import re
import sys
import typing
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, NoReturn

import lightning as L
from lightning.pytorch.cli import LightningArgumentParser

RENAMED_OPTIONS = {
    "knowledges": "knowledge",
    "precision": "require_reference",
    "given": "partial_out",
    "n_inputs": "n_subjects",
    "words_per_input": "words_per_subject",
    "inputs_file": "subjects_file",
    "predict_inputs": "predict_subjects",
    "tie": "embedding_source",
    "together": "cooccurrence",
    "mixed": "mixup_fraction",
    "read_in_full": "full_loss_fraction",
    "uncomposed": "skip_compose_baseline",
    "auxiliary": "aux_loss_coef",
    "l1": "l1_coef",
    "dead_after": "dead_after_steps",
    "n_held_out": "n_texts",
}
"""Options of releases before 0.2, by the last part of their name."""

RENAMED_CLASSES = {
    "PromptInputs": "SubjectsDataModule",
    "TextPrompts": "TokenizedTextDataModule",
    "FeatureFlowStudy": "FeatureFlow",
    "InPiecesStrategy": "ShardedStrategy",
    "TokenGeometry": "TokenGeometryMonitor",
}
"""Classes of releases before 0.2; `TokenGeometry` was a callback beside the study of that name."""

_CLASS_ERRORS = (
    r"module '[\w.]+' has no attribute '(\w+)'",
    r"Expected a dot import path string: (\w+)\s",
)
_OPTION_ERRORS = (
    r"Option '([^']+)' is not accepted",
    r"Group '([^']+)' does not accept option '([^']+)'",
    r"Subcommand '\w+' does not accept option '([^']+)'",
    r"unrecognized arguments: --([^\s=]+)",
)


# Longer messages of libraries are truncated.
_MAX_LENGTH = 400


class OptionParser(LightningArgumentParser):
    """Parser that names the nearest option in one line, instead of listing all of them."""

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """Write the error and exit.

        Raises:
            SystemExit: Always, with status 2, in the parser of a program.
        """
        if not self.exit_on_error:
            super().error(message, ex)
        parser = getattr(ex, "subcommand_parser", None) or self
        options = [option.removeprefix("--") for option in parser._option_string_actions]
        sys.stderr.write(f"lincorr: error: {explain(message, options, sys.argv[1:])}\n")
        self.exit(2)


class HelpParser(OptionParser):
    """Parser of command lines that show help: it reads the docstrings below dataclass fields too.

    A class of its own, because jsonargparse keeps the parsers that it made, by their class.
    """


def sections_of(parser: LightningArgumentParser) -> set[str]:
    """Return the keys that a config of a command may have."""
    found = {action.dest.partition(".")[0] for action in parser._actions}
    return found - {"config", "help", "print_config"}


def explain(message: str, options: Collection[str], args: Sequence[str] = ()) -> str:
    """Return one line about a wrong option, class or value.

    Args:
        message: Message of jsonargparse.
        options: Names of the program's own options, as ``trainer.max_epochs``.
        args: Command line; config files that it names are searched for the option.

    Example:
        >>> explain("unrecognized arguments: --trainer.max_epoch=3", ["trainer.max_epochs"])
        'there is no option trainer.max_epoch; did you mean trainer.max_epochs?'
    """
    key = _first(r'Parser key "([^"]+)"', message)
    name = next((found for form in _CLASS_ERRORS if (found := _first(form, f"{message} "))), "")
    if key.startswith("trainer.callbacks") and re.search(r"\bTokenGeometry\b", message):
        name = "TokenGeometry"
    if name:
        return _explain_class(name, key, args)
    for form in _OPTION_ERRORS:
        match = re.search(form, message)
        if match:
            option = ".".join(match.groups()).replace("init_args.", "")
            class_path = _first(r"Problem with given class_path '([^']+)'", message)
            return _explain_option(option, key, class_path, options, args)
    return _explain_value(message, args)


def _first(pattern: str, text: str) -> str:
    match = re.search(pattern, text)
    return match[1] if match else ""


_TYPES = {
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "str": "text",
    "list": "a list, such as [a, b]",
    "tuple": "a list, such as [a, b]",
    "collections.abc.Iterable": "a list, such as [a, b]",
    "dict": "a mapping, such as {a: 1}",
    "NoneType": "null",
}
_CLASSES = {
    "LightningModule": "a study",
    "LightningDataModule": "a datamodule",
    "Callback": "a callback",
    "Logger": "a logger",
}
"""Types and base classes as a user would call them."""


def _explain_value(message: str, args: Sequence[str]) -> str:
    """Return one line about a wrong value; other messages are joined to one line."""
    if "subcommand" in message:
        return "name a command first: lincorr fit, validate, test, predict, audit or report."
    if "argument after ** must be a mapping" in message:
        return "a group of settings, such as model.lm, is null. Leave it out for its defaults."
    key, reason = _deepest(message)
    refused = _first(r"Importing '([^']+)' is not allowed", message)
    if refused:
        return (
            f"--safe refuses {refused}{_origin(refused, args)}: it is not a class of this package, "
            "Lightning or torch that is allowed. Leave --safe out if you trust the config."
        )
    missing = _first(r"the following arguments are required: ([^\n]+)", message)
    if missing in ("model", "data") or re.search(r"\.(model|data)$", missing):
        names = " and ".join(f"--{each.rpartition('.')[2]}" for each in missing.split(", "))
        return f"{names} is missing. Pass a study's config, such as configs/linear_probe.yaml."
    if missing:
        owner = _first(r"Problem with given class_path '([^']+)'", message).rpartition(".")[2]
        return f"{key}: {owner or 'the command'} needs {missing}."
    if "No module named" in reason:
        path = _first(r"class_path '([^']+)'", reason)
        return f"{key}: {path} cannot be imported{_origin(path, args)}. Give it as module.Class."
    kind = _first(r"subclass of (\w+)", reason)
    value = _value(message, reason)
    if kind:
        owner = _CLASSES.get(kind, f"a {kind}")
        which = f"{value}, which is not" if value not in ("invalid", "empty") else "not"
        return f"{key} is {which} {owner}. Give a class, or class_path and init_args."
    where = _origin(key.rpartition(".")[2], args)
    if "Unable to load config" in reason:
        unread = _first(r"Unable to load config ['\"](.*)['\"]", reason)
        return f"{key} is {unread}{where}; it must be a mapping of settings, or a file of them."
    wanted = _types(reason)
    if key and wanted:
        return f"{key} is {value}{where}; it must be {wanted}."
    return _one_line(f"{key}: {reason}" if key else message)


def _deepest(message: str) -> tuple[str, str]:
    """Return the full key that jsonargparse refuses, and its message about the value."""
    parts: list[str] = []
    indent, reason = -1, message
    for found in re.finditer(r'^([ -]*)Parser key "([^"]+)":', message, re.MULTILINE):
        if len(found[1]) <= indent:
            break
        indent, reason = len(found[1]), message[found.end() :]
        if not parts or parts[-1] != found[2]:
            parts.append(found[2])
    lines = reason.split("\n")
    inner = [line for line in lines[1:] if len(line) - len(line.lstrip()) > indent]
    return ".".join(parts), "\n".join([lines[0], *inner])


def _value(message: str, reason: str) -> str:
    value = _first(r"Got value: (.*)", reason) or _first(r"Given value: (.*)", message)
    nested = _first(r"^NestedArg\(key='[^']*', val=(.*)\)$", value)
    value = nested.strip("'") or value
    if not value or "Namespace(" in value or len(value) > 100:
        return "invalid" if value else "empty"
    return value


def _types(reason: str) -> str:
    found: dict[str, None] = {}
    for name in re.findall(r"Expected an? (<class '[^']+'>|typing\.Literal\[[^\]]*\])", reason):
        if name.startswith("typing"):
            found |= dict.fromkeys(each.strip("' ") for each in name[15:-1].split(","))
        else:
            found[_TYPES.get(name[8:-2], f"a {name[8:-2].rpartition('.')[2]}")] = None
    if "a number" in found:
        found.pop("a whole number", None)
    # A value may also be null wherever a class may be left out.
    if not found:
        return ""
    *others, last = found if found.keys() != {"null"} else ["a class with its settings"]
    return f"{', '.join(others)} or {last}" if others else last


def _one_line(text: str) -> str:
    text = re.sub(r"<(?:\w+\.)*(\w+) object at 0x\w+>", r"\1", text)
    text = " ".join(re.sub(r"<class '(?:\w+\.)*(\w+)'>", r"\1", text).split())
    return text if len(text) <= _MAX_LENGTH else f"{text[:_MAX_LENGTH]} …"


def _explain_class(name: str, key: str, args: Sequence[str]) -> str:
    if name in RENAMED_CLASSES:
        return f"{name} is now {RENAMED_CLASSES[name]}{_origin(name, args)}."
    bases = {"model": L.LightningModule, "data": L.LightningDataModule}
    known = {
        kind.__name__
        for kind in subclasses(bases.get(key, L.Callback))
        if kind.__module__.startswith("lincorr_lightning")
    }
    where = f"{key}: there is no class {name}{_origin(name, args)}"
    return where + (_nearest(name, known) or ". Give the path to import it by, as module.Class.")


def _explain_option(
    option: str, key: str, class_path: str, options: Collection[str], args: Sequence[str]
) -> str:
    full = f"{key}.{option}" if key else option
    head, _, last = option.rpartition(".")
    own = list(_parameters(class_path)) if class_path else []
    known = own or options
    new = RENAMED_OPTIONS.get(last)
    if new and (not own or new in {one.rpartition(".")[2] for one in own}):
        renamed = ".".join(part for part in (key, head, new) if part)
        return f"{full} is now {renamed}{_origin(last, args)}."
    group, dot, rest = option.partition(".")
    groups = {one.partition(".")[0] for one in options}
    # A group that is written wrongly: model, data, trainer.
    is_wrong_group = bool(dot) and not class_path and group not in groups
    where = f"there is no option {full}{_origin(group if is_wrong_group else last, args)}"
    if is_wrong_group:
        near = difflib.get_close_matches(group, groups, 1)
        if near:
            return f"{where}; did you mean {near[0]}.{rest}?"
    prefix = f"{key}." if class_path else ""
    fallback = "; `lincorr COMMAND --help` lists them."
    if class_path:
        fallback = f"; `--{key}.help {class_path.rpartition('.')[2]}` lists them."
    return where + (_nearest(option, known, prefix) or fallback)


def _nearest(name: str, known: Iterable[str], prefix: str = "") -> str:
    near = difflib.get_close_matches(name, list(known), 1)
    return f"; did you mean {prefix}{near[0]}?" if near else ""


def _origin(name: str, args: Sequence[str]) -> str:
    """Name the config file that has an option or class, unless the command line has it."""
    if any(re.search(rf"\b{re.escape(name)}\b", arg) for arg in args if not arg.endswith(".yaml")):
        return ""
    for arg in reversed(args):
        path = Path(arg.rpartition("=")[2])
        if path.suffix in (".yaml", ".yml") and path.is_file():
            text = path.read_text(encoding="utf-8", errors="replace")
            if re.search(rf"\b{re.escape(name)}\b", re.sub(r"#.*", "", text)):
                return f" (in {path})"
    return ""


def subclasses(kind: type[Any]) -> Iterator[type[Any]]:
    """Yield all direct and indirect subclasses of a class."""
    for below in type.__subclasses__(kind):
        yield below
        yield from subclasses(below)


def _parameters(class_path: str) -> Iterator[str]:
    """Yield the parameters of a class, and the fields of those that are dataclasses."""
    module, _, name = class_path.rpartition(".")
    kind: Any = getattr(importlib.import_module(module), name)
    hints = typing.get_type_hints(kind.__init__)
    for parameter in list(inspect.signature(kind).parameters):
        yield parameter
        hint = hints.get(parameter)
        for part in (hint, *typing.get_args(hint)):
            if is_dataclass(part):
                yield from (f"{parameter}.{field.name}" for field in fields(part))
