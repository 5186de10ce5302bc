"""Outcomes of edits: generalized, hallucinated or unchanged (paper, section 5)."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import lightning as L
import torch
from torch import Tensor

from lincorr_lightning.callbacks.relation_callback import MapCallback, require_template
from lincorr_lightning.distributed import gather
from lincorr_lightning.errors import ConfigError, require
from lincorr_lightning.finetune import cases
from lincorr_lightning.finetune.batches import EditBatch, edit_dataset
from lincorr_lightning.finetune.edit_files import named_subjects
from lincorr_lightning.finetune.edits import reference_mask, skip_counts, vocabulary_nearness
from lincorr_lightning.finetune.results import case_results, skipped_tables
from lincorr_lightning.io import safe_names
from lincorr_lightning.lm.query_cache import Query
from lincorr_lightning.lm.vocabulary import sample_up_to
from lincorr_lightning.results.results import Results
from lincorr_lightning.results.run_folder import log_scalars

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class Generalization(MapCallback):
    """Counts what edits of the source do to the target (paper, section 5).

    An edit teaches the LM a new source answer for a subject. Its target *generalizes* if it is
    then the reference of that answer, is *unchanged* if it is the same as before, and else
    *hallucinates*. Knowledge that does not depend on the source, the controls, should not change.

    If edits are trained together, `n_watch` of them are measured during training and all of them
    after it. If each is trained from the base weights (see `EditBatch`), each is measured after
    its own steps, and counts with its last one.

    Logs shares of the edits as ``generalization/...``: the outcomes and ``source_learned``, the
    outcomes ``..._of_learned`` alone, as means over distinct references (``macro_...``), and
    ``constant``, for which the best constant target label is right; also ``probability/reference``,
    ``probability/old_answer``, ``control_unchanged/<knowledge>``, ``paraphrases/source_learned``
    and ``neighbours/source_unchanged`` and ``.../target_unchanged``. Independent edits are logged
    at the end as ``edit_step/...``, by their own steps. Values before the first step are of the LM
    before training, those after the last one of all edits.

    If a run has several of these callbacks, the one of the run's own relation (or the first) has
    these keys and files; the others put their relation before their keys and after the names of
    their files. If the run teaches another source, they evaluate as in a run without edits.

    Args:
        relation: Relation, as ``city->country``; None takes that of the run's edits.
        edits: Edits that the run trains: a list of ``{subject: ..., answer: ...}``, with a
            ``reference`` if it is not the relation's, or a file (docs/edits.md); None takes the
            dataset's. In a run without any, subjects of the vocabulary are evaluated: does
            the target agree with the LM's own source answer?
        controls: Kinds of knowledge that must not change; one without labels in the LM's
            vocabulary is left out with a warning.
        linear_map: Folder of a linear map, whose W the cases show; None fits one at the start.
        n_watch: Number of edits that are measured during joint training.
        paraphrases: Other prompts of the source, with ``{}`` for the subject.
        n_neighbours: Number of sampled subjects without an edit that are measured, too.
        every_n_steps: Largest number of optimizer steps between two measurements.
        **options: See `MapCallback`.

    Attributes:
        results: As in ``results.json`` of a fine-tune; ``paraphrases`` and ``neighbours`` have
            their shares, and their number ``n``.
        cases: What each edit did.
        neighbours: Subjects without an edit that are measured, too.
    """

    study = "generalization"
    kept = (*MapCallback.kept, "_by_neighbours", "_nearness")

    def __init__(
        self,
        relation: str | None = None,
        edits: list[dict[str, Any]] | str | None = None,
        controls: list[str] | None = None,
        linear_map: str | None = None,
        n_watch: int = 16,
        every_n_steps: int = 1,
        paraphrases: list[str] | None = None,
        n_neighbours: int = 0,
        **options: Any,
    ) -> None:
        super().__init__(relation, linear_map, every_n_steps=every_n_steps, **options)
        require("Generalization.n_watch", n_watch, at_least=1)
        require("Generalization.n_neighbours", n_neighbours, at_least=0)
        for prompt in paraphrases or ():
            require_template("Generalization.paraphrases", prompt)
        self.edits = edits
        self.controls = list(cases.CONTROLS if controls is None else controls)
        self.n_watch = n_watch
        self.paraphrases = paraphrases or []
        self.n_neighbours = n_neighbours

    def reset(self) -> None:
        super().reset()
        self._by_neighbours: dict[int, dict[str, float]] = {}  # of each independent edit
        self._nearness: Tensor | None = None
        self.cases: list[cases.EditCase] = []
        self.neighbours: list[str] = []

    def open(self, trainer: L.Trainer) -> None:
        super().open(trainer)
        dataset = edit_dataset(trainer)
        siblings = self.siblings(trainer)
        names = [each.relation_name(trainer) for each in siblings]
        taught = None if dataset is None else dataset.relation.name
        is_first = siblings[names.index(taught) if taught in names else 0] is self
        self._prefix = "" if is_first else f"{self.tag}/"
        if self.is_independent and self.edits is not None:
            raise ConfigError(
                "this run trains each edit of its dataset from the base weights, and only those "
                "can be measured. Leave Generalization.edits null."
            )
        self._edits = self.find_edits(self.edits, trainer)
        if not self._edits:
            self.tokenized.require_reference()
        subjects = [edit.subject for edit in self._edits or self.run_edits]
        self._subjects = subjects or self.sample_subjects(self.n_watch)
        taught_answers = [edit.answer for edit in self._edits] or [""] * len(self._subjects)
        edited = {*self._subjects, *(edit.subject for edit in self.run_edits)}
        sampled = self._sample_neighbours(self.cache.lm.tokenizer)
        self.neighbours = [subject for subject in sampled if subject not in edited]
        self._watched = list(range(min(self.n_watch, len(self._subjects))))
        source, tokenizer = self.tokenized.source, self.cache.lm.tokenizer
        controls = cases.find_controls(self.controls, self.tokenized, self.catalogue, tokenizer)
        self._control_names = [domain.knowledge.name for domain in controls]
        edits = map("{}: {}".format, self._subjects, taught_answers)
        self.declare_measured([*edits, *self.neighbours, *self._control_names, *self.paraphrases])
        self.domains += controls
        for prompt in self.paraphrases:
            other = replace(source.knowledge, template=prompt)
            self.domains.append(replace(source, knowledge=other))
        for domain in self.domains:
            self.cache.register_tokens(domain.token_ids)

    def measured_subjects(self, tokenizer: "PreTrainedTokenizerBase", has_edits: bool) -> list[str]:
        """Return the subjects of the given edits; without any edits, sampled ones."""
        neighbours = self._sample_neighbours(tokenizer)
        if self.edits is not None:
            return named_subjects(self.edits) + neighbours
        sampled = [] if has_edits else sample_up_to(tokenizer, self.n_watch, seed=self.seed)
        return sampled + neighbours

    def _sample_neighbours(self, tokenizer: "PreTrainedTokenizerBase") -> list[str]:
        n = self.n_neighbours
        return sample_up_to(tokenizer, n, seed=self.seed + 1) if n else []

    def start(self, trainer: L.Trainer) -> None:
        """Record the LM's answers before training, and what its vocabulary alone gives."""
        if self._base is None:
            self._nearness = vocabulary_nearness(self.cache.lm, self.tokenized)
        self.keep_base([*self._subjects, *self.neighbours])
        super().start(trainer)

    def before_step(self, trainer: L.Trainer, edit_batch: EditBatch | None) -> None:
        if edit_batch is None:
            self._queries = self._queries_of(self._watched)
        else:
            self._queries = self.queries(*self.own_subjects(edit_batch))
        if self.is_due(self.step + self.shared.max_updates_per_batch, edit_batch):
            self.prefetch(self._queries)

    def _queries_of(self, ids: Sequence[int]) -> list[list[Query]]:
        return self.queries([*(self._subjects[index] for index in ids), *self.neighbours])

    def measure(self, trainer: L.Trainer) -> None:
        """Log the outcomes of the watched edits; of independent ones, all before training."""
        if not self.is_independent:
            self._log(trainer, self._joint_means(self._watched)[0], self.step)
            return
        ids = range(len(self._subjects))
        means = self._means(ids, self.base.rows(ids))
        self._log(trainer, _by_own_step(means), 0)
        if self.neighbours:
            means |= cases.neighbour_means(*[self._last_rows(self.base)] * 2)
        self.set_callback_metrics(trainer, self._keyed(means))
        log_scalars(trainer, self._keyed(means), self.step)

    def after_optimizer_step(self, trainer: L.Trainer, edit_batch: EditBatch | None) -> None:
        if edit_batch is None:
            super().after_optimizer_step(trainer, None)
            return
        if self.is_due(self.step, edit_batch):
            self.keep_edits(edit_batch, self.read(self._queries))
        if edit_batch.last and self.neighbours:
            for adapter_id, edit in enumerate(edit_batch.ids):
                adapters = [adapter_id] * len(self.neighbours)
                logits = self.read(self.queries(self.neighbours, adapters))
                means = cases.neighbour_means(self._last_rows(self.base), logits)
                self._by_neighbours[edit] = means
        if trainer.is_last_batch:  # before monitors decide at the end of the epoch
            means, _, _ = self._independent_means(trainer, self.edits_by_step())
            self.set_callback_metrics(trainer, self._keyed(means))

    def _joint_means(self, ids: Sequence[int]) -> tuple[dict[str, float], cases.DomainLogits]:
        logits, n = self.read(self._queries_of(ids)), len(ids)
        edits = logits.rows(range(n))
        means = self._means(ids, edits)
        if self.neighbours:
            means |= cases.neighbour_means(self._last_rows(self.base), self._last_rows(logits))
        return means, edits

    def _last_rows(self, logits: cases.DomainLogits) -> cases.DomainLogits:
        """Return the rows of the neighbours, which are read after the edits."""
        n = len(logits.source)
        return logits.rows(range(n - len(self.neighbours), n))

    def _independent_means(
        self, trainer: L.Trainer, by_step: Mapping[int, tuple[list[int], list[cases.DomainLogits]]]
    ) -> tuple[dict[str, float], list[int], cases.DomainLogits]:
        """Return the means of the edits of all ranks after their last step, and their logits.

        They are fewer than all, or none, if training was cut short. All ranks call this.
        """
        dataset = edit_dataset(trainer)
        last = -1 if dataset is None else dataset.training.steps_per_edit - 1
        ids, (logits,) = by_step.get(last, ([], [self.base.rows([])]))
        means = self._means(ids, logits)
        shares = [own for part in gather(self._by_neighbours) for own in part.values()]
        for key in shares[0] if shares else ():
            means[key] = sum(own[key] for own in shares) / len(shares)
        return means, ids, logits

    def _reference_mask(self, ids: Sequence[int], logits: cases.DomainLogits) -> Tensor:
        """Return the target labels that are right for each edit, ``(n, n_target)`` bool."""
        reference = torch.from_numpy(self.tokenized.reference_mask).T
        if not self._edits:
            return reference[logits.source.argmax(1)]
        return reference_mask([self._edits[index] for index in ids], reference.shape[1])

    def _labels(self, ids: Sequence[int], logits: cases.DomainLogits) -> Tensor:
        """Return the source label that each edit teaches, or that leads without edits, ``(n,)``."""
        if not self._edits:
            return logits.source.argmax(1)
        return torch.tensor([self._edits[index].label for index in ids], dtype=torch.long)

    def _means(self, ids: Sequence[int], logits: cases.DomainLogits) -> dict[str, float]:
        """Return the mean of every number of some edits, by log key; NaN where there is none."""
        mask = self._reference_mask(ids, logits)
        labels = self._labels(ids, logits) if self._edits else None
        return cases.edit_means(self.base.rows(ids), logits, mask, labels, self._control_names)

    def _keyed(self, scalars: Mapping[str, float]) -> dict[str, float]:
        return {f"{self._prefix}{key}": value for key, value in scalars.items()}

    def _log(self, trainer: L.Trainer, scalars: Mapping[str, float], step: int) -> None:
        self.log_scalars(trainer, self._keyed(scalars), step)

    def finish(self, trainer: L.Trainer) -> Results:
        """Return the outcomes of all edits, with the table of cases and its figures."""
        if self.is_independent:
            by_step = self.edits_by_step()
            for step, (edits, (at_step,)) in by_step.items():
                self._log(trainer, _by_own_step(self._means(edits, at_step)), step + 1)
            means, ids, logits = self._independent_means(trainer, by_step)
            scalars = {key: x for key, x in self._keyed(means).items() if x == x}
        else:
            ids = list(range(len(self._subjects)))
            means, logits = self._joint_means(ids)
            self._log(trainer, means, self.step)
            scalars = {}
        labels, mask = self._labels(ids, logits), self._reference_mask(ids, logits)
        taught = bool(self._edits)
        self.cases = cases.edit_cases(
            self.tokenized,
            [self._subjects[index] for index in ids],
            [self._edits[index].answer for index in ids] if taught else None,
            labels,
            mask,
            self.base.rows(ids).target,
            logits.target,
            logits.source.argmax(1) == labels,
            self.weight,
            self._nearness,
        )
        counts = {"paraphrases": len(self.paraphrases), "neighbours": len(self.neighbours)}
        values = cases.outcome_values(self.tokenized.name, means, mask, self.cases, counts)
        if self.edits is not None:
            values["skipped"] = skip_counts(self.skipped)
        suffix = f"_{safe_names([self.tag])[self.tag]}" if self._prefix else ""
        table, figures = case_results(self.cases, self.tag, values["random"], taught, suffix)
        tables = [table, *(replace(t, name=t.name + suffix) for t in skipped_tables(self.skipped))]
        return Results(self.name, values, scalars, tables=tables, figures=figures)


def _by_own_step(means: Mapping[str, float]) -> dict[str, float]:
    """Return the means of independent edits under the keys for a step of their own."""
    return {f"edit_step/{key.removeprefix('generalization/')}": x for key, x in means.items()}
