"""Edits of an LM's source knowledge: who is taught which answer, and in which order."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
from lightning.pytorch.utilities import rank_zero_warn

from lincorr_lightning.data.resumable_loader import ResumableLoader
from lincorr_lightning.distributed import data_shard, require_items
from lincorr_lightning.errors import ConfigError, SubjectsError
from lincorr_lightning.finetune.batches import (
    IGNORED,
    EditBatch,
    EditDataset,
    EditSchedule,
)
from lincorr_lightning.finetune.files import BETWEEN, RawEdit, read_edits
from lincorr_lightning.finetune.sampling import (
    Edit,
    check_subjects,
    place_edits,
    record_baseline,
    resolve_edits,
    sample_edits,
)
from lincorr_lightning.io import write_csv
from lincorr_lightning.knowledge import Catalogue, Relation, TokenizedRelation
from lincorr_lightning.lm.finder import causal_lm_of
from lincorr_lightning.lm.language_model import LanguageModel
from lincorr_lightning.lm.query_cache import tokenizer_of

__all__ = [
    "COLUMNS",
    "IGNORED",
    "Edit",
    "EditBatch",
    "EditSchedule",
    "EditsDataModule",
    "resolve_edits",
]

COLUMNS = ("subject", "answer", "reference", "source_before", "target_before")
_SAMPLED_BY = ("relation", "n_edits", "subjects", "seed")


class _NotYetError(ConfigError, AttributeError):
    """Edits are asked for before there are any; an AttributeError for `getattr` with a default."""


class EditsDataModule(L.LightningDataModule):
    """Edits (subject X, source knowledge, new answer) of one relation.

    They are sampled from the LM's vocabulary, so that answers cover the source's domain and each
    asks for another target than the LM says before; or read from a file. The LM is that of the
    LightningModule (its `language_model`, or the causal LM found in it). Every process has the
    same edits, and a resumed run those that it began with.

    Args:
        relation: What is taught and what should follow, as ``city->country``.
        n_edits: How many are sampled.
        subjects: Whom the sampled edits are about, each at most once; null samples the vocabulary.
        edits_file: JSONL or CSV with ``subject`` and ``answer``, and ``reference`` if it is not
            that of the relation; all of them are used, in their order.
        batch_size: Edits per step, where the LightningModule has no `edit_schedule`.
        subwords: Whether answers of which the first token is only the beginning of a word are
            labels of the target too; the cases are then told apart by completeness (paper,
            appendix K).
        knowledge_files: YAML files with knowledge of your own.
        seed: Of subjects, answers and order.

    Attributes:
        relation: The pair of knowledges.
        catalogue: All knowledge, the user's files included.
        subwords: As given; what watches the edits asks for the same labels.

    Raises:
        KnowledgeError: There is no such relation, or it has no reference.
        SubjectsError: A file or subject cannot be used; the message says which.
        ConfigError: Settings that no run can have.
    """

    def __init__(
        self,
        relation: str = "city->country",
        n_edits: int = 150,
        subjects: list[str] | None = None,
        edits_file: str | None = None,
        batch_size: int = 8,
        subwords: bool = False,
        knowledge_files: list[str] | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__()
        for name, value in (("n_edits", n_edits), ("batch_size", batch_size)):
            if value < 1:
                raise ConfigError(f"data.{name} is {value}; it must be at least 1.")
        if seed < 0:
            raise ConfigError(f"data.seed is {seed}; it must not be negative.")
        if subjects is not None and edits_file is not None:
            raise ConfigError(
                "data.subjects and data.edits_file both say whom the edits are about. Leave one of "
                "them null."
            )
        if subjects is not None and not subjects:
            raise ConfigError("data.subjects is empty; null samples the vocabulary.")
        twice = next((x for i, x in enumerate(subjects or ()) if x in (subjects or ())[:i]), None)
        if twice is not None:
            raise SubjectsError(f"data.subjects names {twice!r} twice. Remove one.")
        self.save_hyperparameters()
        self.subwords = subwords
        self.catalogue = Catalogue.load(*(knowledge_files or ()))
        self.relation: Relation = self.catalogue.relation(relation)
        self._written: list[RawEdit] | None = None
        self._forget()

    def _forget(self) -> None:
        self._asked: TokenizedRelation | None = None
        self._edits: list[Edit] | None = None
        self._restored_labels: list[list[int]] | None = None

    def setup(self, stage: str) -> None:
        """Read the file, and refuse edits that cannot be, before the LM's weights are read.

        Raises:
            KnowledgeError: The relation has no reference.
            DomainError: A side of it has no label in the LM's vocabulary.
            SubjectsError: A file or subject cannot be used.
        """
        del stage
        # The LM may be another one now, or have been taught since.
        self._forget()
        self._read()
        lm = getattr(getattr(self.trainer, "lightning_module", None), "language_model", None)
        if isinstance(lm, LanguageModel):
            self._look_up(lm)

    def _read(self) -> None:
        if self.hparams["edits_file"] is not None:
            self._written = read_edits(self.hparams["edits_file"])

    def _look_up(self, lm: LanguageModel) -> TokenizedRelation:
        """Find the labels, of which the tokenizer tells."""
        asked = TokenizedRelation.of(
            self.relation.name, self.catalogue, lm.tokenizer, self.subwords
        )
        if self._written is not None:
            place_edits(self._written, asked, lm.tokenizer)
        else:
            asked.require_reference()
            check_subjects(self.hparams["subjects"] or (), lm.tokenizer)
        self._asked = asked
        return asked

    # -- the edits -------------------------------------------------------------------------------

    @property
    def edits(self) -> list[Edit]:
        """All edits.

        Raises:
            ConfigError: They are not made yet.
        """
        if self._edits is None:
            raise _NotYetError("the edits are made when training begins, or by prepare_edits(lm).")
        return self._edits

    @property
    def asked(self) -> TokenizedRelation:
        """The relation with the LM's labels.

        Raises:
            ConfigError: The LM is not known yet.
        """
        if self._asked is None:
            raise _NotYetError("the labels are known when training begins, or by prepare_edits(lm)")
        return self._asked

    def prepare_edits(self, lm: LanguageModel) -> list[Edit]:
        """Make the edits for an LM; does nothing when they are there.

        Args:
            lm: As it is before it is taught.

        Raises:
            SubjectsError: A subject or answer that this LM cannot be taught.
            KnowledgeError: The relation has no reference among this LM's labels.
            ConfigError: The edits of a checkpoint belong to an LM with other labels.
        """
        if self._written is None:
            self._read()
        asked = self._asked or self._look_up(lm)
        if self._edits is None:
            settings = self.hparams
            self._edits = (
                record_baseline(place_edits(self._written, asked, lm.tokenizer), asked, lm)
                if self._written is not None
                else sample_edits(
                    asked, lm, settings["n_edits"], settings["subjects"], settings["seed"]
                )
            )
        elif self._restored_labels not in (None, _labels(asked)):
            raise ConfigError(
                f"the checkpoint's edits are of other labels of {asked.name} than this LM and "
                "these knowledge files give. Use those of the run that wrote it, or begin anew."
            )
        known = [edit for edit in self._edits if edit.target_before in edit.rights]
        if known and self._written is not None:
            rank_zero_warn(
                f"{len(known)} of {len(self._edits)} edits, such as {known[0].subject!r} -> "
                f"{known[0].answer!r}, ask for no other target than the LM says already: they "
                "count as generalized whatever training does."
            )
        return self._edits

    def write_edits(self, path: str | Path) -> None:
        """Write the edits as a CSV that `edits_file` reads.

        Args:
            path: The file.

        Raises:
            ConfigError: They are not made yet.
            OutputError: The file cannot be written.
        """
        source, target = self.asked.source.texts, self.asked.target.texts
        rows = [
            (
                edit.subject,
                edit.answer,
                BETWEEN.join(target[i] for i in edit.rights),
                source[edit.source_before],
                target[edit.target_before],
            )
            for edit in self.edits
        ]
        write_csv(path, COLUMNS, rows)

    # -- dealing them out ------------------------------------------------------------------------

    def train_dataloader(self) -> ResumableLoader:
        """The steps of an epoch, as the LightningModule's `edit_schedule` deals them."""
        plan = getattr(self._dealt_to.lightning_module, "edit_schedule", None)
        if not isinstance(plan, EditSchedule):
            plan = EditSchedule(edits_per_step=self.hparams["batch_size"])
        return self._loader(plan)

    def predict_dataloader(self) -> ResumableLoader:
        """Every edit once, in their order."""
        return self._loader(EditSchedule("independent", self.hparams["batch_size"]))

    def _loader(self, plan: EditSchedule) -> ResumableLoader:
        trainer = self._dealt_to
        module = trainer.lightning_module
        lm = getattr(module, "language_model", None)
        if not isinstance(lm, LanguageModel):
            model = causal_lm_of(module)
            lm = LanguageModel.from_module(model, tokenizer_of(module, model))
        self.prepare_edits(lm)
        # The same everywhere, also where processors round otherwise.
        self._edits = trainer.strategy.broadcast(self._edits)
        require_items(trainer, len(self.edits), "edits", "give more edits")
        share = data_shard(trainer)
        steps = EditDataset(self._rows(lm), plan, self.hparams["seed"], share.number, share.n)
        return ResumableLoader(steps, trainer)

    def _rows(self, lm: LanguageModel) -> list[tuple[list[int], tuple[int, ...]]]:
        prompts = self.asked.source_prompts([edit.subject for edit in self.edits])
        gap = " " if self.relation.source.leading_space else ""
        # Refuses an answer that would end beyond the LM's last position.
        lm.rows([f"{p}{gap}{edit.answer}" for p, edit in zip(prompts, self.edits, strict=True)])
        return list(zip(lm.rows(prompts), (edit.tokens for edit in self.edits), strict=True))

    @property
    def _dealt_to(self) -> L.Trainer:
        if self.trainer is None:
            raise ConfigError(
                "EditsDataModule deals edits out to a Trainer. Pass it to trainer.fit, or call "
                "prepare_edits(lm) and read `edits`."
            )
        return self.trainer

    # -- resuming --------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The edits, which an LM in training could not give again."""
        if self._edits is None:
            return {}
        return {
            "edits": [edit.state() for edit in self._edits],
            "labels": _labels(self.asked),
            "sampled_by": {name: self.hparams[name] for name in _SAMPLED_BY},
            "written": _contents(self._written),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take the edits of the run that is resumed.

        Raises:
            ConfigError: This run asks for others.
        """
        if not state_dict:
            return
        ours = {name: self.hparams[name] for name in _SAMPLED_BY}
        other = [name for name in _SAMPLED_BY if state_dict["sampled_by"][name] != ours[name]]
        if state_dict["written"] != _contents(self._written):
            other.append("edits_file")
        if other:
            raise ConfigError(
                f"the checkpoint's edits were made with another data.{other[0]}. Use the settings "
                "of the run that wrote it (its config.yaml), or begin anew."
            )
        self._edits = [Edit.restored(state) for state in state_dict["edits"]]
        self._restored_labels = state_dict["labels"]


def _labels(asked: TokenizedRelation) -> list[list[int]]:
    return [asked.source.token_ids, asked.target.token_ids]


def _contents(written: list[RawEdit] | None) -> list[list[Any]] | None:
    """What a file says, wherever it lies."""
    if written is None:
        return None
    return [[edit.subject, edit.answer, list(edit.reference)] for edit in written]
