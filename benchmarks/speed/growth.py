"""How time and memory of a probe grow.

    python -m benchmarks.speed.growth
    python -m benchmarks.speed.growth --only "[LM]" --lms "[FOLDER, OTHER]"

Each row is a `lincorr fit` in a process of its own on one thread: processor seconds and peak
memory. Subjects, labels and kinds of knowledge grow on the tiny world; parameters in LMs with
random weights, of Llama's shape and the tiny world's words. Rows go to
``benchmarks/results/speed/growth.csv`` and into docs/benchmarks.md.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import transformers as hf
from jsonargparse import auto_cli

from benchmarks import common
from lincorr_lightning import Catalogue, LanguageModel
from lincorr_lightning.lm import LMConfig, usable_strings
from lincorr_lightning.results.table import Table, column

ONE_THREAD = {**os.environ, "OMP_NUM_THREADS": "1"}
PROBE = (
    sys.executable,
    "-m",
    "lincorr_lightning",
    "fit",
    "--config=linear_probe.yaml",
    "--model.ridge=0",
    "--model.require_reference=[]",
    common.QUIET,
)
TWO = "--model.knowledge=[city, country]"
SHAPES = {"15M": (320, 9), "135M": (768, 14), "500M": (1280, 19), "1.5B": (2048, 22)}
"""Width and number of layers."""


@dataclass(frozen=True)
class Growth:
    """What a probe of some size takes."""

    grows: str = column()
    size: str = column()
    seconds: float = column("processor, s", ",.0f")
    peak: float = column("peak, MiB", ",.0f")


def sweep(name: str, folder: Path, lms: Sequence[str]) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yield the sizes of a sweep, each with the options of its run."""
    if name == "subjects":
        for n in (1000, 2000, 5000, 10_000):
            yield f"{n:,}", (TWO, f"--data.n_subjects={n}", "--data.words_per_subject=2")
    elif name == "labels":
        words = usable_strings(LanguageModel(LMConfig()).tokenizer, whole_words=True)
        for n in (20, 60, 180, 500, 1000):
            path = folder / f"{n}.yaml"
            path.write_text(knowledge_of(words[:n]), encoding="utf-8")
            knowledge = f"--model.knowledge_files=[{path}]", "--model.knowledge=[first, second]"
            yield f"{n:,}", (*knowledge, "--data.n_subjects=2200")
    elif name == "kinds":
        names = [kind.name for kind in Catalogue.load().select(["attribute"])]
        for n in (2, 5, 10, 23, 67):
            chosen = ", ".join(names[:n]) if n < 67 else "all"
            yield f"{n}", (f"--model.knowledge=[{chosen}]", "--data.n_subjects=400")
    elif name == "LM" and lms:
        for lm in lms:
            yield Path(lm).name, (f"--model.lm.name_or_path={lm}", "--data.n_subjects=200")
    elif name == "LM":
        for shape in SHAPES:
            lm = str(stored_lm(shape, folder))
            yield shape, (TWO, f"--model.lm.name_or_path={lm}", "--data.n_subjects=100")
    else:
        raise SystemExit(f"{name} does not grow; --only has subjects, labels, kinds, LM, large")


def knowledge_of(words: Sequence[str]) -> str:
    """Return a file with two kinds of knowledge whose answers are these words."""
    kinds = {
        name: {
            "family": "attribute",
            "language": "en",
            "answers": "word",
            "template": f"{{}} lives in the {place} of",
        }
        for place, name in {"city": "first", "country": "second"}.items()
    }
    entities = {"word": {word: {} for word in words}}
    return json.dumps(
        {"version": 1, "source": "vocabulary", "entities": entities, "knowledge": kinds}
    )


def stored_lm(shape: str, folder: Path, tokenizer_of: str = "tiny-world") -> Path:
    """Return the folder of an LM with random weights and the tokenizer of another LM."""
    tokenizer = LanguageModel(LMConfig(tokenizer_of)).tokenizer
    width, n_layers = SHAPES[shape]
    config = hf.LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=width,
        intermediate_size=4 * width,
        num_hidden_layers=n_layers,
        num_attention_heads=width // 64,
    )
    model = hf.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    for part in (model, tokenizer):
        part.save_pretrained(folder / shape)
    return folder / shape


def measure(name: str, lms: Sequence[str]) -> Iterator[Growth]:
    """Yield what each size of a sweep takes."""
    with tempfile.TemporaryDirectory() as text:
        folder = Path(text)
        for size, options in sweep(name, folder, lms):
            command = [*PROBE, *options, f"--trainer.default_root_dir={folder / 'runs'}"]
            cost = common.cost_of(command, cwd=folder, env=ONE_THREAD)
            yield Growth(
                "real LM" if lms else name,
                size,
                cost.processor,
                cost.peak_mib,
            )


def main(
    only: tuple[str, ...] = ("subjects", "labels", "kinds", "LM"), lms: tuple[str, ...] = ()
) -> None:
    """Measure, and put the table into the documents.

    Args:
        only: What grows.
        lms: Folders of LMs that are measured in place of the shapes.
    """
    folder = common.RESULTS / "speed"
    for name in only:
        table = Table.of("growth", measure(name, lms))
        table = common.add_rows(table, ("grows", "size"), folder)
        ends = "size in ['1,000', '10,000', '20', '2', '67', '15M', '1.5B', 'smollm2-135m']"
        common.place_tables({"growth": common.shown(table, rows=ends)})


if __name__ == "__main__":
    auto_cli(main)
