"""What all callbacks that ask an LM in training about a relation have in common."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import lightning as L

from lincorr_lightning.callbacks.relation_maps import RelationMaps
from lincorr_lightning.callbacks.step_watch import PeriodicCallback
from lincorr_lightning.errors import ConfigError
from lincorr_lightning.finetune.datamodule import EditBatch
from lincorr_lightning.finetune.sampling import Edit
from lincorr_lightning.knowledge import Catalogue, Relation, TokenizedRelation
from lincorr_lightning.lm.query_cache import Query, QueryCache, get_query_cache
from lincorr_lightning.lm.vocabulary import sample_subjects, usable_strings

DEFAULT_RELATION = "city->country"
LEAST = 3
"""Subjects that an r needs."""


class RelationCallback(PeriodicCallback):
    """Asks the LM of any LightningModule about one relation.

    The LM is asked by itself, in eval mode and without gradient: weights, optimizer, random
    streams and modes are as before afterwards. Every process asks the same and waits for nobody.

    Args:
        relation: The relation that is watched, as ``city->country``; None takes the one that the
            DataModule's edits are about.
        linear_map: Folder of a linear map; None fits one on the LM as the run starts.
        ridge: Of the map that is fitted.
        n_subjects: Subjects that it is fitted on, as far as the vocabulary has so many.
        every_n_steps: Optimizer steps between two measurements.
        lm: Name of the LM in ``module.named_modules()``, if the module holds several.
        tokenizer: Folder or hub id of its tokenizer, if neither the module nor the checkpoint that
            the LM came from has one.
        knowledge_files: YAML files with knowledge of your own; None takes the DataModule's.
        seed: Of subjects that are sampled.

    Raises:
        ConfigError: A setting that no run can have.
    """

    def __init__(
        self,
        relation: str | None = None,
        linear_map: str | None = None,
        ridge: float = 0.0,
        n_subjects: int = 2000,
        every_n_steps: int = 1,
        lm: str | None = None,
        tokenizer: str | None = None,
        knowledge_files: list[str] | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__(every_n_steps, lm, tokenizer)
        if ridge < 0:
            raise ConfigError(f"{type(self).__name__}.ridge is {ridge}; it must not be negative.")
        self.relation = relation
        self.linear_map = linear_map
        self.ridge = ridge
        self.n_subjects = n_subjects
        self.knowledge_files = knowledge_files
        self.seed = seed
        self.begin()

    @property
    def state_key(self) -> str:
        """Several may watch one run, each something else."""
        return self._generate_state_key(
            relation=self.relation, lm=self.lm, linear_map=self.linear_map, ridge=self.ridge,
            every_n_steps=self.every_n_steps, seed=self.seed,
        )  # fmt: skip

    # -- a run -----------------------------------------------------------------------------------

    def begin(self) -> None:
        """Forget all that was seen in another run."""
        super().begin()
        self._maps: RelationMaps | None = None

    def state_dict(self) -> dict[str, Any]:
        """What was seen so far, and the maps: an LM in training would give others."""
        maps = self._maps and [self._maps.weights, self._maps.biases]
        return {"history": self.history, "maps": maps}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from there."""
        self.history = state_dict["history"]
        self._maps = state_dict["maps"] and RelationMaps(*state_dict["maps"])

    # -- what is asked, and whom ---------------------------------------------------------------

    def open(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Find the LM, and the relation's labels in its vocabulary.

        `tag` is then the relation's name, numbered where others of its kind watch the same.

        Raises:
            LanguageModelError: The module holds no causal LM, or no tokenizer is found.
            KnowledgeError: There is no such relation.
            DomainError: A side of it has no label in this vocabulary.
        """
        self.cache: QueryCache = get_query_cache(trainer, pl_module, self.lm, self.tokenizer)
        name = self.relation_in(trainer)
        self.known = self.catalogue(trainer)
        subwords = bool(getattr(getattr(trainer, "datamodule", None), "subwords", False))
        self.asked: TokenizedRelation = TokenizedRelation.of(
            name, self.known, self.cache.lm.tokenizer, subwords
        )
        place = [c for c in self.siblings(trainer) if c.relation_in(trainer) == name].index(self)
        self.tag = f"{name} ({place + 1})" if place else name
        self.cache.register_tokens([*self.asked.source.token_ids, *self.asked.target.token_ids])

    def catalogue(self, trainer: L.Trainer) -> Catalogue:
        """All knowledge, the user's files included."""
        of_edits = getattr(getattr(trainer, "datamodule", None), "catalogue", None)
        if self.knowledge_files is None and isinstance(of_edits, Catalogue):
            return of_edits
        return Catalogue.load(*(self.knowledge_files or ()))

    def relation_in(self, trainer: L.Trainer) -> str:
        """Name of the relation that it watches in a run."""
        return self.relation or relation_of_edits(trainer) or DEFAULT_RELATION

    @property
    def maps(self) -> RelationMaps:
        """The linear maps; read or fitted when they are first needed, or as before a resumption.

        Raises:
            LinearMapError: The folder's map is of other labels, or has no such pair.
        """
        if self._maps is None:
            self._maps = RelationMaps.of(
                self.cache, self.asked, self.linear_map, self.ridge, self.n_subjects
            )
        return self._maps

    def sample_subjects(self, n: int) -> list[str]:
        """Subjects X from the LM's vocabulary, as many as there are up to n."""
        tokenizer = self.cache.lm.tokenizer
        return sample_subjects(tokenizer, min(n, len(usable_strings(tokenizer))), seed=self.seed)


def edits_of(trainer: L.Trainer) -> list[Edit] | None:
    """The edits of the run's DataModule, if it has some."""
    edits = getattr(getattr(trainer, "datamodule", None), "edits", None)
    # Somebody's own DataModule may call something else so.
    is_ours = isinstance(edits, list) and all(isinstance(edit, Edit) for edit in edits)
    return list(edits) if edits and is_ours else None


def relation_of_edits(trainer: L.Trainer) -> str | None:
    """Name of the relation that the run's DataModule is about, if it has one."""
    relation = getattr(getattr(trainer, "datamodule", None), "relation", None)
    return relation.name if isinstance(relation, Relation) else None


def enough(subjects: list[str] | None, n_watch: int, who: str) -> list[str] | None:
    """Refuse a watch set that has no r; with two subjects it is always 1 or -1.

    Raises:
        ConfigError: It names the callback's setting.
    """
    if n_watch < LEAST:
        raise ConfigError(f"{who}.n_watch is {n_watch}; r needs {LEAST}.")
    if subjects is not None and len(set(subjects)) < LEAST:
        raise ConfigError(
            f"{who}.subjects names {len(set(subjects))}; r needs {LEAST}. Name more, or null to "
            "sample some."
        )
    return subjects


def independent(batch: Any) -> EditBatch | None:
    """The batch, if its edits are trained each from the base weights."""
    return batch if isinstance(batch, EditBatch) and batch.n_steps > 0 else None


def adapter_ids(batch: EditBatch) -> list[int | None]:
    """Which copy of the LM each edit is trained in, if the module has copies."""
    return list(range(len(batch.edits)))


def queries(prompts: Sequence[str], which: Sequence[int | None] | None = None) -> list[Query]:
    """Prompts to a copy each, or all to the one LM."""
    return [
        Query(prompt, copy)
        for prompt, copy in zip(prompts, which or [None] * len(prompts), strict=True)
    ]
