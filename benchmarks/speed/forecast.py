"""What a forecast of edits takes, which reads the head of a checkpoint alone.

    python -m benchmarks.speed.forecast --lms "[FOLDER, llama-3-8b]"

Each row is a `lincorr predict` in a process of its own on two threads, after a forecast on the tiny
world, so that modules are imported: seconds by the clock and of the processor, and the peak memory
of the process. ``llama-3-8b`` is a checkpoint of Llama-3 8B's shape with random numbers: the head,
128,256 x 4,096 in bfloat16, lies in one of four files, and the other three are not there. Rows go
to ``benchmarks/results/speed/forecast.csv`` and into docs/forecasts.md.
"""

from __future__ import annotations

import json
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from resource import RUSAGE_SELF, getrusage

import torch
import transformers as hf
from jsonargparse import auto_cli
from safetensors.torch import save_file

from benchmarks import common
from lincorr_lightning.lm import LMConfig
from lincorr_lightning.lm.loading import find_checkpoint, read_tokenizer
from lincorr_lightning.results.table import Table, column

SHAPES = {"llama-3-8b": (128_256, 4096), "toy": (6000, 64)}
"""Numbers of tokens and of columns of heads that are made up."""


@dataclass(frozen=True)
class ForecastCost:
    """What a forecast takes beyond the imports, and the peak memory with them."""

    lm: str = column("LM")
    head: str = column()
    seconds: float = column("seconds", ".1f")
    processor: float = column("processor, s", ".1f")
    peak: float = column("peak, MiB", ",.0f")


def store_checkpoint(shape: str, folder: Path) -> Path:
    """Write config, tokenizer, index, and the file with the head of an LM of some shape."""
    n_tokens, width = SHAPES[shape]
    config = hf.LlamaConfig(vocab_size=n_tokens, hidden_size=width, tie_word_embeddings=False)
    for part in (config, read_tokenizer(find_checkpoint(LMConfig()))):
        part.save_pretrained(folder)
    names = [f"model-{i}-of-00004.safetensors" for i in range(1, 5)]
    keys = ("model.embed_tokens.weight", "model.layers.0.mlp.up_proj.weight", "model.norm.weight")
    index = dict(zip((*keys, "lm_head.weight"), names, strict=True))
    text = json.dumps({"metadata": {}, "weight_map": index})
    (folder / "model.safetensors.index.json").write_text(text, encoding="utf-8")
    generator = torch.Generator().manual_seed(0)
    head = torch.randn(n_tokens, width, generator=generator, dtype=torch.bfloat16)
    save_file({"lm_head.weight": head}, folder / names[-1])
    return folder


def forecast(lm: str | Path) -> ForecastCost:
    """Forecast edits of the tiny world and then of an LM; return what the second took."""
    with tempfile.TemporaryDirectory() as folder:
        command = "predict", "--config=forecast.yaml", f"--trainer.default_root_dir={folder}"
        common.results_of(*command)
        clock, processor = time.perf_counter(), time.process_time()
        found = common.results_of(*command, f"--model.lm.name_or_path={lm}")["lm"]
        return ForecastCost(
            Path(lm).name,
            f"{found['n_parameters']:,} in {found['dtype']}",
            time.perf_counter() - clock,
            time.process_time() - processor,
            getrusage(RUSAGE_SELF).ru_maxrss / 1024,
        )


def main(lms: tuple[str, ...] = ("tiny-world", "llama-3-8b")) -> None:
    """Measure, and put the table into the documents.

    Args:
        lms: Folders of LMs, tiny-world, or llama-3-8b.
    """
    spawn = get_context("spawn")
    with (
        tempfile.TemporaryDirectory() as folder,
        ProcessPoolExecutor(1, spawn, torch.set_num_threads, (2,), max_tasks_per_child=1) as pool,
    ):
        paths = [
            pool.submit(store_checkpoint, lm, Path(folder, lm)).result() if lm in SHAPES else lm
            for lm in lms
        ]
        table = Table.of("forecast", pool.map(forecast, paths), ForecastCost)
    table = common.add_rows(table, "lm")
    common.place_tables({"forecast": common.shown(table)})


if __name__ == "__main__":
    auto_cli(main, as_positional=False)
