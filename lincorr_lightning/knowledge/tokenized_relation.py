"""A relation as one LM is asked about it: prompts, labels, and which labels belong together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from lincorr_lightning.errors import KnowledgeError
from lincorr_lightning.knowledge.catalogue import Catalogue
from lincorr_lightning.knowledge.domain import (
    WHOLE_WORDS,
    Completeness,
    Domain,
    build_domain,
    reference_matrix,
)
from lincorr_lightning.knowledge.schema import Relation

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class TokenizedRelation:
    """A relation under one tokenizer.

    Attributes:
        relation: The pair of knowledges.
        source: Labels of the source, n_source of them.
        target: Labels of the target, n_target of them.
        right: Which belong together in the world, ``(n_target, n_source)``, laid out like W;
            nothing is True where no reference is known.
    """

    relation: Relation
    source: Domain
    target: Domain
    right: npt.NDArray[np.bool_]

    @classmethod
    def of(
        cls,
        name: str,
        catalogue: Catalogue,
        tokenizer: PreTrainedTokenizerBase,
        subwords: bool = False,
    ) -> TokenizedRelation:
        """Look a relation up.

        Args:
            name: As ``city->country``.
            catalogue: Where it is from.
            tokenizer: The LM's.
            subwords: Whether beginnings of words are labels of the target too.

        Raises:
            KnowledgeError: There is no such relation.
            DomainError: A side has no label in this vocabulary.
        """
        relation = catalogue.relation(name)
        source = build_domain(relation.source, tokenizer)
        keep = tuple(Completeness) if subwords else WHOLE_WORDS
        target = build_domain(relation.target, tokenizer, keep)
        if relation.reference is None:
            right = np.zeros((len(target.labels), len(source.labels)), dtype=np.bool_)
        else:
            right = reference_matrix(relation, source, target)
        return cls(relation, source, target, right)

    @property
    def name(self) -> str:
        """As ``city->country``."""
        return self.relation.name

    @property
    def has_reference(self) -> bool:
        """Whether some pair of labels is known to belong together."""
        return bool(self.right.any())

    def require_reference(self) -> None:
        """Refuse a relation of which nobody has said what is right.

        Raises:
            KnowledgeError: It has no reference among the labels.
        """
        if not self.has_reference:
            target, source = self.relation.target.name, self.relation.source.name
            raise KnowledgeError(
                f"{self.name} has no reference among this LM's labels: nobody has said which "
                f"{target} belongs to which {source}. Take a relation that has one, such as "
                "city->country, or add the facts to a YAML file and name it in knowledge_files."
            )

    def source_prompts(self, subjects: Sequence[str]) -> list[str]:
        """The source's prompt over each subject."""
        return [self.relation.source.prompt(subject) for subject in subjects]

    def target_prompts(self, subjects: Sequence[str]) -> list[str]:
        """The target's prompt over each subject."""
        return [self.relation.target.prompt(subject) for subject in subjects]
