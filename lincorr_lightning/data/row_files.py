"""Files with a row per item: JSONL or CSV."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from lincorr_lightning.errors import SubjectsError
from lincorr_lightning.io import parse_json, regular_file


def read_rows(
    path: str | Path, what: str, needed: Sequence[str], optional: Sequence[str] = ()
) -> Iterator[tuple[str, Any]]:
    """Read a file row by row.

    Args:
        path: ``.jsonl`` (an object per line) or ``.csv`` (with a header), in UTF-8.
        what: Name of the items in messages, such as ``edits``.
        needed: Columns that the header of a CSV must have.
        optional: Columns that it may have, for messages.

    Yields:
        File and line of a row, for messages, and the row unchecked: the caller checks its fields.

    Raises:
        SubjectsError: The file cannot be read or is of another kind, or a line is not valid; the
            message names the line.
    """
    path = Path(path)
    try:
        text = regular_file(path).read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise SubjectsError(f"the {what} in {path} cannot be read: {error}.") from error
    if path.suffix.lower() == ".jsonl":
        yield from _json_lines(text, path)
    elif path.suffix.lower() == ".csv":
        yield from _csv_lines(text, path, needed, optional)
    else:
        raise SubjectsError(
            f"{path} is neither .jsonl nor .csv. Name a file of {what} of one of these kinds."
        )


def _json_lines(text: str, path: Path) -> Iterator[tuple[str, Any]]:
    # Not splitlines, which also splits at characters that a JSON string may hold.
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        where = f"{path}, line {number}"
        try:
            yield where, parse_json(line, allow_surrogates=False)
        except ValueError as error:
            raise SubjectsError(
                f"{where}: this is not JSON ({error}). Write one object per line."
            ) from error


def _csv_lines(
    text: str, path: Path, needed: Sequence[str], optional: Sequence[str]
) -> Iterator[tuple[str, Any]]:
    reader = csv.DictReader(io.StringIO(text, newline=""), strict=True, skipinitialspace=True)
    good = 0
    try:
        header = [name.strip() for name in reader.fieldnames or ()]
        missing = [name for name in needed if name not in header]
        if missing:
            may = f", and may have {_listed(optional)}" if optional else ""
            raise SubjectsError(
                f"{path}, line 1: the header lacks {_listed(missing)}. It must have "
                f"{_listed(needed)}{may}."
            )
        if len(set(header)) < len(header):
            twice = next(name for name in header if header.count(name) > 1)
            raise SubjectsError(f"{path}, line 1: the header has {twice!r} twice. Remove one.")
        reader.fieldnames = header
        good = reader.line_num
        for entry in reader:
            where = f"{path}, line {reader.line_num}"
            if None in entry:
                raise SubjectsError(
                    f"{where}: there are more fields than the header has. Put a field that holds "
                    "a comma in double quotes."
                )
            good = reader.line_num
            yield where, entry
    except csv.Error as error:
        raise SubjectsError(
            f"{path}, line {good + 1}: this is not CSV ({error}). Check its double quotes."
        ) from error


def _listed(names: Sequence[str]) -> str:
    return " and ".join(filter(None, (", ".join(names[:-1]), names[-1])))
