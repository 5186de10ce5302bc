"""Callbacks in a user's own fine-tune, without a module or DataModule of this package."""

import importlib
import json
import sys

import pytest
import yaml
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint

from lincorr_lightning.callbacks import Generalization
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
    gradients, count = found["GradientCorrelation"], found["Generalization"]
    steps = [step for step, _ in gradients.history["gradient_correlation/city->country"]]
    assert steps == [1, 2, 3, 4]
    assert [step for step, _ in count.history["generalization/hallucinated"]] == [0, *steps]
    resilience = found["Resilience"].results
    assert resilience["after"] != resilience["before"]
    shares = [count.results[name] for name in ("generalized", "hallucinated", "unchanged")]
    assert sum(shares) == pytest.approx(1)
    (folder,) = runs.glob("*/version_0")
    cases = read_table(folder / "tables" / "cases.csv")
    assert [case["subject"] for case in cases] == [edit["subject"] for edit in naive.EDITS]
    assert list(folder.glob("events.out.tfevents*"))
    saved = yaml.safe_load((folder / "config.yaml").read_text())
    assert saved["trainer"]["callbacks"][1]["init_args"]["edits"] == str(edits)


# -- numbers in loggers and in callback_metrics ----------------------------------------------------


@pytest.mark.parametrize("validated", [False, True])
def test_early_stopping_and_checkpoints(small_lm, own_map, tmp_path, make_trainer, validated):
    """Without a logger, they act on the share of hallucinations at the end of each epoch."""

    class Module(naive.Module):
        def validation_step(self, batch, batch_idx):
            self.backbone(input_ids=batch)

    key = "generalization/hallucinated"
    count = Generalization("city->country", naive.EDITS, linear_map=own_map.folder)
    stop = EarlyStopping(key, mode="min", patience=2)
    keep = ModelCheckpoint(tmp_path, "{epoch}", monitor=key, mode="min", save_top_k=-1)
    trainer = make_trainer(
        count,
        stop,
        keep,
        logger=False,
        max_epochs=12,
        enable_checkpointing=True,
        num_sanity_val_steps=0,
    )
    batches = naive.sentences(small_lm)
    trainer.fit(Module(small_lm, lr=0.02), batches, batches if validated else None)
    n_steps = len(batches)
    shares = [value for _, value in count.history[key]][n_steps::n_steps]
    best = shares.index(min(shares))
    assert len(set(shares)) > 1
    assert trainer.current_epoch == len(shares) == min(best + 1 + 2, 12) < 12
    assert keep.best_model_score == pytest.approx(min(shares))
    assert f"epoch={best}.ckpt" in keep.best_model_path
    assert [float(one) for one in keep.best_k_models.values()] == pytest.approx(shares)
