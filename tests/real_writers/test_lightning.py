"""Checkpoints of a LightningModule that holds an LM: refused with a way to the LM that works."""

import sys
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import transformers as hf

from lincorr_lightning import LanguageModel
from lincorr_lightning.cli import console
from lincorr_lightning.errors import LanguageModelError
from tests.real_writers.conftest import Write
from tests.real_writers.written_lms import assert_same_logits, case_names

pytestmark = pytest.mark.nightly

SHARDED = {"fsdp2"}
CASES = {"plain", "weights", "ema", "fsdp2-whole"} | SHARDED
WAY_OUT = "load .*, and call save_pretrained"


class Holder(L.LightningModule):
    """The writer's module, as its user has it."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.net = hf.AutoModelForCausalLM.from_pretrained(folder)


@pytest.fixture(scope="module")
def folder(write: Write) -> Path:
    return write("lightning")


def test_all_cases_are_tested(folder: Path) -> None:
    assert case_names(folder) == CASES


@pytest.mark.parametrize("name", sorted(CASES))
def test_by_name_it_is_refused(name: str, folder: Path) -> None:
    for path in (folder / name, folder / name / "last.ckpt"):
        with pytest.raises(LanguageModelError, match=f"last.ckpt.* is of Lightning: .*{WAY_OUT}"):
            LanguageModel.from_pretrained(str(path))


@pytest.mark.parametrize("name", sorted(CASES - SHARDED))
def test_the_way_out_leads_to_the_lm(name: str, folder: Path, tmp_path: Path) -> None:
    path = folder / name / "last.ckpt"
    module = Holder.load_from_checkpoint(path, folder=folder / "base", weights_only=True)
    module.net.save_pretrained(tmp_path)
    for file in (folder / "base").glob("tokenizer*"):
        (tmp_path / file.name).write_bytes(file.read_bytes())
    assert_same_logits(LanguageModel.from_pretrained(str(tmp_path)), folder / f"{name}.npz")
    tokenizer = hf.AutoTokenizer.from_pretrained(tmp_path)
    assert_same_logits(LanguageModel.of(module.eval(), tokenizer), folder / f"{name}.npz")


@pytest.mark.parametrize("name", sorted(CASES))
def test_as_a_checkpoint_of_a_study_it_is_refused(
    name: str, folder: Path, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = (
        "test --config linear_probe.yaml --data.n_subjects 40 --model.knowledge [city,country]"
    )
    checkpoint = f"--ckpt_path={folder / name / 'last.ckpt'}"
    root = f"--trainer.default_root_dir={tmp_path}"
    monkeypatch.setattr(sys, "argv", ["lincorr", *command.split(), checkpoint, root])
    with pytest.raises(SystemExit) as ended:
        console()
    assert ended.value.code == 1
    line = next(x for x in capsys.readouterr().err.splitlines() if "lincorr: error" in x)
    assert "last.ckpt" in line
    assert ("start a new run" if name in SHARDED else "lincorr fit") in line
    assert not torch.distributed.is_initialized()
