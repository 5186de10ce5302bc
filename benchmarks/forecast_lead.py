"""How far the answer must lead in the forecast `virtual_step`: where its default comes from.

    python benchmarks/forecast_lead.py

teaches edits of another seed than the config's, and scores forecasts of several leads against them.
"""

from __future__ import annotations

from typing import Any

import lightning as L
from jsonargparse import auto_cli

from lincorr_lightning.callbacks import Generalization
from lincorr_lightning.finetune.datamodule import EditsDataModule
from lincorr_lightning.finetune.forecasts import EditForecasts
from lincorr_lightning.finetune.module import SourceFinetune
from lincorr_lightning.lm.config import LMConfig
from lincorr_lightning.lm.language_model import LanguageModel
from lincorr_lightning.results.tables import markdown_table


def main(
    lm: str = "tiny-world",
    relation: str = "city->country",
    n_edits: int = 150,
    seed: int = 1,
    leads: list[float] | None = None,
) -> None:
    """Print the table.

    Args:
        lm: A folder, a hub id or tiny-world.
        relation: As city->country.
        n_edits: How many.
        seed: Of the edits; not the config's.
        leads: In logits.
    """
    data = EditsDataModule(relation, n_edits, seed=seed)
    count = Generalization(relation, controls=[])
    module = SourceFinetune(LMConfig(lm), learning_rate=1e-3, forecast=False)
    trainer = L.Trainer(
        accelerator="cpu", max_epochs=1, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, callbacks=[count],
    )  # fmt: skip
    trainer.fit(module, data)
    assert count.report is not None
    model = LanguageModel.from_pretrained(lm)
    rows: list[list[Any]] = []
    for lead in leads or [0.0, 3.0, 6.0, 9.0, 12.0, 15.0, 18.0]:
        forecasts = EditForecasts.make(model, data, ridges=[0.0], lead=lead)
        scores = forecasts.told(count.report).scores
        found = scores["virtual_step"]
        rows.append([f"{lead:g}", f"{found['auroc']:.2f}", f"{found['accuracy']:.2f}"])
    for name in ("first_order", "map_0", "answer_before"):
        rows.append([name, f"{scores[name]['auroc']:.2f}", f"{scores[name]['accuracy']:.2f}"])
    print(markdown_table(["lead", "AUROC", "accuracy"], rows))


if __name__ == "__main__":
    auto_cli(main)
