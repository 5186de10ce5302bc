"""A relation under one tokenizer: prompts, labels, and the reference over the labels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from lincorr_lightning.errors import KnowledgeError
from lincorr_lightning.knowledge.answer_tokens import WHOLE_WORDS, Completeness
from lincorr_lightning.knowledge.catalogue import Catalogue
from lincorr_lightning.knowledge.domain import (
    Domain,
    ambiguous_matrix,
    build_domain,
    reference_matrix,
)
from lincorr_lightning.knowledge.schema import Relation

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class TokenizedRelation:
    """A relation with the domains of its source and target under one tokenizer.

    Attributes:
        relation: The pair of kinds of knowledge.
        source: Domain of the source, with ``n_source`` labels.
        target: Domain of the target, with ``n_target`` labels.
        reference_mask: ``(n_target, n_source)`` bool like W: which target labels are right for each
            source label; all False if no reference is known.
        ambiguous_mask: ``(n_target, n_source)`` bool like W: which target labels may stand for
            another fact about the source label, see `ambiguous_matrix`.
    """

    relation: Relation
    source: Domain
    target: Domain
    reference_mask: npt.NDArray[np.bool_]
    ambiguous_mask: npt.NDArray[np.bool_]

    @classmethod
    def of(
        cls,
        name: str,
        catalogue: Catalogue,
        tokenizer: PreTrainedTokenizerBase,
        subwords: bool = False,
    ) -> TokenizedRelation:
        """Look up a relation and tokenize its answers.

        Args:
            name: Name of the relation, such as ``city->country``.
            catalogue: Catalogue that has the relation.
            tokenizer: Tokenizer of the LM.
            subwords: Whether the target's domain also has labels that are beginnings of words.

        Raises:
            KnowledgeError: There is no such relation.
            DomainError: Source or target has no label in this vocabulary.
        """
        relation = catalogue.relation(name)
        source = build_domain(relation.source, tokenizer)
        keep = tuple(Completeness) if subwords else WHOLE_WORDS
        target = build_domain(relation.target, tokenizer, keep)
        if relation.reference is None:
            mask = np.zeros((len(target.labels), len(source.labels)), dtype=np.bool_)
        else:
            mask = reference_matrix(relation, source, target)
        ambiguous = ambiguous_matrix(relation, source, target, tokenizer)
        return cls(relation, source, target, mask, ambiguous)

    @property
    def name(self) -> str:
        """Name of the relation, such as ``city->country``."""
        return self.relation.name

    @property
    def has_reference(self) -> bool:
        """Whether any label has a reference."""
        return bool(self.reference_mask.any())

    def require_reference(self) -> None:
        """Raise a `KnowledgeError` if no label has a reference."""
        if not self.has_reference:
            target, source = self.relation.target.name, self.relation.source.name
            raise KnowledgeError(
                f"{self.name} has no reference among this LM's labels: no file says which {target} "
                f"belongs to which {source}. Choose a relation that has a reference, such as "
                "city->country, or add the facts to a YAML file and pass it as knowledge_files."
            )

    def source_prompts(self, subjects: Sequence[str]) -> list[str]:
        """Return the source prompt of each subject."""
        return [self.relation.source.prompt(subject) for subject in subjects]

    def target_prompts(self, subjects: Sequence[str]) -> list[str]:
        """Return the target prompt of each subject."""
        return [self.relation.target.prompt(subject) for subject in subjects]
