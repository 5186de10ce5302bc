"""Files written by the programs that users bring them from, each in an environment of its own."""

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import venv
from collections.abc import Callable
from pathlib import Path

import pytest

# The writers import packages that only their own environments have.
collect_ignore_glob = ["write_*.py"]

HERE = Path(__file__).parent
CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "lincorr" / "writers"
Write = Callable[..., Path]


def _environment(requirements: list[str]) -> Path:
    """Return the Python of an environment with these packages; skip where pip reaches no index.

    The source of a package after ``source:`` lies in the environment's folder ``source``.
    """
    about = "\n".join([*map(str, sys.version_info[:2]), *requirements])
    folder = CACHE / hashlib.sha256(about.encode()).hexdigest()[:16]
    folder.mkdir(parents=True, exist_ok=True)
    python = folder / "bin" / "python"
    complete = folder / "complete"
    with folder.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # another test may be installing the same
        if complete.exists():
            return python
        venv.create(folder, clear=True, with_pip=True)
        pip = [python, "-m", "pip", "-q", "--disable-pip-version-check"]
        sources = [line.split()[1] for line in requirements if line.startswith("source:")]
        packages = [line for line in requirements if not line.startswith("source:")]
        calls = [[*pip, "install", *packages]]
        fetch = ["download", "--no-deps", "--no-binary=:all:", "-d", folder / "source"]
        calls += [[*pip, *fetch, source] for source in sources]
        for call in calls:
            ran = subprocess.run(call, capture_output=True, text=True, check=False)
            if ran.returncode:
                last = ran.stderr.strip().splitlines()[-1:]
                message = f"pip cannot install {' '.join(requirements)}: {' '.join(last)}"
                probe = [*pip, "download", "--no-deps", "-d", folder / "reached", "pip"]
                reaches = subprocess.run(probe, capture_output=True, check=False).returncode == 0
                (pytest.fail if reaches else pytest.skip)(message)
        for archive in (folder / "source").glob("*.tar.gz"):
            shutil.unpack_archive(archive, folder / "source", filter="data")
        complete.touch()
    return python


@pytest.fixture(scope="session")
def write(tmp_path_factory: pytest.TempPathFactory) -> Write:
    """Run ``write_NAME.py FOLDER *arguments`` beside pinned packages; returns the new folder.

    The packages are the lines of ``write_NAME.txt``. Environments stay in the user's cache folder.
    """

    def run(name: str, *arguments: str) -> Path:
        lines = (HERE / f"write_{name}.txt").read_text("utf-8").splitlines()
        python = _environment([line for line in lines if line and not line.startswith("#")])
        folder = tmp_path_factory.mktemp(name)
        # Nothing of the environment that pytest runs in, and no network.
        own = {"PATH": os.environ["PATH"], "HOME": str(folder), "HF_HUB_OFFLINE": "1"}
        own |= {"PYTHONHASHSEED": "0"}  # on which an adapter of RandLora depends
        ran = subprocess.run(
            [python, HERE / f"write_{name}.py", folder, *arguments],
            capture_output=True,
            text=True,
            check=False,
            env=own | {"OMP_NUM_THREADS": "1"},
        )
        assert ran.returncode == 0, ran.stderr[-3000:]
        sys.stdout.write(ran.stdout)
        return folder

    return run
