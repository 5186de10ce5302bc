"""How time and memory of a probe grow, and what its dry run says of both before.

    python -m benchmarks.speed.growth
    python -m benchmarks.speed.growth --only "[LM]" --lms "[FOLDER, OTHER]"
    python -m benchmarks.speed.growth --only "[large]" --tokenizer FOLDER

Each row is a `lincorr fit` in a process of its own on one thread: processor seconds, peak memory,
and those that ``model.dry_run`` estimates. Subjects, labels and kinds of knowledge grow on the tiny
world; parameters in LMs with random weights, of Llama's shape and the tiny world's words. Rows go
to ``benchmarks/results/speed/growth.csv`` and into docs/benchmarks.md. The large LMs of
docs/many_gpus.md are computed and not measured: tokens are those of a dry run with a tokenizer, and
the time is that of the matrix products at 45 % of an H100's peak.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
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
LARGE = {"1.5B": 1.54e9, "8B": 8.03e9, "32B": 32.8e9, "70B": 70.6e9, "405B": 4.06e11}
PEAK = 7.9e14  # operations per second of an H100's bfloat16 products
PEAK_SHARE = 0.45
GPU_GIB = 0.9 * 8e10 / 2**30
LAYER_SHARE = 1 / 50  # FSDP gathers a layer


@dataclass(frozen=True)
class Growth:
    """What a probe of some size takes, and what its dry run says."""

    grows: str = column()
    size: str = column()
    seconds: float = column("processor, s", ",.0f")
    estimated_seconds: float = column("dry run, s", ",.0f")
    peak: float = column("peak, MiB", ",.0f")
    estimated_peak: float = column("dry run, MiB", ",.0f")


@dataclass(frozen=True)
class Large:
    """What all of the paper's prompts and 10,000 subjects take on a large LM."""

    lm: str = column("LM, computed")
    overlay: str = column()
    devices: int = column(format="d")
    gib: float = column("GiB per GPU", ",.0f")
    tokens: float = column("million tokens", ".1f")
    minutes: float = column(format=",.1f")


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


def dry_run(options: Sequence[str], folder: Path) -> dict[str, float]:
    """Return the numbers that a dry run prints first in each line."""
    command = [*PROBE, *options, "--model.dry_run=true"]
    done = subprocess.run(
        command, cwd=folder, env=ONE_THREAD, stdout=subprocess.PIPE, text=True, check=True
    )
    patterns = {name: rf"{name}: ([\d,]+)" for name in ("tokens", "time", "memory")}
    patterns["statistics"] = r"statistics ([\d,]+)"
    numbers = {name: re.findall(pattern, done.stdout)[0] for name, pattern in patterns.items()}
    return {name: float(number.replace(",", "")) for name, number in numbers.items()}


def measure(name: str, lms: Sequence[str]) -> Iterator[Growth]:
    """Yield what each size of a sweep takes, and what was estimated."""
    with tempfile.TemporaryDirectory() as text:
        folder = Path(text)
        for size, options in sweep(name, folder, lms):
            estimated = dry_run(options, folder)
            command = [*PROBE, *options, f"--trainer.default_root_dir={folder / 'runs'}"]
            cost = common.cost_of(command, cwd=folder, env=ONE_THREAD)
            yield Growth(
                "real LM" if lms else name,
                size,
                cost.processor,
                estimated["time"],
                cost.peak_mib,
                estimated["memory"],
            )


def large(estimated: dict[str, float]) -> Iterator[Large]:
    """Yield the fewest devices that each large LM fits on, from the numbers of a dry run."""
    for name, n in LARGE.items():
        weights = 2 * n / 2**30
        statistics = estimated["statistics"] / 1024
        single = statistics + weights
        ways = [("none", 1, single), ("ddp.yaml", 8, single)] if single < GPU_GIB else []
        for devices in (8, 16, 32):
            sharded = statistics + weights * (1 / devices + LAYER_SHARE)
            if not ways and sharded < GPU_GIB:
                ways = [("fsdp.yaml", devices, sharded)]
        for overlay, devices, gib in ways:
            seconds = 2 * estimated["tokens"] * n / (PEAK_SHARE * PEAK * devices)
            yield Large(name, overlay, devices, gib, estimated["tokens"] / 1e6, seconds / 60)


def main(
    only: tuple[str, ...] = ("subjects", "labels", "kinds", "LM"),
    lms: tuple[str, ...] = (),
    tokenizer: str = "tiny-world",
) -> None:
    """Measure, and put the tables into the documents.

    Args:
        only: What grows, or large for the table of large LMs.
        lms: Folders of LMs that are measured in place of the shapes.
        tokenizer: LM whose tokenizer the large LMs have: a folder or hub id.
    """
    folder = common.RESULTS / "speed"
    for name in only:
        if name == "large":
            with tempfile.TemporaryDirectory() as scratch:
                lm = stored_lm("15M", Path(scratch), tokenizer)
                options = "--model.knowledge=all", "--data.n_subjects=10000"
                estimated = dry_run((*options, f"--model.lm.name_or_path={lm}"), Path(scratch))
            table = Table.of("large", large(estimated))
            common.write_table(table, folder)
            common.place_tables({"large": table.markdown()})
        else:
            table = Table.of("growth", measure(name, lms))
            table = common.add_rows(table, ("grows", "size"), folder)
            ends = "size in ['1,000', '10,000', '20', '2', '67', '15M', '1.5B', 'smollm2-135m']"
            common.place_tables({"growth": common.shown(table, rows=ends)})


if __name__ == "__main__":
    auto_cli(main)
