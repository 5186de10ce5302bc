"""A short trial of an LM, from which the time of its runs is estimated."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from lincorr_lightning.knowledge import Knowledge
from lincorr_lightning.lm.language_model import LanguageModel
from lincorr_lightning.lm.vocabulary import sample_up_to
from lincorr_lightning.reproduce.plan import PlannedRun, n_tokens

_PROMPT = "{} lives in the city of"
_N_SUBJECTS, _N_PROMPTS, _N_LABELS = 16, 10, 100
# Reading its config and drawing; and what an epoch of an ablation took on vocabularies of LMs.
_START, _EPOCH = 5.0, 0.07
# An update of an edit, in forward and backward passes: the update, and reading its effects.
_PASSES = 4.0


class Trial(NamedTuple):
    """What an LM takes, in seconds.

    Attributes:
        token: To read a token of a prompt.
        update: For a forward and a backward pass of one edit.
    """

    token: float
    update: float

    def seconds(self, run: PlannedRun) -> float:
        """Return about how long a run takes."""
        if run.study in ("probe", "after"):
            return _START + run.size * self.token
        if run.study == "edits":
            return _START + run.size * _PASSES * self.update
        return _START + run.size * _EPOCH


def time_lm(lm: LanguageModel, knowledge: Sequence[Knowledge]) -> Trial:
    """Time the reading of a few prompts, as a probe does it, and a backward pass.

    Args:
        lm: The LM, loaded; it is timed where its weights are.
        knowledge: Kinds of knowledge that the LM has labels for.

    Raises:
        LanguageModelError: Memory ran out.
    """
    subjects = sample_up_to(lm.tokenizer, _N_SUBJECTS, seed=0)
    templates = [one.prompt for one in knowledge[:_N_PROMPTS]] or [_PROMPT.format]
    prompts = [[template(x) for x in subjects] for template in templates]
    labels = list(range(min(_N_LABELS, len(lm.tokenizer))))
    ids, mask = lm.pad(lm.rows(prompts[0]))
    tokens = torch.tensor(labels, device=ids.device)
    # Of the first layer, so that the backward pass runs through all; the first are the embeddings.
    weight = list(lm.model.parameters())[1]

    def update() -> None:
        weight.requires_grad_(True)
        try:
            torch.autograd.grad(lm(ids, mask, tokens).sum(), weight)
        finally:
            weight.requires_grad_(False)

    read = _seconds(lambda: lm.joint_logits(prompts, [labels] * len(prompts)))
    n = n_tokens([prompt for row in prompts for prompt in row], lm.tokenizer)
    return Trial(read / n, _seconds(update) / len(subjects))


def _seconds(call: Callable[[], object]) -> float:
    """Return the shorter of two times; the first call also warms up."""
    times = []
    for _ in range(2):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return min(times)
