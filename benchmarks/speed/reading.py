"""Ways to read domain logits of an LM, of this package and of others: in turns, in one process.

    OMP_NUM_THREADS=2 python -m benchmarks.speed.reading --lm FOLDER
    python -m benchmarks.speed.reading --device cuda --shape llama-3-8b --dtype bfloat16

reads the prompts of some kinds of knowledge: the published notebook's way (one prompt at a time,
logits of the whole vocabulary copied to the CPU), batches of transformers, of TransformerLens and
nnsight where they are installed, and this package with and without shared prefixes; and the matrix
products alone that this takes. The LM is a folder's, or has random weights in a known shape, for
which nothing is downloaded. A turn is a part of the subjects, so that a busy machine slows all.
Rows go to ``benchmarks/results/speed/reading.csv``, where those of what is not installed stay as
they are, and into docs/benchmarks.md.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import transformers as hf
import yaml
from jsonargparse import auto_cli
from torch import Tensor, nn

from benchmarks import common
from lincorr_lightning import Catalogue, LanguageModel
from lincorr_lightning.knowledge import build_domain
from lincorr_lightning.lm import sample_subjects, usable_strings
from lincorr_lightning.lm.shared_prefixes import plan_reading
from lincorr_lightning.results.table import Table, column

OURS, PUBLISHED = "lincorr-lightning", "one prompt at a time"
SHAPES: dict[str, Any] = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text("utf-8"))
Read = Callable[[list[list[int]]], Tensor]
"""Returns the logits after a batch of prompts, by their token ids, of the whole vocabulary."""
Way = Callable[[list[list[str]]], list[Tensor] | None]
"""Returns the logits after each kind's prompts, of the whole vocabulary or of the kind's labels."""


@dataclass(frozen=True)
class ReadingSpeed:
    """What a way takes, and how far its logits are from the published way's, of the largest."""

    lm: str = column("LM")
    dtype: str = column()
    device: str = column()
    kinds: int = column("prompts of a subject", "d")
    package: str = column()
    version: str = column()
    way: str = column()
    prompts: int = column(format=",d")
    rate: float = column("prompts per second", ",.4g")
    differs: float | None = column("logits differ by", ".0e")


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


def device_name(device: str) -> str:
    """Return what a row calls the device: a GPU's name, or the CPU's number of threads."""
    if device == "cpu":
        return f"{torch.get_num_threads()} CPU threads"
    return torch.cuda.get_device_name()


def timed(work: Callable[[], Any], device: str) -> tuple[Any, float]:
    """Return what `work` returns, and its seconds."""
    start = time.perf_counter()
    result = work()
    if device != "cpu":
        torch.accelerator.synchronize()
    return result, time.perf_counter() - start


def padded_left(rows: list[list[int]], device: str) -> dict[str, Tensor]:
    """Return a batch in which all prompts end at the last position."""
    longest = max(map(len, rows))
    ids = torch.tensor([[0] * (longest - len(row)) + row for row in rows])
    mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in rows])
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    batch = {"input_ids": ids, "attention_mask": mask, "position_ids": positions}
    return {name: values.to(device) for name, values in batch.items()}


def transformers(model: nn.Module, device: str) -> dict[str, Read]:
    """Return ways of transformers."""

    def read(rows: list[list[int]], **options: Any) -> Tensor:
        return model(**padded_left(rows, device), use_cache=False, **options).logits[:, -1]

    def alone(rows: list[list[int]]) -> Tensor:
        return torch.cat([read([row]).float().cpu() for row in rows])

    last = partial(read, logits_to_keep=1)
    return {PUBLISHED: alone, "logits of all positions": read, "logits of the last position": last}


def transformer_lens(folder: str, dtype: str, device: str) -> dict[str, Read]:
    """Return the bridge's way, which computes the logits of all positions."""
    from transformer_lens.model_bridge import TransformerBridge

    options: dict[str, Any] = {"device": device, "dtype": getattr(torch, dtype)}
    bridge = TransformerBridge.boot_transformers(folder, **options)

    def read(rows: list[list[int]]) -> Tensor:
        batch = padded_left(rows, device)
        return bridge(batch.pop("input_ids"), **batch)[:, -1]

    return {"bridge": read}


def nnsight(folder: str, dtype: str, device: str) -> dict[str, Read]:
    """Return the way of a trace."""
    from nnsight import TransformersModel

    options = {"dtype": getattr(torch, dtype), "device_map": device, "dispatch": True}
    lm = TransformersModel(folder, task="text-generation", **options)

    def read(rows: list[list[int]]) -> Tensor:
        with lm.trace(rows, logits_to_keep=1, use_cache=False):
            logits = lm.output.logits[:, -1].save()
        return logits  # noqa: RET504  # assigned by the trace

    return {"trace": read}


def n_tokens_of(lm: LanguageModel, prompts: list[list[str]]) -> int:
    """Return how many tokens reading takes, those that a subject's prompts share once."""
    groups = [dict(enumerate(lm.rows(list(about)))) for about in zip(*prompts, strict=True)]
    trees, _ = plan_reading(lm.model, groups, True, None, None)
    return sum(len(tree.token_ids) for tree in trees)


def products(lm: LanguageModel, n_tokens: int) -> None:
    """Multiply ones, ``(n_tokens, in_features)``, with weights of linear layers but the head."""
    head = lm.model.get_output_embeddings()
    for module in lm.model.modules():
        if isinstance(module, nn.Linear) and module is not head:
            nn.functional.linear(
                module.weight.new_ones(n_tokens, module.in_features), module.weight
            )


def ways_of(
    lm: LanguageModel,
    domains: Sequence[list[int]],
    tokens_per_subject: float,
    folder: str | None,
    dtype: str,
    device: str,
    batch_size: int,
) -> dict[tuple[str, str], Way]:
    """Return the ways by their package and name."""
    sizes = [len(ids) for ids in domains]

    def in_batches(read: Read, prompts: list[list[str]]) -> list[Tensor]:
        found = []
        for about, labels in zip(prompts, domains, strict=True):
            rows = lm.rows(about)
            starts = range(0, len(rows), batch_size)
            parts = [read(rows[start : start + batch_size])[:, labels] for start in starts]
            found.append(torch.cat(parts).float().cpu())
        return found

    def ours(share: bool) -> Way:
        reader = LanguageModel.from_module(lm.model, lm.tokenizer, share_prefixes=share)
        return lambda prompts: list(reader.joint_logits(prompts, domains).cpu().split(sizes, 1))

    peers = {"transformers": transformers(lm.model, device)}
    if folder is not None:
        for open_peer in (transformer_lens, nnsight):
            if find_spec(open_peer.__name__):
                peers[open_peer.__name__] = open_peer(folder, dtype, device)
    ways: dict[tuple[str, str], Way] = {
        (package, way): partial(in_batches, read)
        for package, found in peers.items()
        for way, read in found.items()
    }
    ways[OURS, "prompts one by one"] = ours(False)
    ways[OURS, "shared prefixes"] = ours(True)
    ways[OURS, "its matrix products alone"] = lambda prompts: products(
        lm, round(len(prompts[0]) * tokens_per_subject)
    )
    return ways


def with_factors(table: Table) -> Table:
    """Return the table with each way's factor over the published one and over other packages."""
    frame = table.frame
    runs = [frame[name] for name in ("lm", "dtype", "device", "kinds")]

    def factor(among: Any) -> Any:
        best = frame["rate"].where(among).groupby(runs).transform("max")
        return frame["rate"] / best

    frame = frame.assign(
        faster=factor(frame["way"] == PUBLISHED),
        factor=factor((frame["package"] != OURS) & (frame["way"] != PUBLISHED)),
    )
    headings = {
        "faster": "times as fast as published",
        "factor": "times as fast as the fastest other",
    }
    return replace(
        table,
        frame=frame,
        headings={**table.headings, **headings},
        formats={**table.formats, "faster": ".1f", "factor": ".2f"},
    )


@torch.no_grad()
def main(
    lm: str | None = None,
    shape: str = "gpt2-small",
    tokenizer: str = "tiny-world",
    knowledge: tuple[str, ...] = ("city", "country", "language", "continent"),
    n_subjects: int = 256,
    n_published: int = 8,
    dtype: str = "float32",
    device: str = "cpu",
    part_size: int = 64,
    batch_size: int = 64,
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
        batch_size: Prompts of a batch of other packages.
    """
    model = make_lm(lm, shape, tokenizer, dtype, device)
    kinds = Catalogue.load().select(list(knowledge))
    domains = [list(build_domain(kind, model.tokenizer).token_ids) for kind in kinds]
    words = 1 if n_subjects <= len(usable_strings(model.tokenizer)) else 2
    subjects = sample_subjects(model.tokenizer, n_subjects, words_per_subject=words)
    n_tokens = n_tokens_of(model, [[kind.prompt(x) for x in subjects] for kind in kinds])
    ways = ways_of(model, domains, n_tokens / n_subjects, lm, dtype, device, batch_size)
    seconds, n_read = dict.fromkeys(ways, 0.0), dict.fromkeys(ways, 0)
    logits: dict[tuple[str, str], list[Tensor]] = {name: [] for name in ways}
    for part, start in enumerate((0, *range(0, n_subjects, part_size))):  # the first one warms up
        for name, read in ways.items():
            n = n_published if name[1] == PUBLISHED else part_size
            chosen = subjects[start : start + part_size][:n]
            prompts = [[kind.prompt(subject) for subject in chosen] for kind in kinds]
            found, took = timed(partial(read, prompts), device)
            if part:
                seconds[name] += took
                n_read[name] += len(kinds) * len(chosen)
                logits[name] += [rows[:n_published].double().flatten() for rows in found or ()]
    exact = torch.cat(logits["transformers", PUBLISHED])
    speeds = []
    for (package, way), parts in logits.items():
        own = torch.cat(parts) if parts else None
        differs = None if own is None else float((own - exact).abs().max() / exact.abs().max())
        n_prompts = n_read[package, way]
        speed = ReadingSpeed(
            Path(lm or shape).name,
            dtype,
            device_name(device),
            len(kinds),
            package,
            version(package),
            way,
            n_prompts,
            n_prompts / seconds[package, way],
            differs,
        )
        speeds.append(speed)
    keys = "lm", "dtype", "device", "kinds", "package", "way"
    table = with_factors(common.add_rows(Table.of("reading", speeds), *keys))
    columns = "lm device kinds package way rate faster factor differs"
    rows = "kinds < 10 or package in ['nnsight', 'lincorr-lightning']"
    common.place_tables({"reading": common.shown(table, columns, rows)})


if __name__ == "__main__":
    auto_cli(main, as_positional=False)
