"""Where does the target go when the source is taught: to the reference, elsewhere, or nowhere?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import lightning as L
import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor

from lincorr_lightning.callbacks.watcher import (
    RelationCallback,
    adapter_ids,
    edits_of,
    independent,
    queries,
    relation_of_edits,
)
from lincorr_lightning.distributed import gather
from lincorr_lightning.errors import ConfigError, DomainError
from lincorr_lightning.finetune.results import EditReport
from lincorr_lightning.finetune.sampling import Edit, resolve_edits
from lincorr_lightning.finetune.tensorboard import add_scalar_layout, log_cases
from lincorr_lightning.functional import Outcome, outcome_codes
from lincorr_lightning.io import safe_names
from lincorr_lightning.knowledge import Domain, TokenizedRelation
from lincorr_lightning.lm.query_cache import Query
from lincorr_lightning.results.run_folder import is_dry_run, run_folder

CONTROLS = ("color",)


class DomainLogits(NamedTuple):
    """What the LM says of some edits' subjects: domain logits, a row each, float64."""

    source: Tensor
    target: Tensor
    controls: tuple[Tensor, ...]

    def rows(self, indices: Sequence[int]) -> DomainLogits:
        chosen = list(indices)
        return DomainLogits(
            self.source[chosen], self.target[chosen], tuple(c[chosen] for c in self.controls)
        )

    @classmethod
    def stack(cls, parts: Sequence[DomainLogits]) -> DomainLogits:
        return cls(
            torch.cat([part.source for part in parts]),
            torch.cat([part.target for part in parts]),
            tuple(torch.cat(column) for column in zip(*(p.controls for p in parts), strict=True)),
        )


class Generalization(RelationCallback):
    """Counts what edits of the source do to the target (paper, section 5).

    An edit teaches the LM a new source answer for a subject. Its target *generalizes* if it is
    then the reference of that answer, *hallucinates* if it went elsewhere, and is *unchanged*
    else. Knowledge that has nothing to do with the source, the controls, should not move at all.

    Where edits are trained together, all of this is measured on a part of them as they are
    trained, and on all of them at the end. Where each is trained from the base weights
    (`EditBatch.n_steps`), each is measured after each of its steps, and counts with its last one.

    Where several watch one run, all but that of the run's own relation (or the first) put the
    relation's name before their tags and behind the names of their files. If the run teaches
    another source than theirs, they watch its subjects as in a run without edits.

    Args:
        relation: As ``city->country``; None takes that of the run's edits.
        edits: The edits that are watched: a list of ``{subject: ..., answer: ...}``, or a JSONL or
            CSV file, with a ``reference`` where it is not the relation's; None takes those of the
            DataModule. A run without any watches subjects of
            the vocabulary, and asks whether the target agrees with what the source says now.
        controls: Knowledges that must not move; those that the LM has no label for are left out,
            with a warning.
        linear_map: Folder of a linear map, whose W is told of each case; None fits one.
        n_watch: Edits that are measured while they are trained together.
        ridge: Of the map that is fitted.
        n_subjects: Subjects that a map is fitted on, as far as the vocabulary has so many.
        every_n_steps: Optimizer steps between two measurements.
        lm: Name of the LM in ``module.named_modules()``, if there are several.
        tokenizer: Folder or hub id of its tokenizer, if none is found.
        knowledge_files: YAML files with knowledge of your own.
        seed: Of subjects that are sampled.

    Attributes:
        results: After training: ``n_edits``, ``source_learned``, ``generalized``,
            ``hallucinated``, ``unchanged``, ``random``, and more; shares of the edits.
    """

    def __init__(
        self,
        relation: str | None = None,
        edits: list[dict[str, Any]] | str | None = None,
        controls: list[str] | None = None,
        linear_map: str | None = None,
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
        if n_watch < 1:
            raise ConfigError(f"Generalization.n_watch is {n_watch}; it must be at least 1.")
        self.own_edits = edits
        self.controls = list(CONTROLS if controls is None else controls)
        self.n_watch = n_watch

    def begin(self) -> None:
        """Forget all that was seen in another run."""
        super().begin()
        self.results: dict[str, Any] = {}
        self.report: EditReport | None = None
        self._base: DomainLogits | None = None
        self._after: dict[int, DomainLogits] = {}
        self._by_step: dict[int, dict[int, dict[str, float]]] = {}
        self._is_independent = False

    # -- asking ----------------------------------------------------------------------------------

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Know the edits, and what the LM says of them before anything changes."""
        self.open(trainer, pl_module)
        if not is_dry_run(trainer):
            run_folder(trainer)  # agreed on by all processes, before one of them writes
        mine = self.siblings(trainer)
        names = [each.relation_in(trainer) for each in mine]
        own = relation_of_edits(trainer)
        is_first = mine[names.index(own) if own in names else 0] is self
        self._prefix = "" if is_first else f"{self.tag}/"
        self._edits = self._find_edits(trainer)
        self._controls = self._find_controls()
        for control in self._controls:
            self.cache.register_tokens(control.token_ids)
        _ = self.maps  # fitted now, if it is not given
        self._watched = list(range(min(self.n_watch, len(self.subjects))))
        self.watch_from(trainer)
        if self._base is None:
            self._base = self._read(self._questions(range(len(self.subjects))), trainer.global_step)
        controls = [control.knowledge.name for control in self._controls]
        plan = getattr(pl_module, "edit_schedule", None)
        steps_of_edits = getattr(plan, "protocol", None) == "independent"
        add_scalar_layout(trainer, self.tag, controls, self._prefix, steps_of_edits)

    def _find_controls(self) -> list[Domain]:
        """The controls that this LM can speak of; a run does not fail for want of one."""
        source = self.asked.relation.source.name
        found = []
        for name in self.controls:
            if name in (source, self.asked.relation.target.name):
                continue
            try:
                asked = TokenizedRelation.of(
                    f"{source}->{name}", self.known, self.cache.lm.tokenizer
                )
            except DomainError as error:
                rank_zero_warn(f"{name} is left out of the controls: {error}")
            else:
                found.append(asked.target)
        return found

    def _find_edits(self, trainer: L.Trainer) -> list[Edit]:
        """The edits in this relation's labels; none, if only subjects are watched."""
        edits = edits_of(trainer)
        if self.own_edits is not None:
            edits = resolve_edits(self.own_edits, self.asked, self.cache.lm)
        elif edits is None:
            self.asked.require_reference()
            self.subjects = self.sample_subjects(self.n_watch)
            return []
        else:
            edits = self._translated(edits, trainer.datamodule.asked)  # type: ignore[attr-defined]
            if not edits:
                self.asked.require_reference()
                self.subjects = [edit.subject for edit in edits_of(trainer) or ()]
                return []
        self.subjects = [edit.subject for edit in edits]
        return edits

    def _translated(self, edits: list[Edit], theirs: TokenizedRelation) -> list[Edit]:
        """Edits of a DataModule, whose labels may be others than these."""
        if theirs.source.knowledge.name != self.asked.source.knowledge.name:
            return []
        if theirs.name == self.asked.name and _labels(theirs) == _labels(self.asked):
            return edits
        written = [{"subject": edit.subject, "answer": edit.answer} for edit in edits]
        return resolve_edits(written, self.asked, self.cache.lm)

    def _questions(
        self, edits: Sequence[int], which: Sequence[int | None] | None = None
    ) -> list[list[Query]]:
        subjects = [self.subjects[index] for index in edits]
        asked = [self.asked.source, self.asked.target, *self._controls]
        return [queries([domain.knowledge.prompt(x) for x in subjects], which) for domain in asked]

    def _read(self, about: Sequence[list[Query]], step: int) -> DomainLogits:
        domains = [self.asked.source, self.asked.target, *self._controls]
        labels = [domain.token_ids for domain in domains]
        source, target, *controls = self.cache.read(list(zip(about, labels, strict=True)), step)
        return DomainLogits(source, target, tuple(controls))

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Say what will be asked after the step."""
        del pl_module, batch_idx
        edit_batch = independent(batch)
        step = trainer.global_step
        if edit_batch is None:
            self._about = self._questions(self._watched)
            due = self.is_due(step + 1)
        else:
            if self.own_edits is not None:
                raise ConfigError(
                    "Generalization.edits names edits of its own, but this run trains each of the "
                    "DataModule's from the base weights, and only the one that is trained can be "
                    "watched. Leave Generalization.edits null."
                )
            self._is_independent = True
            self._about = self._questions(edit_batch.edits, adapter_ids(edit_batch))
            due = self.is_due(edit_batch.step + 1) or edit_batch.last
        if due:
            self.cache.prefetch([question for part in self._about for question in part], step)

    def after_optimizer_step(self, trainer: L.Trainer, batch: Any) -> None:
        """Measure, if it is time."""
        step = trainer.global_step
        edit_batch = independent(batch)
        if edit_batch is None:
            if self.is_due(step):
                numbers = self._numbers(self._watched, self._read(self._about, step))
                self._log(trainer, numbers, step)
            return
        if not (self.is_due(edit_batch.step + 1) or edit_batch.last):
            return
        said = self._read(self._about, step)
        values = self._values(edit_batch.edits, said)
        seen = self._by_step.setdefault(edit_batch.step, {})
        for row, edit in enumerate(edit_batch.edits):
            seen[edit] = {name: float(value[row]) for name, value in values.items()}
            if edit_batch.last:
                self._after[edit] = said.rows([row])

    # -- numbers ---------------------------------------------------------------------------------

    def _right(self, edits: Sequence[int], said: DomainLogits) -> Tensor:
        """Which target labels are right for each edit, ``(n, n_target)``."""
        right = torch.from_numpy(self.asked.right).T
        if not self._edits:
            return right[said.source.argmax(1)]
        rows = torch.zeros(len(edits), right.shape[1], dtype=torch.bool)
        for row, index in enumerate(edits):
            rows[row, list(self._edits[index].rights)] = True
        return rows

    def _judge(self, edits: Sequence[int], said: DomainLogits) -> tuple[Tensor, Tensor]:
        """Outcome of each edit, and whether its source was learned."""
        assert self._base is not None
        before = self._base.rows(edits).target.argmax(1)
        codes = outcome_codes(before, said.target.argmax(1), self._right(edits, said))
        if not self._edits:
            return codes, torch.ones(len(codes), dtype=torch.bool)
        taught = torch.tensor([self._edits[index].label for index in edits])
        return codes, said.source.argmax(1) == taught

    def _values(self, edits: Sequence[int], said: DomainLogits) -> dict[str, Tensor]:
        """Every number of each edit, ``(n,)``; their means are what is told."""
        assert self._base is not None
        base = self._base.rows(edits)
        codes, learned = self._judge(edits, said)
        values = {f"generalization/{o}": codes == i for i, o in enumerate(Outcome)}
        if self._edits:
            values["generalization/source_learned"] = learned
        probability = said.target.softmax(1)
        old = probability.gather(1, base.target.argmax(1, keepdim=True))
        values["probability/reference"] = (probability * self._right(edits, said)).sum(1)
        values["probability/old_answer"] = old[:, 0]
        for domain, before, after in zip(self._controls, base.controls, said.controls, strict=True):
            kept = before.argmax(1) == after.argmax(1)
            values[f"control_unchanged/{domain.knowledge.name}"] = kept
        return values

    def _numbers(self, edits: Sequence[int], said: DomainLogits) -> dict[str, float]:
        values = self._values(edits, said)
        return {name: value.double().mean().item() for name, value in values.items()}

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Count all edits, and write the cases."""
        del pl_module
        assert self._base is not None
        after = {edit: said for part in gather(self._after) for edit, said in part.items()}
        by_step = gather(self._by_step)
        if any(gather(self._is_independent)):
            # Fewer than there are, or none, if training was cut short.
            edits = sorted(after)
            said = DomainLogits.stack([self._base.rows([]), *(after[edit] for edit in edits)])
            self._log_by_step(trainer, by_step)
        else:
            edits = list(range(len(self.subjects)))
            said = self._read(self._questions(edits), trainer.global_step)
        numbers = self._numbers(edits, said)
        codes, learned = self._judge(edits, said)
        right = self._right(edits, said)
        base = self._base.rows(edits)
        self.report = EditReport.of(
            self.asked,
            [self.subjects[index] for index in edits],
            [self._edits[index].answer for index in edits] if self._edits else None,
            [self._edits[index].label for index in edits]
            if self._edits
            else said.source.argmax(1).tolist(),
            right.numpy(),
            base.target.numpy(),
            said.target.numpy(),
            [list(Outcome)[code] for code in codes.tolist()],
            learned.tolist(),
            self.maps.weight.numpy(),
        )
        self.report = replace(self.report, relation=self.tag)
        results = {
            "relation": self.asked.name,
            "n_edits": len(edits),
            "random": float(right.double().mean(1).mean()),
            **{name.split("/")[-1]: v for name, v in numbers.items() if "generaliz" in name},
            "probability_reference": numbers["probability/reference"],
            "probability_old_answer": numbers["probability/old_answer"],
            "controls": {
                name.split("/")[-1]: {"unchanged": None if value != value else value}
                for name, value in numbers.items()
                if name.startswith("control_unchanged/")
            },
            **self.report.numbers,
        }
        self.results = {name: None if v != v else v for name, v in results.items()}
        if trainer.is_global_zero and not is_dry_run(trainer):
            suffix = f"_{safe_names([self.tag])[self.tag]}" if self._prefix else ""
            self.report.write(run_folder(trainer), suffix)
        log_cases(trainer, self.report)

    def _log_by_step(
        self, trainer: L.Trainer, parts: Sequence[dict[int, dict[int, dict[str, float]]]]
    ) -> None:
        """Means over all edits after each of their steps; x is the step within the edit."""
        for step in sorted({step for part in parts for step in part}):
            seen = [values for part in parts for values in part.get(step, {}).values()]
            numbers = {
                f"edit_step/{name.removeprefix('generalization/')}": sum(v[name] for v in seen)
                / len(seen)
                for name in seen[0]
            }
            self._log(trainer, numbers, step + 1)

    def _log(self, trainer: L.Trainer, numbers: Mapping[str, float], step: int) -> None:
        self.log_numbers(trainer, {f"{self._prefix}{k}": v for k, v in numbers.items()}, step)

    # -- resuming --------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """What was seen so far; base logits cannot be asked again in the middle of a run."""

        def plain(said: DomainLogits) -> list[Any]:
            return [said.source, said.target, list(said.controls)]

        return {
            **super().state_dict(),
            "base": None if self._base is None else plain(self._base),
            "after": {edit: plain(said) for edit, said in self._after.items()},
            "by_step": self._by_step,
            "is_independent": self._is_independent,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from there."""

        def said(parts: list[Any]) -> DomainLogits:
            return DomainLogits(parts[0], parts[1], tuple(parts[2]))

        super().load_state_dict(state_dict)
        base = state_dict["base"]
        self._base = None if base is None else said(base)
        self._after = {edit: said(parts) for edit, parts in state_dict["after"].items()}
        self._by_step = state_dict["by_step"]
        self._is_independent = state_dict["is_independent"]


def _labels(asked: TokenizedRelation) -> list[list[int]]:
    return [asked.source.token_ids, asked.target.token_ids]
