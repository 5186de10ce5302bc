"""Callbacks in a user's own fine-tune, without a module or DataModule of this package."""

import importlib
import json
import sys

import pytest
import yaml

from lincorr_lightning.cli import main
from tests.callbacks import naive
from tests.toys import read_table

THEIRS = """
import lightning as L
import torch
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, AutoTokenizer


class Chat(L.LightningModule):
    def __init__(self, checkpoint: str, rate: float = 0.01):
        super().__init__()
        self.save_hyperparameters()
        self.brain = AutoModelForCausalLM.from_pretrained(checkpoint)
        self.words = AutoTokenizer.from_pretrained(checkpoint)

    def training_step(self, batch, batch_idx):
        text = self.words(batch, return_tensors="pt", padding=True)
        loss = self.brain(**text, labels=text["input_ids"]).loss
        self.log("train/loss", loss)
        return loss

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.brain.parameters(), lr=self.hparams.rate, momentum=0.9)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)]


class Talk(L.LightningDataModule):
    def train_dataloader(self):
        return DataLoader(["name0 lives in the city of Paris", "name1 was born"] * 4, batch_size=2)
"""


@pytest.fixture
def theirs(tmp_path, monkeypatch):
    assert "lincorr" not in THEIRS
    (tmp_path / "their_study.py").write_text(THEIRS)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    yield importlib.import_module("their_study")
    sys.modules.pop("their_study")


def test_by_yaml_with_our_program(theirs, small_lm, own_map, tmp_path):
    edits = tmp_path / "edits.jsonl"
    edits.write_text("\n".join(json.dumps(edit) for edit in naive.EDITS))
    callbacks = {
        "GradientCorrelation": {"every_n_steps": 1},
        "Generalization": {"edits": str(edits)},
        "Resilience": {"linear_map": own_map.folder, "every_n_steps": 2},
    }
    study = {
        "trainer": {
            "accelerator": "cpu",
            "max_epochs": 1,
            "enable_progress_bar": False,
            "callbacks": [{"class_path": k, "init_args": v} for k, v in callbacks.items()],
        },
        "model": {"class_path": "their_study.Chat", "init_args": {"checkpoint": small_lm}},
        "data": {"class_path": "their_study.Talk"},
    }
    (tmp_path / "study.yaml").write_text(yaml.safe_dump(study))
    runs = tmp_path / "runs"
    cli = main(["fit", "--config", "study.yaml", "--trainer.default_root_dir", str(runs)])
    found = {type(c).__name__: c for c in cli.trainer.callbacks}
    history = found["GradientCorrelation"].history["gradient_correlation/city->country"]
    assert [step for step, _ in history] == [1, 2, 3, 4]
    resilience = found["Resilience"].results
    assert resilience["after"] != resilience["before"]
    (folder,) = runs.glob("*/version_0")
    cases = read_table(folder / "tables" / "cases.csv")
    assert [case["subject"] for case in cases] == [edit["subject"] for edit in naive.EDITS]
    assert list(folder.glob("events.out.tfevents*"))
    saved = yaml.safe_load((folder / "config.yaml").read_text())
    assert saved["trainer"]["callbacks"][1]["init_args"]["edits"] == str(edits)
