"""English texts from the package registry, for the studies that read texts on a pretrained LM.

    pip install zstandard
    python -m benchmarks.real_lms.fetch_texts FOLDER

downloads ``sae-probes`` (45 MB, MIT) with pip, which is neither installed nor run, and prints the
path of a ``.jsonl`` file of 15,249 texts: news, essays and encyclopedic passages, shuffled.
"""

from __future__ import annotations

import csv
import io
import json
import random
import tempfile
import zipfile
from pathlib import Path

import zstandard
from jsonargparse import auto_cli

from benchmarks.common import write_text
from benchmarks.real_lms.fetch_lms import download_wheels

PACKAGE = "sae-probes==0.4.2"
FILES = ("100_news_fake", "97_news_class", "94_ai_gen", "57_wikidatais_alive")


def main(folder: Path) -> None:
    """Download the texts into a folder, unless they are there."""
    path = folder / "texts.jsonl"
    if not path.is_file():
        with tempfile.TemporaryDirectory() as scratch:
            texts = read(download_wheels((PACKAGE,), scratch)[0])
        random.Random(0).shuffle(texts)
        write_text(path, "".join(json.dumps({"text": text}) + "\n" for text in texts))
    print(path)


def read(wheel: Path) -> list[str]:
    """Return the texts of the chosen files, without repetitions."""
    return list(dict.fromkeys(row["prompt"] for name in FILES for row in rows(wheel, name)))


def rows(wheel: Path, name: str) -> list[dict[str, str]]:
    """Return the rows of one file."""
    csv.field_size_limit(2**30)
    file = zipfile.Path(wheel, f"sae_probes/data/cleaned_data/{name}.csv.zst")
    content = zstandard.ZstdDecompressor().stream_reader(file.read_bytes()).read().decode()
    return list(csv.DictReader(io.StringIO(content)))


if __name__ == "__main__":
    auto_cli(main)
