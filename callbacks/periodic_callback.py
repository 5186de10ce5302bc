"""The base of all callbacks that evaluate an LM every few optimizer steps."""

import os
import re
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from inspect import formatannotation
from typing import Any, ClassVar, Self

import lightning as L
import torch
from lightning.pytorch.callbacks import Checkpoint
from lightning.pytorch.core.mixins.hparams_mixin import HyperparametersMixin
from lightning.pytorch.utilities import rank_zero_warn
from torch import nn

from lincorr_lightning.errors import CheckpointError, ConfigError, listed, require
from lincorr_lightning.finetune.batches import EditBatch
from lincorr_lightning.lightning_workarounds import after_train_end, cancel_after_train_end
from lincorr_lightning.linear_map.layout import RowReader
from lincorr_lightning.lm.finder import causal_lm_of
from lincorr_lightning.lm.query_cache import QueryCache
from lincorr_lightning.results import run_folder as runs
from lincorr_lightning.results.results import Results
from lincorr_lightning.results.table import Table


@dataclass
class SharedState:
    """State that the callbacks of a run share if they evaluate the same LM.

    It counts the updates of the LM: the optimizer steps that Lightning counts, and batches under
    manual optimization that changed the weights in any other way.
    """

    cache: QueryCache
    rows: RowReader  #: Reads rows of the LM before training, to fit maps.
    step: int  #: Updates so far; those of a batch are counted at its end.
    max_updates_per_batch: int  #: Most updates of one batch so far.
    uncounted: int = 0  #: Updates that ``trainer.global_step`` does not count.
    was_updated: bool = False  #: Whether the last batch updated the LM.
    fitted_maps: dict[Hashable, Any] = field(default_factory=dict)

    def start_batch(self, pl_module: L.LightningModule) -> None:
        """Start the pause before a batch."""
        self.cache.start_pause()
        if not pl_module.automatic_optimization:
            self.cache.weights_version()

    def end_batch(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Start the pause after a batch, and count its updates."""
        n = trainer.global_step + self.uncounted - self.step
        compares_weights = n == 0 and not pl_module.automatic_optimization
        version = self.cache.weights_version() if compares_weights else None
        self.cache.start_pause(weights_changed=n > 0)
        if compares_weights and self.cache.weights_version() != version:
            n = 1
            self.uncounted += 1
        self.step += n
        self.max_updates_per_batch = max(self.max_updates_per_batch, n)
        self.was_updated = n > 0


class PeriodicCallback(HyperparametersMixin, L.Callback):
    """Evaluates the LM of any LightningModule every few updates of its weights.

    The LM is evaluated in eval mode and without gradients: weights, optimizer state, random number
    generators and train/eval modes are restored. All ranks evaluate the same prompts. Whatever
    changes the weights (another optimizer, an editor, averaging), the results are those of the
    final weights: these callbacks run after all others but checkpoints.

    Subclasses measure in `measure`, or in `start` and `after_optimizer_step`, return their
    `Results` from `finish`, and list in `kept` the attributes that a checkpoint keeps. Arguments of
    another type than the command line takes are refused, as a `ConfigError`.

    Args:
        every_n_steps: Largest number of optimizer steps between two measurements.
        lm: Name of the LM in ``module.named_modules()``, if the module holds several.
        tokenizer: Folder or hub id of the LM's tokenizer, if module and checkpoint have none.

    Attributes:
        history: ``(step, value)`` pairs by log key: every scalar that was logged.
        results: Values measured in the last run, empty before its end.
        output: The same with tables and figures; None before the end of training.
    """

    study: ClassVar[str]  #: Kind of the results, as ``resilience``.
    is_of_start: ClassVar[bool] = False  #: Whether they are of the LM before training alone.
    kept: ClassVar[tuple[str, ...]] = (
        "history",
        "_metrics",
        "_last_measured",
        "_measured_items",
        "_uncounted",
    )
    """Names of the attributes that a checkpoint keeps (numbers, texts, tensors and containers)."""

    def __init__(
        self, every_n_steps: int = 10, lm: str | None = None, tokenizer: str | None = None
    ) -> None:
        super().__init__()
        self.save_hyperparameters(logger=False)  # with the arguments of subclasses
        _check_types(type(self), self.hparams)
        require(f"{type(self).__name__}.every_n_steps", every_n_steps, at_least=1)
        self.every_n_steps, self.lm, self.tokenizer = every_n_steps, lm, tokenizer
        self._key = ""
        self.reset()

    @property
    def state_key(self) -> str:
        """Key of the callback's state in checkpoints, the same in each run from `setup` on.

        It is made of its class, its relation, and its number among callbacks with the same two.
        """
        return self._key or f"{type(self).__qualname__} {id(self)}"

    def expected_relation(self, trainer: L.Trainer) -> str:
        """Return the relation that is evaluated, as far as `setup` knows it; empty without one."""
        return ""

    def reset(self) -> None:
        """Forget the measurements of an earlier run."""
        self.history: dict[str, list[tuple[int, float]]] = {}
        self._metrics: dict[str, float] = {}
        self.results: dict[str, Any] = {}
        self.output: Results | None = None
        self._last_measured: int | None = None
        self._measured_version: int | None = None
        self._uncounted = 0
        self._is_awaited = False
        self._measured_items: list[str] | None = None

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Start afresh; a resumed run loads its measurements from the checkpoint later."""
        if stage != "fit":
            return
        self.release()  # what a run that failed may have left
        callbacks: list[L.Callback] = trainer.callbacks  # type: ignore[attr-defined]
        own = _periodic(trainer)
        last = [each for each in callbacks if isinstance(each, Checkpoint)]
        others = [each for each in callbacks if each not in (*own, *last)]
        # Weights are measured after other callbacks have changed them, and before they are saved.
        trainer.callbacks = [*others, *own, *last]  # type: ignore[attr-defined]
        names = [f"{type(each).__qualname__} {each.expected_relation(trainer)}" for each in own]
        index = own.index(self)
        self._key = f"{names[index]} {names[:index].count(names[index]) + 1}"
        self.reset()

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Find the LM, and measure before training changes it.

        The first callback prepares all, so that what they announce is read together.
        """
        if not any("cache" in vars(each) for each in _periodic(trainer)):
            states: dict[nn.Module, SharedState] = {}
            for callback in _periodic(trainer):
                callback._attach(trainer, pl_module, states)
            after_train_end(trainer, partial(_complete, trainer))
        if not runs.is_dry_run(trainer):
            runs.run_folder(trainer)  # a collective call, made before rank 0 alone writes
        self.start(trainer)

    def _attach(
        self, trainer: L.Trainer, pl_module: L.LightningModule, states: dict[nn.Module, SharedState]
    ) -> None:
        """Find the LM and the state that is shared by its callbacks, and `open` this one."""
        model = causal_lm_of(pl_module, self.lm)
        self._is_first = model not in states
        if self._is_first:
            cache = QueryCache.of(pl_module, model, self.tokenizer)
            step = trainer.global_step + self._uncounted
            n = max(len(trainer.optimizers), 1)
            states[model] = SharedState(cache, RowReader(cache.lm), step, n, self._uncounted)
        self.shared = states[model]
        self.cache = self.shared.cache
        self.adapter_id: int | None = None
        self._index = self.siblings(trainer).index(self)
        before, self._measured_items = self._measured_items, None
        self.open(trainer)
        name = type(self).__name__
        now: list[str] = self._measured_items or []
        if before is not None and now != before:
            lost, new = sorted(set(before) - set(now)), sorted(set(now) - set(before))
            raise CheckpointError(
                f"{name} measures other things than in the run of the checkpoint, or in another "
                f"order: only there {listed(lost)}; only here {listed(new)}. Give it "
                "the same to go on with its curves, or start a new run."
            )
        if before is None and trainer.ckpt_path is not None:
            rank_zero_warn(f"the checkpoint has no measurements of this {name}: they begin here.")

    def open(self, trainer: L.Trainer) -> None:
        """Resolve what the arguments name for this run's LM."""
        self.declare_measured([])

    def declare_measured(self, items: Iterable[str]) -> None:
        """Declare what is measured, such as subjects; a resumed run must measure the same."""
        self._measured_items = list(items)

    @property
    def step(self) -> int:
        """Number of updates of the LM so far."""
        return self.shared.step

    def start(self, trainer: L.Trainer) -> None:
        """Measure the LM before training; a resumed run has done so at its start."""
        if not self.history:
            self._measure_once(trainer)
        for key, value in self._metrics.items():
            trainer.callback_metrics.setdefault(key, torch.tensor(value))

    def finish(self, trainer: L.Trainer) -> Results:
        """Return the results at the end of training; called on all ranks."""
        raise NotImplementedError

    def complete(self, trainer: L.Trainer) -> None:
        """Collect the results on the current weights, and write their tables and figures.

        Does nothing if that has been done, or in a run without training.
        """
        if "cache" not in vars(self):
            return
        if self._is_first:
            self.cache.start_pause()
            self.cache.exchange(causal_lm_of(trainer.lightning_module, self.lm))
        if self.output is not None:
            return
        self.output = self.finish(trainer)
        self.results = dict(self.output.values)
        self._measured_version = self.cache.weights_version()
        runs.write_parts(trainer, self.output)

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Release the LM, which other callbacks may have changed after training."""
        if stage == "fit" and self.output is None:
            rank_zero_warn(f"{type(self).__name__} has no results: nothing was trained.")
        if self.output is not None and "cache" in vars(self) and self.adapter_id is None:
            if self._is_first:
                self.cache.start_pause()
            is_fixed = self.is_of_start or self.cache.lm.is_sharded
            if not is_fixed and self.cache.weights_version() != self._measured_version:
                self.output = None
                self.complete(trainer)
        self.release()

    def release(self) -> None:
        """Drop all references to the LM."""
        for name in ("shared", "cache"):
            vars(self).pop(name, None)

    def on_exception(
        self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException
    ) -> None:
        """Release the LM, since Lightning calls no `teardown` after an exception."""
        cancel_after_train_end(trainer)
        self.release()

    def is_due(self, step: int, edit_batch: EditBatch | None = None) -> bool:
        """Return whether to measure after update `step`, or a step of independent edits.

        A batch may make several updates, so it is due if after the next batch it could be too late;
        it also is at the end of an epoch, where another callback may monitor a key.
        """
        if edit_batch is None:
            latest = step + self.shared.max_updates_per_batch
            return self._is_awaited or latest - (self._last_measured or 0) > self.every_n_steps
        return (edit_batch.step + 1) % self.every_n_steps == 0 or edit_batch.last

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Note the adapter that is measured, and prepare the measurement after the step."""
        if self._is_first:
            self.shared.start_batch(pl_module)
        edit_batch = independent_edits(batch)
        self._is_awaited = trainer.is_last_batch and any(
            getattr(each, "monitor", None) in self._metrics
            for each in trainer.callbacks  # type: ignore[attr-defined]
        )
        # The first of the adapters that are trained side by side; a rank without edits has none.
        self.adapter_id = 0 if edit_batch is not None and edit_batch.edits else None
        self.before_step(trainer, edit_batch)

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, *_: Any
    ) -> None:
        """Count the batch's updates, and hand them to `after_optimizer_step`."""
        if self._is_first:
            self.shared.end_batch(trainer, pl_module)
        if self.shared.was_updated:
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
        state = self.step, self.cache.weights_version()
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
        """Log scalars, also to `callback_metrics`, and keep them in `history`, without NaN."""
        history = self.history
        new = {key: x for key, x in scalars.items() if (step, x) not in history.get(key, ())[-1:]}
        for key, value in new.items():
            points = history.setdefault(key, [])
            if points and points[-1][0] == step:
                points.pop()  # measured again at the end: on all edits, or on restored weights
            if value == value:
                points.append((step, float(value)))
            if not points:
                del history[key]
        self.set_callback_metrics(trainer, new)
        runs.log_scalars(trainer, new, step)

    def set_callback_metrics(self, trainer: L.Trainer, scalars: Mapping[str, float]) -> None:
        """Put scalars into ``trainer.callback_metrics``.

        NaN is 0, so that a key exists; of hallucinations, of which 0 would be the best value, 1.
        """
        for key, x in scalars.items():
            worst = float(key.endswith("hallucinated_of_learned"))
            self._metrics[key] = x if x == x else worst
        trainer.callback_metrics.update({key: torch.tensor(self._metrics[key]) for key in scalars})

    def history_table(self, caption: str) -> Table:
        """Return `history` as a table with a row per step and a column per log key."""
        from pandas import DataFrame  # takes a second

        frame = DataFrame({key: dict(points) for key, points in self.history.items()})
        return Table(self.name, frame.sort_index().rename_axis("step").reset_index(), caption)

    def state_dict(self) -> dict[str, Any]:
        """Return the measurements so far."""
        if "shared" in vars(self):
            self._uncounted = self.shared.uncounted
        return {name: getattr(self, name) for name in self.kept}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from a checkpoint's measurements."""
        for name in self.kept:
            setattr(self, name, state_dict[name])


def independent_edits(batch: Any) -> EditBatch | None:
    """Return a batch if each of its edits is trained from the base weights, else None."""
    return batch if isinstance(batch, EditBatch) and batch.n_steps > 0 else None


def _periodic(trainer: L.Trainer) -> list[PeriodicCallback]:
    callbacks = trainer.callbacks  # type: ignore[attr-defined]
    return [each for each in callbacks if isinstance(each, PeriodicCallback)]


def _complete(trainer: L.Trainer) -> None:
    for callback in _periodic(trainer):
        callback.complete(trainer)


def _as_text(value: Any) -> Any:
    if isinstance(value, list):
        return [_as_text(member) for member in value]
    return os.fspath(value) if isinstance(value, os.PathLike) else value


def _check_types(kind: type, arguments: Mapping[str, Any]) -> None:
    """Refuse arguments that the command line would refuse; paths count as strings."""
    from jsonargparse import ArgumentError, ArgumentParser

    parser = ArgumentParser(exit_on_error=False)
    parser.add_class_arguments(kind, fail_untyped=False)
    # The class sets the other arguments of its base itself.
    given = {name: arguments[name] for name in vars(parser.get_defaults()) if name in arguments}
    texts = {name: _as_text(value) for name, value in given.items()}
    try:
        parsed = parser.parse_object(texts)
        for name, value in texts.items():
            if isinstance(value, str) and parsed[name] != value:  # "100" for 100
                raise ArgumentError(None, f'key "{name}"')
    except ArgumentError as error:
        if (wrong := re.search(r'key "(\w+)', str(error))) is None:
            raise ConfigError(f"{kind.__name__}: {error}") from error
        name = wrong[1]
        inits = [vars(base)["__init__"] for base in kind.__mro__ if "__init__" in vars(base)]
        types = [getattr(init, "__annotations__", {}).get(name) for init in inits]
        expected = next(filter(None, types), "of its type")
        expected = expected if isinstance(expected, str) else formatannotation(expected)
        message = f"{kind.__name__}.{name} is {given[name]!r}; it must be {expected}."
        raise ConfigError(message) from error
