"""Adapters that peft writes: every type is merged, or refused with a reason."""

import json
from pathlib import Path

import numpy as np
import pytest

from lincorr_lightning import LanguageModel
from lincorr_lightning.errors import LanguageModelError
from tests.real_writers.conftest import Write
from tests.real_writers.written_lms import assert_same_logits, case_names

pytestmark = pytest.mark.nightly

LORA = """alora bdlora bfloat16 bias bias-of-lora dora dora-gpt2 embedding-tied eva every-linear
gaussian gpt2 head head-tied kasa layers mica monteclora olora olora-converted orthogonal parameters
parameters-linear patterns pissa pissa-converted pissa-niter replicated rslora saved
saved-embedding saved-tied saved-tied-together tokens tokens-tied velora""".split()
TYPES = """adalora adamss adaption-prompt arrow beft boft boft-butterfly c3a cartridge cpt deft
deft-qr delora fourierft frod glora gralora gralora-hybrid hira hra ia3 ia3-gpt2 lily ln-tuning
ln-tuning-gpt2 loha lokr lora merged miss miss-bat miss-mini multitask-prompt-tuning oft oft-neumann
osf p-tuning peanut poly prefix-tuning prompt-tuning psoft pvera randlora road several-first
several-mixed several-second shadow shira supertuning supertuning-lora tinylora trainable-tokens
unilora vblora vblora-topk vera vera-redrawn waveft xlora""".split()
NO_WEIGHTS = "which the installed peft cannot merge into an LM's weights"
BY_THE_INPUT = "which peft cannot merge into the LM's weights with these settings"
REFUSED = {
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
    "xlora": f"peft_type XLORA, {NO_WEIGHTS}",
}
CASES = {*TYPES, *(f"lora-{name}" for name in LORA)}
FOLDERS = {f"several-{name}": f"several/{name}" for name in ("first", "mixed", "second")}
FOLDERS["arrow"] = "arrow/arrow_router"


@pytest.fixture(scope="module")
def folder(write: Write) -> Path:
    return write("peft")


def test_all_cases_are_tested(folder: Path) -> None:
    """Every type that the writer's peft knows, and everything that it wrote."""
    assert json.loads((folder / "not_written.json").read_text()) == [{}, []]
    others = {path.parent.name for path in folder.glob("*/adapter_config.json")}
    starts = {"lora-pissa-converted-start", "lora-olora-converted-start"}
    assert case_names(folder) | others | {"arrow"} == CASES | starts


@pytest.mark.parametrize("name", sorted(CASES - set(REFUSED)))
def test_logits_are_those_of_the_adapter_unmerged(name: str, folder: Path) -> None:
    lm = LanguageModel.from_pretrained(str(folder / FOLDERS.get(name, name)))
    assert_same_logits(lm, folder / f"{name}.npz")
    saved = np.load(folder / f"{name}.npz")
    assert np.abs(saved["logits"] - saved["before"]).max() > 0.01 * np.abs(saved["logits"]).max()


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str, folder: Path) -> None:
    with pytest.raises(LanguageModelError, match=REFUSED[name]):
        LanguageModel.from_pretrained(str(folder / FOLDERS.get(name, name)))


def test_the_folder_of_several_adapters(folder: Path) -> None:
    with pytest.raises(LanguageModelError, match="Did you mean first, mixed, second in it"):
        LanguageModel.from_pretrained(str(folder / "several"))
