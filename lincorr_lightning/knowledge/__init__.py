"""Kinds of knowledge: prompts, domains of answers and real-world references."""

from lincorr_lightning.knowledge.answer_tokens import (
    WHOLE_WORDS,
    Completeness,
    answer_tokens,
    unknown_words,
)
from lincorr_lightning.knowledge.catalogue import Catalogue
from lincorr_lightning.knowledge.domain import (
    Domain,
    Dropped,
    Label,
    TokenizedRelation,
    build_domain,
    reference_matrix,
)
from lincorr_lightning.knowledge.schema import FAMILIES, LANGUAGES, Answer, Knowledge, Relation

__all__ = [
    "FAMILIES",
    "LANGUAGES",
    "WHOLE_WORDS",
    "Answer",
    "Catalogue",
    "Completeness",
    "Domain",
    "Dropped",
    "Knowledge",
    "Label",
    "Relation",
    "TokenizedRelation",
    "answer_tokens",
    "build_domain",
    "reference_matrix",
    "unknown_words",
]
