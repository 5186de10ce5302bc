"""Reading edits that somebody wrote: JSONL, CSV, or a list in a config."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NamedTuple

from lincorr_lightning.data.row_files import read_rows
from lincorr_lightning.errors import SubjectsError

NEEDED = ("subject", "answer")
OPTIONAL = ("reference",)
KNOWN = (*NEEDED, *OPTIONAL)
BETWEEN = "|"
"""Stands between the target answers of a reference that has several."""


class RawEdit(NamedTuple):
    """An edit as somebody wrote it.

    Attributes:
        where: The place it stands at, for messages.
        subject: X.
        answer: What the source is to say.
        reference: What the target should say then; empty where that is the relation's.
    """

    where: str
    subject: str
    answer: str
    reference: tuple[str, ...] = ()


def read_edits(path: str | Path) -> list[RawEdit]:
    """Read a file of edits.

    Args:
        path: ``.jsonl`` (an object a line) or ``.csv`` (with a header), in UTF-8; ``subject`` and
            ``answer`` of each edit, and ``reference`` if it is not that of the relation (a list, or
            one text with ``|`` between its answers). Other fields are left alone.

    Raises:
        SubjectsError: The file cannot be read, holds no edit, or has a bad line; it says which.
    """
    edits = _checked(read_rows(path, "edits", NEEDED, OPTIONAL))
    if not edits:
        raise SubjectsError(f"{path} holds no edit. Write one a line, with subject and answer.")
    return edits


def check_edits(entries: Iterable[Mapping[str, Any]]) -> list[RawEdit]:
    """Take edits from a list.

    Args:
        entries: As the lines of a file.

    Raises:
        SubjectsError: There is none, or one is bad; it says which, counted from 1.
    """
    edits = _checked((f"edit {number}", entry) for number, entry in enumerate(entries, 1))
    if not edits:
        raise SubjectsError("the list of edits is empty. Write at least one, or null for none.")
    return edits


def _checked(entries: Iterable[tuple[str, Any]]) -> list[RawEdit]:
    edits: list[RawEdit] = []
    places: dict[tuple[str, str], str] = {}
    for where, entry in entries:
        edit = _edit(entry, where)
        key = edit.subject, edit.answer
        if key in places:
            raise SubjectsError(
                f"{where}: {edit.subject!r} is taught {edit.answer!r} already, at {places[key]}. "
                "Remove one of them."
            )
        places[key] = where
        edits.append(edit)
    return edits


def _edit(entry: Any, where: str) -> RawEdit:
    if not isinstance(entry, Mapping):
        raise SubjectsError(
            f'{where}: an object is needed, such as {{"subject": "Ada", "answer": "Paris"}}, not '
            f"{entry!r}."
        )
    for name in entry:
        meant = get_close_matches(str(name), KNOWN, 1, 0.8) if name not in KNOWN else []
        # Passed over in silence, the relation's own reference would stand in for it.
        if meant and meant[0] not in entry:
            raise SubjectsError(f"{where}: there is no field {name!r}. Did you mean {meant[0]!r}?")
    texts = {}
    for name in NEEDED:
        if entry.get(name) is None:
            raise SubjectsError(
                f"{where}: {name!r} is missing. Each edit needs subject and answer."
            )
        texts[name] = _text(entry[name], name, where)
    return RawEdit(where, **texts, reference=_reference(entry.get("reference"), where))


def _reference(value: Any, where: str) -> tuple[str, ...]:
    if value is None or (isinstance(value, str) and not value.strip()):
        return ()
    parts = value.split(BETWEEN) if isinstance(value, str) else value
    if not isinstance(parts, list) or not parts:
        raise SubjectsError(
            f"{where}: 'reference' is {value!r}; it must be a text or a list of some."
        )
    return tuple(_text(part, "reference", where) for part in parts)


def _text(value: Any, name: str, where: str) -> str:
    if not isinstance(value, str) or not value.strip():
        raise SubjectsError(f"{where}: {name!r} is {value!r}; it must be a text that is not empty.")
    return value.strip()
