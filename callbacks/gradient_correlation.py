"""Gradient correlation: predicted and measured change of target logits (paper, section 4.1)."""

import math
from collections.abc import Mapping
from typing import Any

import lightning as L
import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from lincorr_lightning.callbacks.relation_callback import MIN_SUBJECTS, MapCallback, check_subjects
from lincorr_lightning.finetune.batches import EditBatch
from lincorr_lightning.finetune.cases import DomainLogits
from lincorr_lightning.functional import labelwise_pearson, summarize
from lincorr_lightning.functional.significance import mean_r_error
from lincorr_lightning.lm.modes import HALF_PRECISIONS, trained_in_half_precision
from lincorr_lightning.lm.vocabulary import sample_up_to
from lincorr_lightning.results.results import Results
from lincorr_lightning.results.table import number

_NAMES = ("gradient_correlation", "permuted_gradient_correlation", "logit_correlation")


class GradientCorrelation(MapCallback):
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
        relation: Relation, as ``city->country``; None takes that of the run's edits.
        linear_map: Folder of a linear map; None fits one on the LM at the start of training.
        subjects: Subjects that ΔF is measured on; None takes those of the edits, or samples some.
        n_watch: Number of these subjects at most.
        every_n_steps: Largest number of optimizer steps between two measurements.
        seed: Seed of sampled subjects and of the permutation.
        **options: See `MapCallback`.

    Attributes:
        results: ``relation``, ``n_updates`` and what is logged as means over steps; of independent
            edits at the first step (``logit_correlation``: before it), with the standard error over
            edits ``gradient_correlation_error`` and ``..._all_steps``. None if nothing varies.
    """

    study = "gradient_correlation"
    kept = (*MapCallback.kept, "_steps", "_last_logits")

    def __init__(
        self,
        relation: str | None = None,
        linear_map: str | None = None,
        subjects: list[str] | None = None,
        n_watch: int = 16,
        every_n_steps: int = 1,
        seed: int = 0,
        **options: Any,
    ) -> None:
        super().__init__(relation, linear_map, every_n_steps=every_n_steps, seed=seed, **options)
        check_subjects(subjects, n_watch, "GradientCorrelation")
        self.subjects, self.n_watch = subjects, n_watch

    def reset(self) -> None:
        super().reset()
        self._steps: list[dict[str, float]] = []
        self._last_logits: tuple[int, tuple[Any, ...]] | None = None

    def measured_subjects(self, tokenizer: PreTrainedTokenizerBase, has_edits: bool) -> list[str]:
        if self.subjects or has_edits:
            return self.subjects or []
        return sample_up_to(tokenizer, self.n_watch, seed=self.seed)

    def open(self, trainer: L.Trainer) -> None:
        super().open(trainer)
        edited = [edit.subject for edit in self.run_edits]
        chosen = self.subjects or edited or self.sample_subjects(self.n_watch)
        subjects = list(dict.fromkeys(chosen))[: self.n_watch]
        step, logits = (trainer.ckpt_path is not None and self._last_logits) or (None, None)
        self._resumed_logits = logits if step == self.step else None
        self._watched = self.queries(subjects)
        self.declare_measured(subjects)

    def start(self, trainer: L.Trainer) -> None:
        """Fit or read the maps, and record the logits at the edits' subjects before training."""
        self._warn_about_half_precision()
        if self.run_edits:
            self.keep_base([edit.subject for edit in self.run_edits])
        super().start(trainer)

    def measure(self, trainer: L.Trainer) -> None:
        """Log r of the logits before training; ΔF has no r yet."""
        logits = self.base if self.is_independent else self.read(self._watched)
        numbers = dict.fromkeys(self._correlate(logits, logits), math.nan)
        numbers["logit_correlation"] = self._logit_r(logits)
        self.log_scalars(trainer, self._named(numbers), self.step)
        if self.is_independent:
            self.log_scalars(trainer, self._named(numbers, "edit_step/"), 0)
        self._last_measured = None  # the first step is measured in any case

    def _named(self, numbers: Mapping[str, float], prefix: str = "") -> dict[str, float]:
        return {f"{prefix}{name}/{self.tag}": r for name, r in numbers.items()}

    def _warn_about_half_precision(self) -> None:
        lm = self.cache.lm
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

    def before_step(self, trainer: L.Trainer, edit_batch: EditBatch | None) -> None:
        """Record the logits before the step, and announce what is read after it."""
        if edit_batch is None:
            self._queries, after = self._watched, self.step + self.shared.max_updates_per_batch
            is_due = self._last_measured is None or self.is_due(after)
            is_next_due = self.is_due(after + self.shared.max_updates_per_batch)
        else:
            self._queries = self.queries(*self.own_subjects(edit_batch))
            is_due = edit_batch.step % self.every_n_steps == 0
            is_next_due = (edit_batch.step + 1) % self.every_n_steps == 0 and not edit_batch.last
        self._before: DomainLogits | None = None
        resumed, self._resumed_logits = self._resumed_logits, None
        if is_due and edit_batch is not None and edit_batch.first:
            self._before = self.base.rows(edit_batch.ids)
        elif is_due:
            # A resumed run would read them in another batch, which changes their rounding.
            self._before = DomainLogits(*resumed) if resumed else self.read(self._queries)
        if is_due or is_next_due:
            self.prefetch(self._queries)

    def after_optimizer_step(self, trainer: L.Trainer, edit_batch: EditBatch | None) -> None:
        """Measure the step's update, if the logits before it are known."""
        if self._before is None:
            return
        before, after = self._before, self.read(self._queries)
        self._last_logits = self.step, tuple(after)
        if edit_batch is None:
            self._last_measured = self.step
            numbers = self._correlate(before, after)
            self._steps.append(numbers)
            self.log_scalars(trainer, self._named(numbers), self.step)
        else:
            self.keep_edits(edit_batch, before, after)

    def _correlate(self, before: DomainLogits, after: DomainLogits) -> dict[str, float]:
        d_source, d_target = after.source - before.source, after.target - before.target
        weight = self.weight
        order = torch.randperm(len(weight), generator=torch.Generator().manual_seed(self.seed))
        permuted = weight[order.roll(1)][order.argsort()]  # one cycle: no row keeps its place
        return {
            "gradient_correlation": _mean_r(d_source @ weight.T, d_target),
            "permuted_gradient_correlation": _mean_r(d_source @ permuted.T, d_target),
            "logit_correlation": self._logit_r(after),
        }

    def _logit_r(self, logits: DomainLogits) -> float:
        return _mean_r(self.predict(logits.source), logits.target)

    def finish(self, trainer: L.Trainer) -> Results:
        """Return the mean over the steps, or the correlations over the edits of all ranks."""
        scalars: dict[str, float] = {}
        if by_step := self.edits_by_step():
            numbers = self._over_edits(trainer, by_step)
            # Independent edits have no common step before the end of training.
            scalars = self._named({k: r for k, r in numbers.items() if "correlation" in k})
        else:
            rows = [[step[name] for name in _NAMES] for step in self._steps]
            steps = torch.tensor(rows, dtype=torch.float64).view(-1, len(_NAMES))
            numbers = dict(zip(_NAMES, steps.nanmean(0).tolist(), strict=True))
            numbers["n_updates"] = len(self._steps)
            at_last = {"logit_correlation": self._logit_r(self.read(self._watched))}
            self.log_scalars(trainer, self._named(at_last), self.step)
        values = {
            "relation": self.tokenized.name,
            **{name: number(value) for name, value in sorted(numbers.items())},
        }
        # The table's last column is the one that has a value before the first step.
        last = {key: self.history.pop(key) for key in [*self.history] if "logit_" in key}
        self.history |= last
        caption = f"Label-wise r between W · ΔF_source and ΔF_target of {self.tag} at each step"
        return Results(self.name, values, scalars, tables=[self.history_table(caption)])

    def _over_edits(
        self, trainer: L.Trainer, by_step: Mapping[int, tuple[list[int], list[DomainLogits]]]
    ) -> dict[str, float]:
        """Return the correlations across edits, and log them for each of their steps."""
        n_edits = len({edit for edits, _ in by_step.values() for edit in edits})
        if n_edits < MIN_SUBJECTS:
            rank_zero_warn(f"{n_edits} edits are too few for a correlation, of {MIN_SUBJECTS}.")
        numbers = {step: self._correlate(*logits) for step, (_, logits) in by_step.items()}
        for step, values in numbers.items():
            self.log_scalars(trainer, self._named(values, "edit_step/"), step + 1)
        parts = zip(*(logits for _, logits in by_step.values()), strict=True)
        all_before, all_after = (DomainLogits.stack(part) for part in parts)
        before, after = next(iter(by_step.values()))[1]
        predicted = (after.source - before.source) @ self.weight.T
        all_steps = self._correlate(all_before, all_after)["gradient_correlation"]
        return next(iter(numbers.values())) | {
            "gradient_correlation_error": mean_r_error(predicted, after.target - before.target),
            "logit_correlation": self._logit_r(self.base),
            "gradient_correlation_all_steps": all_steps,
            "n_updates": len(all_after.source),
        }


def _mean_r(prediction: Tensor, target: Tensor) -> float:
    if len(target) < MIN_SUBJECTS:
        return float("nan")
    return summarize(labelwise_pearson(prediction, target)).mean
