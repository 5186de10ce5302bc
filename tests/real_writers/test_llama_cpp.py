"""GGUF files by llama.cpp's own converter and quantizer."""

import json
from pathlib import Path

import pytest

from lincorr_lightning import LanguageModel
from lincorr_lightning.errors import LanguageModelError
from tests.real_writers.conftest import Write
from tests.real_writers.written_lms import assert_same_logits, case_names

pytestmark = pytest.mark.nightly

TYPES = """cohere falcon gemma2 gemma3_text gpt2 granite llama llama-biases llama-heads llama-tied
mamba mistral mixtral olmo2 phi3 qwen2 qwen2-tied qwen2_moe qwen3 qwen3_moe stablelm
starcoder2""".split()
WAY_OUT = "ass the Hugging Face checkpoint that .* made from"
REFUSED = {
    **dict.fromkeys(("cohere", "granite", "olmo2"), f"is not supported yet.*{WAY_OUT}"),
    "falcon": f"query_key_value.weight of .*{WAY_OUT}",
    "llama-biases": f"has blk.0.attn_k.bias.*{WAY_OUT}",
    "mixtral": f"has llama.expert_count.*{WAY_OUT}",
    "qwen2_moe": f"shared_expert_gate.weight of .*{WAY_OUT}",
}
ROPES = """rope-linear-llama rope-linear-qwen2 rope-llama3-llama rope-yarn-llama
rope-yarn-qwen2""".split()
KINDS = """f32 f16 bf16 q8_0 Q4_0 Q4_1 Q5_0 Q5_1 Q2_K Q3_K Q4_K Q5_K Q6_K IQ4_NL IQ4_XS""".split()
WEIGHTS = [f"{name}-{kind}" for kind in KINDS for name in ("llama", "qwen2")]
TOKENIZERS = "bpe", "sentencepiece"


@pytest.fixture(scope="module")
def folder(write: Write) -> Path:
    return write("llama_cpp")


def test_all_cases_are_tested(folder: Path) -> None:
    assert json.loads((folder / "not_written.json").read_text()) == {}
    assert case_names(folder) == {*TYPES, *ROPES, *WEIGHTS}
    others = {f"tokenizer-{name}" for name in TOKENIZERS}
    others |= {path.stem for path in folder.glob("split-*.gguf")}
    assert {path.stem for path in folder.glob("*.gguf")} == case_names(folder) | others


@pytest.mark.parametrize("name", [*(n for n in TYPES if n not in REFUSED), *ROPES, *WEIGHTS])
def test_logits_are_those_of_transformers(name: str, folder: Path) -> None:
    lm = LanguageModel.from_pretrained(str(folder / f"{name}.gguf"))
    assert_same_logits(lm, folder / f"{name}.npz")


@pytest.mark.parametrize("name", REFUSED)
def test_types_that_are_refused(name: str, folder: Path) -> None:
    with pytest.raises(LanguageModelError, match=REFUSED[name]):
        LanguageModel.from_pretrained(str(folder / f"{name}.gguf"))


@pytest.mark.parametrize("name", TOKENIZERS)
def test_token_ids_are_those_of_the_tokenizer(name: str, folder: Path) -> None:
    texts, ids = json.loads((folder / f"tokenizer-{name}.json").read_text())
    lm = LanguageModel.from_pretrained(str(folder / f"tokenizer-{name}.gguf"))
    assert [lm.tokenizer(text)["input_ids"] for text in texts] == ids


def test_a_part_of_a_split_file(folder: Path) -> None:
    with pytest.raises(LanguageModelError, match="gguf-split"):
        LanguageModel.from_pretrained(str(min(folder.glob("split-*.gguf"))))
