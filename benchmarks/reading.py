"""Ways to read domain logits of a pretrained LM: same subjects, in turns, in one process.

    python benchmarks/reading.py LM --gguf FILE --threads 2

reads the prompts of some kinds of knowledge: the published notebook's way (one prompt at a time),
batches of transformers with padding and the logits of all positions, this package with and without
shared prefixes, and llama.cpp (if `llama_cpp` is installed) with the same weights as they are
quantized in the GGUF file, many prompts per batch and the logits of the last position alone.

For each way: prompts per second, by wall clock and by processor time; the rate of the bare matrix
products of the same forwards; the memory that it takes beyond the weights; and how far its logits
of the labels are from those of the published way, relative to the largest, with their r.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path

import torch
from jsonargparse import auto_cli
from logits import Timer, bare_products, published, weights_of
from torch import Tensor

from lincorr_lightning import Catalogue, LanguageModel
from lincorr_lightning.knowledge import build_domain
from lincorr_lightning.lm.vocabulary import sample_subjects
from lincorr_lightning.results.table import markdown_table

COLUMNS = (
    "way", "prompts", "prompts/s", "faster", "by processor time", "of bare", "memory", "differs",
    "r",
)  # fmt: skip
PART = 64  # subjects per turn
PLAIN_BATCH = 32


@dataclass
class Way:
    """What a way took.

    Attributes:
        read: Returns the logits of each prompt, of the whole vocabulary or of the labels.
        bare: Wall and processor seconds of the bare products; 0 where they are not known.
        memory: Largest growth of the process, in bytes.
    """

    read: Callable[[list[list[str]]], list[Tensor]]
    seconds: float = 0.0
    processor: float = 0.0
    prompts: int = 0
    bare: float = 0.0
    memory: int = 0
    logits: list[Tensor] = field(default_factory=list)
    exact: list[Tensor] = field(default_factory=list)


def _status(key: str) -> int:
    """Return a number of bytes of ``/proc/self/status``, such as the peak ``VmHWM``."""
    text = Path("/proc/self/status").read_text(encoding="utf-8")
    return 1024 * int(re.findall(rf"{key}:\s+(\d+)", text)[0])


@torch.no_grad()
def plain_batches(lm: LanguageModel, prompts: Sequence[str]) -> Tensor:
    """Return the last position's logits, from batches with those of all positions."""
    rows = []
    for start in range(0, len(prompts), PLAIN_BATCH):
        batch = lm.encode(list(prompts[start : start + PLAIN_BATCH]))
        ids, mask = batch["input_ids"], batch["attention_mask"]
        logits = lm.model(input_ids=ids, attention_mask=mask, use_cache=False).logits
        rows.append(logits[torch.arange(len(ids)), mask.sum(1) - 1].float())
    return torch.cat(rows)


class LlamaCpp:
    """An LM in llama.cpp: prompts side by side, logits of the last position.

    Args:
        file: GGUF file.
        n_threads: Number of threads.
        n_tokens: Most tokens per batch.
        n_prompts: Most prompts per batch.
    """

    def __init__(
        self, file: str, n_threads: int, n_tokens: int = 2048, n_prompts: int = 64
    ) -> None:
        import llama_cpp as api

        self.api, self.n_tokens, self.n_prompts = api, n_tokens, n_prompts
        api.llama_backend_init()
        self._silent = api.llama_log_callback(lambda level, text, data: None)
        api.llama_log_set(self._silent, ctypes.c_void_p(0))
        self.model = api.llama_model_load_from_file(file.encode(), api.llama_model_default_params())
        options = api.llama_context_default_params()
        options.n_ctx = options.n_batch = options.n_ubatch = n_tokens
        options.n_seq_max, options.kv_unified = n_prompts, True
        options.n_threads = options.n_threads_batch = n_threads
        self.context = api.llama_init_from_model(self.model, options)
        self.width = api.llama_vocab_n_tokens(api.llama_model_get_vocab(self.model))
        self.batch = api.llama_batch_init(n_tokens, 0, 1)

    def read(self, rows: Sequence[Sequence[int]]) -> Tensor:
        """Return the logits after each row of tokens, ``(n_rows, n_tokens)``."""
        found: list[Tensor] = []
        waiting: list[Sequence[int]] = []
        for row in rows:
            if len(waiting) == self.n_prompts or sum(map(len, (*waiting, row))) > self.n_tokens:
                found += self._decode(waiting)
                waiting = []
            waiting.append(row)
        return torch.stack(found + self._decode(waiting))

    def _decode(self, rows: Sequence[Sequence[int]]) -> list[Tensor]:
        api, batch, at, last = self.api, self.batch, 0, []
        for number, row in enumerate(rows):
            for position, token in enumerate(row):
                batch.token[at], batch.pos[at] = token, position
                batch.n_seq_id[at], batch.seq_id[at][0] = 1, number
                batch.logits[at] = position == len(row) - 1
                at += 1
            last.append(at - 1)
        batch.n_tokens = at
        api.llama_memory_clear(api.llama_get_memory(self.context), True)
        if api.llama_decode(self.context, batch):
            raise RuntimeError("llama.cpp cannot decode a batch")
        return [torch.tensor(api.llama_get_logits_ith(self.context, i)[: self.width]) for i in last]


def ways_of(
    lm: LanguageModel, domains: Sequence[list[int]], gguf: str | None, threads: int
) -> dict[str, Way]:
    """Return the ways by name."""

    def each(read: Callable[[list[str]], Tensor]) -> Callable[[list[list[str]]], list[Tensor]]:
        return lambda prompts: [read(about) for about in prompts]

    def ours(share: bool) -> Callable[[list[list[str]]], list[Tensor]]:
        reader = LanguageModel.from_module(lm.model, lm.tokenizer, share_prefixes=share)
        sizes = [len(ids) for ids in domains]
        return lambda prompts: list(reader.joint_logits(prompts, domains).split(sizes, 1))

    ways = {
        "published": Way(each(lambda prompts: published(lm, prompts))),
        "transformers, batches": Way(each(lambda prompts: plain_batches(lm, prompts))),
        "ours, prompts one by one": Way(ours(False)),
        "ours, shared prefixes": Way(ours(True)),
    }
    if gguf is not None and find_spec("llama_cpp") is not None:
        cpp = LlamaCpp(gguf, threads)
        ways["llama.cpp, batches"] = Way(each(lambda prompts: cpp.read(lm.rows(prompts))))
    return ways


@torch.no_grad()
def main(
    lm: str,
    gguf: str | None = None,
    knowledge: tuple[str, ...] = ("city", "country", "language", "continent"),
    n_subjects: int = 512,
    n_published: int = 8,
    threads: int = 2,
) -> None:
    """Measure.

    Args:
        lm: Folder of the LM.
        gguf: The same LM as a GGUF file, for llama.cpp; null leaves it out.
        knowledge: Kinds of knowledge whose prompts are read.
        n_subjects: Number of subjects.
        n_published: Subjects of each turn of 64 that the published way reads.
        threads: Number of threads.
    """
    torch.set_num_threads(threads)
    model = LanguageModel.from_pretrained(lm, dtype="float32")
    catalogue = Catalogue.load()
    kinds = [catalogue[name] for name in knowledge]
    domains = [list(build_domain(kind, model.tokenizer).token_ids) for kind in kinds]
    subjects = sample_subjects(model.tokenizer, n_subjects)
    ways, weights, timer = (
        ways_of(model, domains, gguf, threads), weights_of(model.model), Timer(torch.device("cpu")),
    )  # fmt: skip
    libc = ctypes.CDLL("libc.so.6")
    shapes: list[tuple[int, int]] = []
    hook = model.model.base_model.register_forward_pre_hook(
        lambda _, args, kwargs: shapes.append(tuple((*args, kwargs.get("input_ids"))[0].shape)),
        with_kwargs=True,
    )
    for part, start in enumerate((0, *range(0, n_subjects, PART))):  # the first one warms up
        xs = subjects[start : start + PART]
        exact: list[Tensor] = []
        for name, way in ways.items():
            asked = xs[:n_published] if name == "published" else xs
            prompts = [[kind.prompt(x) for x in asked] for kind in kinds]
            shapes.clear()
            libc.malloc_trim(0)  # what earlier ways left would hide what this one takes
            Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")  # the peak anew
            before = _status("VmRSS")
            found, seconds, processor = timer(lambda way=way, prompts=prompts: way.read(prompts))
            if part == 0:
                continue
            way.memory = max(way.memory, _status("VmHWM") - before)
            way.seconds, way.processor = way.seconds + seconds, way.processor + processor
            way.prompts += sum(map(len, prompts))
            labels = [
                logits if logits.shape[1] == len(ids) else logits[:, ids]
                for logits, ids in zip(found, domains, strict=True)
            ]
            exact = exact or [part_logits.double() for part_logits in labels]
            way.exact += [part_logits.flatten() for part_logits in exact]
            way.logits += [
                x[: len(y)].double().flatten() for x, y in zip(labels, exact, strict=True)
            ]
            if shapes and name != "published":
                way.bare += timer(bare_products(weights, shapes))[1]
    hook.remove()
    alone = ways["published"]
    rows = []
    for name, way in ways.items():
        ours, theirs = torch.cat(way.logits), torch.cat(way.exact)
        rows.append(
            [name, f"{way.prompts:,}", f"{way.prompts / way.seconds:.1f}",
             f"{way.prompts / way.seconds * alone.seconds / alone.prompts:.1f}x",
             f"{way.prompts / way.processor * alone.processor / alone.prompts:.1f}x",
             f"{way.bare / way.seconds:.0%}" if way.bare else "", f"{way.memory / 2**20:,.0f} MiB",
             f"{(ours - theirs).abs().max() / theirs.abs().max():.0e}",
             f"{torch.corrcoef(torch.stack([ours, theirs]))[0, 1]:.4f}"]
        )  # fmt: skip
    print(
        f"{Path(lm).name}, float32, {n_subjects:,} subjects x {len(kinds)} prompts, {threads} "
        f"thread(s), torch {torch.__version__}\n\n{markdown_table(COLUMNS, rows)}"
    )


if __name__ == "__main__":
    auto_cli(main)
