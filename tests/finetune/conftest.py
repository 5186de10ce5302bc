"""Short fine-tunes of the small LM."""

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning as L
import pytest
import torch

from lincorr_lightning.callbacks import Generalization, GradientCorrelation
from lincorr_lightning.finetune import EditsDataModule, SourceFinetune, edit_dataset
from lincorr_lightning.knowledge import Catalogue, TokenizedRelation
from lincorr_lightning.lm.config import LMConfig
from lincorr_lightning.lm.language_model import LanguageModel
from tests.lm.conftest import pytest_generate_tests, small  # noqa: F401
from tests.toys import NO_FILES, quiet_trainer


@pytest.fixture(scope="module")
def lm(small_lm: str) -> LanguageModel:
    """The small LM, which no test changes."""
    return LanguageModel.from_pretrained(small_lm)


@pytest.fixture(scope="module")
def relation(lm: LanguageModel) -> TokenizedRelation:
    """Cities and countries in its tokens."""
    return TokenizedRelation.of("city->country", Catalogue.load(), lm.tokenizer)


class Recorder(L.Callback):
    """Records the target logits of each edit after its last step, and every loss."""

    def __init__(self) -> None:
        self.logits: dict[int, torch.Tensor] = {}
        self.losses: list[float] = []

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.dataset = edit_dataset(trainer)

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self.losses.append(float(outputs["loss"]))
        if not batch.last:
            return
        relation = self.dataset.relation
        for row, (number, edit) in enumerate(zip(batch.ids, batch.edits, strict=True)):
            prompt = relation.target_prompts([edit.subject])
            with pl_module.adapter_context([row]):
                self.logits[number] = pl_module.lm.domain_logits(prompt, relation.target.token_ids)[
                    0
                ]


@pytest.fixture
def finetune(small_lm: str, tmp_path: Path) -> Callable[..., SimpleNamespace]:
    """Fine-tune the small LM, measured by the callbacks of the config; return the run."""

    def run(
        data: dict[str, Any] | None = None,
        trainer: dict[str, Any] | None = None,
        lm: str = small_lm,
        dtype: Any = "float32",
        measured: bool = True,
        **model: Any,
    ) -> SimpleNamespace:
        options = dict(trainer or {})
        ckpt_path = options.pop("ckpt_path", None)
        recorder = Recorder()
        shipped = [Generalization(), GradientCorrelation()] if measured else []
        options["callbacks"] = [*shipped, *options.get("callbacks", ()), recorder]
        defaults = {"learning_rate": 3e-3, "steps_per_edit": 3}
        module = SourceFinetune(LMConfig(lm, dtype=dtype), **defaults | model)
        edits = EditsDataModule(
            module.lm, training=module.edit_training, **{"n_edits": 5} | (data or {})
        )
        made = quiet_trainer(tmp_path, **NO_FILES | options)
        made.fit(module, edits, ckpt_path=ckpt_path)
        folder = max(tmp_path.glob("source_finetune/*"), key=lambda path: int(path.name[8:]))
        results = json.loads((folder / "results.json").read_text(), parse_constant=pytest.fail)
        logits = [logits for _, logits in sorted(recorder.logits.items())]
        return SimpleNamespace(
            module=module,
            trainer=made,
            results=results,
            folder=folder,
            edits=recorder.dataset.edits,
            relation=recorder.dataset.relation,
            logits=torch.stack(logits or [torch.empty(0)]),
            losses=recorder.losses,
        )

    return run
