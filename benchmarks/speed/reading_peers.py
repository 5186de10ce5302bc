"""How fast other packages read the logits that reading.py reads: in turns, in one process.

    OMP_NUM_THREADS=2 python -m benchmarks.speed.reading_peers --lm FOLDER

measures this package, transformers, and TransformerLens and nnsight where they are installed, in
batches of 64 prompts; and the matrix products alone that reading needs, with what prompts share
read once. Rows of what is not installed stay as they are in
``benchmarks/results/speed/reading_peers.csv``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import transformers as hf
from jsonargparse import auto_cli
from torch import Tensor, nn

from benchmarks import common
from benchmarks.speed.reading import timed
from lincorr_lightning import Catalogue, LanguageModel
from lincorr_lightning.knowledge import build_domain
from lincorr_lightning.lm import sample_subjects
from lincorr_lightning.lm.shared_prefixes import plan_reading
from lincorr_lightning.results.table import Table, column

BATCH = 64
OURS, ALONE = "lincorr-lightning", "one prompt at a time"
PRODUCTS = "its matrix products alone"
Read = Callable[[list[list[int]], list[int]], Tensor]
"""Returns the logits of labels after a batch of prompts, by their token ids."""


@dataclass(frozen=True)
class PeerSpeed:
    """What a way takes, and how far its logits are from transformers' own, of the largest."""

    lm: str = column("LM")
    threads: int = column(format="d")
    package: str
    version: str
    way: str
    rate: float = column("prompts per second", ",.1f")
    differs: float | None = column("logits differ by", ".0e")


def padded_left(rows: list[list[int]]) -> dict[str, Tensor]:
    """Return a batch in which all prompts end at the last position."""
    longest = max(map(len, rows))
    ids = torch.tensor([[0] * (longest - len(row)) + row for row in rows])
    mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in rows])
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    return {"input_ids": ids, "attention_mask": mask, "position_ids": positions}


def transformers(folder: str) -> dict[str, Read]:
    """Return ways of transformers."""
    lm = hf.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    def read(rows: list[list[int]], labels: list[int], **options: Any) -> Tensor:
        return lm(**padded_left(rows), use_cache=False, **options).logits[:, -1, labels]

    def alone(rows: list[list[int]], labels: list[int]) -> Tensor:
        return torch.cat([read([row], labels) for row in rows])

    last = partial(read, logits_to_keep=1)
    return {ALONE: alone, "logits of all positions": read, "logits of the last position": last}


def transformer_lens(folder: str) -> dict[str, Read]:
    """Return the bridge's way, which computes the logits of all positions."""
    from transformer_lens.model_bridge import TransformerBridge

    bridge = TransformerBridge.boot_transformers(folder, device="cpu")

    def read(rows: list[list[int]], labels: list[int]) -> Tensor:
        batch = padded_left(rows)
        return bridge(batch.pop("input_ids"), **batch)[:, -1, labels]

    return {"bridge": read}


def nnsight(folder: str) -> dict[str, Read]:
    """Return the way of a trace."""
    from nnsight import TransformersModel

    lm = TransformersModel(folder, task="text-generation", dtype=torch.float32, dispatch=True)

    def read(rows: list[list[int]], labels: list[int]) -> Tensor:
        with lm.trace(rows, logits_to_keep=1, use_cache=False):
            logits = lm.output.logits[:, -1, labels].save()
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
            nn.functional.linear(torch.ones(n_tokens, module.in_features), module.weight)


@torch.no_grad()
def main(
    lm: str,
    knowledge: tuple[str, ...] = ("city", "country", "continent", "language"),
    n_subjects: int = 256,
    n_alone: int = 8,
) -> None:
    """Measure.

    Args:
        lm: Folder of the LM.
        knowledge: Kinds of knowledge whose prompts are read.
        n_subjects: Number of subjects.
        n_alone: Subjects of each turn whose prompts are read one at a time.
    """
    model = LanguageModel.from_pretrained(lm, share_prefixes=True)
    kinds = Catalogue.load().select(list(knowledge))
    domains = [list(build_domain(kind, model.tokenizer).token_ids) for kind in kinds]
    subjects = sample_subjects(model.tokenizer, n_subjects)
    n_tokens = n_tokens_of(model, [[kind.prompt(x) for x in subjects] for kind in kinds])

    def in_batches(read: Read, prompts: list[list[str]]) -> Tensor:
        rows = map(model.rows, prompts)
        return torch.cat(list(map(read, rows, domains)), dim=1)

    peers = {"transformers": transformers(lm)}
    peers |= {f.__name__: f(lm) for f in (transformer_lens, nnsight) if find_spec(f.__name__)}
    ways: dict[tuple[str, str], Callable[[list[list[str]]], Tensor | None]] = {
        (package, way): partial(in_batches, read)
        for package, found in peers.items()
        for way, read in found.items()
    }
    ways[OURS, "shared prefixes"] = lambda prompts: model.joint_logits(prompts, domains)
    ways[OURS, PRODUCTS] = lambda prompts: products(model, len(prompts[0]) * n_tokens // n_subjects)
    seconds, n_read = dict.fromkeys(ways, 0.0), dict.fromkeys(ways, 0)
    logits: dict[tuple[str, str], list[Tensor]] = {way: [] for way in ways}
    for turn, start in enumerate((0, *range(0, n_subjects, BATCH))):  # the first one warms up
        for name, way in ways.items():
            n = BATCH if turn and name[1] != ALONE else n_alone
            chosen = subjects[start : start + n]
            prompts = [[kind.prompt(subject) for subject in chosen] for kind in kinds]
            found, took = timed(partial(way, prompts), "cpu")
            if turn:
                seconds[name] += took
                n_read[name] += len(kinds) * len(chosen)
                logits[name] += [] if found is None else [found[:n_alone].double()]
    exact = torch.cat(logits["transformers", ALONE])
    speeds = []
    for (package, way), parts in logits.items():
        error = float((torch.cat(parts) - exact).abs().max() / exact.abs().max()) if parts else None
        about = Path(lm).name, torch.get_num_threads(), package, version(package), way
        rate = n_read[package, way] / seconds[package, way]
        speeds.append(PeerSpeed(*about, rate, error))
    table = common.add_rows(Table.of("reading_peers", speeds), "lm", "threads", "package", "way")
    frame = table.frame
    runs = [frame["lm"], frame["threads"]]
    fastest = frame["rate"].where(frame["package"] != OURS).groupby(runs).transform("max")
    headings = {**table.headings, "factor": "times as fast as the fastest other package"}
    formats = {**table.formats, "factor": ".2f"}
    frame = frame.assign(factor=frame["rate"] / fastest)
    table = replace(table, frame=frame, headings=headings, formats=formats)
    columns = "threads package version way rate factor differs"
    common.place_tables({"reading peers": common.shown(table, columns)})


if __name__ == "__main__":
    auto_cli(main, as_positional=False)
