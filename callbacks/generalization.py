"""Outcomes of edits (paper, section 5), and whether they are specific to their subjects."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, get_args

from torch import Tensor

from lincorr_lightning.callbacks.relation import RelationCallback, RelationState
from lincorr_lightning.errors import ConfigError, require, require_one_of
from lincorr_lightning.finetune import cases
from lincorr_lightning.finetune.batches import EditBatch
from lincorr_lightning.finetune.cases import EditAnswers, Logits, StepValues, rows_of
from lincorr_lightning.finetune.edits import nearness, skip_counts
from lincorr_lightning.finetune.results import edits_results
from lincorr_lightning.linear_map.fitting import Ridge
from lincorr_lightning.lm.query_cache import Query
from lincorr_lightning.lm.vocabulary import SubjectKind, sample_up_to
from lincorr_lightning.results.results import Results
from lincorr_lightning.results.run_folder import log_scalars


@dataclass
class GeneralizationState(RelationState):
    """What a checkpoint keeps of a `Generalization`."""

    nearness: Tensor | None = None  #: See `nearness`.
    #: Of edits that are trained together, by optimizer step.
    by_step: dict[int, StepValues] = field(default_factory=dict)


class Generalization(RelationCallback):
    """Counts what edits of the source do to the target (paper, section 5).

    The target of an edit *generalizes* if it is then the reference of the new source answer, is
    *unchanged* if it is the same as before, and else *hallucinates*; a target that was *right
    before* is neither. The edit *leaks* if the LM then gives the reference of other people as well;
    it is *specific* as far as it generalizes more often than it leaks.

    If edits are trained together, `n_watch` of them are measured during training and all of them
    after it. If each is trained from the base weights (see `EditBatch`), each is measured after
    its own steps, and counts with its last one.

    Logs shares of the edits as ``generalization/...``: the outcomes and ``source_learned``,
    ``leak`` and ``specific`` (means by reference), the outcomes ``..._of_learned`` alone, as means
    over distinct references (``macro_...``), and ``constant``, for which the best constant target
    label is right; also ``probability/reference``, ``probability/old_answer``,
    ``control_unchanged/<knowledge>`` and ``neighbours/target_unchanged``, the share of other people
    whose target stays. Values before the
    first step are of the LM before training, those after the last one of all edits. Of independent
    edits, those in between are of the edits in training on the first device; all of them are logged
    at the end as ``edit_step/...``, by their own steps.

    If a run has several of these callbacks, the first one has these keys; the others put their
    relation before their keys, and number their files.

    Args:
        relation: Relation; None takes that of the run's edits, or ``city->country`` without any.
        edits: Edits that the run trains: a list of ``{subject: ..., answer: ...}``, with a
            ``reference`` if it is not the relation's, or a file (docs/edits.md); None takes the
            dataset's.
        controls: Kinds of knowledge that must not change; one without labels in the LM's
            vocabulary is left out with a warning.
        linear_map: Folder of a linear map, whose W the cases show; None fits one at the start.
        n_watch: Number of edits that are measured during joint training.
        every_n_steps: Largest number of optimizer steps between two measurements.
        edit_steps: Steps of independent edits, from 1, after which they are measured, beside the
            last; null takes every `every_n_steps`.
        n_others: Number of other people: sampled subjects without an edit, of whom the target is
            measured, too; 0 for none.
        others_kind: Which strings they are, see `EditsDataModule`: ``any`` or ``names``, for
            instance.
        seed: Seed of sampled subjects.
        ridge: Ridge of the fitted map, see `Ridge`; 0 is the paper's.
        n_subjects: Number of subjects that it is fitted on, or as many as the vocabulary has.
        **options: See `RelationCallback`.

    Attributes:
        results: As in ``results.json`` of a fine-tune; ``neighbours`` has its share, and its
            number ``n``.
        cases: What each edit did.
        others: Subjects without an edit that are measured, too.
    """

    study = "generalization"
    state_class = GeneralizationState
    returned = (*RelationCallback.returned, "cases", "others")

    def __init__(
        self,
        relation: str | None = None,
        edits: list[dict[str, Any]] | str | None = None,
        controls: list[str] | None = None,
        linear_map: str | None = None,
        n_watch: int = 16,
        every_n_steps: int = 1,
        edit_steps: list[int] | None = None,
        n_others: int = 8,
        others_kind: SubjectKind = "any",
        seed: int = 0,
        ridge: Ridge = "auto",
        n_subjects: int = 2000,
        **options: Any,
    ) -> None:
        super().__init__(relation, every_n_steps=every_n_steps, **options)
        require("Generalization.n_watch", n_watch, at_least=1)
        require("Generalization.n_others", n_others, at_least=0)
        require_one_of("Generalization.others_kind", others_kind, get_args(SubjectKind))
        for step in edit_steps or ():
            require("Generalization.edit_steps", step, at_least=1)
        self.edits = edits
        self.controls = list(cases.CONTROLS if controls is None else controls)
        self.n_watch = n_watch
        self.n_others = n_others
        self.others_kind = others_kind
        self.edit_steps = edit_steps
        self.seed = seed
        self.set_map(linear_map, ridge, n_subjects)
        self.cases: list[cases.EditCase] = []
        self.others: list[str] = []

    def open(self) -> Iterable[str]:
        run = self.run
        if run.is_independent and self.edits is not None:
            raise ConfigError(
                "this run trains each edit of its dataset from the base weights, and only those "
                "can be measured. Leave Generalization.edits null."
            )
        self.resolve_relation(self.controls)
        self._prefix = "" if self.name == self.study else f"{self.tag}/"
        self._resolved = self.resolve_edits(self.edits, "Generalization.edits")
        skipped = (row.subject for row in self._resolved.skipped)
        edited = {*self._resolved.subjects, *self.edited_subjects, *skipped}
        self.others = sample_up_to(
            run.cache.lm.tokenizer, self.n_others, edited, self.seed + 1, self.others_kind
        )
        run.measured.update(edited)
        self._watched = range(min(self.n_watch, len(self._resolved.edits)))
        self.announce_map()
        edits = [f"{edit.subject}: {edit.answer}" for edit in self._resolved.edits]
        return [*edits, *self.others, *self.domains]

    def prepare(self) -> None:
        if self.state.base is None:
            self.state.nearness = nearness(self.run.nearest_words, self.tokenized)
            everyone = range(len(self._resolved.edits))
            self.state.base = self._read(self._joint_queries(everyone), len(everyone))
            self.state.map = self.fit_map()

    def _joint_queries(self, ids: Sequence[int]) -> dict[str, list[Query]]:
        queries = self.queries([self._resolved.subjects[i] for i in ids])
        return self._with_others(queries, [None])

    def _with_others(
        self, queries: dict[str, list[Query]], adapter_ids: Sequence[int | None]
    ) -> dict[str, list[Query]]:
        """Add the target of the other people, in each of some adapters."""
        ids = [adapter_id for adapter_id in adapter_ids for _ in self.others]
        of_others = self.queries(self.others * len(adapter_ids), ids)["target"]
        return {**queries, "target": [*queries["target"], *of_others]}

    def _read(self, queries: Mapping[str, Sequence[Query]], n: int) -> Logits:
        """Return the logits of n edits, and the leading target labels of the other people.

        They come after the edits, once, or for each of them.
        """
        logits = self.read(queries)
        of_edits = {name: part[:n] for name, part in logits.items()}
        if self.others and n:
            leading = logits["target"][n:].argmax(1).view(-1, len(self.others))
            of_edits["others/target"] = leading.expand(n, -1)
        return of_edits

    def _answers(self, ids: Sequence[int], logits: Logits) -> EditAnswers:
        edits = [self._resolved.edits[i] for i in ids]
        return EditAnswers.of(edits, rows_of(self.state.base, ids), logits)

    def before_batch(self, edits: EditBatch | None) -> None:
        if edits is None:
            self._queries = self._joint_queries(self._watched)
        else:
            queries = self.edit_queries(edits)
            self._queries = self._with_others(queries, range(len(edits.edits)))
        if self.is_due(self.run.next_step, edits):
            self.prefetch(self._queries)

    def is_due(self, step: int, edits: EditBatch | None = None) -> bool:
        if edits is None or self.edit_steps is None:
            return super().is_due(step, edits)
        return edits.step + 1 in self.edit_steps or edits.last

    def measure(self) -> None:
        """Log the outcomes of the watched edits; of independent ones, all before training."""
        if not self.run.is_independent:
            logits = self._read(self._joint_queries(self._watched), len(self._watched))
            self._log_joint(self._answers(self._watched, logits))
            return
        means = self._answers(range(len(self._resolved.edits)), self.state.base).means()
        self._log(_by_edit_step(means), 0)
        self.set_callback_metrics(self._keyed(means))
        log_scalars(self.run.trainer, self._keyed(means), self.run.step)

    def after_update(self, edits: EditBatch | None) -> None:
        if edits is None:
            super().after_update(None)
            return
        if edits.edits and self.is_due(self.run.step, edits):
            logits = self._read(self._queries, len(edits.edits))
            self.state.keep(edits, logits)
            if not self.run.trainer.is_last_batch:  # where all edits are logged
                means = self._keyed(self._answers(edits.ids, logits).means())
                log_scalars(self.run.trainer, means, self.run.step)
        if self.run.trainer.is_last_batch:  # before monitors decide at the end of the epoch
            _, answers = self._after_last_step(self.state.readings_by_step())
            self.set_callback_metrics(self._keyed(answers.means()))

    def _after_last_step(
        self, by_step: Mapping[int, tuple[list[int], list[Logits]]]
    ) -> tuple[Sequence[int], EditAnswers]:
        """Return the independent edits that were trained to their end, and the answers then.

        They are fewer than all, or none, if training was cut short.
        """
        dataset = self.run.dataset
        assert dataset is not None
        none: tuple[list[int], list[Logits]] = ([], [rows_of(self.state.base, [])])
        ids, (logits,) = by_step.get(dataset.training.steps_per_edit - 1, none)
        return ids, self._answers(ids, logits)

    def _log_joint(self, answers: EditAnswers) -> None:
        """Log the means of edits trained together, and keep those of the watched ones.

        Weights that others have changed after the step, such as restored ones, are not of it.
        """
        self._log(answers.means())
        step = self.run.step
        if step and step not in self.state.by_step:
            n = len(self._watched)  # the first edits, at all steps the same
            watched = {key: values[:n] for key, values in answers.values().items()}
            self.state.by_step[step] = cases.step_values(self._watched, watched)

    def _keyed(self, scalars: Mapping[str, float]) -> dict[str, float]:
        return {f"{self._prefix}{key}": value for key, value in scalars.items()}

    def _log(self, scalars: Mapping[str, float], step: int | None = None) -> None:
        self.log_scalars(self._keyed(scalars), step)

    def finish(self) -> Results:
        scalars: dict[str, float] = {}
        ids: Sequence[int] = range(len(self._resolved.edits))
        if self.run.is_independent:
            by_step = self.state.readings_by_step()
            numbers = {}
            for step, (of_step, (logits,)) in by_step.items():
                answers = self._answers(of_step, logits)
                self._log(_by_edit_step(answers.means()), step + 1)
                numbers[step + 1] = cases.step_values(of_step, answers.values())
            ids, answers = self._after_last_step(by_step)
            means = self._keyed(answers.means())
            scalars = {key: value for key, value in means.items() if not math.isnan(value)}
        else:
            answers = self._answers(ids, self._read(self._joint_queries(ids), len(ids)))
            self._log_joint(answers)
            numbers = self.state.by_step
        relation = self.tokenized
        edits = [self._resolved.edits[i] for i in ids]
        weight = self.state.map[0]
        self.cases = cases.edit_cases(relation, edits, answers, weight, self.state.nearness)
        references = [edit.reference for edit in self._resolved.edits]
        values = {
            **cases.outcome_values(relation.name, answers, self.cases, len(self.others)),
            "by_step": [
                cases.step_row(step, values, references) for step, values in sorted(numbers.items())
            ],
            "at_learned": cases.row_at_learned(numbers, references),
        }
        skipped = self._resolved.skipped if self.edits is not None else ()
        if self.edits is not None:
            values["skipped"] = skip_counts(skipped)
        return edits_results(self.name, values, self.cases, scalars, skipped)


def _by_edit_step(means: Mapping[str, float]) -> dict[str, float]:
    """Return the means of independent edits under the keys for a step of their own."""
    return {f"edit_step/{key.removeprefix('generalization/')}": x for key, x in means.items()}
