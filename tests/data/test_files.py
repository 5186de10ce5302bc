"""Texts from files and folders, against files written here."""

import json
from pathlib import Path

import pytest

from lincorr_lightning.data.files import Text, read_texts
from lincorr_lightning.errors import LincorrError


def write(folder: Path, files: dict[str, str]) -> Path:
    for name, content in files.items():
        (folder / name).parent.mkdir(exist_ok=True, parents=True)
        (folder / name).write_text(content, encoding="utf-8")
    return folder


def test_a_txt_file_has_a_text_per_line(tmp_path: Path) -> None:
    path = write(tmp_path, {"a.txt": "\ufeffone, two\r\n\n  three\u2028four  \n"}) / "a.txt"
    assert list(read_texts(path)) == [
        Text(f"{path}, line 1", "a", "one, two"),
        Text(f"{path}, line 3", "a", "three\u2028four"),
    ]


def test_a_txt_file_may_be_one_document(tmp_path: Path) -> None:
    folder = write(tmp_path / "letters", {"b.txt": "one\ntwo\n", "a.txt": "three", "c.txt": " \n"})
    assert list(read_texts(folder, sample_by="document")) == [
        Text(str(folder / "a.txt"), "letters", "three"),
        Text(str(folder / "b.txt"), "letters", "one\ntwo\n"),
    ]


def test_rows_of_jsonl_and_csv(tmp_path: Path) -> None:
    rows = [{"body": "one\ntwo"}, {"body": "  "}, {"body": "three", "corpus": 7}]
    folder = write(
        tmp_path,
        {"a.jsonl": "\n".join(map(json.dumps, rows)), "b.csv": 'body,corpus\n"x, y",mine\nz,\n'},
    )
    paths = [str(folder / "b.csv"), str(folder / "a.jsonl")]
    assert [(text.corpus, text.text) for text in read_texts(paths, key="body")] == [
        ("mine", "x, y"),
        ("b", "z"),
        ("a", "one\ntwo"),
        ("7", "three"),
    ]


def test_a_folder_is_searched_in_order_without_hidden_files(tmp_path: Path) -> None:
    folder = write(
        tmp_path / ".cache" / "texts",
        {
            "b.jsonl": '{"text": "second"}',
            "c/d/one.txt": "third\nfourth",
            "a.CSV": "text\nfirst",
            ".hidden.txt": "no",
            ".git/x.txt": "no",
            "image.png": "no",
        },
    )
    assert [text.text for text in read_texts(folder)] == ["first", "second", "third", "fourth"]


@pytest.mark.parametrize(
    ("files", "name", "options", "message"),
    [
        ({}, "gone", {"owner": "Monitor"}, r"Monitor\.texts .*gone must be a folder, or"),
        ({"f/a.txt": "  "}, "f", {}, r"f holds no text\. Put .txt"),
        (
            {"a.jsonl": '{"text": "x"}\n{"body": "x"}'},
            "a.jsonl",
            {},
            r"a\.jsonl, line 2: 'text' is None, not a text.* as data\.key",
        ),
        ({"a.jsonl": "7"}, "a.jsonl", {}, "line 1: 'text' is None"),
        ({"a.jsonl": "{"}, "a.jsonl", {}, "line 1: no JSON"),
        ({"a.csv": "words\nx"}, "a.csv", {}, r"a\.csv, line 1: the header lacks text"),
    ],
)
def test_files_that_cannot_be_read(tmp_path, files, name, options, message):
    write(tmp_path, files)
    with pytest.raises(LincorrError, match=message):
        list(read_texts(tmp_path / name, **options))
