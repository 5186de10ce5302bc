"""Edits of an LM's source knowledge: which subject is taught which answer, and in which order."""

from dataclasses import replace
from functools import cached_property
from typing import Any, get_args

from torch.utils.data import DataLoader

from lincorr_lightning.data.files import read_subjects
from lincorr_lightning.data.loaders import ResumableLoader, own_steps
from lincorr_lightning.distributed import data_shard, require_items
from lincorr_lightning.errors import ConfigError, require_one_of
from lincorr_lightning.finetune.batches import EditBatch, EditDataset, EditTraining
from lincorr_lightning.finetune.edit_files import RawEdit, read_edits
from lincorr_lightning.finetune.edits import (
    Edit,
    EditSource,
    ListedEdits,
    ResolvedEdits,
    SampledEdits,
    check_edits,
    in_own_lms,
    plan_edits,
    resolve_edits,
)
from lincorr_lightning.knowledge import Catalogue, TokenizedRelation
from lincorr_lightning.lm.language_model import LanguageModel
from lincorr_lightning.lm.vocabulary import SubjectKind
from lincorr_lightning.study import StudyData


class EditsDataModule(StudyData):
    """Edits (subject, new source answer) of one relation.

    Edits are sampled from the LM's vocabulary, so that their answers cover the source domain and
    the LM's target answer is wrong for each before training; or they are read from a file.
    A resumed run has those that it began with. The training dataset is an `EditDataset`.

    Args:
        lm: The LM that is taught; the program `lincorr` passes that of the study.
        relation: Source that is taught and target that should follow, as ``city->country``.
        n_edits: Number of sampled edits, and maximum number of those of `edits_file`, of which the
            first are used; null uses all edits of the file.
        max_edits_per_reference: Largest number of edits with the same reference (of a file, the
            first), so that no frequent one dominates the outcomes. null sets no limit.
        subjects: Subjects of sampled edits, or a text file with one a line; null samples some.
        subject_kind: Which strings sampled subjects are: ``any`` of the vocabulary, as in the
            paper; ``words``, strings of letters whose token begins a word; or ``names`` of people.
        edits_file: File of edits, your own or of a benchmark, see docs/edits.md. Rows that are no
            edit of this LM and relation are skipped, and counted by reason.
        subject_key: Name of the field of `edits_file` that has the subject.
        answer_key: Name of the field of `edits_file` that has the new source answer.
        batch_size: Edits per step without `training`, and of a prediction.
        subwords: Whether answers whose first token is only the beginning of a word are target
            labels too; outcomes are then also reported by completeness (paper, appendix K).
        knowledge_files: YAML files with additional knowledge.
        seed: Seed of subjects, answers and order.
        training: How the edits are trained and distributed over steps; null is the joint protocol
            with `batch_size`. The program `lincorr` passes the study's `edit_training`.
        edited_lms: Path of the LM of each edit, if each was made in an LM of its own (`EditedLM`):
            ``{edit}`` in it stands for ``case_id``, ``id`` or the number of the row, from 0.
        edits_of_lm: File of the edits of an LM that has them already, where `edits_file` is null;
            empty if there is none. `EditedLM` passes it.
    """

    batch_type = EditBatch
    free_settings = frozenset({"edits_file", "knowledge_files", "batch_size"})

    def __init__(
        self,
        lm: LanguageModel | None = None,
        relation: str = "city->country",
        n_edits: int | None = 150,
        max_edits_per_reference: int | None = None,
        subjects: list[str] | str | None = None,
        subject_kind: SubjectKind = "any",
        edits_file: str | None = None,
        batch_size: int = 8,
        subwords: bool = False,
        knowledge_files: list[str] | None = None,
        seed: int = 0,
        training: EditTraining | None = None,
        subject_key: str = "subject",
        answer_key: str = "answer",
        edited_lms: str | None = None,
        edits_of_lm: str | None = None,
    ) -> None:
        super().__init__(lm)
        self.save_hyperparameters(ignore=["lm", "training", "edits_of_lm"])
        self.require_at_least(
            "n_edits",
            "max_edits_per_reference",
            n_edits=1,
            max_edits_per_reference=1,
            batch_size=1,
            seed=0,
        )
        require_one_of("data.subject_kind", subject_kind, get_args(SubjectKind))
        are_in_lms = edited_lms is not None or edits_of_lm is not None
        #: File of the edits; None if they are sampled.
        self.edits_file = edits_file or (None if edited_lms else edits_of_lm) or None
        if self.edits_file is None and (are_in_lms or n_edits is None):
            raise ConfigError(
                "data.edits_file is null. Name the file of the edits"
                + ("." if are_in_lms else ", or set data.n_edits to sample some.")
            )
        if self.edits_file is not None and subjects is not None:
            raise ConfigError("data.subjects and data.edits_file are set. Leave one of them null.")
        self.relation = relation
        self._catalogue = Catalogue.load(*(knowledge_files or ()))
        self._catalogue.relation(relation)
        self._training = training or EditTraining(protocol="joint", edits_per_step=batch_size)
        self._resolved: ResolvedEdits | None = None

    @cached_property
    def source(self) -> EditSource:
        """Where the edits come from, with the rows of a file."""
        options = self.hparams
        n = options["n_edits"]
        most = options["max_edits_per_reference"]
        if self.edits_file is None:
            subjects = options["subjects"]
            if isinstance(subjects, str):
                subjects = read_subjects(subjects, "data.subjects")
            subjects = None if subjects is None else list(dict.fromkeys(subjects))
            return SampledEdits(n, subjects, options["subject_kind"], options["seed"], most)
        keys = {name: options[name] for name in ("subject_key", "answer_key")}
        source = ListedEdits(read_edits(self.edits_file, **keys), n=n, max_per_reference=most)
        pattern = options["edited_lms"]
        return source if pattern is None else in_own_lms(source, pattern)

    @cached_property
    def tokenized(self) -> TokenizedRelation:
        """The relation in the LM's tokens."""
        tokenizer = self.language_model.tokenizer
        subwords = self.hparams["subwords"]
        return TokenizedRelation.of(self.relation, self._catalogue, tokenizer, subwords)

    def setup(self, stage: str) -> None:
        """Read the file and find the labels, before the LM's weights are read."""
        self._resolved = None  # the LM may have been trained since an earlier run
        check_edits(self.source, self.tokenized, self.language_model)
        rows = self.source.rows if isinstance(self.source, ListedEdits) else ()
        self.keep_contents(
            edits_file=[[row.subject, row.answer, row.reference] for row in rows],
            knowledge_files=[self.tokenized.source.token_ids, self.tokenized.target.token_ids],
        )

    def resolve(self) -> ResolvedEdits:
        """Return the edits, resolved on the first call: the LM must be as it is before training."""
        if self._resolved is None:
            edits = resolve_edits(self.source, self.tokenized, self.language_model)
            if self.trainer is not None:
                # Ranks may round logits differently; all use the edits of rank 0.
                edits = replace(edits, edits=self.trainer.strategy.broadcast(edits.edits))
            self._resolved = self._of_run(edits)
        return self._resolved

    def _of_run(self, edits: ResolvedEdits) -> ResolvedEdits:
        return replace(edits, catalogue=self._catalogue, subwords=self.hparams["subwords"])

    def train_dataloader(self) -> ResumableLoader:
        return ResumableLoader(self._dataset(self.resolve(), self._training), self.trainer)

    def test_dataloader(self) -> DataLoader[EditBatch]:
        return self._in_order(self.resolve())

    def predict_dataloader(self) -> DataLoader[EditBatch]:
        """Return every edit once, in order, only planned: a forecast reads no LM."""
        edits = plan_edits(self.source, self.tokenized, self.language_model)
        return self._in_order(self._of_run(edits))

    def _in_order(self, resolved: ResolvedEdits) -> DataLoader[EditBatch]:
        training = EditTraining(n_steps=1, edits_per_step=self.hparams["batch_size"])
        dataset = self._dataset(resolved, training)
        # Its steps are this rank's own; Lightning would distribute them again.
        return DataLoader(dataset, batch_size=None, sampler=own_steps(dataset))

    def _dataset(self, resolved: ResolvedEdits, training: EditTraining) -> EditDataset:
        lm = self.language_model
        require_items(self.trainer, len(resolved.edits), "edits", "give more edits")
        # Refuses an answer that would end beyond the LM's last position.
        statement = resolved.relation.relation.source.statement
        lm.rows([statement(edit.subject, edit.answer) for edit in resolved.edits])
        prompts = lm.rows(resolved.relation.source_prompts(resolved.subjects))
        shard = data_shard(self.trainer)
        seed = self.hparams["seed"]
        return EditDataset(resolved, prompts, training, seed, shard.number, shard.n)

    def state_dict(self) -> dict[str, Any]:
        """Return the edits, which could not be sampled again from an LM in training."""
        state = super().state_dict()
        if self._resolved is not None:
            state["edits"] = [edit._asdict() for edit in self._resolved.edits]
            state["skipped"] = [tuple(row) for row in self._resolved.skipped]
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        if "edits" in state_dict:
            edits = [Edit(**state) for state in state_dict["edits"]]
            skipped = [RawEdit(*row) for row in state_dict["skipped"]]
            self._resolved = self._of_run(ResolvedEdits(self.tokenized, edits, skipped=skipped))
