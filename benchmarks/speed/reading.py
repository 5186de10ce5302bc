"""Ways to read domain logits of an LM: same subjects, in turns, in one process.

    python -m benchmarks.speed.reading --lm FOLDER --gguf FILE --threads 2
    python -m benchmarks.speed.reading --shape gpt2-small --tokenizer FOLDER --threads 2
    python -m benchmarks.speed.reading --device cuda --shape llama-3-8b --dtype bfloat16

reads the prompts of some kinds of knowledge: the published notebook's way (one prompt at a time,
logits of the whole vocabulary copied to the CPU), batches of transformers with padding and the
logits of all positions, this package with and without shared prefixes, and llama.cpp (if
`llama_cpp` is installed) with the same weights as they are quantized in a GGUF file, many prompts
per batch and the logits of the last position alone. The LM is a folder's, or has random weights in
a known shape, for which nothing is downloaded. All ways take turns, a part of the subjects each, so
that a busy machine slows all of them.

For each way: prompts per second, by wall clock and by processor time; the rate of the bare matrix
products of the same forwards (those of the linear layers, with as many rows as there were tokens);
the memory that it takes beyond the weights; and how far its logits of the labels are from those of
the published way, relative to the largest, with their r.
"""

from __future__ import annotations

import ctypes
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import transformers as hf
from jsonargparse import auto_cli
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from benchmarks.common import markdown_table
from lincorr_lightning import Catalogue, LanguageModel
from lincorr_lightning.errors import DomainError
from lincorr_lightning.knowledge import Knowledge, build_domain
from lincorr_lightning.lm import sample_subjects, usable_strings

COLUMNS = (
    "way",
    "prompts",
    "prompts/s",
    "faster",
    "by processor time",
    "of bare",
    "memory",
    "differs",
    "r",
)
PLAIN_BATCH = 32  # on a GPU, eight times as many
N_LABELS = 60  # where a tokenizer has no labels for a kind of knowledge: the attributes' mean
SHAPES: dict[str, Callable[[], hf.PreTrainedConfig]] = {
    "gpt2-small": hf.GPT2Config,
    "llama-3-8b": lambda: hf.LlamaConfig(
        vocab_size=128256,
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        max_position_embeddings=8192,
        rope_theta=500000.0,
    ),
    "small": lambda: hf.LlamaConfig(
        vocab_size=50257,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=512,
    ),
}


@dataclass
class Way:
    """What a way took.

    Attributes:
        read: Returns the logits of each prompt, of the whole vocabulary or of the labels.
        bare: Seconds of the bare products; 0 where they are not known.
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


def make_lm(lm: str | None, shape: str, tokenizer: str, dtype: str, device: str) -> LanguageModel:
    """Return a folder's LM, or one with random weights."""
    if lm is not None:
        found = LanguageModel.from_pretrained(lm, dtype=dtype)
        found.model.to(device)
        return found
    torch.manual_seed(0)
    with torch.device(device):
        config, kind = SHAPES[shape](), hf.AutoModelForCausalLM
        model = kind.from_config(config, dtype=getattr(torch, dtype)).eval()
    return LanguageModel.from_module(
        model.requires_grad_(False), LanguageModel({"name_or_path": tokenizer}).tokenizer
    )


def tokens_of(knowledge: Knowledge, lm: LanguageModel) -> list[int]:
    """Return the tokens of the labels, or as many others where the tokenizer has none."""
    try:
        tokens = list(build_domain(knowledge, lm.tokenizer).token_ids)
    except DomainError:
        tokens = []
    return tokens if len(tokens) > 1 else list(range(100, 100 + N_LABELS))


def weights_of(model: Any) -> list[Tensor]:
    """Return the weights of all linear layers but the head, as they are multiplied."""
    head = model.get_output_embeddings()
    found = []
    for module in model.modules():
        if isinstance(module, Conv1D):
            found.append(module.weight)
        elif isinstance(module, nn.Linear) and module is not head:
            found.append(module.weight.T)
    return found


def bare_products(
    weights: Sequence[Tensor], shapes: Sequence[tuple[int, int]]
) -> Callable[[], None]:
    """Return what computes the linear layers' products of some forwards."""
    states = {
        (n, weight.shape[0]): torch.randn(
            n, weight.shape[0], dtype=weight.dtype, device=weight.device
        )
        for n in {rows * length for rows, length in shapes}
        for weight in weights
    }

    def multiply() -> None:
        for rows, length in shapes:
            for weight in weights:
                states[rows * length, weight.shape[0]] @ weight

    return multiply


def timed(work: Callable[[], Any], device: str) -> tuple[Any, float, float]:
    """Return what `work` returns, its seconds, and those of the processor."""
    start, busy = time.perf_counter(), time.process_time()
    result = work()
    if device != "cpu":
        torch.accelerator.synchronize()
    return result, time.perf_counter() - start, time.process_time() - busy


def _status(key: str) -> int:
    """Return a number of bytes of ``/proc/self/status``, such as the peak ``VmHWM``."""
    text = Path("/proc/self/status").read_text(encoding="utf-8")
    return 1024 * int(re.findall(rf"{key}:\s+(\d+)", text)[0])


def _peak(device: str) -> int:
    """Return the largest number of bytes that were in use."""
    return _status("VmHWM") if device == "cpu" else torch.accelerator.max_memory_allocated()


def _forget_peak(device: str) -> int:
    """Free what earlier ways left, begin the peak anew, and return the memory in use."""
    if device != "cpu":
        torch.accelerator.reset_peak_memory_stats()
        return torch.accelerator.memory_allocated()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")
    return _status("VmRSS")


def published(lm: LanguageModel, prompts: Sequence[str]) -> Tensor:
    """Return the logits of the whole vocabulary, one prompt at a time."""
    rows = []
    for prompt in prompts:
        ids = lm.encode([prompt])["input_ids"].to(lm.model.device)
        rows.append(lm.model(input_ids=ids).logits[0, -1].float().cpu())
    return torch.stack(rows)


def plain_batches(lm: LanguageModel, prompts: Sequence[str]) -> Tensor:
    """Return the last position's logits, from batches with those of all positions."""
    rows = []
    n = PLAIN_BATCH if lm.model.device.type == "cpu" else 8 * PLAIN_BATCH
    for start in range(0, len(prompts), n):
        batch = lm.encode(list(prompts[start : start + n]))
        ids, mask = (batch[k].to(lm.model.device) for k in ("input_ids", "attention_mask"))
        logits = lm.model(input_ids=ids, attention_mask=mask, use_cache=False).logits
        rows.append(logits[torch.arange(len(mask)), mask.sum(1) - 1].float().cpu())
    return torch.cat(rows)


class LlamaCpp:
    """An LM of a GGUF file in llama.cpp: prompts side by side, logits of the last position."""

    n_tokens, n_prompts = 2048, 64  # of a batch, at most

    def __init__(self, file: str, n_threads: int) -> None:
        import llama_cpp as api

        self.api = api
        api.llama_backend_init()
        self._silent = api.llama_log_callback(lambda level, text, data: None)
        api.llama_log_set(self._silent, ctypes.c_void_p(0))
        self.model = api.llama_model_load_from_file(file.encode(), api.llama_model_default_params())
        options = api.llama_context_default_params()
        options.n_ctx = options.n_batch = options.n_ubatch = self.n_tokens
        options.n_seq_max, options.kv_unified = self.n_prompts, True
        options.n_threads = options.n_threads_batch = n_threads
        self.context = api.llama_init_from_model(self.model, options)
        self.width = api.llama_vocab_n_tokens(api.llama_model_get_vocab(self.model))
        self.batch = api.llama_batch_init(self.n_tokens, 0, 1)

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

    def each(read: Callable[[list[str]], Tensor]) -> Way:
        return Way(lambda prompts: [read(about) for about in prompts])

    def ours(share: bool) -> Way:
        reader = LanguageModel.from_module(lm.model, lm.tokenizer, share_prefixes=share)
        sizes = [len(ids) for ids in domains]
        return Way(
            lambda prompts: list(reader.joint_logits(prompts, domains).cpu().split(sizes, 1))
        )

    ways = {
        "published": each(lambda prompts: published(lm, prompts)),
        "transformers, batches": each(lambda prompts: plain_batches(lm, prompts)),
        "ours, prompts one by one": ours(False),
        "ours, shared prefixes": ours(True),
    }
    if gguf is not None and find_spec("llama_cpp") is not None:
        cpp = LlamaCpp(gguf, threads)
        ways["llama.cpp, batches"] = each(lambda prompts: cpp.read(lm.rows(prompts)))
    return ways


@torch.no_grad()
def main(
    lm: str | None = None,
    shape: str = "gpt2-small",
    tokenizer: str = "tiny-world",
    gguf: str | None = None,
    knowledge: tuple[str, ...] = ("city", "country", "language", "continent"),
    n_subjects: int = 512,
    n_published: int = 8,
    dtype: str = "float32",
    device: str = "cpu",
    threads: int | None = None,
    part_size: int = 64,
) -> None:
    """Measure.

    Args:
        lm: Folder of the LM; null takes random weights.
        shape: Shape of the LM with random weights: gpt2-small, llama-3-8b, or small, to try it.
        tokenizer: Its tokenizer: a folder, hub id or tiny-world.
        gguf: The same LM as a GGUF file, for llama.cpp; null leaves it out.
        knowledge: Kinds of knowledge or families whose prompts are read.
        n_subjects: Number of subjects.
        n_published: Subjects of each turn that the published way reads.
        dtype: Precision of the weights.
        device: cpu or cuda.
        threads: Number of CPU threads; null takes torch's default.
        part_size: Subjects of each turn.
    """
    torch.set_num_threads(threads or torch.get_num_threads())
    model = make_lm(lm, shape, tokenizer, dtype, device)
    kinds = Catalogue.load().select(list(knowledge))
    domains = [tokens_of(kind, model) for kind in kinds]
    words = 1 if n_subjects <= len(usable_strings(model.tokenizer)) else 2
    subjects = sample_subjects(model.tokenizer, n_subjects, words_per_subject=words)
    ways = ways_of(model, domains, gguf, torch.get_num_threads())
    weights = weights_of(model.model)
    shapes: list[tuple[int, int]] = []
    hook = model.model.base_model.register_forward_pre_hook(
        lambda _, args, kwargs: shapes.append(tuple((*args, kwargs.get("input_ids"))[0].shape)),
        with_kwargs=True,
    )
    for part, start in enumerate((0, *range(0, n_subjects, part_size))):  # the first one warms up
        xs = subjects[start : start + part_size]
        exact: list[Tensor] = []
        for name, way in ways.items():
            asked = xs[:n_published] if name == "published" else xs
            prompts = [[kind.prompt(x) for x in asked] for kind in kinds]
            shapes.clear()
            before = _forget_peak(device)
            work = lambda way=way, prompts=prompts: way.read(prompts)  # noqa: E731
            found, seconds, processor = timed(work, device)
            if part == 0:
                continue
            way.memory = max(way.memory, _peak(device) - before)
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
                way.bare += timed(bare_products(weights, shapes), device)[1]
    hook.remove()
    alone, rows = ways["published"], []
    for name, way in ways.items():
        ours, theirs = torch.cat(way.logits), torch.cat(way.exact)
        rows.append(
            [
                name,
                f"{way.prompts:,}",
                f"{way.prompts / way.seconds:.1f}",
                f"{way.prompts / way.seconds * alone.seconds / alone.prompts:.1f}x",
                f"{way.prompts / way.processor * alone.processor / alone.prompts:.1f}x",
                f"{way.bare / way.seconds:.0%}" if way.bare else "",
                f"{way.memory / 2**20:,.0f} MiB",
                f"{(ours - theirs).abs().max() / theirs.abs().max():.0e}",
                f"{torch.corrcoef(torch.stack([ours, theirs]))[0, 1]:.4f}",
            ]
        )
    print(
        f"{Path(lm).name if lm else shape}, {dtype}, {device}, {n_subjects:,} subjects x "
        f"{len(kinds)} prompts, {torch.get_num_threads()} thread(s), torch {torch.__version__}\n\n"
        f"{markdown_table(COLUMNS, rows)}"
    )


if __name__ == "__main__":
    auto_cli(main, as_positional=False)
