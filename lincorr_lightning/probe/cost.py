"""What a probe will take in time, memory and tokens, from an LM's configuration and tokenizer.

Parameters are counted on the meta device. LMs of one and of two layers with random weights, in all
else like the LM, read prompts as a run will: what the second layer adds, every other one does.
"""

import copy
import resource
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from lincorr_lightning.errors import LanguageModelError
from lincorr_lightning.linear_map.layout import JointLayout, domain_rows
from lincorr_lightning.lm.language_model import LanguageModel

_READ_BY = "add_bos", "chat_template", "tokens_per_forward", "share_prefixes"
_LEAST_SECONDS = 0.3  # of a reading that is timed
# Seconds measured for docs/benchmarks.md: maps and scores of a pair, with its nulls, and for each
# entry of W; and the end of a run, with figures of a pair that it draws for a number of pairs.
_PER_PAIR, _PER_ENTRY, _END, _PER_FIGURE, _N_FIGURES = 0.008, 1.25e-5, 2.8, 0.035, 200
_COPIES = 5  # of the largest moments, while they are merged and scored
_MIB_OF_FIGURES = 150  # and of what the libraries load when they are first used


class ReadingCost(NamedTuple):
    """The size of an LM, and tokens (with padding) and seconds of all prompts of a subject."""

    n_parameters: int
    mib: float
    n_tokens: float
    seconds: float
    how: str


def estimate_reading(
    lm: LanguageModel,
    read: Callable[[LanguageModel, Sequence[str]], object],
    subjects: Sequence[str],
    device: torch.device,
) -> ReadingCost:
    """Return what reading takes on a device; on a CPU, in seconds of cores that do nothing else.

    `read` reads the prompts of some subjects with an LM, as the run will; `subjects` are a batch.
    A `LanguageModelError` if the configuration does not say how many layers the LM has.
    """
    if lm.n_layers is None:
        raise LanguageModelError(f"{lm.location} has no num_hidden_layers: omit model.dry_run.")
    with torch.device("meta"):
        weights = list(_build(lm, lm.n_layers).parameters())
    options = {name: getattr(lm.config, name) for name in _READ_BY}
    models = [_build(lm, n).eval().requires_grad_(False).to(device) for n in (1, 2)]
    cut = [LanguageModel.from_module(m, lm.tokenizer, lm.prompt_prefix, **options) for m in models]
    clock = time.thread_time if device.type == "cpu" else time.perf_counter

    def seconds(lm: LanguageModel, n: int) -> float:
        start = clock()
        read(lm, subjects[:n])
        if device.type != "cpu":
            torch.accelerator.synchronize()
        return clock() - start

    for n in (4, 16, 64, len(subjects)):
        # In the first reading of an LM, how it can be read is tested.
        if min(seconds(cut[0], n), seconds(cut[0], n)) > _LEAST_SECONDS:
            break
    seconds(cut[1], n)
    times = [[seconds(each, n) for each in cut] for _ in range(3)]
    one, two = map(min, zip(*times, strict=True))
    counts: list[int] = []
    embedding = models[0].get_input_embeddings()
    with embedding.register_forward_pre_hook(lambda _, args: counts.append(args[0].numel())):
        read(cut[0], subjects[:n])
    n, of_all = min(n, len(subjects)), one + (lm.n_layers - 1) * max(two - one, 0.0)
    size = sum(w.numel() for w in weights), sum(w.nbytes for w in weights) / 2**20
    return ReadingCost(*size, sum(counts) / n, of_all / n, cut[0].reads_prompts or "")


def _build(lm: LanguageModel, n_layers: int) -> Any:
    from transformers import AutoModelForCausalLM

    config = copy.deepcopy(lm._model_config)
    text = config.get_text_config()
    if n_layers != lm.n_layers:
        for name, value in vars(text).items():  # such as the type of each layer
            if isinstance(value, list) and len(value) == lm.n_layers:
                setattr(text, name, value[:n_layers])
        text.num_hidden_layers = n_layers
        text.tie_word_embeddings = True  # takes less memory, and no other time
    vars(config).pop("quantization_config", None)
    return AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
        config,
        dtype=lm.dtype,
        attn_implementation=lm.config.attn_implementation,
        trust_remote_code=lm.config.trust_remote_code,
    )


def describe_cost(
    lm: LanguageModel,
    layout: JointLayout,
    moments: Sequence[torch.Tensor],
    subjects: Sequence[str],
    n_read: int,
    device: torch.device,
    n_processes: int,
) -> str:
    """Return in lines what a probe takes, from a batch of subjects and scatters of its moments."""
    seconds = {"start-up": time.process_time()}
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # in bytes, or elsewhere in KiB
    libraries = peak / (2**20 if sys.platform == "darwin" else 2**10) + _MIB_OF_FIGURES
    cost = estimate_reading(lm, lambda cut, x: domain_rows(cut, layout.reads, x), subjects, device)
    seconds["reading"] = n_read * cost.seconds / n_processes
    n_entries = sum(layout.sizes[source] * layout.sizes[target] for source, target in layout.pairs)
    seconds["scores"] = _PER_PAIR * len(layout.pairs) + _PER_ENTRY * n_entries
    seconds["figures"] = _END + _PER_FIGURE * min(len(layout.pairs), _N_FIGURES)
    statistics = _COPIES * max(one.nbytes for one in moments) / 2**20
    prompts = len(dict(layout.reads))
    return (
        f"LM: {lm.config.name_or_path}, {cost.n_parameters:,} parameters\n"
        f"prompts: {prompts * n_read:,}, {prompts} of a subject, {cost.how}\n"
        f"tokens: {cost.n_tokens * n_read:,.0f}\n"
        f"time: {sum(seconds.values()):,.0f} s ("
        + ", ".join(f"{name} {each:,.0f}" for name, each in seconds.items())
        + f")\nmemory: {cost.mib + statistics + libraries:,.0f} MiB (LM {cost.mib:,.0f}, "
        f"statistics {statistics:,.0f}, libraries and study {libraries:,.0f})\n"
    )
