"""The bases of callbacks that evaluate one relation on an LM in training."""

from collections.abc import Sequence
from typing import Any

import lightning as L
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from lincorr_lightning.callbacks.periodic_callback import PeriodicCallback
from lincorr_lightning.distributed import gather
from lincorr_lightning.errors import CheckpointError, ConfigError, SubjectsError, require
from lincorr_lightning.finetune.batches import EditBatch, edit_dataset
from lincorr_lightning.finetune.cases import DomainLogits
from lincorr_lightning.finetune.edit_files import RawEdit, read_edits
from lincorr_lightning.finetune.edits import Edit, Skipped, resolve_edits
from lincorr_lightning.knowledge import Catalogue, Domain, TokenizedRelation
from lincorr_lightning.linear_map.artifact import LinearMap
from lincorr_lightning.linear_map.fitting import (
    Ridge,
    RidgeRequest,
    fit_linear_map,
    sample_fitted_subjects,
    warn_of_fit_subjects,
)
from lincorr_lightning.linear_map.layout import JointLayout
from lincorr_lightning.lm.query_cache import Query
from lincorr_lightning.lm.vocabulary import sample_up_to

DEFAULT_RELATION = "city->country"
MIN_SUBJECTS = 3  #: Subjects below which no correlation is computed: with two it is always 1 or -1.


class RelationCallback(PeriodicCallback):
    """Evaluates one relation on the LM of any LightningModule.

    Args:
        relation: Relation, as ``city->country``; None takes that of the run's edits.
        knowledge_files: YAML files with more knowledge.
        seed: Seed of sampled subjects.
        **options: See `PeriodicCallback`.

    Attributes:
        tokenized: The relation with its labels in this LM's vocabulary.
        domains: Domains whose logits are read: source, target, and the controls if there are any.
        run_edits: Edits of the training dataset, if it is an `EditDataset`; else none.
        skipped: Rows of the given edits that are no edit of this LM and relation.
        is_independent: Whether each edit of the run is trained from the base weights.
        tag: Name of the relation, numbered if other callbacks of the class evaluate it too.
    """

    def __init__(
        self,
        relation: str | None = None,
        knowledge_files: list[str] | None = None,
        seed: int = 0,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        self.relation, self.knowledge_files, self.seed = relation, knowledge_files, seed

    def open(self, trainer: L.Trainer) -> None:
        name, dataset = self.relation_name(trainer), edit_dataset(trainer)
        # All knowledge, that of `knowledge_files` or else of the run's edits included.
        if self.knowledge_files is None and dataset is not None:
            self.catalogue = dataset.catalogue
        else:
            self.catalogue = Catalogue.load(*(self.knowledge_files or ()))
        self.run_edits: list[Edit] = [] if dataset is None else dataset.edits
        self.skipped: list[Skipped] = []
        self.is_independent = dataset is not None and dataset.training.protocol == "independent"
        if self.is_independent and trainer.ckpt_path is not None and trainer.world_size > 1:
            raise CheckpointError("a checkpoint has one process's edits. Resume on one device.")
        self.tokenized = TokenizedRelation.of(
            name, self.catalogue, self.cache.lm.tokenizer, dataset is not None and dataset.subwords
        )
        same = [each for each in self.siblings(trainer) if each.relation_name(trainer) == name]
        index = same.index(self)
        self.tag = f"{name} ({index + 1})" if index else name
        self.domains: list[Domain] = [self.tokenized.source, self.tokenized.target]
        for domain in self.domains:
            self.cache.register_tokens(domain.token_ids)

    def expected_relation(self, trainer: L.Trainer) -> str:
        """Return the relation that is known before the data is read."""
        taught = getattr(getattr(trainer, "datamodule", None), "relation", None)
        return self.relation or (taught if isinstance(taught, str) else DEFAULT_RELATION)

    def relation_name(self, trainer: L.Trainer) -> str:
        """Return the given relation, else that of the training dataset, else city->country."""
        dataset = getattr(trainer.train_dataloader, "dataset", None)
        taught = getattr(dataset, "relation", None)
        default = taught.name if isinstance(taught, TokenizedRelation) else DEFAULT_RELATION
        return self.relation or default

    def find_edits(
        self, given: list[dict[str, Any]] | str | None, trainer: L.Trainer
    ) -> list[Edit]:
        """Return given edits, or those of the run's dataset, in this relation's labels.

        There are none if the run edits another source than that of this relation.
        """
        dataset, measured, lm = edit_dataset(trainer), self.tokenized, self.cache.lm
        if given is not None:
            name = f"{type(self).__name__}.edits"
            edits, _, self.skipped = resolve_edits(read_edits(given), measured, lm, name)
            return edits
        taught = None if dataset is None else dataset.relation
        if taught is None or taught.source.knowledge.name != measured.source.knowledge.name:
            return []
        labels = [(each.source.token_ids, each.target.token_ids) for each in (taught, measured)]
        if taught.name == measured.name and labels[0] == labels[1]:
            return self.run_edits
        raw = [RawEdit("the run's edits", edit.subject, edit.answer) for edit in self.run_edits]
        edits, _, skipped = resolve_edits(raw, measured, lm, measured.name)
        if skipped:  # others refer to the edits by their position
            raise SubjectsError(f"{measured.name}: {skipped[0].answer!r}: {skipped[0].reason}.")
        return edits

    def measured_subjects(self, tokenizer: PreTrainedTokenizerBase, has_edits: bool) -> list[str]:
        """Return the subjects that this callback measures, the run's edits excepted.

        Called before `open`, and also on callbacks of other LMs.
        """
        return []

    def sample_subjects(self, n: int) -> list[str]:
        """Return n subjects from the LM's vocabulary, or as many as it has."""
        return sample_up_to(self.cache.lm.tokenizer, n, seed=self.seed)

    def own_subjects(self, edit_batch: EditBatch) -> tuple[list[str], list[int]]:
        """Return the subjects of independent edits, and the adapter that each is trained in."""
        if not self.run_edits:
            raise ConfigError(
                f"{type(self).__name__} needs all edits of the run before their training, but the "
                "training DataLoader's dataset is not an EditDataset. Make it one, or set "
                "n_steps of each EditBatch to 0 if edits are trained together."
            )
        return [edit.subject for edit in edit_batch.edits], list(range(len(edit_batch.edits)))

    def queries(
        self, subjects: Sequence[str], adapter_ids: Sequence[int | None] | None = None
    ) -> list[list[Query]]:
        """Return the prompts of each domain, each subject in its adapter or, if None, the LM's."""
        pairs = list(zip(subjects, adapter_ids or [None] * len(subjects), strict=True))
        prompts = [domain.knowledge.prompt for domain in self.domains]
        return [[Query(prompt(subject), i, subject) for subject, i in pairs] for prompt in prompts]

    def prefetch(self, queries: Sequence[Sequence[Query]]) -> None:
        """Announce queries that are read after the next optimizer step."""
        self.cache.prefetch([query for part in queries for query in part])

    def read(self, queries: Sequence[Sequence[Query]]) -> DomainLogits:
        """Return the LM's domain logits."""
        labels = [domain.token_ids for domain in self.domains]
        source, target, *controls = self.cache.read(list(zip(queries, labels, strict=True)))
        return DomainLogits(source, target, tuple(controls))


class MapCallback(RelationCallback):
    """Evaluates a relation beside its linear maps, and independent edits one by one.

    Args:
        relation: Relation, as ``city->country``; None takes that of the run's edits.
        linear_map: Folder of a linear map; None fits one on the LM at the start of training.
        ridge: Ridge of the fitted map, see `RidgeRequest`; 0 is the paper's.
        n_subjects: Number of subjects that it is fitted on, or as many as the vocabulary has.
        **options: See `RelationCallback`.
    """

    kept = (*RelationCallback.kept, "maps", "strength", "_base", "_by_edit")

    def __init__(
        self,
        relation: str | None = None,
        linear_map: str | None = None,
        ridge: Ridge = "auto",
        n_subjects: int = 2000,
        **options: Any,
    ) -> None:
        super().__init__(relation, **options)
        self.ridge_request = RidgeRequest(ridge, owner=type(self).__name__)
        require(f"{type(self).__name__}.n_subjects", n_subjects, at_least=MIN_SUBJECTS)
        self.linear_map, self.n_subjects = linear_map, n_subjects

    def reset(self) -> None:
        super().reset()
        # A resumed run has these from its start: `base`, and W and b by map, the main one first.
        self.maps: dict[str, tuple[Tensor, Tensor]] = {}
        self.strength = 0.0  # ridge that the main map was fitted with
        self._base: tuple[Any, ...] | None = None
        # What was read of each edit that is trained from the base weights, by its own steps.
        self._by_edit: dict[int, dict[int, list[tuple[Any, ...]]]] = {}

    def open(self, trainer: L.Trainer) -> None:
        """Find the relation's labels, and announce what the maps are fitted on.

        No map is fitted on subjects that any callback of the run measures, nor on edited ones.
        """
        super().open(trainer)
        measured = {edit.subject for edit in self.run_edits}
        for callback in trainer.callbacks:  # type: ignore[attr-defined]
            if isinstance(callback, RelationCallback):
                tokenizer = self.cache.lm.tokenizer
                measured |= {*callback.measured_subjects(tokenizer, bool(self.run_edits))}
        self._held_out = frozenset(measured)
        self._layout = JointLayout.of_relation(self.tokenized)
        if not self.maps and self.linear_map is None:
            self.shared.rows.announce(self._layout, self._fitted_subjects())

    def start(self, trainer: L.Trainer) -> None:
        if not self.maps:
            if self.linear_map is None:
                maps = self._fit_maps()
            else:
                given = LinearMap.from_pretrained(self.linear_map, self.cache.lm)
                given.check_domains(self._layout.domains.values(), self.cache.lm)
                warn_of_fit_subjects(self.linear_map, self._held_out)
                maps = {"given": given}
            pair = self.tokenized.name
            self.maps = {name: (each.weight(pair), each.bias(pair)) for name, each in maps.items()}
            self.strength = next(iter(maps.values())).ridge[pair]
        super().start(trainer)

    def _fitted_subjects(self) -> list[str]:
        tokenizer = self.cache.lm.tokenizer
        return sample_fitted_subjects(tokenizer, self.n_subjects, self._held_out)

    def _fit_maps(self) -> dict[str, LinearMap]:
        """Fit the map."""
        return {"fitted": self.fit_map(self.ridge_request.ridge)}

    def fit_map(self, ridge: Ridge) -> LinearMap:
        """Fit the relation's map, once for all callbacks of the run.

        The LM reads the prompts of all announced relations in one pass.
        """
        key = tuple(self._layout.reads), ridge, self.n_subjects, self._held_out
        fitted_maps = self.shared.fitted_maps
        if key not in fitted_maps:
            fitted_maps[key] = fit_linear_map(
                self.cache.lm, self.tokenized, self._fitted_subjects(), ridge, self.shared.rows
            )
        return fitted_maps[key]

    @property
    def weight(self) -> Tensor:
        """W of the main map, ``(n_target, n_source)``, after `start`."""
        return next(iter(self.maps.values()))[0]

    def predict(self, source_logits: Tensor) -> Tensor:
        """Return the main map's target logits, ``(n, n_target)``, of ``(n, n_source)`` ones."""
        return source_logits @ self.weight.T + next(iter(self.maps.values()))[1]

    def keep_base(self, subjects: Sequence[str]) -> None:
        """Keep the logits before training; a resumed run keeps those of its start."""
        if self._base is None:
            self._base = tuple(self.read(self.queries(subjects)))

    @property
    def base(self) -> DomainLogits:
        """The logits before training, after `keep_base`."""
        assert self._base is not None
        return DomainLogits(*self._base)

    def keep_edits(self, edit_batch: EditBatch, *logits: DomainLogits) -> None:
        """Keep what was read of independent edits at one of their steps, a row per edit."""
        for row, edit in enumerate(edit_batch.ids):
            steps = self._by_edit.setdefault(edit, {})
            steps[edit_batch.step] = [tuple(part.rows([row])) for part in logits]

    def edits_by_step(self) -> dict[int, tuple[list[int], list[DomainLogits]]]:
        """Return the edits of all ranks by their own step, and what was read, a row per edit."""
        by_edit = {edit: steps for part in gather(self._by_edit) for edit, steps in part.items()}
        by_step: dict[int, tuple[list[int], list[DomainLogits]]] = {}
        for step in sorted({step for steps in by_edit.values() for step in steps}):
            edits = sorted(edit for edit, steps in by_edit.items() if step in steps)
            parts = zip(*(by_edit[edit][step] for edit in edits), strict=True)
            by_step[step] = edits, [DomainLogits.stack(part) for part in parts]
        return by_step


def require_template(name: str, prompt: str) -> None:
    """Refuse a prompt that does not hold ``{}`` once, as a `ConfigError`."""
    if prompt.count("{}") != 1:
        raise ConfigError(f"{name} {prompt!r} must hold {{}} once, in place of the subject.")


def check_subjects(subjects: list[str] | None, n_watch: int, callback: str) -> None:
    """Refuse fewer subjects, named or sampled, than a correlation needs, as a `ConfigError`."""
    require(f"{callback}.n_watch", n_watch, at_least=MIN_SUBJECTS)
    if subjects is not None and len(set(subjects)) < MIN_SUBJECTS:
        raise ConfigError(
            f"{callback}.subjects names {len(set(subjects))} subjects; a correlation needs "
            f"{MIN_SUBJECTS}. Name more, or null to sample some."
        )
