"""The base of all callbacks that evaluate an LM every few optimizer steps."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Self

import lightning as L
import torch
from lightning.pytorch.callbacks import Checkpoint
from lightning.pytorch.core.mixins.hparams_mixin import HyperparametersMixin
from lightning.pytorch.utilities import rank_zero_warn
from torch import nn

from lincorr_lightning.errors import CheckpointError, ConfigError, require
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

_MAX_NAMED = 3  # parts of what is measured, in a message


@dataclass
class Watch:
    """What the callbacks of a run that evaluate the same LM share.

    It counts the updates of the LM: the optimizer steps that Lightning counts, and batches under
    manual optimization that changed the weights in any other way.
    """

    cache: QueryCache
    rows: RowReader  #: Of the LM before training, to fit maps.
    step: int  #: Updates before the current batch, or after it in its last hook.
    largest: int  #: Most updates of one batch.
    not_counted: int = 0  #: Updates that ``trainer.global_step`` does not count.
    has_moved: bool = False  #: Whether the last batch updated the LM.
    fitted_maps: dict[Hashable, Any] = field(default_factory=dict)

    def start_batch(self, pl_module: L.LightningModule) -> None:
        """Begin a moment before a batch."""
        self.cache.begin()
        if not pl_module.automatic_optimization:
            self.cache.version()

    def end_batch(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Begin a moment after a batch, and count its updates."""
        n = trainer.global_step + self.not_counted - self.step
        version = self.cache.version() if n == 0 and not pl_module.automatic_optimization else None
        self.cache.begin(weights_changed=n > 0)
        if version is not None and self.cache.version() != version:
            n = 1
            self.not_counted += 1
        self.step += n
        self.largest = max(self.largest, n)
        self.has_moved = n > 0


class PeriodicCallback(HyperparametersMixin, L.Callback):
    """Evaluates the LM of any LightningModule every few updates of its weights.

    The LM is evaluated in eval mode and without gradients: weights, optimizer state, random number
    generators and train/eval modes are afterwards as before. All ranks evaluate the same. However
    the weights change (another optimizer, an editor, averaging), the results are those of the
    weights that training leaves; to that end these callbacks run after all others but checkpoints.

    Subclasses measure in `measure`, or in `start` and `after_optimizer_step`, return their
    `Results` from `finish`, and name in `kept` the attributes that a checkpoint keeps.

    Args:
        every_n_steps: Largest number of optimizer steps between two measurements.
        lm: Name of the LM in ``module.named_modules()``, if the module holds several.
        tokenizer: Folder or hub id of the LM's tokenizer, if neither the module nor the LM's
            checkpoint has one.

    Attributes:
        history: ``(step, value)`` pairs by log key: every scalar that was logged.
        results: Values measured in the last run, empty before its end.
        output: The same with tables and figures; None before the end of training.

    Raises:
        ConfigError: An argument has another type than the command line takes, or is out of range.
    """

    study: ClassVar[str]
    """Kind of the results, as ``resilience``."""
    kept: ClassVar[tuple[str, ...]] = (
        "history", "_metrics", "_last_measured", "_identity", "_not_counted",
    )  # fmt: skip
    """Names of the attributes that a checkpoint keeps (numbers, texts, tensors and containers)."""

    def __init__(
        self, every_n_steps: int = 10, lm: str | None = None, tokenizer: str | None = None
    ) -> None:
        super().__init__()
        self.save_hyperparameters(logger=False)  # with the arguments of subclasses
        _check_types(type(self), self.hparams)
        require(f"{type(self).__name__}.every_n_steps", every_n_steps, at_least=1)
        self.every_n_steps = every_n_steps
        self.lm = lm
        self.tokenizer = tokenizer
        self._key = f"{type(self).__qualname__} {id(self)}"
        self.reset()

    @property
    def state_key(self) -> str:
        """Key of the callback's state in checkpoints, the same in each run from `setup` on.

        It is made of its class, what it evaluates, and its place among callbacks with the same.
        """
        return self._key

    def subject(self, trainer: L.Trainer) -> str:
        """Return what is evaluated, such as a relation; `setup` asks for it."""
        return ""

    def reset(self) -> None:
        """Forget the measurements of an earlier run."""
        self.history: dict[str, list[tuple[int, float]]] = {}
        self._metrics: dict[str, float] = {}
        self.results: dict[str, Any] = {}
        self.output: Results | None = None
        self._last_measured: int | None = None
        self._measured_version: int | None = None
        self._not_counted = 0
        self._identity: list[str] | None = None

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Start afresh; a resumed run loads its measurements from the checkpoint later."""
        if stage != "fit":
            return
        callbacks: list[L.Callback] = trainer.callbacks  # type: ignore[attr-defined]
        own = [each for each in callbacks if isinstance(each, PeriodicCallback)]
        last = [each for each in callbacks if isinstance(each, Checkpoint)]
        others = [each for each in callbacks if each not in (*own, *last)]
        # What others do to the weights comes before it is measured, and that before it is saved.
        trainer.callbacks = [*others, *own, *last]  # type: ignore[attr-defined]
        names = [f"{type(each).__qualname__} {each.subject(trainer)}" for each in own]
        place = own.index(self)
        self._key = f"{names[place]} {names[:place].count(names[place]) + 1}"
        self.reset()

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Find the LM, and measure before training changes it.

        The first callback opens all: what they announce is then read together.
        """
        opened = [each for each in _periodic(trainer) if "cache" in vars(each)]
        if not opened:
            watches: dict[nn.Module, Watch] = {}
            for callback in _periodic(trainer):
                callback._open(trainer, pl_module, watches)
            _after_training(trainer, _complete_all)
        if not is_dry_run(trainer):
            run_folder(trainer)  # a collective call, made before rank 0 alone writes
        self.start(trainer)

    def _open(
        self, trainer: L.Trainer, pl_module: L.LightningModule, watches: dict[nn.Module, Watch]
    ) -> None:
        model = causal_lm_of(pl_module, self.lm)
        self._leads = model not in watches
        if self._leads:
            cache = QueryCache.of(pl_module, model, self.tokenizer)
            rows = getattr(pl_module, "row_reader", None)
            if not (isinstance(rows, RowReader) and rows.lm is cache.lm):
                rows = RowReader(cache.lm)
            step = trainer.global_step + self._not_counted
            watches[model] = Watch(
                cache, rows, step, max(len(trainer.optimizers), 1), self._not_counted
            )
        self.watch = watches[model]
        self.cache = self.watch.cache
        self.adapter_id: int | None = None
        self._index = self.siblings(trainer).index(self)
        before = self._identity
        self._identity = None
        self.open(trainer)
        name = type(self).__name__
        if before is not None and self._identity != before:
            raise CheckpointError(
                f"{name} measured {_in_short(before)} in the run of the checkpoint, and "
                f"{_in_short(self._identity or [])} now. Give {name} the same to go on with its "
                "curves, or start a new run."
            )
        if before is None and trainer.ckpt_path is not None:
            rank_zero_warn(
                f"the checkpoint has no measurements of this {name}: what it calls before "
                "training is the LM at the resumed step."
            )

    def open(self, trainer: L.Trainer) -> None:
        """Resolve what the arguments name for this run's LM."""
        self.identify([])

    def identify(self, parts: Iterable[str]) -> None:
        """Note what is measured, which a resumed run must measure too, such as subjects."""
        self._identity = list(parts)

    @property
    def step(self) -> int:
        """Number of updates of the LM so far."""
        return self.watch.step

    def start(self, trainer: L.Trainer) -> None:
        """Measure the LM before training; in a resumed run, the LM is a later one."""
        if not self.history:
            self._measure_once(trainer)
        for key, value in self._metrics.items():
            trainer.callback_metrics.setdefault(key, torch.tensor(value))

    def finish(self, trainer: L.Trainer) -> Results:
        """Return the results at the end of training; called on all ranks."""
        raise NotImplementedError

    def complete(self, trainer: L.Trainer) -> None:
        """Collect the results of the weights as they are, and write their tables and figures.

        Does nothing if that is done, or in a run that trains nothing.
        """
        if self.output is not None or "cache" not in vars(self):
            return
        if self._leads:
            self.cache.begin()
        self.output = self.finish(trainer)
        self.results = dict(self.output.values)
        self._measured_version = self.cache.version()
        write_parts(trainer, self.output)

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Release the LM, which other callbacks may have changed after training."""
        if self.output is not None and "cache" in vars(self) and self.adapter_id is None:
            if self._leads:
                self.cache.begin()
            if not self.cache.lm.is_sharded and self._measured_version != self.cache.version():
                self.output = None
                self.complete(trainer)
        self.release()

    def release(self) -> None:
        """Forget the LM."""
        for name in ("watch", "cache"):
            vars(self).pop(name, None)

    def on_exception(
        self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException
    ) -> None:
        """Release the LM, since Lightning calls no `teardown` then."""
        vars(trainer.strategy).pop("on_train_end", None)
        self.release()

    def is_due(self, step: int, edit_batch: EditBatch | None = None) -> bool:
        """Return whether to measure after update `step`, or a step of independent edits.

        The next batch may make several updates, of which none may be too many.
        """
        if edit_batch is None:
            return step + self.watch.largest - (self._last_measured or 0) > self.every_n_steps
        return (edit_batch.step + 1) % self.every_n_steps == 0 or edit_batch.last

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Note the adapter that is measured, and prepare the measurement after the step."""
        if self._leads:
            self.watch.start_batch(pl_module)
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
        """Detect an update."""
        if self._leads:
            self.watch.end_batch(trainer, pl_module)
        if self.watch.has_moved:
            self.after_optimizer_step(trainer, independent_edits(batch))

    def before_step(self, trainer: L.Trainer, edit_batch: EditBatch | None) -> None:
        """Prepare the measurement after a batch; under gradient accumulation no step may follow."""

    def after_optimizer_step(self, trainer: L.Trainer, edit_batch: EditBatch | None) -> None:
        """Measure if due."""
        if self.is_due(self.step):
            self._measure_once(trainer)

    def measure(self, trainer: L.Trainer) -> None:
        """Measure the LM as it is now; nothing by default."""

    def _measure_once(self, trainer: L.Trainer) -> None:
        """Measure unless these weights have been."""
        state = self.step, self.cache.version()
        if (self._last_measured, self._measured_version) != state:
            self._last_measured, self._measured_version = state
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
        """Log scalars, see `monitor`, and keep them in `history`, from which NaN is left out."""
        history = self.history
        new = {key: x for key, x in scalars.items() if (step, x) not in history.get(key, ())[-1:]}
        for key, value in new.items():
            points = history.setdefault(key, [])
            if points and points[-1][0] == step:
                points.pop()  # the same weights, of more edits, or others after all else has ended
            if value == value:
                points.append((step, float(value)))
            if not points:
                del history[key]
        self.monitor(trainer, new)
        log_scalars(trainer, new, step)

    def monitor(self, trainer: L.Trainer, scalars: Mapping[str, float]) -> None:
        """Let ``trainer.callback_metrics`` have scalars; NaN is 0, for what monitors its key."""
        self._metrics |= {key: x if x == x else 0.0 for key, x in scalars.items()}
        trainer.callback_metrics.update({key: torch.tensor(self._metrics[key]) for key in scalars})

    def history_table(self, caption: str) -> Table:
        """Return `history` as a table with a row per step and a column per log key."""
        from pandas import DataFrame  # takes a second

        frame = DataFrame({key: dict(points) for key, points in self.history.items()})
        return Table(self.name, frame.sort_index().rename_axis("step").reset_index(), caption)

    def state_dict(self) -> dict[str, Any]:
        """Return the measurements so far."""
        if "watch" in vars(self):
            self._not_counted = self.watch.not_counted
        return {name: getattr(self, name) for name in self.kept}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from a checkpoint's measurements."""
        for name in self.kept:
            setattr(self, name, state_dict[name])


def independent_edits(batch: Any) -> EditBatch | None:
    """Return a batch if each of its edits is trained from the base weights, else None."""
    return batch if isinstance(batch, EditBatch) and batch.n_steps > 0 else None


def _complete_all(trainer: L.Trainer) -> None:
    for callback in _periodic(trainer):
        callback.complete(trainer)


def _periodic(trainer: L.Trainer) -> list[PeriodicCallback]:
    callbacks = trainer.callbacks  # type: ignore[attr-defined]
    return [each for each in callbacks if isinstance(each, PeriodicCallback)]


def _after_training(trainer: L.Trainer, action: Callable[[L.Trainer], None]) -> None:
    """Act after the last ``on_train_end`` of callbacks and module, while the LM is on its device.

    Lightning has no hook for it: the next one finds the LM moved to the CPU.
    """
    strategy = trainer.strategy
    own = strategy.on_train_end

    def run() -> None:
        vars(strategy).pop("on_train_end")
        action(trainer)
        own()

    vars(strategy)["on_train_end"] = run


def _in_short(parts: Sequence[str]) -> str:
    return f"{len(parts)} ({', '.join(parts[:_MAX_NAMED])}{', ...' * (len(parts) > _MAX_NAMED)})"


def _check_types(kind: type, arguments: Mapping[str, Any]) -> None:
    """Refuse arguments that the command line would refuse; paths are taken for texts."""
    from jsonargparse import ArgumentError, ArgumentParser

    parser = ArgumentParser(exit_on_error=False)
    parser.add_class_arguments(kind, fail_untyped=False)
    # Others are what a class fixes for its base.
    given = {name: arguments[name] for name in vars(parser.get_defaults()) if name in arguments}
    texts = {k: os.fspath(x) if isinstance(x, os.PathLike) else x for k, x in given.items()}
    try:
        parser.parse_object(texts)
    except ArgumentError as error:
        wrong = re.search(r'key "(\w+)', str(error))
        if wrong is None:
            raise ConfigError(f"{kind.__name__}: {error}") from error
        name = wrong[1]
        inits = [vars(base)["__init__"] for base in kind.__mro__ if "__init__" in vars(base)]
        types = [getattr(init, "__annotations__", {}).get(name) for init in inits]
        expected = next(filter(None, types), "of its type")
        message = f"{kind.__name__}.{name} is {given[name]!r}; it must be {expected}."
        raise ConfigError(message) from error
