"""Does an update of the source's logits carry over to the target's as W says?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import lightning as L
import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor

from lincorr_lightning.callbacks.watcher import (
    LEAST,
    RelationCallback,
    adapter_ids,
    edits_of,
    enough,
    independent,
    queries,
)
from lincorr_lightning.distributed import gather
from lincorr_lightning.functional import labelwise_pearson, summarize
from lincorr_lightning.lm.query_cache import Query


class _Logits(NamedTuple):
    """Of some subjects, float64."""

    source: Tensor
    target: Tensor

    def rows(self, indices: Sequence[int]) -> _Logits:
        return _Logits(self.source[list(indices)], self.target[list(indices)])


class _Update(NamedTuple):
    """What one optimizer step changed, and where it led."""

    source: Tensor
    target: Tensor
    after: _Logits


class GradientCorrelation(RelationCallback):
    """Label-wise r between ``W · ΔF_source`` and ``ΔF_target`` at optimizer steps.

    ΔF, the *gradient of the logits*, is what one update changes in them (paper, section 4.1). It
    is measured on a watch set of subjects; r is taken per label across the subjects, then the mean
    over labels. Where each edit is trained from the base weights, an edit is watched at its own
    subject, and r is taken across edits: at their first update it is the paper's table 4.

    Beside it stand the same with the rows of W permuted (chance), and the r between predicted and
    true logits themselves.

    Args:
        relation: As ``city->country``; None takes that of the run's edits.
        linear_map: Folder of a linear map; None fits one on the LM as the run starts.
        subjects: The watch set; None takes the edits' subjects, or samples the vocabulary.
        n_watch: Size of the watch set at most.
        ridge: Of the map that is fitted; 0 is the paper's. The map with ``ridge: auto`` is
            measured beside it.
        n_subjects: Subjects that a map is fitted on, as far as the vocabulary has so many.
        every_n_steps: Optimizer steps between two measurements.
        lm: Name of the LM in ``module.named_modules()``, if there are several.
        tokenizer: Folder or hub id of its tokenizer, if none is found.
        knowledge_files: YAML files with knowledge of your own.
        seed: Of subjects that are sampled, and of the permutation.

    Attributes:
        results: After training, every number: ``gradient_correlation`` (independent edits: at the
            first update; else the mean over steps), ``gradient_correlation_auto``,
            ``gradient_correlation_all_steps``, ``permuted_gradient_correlation``,
            ``logit_correlation`` (independent edits: of the LM before them) and ``n_updates``; None
            where nothing varied.
    """

    def __init__(
        self,
        relation: str | None = None,
        linear_map: str | None = None,
        subjects: list[str] | None = None,
        n_watch: int = 16,
        ridge: float = 0.0,
        n_subjects: int = 2000,
        every_n_steps: int = 1,
        lm: str | None = None,
        tokenizer: str | None = None,
        knowledge_files: list[str] | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__(
            relation, linear_map, ridge, n_subjects, every_n_steps, lm, tokenizer, knowledge_files,
            seed,
        )  # fmt: skip
        self.subjects = enough(subjects, n_watch, "GradientCorrelation")
        self.n_watch = n_watch

    def begin(self) -> None:
        """Forget all that was seen in another run."""
        super().begin()
        self.results: dict[str, float | None] = {}
        self._steps: list[dict[str, float]] = []
        self._by_edit: dict[int, dict[int, _Update]] = {}
        self._base: _Logits | None = None
        self._before: tuple[int, _Logits] | None = None

    # -- asking ----------------------------------------------------------------------------------

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Fit or read the maps; see what the LM says of the edits before anything changes."""
        self.open(trainer, pl_module)
        _ = self.maps  # fitted now, if it is not given
        edits = edits_of(trainer) or []
        subjects = self.subjects or [edit.subject for edit in edits]
        watched = list(dict.fromkeys(subjects)) or self.sample_subjects(self.n_watch)
        self._watched = self._questions(watched[: self.n_watch])
        self._subjects = [edit.subject for edit in edits]
        if self._subjects and self._base is None:
            self._base = self._read(self._questions(self._subjects), trainer.global_step)

    def _questions(
        self, subjects: Sequence[str], which: Sequence[int | None] | None = None
    ) -> tuple[list[Query], list[Query]]:
        return (
            queries(self.asked.source_prompts(subjects), which),
            queries(self.asked.target_prompts(subjects), which),
        )

    def _read(self, about: tuple[list[Query], list[Query]], step: int) -> _Logits:
        labels = self.asked.source.token_ids, self.asked.target.token_ids
        return _Logits(*self.cache.read(list(zip(about, labels, strict=True)), step))

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Know the logits before the step; say what will be asked after it."""
        del pl_module, batch_idx
        step = trainer.global_step
        edit_batch = independent(batch)
        if edit_batch is None:
            self._about = self._watched
            if not self.is_due(step):
                self._before = None
            # Within an accumulation the weights are those at its start.
            elif self._before is None or self._before[0] != step:
                self._before = step, self._read(self._about, step)
        else:
            subjects = [self._subjects[index] for index in edit_batch.edits]
            self._about = self._questions(subjects, adapter_ids(edit_batch))
            if edit_batch.first:
                assert self._base is not None
                self._before = step, self._base.rows(edit_batch.edits)
            elif not self.is_due(edit_batch.step):
                self._before = None
            elif self._before is None or self._before[0] != step:
                self._before = step, self._read(self._about, step)
        # If it is measured after this step, or from this step on: with what others ask then.
        begins = self.is_due(step + 1 if edit_batch is None else edit_batch.step + 1)
        if self._before is not None or (begins and not (edit_batch and edit_batch.last)):
            self.cache.prefetch([*self._about[0], *self._about[1]], step)

    def on_train_batch_end(
        self,
        trainer: L.Trainer,
        pl_module: L.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        """Measure, if weights were updated."""
        del pl_module, outputs, batch_idx
        step = trainer.global_step
        if self._before is None or self._before[0] == step:
            return
        before, after = self._before[1], self._read(self._about, step)
        update = _Update(after.source - before.source, after.target - before.target, after)
        self._before = step, after
        edit_batch = independent(batch)
        if edit_batch is None:
            numbers = self._correlate(update)
            self._steps.append({"step": step, **numbers})
            self.log_numbers(
                trainer,
                {f"{name}/{self.tag}": value for name, value in numbers.items()},
                step,
            )
        else:
            for row, edit in enumerate(edit_batch.edits):
                one = _Update(update.source[row], update.target[row], after.rows([row]))
                self._by_edit.setdefault(edit, {})[edit_batch.step] = one

    # -- numbers ---------------------------------------------------------------------------------

    def _correlate(self, update: _Update) -> dict[str, float]:
        """All numbers of some updates, a row each."""
        first, *others = self.maps.weights.items()
        order = torch.randperm(
            len(update.target.T), generator=torch.Generator().manual_seed(self.seed)
        )
        numbers = {
            "gradient_correlation": _mean_r(update.source @ first[1].T, update.target),
            "permuted_gradient_correlation": _mean_r(
                update.source @ first[1][order].T, update.target
            ),
            "logit_correlation": _mean_r(
                self.maps.predict(update.after.source), update.after.target
            ),
        }
        for name, weight in others:
            numbers[f"gradient_correlation_{name}"] = _mean_r(
                update.source @ weight.T, update.target
            )
        return numbers

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Put the steps, or the edits of all processes, together."""
        del pl_module
        by_edit = {edit: steps for part in gather(self._by_edit) for edit, steps in part.items()}
        if by_edit:
            numbers = self._over_edits(trainer, by_edit)
        else:
            names = dict.fromkeys(name for entry in self._steps for name in entry)
            numbers = {name: _mean([entry[name] for entry in self._steps]) for name in names}
            numbers.pop("step", None)
            numbers["n_updates"] = len(self._steps)
        self.results = {
            name: None if value != value else value for name, value in sorted(numbers.items())
        }

    def _over_edits(
        self, trainer: L.Trainer, by_edit: Mapping[int, Mapping[int, _Update]]
    ) -> dict[str, float]:
        """R across edits, at each step of theirs."""
        if len(by_edit) < LEAST:
            rank_zero_warn(
                f"{len(by_edit)} edits are too few for a correlation over them; it takes {LEAST}."
            )
        n_steps = 1 + max(step for steps in by_edit.values() for step in steps)
        everything: list[_Update] = []
        first: dict[str, float] = {}
        for step in range(n_steps):
            updates = [steps[step] for _, steps in sorted(by_edit.items()) if step in steps]
            if not updates:  # every_n_steps leaves it out
                continue
            everything += updates
            numbers = self._correlate(_stack(updates))
            first = first or numbers
            named = {f"edit_step/{name}/{self.tag}": value for name, value in numbers.items()}
            self.log_numbers(trainer, named, step + 1)
        over_all = self._correlate(_stack(everything))
        # Of the LM itself, not of what an update has made of it.
        assert self._base is not None
        first["logit_correlation"] = _mean_r(
            self.maps.predict(self._base.source), self._base.target
        )
        first["gradient_correlation_all_steps"] = over_all["gradient_correlation"]
        first["n_updates"] = len(everything)
        return first

    # -- resuming --------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """What was seen so far; base logits cannot be asked again in the middle of a run."""
        return {
            **super().state_dict(),
            "steps": list(self._steps),
            "by_edit": {
                edit: {step: [*u[:2], *u.after] for step, u in steps.items()}
                for edit, steps in self._by_edit.items()
            },
            "base": None if self._base is None else list(self._base),
            "before": None if self._before is None else [self._before[0], *self._before[1]],
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from there."""
        super().load_state_dict(state_dict)
        self._steps = list(state_dict["steps"])
        self._by_edit = {
            edit: {step: _Update(u[0], u[1], _Logits(u[2], u[3])) for step, u in steps.items()}
            for edit, steps in state_dict["by_edit"].items()
        }
        base, before = state_dict["base"], state_dict["before"]
        self._base = None if base is None else _Logits(*base)
        self._before = None if before is None else (before[0], _Logits(*before[1:]))


def _stack(updates: Sequence[_Update]) -> _Update:
    return _Update(
        torch.stack([update.source for update in updates]),
        torch.stack([update.target for update in updates]),
        _Logits(
            torch.cat([update.after.source for update in updates]),
            torch.cat([update.after.target for update in updates]),
        ),
    )


def _mean_r(prediction: Tensor, target: Tensor) -> float:
    if len(target) < LEAST:
        return float("nan")
    return summarize(labelwise_pearson(prediction, target)).mean


def _mean(values: Sequence[float]) -> float:
    known = [value for value in values if value == value]
    return sum(known) / len(known) if known else float("nan")
