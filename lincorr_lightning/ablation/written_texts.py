"""Texts of the vocabulary ablation that somebody wrote."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from lincorr_lightning.data.row_files import read_rows
from lincorr_lightning.errors import SubjectsError

NEEDED = ("phase", "subject", "source")
OPTIONAL = ("target",)
PHASES = ("compose", "learn")


class WrittenText(NamedTuple):
    """A subject as somebody wrote it.

    Attributes:
        where: The place it stands at, for messages.
        phase: ``compose`` for a pair of texts, ``learn`` for source knowledge alone.
        subject: X.
        source: Its source answer.
    """

    where: str
    phase: str
    subject: str
    source: str


def read_texts(path: str | Path) -> list[WrittenText]:
    """Read a file of texts, such as the ``tables/texts.csv`` that a run writes.

    Args:
        path: ``.jsonl`` or ``.csv``, in UTF-8, with ``phase``, ``subject`` and ``source`` of each.
            The target follows from the relation; a ``target`` column is for people to read.

    Raises:
        SubjectsError: The file cannot be read, has no text of a phase, a bad line, or a subject twice
            or in both phases; it says which line.
    """
    texts: list[WrittenText] = []
    places: dict[str, WrittenText] = {}
    for where, entry in read_rows(path, "texts", NEEDED, OPTIONAL):
        text = _text(entry, where)
        if text.subject in places:
            other = places[text.subject]
            both = "in both phases" if other.phase != text.phase else "twice"
            raise SubjectsError(
                f"{where}: {text.subject!r} is there {both}, also at {other.where}. What is "
                "learned must be about subjects of no other text: remove one of them."
            )
        places[text.subject] = text
        texts.append(text)
    for phase in PHASES:
        if not any(text.phase == phase for text in texts):
            raise SubjectsError(
                f"{path} holds no text of phase {phase!r}. Write a row for each subject, with "
                "phase, subject and source."
            )
    return texts


def _text(entry: Any, where: str) -> WrittenText:
    if not isinstance(entry, Mapping):
        raise SubjectsError(
            f'{where}: an object is needed, such as {{"phase": "compose", "subject": "Ada", '
            f'"source": "Paris"}}, not {entry!r}.'
        )
    fields = {}
    for name in NEEDED:
        value = entry.get(name)
        if not isinstance(value, str) or not value.strip():
            raise SubjectsError(
                f"{where}: {name!r} is {value!r}; each text needs phase, subject and source."
            )
        fields[name] = value.strip()
    if fields["phase"] not in PHASES:
        raise SubjectsError(f"{where}: phase is {fields['phase']!r}; it must be compose or learn.")
    return WrittenText(where, **fields)
