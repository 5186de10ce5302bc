"""Complete files and folders, and the errors of disks that refuse them."""

import errno
import json
import math
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors import SafetensorError

from lincorr_lightning.errors import OutputError, ReportError
from lincorr_lightning.io import (
    atomic_folder,
    atomic_write,
    check_writable,
    new_version,
    read_json,
    regular_file,
    safe_names,
    write_csv,
    write_json,
)


def everything(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


# -- whole files -----------------------------------------------------------------------------


def test_file_is_written_whole_and_replaces_the_old_one(tmp_path: Path) -> None:
    path = tmp_path / "a" / "b" / "results.json"
    for text in ("old", "new"):
        with atomic_write(path) as part:
            assert part.parent == path.parent
            assert part.suffix == ".json"
            part.write_text(text)
            assert not path.exists() or path.read_text() == "old"
    assert path.read_text() == "new"
    assert everything(tmp_path) == ["a", "a/b", "a/b/results.json"]


@pytest.mark.parametrize("call", ["fsync", "rename", "hidden", "safetensors"])
def test_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    """Libraries hide the cause behind an error of their own, or in its message."""

    def refuse(*args: Any, **kwargs: Any) -> Any:
        if call == "safetensors":
            raise SafetensorError("I/O error: No space left on device (os error 28)")
        try:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            if call == "hidden":
                raise RuntimeError("unexpected position") from error
            raise

    path = tmp_path / "tables" / "pairs.csv"
    write_csv(path, ["a"], [["old"]])
    if call in ("fsync", "rename"):
        monkeypatch.setattr(*{"fsync": (os, "fsync"), "rename": (Path, "replace")}[call], refuse)
    message = r"cannot write .*pairs\.csv: .*No space left on device.*\. Make room, or name another"
    with pytest.raises(OutputError, match=message), atomic_write(path) as part:
        part.write_text("new")
        if call not in ("fsync", "rename"):
            refuse()
    assert path.read_text() == "a\nold\n"
    assert everything(tmp_path) == ["tables", "tables/pairs.csv"]


@pytest.mark.parametrize("url", ["s3://b/a", "simplecache::ftp://b/a", "s3:/b/a"])
def test_nothing_is_written_to_a_url(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor to a local folder of that name."""
    monkeypatch.chdir(tmp_path)
    for write in (check_writable, new_version):
        with pytest.raises(OutputError, match=r"b/a.* is a URL"):
            write(Path(url))
    assert everything(tmp_path) == []
    check_writable(tmp_path / "not:" / "C:")


def test_a_file_in_the_way_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("kept")
    for folder in ("file", "file/runs"):
        with pytest.raises(OutputError, match=rf"cannot write {tmp_path}/file.*: .*\. Make room"):
            check_writable(tmp_path / folder)
    assert (tmp_path / "file").read_text() == "kept"


def test_versions_are_made_by_one_run_alone(tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        folders = list(pool.map(lambda _: new_version(tmp_path / "study"), range(40)))
    assert sorted(folder.name for folder in folders) == sorted(f"version_{i}" for i in range(40))


def test_others_may_read_what_the_umask_allows(tmp_path: Path) -> None:
    """Safetensors makes files that only their writer may read."""
    (tmp_path / "ordinary").touch()
    with atomic_write(tmp_path / "file") as part:
        part.unlink()
        part.touch(mode=0o600)
    with atomic_folder(tmp_path / "model", ()) as folder:
        (folder / "weights").touch(mode=0o600)
    modes = {(tmp_path / name).stat().st_mode for name in ("ordinary", "file", "model/weights")}
    assert len(modes) == 1
    assert everything(tmp_path) == ["file", "model", "model/weights", "ordinary"]


# -- whole folders ---------------------------------------------------------------------------


@pytest.mark.parametrize("fails", ["interrupt", "write", "rename"])
def test_a_folder_is_replaced_as_a_whole_or_not_at_all(
    fails: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rename, calls = Path.rename, []

    def second_fails(self: Path, target: Path) -> Path:
        calls.append(target)
        if len(calls) == 2:
            raise OSError(errno.EACCES, "Permission denied")
        return rename(self, target)

    (tmp_path / "map").mkdir()
    (tmp_path / "map" / "a").write_text("old")
    if fails == "rename":
        monkeypatch.setattr(Path, "rename", second_fails)
    with (
        pytest.raises((KeyboardInterrupt, OutputError)),
        atomic_folder(tmp_path / "map", {"a"}) as folder,
    ):
        (folder / "a").write_text("half")
        if fails == "interrupt":
            raise KeyboardInterrupt
        if fails == "write":
            raise OSError(errno.ENOSPC, "full")
    assert (tmp_path / "map" / "a").read_text() == "old"
    assert everything(tmp_path) == ["map", "map/a"]
    monkeypatch.undo()
    with atomic_folder(tmp_path / "map", {"a"}) as folder:
        (folder / "b").write_text("new")
    assert everything(tmp_path) == ["map", "map/b"]


def test_folder_with_other_files_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "thesis.tex").write_text("years of work")
    with (
        pytest.raises(OutputError, match=r"holds thesis\.tex, which would be lost"),
        atomic_folder(tmp_path / "home", {"a"}),
    ):
        pass
    assert everything(tmp_path) == ["home", "home/thesis.tex"]


# -- JSON and CSV ----------------------------------------------------------------------------


def test_json_takes_numpy_paths_and_all_languages(tmp_path: Path) -> None:
    data = {
        "float": np.float32(0.5),
        "int": np.int64(3),
        "bool": np.bool_(True),
        "array": np.array([[1.0, 2.0]]),
        "path": tmp_path,
        "text": "上海 → “x”",
        4: {"deep": (True, None)},
    }
    write_json(tmp_path / "a.json", data)
    text = (tmp_path / "a.json").read_text(encoding="utf-8")
    others = {"array": [[1.0, 2.0]], "path": str(tmp_path), "4": {"deep": [True, None]}}
    assert json.loads(text) == {str(key): value for key, value in data.items()} | others
    assert "上海" in text and text.endswith("}\n")


@pytest.mark.parametrize("value", [math.nan, np.array([1.0, np.inf]), {1, 2}])
def test_json_refuses_what_it_does_not_have(tmp_path: Path, value: Any) -> None:
    with pytest.raises((ValueError, TypeError)):
        write_json(tmp_path / "a.json", {"pairs": [{}, {"label_mean": value}]})
    assert everything(tmp_path) == []


@pytest.mark.parametrize(
    "content", [None, b'{"a": ', b'{"a": NaN}', b"\xff", b"[" * 100_000, b"[1]"]
)
def test_json_that_cannot_be_read(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "a.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ReportError, match=rf"cannot read {path}: .*Write it again\.$"):
        read_json(path, ReportError, "Write it again.")


def test_texts_that_are_not_utf8_are_written(tmp_path: Path) -> None:
    """The path of a run's folder is among its settings; the run must not fail over it."""
    name = os.fsdecode(b"caf\xe9")
    write_json(tmp_path / "a.json", {"path": name})
    assert read_json(tmp_path / "a.json", ReportError, "")["path"] == name
    write_csv(tmp_path / "a.csv", ["path"], [[name]])
    assert (tmp_path / "a.csv").read_bytes() == b"path\r\ncaf\\udce9\r\n"


def test_a_fifo_or_device_is_not_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "config.json")
    for path in (tmp_path / "config.json", Path("/dev/zero")):
        with pytest.raises(OSError, match="it is a FIFO, a device or a socket, not a file"):
            regular_file(path)
    with pytest.raises(FileNotFoundError):
        regular_file(tmp_path / "missing")


def test_safe_names_are_safe_and_stay_apart() -> None:
    names = ["city->country", "X+1->X*2", "X/2->X-1", "a:b", "a?b", "A?B", "上海", "../x"]
    safe = safe_names([*names, "city->country"])
    assert list(safe) == names
    assert safe["city->country"] == "city-country"
    assert safe["上海"] == "上海"
    assert len({name.lower() for name in safe.values()}) == len(names)
    assert not [name for name in safe.values() if set(name) & set('/\\:*?"<>| +')]
