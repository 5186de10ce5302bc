"""Whole texts from a file or a folder of files."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from lincorr_lightning.data.row_files import read_rows
from lincorr_lightning.data.tiny_world.texts import Text
from lincorr_lightning.errors import SubjectsError

KINDS = (".txt", ".jsonl", ".csv")


def read_texts(path: str | Path, key: str = "text", who: str = "data") -> Iterator[Text]:
    """Read texts, in the order of their files' names.

    Args:
        path: A ``.txt`` file, which is one text; a ``.jsonl`` or ``.csv`` file, which has one a
            row; or a folder with such files at any depth. A text's corpus is what its row has as
            ``corpus``, else its file's name, and for ``.txt`` its folder's.
        key: Where a row has its text.
        who: Whose setting the path is, for messages.

    Raises:
        SubjectsError: There is no such file or folder, no text in it, or a row that has none; it says
            which.
    """
    path = Path(path)
    if not path.exists():
        raise SubjectsError(f"{who}.texts {path} does not exist. Name a file or a folder.")
    if path.is_file() and path.suffix.lower() not in KINDS:
        raise SubjectsError(f"{who}.texts {path} is no {', '.join(KINDS)} file.")
    files = [path] if path.is_file() else sorted(p for p in path.rglob("*") if _is_text(p))
    empty = True
    for file in files:
        for text in _texts_of(file, key, who):
            empty = False
            yield text
    if empty:
        raise SubjectsError(
            f"{who}.texts {path} holds no text. Put {', '.join(KINDS)} files there, or leave "
            f"{who}.texts null to take the sample that comes with the package."
        )


def _is_text(path: Path) -> bool:
    hidden = any(part.startswith(".") for part in path.parts)
    return path.suffix.lower() in KINDS and path.is_file() and not hidden


def _texts_of(file: Path, key: str, who: str) -> Iterator[Text]:
    if file.suffix.lower() == ".txt":
        try:
            whole = file.read_text(encoding="utf-8-sig")
        except (OSError, UnicodeDecodeError) as error:
            raise SubjectsError(f"the text {file} cannot be read: {error}.") from error
        if whole.strip():
            yield Text(str(file), file.resolve().parent.name, whole)
        return
    for where, row in read_rows(file, "texts", (key,), ("corpus",)):
        text = row.get(key) if isinstance(row, Mapping) else None
        if not isinstance(text, str):
            raise SubjectsError(
                f"{where}: {key!r} is {text!r}; each row needs a text there. Name the right field "
                f"as {who}.key."
            )
        corpus = row.get("corpus")
        yield Text(where, str(corpus) if corpus else file.stem, text)
