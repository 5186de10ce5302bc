"""The base of all callbacks that evaluate an LM every few optimizer steps."""

import math
from collections import Counter
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, ClassVar

import lightning as L
import torch
from lightning.pytorch.callbacks import Checkpoint
from lightning.pytorch.utilities import rank_zero_warn
from torch import nn

from lincorr_lightning.errors import CheckpointError, listed, require
from lincorr_lightning.finetune.batches import EditBatch, EditDataset, edit_dataset
from lincorr_lightning.lightning_workarounds import (
    after_train_end,
    cancel_after_train_end,
    return_attributes,
)
from lincorr_lightning.linear_map.artifact import LinearMap
from lincorr_lightning.linear_map.fitting import sample_fitted_subjects
from lincorr_lightning.linear_map.layout import JointLayout, RowReader
from lincorr_lightning.lm.finder import causal_lm_of
from lincorr_lightning.lm.nearest_words import NearestWords
from lincorr_lightning.lm.query_cache import QueryCache
from lincorr_lightning.results import run_folder as runs
from lincorr_lightning.results.results import Results
from lincorr_lightning.results.table import Table

return_attributes()


@dataclass
class LMRun:
    """An LM in training, which callbacks measure together, and its updates so far.

    It counts the optimizer steps that Lightning counts, and batches under manual optimization that
    changed the weights in any other way.
    """

    trainer: L.Trainer
    cache: QueryCache
    dataset: EditDataset | None  #: The edits that the run trains, if its dataset lists them.
    measured: set[str]  #: Subjects that callbacks of the run measure; no map is fitted on them.
    names: Counter[str]  #: How often callbacks of the run use each name of results.
    step: int  #: Updates so far; those of a batch are counted at its end.
    max_updates_per_batch: int  #: Most updates of one batch so far.
    uncounted: int  #: Updates that ``trainer.global_step`` does not count.
    was_updated: bool = False  #: Whether the last batch updated the LM.
    maps: dict[Hashable, LinearMap] = field(default_factory=dict)  #: Fitted before training.
    _announced: list[tuple[JointLayout, int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._reader = RowReader(self.cache.lm)

    @property
    def is_independent(self) -> bool:
        """Whether each edit of the run is trained from the base weights."""
        return self.dataset is not None and self.dataset.training.protocol == "independent"

    @property
    def next_step(self) -> int:
        """Number of updates after the next batch, at most."""
        return self.step + self.max_updates_per_batch

    def tag(self, study: str, relation: str) -> str:
        """Return a relation's name, numbered if other callbacks of the kind evaluate it too."""
        self.names[f"{study} {relation}"] += 1
        number = self.names[f"{study} {relation}"]
        return f"{relation} ({number})" if number > 1 else relation

    def fit_subjects(self, n: int) -> list[str]:
        """Return up to n subjects to fit maps on, on which no callback scores any."""
        return sample_fitted_subjects(self.cache.lm.tokenizer, n, self.measured)

    @cached_property
    def nearest_words(self) -> NearestWords | None:
        """The nearest words of the LM before training; None for a head without rows."""
        return self.cache.lm.nearest_words()

    def announce(self, layout: JointLayout, n_subjects: int) -> None:
        """Note that rows of a layout will be read, for as many subjects to fit maps on."""
        self._announced.append((layout, n_subjects))

    def reader(self) -> RowReader:
        """Return a reader of rows before training, which reads what is announced together."""
        for layout, n_subjects in self._announced:
            self._reader.announce(layout, self.fit_subjects(n_subjects))
        self._announced.clear()
        return self._reader

    def start_batch(self, pl_module: L.LightningModule) -> None:
        """Start the pause before a batch."""
        self.cache.start_pause()
        if not pl_module.automatic_optimization:
            self.cache.weights_version()

    def end_batch(self, pl_module: L.LightningModule) -> None:
        """Start the pause after a batch, and count its updates."""
        n = self.trainer.global_step + self.uncounted - self.step
        compares_weights = n == 0 and not pl_module.automatic_optimization
        version = self.cache.weights_version() if compares_weights else None
        self.cache.start_pause(weights_changed=n > 0)
        if compares_weights and self.cache.weights_version() != version:
            n = 1
            self.uncounted += 1
        self.step += n
        self.max_updates_per_batch = max(self.max_updates_per_batch, n)
        self.was_updated = n > 0


@dataclass
class CallbackState:
    """What a checkpoint keeps of a callback: numbers, texts, tensors and containers of these."""

    history: dict[str, list[tuple[int, float]]] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)
    items: list[str] | None = None  #: Names of what is measured, such as subjects.
    last_measured: int | None = None
    uncounted: int = 0  #: See `LMRun`.


class PeriodicCallback(L.Callback):
    """Evaluates the LM of any LightningModule every few updates of its weights.

    The LM is evaluated in eval mode and without gradients: weights, optimizer state, random number
    generators and train/eval modes are restored. All ranks evaluate the same prompts. Whatever
    changes the weights (another optimizer, an editor, averaging), the results are those of the
    final weights: these callbacks run after all others but checkpoints. If several edits are
    trained side by side, each in an adapter, those that know no edits evaluate the first adapter.

    A subclass defines some of `open`, `prepare`, `measure`, `before_batch`, `after_update` and
    `finish`; what it keeps from one to the other is in `state`, which a checkpoint holds.

    Args:
        every_n_steps: Largest number of optimizer steps between two measurements.
        lm: Name of the LM in ``module.named_modules()``, if the module holds several.
        tokenizer: Folder or hub id of the LM's tokenizer, if module and checkpoint have none.

    Attributes:
        results: Values measured in the last run, empty before its end.
        output: The same with tables and figures; None before the end of training.
    """

    study: ClassVar[str]  #: Kind of the results, as ``resilience``.
    state_class: ClassVar[type[CallbackState]] = CallbackState
    is_of_start: ClassVar[bool] = False  #: Whether the results are of the LM before training.
    relation: str | None = None  #: Relation as the user named it, if any.
    returned: ClassVar[tuple[str, ...]] = ("state", "results", "output")
    """Attributes that come back from the process of a spawned run."""

    def __init__(
        self, every_n_steps: int = 10, lm: str | None = None, tokenizer: str | None = None
    ) -> None:
        super().__init__()
        require(f"{type(self).__name__}.every_n_steps", every_n_steps, at_least=1)
        self.every_n_steps = every_n_steps
        self.lm = lm
        self.tokenizer = tokenizer
        self._key = ""
        self._run: LMRun | None = None
        self._reset()

    def _reset(self) -> None:
        self.state: Any = self.state_class()
        self.results: dict[str, Any] = {}
        self.output: Results | None = None
        self._measured_version: int | None = None
        self._is_awaited = False
        #: Adapter that is measured, if several are trained side by side.
        self.adapter_id: int | None = None

    @property
    def history(self) -> dict[str, list[tuple[int, float]]]:
        """``(step, value)`` pairs by log key: every scalar that was logged."""
        return self.state.history

    @property
    def run(self) -> LMRun:
        """The LM in training."""
        assert self._run is not None, "there is no run"
        return self._run

    # -- what subclasses define --------------------------------------------------------------------

    def open(self) -> Iterable[str]:
        """Resolve what the arguments name for this run's LM; return the names of what is measured.

        A resumed run must measure the same.
        """
        return []

    def prepare(self) -> None:
        """Read what is needed of the LM before training, unless `state` has it."""

    def measure(self) -> None:
        """Measure the LM as it is now; nothing by default."""

    def before_batch(self, edits: EditBatch | None) -> None:
        """Prepare the measurement after a batch; under gradient accumulation no step may follow.

        `edits` are those of the batch if each is trained from the base weights, else None.
        """

    def after_update(self, edits: EditBatch | None) -> None:
        """Measure if due, after a batch that has changed the weights."""
        if self.is_due(self.run.step):
            self.measure_once()

    def finish(self) -> Results:
        """Return the results at the end of training; called on all ranks."""
        raise NotImplementedError

    # -- when they are called ----------------------------------------------------------------------

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Start afresh; a resumed run loads its measurements from the checkpoint later."""
        if stage != "fit":
            return
        self._run = None  # of a run that failed
        callbacks: list[L.Callback] = trainer.callbacks  # type: ignore[attr-defined]
        periodic = periodic_callbacks(trainer)
        last = [each for each in callbacks if isinstance(each, Checkpoint)]
        others = [each for each in callbacks if each not in (*periodic, *last)]
        # Weights are measured after other callbacks have changed them, and before they are saved.
        trainer.callbacks = [*others, *periodic, *last]  # type: ignore[attr-defined]
        same = [x for x in periodic if (type(x), x.relation) == (type(self), self.relation)]
        self._key = f"{type(self).__qualname__} {self.relation} {same.index(self) + 1}"
        self._reset()

    @property
    def state_key(self) -> str:
        """Key of the callback's state in checkpoints, the same in each run from `setup` on.

        It is made of its class, its relation, and its number among callbacks with the same two.
        """
        return self._key or f"{type(self).__qualname__} {id(self)}"

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        # The first callback opens all, so that what they announce is read together.
        if all(each._run is None for each in periodic_callbacks(trainer)):
            _open_all(trainer, pl_module)
            after_train_end(trainer, partial(runs.collect_callback_results, trainer))
        if not runs.is_dry_run(trainer):
            runs.run_folder(trainer)  # a collective call, made before rank 0 alone writes
        self.prepare()
        if not self.history:
            self.measure_once()
        for key, value in self.state.metrics.items():
            trainer.callback_metrics.setdefault(key, torch.tensor(value))
        if self.is_of_start:
            self._publish()

    def _open(self, run: LMRun) -> None:
        self._run = run
        run.names[self.study] += 1
        number = run.names[self.study]
        #: Name of the results, of their table and of their figure, as ``resilience_2``.
        self.name = f"{self.study}_{number}" if number > 1 else self.study
        before, now = self.state.items, list(self.open())
        self.state.items = now
        name = type(self).__name__
        if before is not None and now != before:
            lost, new = sorted(set(before) - set(now)), sorted(set(now) - set(before))
            raise CheckpointError(
                f"{name} measures other things than in the run of the checkpoint, or in another "
                f"order: only there {listed(lost)}; only here {listed(new)}. Give it "
                "the same to go on with its curves, or start a new run."
            )
        if before is None and run.trainer.ckpt_path is not None:
            rank_zero_warn(f"the checkpoint has no measurements of this {name}: they begin here.")

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if self._is_first:
            self.run.start_batch(pl_module)
        self._is_awaited = self._is_monitored(trainer) and _is_read_after(self.run, batch_idx)
        edits = independent_edits(batch)
        # The first of the adapters that are trained side by side; a rank without edits has none.
        self.adapter_id = 0 if edits is not None and edits.edits else None
        self.before_batch(edits)

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, *_: Any
    ) -> None:
        if self._is_first:
            self.run.end_batch(pl_module)
        if self.run.was_updated:
            self.after_update(independent_edits(batch))

    def on_validation_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Measure the weights that are validated, if another callback reads a number after it.

        They may be others than those in training, such as their averages.
        """
        if self._run is None:
            return
        if self._is_first:
            self.run.cache.start_pause()
        if self._is_monitored(trainer):
            self.catch_up()

    def _is_monitored(self, trainer: Any) -> bool:
        monitored = [getattr(each, "monitor", None) for each in trainer.callbacks]
        return getattr(trainer, "reads_all_metrics", False) or any(
            key in self.state.metrics for key in monitored
        )

    def catch_up(self) -> None:
        """Measure the LM as it is, unless it has been, or each edit is trained by itself."""
        if not self.run.is_independent:
            self.measure_once()

    def complete(self, trainer: L.Trainer) -> None:
        """Collect the results on the current weights, and write their tables and figures.

        Does nothing if that has been done, or in a run without training.
        """
        if self._run is None:
            return
        if self._is_first:
            self.run.cache.start_pause()
            self.run.cache.exchange(causal_lm_of(trainer.lightning_module, self.lm))
        if self.output is None:
            self._publish()

    def _publish(self) -> None:
        self.output = self.finish().numbered(self.name.removeprefix(self.study))
        self.results = dict(self.output.values)
        self._measured_version = self.run.cache.weights_version()
        runs.write_parts(self.run.trainer, self.output)

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        self.measure_changed_weights()
        self._run = None

    def measure_changed_weights(self) -> None:
        """Measure again if other callbacks have changed the LM since the end of training."""
        if self._run is not None and self.output is not None and self.adapter_id is None:
            cache = self.run.cache
            if self._is_first:
                cache.start_pause()
            is_fixed = self.is_of_start or cache.lm.is_sharded
            if not is_fixed and cache.weights_version() != self._measured_version:
                self._publish()

    def on_exception(
        self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException
    ) -> None:
        """Release the LM, since Lightning calls no `teardown` after an exception."""
        cancel_after_train_end(trainer)
        self._run = None

    @property
    def _is_first(self) -> bool:
        """Whether this is the first callback of its LM, which acts for all."""
        callbacks = periodic_callbacks(self.run.trainer)
        return self is next(each for each in callbacks if each._run is self._run)

    def is_due(self, step: int, edits: EditBatch | None = None) -> bool:
        """Return whether to measure after update `step`, or a step of independent edits.

        A batch may make several updates, so it is due if after the next batch it could be too late;
        it also is where another callback reads a key that it monitors.
        """
        if edits is not None:
            return (edits.step + 1) % self.every_n_steps == 0 or edits.last
        latest = step + self.run.max_updates_per_batch
        return self._is_awaited or latest - (self.state.last_measured or 0) > self.every_n_steps

    def measure_once(self) -> None:
        """Measure, unless these weights have been measured at this step."""
        at = self.run.step, self.run.cache.weights_version()
        if (self.state.last_measured, self._measured_version) != at:
            self.state.last_measured, self._measured_version = at
            self.measure()

    # -- what is logged and kept -------------------------------------------------------------------

    def log_scalars(self, scalars: Mapping[str, float], step: int | None = None) -> None:
        """Log scalars, also to `callback_metrics`, and keep them in `history`, without NaN.

        They are those of the current step, if it is None.
        """
        step = self.run.step if step is None else step
        history = self.history
        new = {key: x for key, x in scalars.items() if (step, x) not in history.get(key, ())[-1:]}
        for key, value in new.items():
            points = history.setdefault(key, [])
            if points and points[-1][0] == step:
                points.pop()  # measured again at the end: on all edits, or on restored weights
            if not math.isnan(value):
                points.append((step, float(value)))
            if not points:
                del history[key]
        self.set_callback_metrics(new)
        runs.log_scalars(self.run.trainer, new, step)

    def set_callback_metrics(self, scalars: Mapping[str, float]) -> None:
        """Put scalars into ``trainer.callback_metrics``.

        NaN is 0, so that a key exists; of hallucinations, of which 0 would be the best value, 1.
        """
        for key, value in scalars.items():
            worst = float(key.endswith("hallucinated_of_learned"))
            self.state.metrics[key] = worst if math.isnan(value) else value
        metrics = {key: torch.tensor(self.state.metrics[key]) for key in scalars}
        self.run.trainer.callback_metrics.update(metrics)

    def history_table(self, caption: str) -> Table:
        """Return `history` as a table with a row per step and a column per log key."""
        from pandas import DataFrame  # takes a second

        frame = DataFrame({key: dict(points) for key, points in self.history.items()})
        return Table(self.study, frame.sort_index().rename_axis("step").reset_index(), caption)

    def state_dict(self) -> dict[str, Any]:
        if self._run is not None:
            self.state.uncounted = self._run.uncounted
        return dict(vars(self.state))

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        try:
            self.state = self.state_class(**state_dict)
        except TypeError as error:
            raise CheckpointError(
                f"the checkpoint holds another state of {type(self).__name__} than this version "
                f"({error}). Train again, or leave the callback out."
            ) from error


def independent_edits(batch: Any) -> EditBatch | None:
    """Return a batch if each of its edits is trained from the base weights, else None."""
    return batch if isinstance(batch, EditBatch) and batch.n_steps > 0 else None


def periodic_callbacks(trainer: L.Trainer) -> list[PeriodicCallback]:
    """Return the callbacks of a run that evaluate an LM every few steps."""
    callbacks = trainer.callbacks  # type: ignore[attr-defined]
    return [each for each in callbacks if isinstance(each, PeriodicCallback)]


def _is_read_after(run: LMRun, batch_idx: int) -> bool:
    """Return whether other callbacks may read numbers after a batch.

    They do at the end of an epoch, after a validation, and where checkpoints are written.
    """
    trainer: Any = run.trainer
    step = trainer.global_step
    next_step = step + run.max_updates_per_batch
    every = [getattr(each, "_every_n_train_steps", 0) for each in trainer.callbacks]
    if trainer.val_check_batch and trainer.check_val_every_n_epoch is None:
        batch_idx = trainer.fit_loop.total_batch_idx  # validation counts those of all epochs
    return (
        trainer.is_last_batch
        or (batch_idx + 1) % (trainer.val_check_batch or math.inf) == 0
        or any(next_step // n > step // n for n in every if n)
    )


def _open_all(trainer: L.Trainer, pl_module: L.LightningModule) -> None:
    dataset = edit_dataset(trainer)
    measured = set() if dataset is None else set(dataset.resolved.subjects)
    names: Counter[str] = Counter()
    lm_runs: dict[nn.Module, LMRun] = {}
    for callback in periodic_callbacks(trainer):
        model = causal_lm_of(pl_module, callback.lm)
        if model not in lm_runs:
            uncounted = callback.state.uncounted
            lm_runs[model] = LMRun(
                trainer,
                QueryCache.of(pl_module, model, callback.tokenizer),
                dataset,
                measured,
                names,
                step=trainer.global_step + uncounted,
                max_updates_per_batch=max(len(trainer.optimizers), 1),
                uncounted=uncounted,
            )
        callback._open(lm_runs[model])
