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


def read_edits(edits: str | Path | Iterable[Mapping[str, Any]]) -> list[RawEdit]:
    """Read edits from a file, or from a list.

    Args:
        edits: ``.jsonl`` (one object per line), ``.csv`` (with a header) or a list, with
            ``subject`` and ``answer`` of each edit, and ``reference`` where it is not the
            relation's (a list, or one text with ``|`` between its answers). Other fields are
            ignored.

    Warns:
        UserWarning: A subject has several answers; each is a separate edit.

    Raises:
        SubjectsError: The file cannot be read, there is no edit, or one is invalid; the message
            has the line, or the number in the list from 1.
    """
    if isinstance(edits, (str, Path)):
        name, entries = str(edits), read_rows(edits, "edits", REQUIRED, OPTIONAL)
    else:
        name = "the list of edits"
        entries = ((f"edit {number}", entry) for number, entry in enumerate(edits, 1))
    checked: dict[tuple[str, str], RawEdit] = {}
    by_subject: dict[str, list[RawEdit]] = {}
    for where, entry in entries:
        edit = _checked(entry, where)
        first = checked.setdefault((edit.subject, edit.answer), edit)
        if first is not edit:
            raise SubjectsError(
                f"{where}: {edit.subject!r} is taught {edit.answer!r} already, at {first.where}. "
                "Remove one of them."
            )
        by_subject.setdefault(edit.subject, []).append(edit)
    if not checked:
        raise SubjectsError(f"{name} has no edit. Write at least one, with subject and answer.")
    several = [group for group in by_subject.values() if len(group) > 1]
    if several:
        one, other = several[0][:2]
        rank_zero_warn(
            f"{len(several)} of {len(by_subject)} subjects are taught several answers, such as "
            f"{one.subject!r}: {one.answer!r} ({one.where}) and {other.answer!r} ({other.where}). "
            "Each is a separate edit; with model.protocol joint, they contradict each other."
        )
    return list(checked.values())


def _checked(entry: Any, where: str) -> RawEdit:
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
    for name in REQUIRED:
        if entry.get(name) is None:
            raise SubjectsError(
                f"{where}: {name!r} is missing. Each edit needs subject and answer."
            )
    subject, answer = (_text(entry[name], name, where) for name in REQUIRED)
    reference = entry.get("reference")
    if isinstance(reference, str):
        reference = reference.split(SEPARATOR) if reference.strip() else None
    if reference is not None and (not isinstance(reference, list) or not reference):
        raise SubjectsError(
            f"{where}: 'reference' is {reference!r}; it must be a text or a list of texts."
        )
    parts = [_text(part, "reference", where) for part in reference or ()]
    return RawEdit(where, subject, answer, tuple(parts))


def _text(value: Any, name: str, where: str) -> str:
    if not isinstance(value, str) or not value.strip():
        raise SubjectsError(f"{where}: {name!r} is {value!r}; it must be a non-empty text.")
    return value.strip()
