"""The base of all callbacks that evaluate an LM every few optimizer steps."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any, ClassVar, Self

import lightning as L
from lightning.pytorch.core.mixins.hparams_mixin import HyperparametersMixin
from torch import nn

from lincorr_lightning.errors import require
from lincorr_lightning.finetune.batches import EditBatch
from lincorr_lightning.linear_map.layout import RowReader
from lincorr_lightning.lm.finder import causal_lm_of
from lincorr_lightning.lm.query_cache import QueryCache
from lincorr_lightning.results.results import Results
from lincorr_lightning.results.run_folder import (
    is_dry_run,
    log_scalars,
    run_folder,
    write_parts,
)
from lincorr_lightning.results.table import Table

_Readers = tuple[QueryCache, RowReader, dict[Hashable, Any]]


class PeriodicCallback(HyperparametersMixin, L.Callback):
    """Evaluates the LM of any LightningModule every few optimizer steps.

    The LM is evaluated in eval mode and without gradients: weights, optimizer state, random number
    generators and train/eval modes are afterwards as before. All ranks evaluate the same.

    Subclasses measure in `measure`, or in `start` and `after_optimizer_step`, return their
    `Results` from `finish`, and name in `kept` the attributes that a checkpoint keeps.

    Args:
        every_n_steps: Optimizer steps between two measurements.
        lm: Name of the LM in ``module.named_modules()``, if the module holds several.
        tokenizer: Folder or hub id of the LM's tokenizer, if neither the module nor the LM's
            checkpoint has one.

    Attributes:
        history: ``(step, value)`` pairs by log key: every scalar that was logged.
        results: Values measured in the last run, empty before its end.
        output: The same with tables and figures; None before the end of training.
    """

    study: ClassVar[str]
    """Kind of the results, as ``resilience``."""
    kept: ClassVar[tuple[str, ...]] = ("history", "_last_measured")
    """Names of the attributes that a checkpoint keeps (numbers, texts, tensors and containers)."""

    def __init__(
        self, every_n_steps: int = 10, lm: str | None = None, tokenizer: str | None = None
    ) -> None:
        super().__init__()
        self.save_hyperparameters(logger=False)  # with the arguments of subclasses
        require(f"{type(self).__name__}.every_n_steps", every_n_steps, at_least=1)
        self.every_n_steps = every_n_steps
        self.lm = lm
        self.tokenizer = tokenizer
        self.reset()

    @property
    def state_key(self) -> str:
        """Key of the callback's state in checkpoints, made of all its arguments."""
        return self._generate_state_key(**self.hparams)

    def reset(self) -> None:
        """Forget the measurements of an earlier run."""
        self.history: dict[str, list[tuple[int, float]]] = {}
        self.results: dict[str, Any] = {}
        self.output: Results | None = None
        self._last_measured: int | None = None

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Start afresh; a resumed run loads its measurements from the checkpoint later."""
        if stage == "fit":
            self.reset()

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Find the LM, and measure before training changes it.

        The first callback opens all: what they announce is then read together.
        """
        readers: dict[nn.Module, _Readers] = {}
        callbacks = trainer.callbacks  # type: ignore[attr-defined]
        for callback in callbacks:
            if isinstance(callback, PeriodicCallback) and "cache" not in vars(callback):
                callback._open(trainer, pl_module, readers)
        if not is_dry_run(trainer):
            run_folder(trainer)  # a collective call, made before rank 0 alone writes
        self.start(trainer)

    def _open(
        self, trainer: L.Trainer, pl_module: L.LightningModule, readers: dict[nn.Module, _Readers]
    ) -> None:
        model = causal_lm_of(pl_module, self.lm)
        if model not in readers:
            cache = QueryCache.of(pl_module, model, self.tokenizer)
            rows = getattr(pl_module, "row_reader", None)
            if not (isinstance(rows, RowReader) and rows.lm is cache.lm):
                rows = RowReader(cache.lm)
            readers[model] = cache, rows, {}
        # What the callbacks of a run share: readers of the LM in training, and before it to fit
        # maps, and these maps by what they were fitted for.
        self.cache, self.rows, self.fitted_maps = readers[model]
        self.adapter_id: int | None = None
        self._step = trainer.global_step
        self._index = self.siblings(trainer).index(self)
        self.open(trainer)

    def open(self, trainer: L.Trainer) -> None:
        """Resolve what the arguments name for this run's LM."""

    def start(self, trainer: L.Trainer) -> None:
        """Measure the LM before training; in a resumed run, the LM is a later one."""
        if self._last_measured is None:
            self._measure_once(trainer)

    def finish(self, trainer: L.Trainer) -> Results:
        """Return the results at the end of training; called on all ranks."""
        raise NotImplementedError

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Collect the results and write their tables and figures."""
        self.output = self.finish(trainer)
        self.results = dict(self.output.values)
        write_parts(trainer, self.output)

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Release the LM."""
        for name in ("cache", "rows", "fitted_maps"):
            vars(self).pop(name, None)

    def on_exception(
        self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException
    ) -> None:
        """Release the LM, since Lightning calls no `teardown` then."""
        self.teardown(trainer, pl_module, "fit")

    def is_due(self, step: int, edit_batch: EditBatch | None = None) -> bool:
        """Return whether to measure after optimizer step `step`, or a step of independent edits."""
        if edit_batch is None:
            return step % self.every_n_steps == 0
        return (edit_batch.step + 1) % self.every_n_steps == 0 or edit_batch.last

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Note the adapter that is measured, and prepare the measurement after the step."""
        edit_batch = independent_edits(batch)
        # Of adapters that are trained side by side the first; a rank without edits trains none.
        self.adapter_id = 0 if edit_batch is not None and edit_batch.edits else None
        self.before_step(trainer, edit_batch)

    def on_train_batch_end(
        self,
        trainer: L.Trainer,
        pl_module: L.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        """Detect an optimizer step."""
        if trainer.global_step != self._step:
            self._step = trainer.global_step
            self.after_optimizer_step(trainer, independent_edits(batch))

    def before_step(self, trainer: L.Trainer, edit_batch: EditBatch | None) -> None:
        """Prepare the measurement after a batch; under gradient accumulation no step may follow."""

    def after_optimizer_step(self, trainer: L.Trainer, edit_batch: EditBatch | None) -> None:
        """Measure if due."""
        if self.is_due(trainer.global_step):
            self._measure_once(trainer)

    def measure(self, trainer: L.Trainer) -> None:
        """Measure the LM as it is now; nothing by default."""

    def _measure_once(self, trainer: L.Trainer) -> None:
        """Measure unless this step has been."""
        if self._last_measured != trainer.global_step:
            self._last_measured = trainer.global_step
            self.measure(trainer)

    def siblings(self, trainer: L.Trainer) -> list[Self]:
        """Return all callbacks of a run with the same kind of results, itself included."""
        callbacks = trainer.callbacks  # type: ignore[attr-defined]
        return [each for each in callbacks if getattr(each, "study", None) == self.study]

    def numbered(self, name: str) -> str:
        """Return a name, numbered from the second callback with the same kind of results on."""
        return f"{name}_{self._index + 1}" if self._index else name

    @property
    def name(self) -> str:
        """Name of the results, of their table and of their figure, as ``resilience_2``."""
        return self.numbered(self.study)

    def log_scalars(self, trainer: L.Trainer, scalars: Mapping[str, float], step: int) -> None:
        """Log scalars, see `log_scalars`, and keep them in `history`; NaN is left out."""
        finite = {key: float(value) for key, value in scalars.items() if value == value}
        for key, value in finite.items():
            self.history.setdefault(key, []).append((step, value))
        log_scalars(trainer, finite, step)

    def history_table(self, caption: str) -> Table:
        """Return `history` as a table with a row per step and a column per log key."""
        from pandas import DataFrame  # takes a second

        frame = DataFrame({key: dict(points) for key, points in self.history.items()})
        return Table(self.name, frame.sort_index().rename_axis("step").reset_index(), caption)

    def state_dict(self) -> dict[str, Any]:
        """Return the measurements so far."""
        return {name: getattr(self, name) for name in self.kept}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from a checkpoint's measurements."""
        for name in self.kept:
            setattr(self, name, state_dict[name])


def independent_edits(batch: Any) -> EditBatch | None:
    """Return a batch if each of its edits is trained from the base weights, else None."""
    return batch if isinstance(batch, EditBatch) and batch.n_steps > 0 else None
