"""The forecast of an edit: is the target label nearest to its new answer a right one?"""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from lincorr_lightning.errors import ConfigError, LanguageModelError
from lincorr_lightning.finetune.batches import EditBatch, EditDataset
from lincorr_lightning.finetune.edit_files import SEPARATOR, RawEdit
from lincorr_lightning.finetune.edits import (
    Edit,
    nearness,
    reference_mask,
    skip_counts,
    taught_labels,
)
from lincorr_lightning.finetune.results import skipped_tables
from lincorr_lightning.finetune.verdict import forecast_verdict
from lincorr_lightning.functional import macro_mean, risk
from lincorr_lightning.knowledge import TokenizedRelation
from lincorr_lightning.lm.config import LMConfig
from lincorr_lightning.lm.language_model import LanguageModel
from lincorr_lightning.results.results import Results
from lincorr_lightning.results.table import Mean, Table, column, number
from lincorr_lightning.study import Study, without_chat


@dataclass(frozen=True, slots=True, kw_only=True)
class NearestWord:
    """The target label nearest to the new answer of an edit, a row of the table ``forecast``."""

    subject: str
    answer: str = column("new answer")
    reference: str  #: Target labels that are right for the answer, joined by ``|``.
    nearest: str = column("nearest word")
    right: bool
    margin: float | None = column("margin", ".3f")
    """Largest nearness of a right label minus largest of a wrong one; None without a wrong one."""
    rank: int = column("rank", "d")
    """Rank of the nearest right label, from 1; of equally near labels, wrong ones come first."""


def forecast_edits(
    by_answer: Tensor | None, edits: Sequence[Edit], relation: TokenizedRelation
) -> list[NearestWord]:
    """Return the nearest word of each edit; no prompt is read.

    `by_answer` is the `nearness` of the relation's labels, ``(n_target, n_source)``; a
    `LanguageModelError` without one.
    """
    if by_answer is None:
        raise LanguageModelError(
            "the LM has a head that multiplies by more than its weight, such as a quantized one, "
            "so that its labels have no rows to compare. Forecast the edits with an LM that is not "
            "quantized."
        )
    near = by_answer.T[taught_labels(edits)]
    is_right = reference_mask(edits, near.shape[1])
    margins = -risk(near, is_right)
    best_right = near.masked_fill(~is_right, -torch.inf).amax(1, keepdim=True)
    ranks = 1 + ((near >= best_right) & ~is_right).sum(1)
    labels = relation.target.texts
    return [
        NearestWord(
            subject=edit.subject,
            answer=edit.answer,
            reference=SEPARATOR.join(labels[label] for label in edit.reference),
            nearest=labels[nearest],
            right=margin > 0,
            margin=number(margin),
            rank=rank,
        )
        for edit, nearest, margin, rank in zip(
            edits, near.argmax(1).tolist(), margins.tolist(), ranks.tolist(), strict=True
        )
    ]


def forecast_results(
    name: str, words: Sequence[NearestWord], relation: str, skipped: Sequence[RawEdit] = ()
) -> Results:
    """Return the results of a forecast; `skipped` are the rows of a file that are no edit."""
    right = [float(word.right) for word in words]
    note = (
        "margin: nearness (the cosine in the LM's head) of the nearest right label minus that of "
        "the nearest wrong one; rank: that of the nearest right label."
    )
    forecast = Table.of(
        "forecast",
        words,
        NearestWord,
        f"The nearest word of each edit of {relation}: the target label nearest to its new answer",
        note,
    ).sampled(
        "subject", "answer", nearest_right="right", nearest_macro=Mean("right", per="reference")
    )
    counts = forecast.frame.drop(columns="subject").value_counts(sort=False, dropna=False)
    frame = counts.rename("n_edits").reset_index().sort_values("margin", kind="stable")
    answers = Table(
        "answers",
        frame,
        f"The nearest word of each new answer of {relation}, the least safe first",
        note,
        headline=True,
        headings={**forecast.headings, "n_edits": "edits"},
        formats={**forecast.formats, "n_edits": "d"},
    )
    values = {
        "relation": relation,
        "n_edits": len(words),
        "skipped": skip_counts(skipped),
        "nearest": {
            "right": fmean(right),
            "macro": macro_mean(right, [word.reference for word in words]),
        },
    }
    return Results(
        name,
        values,
        tables=[answers, forecast, *skipped_tables(skipped)],
        verdict=forecast_verdict(values, frame.to_dict("records")),
    )


class EditForecast(Study):
    """Forecasts whether the target of each planned edit will follow, without any training.

    ``lincorr predict`` finds the target label that is nearest to the new answer in the LM's head:
    an edit generalizes more often where that is a right one. How the edit is to be trained does not
    matter. See `forecast_edits`. Of the LM only the tokenizer and the head are read, in the
    precision in which the head is stored.

    Args:
        lm: The LM before the edits.
    """

    study = "forecast"
    batch_type = EditBatch

    def __init__(self, lm: LMConfig = LMConfig()) -> None:
        super().__init__()
        self.lm = LanguageModel(without_chat(lm))  # never loaded
        self.save_hyperparameters(logger=False)

    def data_arguments(self) -> dict[str, Any]:
        """Return the LM, whose tokenizer the data need."""
        return {"lm": self.lm}

    def predict_step(self, batch: Any, batch_idx: int) -> list[Any]:
        """Do nothing: the forecast of all edits is at the end. Lightning warns of a None."""
        return []

    def build_results(self) -> Results:
        dataset = getattr(self.trainer.predict_dataloaders, "dataset", None)
        if not isinstance(dataset, EditDataset):
            raise ConfigError("EditForecast needs an EditDataset. Use EditsDataModule.")
        words: Any = self.lm.nearest_words()
        self.lm_info = words.head.info
        relation = dataset.relation
        forecasts = forecast_edits(nearness(words, relation), dataset.edits, relation)
        return forecast_results(self.study, forecasts, relation.name, dataset.resolved.skipped)
