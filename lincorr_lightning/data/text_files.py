"""Texts from files and folders: the one reader behind every ``texts`` setting."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

from lincorr_lightning.data.row_files import read_rows
from lincorr_lightning.errors import SubjectsError
from lincorr_lightning.io import regular_file

SampleBy = Literal["line", "document"]
"""What a ``.txt`` file holds: a text per line, or one text."""

SUFFIXES = (".txt", ".jsonl", ".csv")


class Text(NamedTuple):
    """A text and where it comes from.

    Attributes:
        where: File and line, for messages.
        corpus: Name that the texts of one corpus share.
        text: The text.
    """

    where: str
    corpus: str
    text: str


def read_texts(
    paths: str | Path | Sequence[str | Path],
    key: str = "text",
    sample_by: SampleBy = "line",
    owner: str = "data",
) -> Iterator[Text]:
    r"""Read texts from files and folders; blank ones are left out.

    A ``.txt`` file has a text per line, or is one text with ``sample_by="document"``; a ``.jsonl``
    or ``.csv`` file has a text per row. Folders are searched for such files at any depth, in the
    order of their names; hidden files are ignored.

    The corpus of a text is the field ``corpus`` of its row if there is one, else the name of its
    file; documents of a folder are one corpus, named after the folder.

    Args:
        paths: A file, a folder, or several.
        key: Field of a row that holds its text.
        sample_by: ``line`` or ``document``, for ``.txt`` files.
        owner: Prefix of the settings in messages, as ``data`` of ``data.texts``.

    Raises:
        SubjectsError: A path does not exist, is of another kind or holds no text, a file cannot be
            read, or a row has no text; the message names the file and line.

    Example:
        >>> import pathlib, tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = pathlib.Path(folder, "a.txt")
        ...     _ = path.write_text("one line, one text\n\nanother text\n")
        ...     [text.text for text in read_texts(path)]
        ['one line, one text', 'another text']
    """
    if sample_by not in ("line", "document"):
        raise SubjectsError(f"{owner}.sample_by is {sample_by!r}; it must be line or document.")
    for path in map(Path, [paths] if isinstance(paths, (str, Path)) else paths):
        is_empty = True
        for file in _files(path, owner):
            for text in _read_file(file, key, sample_by, owner):
                is_empty = False
                yield text
        if is_empty:
            raise SubjectsError(
                f"{owner}.texts {path} holds no text. Put {', '.join(SUFFIXES)} files there, or "
                "name another file or folder."
            )


def _files(path: Path, owner: str) -> list[Path]:
    if path.is_dir():
        return sorted(
            file for file in path.rglob("*") if file.is_file() and _has_text(file.relative_to(path))
        )
    if not path.exists():
        raise SubjectsError(f"{owner}.texts {path} does not exist. Name a file or a folder.")
    if path.suffix.lower() not in SUFFIXES:
        raise SubjectsError(
            f"{owner}.texts {path} is not a {', '.join(SUFFIXES)} file. Name one of these kinds."
        )
    return [path]


def _has_text(file: Path) -> bool:
    is_hidden = any(part.startswith(".") for part in file.parts)
    return file.suffix.lower() in SUFFIXES and not is_hidden


def _read_file(file: Path, key: str, sample_by: SampleBy, owner: str) -> Iterator[Text]:
    if file.suffix.lower() == ".txt":
        yield from _read_plain(file, sample_by)
        return
    for where, row in read_rows(file, "texts", (key,), ("corpus",)):
        text = row.get(key) if isinstance(row, Mapping) else None
        if not isinstance(text, str):
            raise SubjectsError(
                f"{where}: {key!r} is {text!r}; each row needs a text there. Name the right field "
                f"as {owner}.key."
            )
        if text.strip():
            yield Text(where, str(row.get("corpus") or file.stem), text)


def _read_plain(file: Path, sample_by: SampleBy) -> Iterator[Text]:
    try:
        if sample_by == "document":
            whole = regular_file(file).read_text(encoding="utf-8-sig")
            if whole.strip():
                yield Text(str(file), file.resolve().parent.name, whole)
            return
        with regular_file(file).open(encoding="utf-8-sig") as lines:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    yield Text(f"{file}, line {number}", file.stem, line.strip())
    except (OSError, UnicodeDecodeError) as error:
        raise SubjectsError(f"the texts in {file} cannot be read: {error}.") from error
