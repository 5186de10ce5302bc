"""LMs in the files of the programs that save them, against what these programs compute.

Those of transformers, of this main version and of the last one; GGUF files by llama.cpp's own
converter and quantizer; and adapters of every type that peft knows.
"""

import json
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

from lincorr_lightning import LanguageModel
from lincorr_lightning.errors import LanguageModelError
from tests.real_writers.conftest import Write
from tests.real_writers.written_lms import assert_same_logits, case_names

pytestmark = pytest.mark.nightly

NO_WEIGHTS = "which the installed peft cannot merge into an LM's weights"
BY_THE_INPUT = "which peft cannot merge into the LM's weights with these settings"
WAY_OUT = "ass the Hugging Face checkpoint that .* made from"


class Written(NamedTuple):
    """What a writer writes: how many LMs, and which of them are refused with which reason."""

    n_lms: int
    refused: dict[str, str]
    n_tokenizers: int = 0
    suffix: str = ""  # of files


REFUSED = {"backbone": "lack lm_head.weight", "variant": "fp16.safetensors is a variant"}
WRITERS = {
    "transformers": Written(53, REFUSED, 2),
    # Without the prefix of its keys, peft itself reads nothing of an adapter.
    "transformers_4": Written(55, REFUSED | {"adapter-bare": "lacks base_model.model"}, 5),
    "llama_cpp": Written(
        58,
        {
            **dict.fromkeys(("cohere", "granite", "olmo2"), f"is not supported yet.*{WAY_OUT}"),
            "falcon": f"query_key_value.weight of .*{WAY_OUT}",
            "llama-biases": f"has blk.0.attn_k.bias.*{WAY_OUT}",
            "mixtral": f"has llama.expert_count.*{WAY_OUT}",
            "qwen2_moe": f"shared_expert_gate.weight of .*{WAY_OUT}",
            "split-00001-of-00003": "gguf-split",
        },
        2,
        ".gguf",
    ),
    "peft": Written(
        98,
        {
            "adaption-prompt": f"peft_type ADAPTION_PROMPT, {NO_WEIGHTS}",
            "arrow": "peft_type LORA with arrow_config",
            "cartridge": f"peft_type CARTRIDGE, {NO_WEIGHTS}",
            "cpt": f"peft_type CPT, {NO_WEIGHTS}",
            "lily": f"peft_type LILY, {BY_THE_INPUT}",
            "lora-alora": f"peft_type LORA, {BY_THE_INPUT} .*aLoRA",
            "lora-pissa-niter": "pissa_niter_4, which first changed the LM's own weights",
            "lora-replicated": "merged LM has other logits",
            "multitask-prompt-tuning": f"peft_type MULTITASK_PROMPT_TUNING, {NO_WEIGHTS}",
            "p-tuning": f"peft_type P_TUNING, {NO_WEIGHTS}",
            "poly": f"peft_type POLY, {BY_THE_INPUT}",
            "prefix-tuning": f"peft_type PREFIX_TUNING, {NO_WEIGHTS}",
            "prompt-tuning": f"peft_type PROMPT_TUNING, {NO_WEIGHTS}",
            "shadow": f"peft_type SHADOW, {BY_THE_INPUT}",
            "several": "Did you mean first, mixed, second in it",
            "xlora": f"peft_type XLORA, {NO_WEIGHTS}",
        },
    ),
}
FOLDERS = {f"several-{name}": f"several/{name}" for name in ("first", "mixed", "second")}
FOLDERS["arrow"] = "arrow/arrow_router"
PIECES = {"llama-legacy", "llama-slow"}  # tokenizers of sentencepiece


@pytest.mark.parametrize("writer", WRITERS)
def test_lms_of(writer: str, write: Write, subtests: pytest.Subtests) -> None:
    folder, (n_lms, refused, n_tokenizers, suffix) = write(writer), WRITERS[writer]
    names = case_names(folder) | refused.keys()
    names |= {path.parent.name for path in folder.glob("*/adapter_config.json")}
    names -= {f"lora-{start}-converted-start" for start in ("pissa", "olora")}
    assert len(names) == n_lms, sorted(names)
    for name in sorted(names):
        path = str(folder / FOLDERS.get(name, f"{name}{suffix}"))
        with subtests.test(name):
            if name in refused:
                with pytest.raises(LanguageModelError, match=refused[name]):
                    LanguageModel.from_pretrained(path)
                continue
            assert_same_logits(LanguageModel.from_pretrained(path), folder / f"{name}.npz")
            saved = np.load(folder / f"{name}.npz")
            if writer == "peft":  # an adapter matters
                change = np.abs(saved["logits"] - saved["before"]).max()
                assert change > 0.01 * np.abs(saved["logits"]).max()
    tokenizers = list(folder.glob("tokenizer-*.json"))
    assert len(tokenizers) == n_tokenizers, tokenizers
    for path in tokenizers:
        with subtests.test(path.stem):
            _check_tokenizer(path, suffix)


def _check_tokenizer(path: Path, suffix: str) -> None:
    """Compare token ids; without sentencepiece, an error names that package."""
    lm = str(path.with_suffix(suffix))
    if path.stem.removeprefix("tokenizer-") in PIECES:
        if find_spec("sentencepiece") is None:
            with pytest.raises(LanguageModelError, match="pip install sentencepiece"):
                LanguageModel.from_pretrained(lm)
        return
    texts, ids = json.loads(path.read_text())
    tokenizer = LanguageModel.from_pretrained(lm).tokenizer
    assert [tokenizer(text)["input_ids"] for text in texts] == ids
