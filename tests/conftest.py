"""Shared by all tests. The environment is set before anything imports torch or transformers."""

import os
from collections.abc import Callable
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest files first, so that no worker has one left when the others are done."""
    long = ("tests/readme", "tests/cli/test_configs", "tests/flow", "tests/processes")
    items.sort(key=lambda item: not any(part in item.nodeid for part in long))


WORDS = (
    """lives in the city of country speaks language favorite color ’s is was born One day saw a
Paris London Tokyo Berlin Madrid Rome Vienna Oslo Cairo Lima Beijing Moscow
France Japan Germany Spain Italy Austria Norway Egypt Peru China Russia
red blue green yellow black white"""
).split()


def build_small_lm(folder: Path, seed: int = 0, hidden_size: int = 16) -> Path:
    """Save a random word-level Llama that has words for some cities, countries and colours."""
    import torch
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    words = ["<pad>", "<unk>", *WORDS, ",", *(f"name{i}" for i in range(400))]
    tokenizer = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.WhitespaceSplit(),
            pre_tokenizers.Split(Regex("’s|,"), behavior="isolated"),
        ]
    )
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", unk_token="<unk>"
    ).save_pretrained(folder)
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=len(words), hidden_size=hidden_size, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=2, max_position_embeddings=64,
        tie_word_embeddings=True, initializer_range=0.4, pad_token_id=0, bos_token_id=None,
        eos_token_id=None,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def make_lm() -> Callable[..., Path]:
    """`build_small_lm`, for tests that need another LM than the shared one."""
    return build_small_lm


@pytest.fixture(scope="session")
def small_lm(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Folder of a random LM whose logits mean nothing but obey the same algebra."""
    return str(build_small_lm(tmp_path_factory.mktemp("small_lm")))
