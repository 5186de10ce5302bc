"""Gradient correlation: predicted and measured change of target logits (paper, section 4.1)."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor

from lincorr_lightning.callbacks.relation import MIN_SUBJECTS, RelationCallback, RelationState
from lincorr_lightning.finetune.batches import EditBatch
from lincorr_lightning.finetune.cases import Logits, rows_of
from lincorr_lightning.finetune.verdict import gradients_verdict
from lincorr_lightning.functional import labelwise_pearson, summarize
from lincorr_lightning.functional.significance import mean_r_error
from lincorr_lightning.linear_map.fitting import Ridge
from lincorr_lightning.lm.modes import HALF_PRECISIONS, trained_in_half_precision
from lincorr_lightning.results.results import Results
from lincorr_lightning.results.table import number

_NAMES = ("gradient_correlation", "permuted_gradient_correlation", "logit_correlation")


@dataclass
class GradientState(RelationState):
    """What a checkpoint keeps of a `GradientCorrelation`."""

    steps: list[dict[str, float]] = field(default_factory=list)  #: Correlations by update.
    last: tuple[int, Logits] | None = None  #: The last step, and the logits after it.


class GradientCorrelation(RelationCallback):
    """Label-wise r between ``W · ΔF_source`` and ``ΔF_target`` at optimizer steps.

    ΔF, the *gradient of the logits*, is their change by one optimizer step (paper, section 4.1). It
    is measured on a fixed set of subjects: r per label across the subjects, then the mean over
    labels. If each edit is trained from the base weights, ΔF is measured at the edit's own subject
    and r is computed across edits; at their first step this is the paper's table 4.

    An LM in half precision is read in float32, where the change by one step is not rounded away,
    unless it is sharded or compiled, or half-precision weights are trained; then a warning says so.

    Logs ``gradient_correlation/<relation>``; ``permuted_gradient_correlation/<relation>``, the
    same with the rows of W permuted (chance); and ``logit_correlation/<relation>``, r between
    predicted and true logits.
    Independent edits are logged at the end of training as ``edit_step/...``, by their own steps.

    Args:
        relation: Relation; None takes that of the run's edits, or ``city->country`` without any.
        linear_map: Folder of a linear map; None fits one on the LM at the start of training.
        subjects: Subjects that ΔF is measured on; None takes those of the edits, or samples some.
        n_watch: Number of these subjects at most.
        every_n_steps: Largest number of optimizer steps between two measurements.
        seed: Seed of sampled subjects and of the permutation.
        ridge: Ridge of the fitted map, see `Ridge`; 0 is the paper's.
        n_subjects: Number of subjects that it is fitted on, or as many as the vocabulary has.
        **options: See `RelationCallback`.

    Attributes:
        results: ``relation``, ``n_updates`` and what is logged as means over steps; of independent
            edits at the first step (``logit_correlation``: before it), with the standard error over
            edits ``gradient_correlation_error``. None if nothing varies.
    """

    study = "gradient_correlation"
    state_class = GradientState

    def __init__(
        self,
        relation: str | None = None,
        linear_map: str | None = None,
        subjects: list[str] | None = None,
        n_watch: int = 16,
        every_n_steps: int = 1,
        seed: int = 0,
        ridge: Ridge = "auto",
        n_subjects: int = 2000,
        **options: Any,
    ) -> None:
        super().__init__(relation, every_n_steps=every_n_steps, **options)
        self.watch(subjects, n_watch, seed)
        self.set_map(linear_map, ridge, n_subjects)

    def open(self) -> Iterable[str]:
        self.resolve_relation()
        chosen = self.subjects or self.edited_subjects
        chosen = chosen or self.sample_subjects(self.n_watch, self.seed)
        self.run.measured.update(chosen)
        self.announce_map()
        subjects = list(dict.fromkeys(chosen))[: self.n_watch]
        self._watched = self.queries(subjects)
        self._is_resumed = self.run.trainer.ckpt_path is not None
        return subjects

    def prepare(self) -> None:
        self._warn_about_half_precision()
        if self.state.map is None:
            if self.edited_subjects:
                self.state.base = self.read(self.queries(self.edited_subjects))
            self.state.map = self.fit_map()

    def _warn_about_half_precision(self) -> None:
        lm = self.run.cache.lm
        if trained_in_half_precision(lm.model):
            rank_zero_warn(
                "GradientCorrelation is unreliable: weights are trained in half "
                "precision, which rounds away most of an update of a small learning rate. Train "
                'float32 weights, with Trainer(precision="bf16-mixed") to compute in bfloat16.'
            )
        elif lm.dtype in HALF_PRECISIONS and not lm.can_widen:
            rank_zero_warn(
                "GradientCorrelation is unreliable: a sharded or compiled LM is read in half "
                "precision, which rounds away most of one step's change. Set lm.dtype to float32."
            )

    def measure(self) -> None:
        """Log r of the logits before training; ΔF has no r yet."""
        is_independent = self.run.is_independent
        logits = self.state.base if is_independent else self.read(self._watched)
        numbers = dict.fromkeys(_NAMES, math.nan) | {"logit_correlation": self._logit_r(logits)}
        self.log_scalars(self._named(numbers))
        if is_independent:
            self.log_scalars(self._named(numbers, "edit_step/"), 0)
        self.state.last_measured = None  # the first step is measured in any case

    def catch_up(self) -> None:
        """Keep the last step's number: weights between two updates have none."""

    def _named(self, numbers: Mapping[str, float], prefix: str = "") -> dict[str, float]:
        return {f"{prefix}{name}/{self.tag}": numbers[name] for name in _NAMES}

    def before_batch(self, edits: EditBatch | None) -> None:
        """Record the logits before the step, and announce what is read after it."""
        run = self.run
        if edits is None:
            self._queries = self._watched
            is_due = self.state.last_measured is None or self.is_due(run.next_step)
            is_next_due = self.is_due(run.next_step + run.max_updates_per_batch)
        else:
            self._queries = self.edit_queries(edits)
            is_due = edits.step % self.every_n_steps == 0
            is_next_due = (edits.step + 1) % self.every_n_steps == 0 and not edits.last
        self._before = self._read_before(edits) if is_due else None
        self._is_resumed = False
        if is_due or is_next_due:
            self.prefetch(self._queries)

    def _read_before(self, edits: EditBatch | None) -> Logits:
        if edits is not None and edits.first:
            return rows_of(self.state.base, edits.ids)
        # A resumed run would read them in another batch, which changes their rounding.
        if self._is_resumed and self.state.last is not None and self.state.last[0] == self.run.step:
            return self.state.last[1]
        return self.read(self._queries)

    def after_update(self, edits: EditBatch | None) -> None:
        """Measure the step's update, if the logits before it are known."""
        if self._before is None:
            return
        step = self.run.step
        after = self.read(self._queries)
        self.state.last = step, after
        if edits is not None:
            self.state.keep(edits, self._before, after)
            return
        self.state.last_measured = step
        numbers = self._correlate(self._before, after)
        self.state.steps.append(numbers)
        self.log_scalars(self._named(numbers))

    def _correlate(self, before: Logits, after: Logits) -> dict[str, float]:
        d_source, d_target = (after[side] - before[side] for side in ("source", "target"))
        weight = self.state.map[0]
        order = torch.randperm(len(weight), generator=torch.Generator().manual_seed(self.seed))
        permuted = weight[order.roll(1)][order.argsort()]  # one cycle: no row keeps its place
        return {
            "gradient_correlation": _mean_r(d_source @ weight.T, d_target),
            "permuted_gradient_correlation": _mean_r(d_source @ permuted.T, d_target),
            "logit_correlation": self._logit_r(after),
        }

    def _logit_r(self, logits: Logits) -> float:
        weight, bias, _ = self.state.map
        return _mean_r(logits["source"] @ weight.T + bias, logits["target"])

    def finish(self) -> Results:
        scalars: dict[str, float] = {}
        by_step = self.state.readings_by_step()
        if by_step:
            numbers = self._over_edits(by_step)
            # Independent edits have no common step before the end of training.
            tag = self.tag
            scalars = {f"{k}/{tag}": r for k, r in numbers.items() if "correlation" in k}
        else:
            rows = [[step[name] for name in _NAMES] for step in self.state.steps]
            steps = torch.tensor(rows, dtype=torch.float64).view(-1, len(_NAMES))
            numbers = dict(zip(_NAMES, steps.nanmean(0).tolist(), strict=True))
            numbers["n_updates"] = len(rows)
            r = self._logit_r(self.read(self._watched))
            self.log_scalars({f"logit_correlation/{self.tag}": r})
        values = {
            "relation": self.tokenized.name,
            **{name: number(value) for name, value in sorted(numbers.items())},
            "ridge": self.state.map[2],
        }
        caption = f"r per answer between W · ΔF_source and ΔF_target of {self.tag} by step"
        tables = [self.history_table(caption)]
        verdict = gradients_verdict({self.tag: values})
        return Results(self.name, values, scalars, tables=tables, verdict=verdict)

    def _over_edits(
        self, by_step: Mapping[int, tuple[list[int], list[Logits]]]
    ) -> dict[str, float]:
        """Return the correlations across edits, and log them for each of their steps."""
        n_edits = len({edit for edits, _ in by_step.values() for edit in edits})
        if n_edits < MIN_SUBJECTS:
            rank_zero_warn(f"{n_edits} edits are too few for a correlation, of {MIN_SUBJECTS}.")
        numbers = {step: self._correlate(*logits) for step, (_, logits) in by_step.items()}
        for step, values in numbers.items():
            self.log_scalars(self._named(values, "edit_step/"), step + 1)
        first = min(by_step)
        before, after = by_step[first][1]
        predicted = (after["source"] - before["source"]) @ self.state.map[0].T
        return {
            **numbers[first],
            "gradient_correlation_error": mean_r_error(
                predicted, after["target"] - before["target"]
            ),
            "logit_correlation": self._logit_r(self.state.base),
            "n_updates": sum(len(edits) for edits, _ in by_step.values()),
        }


def _mean_r(prediction: Tensor, target: Tensor) -> float:
    if len(target) < MIN_SUBJECTS:
        return math.nan
    return summarize(labelwise_pearson(prediction, target)).mean
