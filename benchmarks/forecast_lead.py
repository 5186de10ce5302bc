"""The lead of the answer in the forecast `virtual_step`: where its default comes from.

    python benchmarks/forecast_lead.py

teaches edits of another seed than the config's, and scores forecasts with several leads on them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import lightning as L
from jsonargparse import auto_cli

from lincorr_lightning.callbacks import Generalization
from lincorr_lightning.finetune import EditsDataModule, SourceFinetune
from lincorr_lightning.finetune.forecasts import forecast_edits
from lincorr_lightning.knowledge import Catalogue, TokenizedRelation
from lincorr_lightning.lm.config import LMConfig
from lincorr_lightning.lm.language_model import LanguageModel
from lincorr_lightning.results.tables import markdown_table


def cells(scores: Mapping[str, float | None]) -> list[str]:
    """Return AUROC and accuracy; AUROC is empty where all or no edits generalized."""
    return ["" if scores[key] is None else f"{scores[key]:.2f}" for key in ("auroc", "accuracy")]


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
        relation: Relation of the edits, as city->country.
        n_edits: Number of edits.
        seed: Seed of the edits; not the config's.
        leads: Leads in logits.
    """
    count = Generalization(relation, controls=[])
    module = SourceFinetune(LMConfig(lm), learning_rate=1e-3, forecast=False)
    data = EditsDataModule(module.lm, relation, n_edits, seed=seed, schedule=module.edit_schedule)
    trainer = L.Trainer(
        accelerator="cpu", max_epochs=1, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, callbacks=[count],
    )  # fmt: skip
    trainer.fit(module, data)
    assert count.output is not None
    cases = count.output.table("cases")
    after, outcomes = (
        [row[cases.keys.index(key)] for row in cases.rows] for key in ("answer_after", "outcome")
    )
    model = LanguageModel.from_pretrained(lm)
    tokenized = TokenizedRelation.of(relation, Catalogue.load(), model.tokenizer)
    rows: list[list[Any]] = []
    for lead in leads or [0.0, 3.0, 6.0, 9.0, 12.0, 15.0, 18.0]:
        forecasts = forecast_edits(model, data.prepare_edits(), tokenized, [0.0], lead=lead)
        scores = forecasts.scores(after, outcomes)
        rows.append([f"{lead:g}", *cells(scores["virtual_step"])])
    for name in ("first_order", "map_0", "answer_before"):
        rows.append([name, *cells(scores[name])])
    print(markdown_table(["lead", "AUROC", "accuracy"], rows))


if __name__ == "__main__":
    auto_cli(main)
