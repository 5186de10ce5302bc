"""Outcomes of edits: generalized, hallucinated or unchanged (paper, section 5)."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from lincorr_lightning.callbacks.periodic_callback import PeriodicCallback
from lincorr_lightning.callbacks.relation import (
    MeasuredRelation,
    RelationMap,
    RelationState,
    keep_readings,
    readings_by_step,
)
from lincorr_lightning.errors import ConfigError, require
from lincorr_lightning.finetune import cases
from lincorr_lightning.finetune.batches import EditBatch
from lincorr_lightning.finetune.cases import EditAnswers, Logits, rows_of
from lincorr_lightning.finetune.edits import nearness, skip_counts
from lincorr_lightning.finetune.results import case_results, skipped_tables
from lincorr_lightning.linear_map.fitting import Ridge
from lincorr_lightning.lm.query_cache import Query
from lincorr_lightning.results.results import Results
from lincorr_lightning.results.run_folder import log_scalars


@dataclass
class GeneralizationState(RelationState):
    """What a checkpoint keeps of a `Generalization`."""

    nearness: Tensor | None = None  #: See `nearness`.


class Generalization(PeriodicCallback):
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

    If a run has several of these callbacks, the first one has these keys; the others put their
    relation before their keys, and number their files. Without edits, see `Agreement`.

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
        paraphrases: Other prompts of the source, with ``{}`` for the subject.
        n_neighbours: Number of sampled subjects without an edit that are measured, too.
        knowledge_files: YAML files with more knowledge.
        seed: Seed of sampled subjects.
        ridge: Ridge of the fitted map, see `RidgeRequest`; 0 is the paper's.
        n_subjects: Number of subjects that it is fitted on, or as many as the vocabulary has.
        **options: See `PeriodicCallback`.

    Attributes:
        results: As in ``results.json`` of a fine-tune; ``paraphrases`` and ``neighbours`` have
            their shares, and their number ``n``.
        cases: What each edit did.
        neighbours: Subjects without an edit that are measured, too.
    """

    study = "generalization"
    state_class = GeneralizationState

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
        knowledge_files: list[str] | None = None,
        seed: int = 0,
        ridge: Ridge = "auto",
        n_subjects: int = 2000,
        **options: Any,
    ) -> None:
        super().__init__(every_n_steps, **options)
        require("Generalization.n_watch", n_watch, at_least=1)
        require("Generalization.n_neighbours", n_neighbours, at_least=0)
        for prompt in paraphrases or ():
            if prompt.count("{}") != 1:
                raise ConfigError(
                    f"Generalization.paraphrases {prompt!r} must hold {{}} once, in place of the "
                    "subject."
                )
        self.relation = relation
        self.edits = edits
        self.controls = list(cases.CONTROLS if controls is None else controls)
        self.n_watch = n_watch
        self.paraphrases = paraphrases or []
        self.n_neighbours = n_neighbours
        self.knowledge_files = knowledge_files
        self.seed = seed
        self.map = RelationMap("Generalization", linear_map, ridge, n_subjects)
        self.cases: list[cases.EditCase] = []
        self.neighbours: list[str] = []

    def open(self) -> Iterable[str]:
        run = self.run
        if run.is_independent and self.edits is not None:
            raise ConfigError(
                "this run trains each edit of its dataset from the base weights, and only those "
                "can be measured. Leave Generalization.edits null."
            )
        self._at = MeasuredRelation(
            run, self.study, self.relation, self.knowledge_files, self.controls, self.paraphrases
        )
        self._prefix = "" if self.name == self.study else f"{self._at.tag}/"
        self._resolved = self._at.resolve_edits(self.edits, "Generalization.edits")
        sampled = self._at.sample_subjects(self.n_neighbours, self.seed + 1)
        edited = {*self._resolved.subjects, *self._at.edited_subjects}
        self.neighbours = [subject for subject in sampled if subject not in edited]
        run.measured.update(sampled, edited, (row.subject for row in self._resolved.skipped))
        self._watched = range(min(self.n_watch, len(self._resolved.edits)))
        self.map.announce(self._at)
        edits = [f"{edit.subject}: {edit.answer}" for edit in self._resolved.edits]
        return [*edits, *self.neighbours, *self._at.domains, *self.paraphrases]

    def prepare(self) -> None:
        """Record the LM's answers before training, and what its vocabulary alone gives."""
        if self.state.base is None:
            self.state.nearness = nearness(self.run.nearest_words(), self._at.tokenized)
            everyone = range(len(self._resolved.edits))
            self.state.base = self._read(self._joint_queries(everyone), len(everyone))
            self.state.map = self.map.fit(self._at)

    def _joint_queries(self, ids: Sequence[int]) -> dict[str, list[Query]]:
        subjects = [self._resolved.subjects[i] for i in ids]
        return self._at.queries([*subjects, *self.neighbours])

    def _read(self, queries: Mapping[str, Sequence[Query]], n: int) -> Logits:
        """Return the logits of n edits, and the leading labels of the neighbours.

        The neighbours come after the edits, once, or for each of them.
        """
        logits = self._at.read(queries)
        of_edits = {name: part[:n] for name, part in logits.items()}
        for side in cases.SIDES:
            leading = logits[side][n:].argmax(1)
            if len(leading):
                others = leading.view(-1, len(self.neighbours))
                of_edits[f"neighbours/{side}"] = others.expand(n, -1)
        return of_edits

    def _answers(self, ids: Sequence[int], logits: Logits) -> EditAnswers:
        edits = [self._resolved.edits[i] for i in ids]
        return EditAnswers.of(edits, rows_of(self.state.base, ids), logits)

    def before_batch(self, edits: EditBatch | None) -> None:
        if edits is None:
            self._queries = self._joint_queries(self._watched)
        else:
            self._queries = self._at.edit_queries(edits, self.neighbours if edits.last else ())
        if self.is_due(self.run.next_step, edits):
            self._at.prefetch(self._queries)

    def measure(self) -> None:
        """Log the outcomes of the watched edits; of independent ones, all before training."""
        if not self.run.is_independent:
            logits = self._read(self._joint_queries(self._watched), len(self._watched))
            self._log(self._answers(self._watched, logits).means())
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
            keep_readings(self.state.readings, edits, logits)
        if self.run.trainer.is_last_batch:  # before monitors decide at the end of the epoch
            _, answers = self._after_last_step(readings_by_step(self.state.readings))
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

    def _keyed(self, scalars: Mapping[str, float]) -> dict[str, float]:
        return {f"{self._prefix}{key}": value for key, value in scalars.items()}

    def _log(self, scalars: Mapping[str, float], step: int | None = None) -> None:
        self.log_scalars(self._keyed(scalars), step)

    def finish(self) -> Results:
        """Return the outcomes of all edits, with the table of cases and its figures."""
        scalars: dict[str, float] = {}
        ids: Sequence[int] = range(len(self._resolved.edits))
        if self.run.is_independent:
            by_step = readings_by_step(self.state.readings)
            for step, (of_step, (logits,)) in by_step.items():
                self._log(_by_edit_step(self._answers(of_step, logits).means()), step + 1)
            ids, answers = self._after_last_step(by_step)
            means = self._keyed(answers.means())
            scalars = {key: value for key, value in means.items() if not math.isnan(value)}
        else:
            answers = self._answers(ids, self._read(self._joint_queries(ids), len(ids)))
            self._log(answers.means())
        relation = self._at.tokenized
        edits = [self._resolved.edits[i] for i in ids]
        weight = self.state.map[0]
        self.cases = cases.edit_cases(relation, edits, answers, weight, self.state.nearness)
        counts = {"paraphrases": len(self.paraphrases), "neighbours": len(self.neighbours)}
        values = cases.outcome_values(relation.name, answers, self.cases, **counts)
        skipped = self._resolved.skipped if self.edits is not None else ()
        if self.edits is not None:
            values["skipped"] = skip_counts(skipped)
        suffix = self.name.removeprefix(self.study)
        table, figures = case_results(self.cases, self._at.tag, values["random"], suffix)
        tables = [table, *skipped_tables(skipped, suffix)]
        return Results(self.name, values, scalars, tables=tables, figures=figures)


def _by_edit_step(means: Mapping[str, float]) -> dict[str, float]:
    """Return the means of independent edits under the keys for a step of their own."""
    return {f"edit_step/{key.removeprefix('generalization/')}": x for key, x in means.items()}
