"""Short fine-tunes of the small LM."""

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning as L
import pytest
import torch

from lincorr_lightning.finetune.datamodule import EditsDataModule
from lincorr_lightning.finetune.module import SourceFinetune
from lincorr_lightning.lm.config import LMConfig


class Afterwards(L.Callback):
    """What the LM says of each edit's target after the last of its steps, and every loss."""

    def __init__(self) -> None:
        self.logits: dict[int, torch.Tensor] = {}
        self.losses: list[float] = []

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self.losses.append(float(outputs["loss"]))
        if not batch.last:
            return
        data, lm = trainer.datamodule, pl_module.lm
        for row, edit in enumerate(batch.edits):
            prompt = data.asked.target_prompts([data.edits[edit].subject])
            with pl_module.adapter_context([row]):
                self.logits[edit] = lm.domain_logits(prompt, data.asked.target.token_ids)[0]


def quiet_trainer(folder: Path, **options: Any) -> L.Trainer:
    return L.Trainer(
        **{
            "accelerator": "cpu", "logger": False, "enable_checkpointing": False,
            "enable_progress_bar": False, "enable_model_summary": False, "max_epochs": 1,
            "default_root_dir": folder,
        }
        | options
    )  # fmt: skip


@pytest.fixture
def finetune(small_lm: str, tmp_path: Path) -> Callable[..., SimpleNamespace]:
    """Fine-tune the small LM; what there is afterwards."""

    def run(
        data: dict[str, Any] | None = None, trainer: dict[str, Any] | None = None,
        lm: str = small_lm, **model: Any,
    ) -> SimpleNamespace:  # fmt: skip
        options = dict(trainer or {})
        ckpt_path = options.pop("ckpt_path", None)
        seen = Afterwards()
        options["callbacks"] = [*options.get("callbacks", ()), seen]
        defaults = {"forecast": False, "learning_rate": 3e-3, "steps_per_edit": 3}
        module = SourceFinetune(LMConfig(lm), **defaults | model)
        edits = EditsDataModule(**{"n_edits": 5} | (data or {}))
        made = quiet_trainer(tmp_path, **options)
        made.fit(module, edits, ckpt_path=ckpt_path)
        folder = max(tmp_path.glob("source_finetune/*"), key=lambda path: int(path.name[8:]))
        results = json.loads((folder / "results.json").read_text(), parse_constant=pytest.fail)
        return SimpleNamespace(
            module=module, data=edits, trainer=made, results=results, folder=folder,
            logits=torch.stack([x for _, x in sorted(seen.logits.items())] or [torch.empty(0)]),
            losses=seen.losses,
        )  # fmt: skip

    return run


@pytest.fixture
def make_trainer(tmp_path: Path) -> Callable[..., L.Trainer]:
    """A quiet trainer that writes into the test's folder."""
    return lambda **options: quiet_trainer(tmp_path, **options)
