"""Threads that share an LM, in turn and in the middle of each other's forward passes."""

import os
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest
import torch

from lincorr_lightning.lm.language_model import LanguageModel
from lincorr_lightning.lm.modes import lock_of
from lincorr_lightning.sae.hook_points import HookPoint
from lincorr_lightning.sae.hooks import edited
from tests.lm.small_lms import (
    PROMPTS,
    TOKEN_IDS,
    config_of,
    naive_logits,
    random_model,
    small_tokenizer,
)

WAIT_S = 0.1

Read = Callable[[LanguageModel], Any]


def domain(lm: LanguageModel) -> torch.Tensor:
    return lm.domain_logits(PROMPTS, TOKEN_IDS)


def groups(lm: LanguageModel) -> torch.Tensor:
    return lm.logits_of_groups(lm.rows(PROMPTS), TOKEN_IDS, range(len(PROMPTS)))


def own(lm: LanguageModel) -> torch.Tensor:
    return naive_logits(lm.model, PROMPTS, TOKEN_IDS)


def halved(lm: LanguageModel) -> torch.Tensor:
    with edited(lm.model, {HookPoint(0, "residual"): lambda x: x / 2}):
        return domain(lm)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("second", [domain, groups, own, halved])
@pytest.mark.parametrize("first", [domain, groups, own, halved])
def test_each_has_its_own_logits(first: Read, second: Read, dtype: torch.dtype) -> None:
    if first is own and (second is halved or (second is groups and dtype != torch.float32)):
        pytest.skip("a forward pass that is running sees hooks, and weights in another dtype")
    lm = LanguageModel.from_module(random_model(config_of("llama")).to(dtype), small_tokenizer())
    expected = first(lm), second(lm)
    layer = lm.model.get_decoder().layers[1]
    other: list[Future[Any]] = []

    def start(*_: object) -> None:
        """Let the second thread begin, and come as far as it can, while this forward waits."""
        if not other:
            other.append(pool.submit(second, lm))
            threading.Event().wait(WAIT_S)

    with ThreadPoolExecutor(1) as pool, layer.register_forward_hook(start):
        read = first(lm)
    torch.testing.assert_close((read, other[0].result()), expected, atol=1e-6, rtol=1e-6)


def test_a_forward_that_ends_while_the_head_is_patched() -> None:
    lm = LanguageModel.from_module(random_model(config_of("llama")), small_tokenizer())
    expected = domain(lm), own(lm)
    reading, ended = threading.Event(), threading.Event()
    main = threading.get_ident()

    def meet(*_: object) -> None:
        if threading.get_ident() == main:
            reading.set()
            ended.wait(10)
        else:
            reading.wait(10)

    layer = lm.model.get_decoder().layers[1]
    with ThreadPoolExecutor(1) as pool, layer.register_forward_hook(meet):
        other = pool.submit(naive_logits, lm.model, PROMPTS[:1], TOKEN_IDS)
        other.add_done_callback(lambda _: ended.set())
        threading.Event().wait(WAIT_S)
        logits = domain(lm)
    assert torch.equal(logits, expected[0]) and torch.equal(other.result(), expected[1][:1])


def test_a_forked_process_does_not_wait_for_threads_of_its_parent() -> None:
    lm = LanguageModel.from_module(random_model(config_of("llama")), small_tokenizer())
    held, read = threading.Event(), threading.Event()

    def hold() -> None:
        with lock_of(lm.model):
            held.set()
            read.wait()

    with ThreadPoolExecutor(1) as pool:
        pool.submit(hold)
        held.wait()
        if not (child := os.fork()):
            os._exit(lock_of(lm.model).acquire(timeout=5) is not True)
        assert os.waitpid(child, 0)[1] == 0
        read.set()
