"""Small random LMs of many architectures, and the naive way to ask them."""

from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers as hf
from tokenizers import Tokenizer, models, pre_tokenizers, processors

TEXT = """Paris London Tokyo Oslo Lima lives in the city of country speaks language and his
favorite color is red blue One day saw a very old house by river"""
WORDS = TEXT.split()
SPECIAL = ["<pad>", "<unk>", "<s>", "</s>"]
VOCAB = len(SPECIAL) + len(WORDS)
TOKEN_IDS = [5, 30, 4, 17, 22, 9, 2]

PROMPTS = [
    "Paris",
    "Lima lives in the city of",
    "One day Oslo saw a",
    "Tokyo lives in the country of",
    "London speaks the language",
    "and",
    "a very old house by the river in the country of Paris and London saw Tokyo",
    "red blue",
    "his favorite color is",
    "Oslo",
]

_SMALL: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2,
    "max_position_embeddings": 32, "pad_token_id": 0, "bos_token_id": 2, "eos_token_id": 3,
}  # fmt: skip
_GATED = _SMALL | {"intermediate_size": 24, "num_key_value_heads": 1}
_GPT = {"vocab_size": VOCAB, "n_positions": 32, "n_embd": 16, "n_layer": 2, "n_head": 2,
        "bos_token_id": 2, "eos_token_id": 3}  # fmt: skip

ARCHITECTURES: dict[str, Callable[[], hf.PreTrainedConfig]] = {
    "llama": lambda: hf.LlamaConfig(**_GATED, tie_word_embeddings=False),
    "llama-tied": lambda: hf.LlamaConfig(**_GATED, tie_word_embeddings=True),
    "gpt2": lambda: hf.GPT2Config(**_GPT),
    "gpt2-untied": lambda: hf.GPT2Config(**_GPT, tie_word_embeddings=False),
    "gpt-neox": lambda: hf.GPTNeoXConfig(**_SMALL, intermediate_size=24),
    "opt": lambda: hf.OPTConfig(**_SMALL, ffn_dim=24, word_embed_proj_dim=12),
    "gemma2": lambda: hf.Gemma2Config(**_GATED, head_dim=8, final_logit_softcapping=2.0),
    "phi": lambda: hf.PhiConfig(**_SMALL, intermediate_size=24),
    "cohere": lambda: hf.CohereConfig(**_GATED, logit_scale=0.25),
    "granite": lambda: hf.GraniteConfig(**_GATED, logits_scaling=8.0),
    "gptj": lambda: hf.GPTJConfig(**_GPT, rotary_dim=4, tie_word_embeddings=False),
    "bloom": lambda: hf.BloomConfig(
        vocab_size=VOCAB, hidden_size=16, n_layer=2, n_head=2, bos_token_id=2, eos_token_id=3
    ),
    "mamba": lambda: hf.MambaConfig(
        vocab_size=VOCAB, hidden_size=16, num_hidden_layers=2, state_size=4, use_cache=False
    ),
    "bert-decoder": lambda: hf.BertConfig(**_SMALL, intermediate_size=24, is_decoder=True),
}


def word_tokenizer(template: str | None = "<s> $A", **options: Any) -> hf.PreTrainedTokenizerFast:
    """A word-level tokenizer whose ids are the positions in SPECIAL + WORDS."""
    vocab = {word: i for i, word in enumerate(SPECIAL + WORDS)}
    backend = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    if template is not None:
        specials = [("<s>", 2), ("</s>", 3)]
        backend.post_processor = processors.TemplateProcessing(
            single=template, special_tokens=specials
        )
    named = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"} | options
    return hf.PreTrainedTokenizerFast(tokenizer_object=backend, **named)


def random_model(config: hf.PreTrainedConfig, seed: int = 0) -> Any:
    """A model with large random weights everywhere, biases and norms included."""
    torch.manual_seed(seed)
    model = hf.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.5)
            elif "A_log" not in name:
                parameter.add_(torch.randn_like(parameter) * 0.3)
    return model.eval()


def save_lm(folder: Path, config: hf.PreTrainedConfig, template: str | None = "<s> $A") -> Path:
    random_model(config).save_pretrained(folder)
    word_tokenizer(template).save_pretrained(folder)
    return folder


def word_ids(prompt: str, bos: bool = True) -> list[int]:
    return [2] * bos + [(SPECIAL + WORDS).index(word) for word in prompt.split()]


@torch.no_grad()
def naive_logits(
    model: Any, prompts: Sequence[str], token_ids: Sequence[int], bos: bool = True
) -> torch.Tensor:
    """One unpadded prompt at a time, all logits, sliced."""
    rows = []
    for prompt in prompts:
        logits = model(input_ids=torch.tensor([word_ids(prompt, bos)])).logits
        rows.append(logits[0, -1][list(token_ids)])
    return torch.stack(rows).double()


@pytest.fixture(scope="session")
def lm_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Folder of an architecture's LM, made once."""
    made: dict[tuple[str, str | None], Path] = {}

    def folder(name: str, template: str | None = "<s> $A") -> Path:
        if (name, template) not in made:
            path = tmp_path_factory.mktemp(name)
            made[name, template] = save_lm(path, ARCHITECTURES[name](), template)
        return made[name, template]

    return folder


@pytest.fixture(scope="session")
def small() -> SimpleNamespace:
    """The helpers of this file, which test files cannot import."""
    return SimpleNamespace(
        prompts=PROMPTS, token_ids=TOKEN_IDS, architectures=ARCHITECTURES, vocab=VOCAB,
        tokenizer=word_tokenizer, model=random_model, save=save_lm, ids=word_ids,
        naive=naive_logits,
    )  # fmt: skip


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "architecture" in metafunc.fixturenames:
        metafunc.parametrize("architecture", list(ARCHITECTURES))
