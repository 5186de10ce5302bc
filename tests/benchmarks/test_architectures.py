"""LMs of many architectures: one type for each mechanism here, all of transformers nightly."""

import json
from pathlib import Path
from typing import Any

import pytest
import transformers as hf

from benchmarks.architectures import (
    CHECKS,
    LIMITS,
    PATH,
    Checks,
    examine,
    save_tiny_lm,
    tables,
    types,
)
from benchmarks.common import ROOT, all_text, placed
from lincorr_lightning.errors import LanguageModelError
from lincorr_lightning.lm.finder import target_layers

# Unused cross-attention, an encoder, alibi, clipped attention, latent attention, sizes by layer,
# transposed weights, a hybrid with experts, a state space, an offset of positions, a head with
# bias, linear attention, a cast head, and shared weights.
MECHANISMS = ["bart", "bert", "bloom", "dbrx", "deepseek_v3", "gemma4_text", "gpt2", "jamba"]
MECHANISMS += ["mamba", "opt", "phi", "qwen3_next", "xlstm", "zamba"]
STORED: dict[str, dict[str, str]] = json.loads(PATH.read_text())["types"]


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


def test_layers_that_an_adapter_does_not_fit(tmp_path: Path) -> None:
    for model_type, target in (("zamba", "q_proj"), ("mamba", "dt_proj"), ("big_bird", "pooler")):
        save_tiny_lm(model_type, tmp_path / model_type)
        model = hf.AutoModelForCausalLM.from_pretrained(tmp_path / model_type)
        left = target_layers(model, None)
        assert left and not any(name.endswith(f".{target}") for name in left)
        with pytest.raises(LanguageModelError, match=target):
            target_layers(model, [target])


def test_results_are_whole_and_right() -> None:
    built = [outcomes for outcomes in STORED.values() if outcomes["built"] == "ok"]
    assert not [o for one in built for o in one.values() if o.startswith(("WRONG", "TRACE"))]
    assert all(len(one) == 2 + len(CHECKS) or one["loads"] != "ok" for one in built)
    n_read = sum(one.get("logits", "").startswith("ok") for one in built)
    readme = (ROOT / "README.md").read_text()
    assert f"{n_read} of {len(STORED)} architectures" in " ".join(readme.split())


@pytest.mark.nightly
def test_documents_match_the_results() -> None:
    assert placed(all_text(), tables(STORED)) == all_text()


@pytest.mark.nightly
@pytest.mark.parametrize("model_type", types())
def test_every_type_works_or_is_refused(model_type: str) -> None:
    def kinds(outcomes: dict[str, Any]) -> dict[str, str]:
        return {check: outcome.partition(":")[0] for check, outcome in outcomes.items()}

    outcomes = examine(model_type)
    assert not {"WRONG", "TRACEBACK"} & set(kinds(outcomes).values()), outcomes
    if hf.__version__ == json.loads(PATH.read_text())["transformers"]:
        assert kinds(outcomes) == kinds(STORED[model_type])
