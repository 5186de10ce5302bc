"""Small random LMs of many architectures, and the naive way to ask them."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers as hf

from tests.toys import randomize, toy_config, word_tokenizer

Folder = Callable[..., Path]

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

# Every way of adding parts, positions, heads and scales that changes how logits are read.
ARCHITECTURES = (
    "llama llama-tied gpt2 gpt2-untied gpt-neox opt gemma2 phi cohere granite gptj bloom mamba "
    "bert-decoder"
).split()


def config_of(name: str, **changes: Any) -> hf.PreTrainedConfig:
    return toy_config(name, VOCAB, bos_token_id=2, eos_token_id=3, **changes)


def small_tokenizer(template: str | None = "<s> $A", **options: Any) -> hf.PreTrainedTokenizerFast:
    """A word-level tokenizer whose ids are the positions in SPECIAL + WORDS."""
    return word_tokenizer(WORDS, SPECIAL, template, **{"pad_token": None} | options)


def random_model(config: hf.PreTrainedConfig, seed: int = 0) -> Any:
    return randomize(hf.AutoModelForCausalLM.from_config(config), seed)


def save_lm(folder: Path, config: hf.PreTrainedConfig, template: str | None = "<s> $A") -> Path:
    random_model(config).save_pretrained(folder)
    small_tokenizer(template).save_pretrained(folder)
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
