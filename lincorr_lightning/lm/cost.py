"""What reading prompts will take, before an LM's weights are read: from its configuration alone.

Parameters are counted on the meta device. LMs of one and of two layers with random weights, in all
else like the LM, read prompts as a run will: what the second layer adds, every other one does. So
all that reading consists of is measured, and not only its matrix products.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from lincorr_lightning.errors import LanguageModelError
from lincorr_lightning.lm.language_model import LanguageModel

_LEAST_SECONDS, _REPEATS = 0.3, 3  # of a measurement, and of which the shortest counts
_READ_BY = "add_bos", "chat_template", "tokens_per_forward", "share_prefixes"


class ReadingCost(NamedTuple):
    """What reading all prompts of one subject takes, and the size of the LM.

    Attributes:
        n_parameters: Number of parameters of the LM.
        n_bytes: Size of its weights in memory.
        n_tokens: Tokens that pass through the layers, padding included.
        seconds: On a CPU, those of cores that do nothing else.
        how: How the prompts are read, in words.
    """

    n_parameters: int
    n_bytes: int
    n_tokens: float
    seconds: float
    how: str


def estimate_reading(
    lm: LanguageModel,
    read: Callable[[LanguageModel, Sequence[str]], object],
    subjects: Sequence[str],
    device: torch.device,
) -> ReadingCost:
    """Return what reading will take; the weights need not be loaded.

    Args:
        lm: The LM.
        read: Reads the prompts of some subjects with an LM, as the run will.
        subjects: A batch, of which as many are read as take long enough to be timed.
        device: Where the LM will be.

    Raises:
        LanguageModelError: The configuration does not say how many layers there are.
    """
    if lm.n_layers is None:
        raise LanguageModelError(
            f"the configuration of {lm.location} has no num_hidden_layers, so that the time cannot "
            "be estimated. Leave model.dry_run out, and lower data.n_subjects for a first run."
        )
    with torch.device("meta"):
        weights = list(_build(lm, lm.n_layers).parameters())
    cut = [_cut(lm, n_layers, device) for n_layers in (1, 2)]
    n, seconds = min(4, len(subjects)), 0.0
    while seconds < _LEAST_SECONDS:
        n = min(4 * n, len(subjects))
        read(cut[0], subjects[:n])  # the first time it tests how the LM can be read
        seconds = _seconds(read, cut[0], subjects[:n])
        if n == len(subjects):
            break
    read(cut[1], subjects[:n])
    taken = [[_seconds(read, one, subjects[:n]) for one in cut] for _ in range(_REPEATS)]
    one, two = map(min, zip(*taken, strict=True))
    return ReadingCost(
        sum(weight.numel() for weight in weights),
        sum(weight.nbytes for weight in weights),
        _n_tokens(read, cut[0], subjects[:n]) / n,
        (one + (lm.n_layers - 1) * max(two - one, 0.0)) / n,
        cut[0].reads_prompts or "",
    )


def _build(lm: LanguageModel, n_layers: int) -> Any:
    """Return an LM of this configuration with fewer layers and random weights."""
    from transformers import AutoModelForCausalLM

    config = copy.deepcopy(lm._model_config)
    text = config.get_text_config()
    for name, value in vars(text).items():  # such as the type of each layer
        if isinstance(value, list) and len(value) == lm.n_layers:
            setattr(text, name, value[:n_layers])
    text.num_hidden_layers = n_layers
    if n_layers != lm.n_layers:
        text.tie_word_embeddings = True  # takes less memory, and no other time
    vars(config).pop("quantization_config", None)
    options: dict[str, Any] = {"trust_remote_code": lm.config.trust_remote_code}
    if lm.config.attn_implementation is not None:
        options["attn_implementation"] = lm.config.attn_implementation
    kind: Any = AutoModelForCausalLM
    return kind.from_config(config, dtype=lm.dtype, **options)


def _cut(lm: LanguageModel, n_layers: int, device: torch.device) -> LanguageModel:
    model = _build(lm, n_layers).requires_grad_(False).eval().to(device)
    options = {name: getattr(lm.config, name) for name in _READ_BY}
    return LanguageModel.from_module(model, lm.tokenizer, lm.prompt_prefix, **options)


def _seconds(read: Callable[..., object], lm: LanguageModel, subjects: Sequence[str]) -> float:
    """Return the time of a reading; on a CPU that of this thread, whatever else it computes."""
    clock = time.thread_time if lm.model.device.type == "cpu" else time.perf_counter
    start = clock()
    read(lm, subjects)
    if lm.model.device.type != "cpu":
        torch.accelerator.synchronize()
    return clock() - start


def _n_tokens(read: Callable[..., object], lm: LanguageModel, subjects: Sequence[str]) -> int:
    counts: list[int] = []
    embedding = lm.model.get_input_embeddings()
    with embedding.register_forward_pre_hook(lambda _, args: counts.append(args[0].numel())):
        read(lm, subjects)
    return sum(counts)
