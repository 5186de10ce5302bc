"""Ways to read domain logits of an LM: same subjects, in turns, in one process.

    python -m benchmarks.speed.reading --lm FOLDER
    python -m benchmarks.speed.reading --shape gpt2-small --tokenizer FOLDER
    python -m benchmarks.speed.reading --device cuda --shape llama-3-8b --dtype bfloat16

reads the prompts of some kinds of knowledge: the published notebook's way (one prompt at a time,
logits of the whole vocabulary copied to the CPU), batches of transformers with padding and the
logits of all positions, and this package with and without shared prefixes. The LM is a folder's, or
has random weights in a known shape, for which nothing is downloaded. All ways take turns, a part of
the subjects each, so that a busy machine slows all of them. Rows go to
``benchmarks/results/speed/reading.csv`` and into docs/benchmarks.md.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers as hf
import yaml
from jsonargparse import auto_cli
from torch import Tensor

from benchmarks import common
from lincorr_lightning import Catalogue, LanguageModel
from lincorr_lightning.knowledge import build_domain
from lincorr_lightning.lm import sample_subjects, usable_strings
from lincorr_lightning.results.table import Table, column

PUBLISHED = "published"
PLAIN_BATCH = 32  # on a GPU, eight times as many
Way = Callable[[list[list[str]]], list[Tensor]]
"""Returns the logits after each kind's prompts, of the whole vocabulary or of the kind's labels."""
SHAPES: dict[str, Any] = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text("utf-8"))


@dataclass(frozen=True)
class ReadingSpeed:
    """What a way takes, and how far its logits are from the published way's, of the largest."""

    lm: str = column("LM")
    dtype: str = column()
    device: str = column()
    kinds: int = column("prompts of a subject", "d")
    way: str = column()
    prompts: int | None = column(format=",d")
    rate: float | None = column("prompts per second", ",.1f")
    faster: float = column("times as fast as published", ".1f")
    differs: float | None = column("logits differ by", ".0e")
    r: float | None = column("r of logits", ".4f")


def make_lm(lm: str | None, shape: str, tokenizer: str, dtype: str, device: str) -> LanguageModel:
    """Return a folder's LM, or one with random weights."""
    if lm is not None:
        found = LanguageModel.from_pretrained(lm, dtype=dtype)
        found.model.to(device)
        return found
    torch.manual_seed(0)
    with torch.device(device):
        config = hf.AutoConfig.for_model(**SHAPES[shape])
        model = hf.AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype)).eval()
    return LanguageModel.from_module(
        model.requires_grad_(False), LanguageModel({"name_or_path": tokenizer}).tokenizer
    )


def timed(work: Callable[[], Any], device: str) -> tuple[Any, float]:
    """Return what `work` returns, and its seconds."""
    start = time.perf_counter()
    result = work()
    if device != "cpu":
        torch.accelerator.synchronize()
    return result, time.perf_counter() - start


def published(lm: LanguageModel, prompts: Sequence[str]) -> Tensor:
    """Return the logits of the whole vocabulary, one prompt at a time."""
    rows = []
    for prompt in prompts:
        ids = lm.pad(lm.rows([prompt]))[0]
        rows.append(lm.model(input_ids=ids).logits[0, -1].float().cpu())
    return torch.stack(rows)


def plain_batches(lm: LanguageModel, prompts: Sequence[str]) -> Tensor:
    """Return the last position's logits, from batches with those of all positions."""
    rows = []
    n = PLAIN_BATCH if lm.model.device.type == "cpu" else 8 * PLAIN_BATCH
    for start in range(0, len(prompts), n):
        ids, mask = lm.pad(lm.rows(prompts[start : start + n]))
        logits = lm.model(input_ids=ids, attention_mask=mask, use_cache=False).logits
        rows.append(logits[torch.arange(len(mask)), mask.sum(1) - 1].float().cpu())
    return torch.cat(rows)


def ways_of(lm: LanguageModel, domains: Sequence[list[int]]) -> dict[str, Way]:
    """Return the ways by name."""
    sizes = [len(ids) for ids in domains]

    def ours(share: bool) -> Way:
        reader = LanguageModel.from_module(lm.model, lm.tokenizer, share_prefixes=share)
        return lambda prompts: list(reader.joint_logits(prompts, domains).cpu().split(sizes, 1))

    return {
        PUBLISHED: lambda prompts: [published(lm, about) for about in prompts],
        "transformers, batches": lambda prompts: [plain_batches(lm, about) for about in prompts],
        "ours, prompts one by one": ours(False),
        "ours, shared prefixes": ours(True),
    }


@torch.no_grad()
def main(
    lm: str | None = None,
    shape: str = "gpt2-small",
    tokenizer: str = "tiny-world",
    knowledge: tuple[str, ...] = ("city", "country", "language", "continent"),
    n_subjects: int = 512,
    n_published: int = 8,
    dtype: str = "float32",
    device: str = "cpu",
    part_size: int = 64,
) -> None:
    """Measure.

    Args:
        lm: Folder of the LM; null takes random weights.
        shape: Shape of the LM with random weights: gpt2-small, llama-3-8b, or small, to try it.
        tokenizer: Its tokenizer: a folder, hub id or tiny-world.
        knowledge: Kinds of knowledge or families whose prompts are read.
        n_subjects: Number of subjects.
        n_published: Subjects of each turn that the published way reads.
        dtype: Precision of the weights.
        device: cpu or cuda.
        part_size: Subjects of each turn.
    """
    model = make_lm(lm, shape, tokenizer, dtype, device)
    kinds = Catalogue.load().select(list(knowledge))
    domains = [list(build_domain(kind, model.tokenizer).token_ids) for kind in kinds]
    words = 1 if n_subjects <= len(usable_strings(model.tokenizer)) else 2
    subjects = sample_subjects(model.tokenizer, n_subjects, words_per_subject=words)
    ways = ways_of(model, domains)
    seconds, read = dict.fromkeys(ways, 0.0), dict.fromkeys(ways, 0)
    logits: dict[str, list[Tensor]] = {name: [] for name in ways}  # after what all of them read
    for part, start in enumerate((0, *range(0, n_subjects, part_size))):  # the first one warms up
        for name, way in ways.items():
            n = n_published if name == PUBLISHED else part_size
            chosen = subjects[start : start + part_size][:n]
            prompts = [[kind.prompt(subject) for subject in chosen] for kind in kinds]
            found, took = timed(partial(way, prompts), device)
            if part == 0:
                continue
            seconds[name] += took
            read[name] += sum(map(len, prompts))
            for rows, ids in zip(found, domains, strict=True):
                labels = rows if rows.shape[1] == len(ids) else rows[:, ids]
                logits[name].append(labels[:n_published].double().flatten())
    device_name = device if device == "cpu" else torch.cuda.get_device_name()
    about = Path(lm).name if lm else shape, dtype, device_name, len(kinds)
    rates = {name: n / seconds[name] for name, n in read.items()}
    exact = torch.cat(logits[PUBLISHED])
    speeds = []
    for name, rate in rates.items():
        own = torch.cat(logits[name])
        differs = float((own - exact).abs().max() / exact.abs().max())
        r = float(torch.corrcoef(torch.stack([own, exact]))[0, 1])
        faster = rate / rates[PUBLISHED]
        speeds.append(ReadingSpeed(*about, name, read[name], rate, faster, differs, r))
    table = Table.of("reading", speeds)
    table = common.add_rows(table, "lm", "dtype", "device", "kinds", "way")
    columns = "lm dtype device way rate faster differs"
    common.place_tables({"reading": common.shown(table, columns, "prompts.notna()")})


if __name__ == "__main__":
    auto_cli(main, as_positional=False)
