"""Reading edits that a user wrote: JSONL, CSV, or a list in a config."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NamedTuple

from lightning.pytorch.utilities import rank_zero_warn

from lincorr_lightning.data.files import read_rows
from lincorr_lightning.errors import SubjectsError

REQUIRED = ("subject", "answer")
OPTIONAL = ("reference",)
SEPARATOR = "|"
"""Separates the target answers of a reference that has several."""


class RawEdit(NamedTuple):
    """An edit as a user wrote it.

    Attributes:
        where: File and line, or number in a list, for messages.
        subject: The subject.
        answer: The new source answer.
        reference: Target answers that are right then; empty for the relation's own.
    """

    where: str
    subject: str
    answer: str
    reference: tuple[str, ...] = ()


def read_edits(path: str | Path) -> list[RawEdit]:
    """Read a file of edits.

    Args:
        path: ``.jsonl`` (one object per line) or ``.csv`` (with a header), in UTF-8, with
            ``subject`` and ``answer`` of each edit, and ``reference`` where it is not the
            relation's (a list, or one text with ``|`` between its answers). Other fields are
            ignored.

    Warns:
        UserWarning: A subject has several answers; each is a separate edit.

    Raises:
        SubjectsError: The file cannot be read, holds no edit, or has an invalid line; the message
            says which.
    """
    edits = _checked(read_rows(path, "edits", REQUIRED, OPTIONAL))
    if not edits:
        raise SubjectsError(f"{path} holds no edit. Write one per line, with subject and answer.")
    return edits


def check_edits(entries: Iterable[Mapping[str, Any]]) -> list[RawEdit]:
    """Read edits from a list.

    Raises:
        SubjectsError: The list is empty or an entry is invalid; the message says which, from 1.
    """
    edits = _checked((f"edit {number}", entry) for number, entry in enumerate(entries, 1))
    if not edits:
        raise SubjectsError("the list of edits is empty. Write at least one, or null for none.")
    return edits


def _checked(entries: Iterable[tuple[str, Any]]) -> list[RawEdit]:
    edits: dict[tuple[str, str], RawEdit] = {}
    by_subject: dict[str, list[RawEdit]] = {}
    for where, entry in entries:
        edit = _edit(entry, where)
        first = edits.setdefault((edit.subject, edit.answer), edit)
        if first is not edit:
            raise SubjectsError(
                f"{where}: {edit.subject!r} is taught {edit.answer!r} already, at {first.where}. "
                "Remove one of them."
            )
        by_subject.setdefault(edit.subject, []).append(edit)
    several = [own for own in by_subject.values() if len(own) > 1]
    if several:
        one, other = several[0][:2]
        rank_zero_warn(
            f"{len(several)} of {len(by_subject)} subjects are taught several answers, such as "
            f"{one.subject!r}: {one.answer!r} ({one.where}) and {other.answer!r} ({other.where}). "
            "Each is a separate edit; with model.protocol joint, they contradict each other."
        )
    return list(edits.values())


def _edit(entry: Any, where: str) -> RawEdit:
    if not isinstance(entry, Mapping):
        raise SubjectsError(
            f'{where}: an object is needed, such as {{"subject": "Ada", "answer": "Paris"}}, not '
            f"{entry!r}."
        )
    fields = (*REQUIRED, *OPTIONAL)
    for name in entry:
        meant = get_close_matches(str(name), fields, 1, 0.8) if name not in fields else []
        # Silently ignored, a misspelled reference would be replaced by the relation's own.
        if meant and meant[0] not in entry:
            raise SubjectsError(f"{where}: there is no field {name!r}. Did you mean {meant[0]!r}?")
    texts = {}
    for name in REQUIRED:
        if entry.get(name) is None:
            raise SubjectsError(
                f"{where}: {name!r} is missing. Each edit needs subject and answer."
            )
        texts[name] = _text(entry[name], name, where)
    return RawEdit(where, **texts, reference=_reference(entry.get("reference"), where))


def _reference(value: Any, where: str) -> tuple[str, ...]:
    if value is None or (isinstance(value, str) and not value.strip()):
        return ()
    parts = value.split(SEPARATOR) if isinstance(value, str) else value
    if not isinstance(parts, list) or not parts:
        raise SubjectsError(
            f"{where}: 'reference' is {value!r}; it must be a text or a list of texts."
        )
    return tuple(_text(part, "reference", where) for part in parts)


def _text(value: Any, name: str, where: str) -> str:
    if not isinstance(value, str) or not value.strip():
        raise SubjectsError(f"{where}: {name!r} is {value!r}; it must be a non-empty text.")
    return value.strip()
