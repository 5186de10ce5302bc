"""Error messages for unknown options and classes: the new name, or the most similar one."""

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


def explain(message: str, options: Collection[str], args: Sequence[str] = ()) -> str:
    """Return one line about an unknown option or class; other messages are returned as they are.

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
    return message


def _first(pattern: str, text: str) -> str:
    match = re.search(pattern, text)
    return match[1] if match else ""


def _explain_class(name: str, key: str, args: Sequence[str]) -> str:
    if name in RENAMED_CLASSES:
        return f"{name} is now {RENAMED_CLASSES[name]}{_origin(name, args)}."
    known = {
        kind.__name__
        for base in (L.LightningModule, L.LightningDataModule, L.Callback)
        for kind in _subclasses(base)
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
    where = f"there is no option {full}{_origin(last, args)}"
    if not class_path:
        # A group that is written wrongly: model, data, trainer.
        group, dot, rest = option.partition(".")
        groups = {one.partition(".")[0] for one in options}
        near = difflib.get_close_matches(group, groups, 1)
        if dot and group not in groups and near:
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
    for arg in args:
        path = Path(arg.rpartition("=")[2])
        if path.suffix in (".yaml", ".yml") and path.is_file():
            text = path.read_text(encoding="utf-8", errors="replace")
            if re.search(rf"\b{re.escape(name)}\b", re.sub(r"#.*", "", text)):
                return f" (in {path})"
    return ""


def _subclasses(kind: type[Any]) -> Iterator[type[Any]]:
    for below in type.__subclasses__(kind):
        yield below
        yield from _subclasses(below)


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
