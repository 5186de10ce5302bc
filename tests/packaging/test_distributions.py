"""What `pip install lincorr-lightning` would bring: source distribution and wheel."""

import ctypes
import json
import os
import resource
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from pathlib import Path
from typing import Any

import pytest

import lincorr_lightning

ROOT = Path(__file__).resolve().parents[2]


def run(*command: object, **options: object) -> None:
    done = subprocess.run(
        [str(part) for part in command], capture_output=True, text=True, check=False, **options
    )
    assert done.returncode == 0, done.stderr + done.stdout


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Holds the source distribution, and the wheel that is built from it.

    Built from a copy, so that no build folder appears in the checkout.
    """
    folder = tmp_path_factory.mktemp("dist")
    source = folder / "source"
    tracked = "lincorr_lightning callbacks configs pyproject.toml README.md LICENSE"
    source.mkdir()
    run("cp", "-r", *(ROOT / name for name in tracked.split()), source)
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", folder, source)
    return folder


@pytest.fixture(scope="module")
def wheel(folder: Path) -> zipfile.ZipFile:
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


def test_the_source_distribution_has_what_the_wheel_has(
    folder: Path, wheel: zipfile.ZipFile
) -> None:
    (path,) = folder.glob("*.tar.gz")
    with tarfile.open(path) as archive:
        inside = {name.partition("/")[2] for name in archive.getnames()}
    for name in wheel.namelist():
        if ".dist-info/" not in name:
            package, _, rest = name.partition("/")
            top = rest.partition("/")[0]
            assert (rest if top in {"callbacks", "configs"} else f"{package}/{rest}") in inside


def limit() -> None:
    """Let a new process open few files, which others cannot read, and write where it may only."""
    cap_dac_override, drop = 1, 24  # of root, and of Linux's prctl
    ctypes.CDLL(None).prctl(drop, cap_dac_override, 0, 0, 0)
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
    os.umask(0o077)


@pytest.mark.slow
@pytest.mark.parametrize("pattern", ["*.whl", pytest.param("*.tar.gz", marks=pytest.mark.nightly)])
def test_the_main_job_runs_where_it_is_installed(
    folder: Path, pattern: str, tmp_path: Path
) -> None:
    """In an environment of its own that sees this one's dependencies, not the checkout.

    It is read-only, there is no HOME, files are few, and paths are as odd as they may be.
    """
    venv.create(tmp_path / "venv")
    bin_folder = tmp_path / "venv" / "bin"
    paths = {"base": str(tmp_path / "venv"), "platbase": str(tmp_path / "venv")}
    site_packages = Path(sysconfig.get_path("purelib", "venv", paths))
    # A path in a .pth file does not run the .pth files there, such as that of an editable install.
    dependencies = [path for path in sys.path if path.endswith("site-packages")]
    (site_packages / "dependencies.pth").write_text("\n".join(dependencies))
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    (distribution,) = folder.glob(pattern)
    pip = f"{sys.executable} -m pip --python {bin_folder / 'python'} install"
    options = "--no-deps", "--no-build-isolation"
    run(*pip.split(), *options, distribution, env=environment, cwd=tmp_path)
    run("chmod", "-R", "a-w", tmp_path / "venv")
    environment.pop("HOME", None)
    work = tmp_path / "- a\nb"
    work.mkdir()
    runs, pages = "-my\nruns", "-a page"
    here: dict[str, Any] = {"env": environment, "cwd": work, "preexec_fn": limit}
    assert subprocess.run(["touch", site_packages / "new"], check=False, **here).returncode != 0
    small = "--data.n_subjects=100 --model.knowledge=[city,country]"
    fit = f"fit --config configs/linear_probe.yaml {small}".split()
    run(bin_folder / "lincorr", *fit, f"--trainer.default_root_dir={runs}", **here)
    run_folder = f"{runs}/linear_probe/version_0"
    run(bin_folder / "lincorr", "report", f"--output={pages}", "--", run_folder, **here)
    page = work / pages / "report.html"
    assert page.stat().st_mode & 0o077 == 0 and "city→country" in page.read_text()
    results = json.loads((work / run_folder / "results.json").read_text())
    assert results["versions"]["lincorr-lightning"] == lincorr_lightning.__version__
    assert list((site_packages / "lincorr_lightning").glob("lm/tiny_world/CARD.md"))
