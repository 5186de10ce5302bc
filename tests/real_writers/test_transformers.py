"""LMs that transformers saves, in this main version and the last one."""

import json
from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import pytest

from lincorr_lightning import LanguageModel
from lincorr_lightning.errors import LanguageModelError
from tests.real_writers.conftest import Write
from tests.real_writers.written_lms import assert_same_logits, case_names

pytestmark = pytest.mark.nightly

TYPES = """bloom cohere deepseek_v3 falcon gemma2 gemma3_text glm gpt2 gpt_bigcode gpt_neox gptj
granite granitemoe jamba jetmoe llama mamba mixtral olmo2 olmoe opt persimmon phi phi3 phimoe qwen2
qwen2_moe qwen3 qwen3_moe stablelm starcoder2""".split()
WAYS = """backbone-tied bfloat16 float16 generation rope-dynamic rope-linear rope-llama3
rope-longrope rope-yarn sharded sharded-mixture resized-more-untied resized-fewer-untied
resized-padded-untied resized-more-tied resized-fewer-tied resized-padded-tied""".split()
ONLY = {
    "transformers": "granitemoe-fused mixtral-fused qwen2_moe-fused".split(),
    "transformers_4": "adapter bin bin-sharded bin-tied".split(),
}
TOKENIZERS = {
    "transformers": "generic gpt2".split(),
    "transformers_4": "gpt2-fast gpt2-slow llama-fast".split(),
}
PIECES = {"transformers": set(), "transformers_4": {"llama-legacy", "llama-slow"}}
REFUSED = {
    "transformers": {"backbone": "lack lm_head.weight", "variant": "fp16.safetensors is a variant"},
}
# Without the prefix of its keys, peft itself reads nothing of an adapter.
REFUSED["transformers_4"] = REFUSED["transformers"] | {"adapter-bare": "lacks base_model.model"}
CASES = [(writer, name) for writer, more in ONLY.items() for name in sorted([*TYPES, *WAYS, *more])]


@pytest.fixture(scope="module")
def made(write: Write) -> Callable[[str], Path]:
    """Folder of a writer."""
    return cache(write)


@pytest.mark.parametrize("writer", ONLY)
def test_all_cases_are_tested(writer: str, made: Callable[[str], Path]) -> None:
    folder = made(writer)
    assert json.loads((folder / "not_written.json").read_text()) == {}
    assert case_names(folder) == {*TYPES, *WAYS, *ONLY[writer], *REFUSED[writer]}
    tokenizers = {path.stem for path in folder.glob("tokenizer-*.json")}
    assert tokenizers == {f"tokenizer-{name}" for name in {*TOKENIZERS[writer], *PIECES[writer]}}


@pytest.mark.parametrize(("writer", "name"), CASES)
def test_logits_are_those_of_the_writer(
    writer: str, name: str, made: Callable[[str], Path]
) -> None:
    lm = LanguageModel.from_pretrained(str(made(writer) / name))
    assert_same_logits(lm, made(writer) / f"{name}.npz")


@pytest.mark.parametrize("writer", ONLY)
def test_refused(writer: str, made: Callable[[str], Path]) -> None:
    for name, reason in REFUSED[writer].items():
        with pytest.raises(LanguageModelError, match=reason):
            LanguageModel.from_pretrained(str(made(writer) / name))


@pytest.mark.parametrize("writer", ONLY)
def test_token_ids_are_those_of_the_writer(writer: str, made: Callable[[str], Path]) -> None:
    for name in TOKENIZERS[writer]:
        folder = made(writer) / f"tokenizer-{name}"
        texts, ids = json.loads(folder.with_suffix(".json").read_text())
        lm = LanguageModel.from_pretrained(str(folder))
        assert [lm.tokenizer(text)["input_ids"] for text in texts] == ids, name


@pytest.mark.skipif(find_spec("sentencepiece") is not None, reason="sentencepiece is installed")
def test_a_file_of_sentencepiece_names_the_package(made: Callable[[str], Path]) -> None:
    for name in PIECES["transformers_4"]:
        with pytest.raises(LanguageModelError, match="pip install sentencepiece"):
            LanguageModel.from_pretrained(str(made("transformers_4") / f"tokenizer-{name}"))
