"""What `pip install lincorr-lightning` would bring: the built wheel, looked into."""

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import lincorr_lightning

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """Built from a copy, so that no build folder appears in the checkout."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    tracked = [
        "lincorr_lightning",
        "callbacks",
        "configs",
        "pyproject.toml",
        "README.md",
        "LICENSE",
    ]
    source.mkdir()
    subprocess.run(["cp", "-r", *(str(ROOT / name) for name in tracked), str(source)], check=True)
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation"]
    command += ["--outdir", str(folder), str(source)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr + done.stdout
    (path,) = folder.glob("*.whl")
    return zipfile.ZipFile(path)


def test_every_module_and_data_file_is_in(wheel: zipfile.ZipFile) -> None:
    inside = set(wheel.namelist())
    expected = set()
    for top, home in (
        ("lincorr_lightning", "lincorr_lightning"),
        ("callbacks", "lincorr_lightning/callbacks"),
        ("configs", "lincorr_lightning/configs"),
    ):
        for path in (ROOT / top).rglob("*"):
            if path.is_file() and "__pycache__" not in path.parts:
                expected.add(f"{home}/{path.relative_to(ROOT / top).as_posix()}")
    assert expected <= inside, sorted(expected - inside)
    assert "lincorr_lightning/py.typed" in inside
    assert "lincorr_lightning/lm/tiny_world/model.safetensors" in inside
    assert any(name.endswith("licenses/LICENSE") for name in inside)


def test_nothing_else_is_in(wheel: zipfile.ZipFile) -> None:
    outside = [n for n in wheel.namelist() if n.split("/")[0] != "lincorr_lightning"]
    assert all(".dist-info/" in name for name in outside), outside
    assert not [n for n in wheel.namelist() if "test" in n.split("/")[-1]]


def test_version_and_program(wheel: zipfile.ZipFile) -> None:
    info = f"lincorr_lightning-{lincorr_lightning.__version__}.dist-info"
    metadata = wheel.read(f"{info}/METADATA").decode()
    assert "License-Expression: Apache-2.0" in metadata
    assert "Requires-Python: <3.14,>=3.11" in metadata
    programs = wheel.read(f"{info}/entry_points.txt").decode()
    assert "lincorr = lincorr_lightning.cli:console" in programs
