"""LMs of many architectures: one type for each mechanism here, all of transformers nightly."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf

from benchmarks.architectures import (
    CHECKS,
    LIMITS,
    PATH,
    TOKENS,
    Checks,
    error_of,
    examine,
    logits_alone,
    save_tiny_lm,
    tables,
    types,
)
from benchmarks.common import ROOT, documents, placed
from lincorr_lightning.errors import LanguageModelError
from lincorr_lightning.finetune.adapters import AdapterSettings, add_adapter, save_merged
from lincorr_lightning.lm.finder import target_layers
from lincorr_lightning.lm.language_model import LanguageModel

MECHANISMS = {
    "afmoe": "experts after dense layers",
    "apertus": "an activation with weights",
    "bart": "a decoder with unused cross-attention",
    "bert": "an encoder as a decoder",
    "big_bird": "an unused pooler",
    "bloom": "alibi",
    "cohere": "scaled logits",
    "dbrx": "clipped attention",
    "deepseek_v3": "latent attention",
    "deepseek_v4": "grouped layers",
    "falcon": "linear layers of its own",
    "falcon_h1": "multipliers",
    "gemma2": "soft caps",
    "gemma3": "multimodal",
    "gemma4_text": "sizes by layer",
    "gpt2": "transposed weights",
    "granite": "scaled embeddings",
    "hrm_text": "layers that run several times",
    "jamba": "hybrid with experts",
    "llama4_text": "chunked attention",
    "mamba": "state space",
    "mbart": "a tokenizer class of its own",
    "mixtral": "mixture of experts",
    "opt": "positions with an offset",
    "phi": "a head with bias",
    "phimoe": "routers of their own",
    "qwen3_next": "linear attention",
    "roberta": "positions after padding",
    "xlstm": "a cast head",
    "zamba": "shared weights",
}


@pytest.fixture(params=MECHANISMS, scope="module")
def checks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Checks:
    folder = tmp_path_factory.mktemp(request.param)
    save_tiny_lm(request.param, folder)
    return Checks(folder)


def test_an_lm_is_read_as_one_prompt_at_a_time(checks: Checks) -> None:
    assert checks.logits() < 1e-4
    shared = checks.shared()
    assert isinstance(shared, str) or shared < 1e-4
    assert checks.bfloat16() < LIMITS["bfloat16"]
    assert checks.widened() < 1e-4


def test_adapters_side_by_side_are_those_alone(checks: Checks) -> None:
    assert checks.side_by_side() < 1e-2


def test_the_saved_lm_is_the_adapted_one(checks: Checks, tmp_path: Path) -> None:
    lm = checks.read()
    targets = set(target_layers(lm.model, None))
    add_adapter(lm.model, AdapterSettings(rank=2))
    adapted = set()
    for name, parameter in lm.model.named_parameters():
        if "lora_B" in name:
            adapted.add(name.partition(".lora_B")[0])
            torch.nn.init.normal_(parameter, std=0.1)
    assert adapted == targets
    expected = lm.logits_of_rows(checks.rows, TOKENS)
    assert error_of(expected, checks.expected) > 0.01
    save_merged(lm, tmp_path / "merged")
    saved = hf.AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype="float32").eval()
    assert error_of(logits_alone(saved, checks.rows), expected) < 1e-3


def test_layers_that_an_adapter_does_not_fit(tmp_path: Path) -> None:
    for model_type, target, reason in (
        ("zamba", "q_proj", "other layers have the same weight"),
        ("mamba", "dt_proj", "a forward pass does not use it"),
        ("big_bird", "pooler", "does not have the rows"),
        ("llama4_text", "router", "not a matrix product"),
    ):
        save_tiny_lm(model_type, tmp_path / model_type)
        model = hf.AutoModelForCausalLM.from_pretrained(tmp_path / model_type)
        left = target_layers(model, None)
        assert left and not any(name.endswith(f".{target}") for name in left)
        with pytest.raises(LanguageModelError, match=rf"{target} of .* cannot have .*({reason})"):
            target_layers(model, [target])


def test_an_lm_that_is_not_causal_is_refused_in_any_dtype(tmp_path: Path) -> None:
    save_tiny_lm("cpmant", tmp_path)
    for dtype in ("float32", "bfloat16"):
        lm = LanguageModel.from_pretrained(
            str(tmp_path), tokenizer=str(tmp_path / "tokenizer"), dtype=dtype
        )
        with pytest.raises(LanguageModelError, match="is not causal"):
            lm.domain_logits(["Paris lives in", "Rome"], [5, 6])


def stored() -> dict[str, dict[str, str]]:
    results: dict[str, dict[str, str]] = json.loads(PATH.read_text())["types"]
    return results


def test_results_are_whole_and_right() -> None:
    results = stored()
    built = [outcomes for outcomes in results.values() if outcomes["built"] == "ok"]
    assert not [o for one in built for o in one.values() if o.startswith(("WRONG", "TRACE"))]
    assert all(len(one) == 2 + len(CHECKS) or one["loads"] != "ok" for one in built)
    n_read = sum(one.get("logits", "").startswith("ok") for one in built)
    readme = (ROOT / "README.md").read_text()
    assert f"{n_read} of {len(results)} architectures" in " ".join(readme.split())


@pytest.mark.nightly
def test_documents_match_the_results() -> None:
    results = stored()
    texts = [path.read_text() for path in documents()]
    assert [placed(text, tables(results)) for text in texts] == texts


@pytest.mark.nightly
@pytest.mark.parametrize("model_type", types())
def test_every_type_works_or_is_refused(model_type: str) -> None:
    def kinds(outcomes: dict[str, Any]) -> dict[str, str]:
        return {check: outcome.partition(":")[0] for check, outcome in outcomes.items()}

    outcomes = examine(model_type)
    assert not {"WRONG", "TRACEBACK"} & set(kinds(outcomes).values()), outcomes
    if hf.__version__ == json.loads(PATH.read_text())["transformers"]:
        assert kinds(outcomes) == kinds(stored()[model_type])
