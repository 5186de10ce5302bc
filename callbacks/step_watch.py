"""What all callbacks that look at an LM every few optimizer steps have in common."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self

import lightning as L

from lincorr_lightning.errors import ConfigError
from lincorr_lightning.lm.query_cache import close_query_caches


class PeriodicCallback(L.Callback):
    """Looks at the LM of any LightningModule, in eval mode and without gradient, every few steps.

    A callback calls `watch_from` as training starts. It measures in `measure`, or in an `after_optimizer_step`
    of its own where what it asks depends on the batch.

    Args:
        every_n_steps: Optimizer steps between two measurements.
        lm: Name of the LM in ``module.named_modules()``, if the module holds several.
        tokenizer: Folder or hub id of its tokenizer, if neither the module nor the checkpoint that
            the LM came from has one.

    Attributes:
        history: ``(step, value)`` by tag: all scalars that were sent to the loggers.

    Raises:
        ConfigError: `every_n_steps` is less than 1.
    """

    def __init__(self, every_n_steps: int, lm: str | None, tokenizer: str | None) -> None:
        super().__init__()
        if every_n_steps < 1:
            raise ConfigError(
                f"{type(self).__name__}.every_n_steps is {every_n_steps}; it must be at least 1."
            )
        self.every_n_steps = every_n_steps
        self.lm = lm
        self.tokenizer = tokenizer

    # -- a run -----------------------------------------------------------------------------------

    def begin(self) -> None:
        """Forget all that was seen in another run."""
        self.history: dict[str, list[tuple[int, float]]] = {}

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Begin anew; of a run that is resumed, the checkpoint says the rest."""
        del pl_module
        if stage == "fit":
            close_query_caches(trainer)
            self.begin()

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Let go of the LM."""
        del pl_module, stage
        self.close(trainer)

    def on_exception(
        self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException
    ) -> None:
        """Let go of the LM."""
        del pl_module, exception
        self.close(trainer)

    def close(self, trainer: L.Trainer) -> None:
        """Let go of the LM."""
        close_query_caches(trainer)

    # -- steps -----------------------------------------------------------------------------------

    def watch_from(self, trainer: L.Trainer) -> None:
        """Take weights to be as they are after the steps so far."""
        self._step = trainer.global_step

    def is_due(self, step: int) -> bool:
        """Whether a step is one of those that are measured."""
        return step % self.every_n_steps == 0

    def on_train_batch_end(
        self,
        trainer: L.Trainer,
        pl_module: L.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        """See whether weights were updated."""
        del pl_module, outputs, batch_idx
        if trainer.global_step != self._step:
            self.watch_from(trainer)
            self.after_optimizer_step(trainer, batch)

    def after_optimizer_step(self, trainer: L.Trainer, batch: Any) -> None:
        """Measure, if it is time: a step has just been taken, the last of its batches is given."""
        del batch
        if self.is_due(trainer.global_step):
            self.measure(trainer)

    def measure(self, trainer: L.Trainer) -> None:
        """Look at the LM as it is now."""
        raise NotImplementedError

    # -- telling ---------------------------------------------------------------------------------

    def siblings(self, trainer: L.Trainer) -> list[Self]:
        """All callbacks of this kind in a run, itself included."""
        return [c for c in trainer.callbacks if type(c) is type(self)]  # type: ignore[attr-defined]

    def log_numbers(self, trainer: L.Trainer, numbers: Mapping[str, float], step: int) -> None:
        """Keep scalars and send them to every logger; NaN (nothing varied) is left out."""
        finite = {name: value for name, value in numbers.items() if value == value}
        for name, value in finite.items():
            self.history.setdefault(name, []).append((step, value))
        for logger in trainer.loggers:
            logger.log_metrics(finite, step=step)
