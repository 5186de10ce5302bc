"""Resilience: correlation of a map fitted before training, during training."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import lightning as L

from lincorr_lightning.callbacks.relation_callback import MapCallback, check_subjects
from lincorr_lightning.finetune.batches import EditBatch
from lincorr_lightning.functional import labelwise_pearson, summarize
from lincorr_lightning.lm.query_cache import Query
from lincorr_lightning.lm.vocabulary import sample_up_to
from lincorr_lightning.results.results import Results
from lincorr_lightning.results.table import number

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class Resilience(MapCallback):
    """Label-wise r of a fixed linear map on the LM as it trains (paper, section 4.2).

    Logs ``resilience/<relation>``. If several edits are trained side by side, each in an adapter,
    the first adapter is evaluated.

    Args:
        linear_map: Folder of a linear map; None fits one on the LM at the start of training.
        relation: Relation, as ``city->country``; None takes that of the run's edits.
        subjects: Subjects that r is computed over; None samples the vocabulary.
        n_watch: Number of sampled subjects.
        seed: Seed of sampled subjects.
        **options: See `MapCallback`.

    Attributes:
        results: ``relation``, and r ``before`` and ``after`` training and ``worst`` in between;
            None if no label varies.
    """

    study = "resilience"
    kept = (*MapCallback.kept, "_r")

    def __init__(
        self,
        linear_map: str | None = None,
        relation: str | None = None,
        subjects: list[str] | None = None,
        n_watch: int = 128,
        seed: int = 1,
        **options: Any,
    ) -> None:
        super().__init__(relation, linear_map, seed=seed, **options)
        check_subjects(subjects, n_watch, "Resilience")
        self.subjects = subjects
        self.n_watch = n_watch

    def reset(self) -> None:
        """Forget the measurements of an earlier run."""
        super().reset()
        self._r: list[float] = []

    def measured_subjects(self, tokenizer: PreTrainedTokenizerBase, has_edits: bool) -> list[str]:
        """Return the given subjects, or sampled ones."""
        return self.subjects or sample_up_to(tokenizer, self.n_watch, seed=self.seed)

    def open(self, trainer: L.Trainer) -> None:
        """Choose the subjects."""
        super().open(trainer)
        self._watched = self.subjects or self.sample_subjects(self.n_watch)

    def before_step(self, trainer: L.Trainer, edit_batch: EditBatch | None) -> None:
        """Announce the prompts to read after this step."""
        if self.is_due(trainer.global_step + 1):
            self.prefetch(self._queries(), trainer.global_step)

    def _queries(self) -> list[list[Query]]:
        return self.queries(self._watched, [self.adapter_id] * len(self._watched))

    def measure(self, trainer: L.Trainer) -> None:
        """Score the map."""
        step = trainer.global_step
        logits = self.read(self._queries(), step)
        r = summarize(labelwise_pearson(self.predict(logits.source), logits.target)).mean
        self._r.append(r)
        self.log_scalars(trainer, {f"resilience/{self.tag}": r}, step)

    def finish(self, trainer: L.Trainer) -> Results:
        """Return r before and after training, with a table of all steps."""
        self._measure_once(trainer)
        values = {
            "relation": self.tokenized.name,
            "before": number(self._r[0]),
            "after": number(self._r[-1]),
            "worst": min((r for r in self._r if r == r), default=None),
        }
        caption = f"Label-wise r of the linear map {self.tag} at each measured step"
        return Results(self.name, values, tables=[self.history_table(caption)])
