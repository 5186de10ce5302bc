"""Logits of prompts that share what they begin with, against one unpadded prompt at a time."""

import random
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers as hf

from lincorr_lightning.errors import ConfigError, LanguageModelError, NonFiniteError
from lincorr_lightning.lm.language_model import LanguageModel
from lincorr_lightning.lm.shared_prefixes import grow_trees, narrowest_window
from tests.lm.small_lms import (
    ARCHITECTURES,
    Folder,
    config_of,
    naive_logits,
    random_model,
    small_tokenizer,
)

TOLERANCE = 1e-4
# Those whose positions or memory are their own: ALiBi, and a recurrent one.
ALONE = {"bloom", "mamba"}

INPUTS = ["Paris", "Lima", "old house", "Oslo and Tokyo", "red", "London"]
# Two that part late, one of which ends within another, one twice, and two that do not begin with X.
TEMPLATES = [
    "{} lives in the city of",
    "{} lives in the country of",
    "{} lives in the",
    "{} speaks the language",
    "{} lives in the city of",
    "One day {} saw a",
    "One day {} saw a very old house by",
    "{}",
]
DOMAINS = [[5, 30, 4], [17, 22, 9, 2], [6], [5, 30], [11, 12], [7, 8, 9], [20, 5], [31]]


def prompts(inputs: list[str] = INPUTS, templates: list[str] = TEMPLATES) -> list[list[str]]:
    return [[template.format(x) for x in inputs] for template in templates]


def naive(model: Any, bos: bool = True, **which: Any) -> torch.Tensor:
    domains = which.pop("domains", DOMAINS)
    return torch.cat(
        [
            naive_logits(model, about, tokens, bos)
            for about, tokens in zip(prompts(**which), domains, strict=True)
        ],
        1,
    )


@pytest.mark.parametrize(
    ("architecture", "bos", "attention"),
    [*((name, True, None) for name in ARCHITECTURES), ("llama", False, "eager")],
)
def test_shared_equals_single_prompts(
    architecture: str, bos: bool, attention: str | None, lm_folder: Folder
) -> None:
    folder = lm_folder(architecture, "<s> $A" if bos else None)
    lm = LanguageModel.from_pretrained(str(folder), attn_implementation=attention)
    # The fifth is the first: both are read after the same prompts, once.
    distinct = [*TEMPLATES[:4], *TEMPLATES[5:]]
    at = [distinct.index(template) for template in TEMPLATES]
    ours = lm.joint_logits(prompts(templates=distinct), DOMAINS, at)
    assert ours.dtype == torch.float64
    expected = naive(lm.model, bos)
    assert expected.std() > 0.1
    assert (ours - expected).abs().max() <= TOLERANCE * expected.abs().max()
    assert lm.reads_prompts is not None
    assert lm.reads_prompts.startswith(
        "one by one" if architecture in ALONE else "with shared prefixes"
    )
    if architecture in ALONE:
        with pytest.raises(LanguageModelError, match=r"lm\.share_prefixes is true, but"):
            LanguageModel.from_pretrained(str(folder), share_prefixes=True).joint_logits(
                prompts(), DOMAINS
            )


@pytest.mark.parametrize("tokens_per_forward", [3, 40])
def test_batch_size_does_not_matter(tokens_per_forward: int, lm_folder: Folder) -> None:
    lm = LanguageModel.from_pretrained(
        str(lm_folder("llama")), tokens_per_forward=tokens_per_forward, share_prefixes=True
    )
    expected = naive(lm.model)
    assert (lm.joint_logits(prompts(), DOMAINS) - expected).abs().max() <= TOLERANCE


def test_settings(lm_folder: Folder, read_tokens: list[int]) -> None:
    folder = str(lm_folder("gpt2"))

    def tokens(share: Any, templates: list[str]) -> int:
        lm = LanguageModel.from_pretrained(folder, share_prefixes=share)
        domains = DOMAINS[: len(templates)]
        lm.joint_logits(prompts(templates=templates), domains)  # the probes' forwards, once
        read_tokens.clear()
        ours = lm.joint_logits(prompts(templates=templates), domains)
        expected = naive(lm.model, templates=templates, domains=domains)
        assert (ours - expected).abs().max() <= TOLERANCE
        return sum(read_tokens)

    assert tokens("auto", TEMPLATES) < 0.6 * tokens(False, TEMPLATES)
    unlike = ["One day {} saw a", "{} speaks the language"]
    assert tokens("auto", unlike) == tokens(False, unlike)
    assert tokens(True, unlike) < tokens(False, unlike) + 2 * len(INPUTS)
    assert tokens("auto", TEMPLATES[:1]) == tokens(False, TEMPLATES[:1])
    with pytest.raises(ConfigError, match=r"lm\.share_prefixes is 'yes'"):
        LanguageModel.from_pretrained(folder, share_prefixes="yes")


@pytest.mark.parametrize("window", [4, 64])
def test_sliding_window(window: int) -> None:
    config = config_of("mistral", sliding_window=window)
    model = random_model(config)
    lm = LanguageModel.from_module(model, small_tokenizer())
    ours = lm.joint_logits(prompts(), DOMAINS)
    expected = naive(model)
    assert (ours - expected).abs().max() <= TOLERANCE
    narrow = f"one by one: its attention window is {window} tokens"
    assert (lm.reads_prompts or "").startswith(narrow if window == 4 else "with shared prefixes")
    # The window is felt, so that reading past it would be seen.
    config.sliding_window = 64
    wide = random_model(config)
    assert (naive(wide) - expected).abs().max() > 0.01 or window == 64


def test_windows_in_configs() -> None:
    def window(config: Any) -> int | None:
        return narrowest_window(SimpleNamespace(config=config))  # type: ignore[arg-type]

    assert window(hf.Qwen2Config(sliding_window=4096, use_sliding_window=True)) == 4096
    assert window(hf.LlamaConfig()) is None
    assert window(hf.GPTNeoConfig(window_size=256)) == 256
    assert window(hf.GPT2Config()) is None


class Blind(hf.LlamaForCausalLM):
    """Takes positions, and counts its own."""

    def forward(self, input_ids: Any = None, **kwargs: Any) -> Any:
        kwargs.pop("position_ids", None)
        return super().forward(input_ids=input_ids, **kwargs)


class Leaky(hf.LlamaForCausalLM):
    """Takes a mask, and lets each token see all before it."""

    def forward(self, input_ids: Any = None, attention_mask: Any = None, **kwargs: Any) -> Any:
        del attention_mask
        return super().forward(input_ids=input_ids, **kwargs)


@pytest.mark.parametrize("kind", [Blind, Leaky])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_lm_that_only_seems_to_heed_mask_and_positions(kind: type, dtype: torch.dtype) -> None:
    model = random_model(config_of("llama"))
    model.__class__ = kind
    lm = LanguageModel.from_module(model.to(dtype), small_tokenizer())
    lm.joint_logits(prompts(), DOMAINS)
    assert lm.reads_prompts == "one by one: its logits would change"


def test_nan_names_the_prompt() -> None:
    model = random_model(config_of("llama"))
    tokenizer = small_tokenizer()
    with torch.no_grad():
        model.get_input_embeddings().weight[tokenizer.get_vocab()["country"]] = float("nan")
    lm = LanguageModel.from_module(model, tokenizer)
    with pytest.raises(NonFiniteError, match=r"prompt 0 \('Paris lives in the country of'\)"):
        lm.joint_logits(prompts(), DOMAINS)


@pytest.mark.parametrize("most", [1, 4, 256])
def test_trees_hold_every_prompt_and_each_beginning_once(most: int) -> None:
    chance = random.Random(most)
    rows = [[chance.randrange(3) for _ in range(chance.randint(1, 6))] for _ in range(30)]
    trees = list(grow_trees(dict(enumerate(rows)), most))
    paths = {}
    for tree in trees:
        for index, node in tree.ends:
            path = []
            while node >= 0:
                path.append(tree.token_ids[node])
                node = tree.parents[node]
            paths[index] = path[::-1]
        longest = max(len(paths[index]) for index, _ in tree.ends)
        assert len(tree.token_ids) <= max(most, longest)
    assert paths == dict(enumerate(rows))
    if most == 256:
        (tree,) = trees
        assert len(tree.token_ids) == len({tuple(row[:i]) for row in rows for i in range(1, 7)})


def test_no_prompts_and_unknown_tokens(lm_folder: Folder) -> None:
    lm = LanguageModel.from_pretrained(str(lm_folder("gemma2")))
    assert lm.joint_logits([[], []], [[4], [5, 6]]).shape == (0, 3)
    with pytest.raises(LanguageModelError, match="token id 99"):
        lm.joint_logits(prompts(), [*DOMAINS[:-1], [99]])


def test_head_that_is_not_linear() -> None:
    model = random_model(config_of("llama"))
    model.lm_head = torch.nn.Sequential(model.lm_head)
    lm = LanguageModel.from_module(model, small_tokenizer())
    ours = lm.joint_logits(prompts(), DOMAINS)
    assert (ours - naive(model)).abs().max() <= TOLERANCE
    assert lm.reads_prompts == "one by one: its head is not a plain linear layer"


@pytest.mark.slow
@pytest.mark.parametrize(  # a C++ compiler takes minutes
    "backend", ["eager", pytest.param("inductor", marks=pytest.mark.nightly)]
)
def test_compiled(backend: str, lm_folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=backend))
    lm = LanguageModel.from_pretrained(str(lm_folder("llama")), compile=True)
    expected = naive(LanguageModel.from_pretrained(str(lm_folder("llama"))).model)
    assert (lm.joint_logits(prompts(), DOMAINS) - expected).abs().max() <= TOLERANCE
    assert (lm.reads_prompts or "").startswith("with shared prefixes")
    first = lm.domain_logits(prompts()[0], DOMAINS[0])
    assert (first - expected[:, : len(DOMAINS[0])]).abs().max() <= TOLERANCE
    assert lm.model.model._compiled_call_impl is not None
