"""Edits of an LM's source knowledge: which subject is taught which answer, and in which order."""

from collections import Counter
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, get_args

from lightning.pytorch.utilities import rank_zero_warn
from torch.utils.data import DataLoader

from lincorr_lightning.data.files import read_subjects
from lincorr_lightning.data.loaders import ResumableLoader, own_steps
from lincorr_lightning.distributed import data_shard, require_items
from lincorr_lightning.errors import ConfigError, SubjectsError, require_one_of
from lincorr_lightning.finetune import edits as resolving
from lincorr_lightning.finetune.batches import EditBatch, EditDataset, EditTraining
from lincorr_lightning.finetune.edit_files import RawEdit, read_edits
from lincorr_lightning.finetune.edits import Edit, Skipped
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
        edits_beside: File of edits where `edits_file` is null, passed by `EditedLM`; may be empty.
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
        edits_beside: str | None = None,
    ) -> None:
        super().__init__(lm)
        self.save_hyperparameters(ignore=["lm", "training", "edits_beside"])
        edits_file = edits_file or (None if edited_lms else edits_beside)
        if not edits_file and (edited_lms or edits_beside is not None):
            raise ConfigError("data.edits_file is null. Name the file of the edits that were made.")
        if n_edits is None and edits_file is None:
            raise ConfigError("data.n_edits and data.edits_file are null. Set one of them.")
        if edited_lms is not None and "{edit}" not in edited_lms:
            raise ConfigError(f"data.edited_lms is {edited_lms}. Write it as FOLDER/{{edit}}.")
        self.require_at_least(
            "n_edits",
            "max_edits_per_reference",
            n_edits=1,
            max_edits_per_reference=1,
            batch_size=1,
            seed=0,
        )
        require_one_of("data.subject_kind", subject_kind, get_args(SubjectKind))
        if subjects is not None and edits_file is not None:
            raise ConfigError("data.subjects and data.edits_file are set. Leave one of them null.")
        if isinstance(subjects, str):
            if not Path(subjects).is_file():
                raise ConfigError(f"data.subjects is {subjects}, no file or list such as [a, b].")
            subjects = read_subjects(subjects, "data.subjects")
        for subject, n in Counter(subjects or ()).items():
            if n > 1:
                raise SubjectsError(f"data.subjects names {subject!r} twice. Remove one.")
        self.relation, self.subwords, self.seed = relation, subwords, seed
        self.n_edits, self.subjects, self.subject_kind = n_edits, subjects, subject_kind
        self.edits_file, self.batch_size = edits_file, batch_size
        self.max_edits_per_reference = max_edits_per_reference
        self._keys = {"subject_key": subject_key, "answer_key": answer_key}
        self._training = training or EditTraining(protocol="joint", edits_per_step=batch_size)
        self._catalogue = Catalogue.load(*(knowledge_files or ()))
        self._catalogue.relation(relation)
        self.edited_lms = edited_lms
        #: With `edited_lms`, where the LM of each row is that has one.
        self.lms: dict[str, str] = {}
        self._without_lm: list[Skipped] = []
        self._raw: list[RawEdit] = []
        self._usable: list[RawEdit] = []  # with an edited LM
        self._rows: list[RawEdit] = []  # of the edits
        self._edits: list[Edit] | None = None
        self._skipped: list[Skipped] = []

    def setup(self, stage: str) -> None:
        """Read the file and find the labels, before the LM's weights are read."""
        # The LM may have been trained since an earlier run.
        self._edits = None
        self._skipped = []
        self.tokenized  # noqa: B018

    @cached_property
    def tokenized(self) -> TokenizedRelation:
        """The relation in the LM's tokens, with which what the user named is checked."""
        lm = self.language_model
        relation = TokenizedRelation.of(self.relation, self._catalogue, lm.tokenizer, self.subwords)
        if self.edits_file is not None:
            self._raw = self._usable = read_edits(self.edits_file, **self._keys)
            if self.edited_lms:
                self.lms, self._without_lm = _lms_of_rows(self._raw, self.edited_lms)
                self._usable = [row for row in self._raw if row.where in self.lms]
            # Refuses a file of which no edit is left.
            resolving.label_rows(self._usable, relation, lm)
        else:
            relation.require_reference()
            for subject in resolving.unknown_subjects(self.subjects or (), lm):
                raise SubjectsError(f"data.subjects: {subject!r} has no token of the LM's.")
        self.keep_contents(
            edits_file=[[*edit[1:3], edit.reference] for edit in self._raw],
            knowledge_files=[relation.source.token_ids, relation.target.token_ids],
        )
        return relation

    def prepare_edits(self) -> list[Edit]:
        """Return the edits, made on the first call: the LM must be as it is before training."""
        if self._edits is None:
            is_file = self.edits_file is not None
            self._edits = self._file_edits() if is_file else self._sampled_edits()
        return self._edits

    def _file_edits(self) -> list[Edit]:
        relation, lm = self.tokenized, self.language_model
        edits, self._rows, self._skipped = resolving.resolve_edits(
            self._usable,
            relation,
            lm,
            n_edits=self.n_edits,
            max_per_reference=self.max_edits_per_reference,
        )
        self._skipped += self._without_lm
        if known := [edit for edit in edits if edit.target_before in edit.reference]:
            first = f"{known[0].subject!r} -> {known[0].answer!r}"
            rank_zero_warn(
                f"{len(known)} of {len(edits)} edits, such as {first}, ask for the target that the "
                "LM answers already: they count as generalized where nothing changes."
            )
        return edits

    def _sampled_edits(self) -> list[Edit]:
        n, lm = self.n_edits, self.language_model
        assert n is not None
        subjects = self.subjects
        if subjects is None:
            subjects = resolving.sample_candidates(lm, n, self.seed, self.subject_kind)
        limit = self.max_edits_per_reference
        return resolving.sample_edits(
            self.tokenized, lm, n, subjects, self.seed, max_per_reference=limit
        )

    def train_dataloader(self) -> ResumableLoader:
        """Return the steps of an epoch, distributed by the protocol."""
        return ResumableLoader(self._dataset(self._training), self.trainer)

    def predict_dataloader(self) -> DataLoader[EditBatch]:
        """Return every edit once, in order."""
        dataset = self._dataset(EditTraining(n_steps=1, edits_per_step=self.batch_size))
        # Its steps are this rank's own; Lightning would distribute them again.
        return DataLoader(dataset, batch_size=None, sampler=own_steps(dataset))

    test_dataloader = predict_dataloader

    def _dataset(self, training: EditTraining) -> EditDataset:
        edits, relation, lm = self.prepare_edits(), self.tokenized, self.language_model
        if self.trainer is not None:
            # Ranks may round logits differently; all use the edits of rank 0.
            edits = self._edits = self.trainer.strategy.broadcast(edits)
        require_items(self.trainer, len(edits), "edits", "give more edits")
        # Refuses an answer that would end beyond the LM's last position.
        lm.rows([relation.relation.source.statement(edit.subject, edit.answer) for edit in edits])
        prompts = relation.source_prompts([edit.subject for edit in edits])
        shard = data_shard(self.trainer)
        return EditDataset(
            edits,
            relation,
            lm.rows(prompts),
            training,
            self.seed,
            shard.number,
            shard.n,
            self._catalogue,
            self.subwords,
            self._skipped,
            self._rows,
            [self.lms[row.where] for row in self._rows if self.edited_lms],
        )

    def state_dict(self) -> dict[str, Any]:
        """Return the edits, which could not be sampled again from an LM in training."""
        state = super().state_dict()
        if self._edits is not None:
            state["edits"] = [edit._asdict() for edit in self._edits]
            state["skipped"] = list(map(tuple, self._skipped))
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over the edits of the run that is resumed."""
        super().load_state_dict(state_dict)
        if "edits" in state_dict:
            self._edits = [Edit(**state) for state in state_dict["edits"]]
            self._skipped = list(map(Skipped._make, state_dict["skipped"]))


def _lms_of_rows(rows: Sequence[RawEdit], pattern: str) -> tuple[dict[str, str], list[Skipped]]:
    """Return where the LM of each row is, by the row's place, and the rows that have none."""
    lms: dict[str, str] = {}
    owners: dict[str, RawEdit] = {}
    skipped: list[Skipped] = []
    for row in rows:
        path = pattern.replace("{edit}", row.id)
        if row.problem or Path(row.id).name != row.id or row.id in ("", ".."):  # would be elsewhere
            skipped.append(Skipped(*row[:3], row.problem or "its id is no name of a folder"))
        elif not Path(path).exists():
            skipped.append(Skipped(*row[:3], "there is no edited LM"))
        elif (first := owners.setdefault(row.id, row)) is not row:
            raise ConfigError(
                f"{first.where} and {row.where} have one id, {row.id!r}, and so one LM, {path}. "
                "Give each row an `id` of its own, which replaces {edit} in data.edited_lms."
            )
        else:
            lms[row.where] = path
    if not lms:
        raise ConfigError(
            f"data.edited_lms finds none of the edited LMs; that of {rows[0].where} would be "
            f"{pattern.replace('{edit}', rows[0].id)} ({skipped[0].reason})."
        )
    return lms, skipped
