"""Files that users name: rows of JSON or CSV, texts, and subjects.

They are in UTF-8. Every error is a `SubjectsError` that names the file and, if there is one, the
line.
"""

import csv
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

from lincorr_lightning.errors import SubjectsError, require_one_of
from lincorr_lightning.io import parse_json, text_file
from lincorr_lightning.knowledge.yaml_file import read_knowledge_file

SampleBy = Literal["line", "document"]  #: What a ``.txt`` file holds: a text per line, or one text.

SUFFIXES = (".txt", ".jsonl", ".csv")


class Text(NamedTuple):
    """A text, its file and line (for messages), and the name that the texts of a corpus share."""

    where: str
    corpus: str
    text: str


def _lines(path: Path, what: str) -> Iterator[str]:
    """Yield lines; not `str.splitlines`, which also splits at characters that a text may hold."""
    try:
        with text_file(path).open(encoding="utf-8-sig") as file:
            yield from file
    except (OSError, UnicodeDecodeError) as error:
        way_out = "" if isinstance(error, OSError) else " Save it in UTF-8."
        raise SubjectsError(f"the {what} in {path} cannot be read: {error}.{way_out}") from error


def _filled_lines(path: Path, what: str) -> Iterator[tuple[str, str]]:
    for number, line in enumerate(_lines(path, what), 1):
        if line.strip():
            yield f"{path}, line {number}", line.strip()


def read_subjects(path: str | Path, setting: str = "data.subjects_file") -> list[str]:
    """Return the subjects of a text file, one per line, or of a ``.json`` relation of LRE.

    The file is named by a `setting`.
    """
    if Path(path).suffix.lower() == ".json":
        return list(dict.fromkeys(subject for subject, _ in read_knowledge_file(path).samples))
    subjects: dict[str, None] = {}
    for where, subject in _filled_lines(Path(path), f"subjects of {setting}"):
        if subject in subjects:
            raise SubjectsError(f"{setting} {where}: {subject!r} is there twice. Remove one.")
        subjects[subject] = None
    return list(subjects)


def read_rows(path: str | Path, what: str, needed: Sequence[str] = ()) -> Iterator[tuple[str, Any]]:
    """Yield file and row, for messages, and the content of each row, whose fields are unchecked.

    A ``.jsonl`` file has an object per line, a ``.json`` file a list of them; a header of ``.csv``
    or ``.tsv``, separated by commas, semicolons or tabs, must have the columns `needed`; a folder
    has files ``*case_N.json`` of an object each.
    """
    path = Path(path)
    cases = path.glob("*case_*.json")  # MEMIT's ``1_edits-case_7.json``; none if this is no folder
    if in_order := sorted(cases, key=lambda case: (len(case.name), case.name)):
        return chain.from_iterable(_json_rows(case, what) for case in in_order)
    match path.suffix.lower():
        case ".jsonl":
            return ((where, _json(line, where)) for where, line in _filled_lines(path, what))
        case ".json":
            return _json_rows(path, what)
        case ".csv" | ".tsv":
            return _csv_rows(path, what, needed)
    which = "Name one of .jsonl, .json, .csv, .tsv. A folder must have files case_N.json."
    raise SubjectsError(f"{path} is no file of {what}. {which}")


def _json(text: str, where: str) -> Any:
    try:
        return parse_json(text)
    except (ValueError, RecursionError) as error:
        raise SubjectsError(
            f"{where}: no JSON ({error}). Write an object per line of a .jsonl file, or a list of "
            "objects in a .json file."
        ) from error


def _json_rows(path: Path, what: str) -> Iterator[tuple[str, Any]]:
    rows = _json("".join(_lines(path, what)), str(path))
    match rows:
        case {"columns": list(), "data": list()}:  # where a column may be there twice
            raise SubjectsError(f'{path}: pandas wrote orient="split". Write orient="records".')
        case {"schema": dict(), "data": list(data)}:
            rows = data
        case dict() if all(
            isinstance(x, dict) and x and all(map(str.isdigit, x)) for x in rows.values()
        ):
            numbers = dict.fromkeys(number for column in rows.values() for number in column)
            rows = [{name: column.get(i) for name, column in rows.items()} for i in numbers]
        case dict() if all(map(str.isdigit, rows)):
            rows = list(rows.values())
    for number, row in enumerate(rows if isinstance(rows, list) else [rows], 1):
        yield f"{path}, row {number}", row


def _csv_rows(path: Path, what: str, needed: Sequence[str]) -> Iterator[tuple[str, Any]]:
    lines = _lines(path, what)
    first_lines = [next(lines, ""), next(lines, "")]

    def fit(delimiter: str) -> tuple[bool, int]:
        rows = csv.reader(first_lines, delimiter=delimiter, skipinitialspace=True)
        n, *others = [len(row) for row in rows]
        return others == [n] and n > 1, n

    csv.field_size_limit(2**31 - 1)  # texts may be long
    delimiter = max("\t,;" if path.suffix.lower() == ".tsv" else ",;\t", key=fit)
    reader = csv.reader(
        chain(first_lines, lines), delimiter=delimiter, strict=True, skipinitialspace=True
    )
    last_line = 0
    try:
        header = [name.strip() for name in next(reader)]
        if missing := [name for name in needed if name not in header]:
            raise SubjectsError(f"{path}, line 1: the header lacks {', '.join(missing)}.")
        if twice := [name for name, n in Counter(header).items() if name and n > 1]:
            raise SubjectsError(f"{path}, line 1: the header has {twice[0]!r} twice. Rename one.")
        last_line = reader.line_num
        for row in filter(None, reader):
            where = f"{path}, line {reader.line_num}"
            if len(row) > len(header):
                raise SubjectsError(
                    f"{where}: more fields than in the header. Quote those with a {delimiter!r}."
                )
            last_line = reader.line_num
            yield where, dict(zip_longest(header, row))
    except csv.Error as error:
        raise SubjectsError(
            f"{path}, line {last_line + 1}: this is not CSV ({error}). Check its double quotes."
        ) from error


def read_texts(
    paths: str | Path | Sequence[str | Path],
    key: str = "text",
    sample_by: SampleBy = "line",
    owner: str = "data",
) -> Iterator[Text]:
    """Read texts from files and folders; blank ones are left out.

    A ``.txt`` file has a text per line, or is one text with ``sample_by="document"``; a ``.jsonl``
    or ``.csv`` file has a text per row, in the field `key`. Folders are searched for such files at
    any depth, in the order of their names; hidden files are ignored.

    The corpus of a text is the field ``corpus`` of its row if there is one, else the name of its
    file; documents of a folder are one corpus, named after the folder. `owner` is the prefix of the
    settings in messages, as ``data`` of ``data.texts``.
    """
    require_one_of(f"{owner}.sample_by", sample_by, get_args(SampleBy))
    for path in map(Path, [paths] if isinstance(paths, (str, Path)) else paths):
        is_empty = True
        for file in _files(path, owner):
            for text in _texts(file, key, sample_by, owner):
                is_empty = False
                yield text
        if is_empty:
            known = ", ".join(SUFFIXES)
            raise SubjectsError(f"{owner}.texts {path} holds no text. Put {known} files there.")


def _files(path: Path, owner: str) -> list[Path]:
    if path.is_dir():
        inside = (file.relative_to(path) for file in path.rglob("*") if file.is_file())
        texts = (file for file in inside if file.suffix.lower() in SUFFIXES)
        return sorted(path / f for f in texts if not any(part.startswith(".") for part in f.parts))
    if not path.exists() or path.suffix.lower() not in SUFFIXES:
        raise SubjectsError(
            f"{owner}.texts {path} must be a folder, or a {', '.join(SUFFIXES)} file that exists."
        )
    return [path]


def _texts(file: Path, key: str, sample_by: SampleBy, owner: str) -> Iterator[Text]:
    if file.suffix.lower() == ".txt" and sample_by == "line":
        for where, line in _filled_lines(file, "texts"):
            yield Text(where, file.stem, line)
    elif file.suffix.lower() == ".txt":
        whole = "".join(_lines(file, "texts"))
        if whole.strip():
            yield Text(str(file), file.resolve().parent.name, whole)
    else:
        for where, row in read_rows(file, "texts", (key,)):
            text = row.get(key) if isinstance(row, Mapping) else None
            if not isinstance(text, str):
                raise SubjectsError(
                    f"{where}: {key!r} is {text!r}, not a text. Name its field as {owner}.key."
                )
            if text.strip():
                yield Text(where, str(row.get("corpus") or file.stem), text)
