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
import os
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

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
TWO_THREADS = {**os.environ, "OMP_NUM_THREADS": "2"}


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


def forecast(lm: str, folder: str) -> None:
    """Forecast edits of the tiny world and then of an LM; write what the second took."""
    from lincorr_lightning.cli import main as lincorr

    def run(name: str) -> Path:
        options = f"--model.lm.name_or_path={name}", f"--trainer.default_root_dir={folder}"
        cli = lincorr(["predict", "--config=forecast.yaml", *options, common.QUIET])
        return Path(cli.trainer.log_dir)

    run("tiny-world")
    clock = time.perf_counter()
    processor = time.process_time()
    results = common.read_numbers(run(lm) / "results.json")
    cost = {
        "seconds": time.perf_counter() - clock,
        "processor": time.process_time() - processor,
        "head": f"{results['lm']['n_parameters']:,} in {results['lm']['dtype']}",
    }
    common.write_numbers(Path(folder) / "cost.json", cost)


def measure(lm: str) -> ForecastCost:
    """Return what a forecast takes in a process of its own."""
    with tempfile.TemporaryDirectory() as text:
        folder = Path(text)
        path = str(store_checkpoint(lm, folder / "lm") if lm in SHAPES else lm)
        code = f"from benchmarks.speed.forecast import forecast; forecast({path!r}, {text!r})"
        cost = common.cost_of([sys.executable, "-c", code], cwd=common.ROOT, env=TWO_THREADS)
        return ForecastCost(
            Path(lm).name, peak=cost.peak_mib, **common.read_numbers(folder / "cost.json")
        )


def main(lms: tuple[str, ...] = ("tiny-world", "llama-3-8b")) -> None:
    """Measure, and put the table into the documents.

    Args:
        lms: Folders of LMs, tiny-world, or llama-3-8b.
    """
    table = Table.of("forecast", map(measure, lms), ForecastCost)
    print(table.markdown())
    table = common.add_rows(table, ("lm",), common.RESULTS / "speed")
    common.place_tables({"forecast": common.shown(table)})


if __name__ == "__main__":
    auto_cli(main, as_positional=False)
