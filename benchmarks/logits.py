"""Domain logits per second: the published way, batches, shared prefixes, bare matrix products.

    python benchmarks/logits.py --threads 2
    python benchmarks/logits.py --device cuda --shape llama-3-8b --dtypes [bfloat16] \
        --n_subjects 10000

builds an LM of a known shape with random weights (no download) and reads domain logits: of two
attributes of `n_subjects` subjects, and of all attributes of `n_attribute_subjects` subjects. The
published way is one prompt at a time, with the logits of the whole vocabulary copied to the CPU; it
is measured on `published` prompts. The bare matrix products are those of the LM's linear layers,
with as many rows as each of our forwards had tokens: no attention, activation, norm, or head. All
ways take turns, a part of the subjects each, so that a busy machine slows all of them.

For each way the tables show seconds and CPU seconds; prompts per second; the speed-up over the
published way; the rate of the bare products of the same forwards (in brackets in CPU seconds, which
other programs affect less); and the share of the peak: the operations of the products for real
tokens per second, against one large matrix product.
"""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers as hf
from jsonargparse import auto_cli
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.pytorch_utils import Conv1D

from lincorr_lightning import Catalogue, LanguageModel
from lincorr_lightning.errors import DomainError
from lincorr_lightning.knowledge import Knowledge, build_domain
from lincorr_lightning.lm.vocabulary import sample_subjects, usable_strings

# A stand-in for a domain where the tokenizer is not the shape's own: the mean of the attributes'.
N_LABELS = 60
SHAPES: dict[str, Callable[[], hf.PreTrainedConfig]] = {
    "gpt2-small": hf.GPT2Config,
    "llama-3-8b": lambda: hf.LlamaConfig(
        vocab_size=128256, hidden_size=4096, intermediate_size=14336, num_hidden_layers=32,
        num_attention_heads=32, num_key_value_heads=8, max_position_embeddings=8192,
        rope_theta=500000.0,
    ),
    "small": lambda: hf.LlamaConfig(
        vocab_size=50257, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=512,
    ),
}  # fmt: skip


@dataclass
class Way:
    """What a way took."""

    name: str
    seconds: float = 0.0
    processor: float = 0.0
    prompts: int = 0
    tokens: int = 0
    shapes: list[tuple[int, int]] = field(default_factory=list)
    bare: float = 0.0
    bare_processor: float = 0.0


class Timer:
    """Adds up the time of a piece of work, the device's included."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def __call__(self, work: Callable[[], Any]) -> tuple[Any, float, float]:
        """What `work` returns, its seconds, and the processor's."""
        self._wait()
        start, busy = time.perf_counter(), time.process_time()
        result = work()
        self._wait()
        return result, time.perf_counter() - start, time.process_time() - busy

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def machine(device: torch.device) -> str:
    """Name of what computes."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def has_bfloat16(device: torch.device) -> bool:
    """Whether products of bfloat16 are this device's own."""
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported()
    info = Path("/proc/cpuinfo")
    return info.exists() and "avx512_bf16" in info.read_text()


def random_lm(shape: str, tokenizer: str, dtype: torch.dtype, device: torch.device) -> Any:
    """The LM, twice: with and without shared prefixes; the weights are the same."""
    torch.manual_seed(0)
    with device:
        model = hf.AutoModelForCausalLM.from_config(SHAPES[shape](), dtype=dtype).eval()
    model.requires_grad_(False)
    if tokenizer == "tiny-world":
        words = LanguageModel({"name_or_path": tokenizer}).tokenizer
    else:
        words = hf.AutoTokenizer.from_pretrained(tokenizer)
    return [
        LanguageModel.from_module(model, words, share_prefixes=share) for share in (False, True)
    ]


def domain_of(knowledge: Knowledge, lm: LanguageModel) -> list[int]:
    """Tokens of a knowledge's labels, or as many others where the tokenizer has none."""
    try:
        tokens = build_domain(knowledge, lm.tokenizer).token_ids
    except DomainError:
        tokens = []
    return tokens if len(tokens) > 1 else list(range(100, 100 + N_LABELS))


def weights_of(model: Any) -> list[Tensor]:
    """Weights of all linear layers but the head, as they are multiplied: ``(in, out)``."""
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
    """Make what computes the linear layers' products of some forwards."""
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


def peak(timer: Timer, dtype: torch.dtype) -> float:
    """Operations per second of a large matrix product: the best of some."""
    n = 8192 if timer.device.type == "cuda" else 2048
    a = torch.randn(n, n, device=timer.device).to(dtype)
    timer(lambda: F.linear(a, a))
    seconds = min(timer(lambda: [F.linear(a, a) for _ in range(2)])[1] / 2 for _ in range(5))
    return 2 * n**3 / seconds


@torch.no_grad()
def published(lm: LanguageModel, prompts: Sequence[str]) -> Tensor:
    """Next-token logits of the whole vocabulary, one prompt at a time."""
    rows = []
    for prompt in prompts:
        ids = lm.encode([prompt])["input_ids"].to(lm.model.device)
        rows.append(lm.model(input_ids=ids).logits[0, -1].float().cpu())
    return torch.stack(rows)


@torch.no_grad()
def measure(
    lms: Sequence[LanguageModel],
    knowledge: Sequence[Knowledge],
    subjects: Sequence[str],
    n_published: int,
    batch: int,
    timer: Timer,
) -> tuple[list[Way], list[float]]:
    """Ask in all ways, in turns; how far the logits differ from the published way's."""
    one_by_one, model = lms[0], lms[0].model
    domains = [domain_of(each, one_by_one) for each in knowledge]
    weights = weights_of(model)
    ways = [Way("published"), Way("ours, prompts one by one"), Way("ours, shared prefixes")]
    differences = [0.0, 0.0]
    shapes: list[tuple[int, int]] = []
    hook = model.base_model.register_forward_pre_hook(
        lambda _, args, kwargs: shapes.append(tuple((*args, kwargs.get("input_ids"))[0].shape)),
        with_kwargs=True,
    )
    starts = range(0, len(subjects), batch)
    for part, start in enumerate((0, *starts)):  # the first one warms up
        xs = subjects[start : start + batch]
        prompts = [[each.prompt(x) for x in xs] for each in knowledge]
        n_alone = max(1, n_published // len(starts) // len(prompts))
        alone = [about[:n_alone] for about in prompts]
        their, *took = timer(lambda alone=alone: [published(one_by_one, p) for p in alone])
        results = [(took, [], sum(map(len, alone)), 0)]
        for way, lm in enumerate(lms):
            shapes.clear()
            logits, *took = timer(lambda lm=lm, prompts=prompts: lm.joint_logits(prompts, domains))
            # Afterwards, as it needs the true number of tokens only.
            rows = [lm.rows(about) for about in prompts]
            if way == 0:
                n_tokens = sum(len(row) for about in rows for row in about)
            else:
                about_x = zip(*rows, strict=True)
                n_tokens = sum(
                    len({tuple(row[: i + 1]) for row in about for i in range(len(row))})
                    for about in about_x
                )
            results.append((took, list(shapes), sum(map(len, prompts)), n_tokens))
            parts = torch.split(logits.cpu(), [len(ids) for ids in domains], dim=1)
            for theirs, ours, ids in zip(their, parts, domains, strict=True):
                exact = theirs[:, ids].double()
                far = (ours[: len(exact)] - exact).abs().max() / exact.abs().max()
                differences[way] = max(differences[way], float(far))
        for way, (took, seen, n_prompts, n_tokens) in zip(ways, results, strict=True):
            _, bare, bare_processor = timer(bare_products(weights, seen))
            if part > 0:
                way.seconds += took[0]
                way.processor += took[1]
                way.prompts += n_prompts
                way.tokens += n_tokens
                way.shapes += seen
                way.bare += bare
                way.bare_processor += bare_processor
    hook.remove()
    return ways, differences


def show(ways: Sequence[Way], differences: Sequence[float], n_weights: int, most: float) -> None:
    """Print a table."""
    print("| way | prompts | seconds | processor | prompts/s | faster | of bare | of peak |")
    print("|---|---:|---:|---:|---:|---:|---:|---:|")
    alone = ways[0].prompts / ways[0].seconds
    for way in ways:
        rate = way.prompts / way.seconds
        of_bare = of_peak = ""
        if way.shapes:
            of_bare = f"{way.bare / way.seconds:.0%} ({way.bare_processor / way.processor:.0%})"
            of_peak = f"{2 * n_weights * way.tokens / way.seconds / most:.0%}"
        print(
            f"| {way.name} | {way.prompts:,} | {way.seconds:.2f} | {way.processor:.2f} | "
            f"{rate:.1f} | {rate / alone:.1f}x | {of_bare} | {of_peak} |"
        )
    plain, shared = ways[1:]
    padding = 1 - shared.tokens / sum(n * length for n, length in shared.shapes)
    print(
        f"\nsharing: {plain.seconds / shared.seconds:.2f}x, of {plain.tokens / shared.tokens:.2f}x "
        f"fewer tokens; padding {padding:.1%}; of the largest logit, ours differ from the published"
        f" way's by {differences[0]:.0e} one by one and {differences[1]:.0e} shared\n"
    )


def main(
    shape: str = "gpt2-small",
    tokenizer: str = "tiny-world",
    device: str = "cpu",
    dtypes: list[str] | None = None,
    n_subjects: int = 1000,
    n_attribute_subjects: int | None = None,
    published: int = 200,
    batch: int = 256,
    threads: int | None = None,
) -> None:
    """Measure.

    Args:
        shape: Shape of the LM: gpt2-small, llama-3-8b, or small, to try the script.
        tokenizer: Folder or hub id of the tokenizer, or tiny-world.
        device: cpu or cuda.
        dtypes: Precisions; null: float32, and bfloat16 where the device has it.
        n_subjects: Number of subjects for the two attributes.
        n_attribute_subjects: Number of subjects for all attributes; null takes a tenth, on a GPU
            all.
        published: Number of prompts of the published way, for each table.
        batch: Subjects per batch.
        threads: Number of CPU threads; null takes torch's default.
    """
    if threads is not None:
        torch.set_num_threads(threads)
    where = torch.device(device)
    names = dtypes or (["float32", "bfloat16"] if has_bfloat16(where) else ["float32"])
    n_all = n_attribute_subjects or (
        n_subjects if where.type == "cuda" else max(1, n_subjects // 10)
    )
    catalogue = Catalogue.load()
    two = [catalogue["city"], catalogue["country"]]
    timer = Timer(where)
    for name in names:
        dtype = getattr(torch, name)
        lms = random_lm(shape, tokenizer, dtype, where)
        n_weights = sum(weight.numel() for weight in weights_of(lms[0].model))
        most = peak(timer, dtype)
        words = 1 if n_subjects <= len(usable_strings(lms[0].tokenizer)) else 2
        xs = sample_subjects(lms[0].tokenizer, n_subjects, words_per_subject=words)
        print(
            f"{machine(where)}, {torch.get_num_threads()} thread(s), torch {torch.__version__}, "
            f"transformers {hf.__version__}; {shape}, {n_weights / 1e6:.0f}M weights in linear "
            f"layers, {name}; tokenizer of {tokenizer}; peak {most / 1e12:.3g} TFLOP/s\n"
        )
        for knowledge, subjects in ((two, xs), (catalogue.select(["attribute"]), xs[:n_all])):
            print(f"{len(subjects):,} subjects x {len(knowledge)} prompts, {name}\n")
            show(*measure(lms, knowledge, subjects, published, batch, timer), n_weights, most)


if __name__ == "__main__":
    auto_cli(main)
