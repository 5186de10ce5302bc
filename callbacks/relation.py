"""The base of callbacks that measure a relation: its labels, readers, edits and linear map."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from lincorr_lightning.callbacks.periodic_callback import CallbackState, PeriodicCallback
from lincorr_lightning.distributed import gather
from lincorr_lightning.errors import ConfigError, SubjectsError, require
from lincorr_lightning.finetune.batches import EditBatch
from lincorr_lightning.finetune.cases import Logits, concatenate, edit_domains, rows_of
from lincorr_lightning.finetune.edit_files import Edits, RawEdit, read_edits
from lincorr_lightning.finetune.edits import ListedEdits, ResolvedEdits, resolve_edits
from lincorr_lightning.knowledge import Catalogue, TokenizedRelation
from lincorr_lightning.linear_map.artifact import LinearMap
from lincorr_lightning.linear_map.fitting import (
    Ridge,
    check_ridge,
    fit_linear_map,
    warn_of_fit_subjects,
)
from lincorr_lightning.linear_map.layout import JointLayout
from lincorr_lightning.lm.query_cache import Query
from lincorr_lightning.lm.vocabulary import sample_up_to

MIN_SUBJECTS = 3  #: Subjects below which no correlation is computed: with two it is always 1 or -1.


@dataclass
class RelationState(CallbackState):
    """What a checkpoint keeps of a callback that measures a relation, from before training on."""

    base: Logits | None = None  #: Logits before training.
    map: tuple[Tensor, Tensor, float] | None = None  #: W, b and the ridge, see `fit_map`.
    #: What was read of independent edits: by their own step, the ids of some and their logits.
    readings: dict[int, list[tuple[list[int], list[Logits]]]] = field(default_factory=dict)

    def keep(self, edits: EditBatch, *logits: Logits) -> None:
        """Keep what was read of independent edits after one of their steps."""
        self.readings.setdefault(edits.step, []).append((edits.ids, list(logits)))

    def readings_by_step(self) -> dict[int, tuple[list[int], list[Logits]]]:
        """Return the edits of all ranks by their own step, and what was read, a row per edit."""
        of_ranks = gather(self.readings)
        by_step = {}
        for step in sorted(set().union(*of_ranks)):
            parts = [part for of_rank in of_ranks for part in of_rank.get(step, ())]
            # Of an edit that is trained again, the last.
            row_of = {edit: row for row, edit in enumerate(i for ids, _ in parts for i in ids)}
            edits = sorted(row_of)
            rows = [row_of[edit] for edit in edits]
            readings = zip(*(logits for _, logits in parts), strict=True)
            by_step[step] = edits, [rows_of(concatenate(part), rows) for part in readings]
        return by_step


class RelationCallback(PeriodicCallback):
    """A `PeriodicCallback` that measures a relation.

    Args:
        relation: Relation; None takes that of the run's edits, or ``city->country`` without any.
        knowledge_files: YAML files with more knowledge; None takes that of the run's edits.
        **options: See `PeriodicCallback`.
    """

    def __init__(
        self, relation: str | None = None, knowledge_files: list[str] | None = None, **options: Any
    ) -> None:
        super().__init__(**options)
        self.relation = relation
        self.knowledge_files = knowledge_files

    def watch(self, subjects: Any, n_watch: int, seed: int, least: int = MIN_SUBJECTS) -> None:
        """Keep which subjects are named or sampled; a `ConfigError` if fewer than `least`."""
        owner = type(self).__name__
        require(f"{owner}.n_watch", n_watch, at_least=least)
        if isinstance(subjects, str):
            raise ConfigError(
                f"{owner}.subjects is {subjects!r}; it must be a list, such as [a, b]."
            )
        if subjects is not None and len(set(subjects)) < least:
            raise ConfigError(
                f"{owner}.subjects names {len(set(subjects))} subjects; it needs {least}. "
                "Name more, or null to sample some."
            )
        self.subjects = subjects
        self.n_watch = n_watch
        self.seed = seed

    def resolve_relation(self, controls: Sequence[str] = ()) -> None:
        """Find the relation in the labels of the run's LM; `controls` are read, too."""
        run = self.run
        name = self.relation
        tokenizer = run.cache.lm.tokenizer
        edits = None if run.dataset is None else run.dataset.resolved
        if name is None:
            name = "city->country" if edits is None else edits.relation.name
        if self.knowledge_files is None and edits is not None:
            catalogue = edits.catalogue
        else:
            catalogue = Catalogue.load(*(self.knowledge_files or ()))
        subwords = edits is not None and edits.subwords
        #: The subjects of the run's edits, if its dataset lists them.
        self.edited_subjects = [] if edits is None else edits.subjects
        #: The relation with its labels in this LM's vocabulary.
        self.tokenized = TokenizedRelation.of(name, catalogue, tokenizer, subwords)
        self.tag = run.tag(self.study, name)  #: Name of the relation, see `LMRun.tag`.
        #: The prompts that are read, see `edit_domains`.
        self.domains = edit_domains(self.tokenized, controls, catalogue, tokenizer)
        for domain in self.domains.values():
            run.cache.register_tokens(domain.token_ids)

    def sample_subjects(self, n: int, seed: int) -> list[str]:
        """Return n subjects from the LM's vocabulary, or as many as it has."""
        return sample_up_to(self.run.cache.lm.tokenizer, n, seed=seed)

    def resolve_edits(self, given: Edits | None, setting: str) -> ResolvedEdits:
        """Return given edits, or those of the run's dataset, in this relation's labels.

        Raises:
            ConfigError: There are none, or they are of another source.
            SubjectsError: One of the run's edits is none in these labels.
        """
        lm = self.run.cache.lm
        if given is not None:
            return resolve_edits(ListedEdits(read_edits(given), setting), self.tokenized, lm)
        resolved = None if self.run.dataset is None else self.run.dataset.resolved
        name = self.tokenized.source.knowledge.name
        if resolved is None or resolved.relation.source.knowledge.name != name:
            raise ConfigError(
                f"{setting} is null, and the run has no edits of {name}. Name some, or the "
                "relation of the run's edits."
            )
        labels = [
            (relation.name, relation.source.token_ids, relation.target.token_ids)
            for relation in (resolved.relation, self.tokenized)
        ]
        if labels[0] == labels[1]:
            return resolved
        rows = [RawEdit("the run's edits", edit.subject, edit.answer) for edit in resolved.edits]
        relabelled = resolve_edits(ListedEdits(rows, self.tokenized.name), self.tokenized, lm)
        for row in relabelled.skipped:  # others refer to the edits by their position
            raise SubjectsError(f"{self.tokenized.name}: {row.answer!r}: {row.problem}.")
        return relabelled

    def queries(
        self, subjects: Sequence[str], adapters: Sequence[int | None] | int | None = None
    ) -> dict[str, list[Query]]:
        """Return the prompts of each domain, each subject in its adapter or all in one, or none."""
        ids = adapters if isinstance(adapters, Sequence) else [adapters] * len(subjects)
        return {
            name: [
                Query(domain.knowledge.prompt(subject), adapter_id, subject)
                for subject, adapter_id in zip(subjects, ids, strict=True)
            ]
            for name, domain in self.domains.items()
        }

    def edit_queries(self, edits: EditBatch) -> dict[str, list[Query]]:
        """Return the prompts of independent edits, each in the adapter that it is trained in.

        Raises:
            ConfigError: The run's dataset does not list all edits before they are trained.
        """
        if self.run.dataset is None:
            raise ConfigError(
                f"{self.tag}: all edits of the run are needed before their training, but the "
                "training DataLoader's dataset is not an EditDataset. Make it one, or set n_steps "
                "of each EditBatch to 0 if edits are trained together."
            )
        subjects = [edit.subject for edit in edits.edits]
        return self.queries(subjects, range(len(subjects)))

    def prefetch(self, queries: Mapping[str, Sequence[Query]]) -> None:
        """Announce queries that are read after the next optimizer step."""
        self.run.cache.prefetch([query for part in queries.values() for query in part])

    def read(self, queries: Mapping[str, Sequence[Query]]) -> Logits:
        """Return the LM's domain logits after the prompts of each domain."""
        requests = [(part, self.domains[name].token_ids) for name, part in queries.items()]
        return dict(zip(queries, self.run.cache.read(requests), strict=True))

    def set_map(self, folder: str | None, ridge: Ridge, n_subjects: int) -> None:
        """Keep how W and b are obtained: from a folder, or fitted on so many subjects at most."""
        owner = type(self).__name__
        check_ridge(ridge, owner)
        require(f"{owner}.n_subjects", n_subjects, at_least=MIN_SUBJECTS)
        self.map_folder = folder
        self.ridge = ridge
        self.n_subjects = n_subjects

    def announce_map(self) -> None:
        """Announce what the map is fitted on, when all callbacks are opened."""
        if self.map_folder is None:
            self.run.announce(JointLayout.of_relation(self.tokenized), self.n_subjects)

    def fit_map(self, ridge: Ridge | None = None) -> tuple[Tensor, Tensor, float]:
        """Return W, b and the ridge that they are fitted with; `ridge` is None for the map's own.

        Callbacks of a run that ask for the same map share one fit. The LM reads the prompts of all
        announced relations in one pass.
        """
        run = self.run
        lm = run.cache.lm
        layout = JointLayout.of_relation(self.tokenized)
        if self.map_folder is not None:
            linear_map = LinearMap.from_pretrained(self.map_folder, lm)
            linear_map.check_domains(layout.domains.values(), lm)
            warn_of_fit_subjects(self.map_folder, run.measured)
        else:
            ridge = self.ridge if ridge is None else ridge
            key = tuple(layout.reads), ridge, self.n_subjects
            if key not in run.maps:
                subjects = run.fit_subjects(self.n_subjects)
                run.maps[key] = fit_linear_map(lm, self.tokenized, subjects, ridge, run.reader())
            linear_map = run.maps[key]
        pair = self.tokenized.name
        return linear_map.weight(pair), linear_map.bias(pair), linear_map.ridge[pair]


def at_source_prompt(relation: TokenizedRelation) -> TokenizedRelation:
    """Return a relation to the target's labels at the source prompt, of which W₀ is the map."""
    knowledge = replace(relation.target.knowledge, template=relation.source.knowledge.template)
    return replace(relation, target=replace(relation.target, knowledge=knowledge))
