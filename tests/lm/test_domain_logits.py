"""Domain logits against the naive way: one unpadded prompt at a time, all logits, sliced."""

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
import transformers as hf
from torch import nn
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from lincorr_lightning.errors import LanguageModelError
from lincorr_lightning.lm.language_model import LanguageModel
from tests.lm.small_lms import (
    PROMPTS,
    TOKEN_IDS,
    VOCAB,
    Folder,
    config_of,
    naive_logits,
    random_model,
    small_tokenizer,
)
from tests.toys import toy_model, word_tokenizer

TOLERANCE = 1e-4


@pytest.mark.parametrize("bos", [True, False])
def test_batch_of_unequal_prompts_equals_single_prompts(
    architecture: str, bos: bool, lm_folder: Folder
) -> None:
    folder = lm_folder(architecture, "<s> $A" if bos else None)
    lm = LanguageModel.from_pretrained(str(folder))
    ours = lm.domain_logits(PROMPTS, TOKEN_IDS)
    assert ours.dtype == torch.float64
    assert ours.shape == (len(PROMPTS), len(TOKEN_IDS))
    naive = naive_logits(hf.AutoModelForCausalLM.from_pretrained(folder), PROMPTS, TOKEN_IDS, bos)
    assert naive.std() > 0.1
    assert (ours - naive).abs().max() <= TOLERANCE
    # The fast way was taken: nothing here falls back to all logits.
    assert [how.by_rows for how in lm._tested.values()] == [True]


def test_order_batch_size_and_duplicates_do_not_matter(lm_folder: Folder) -> None:
    lm = LanguageModel.from_pretrained(str(lm_folder("gpt2")))
    prompts, tokens = PROMPTS, TOKEN_IDS
    whole = lm.domain_logits(prompts, tokens)
    torch.testing.assert_close(
        lm.domain_logits(prompts[::-1] + prompts[:1], tokens),
        torch.cat([whole.flip(0), whole[:1]]),
        atol=1e-5,
        rtol=0,
    )
    narrow = LanguageModel.from_pretrained(str(lm_folder("gpt2")), tokens_per_forward=7)
    torch.testing.assert_close(narrow.domain_logits(prompts, tokens), whole, atol=1e-5, rtol=0)
    # Several domains in one call, and as a tensor.
    two = lm.domain_logits(prompts, torch.tensor([*tokens[:3], *tokens[1:]]))
    torch.testing.assert_close(two, torch.cat([whole[:, :3], whole[:, 1:]], 1), atol=1e-12, rtol=0)
    assert lm.domain_logits([], tokens).shape == (0, len(tokens))


def test_logits_have_the_rank_of_the_hidden_size_exactly(lm_folder: Folder) -> None:
    # More labels than dimensions: only a float64 product keeps the surplus at zero.
    lm = LanguageModel.from_pretrained(str(lm_folder("llama")))
    words = [w for w in lm.tokenizer.get_vocab() if w.isalpha()]
    logits = lm.domain_logits([f"{a} {b}" for a in words for b in words[:4]], range(2, 33))
    values = torch.linalg.svdvals(logits)
    assert values[15] > 1e-3 * values[0]
    assert values[16] < 1e-13 * values[0]


# -- heads that are none of the usual ones ----------------------------------------------------


class ScaledAround(hf.LlamaForCausalLM):
    """Scales before and after its head, under names of its own."""

    def forward(self, input_ids: Any = None, attention_mask: Any = None, **kwargs: Any) -> Any:
        out = self.model(input_ids=input_ids, attention_mask=attention_mask, **kwargs)
        logits = torch.tanh(self.lm_head(3.0 * out.last_hidden_state) / 7.0 + 0.2)
        return hf.modeling_outputs.CausalLMOutputWithPast(logits=logits)


class Normalized(hf.LlamaForCausalLM):
    """Each logit depends on all the others."""

    def forward(self, input_ids: Any = None, attention_mask: Any = None) -> Any:
        out = self.model(input_ids=input_ids, attention_mask=attention_mask)
        logits = self.lm_head(out.last_hidden_state).log_softmax(-1)
        return hf.modeling_outputs.CausalLMOutputWithPast(logits=logits)


class OwnHead(nn.Module):
    """A head that is more than a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(33, 16))
        self.second = nn.Linear(16, 16)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.second(hidden).relu() @ self.weight.T


@pytest.mark.parametrize(("kind", "by_rows"), [(ScaledAround, True), (Normalized, False)])
def test_unknown_architecture(kind: type, by_rows: bool) -> None:
    model = random_model(config_of("llama"))
    model.__class__ = kind
    lm = LanguageModel.from_module(model, small_tokenizer())
    ours = lm.domain_logits(PROMPTS, TOKEN_IDS)
    naive = naive_logits(model, PROMPTS, TOKEN_IDS)
    assert (ours - naive).abs().max() <= TOLERANCE
    assert [how.by_rows for how in lm._tested.values()] == [by_rows]


class Adapted(nn.Linear):
    """Like LoRA of its first day: what it adds to its weight is still zero."""

    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__(weight.shape[1], weight.shape[0], bias=False)
        self.weight = nn.Parameter(weight.detach())
        self.delta = nn.Parameter(torch.zeros_like(weight))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return super().forward(hidden) + hidden @ self.delta.T


@pytest.mark.parametrize("make", [lambda head: OwnHead(), lambda head: Adapted(head.weight)])
def test_other_heads(make: Callable[[nn.Linear], nn.Module]) -> None:
    model = random_model(config_of("llama"))
    model.lm_head = make(model.lm_head)
    lm = LanguageModel.from_module(model, small_tokenizer())
    n_read: list[int] = []
    model.lm_head.register_forward_hook(lambda _, args, out: n_read.append(args[0].shape[1]))
    lm.domain_logits(["Paris lives in"], TOKEN_IDS)
    assert n_read[-1] == 1, "the logits of earlier positions are not computed"
    for _ in range(2):
        ours = lm.domain_logits(PROMPTS, TOKEN_IDS)
        naive = naive_logits(model, PROMPTS, TOKEN_IDS)
        assert (ours - naive).abs().max() <= TOLERANCE
        if isinstance(model.lm_head, Adapted):  # an adapter adds nothing before it is trained
            nn.init.normal_(model.lm_head.delta)
        else:  # a head of another type is tested again
            model.lm_head = nn.Linear(16, VOCAB)


def test_bidirectional_lm_is_refused() -> None:
    config = config_of("bert-decoder")
    config.is_decoder = False
    lm = LanguageModel.from_module(random_model(config), small_tokenizer())
    with pytest.raises(LanguageModelError, match="BertLMHeadModel is not causal"):
        lm.domain_logits(PROMPTS, TOKEN_IDS)


def test_a_vocabulary_without_the_words_of_the_test() -> None:
    model = random_model(config_of("llama"))
    lm = LanguageModel.from_module(model, word_tokenizer(["Oslo", "Lima"]))
    ours = lm.logits_of_rows([[2, 3], [3, 2, 2]], TOKEN_IDS)
    assert [how.by_rows for how in lm._tested.values()] == [True]
    with torch.no_grad():
        naive = model(input_ids=torch.tensor([[2, 3]])).logits[0, -1, TOKEN_IDS]
    assert (ours[0] - naive).abs().max() <= TOLERANCE


def test_an_lm_in_half_precision_that_is_frozen_after_its_training() -> None:
    model = random_model(config_of("mamba")).bfloat16()
    lm = LanguageModel.from_module(model.requires_grad_(True), small_tokenizer())
    lm.domain_logits(PROMPTS, TOKEN_IDS)
    model.requires_grad_(False)
    ours = lm.logits_of_groups(lm.rows(PROMPTS), TOKEN_IDS, range(len(PROMPTS)))
    naive = naive_logits(deepcopy(model).float(), PROMPTS, TOKEN_IDS)
    assert (ours - naive).abs().max() <= TOLERANCE


# -- side effects -----------------------------------------------------------------------------


@pytest.mark.parametrize("joint", [False, True])
def test_reading_a_model_in_training_changes_nothing(joint: bool) -> None:
    config = config_of("gpt2")
    config.resid_pdrop = config.attn_pdrop = 0.5
    model = random_model(config)
    naive = naive_logits(model, PROMPTS, TOKEN_IDS)
    model.train()
    model.transformer.h[0].eval()
    modes = {name: part.training for name, part in model.named_modules()}
    state = {name: value.clone() for name, value in model.state_dict().items()}
    random_state = torch.get_rng_state()
    lm = LanguageModel.from_module(model, small_tokenizer())
    with torch.autocast("cpu", torch.bfloat16):
        if joint:
            # Twice the same prompts, which share everything.
            twice = lm.joint_logits([PROMPTS] * 2, [TOKEN_IDS] * 2)
            assert lm.reads_prompts == "with shared prefixes (2.0 times fewer tokens)"
            ours = twice[:, : len(TOKEN_IDS)]
        else:
            ours = lm.domain_logits(PROMPTS, TOKEN_IDS)
        assert torch.is_autocast_enabled("cpu")
    assert (ours - naive).abs().max() <= TOLERANCE
    assert not ours.requires_grad and not ours.is_inference()
    assert {name: part.training for name, part in model.named_modules()} == modes
    assert torch.equal(torch.get_rng_state(), random_state)
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert all(p.requires_grad and p.grad is None for p in model.parameters())
    assert "forward" not in model.lm_head.__dict__


def test_half_precision_takes_the_fast_way(lm_folder: Folder) -> None:
    exact = LanguageModel.from_pretrained(str(lm_folder("llama")))
    half = LanguageModel.from_pretrained(str(lm_folder("llama")), dtype="bfloat16")
    ours = half.domain_logits(PROMPTS, TOKEN_IDS)
    expected = exact.domain_logits(PROMPTS, TOKEN_IDS)
    assert (ours - expected).abs().max() <= 0.05 * expected.abs().max()
    assert [how.by_rows for how in half._tested.values()] == [True]
    # Not on the dtype's own grid: the head's product was not rounded to it.
    assert not torch.equal(ours, ours.to(half.model.dtype).double())


_LONG = {"rope_theta": 1e4, "rope_type": "longrope", "original_max_position_embeddings": 8}
_LONG |= {"short_factor": [1.0] * 4, "long_factor": [2.0, 4.0, 8.0, 16.0], "attention_factor": 1.2}
_PLAIN = {"rope_theta": 1e4, "rope_type": "default"}


@pytest.mark.parametrize("is_shared", [False, True])
@pytest.mark.parametrize(
    ("architecture", "changes"),
    [
        ("llama", {"rope_parameters": _LONG}),
        ("gemma3", {"rope_parameters": {"sliding_attention": _PLAIN, "full_attention": _LONG}}),
        (
            "qwen2",
            {"rope_parameters": {"rope_theta": 1e4, "rope_type": "dynamic", "factor": 8.0}}
            | {"max_position_embeddings": 8},
        ),
    ],
)
def test_positions_that_depend_on_the_longest_row(architecture, changes, is_shared):
    types = {"layer_types": ["sliding_attention", "full_attention"]}
    changes = changes | (types if architecture == "gemma3" else {})
    row = torch.randint(2, 50, (20,), generator=torch.Generator().manual_seed(0)).tolist()
    rows = [row[:n] for n in (4, 20, 7, 8, 9, 12, 20)]
    expected = []
    for ids in rows:
        model = toy_model(architecture, **changes)
        with torch.no_grad():
            expected.append(model(torch.tensor([ids])).logits[0, -1].double())
    model = toy_model(architecture, **changes)
    lm = LanguageModel.from_module(model, word_tokenizer([f"w{i}" for i in range(48)]))
    for _ in range(2):  # dynamic scaling keeps the longest length
        logits = lm.logits_of_groups(rows, range(50), [0 if is_shared else i for i in range(7)])
        torch.testing.assert_close(logits, torch.stack(expected), atol=1e-4, rtol=1e-4)


class Switching(LlamaRotaryEmbedding):
    """Positions of someone's own, by the length of the longest row."""

    def forward(self, x, position_ids):
        return super().forward(x, position_ids * (0.25 if position_ids.max() >= 12 else 1))


def test_positions_of_an_unknown_kind_that_depend_on_the_longest_row():
    model = toy_model("llama", original_max_position_embeddings=12)
    model.model.rotary_emb.__class__ = Switching
    rows = [[5, 6, 7, 8], [*range(5, 25)]]
    expected = [model(torch.tensor([ids])).logits[0, -1].double() for ids in rows]
    lm = LanguageModel.from_module(model, word_tokenizer([f"w{i}" for i in range(48)]))
    logits = lm.logits_of_rows(rows, range(50))
    torch.testing.assert_close(logits, torch.stack(expected).detach(), atol=1e-4, rtol=1e-4)
