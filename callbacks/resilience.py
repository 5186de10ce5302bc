"""How fast does a map that was fitted before training stop telling what the LM says?"""

from __future__ import annotations

from typing import Any

import lightning as L

from lincorr_lightning.callbacks.watcher import RelationCallback, enough, independent, queries
from lincorr_lightning.functional import labelwise_pearson, summarize
from lincorr_lightning.lm.query_cache import Query


class Resilience(RelationCallback):
    """Label-wise r of an old map on the LM as it trains (paper, section 4.2).

    r is taken on subjects of the vocabulary. Where several edits are trained side by side, each in
    a copy of the LM, the first copy is asked.

    Args:
        linear_map: Folder of a linear map; None fits one on the LM as the run starts.
        relation: As ``city->country``; None takes that of the run's edits.
        subjects: What r is taken over; None samples the vocabulary.
        n_watch: How many are sampled.
        ridge: Of the map that is fitted.
        n_subjects: Subjects that a map is fitted on, as far as the vocabulary has so many.
        every_n_steps: Optimizer steps between two measurements.
        lm: Name of the LM in ``module.named_modules()``, if there are several.
        tokenizer: Folder or hub id of its tokenizer, if none is found.
        knowledge_files: YAML files with knowledge of your own.
        seed: Of subjects that are sampled.

    Attributes:
        results: ``before`` and ``after`` training, and ``worst`` on the way; None where no label
            varied.
    """

    def __init__(
        self,
        linear_map: str | None = None,
        relation: str | None = None,
        subjects: list[str] | None = None,
        n_watch: int = 128,
        ridge: float = 0.0,
        n_subjects: int = 2000,
        every_n_steps: int = 10,
        lm: str | None = None,
        tokenizer: str | None = None,
        knowledge_files: list[str] | None = None,
        seed: int = 1,
    ) -> None:
        super().__init__(
            relation, linear_map, ridge, n_subjects, every_n_steps, lm, tokenizer, knowledge_files,
            seed,
        )  # fmt: skip
        self.subjects = enough(subjects, n_watch, "Resilience")
        self.n_watch = n_watch

    def begin(self) -> None:
        """Forget all that was seen in another run."""
        super().begin()
        self.results: dict[str, Any] = {}
        self._history: list[tuple[int, float]] = []
        self._who: int | None = None

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Fit or read the map, and score it before anything changes."""
        self.open(trainer, pl_module)
        self._x = self.subjects or self.sample_subjects(self.n_watch)
        self.watch_from(trainer)
        _ = self.maps  # fitted now, if it is not given
        if not self._history:
            self.measure(trainer)

    def _questions(self) -> tuple[list[Query], list[Query]]:
        copy = [self._who] * len(self._x)
        return (
            queries(self.asked.source_prompts(self._x), copy),
            queries(self.asked.target_prompts(self._x), copy),
        )

    def measure(self, trainer: L.Trainer) -> None:
        """Score the map."""
        step = trainer.global_step
        labels = self.asked.source.token_ids, self.asked.target.token_ids
        source, target = self.cache.read(list(zip(self._questions(), labels, strict=True)), step)
        r = summarize(labelwise_pearson(self.maps.predict(source), target)).mean
        self._history.append((step, r))
        self.log_numbers(trainer, {f"resilience/{self.tag}": r}, step)

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Say what will be asked after the step."""
        del pl_module, batch_idx
        edit_batch = independent(batch)
        # A process that has no edit at this step asks the LM as it is.
        self._who = 0 if edit_batch is not None and edit_batch.edits else None
        if self.is_due(trainer.global_step + 1):
            about = self._questions()
            self.cache.prefetch([*about[0], *about[1]], trainer.global_step)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Put the numbers together."""
        del pl_module
        if self._history[-1][0] != trainer.global_step:
            self.measure(trainer)
        known = [r for _, r in self._history if r == r]
        first, last = self._history[0][1], self._history[-1][1]
        self.results = {
            "before": None if first != first else first,
            "after": None if last != last else last,
            "worst": min(known, default=None),
        }

    def state_dict(self) -> dict[str, Any]:
        """What was measured so far."""
        return {**super().state_dict(), "r": [list(entry) for entry in self._history]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from there."""
        super().load_state_dict(state_dict)
        self._history = [(int(step), float(r)) for step, r in state_dict["r"]]
