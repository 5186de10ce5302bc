"""How the cost of a probe grows with prompts, subjects, labels, layers and parameters.

    python -m benchmarks.speed.growth

Each of these is doubled three times while the others stay; the table has the exponent of the time
of three parts: reading the prompts, adding up the second moments, and solving all maps. LMs have
the shape of Llama and random weights. Times are those of the processor on one thread, the least of
some repeats, so that other programs matter little.

A second table says what follows for 10,000 subjects, all prompts of the paper and LMs of 8B and 70B
parameters, from the cost per token and parameter of the largest shape measured. A GPU is not
measured here: its times are those of the products at 45 % of an H200's peak.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace

import numpy as np
import torch
import transformers as hf
from jsonargparse import auto_cli

from benchmarks.common import markdown_table, place_tables
from lincorr_lightning import Catalogue, LanguageModel
from lincorr_lightning.functional import LeastSquares
from lincorr_lightning.lm import LMConfig, sample_up_to
from lincorr_lightning.metrics import JointMoments

PARTS = ("reading", "second moments", "solving")
LARGE = {"8B": 8.0e9, "70B": 70.6e9}
# The mean of the paper's attributes.
N_LABELS = 60
N_SUBJECTS = 10_000
_PEAK = 7.9e14  # operations per second of an H200's bfloat16 products
_PEAK_SHARE = 0.45


@dataclass(frozen=True)
class Size:
    """Size of a probe and of its LM."""

    prompts: int = 8
    subjects: int = 128
    labels: int = 40
    layers: int = 4
    width: int = 256


@dataclass(frozen=True)
class Cost:
    """Processor seconds of `PARTS`, and what was read."""

    seconds: tuple[float, ...]
    tokens: int
    parameters: int


def make_lm(size: Size) -> LanguageModel:
    """Return an LM with random weights and the tiny world's tokenizer."""
    words = LanguageModel.from_pretrained().tokenizer
    shape = hf.LlamaConfig(
        vocab_size=len(words), hidden_size=size.width, intermediate_size=3 * size.width,
        num_hidden_layers=size.layers, num_attention_heads=size.width // 64,
        num_key_value_heads=size.width // 64,
    )  # fmt: skip
    torch.manual_seed(0)
    return LanguageModel.from_module(hf.AutoModelForCausalLM.from_config(shape).eval(), words)


def prompts_of(n: int, subjects: Sequence[str]) -> list[list[str]]:
    """Return prompts of different kinds of knowledge, each for all subjects."""
    kinds = Catalogue.load().select(["attribute"])
    return [[kinds[i % len(kinds)].prompt(x) for x in subjects] for i in range(n)]


def n_read(lm: LanguageModel, prompts: Sequence[Sequence[str]]) -> int:
    """Return the number of tokens that must be read if common beginnings are read once."""
    rows = [lm.rows(about) for about in prompts]
    return sum(
        len({tuple(row[: i + 1]) for row in about_x for i in range(len(row))})
        for about_x in zip(*rows, strict=True)
    )


@torch.no_grad()
def measure(size: Size, repeats: int) -> Cost:
    """Return what a probe of this size takes."""
    lm = make_lm(size)
    prompts = prompts_of(size.prompts, sample_up_to(lm.tokenizer, size.subjects, seed=0))
    labels = [list(range(100, 100 + size.labels))] * size.prompts
    n_columns = size.prompts * size.labels
    rows = torch.randn(size.subjects, n_columns, dtype=torch.float64)
    moments = JointMoments(n_columns)
    scatter = rows.T @ rows + torch.eye(n_columns, dtype=torch.float64)

    def solve() -> None:
        for start in range(0, n_columns, size.labels):
            own = slice(start, start + size.labels)
            LeastSquares(scatter[own, own], scatter[own]).weight(0.0)

    tasks = (lambda: lm.joint_logits(prompts, labels), lambda: moments.update(rows), solve)
    parameters = sum(
        p.numel() for p in lm.model.parameters() if p is not lm.model.get_input_embeddings().weight
    )
    seconds = tuple(_least(work, repeats) for work in tasks)
    return Cost(seconds, n_read(lm, prompts), parameters)


def _least(work: Callable[[], object], repeats: int) -> float:
    """Return the least processor time of some calls; short ones are called many times."""
    work()
    seconds = []
    for _ in range(repeats):
        start, calls = time.process_time(), 0
        while calls == 0 or time.process_time() - start < 0.05:
            work()
            calls += 1
        seconds.append((time.process_time() - start) / calls)
    return min(seconds)


def exponent(sizes: Sequence[float], seconds: Sequence[float]) -> float:
    """Return the slope of the logarithms, by least squares.

    Example:
        >>> round(exponent([1, 2, 4], [3, 12, 48]), 6)
        2.0
    """
    return float(np.polyfit(np.log(sizes), np.log(seconds), 1)[0])


def growth_table(base: Size, repeats: int) -> tuple[str, Cost]:
    """Return the table of exponents, and the cost of the widest LM."""
    rows, widest = [], None
    for name, start in asdict(base).items():
        values = [start * 2**i for i in range(4)] if name != "width" else [128, 256, 512, 1024]
        costs = [measure(replace(base, **{name: value}), repeats) for value in values]
        grown = [c.parameters for c in costs] if name == "width" else values
        shown = "parameters (by width)" if name == "width" else name
        slopes = [exponent(grown, [c.seconds[i] for c in costs]) for i in range(len(PARTS))]
        constant = name in ("layers", "width")  # statistics do not depend on the LM
        rows.append(
            [shown, f"{grown[0]:,} to {grown[-1]:,}", f"{slopes[0]:.2f}",
             *("" if constant else f"{slope:.2f}" for slope in slopes[1:])]
        )  # fmt: skip
        widest = costs[-1]
    assert widest is not None
    return markdown_table(["grows", "from", *PARTS], rows), widest


def large_table(widest: Cost, base: Size, repeats: int, tokenizer: str) -> str:
    """Return what follows for the paper's largest runs."""
    lm = LanguageModel(LMConfig(tokenizer))
    kinds = list(Catalogue.load().values())
    subjects = sample_up_to(lm.tokenizer, 100, seed=0)
    prompts = [[kind.prompt(x) for x in subjects] for kind in kinds]
    tokens = n_read(lm, prompts) / len(subjects) * N_SUBJECTS
    per_token = widest.seconds[0] / widest.tokens / widest.parameters
    statistics = measure(replace(base, labels=N_LABELS), repeats).seconds
    columns = base.prompts * N_LABELS
    wanted = len(kinds) * N_LABELS
    update = statistics[1] * (wanted / columns) ** 2 * N_SUBJECTS / base.subjects
    # A source's factorization, and its product with the targets of all others.
    solve = statistics[2] * (wanted / columns) ** 2
    rows = [
        [name, str(len(kinds)), f"{tokens / 1e6:.1f} M", f"{per_token * tokens * n / 3600:,.0f} h",
         f"{2 * tokens * n / (_PEAK_SHARE * _PEAK) / 60:,.1f} min", f"{update + solve:,.0f} s"]
        for name, n in LARGE.items()
    ]  # fmt: skip
    return markdown_table(
        ["LM", "prompts", "tokens", "one CPU thread, float32", f"GPU of {_PEAK / 1e12:.0f} TFLOP/s",
         "statistics, one CPU thread"],
        rows,
    )  # fmt: skip


def main(repeats: int = 3, tokenizer: str = "tiny-world", place: bool = False) -> None:
    """Measure, and print both tables.

    Args:
        repeats: Number of runs of each size.
        tokenizer: Tokenizer that the tokens are counted with: a folder, hub id or tiny-world.
        place: Whether to put the tables into the documents.
    """
    torch.set_num_threads(1)
    base = Size()
    growth, widest = growth_table(base, repeats)
    large = large_table(widest, base, repeats, tokenizer)
    print(f"{growth}\n\n{large}")
    if place:
        place_tables({"growth": growth, "large": large})


if __name__ == "__main__":
    auto_cli(main)
