"""A short trial of an LM, from which the time of its runs is estimated."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

import torch

from lincorr_lightning.lm.language_model import LanguageModel
from lincorr_lightning.lm.vocabulary import sample_up_to
from lincorr_lightning.reproduce.plan import PlannedRun

_PROMPT = "{} lives in the city of"
_N_SUBJECTS, _N_LABELS = 32, 100
# Reading its config and drawing; and what training an ablation took on vocabularies of LMs.
_START, _MAPPING = 5.0, 30.0
# An update of an edit, in forward and backward passes: the update, and reading its effects.
_PASSES = 2.0


class Trial(NamedTuple):
    """What an LM takes, in seconds.

    Attributes:
        prompt: To read the logits after a prompt.
        update: For a forward and a backward pass of one edit.
    """

    prompt: float
    update: float

    def seconds(self, run: PlannedRun) -> float:
        """Return about how long a run takes."""
        if run.study in ("probe", "after"):
            return _START + run.size * self.prompt
        if run.study == "edits":
            return _START + run.size * _PASSES * self.update
        return _START + run.size * _MAPPING


def time_lm(lm: LanguageModel) -> Trial:
    """Read a few prompts and differentiate their logits, once to warm up and once timed.

    Args:
        lm: The LM, loaded; it is timed where its weights are.

    Raises:
        LanguageModelError: Memory ran out.
    """
    prompts = [_PROMPT.format(x) for x in sample_up_to(lm.tokenizer, _N_SUBJECTS, seed=0)]
    labels = list(range(min(_N_LABELS, len(lm.tokenizer))))
    ids, mask = lm.pad(lm.rows(prompts))
    tokens = torch.tensor(labels, device=ids.device)
    # Of the first layer, so that the backward pass runs through all; the first are the embeddings.
    weight = list(lm.model.parameters())[1]

    def update() -> None:
        weight.requires_grad_(True)
        try:
            torch.autograd.grad(lm(ids, mask, tokens).sum(), weight)
        finally:
            weight.requires_grad_(False)

    seconds = [_seconds(lambda: lm.domain_logits(prompts, labels)), _seconds(update)]
    return Trial(*(one / len(prompts) for one in seconds))


def _seconds(call: Callable[[], object]) -> float:
    call()
    start = time.perf_counter()
    call()
    return time.perf_counter() - start
