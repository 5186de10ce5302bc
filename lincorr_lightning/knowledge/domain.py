"""Domains: the labels that stand for the answers of a kind of knowledge under a tokenizer.

A `TokenizedRelation` has those of its source and target, and the reference over the labels.

The rule is the paper's (appendix E): a label is the first token of an answer in running text, and
only if that token is not a part of a word. In scripts without spaces, where no space says what a
word is, that is a token of whole characters. Appendix K (table 18) compares labels by how
completely they say their answer.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from lincorr_lightning.errors import DomainError, KnowledgeError
from lincorr_lightning.knowledge.answer_tokens import (
    WHOLE_WORDS,
    Completeness,
    TokenReader,
    answer_tokens,
)
from lincorr_lightning.knowledge.catalogue import Catalogue
from lincorr_lightning.knowledge.schema import UNSPACED_LANGUAGES, Answer, Knowledge, Relation

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class Label:
    """A token that stands for one or more answers."""

    token_id: int
    text: str  #: Decoded token, unique within its domain.
    answers: tuple[Answer, ...]
    completeness: Completeness  #: How much the token says of the answer that it says most of.


@dataclass(frozen=True)
class Dropped:
    """An answer without a label: a reason such as ``unknown word``, and its decoded tokens."""

    answer: Answer
    reason: str
    tokens: tuple[str, ...]


@dataclass(frozen=True)
class Domain:
    """The labels of one kind of knowledge under one tokenizer, in the order of the answers."""

    knowledge: Knowledge
    labels: tuple[Label, ...]
    dropped: tuple[Dropped, ...]

    @property
    def token_ids(self) -> list[int]:
        """Token id of each label; all are different."""
        return [label.token_id for label in self.labels]

    @property
    def texts(self) -> list[str]:
        """Text of each label; all are different."""
        return [label.text for label in self.labels]

    @property
    def answer_texts(self) -> list[list[str]]:
        """Texts of the answers that each label stands for."""
        return [[answer.text for answer in label.answers] for label in self.labels]

    def places(self, names: Iterable[str]) -> list[int]:
        """Return the places of labels named by text, answer or English name, in the names' order.

        Names of no label are left out.
        """
        where: dict[str, int] = {}
        for i, label in enumerate(self.labels):
            for name in (label.text, *(x for a in label.answers for x in (a.text, a.identity))):
                where.setdefault(name, i)
        return list(dict.fromkeys(where[name] for name in names if name in where))

    @property
    def completeness(self) -> list[Completeness]:
        """How much each label says of its answer."""
        return [label.completeness for label in self.labels]

    @property
    def drop_reasons(self) -> str:
        """Number of dropped answers by reason, such as ``2 subword, 1 bare space``."""
        counts = Counter(dropped.reason for dropped in self.dropped).most_common()
        return ", ".join(f"{count} {reason}" for reason, count in counts)


def build_domain(
    knowledge: Knowledge,
    tokenizer: "PreTrainedTokenizerBase",
    keep: Collection[Completeness] = WHOLE_WORDS,
) -> Domain:
    """Return the domain of a kind of knowledge; a `DomainError` if it has no label."""
    domain = label_answers(knowledge, TokenReader(tokenizer), keep)
    if domain.labels:
        return domain
    name = getattr(tokenizer, "name_or_path", "") or type(tokenizer).__name__
    raise DomainError(
        f"knowledge {knowledge.name!r}: the tokenizer {name} leaves no label for its "
        f"{len(knowledge.answers)} answers; dropped: {domain.drop_reasons}. Leave this knowledge "
        "out, or take an LM whose vocabulary has whole words of the language "
        f"{knowledge.language!r}; `lincorr audit` shows what each tokenizer keeps."
    )


def label_answers(
    knowledge: Knowledge, reader: TokenReader, keep: Collection[Completeness] = WHOLE_WORDS
) -> Domain:
    """Return the domain of a kind of knowledge, even if it has no label."""
    tokens = dict(zip(knowledge.answers, answer_tokens(knowledge, reader.tokenizer), strict=True))
    unspaced = knowledge.language in UNSPACED_LANGUAGES and not knowledge.leading_space
    reasons: dict[Answer, str] = {}
    grades: dict[int, dict[Answer, Completeness]] = {}
    for answer, ids in tokens.items():
        grade = "merges with the prompt" if ids is None else reader.grade(answer, ids)
        if grade is Completeness.SUBWORD and unspaced and ids and reader.splits_words(ids):
            grade = Completeness.PHRASE
        if ids and isinstance(grade, Completeness):
            grades.setdefault(ids[0], {})[answer] = grade
        else:
            reasons[answer] = grade

    labels: dict[int, tuple[tuple[Answer, ...], Completeness]] = {}
    for token_id, members in grades.items():
        best = min(members.values(), key=list(Completeness).index)
        # A word that merely begins with the letters of a label (" Man" of Manchester) is not meant
        # by it, so labels of whole words do not depend on whether subwords are kept.
        kept = tuple(
            answer
            for answer, grade in members.items()
            if best in keep and (grade is not Completeness.SUBWORD or best is Completeness.SUBWORD)
        )
        reasons |= {answer: str(grade) for answer, grade in members.items() if answer not in kept}
        if kept:
            labels[token_id] = kept, best

    texts = reader.unique_texts(list(labels))
    labelled = [
        Label(token_id, text, *answers_and_grade)
        for text, (token_id, answers_and_grade) in zip(texts, labels.items(), strict=True)
    ]
    dropped = [
        Dropped(answer, reasons[answer], tuple(map(reader.piece, ids or ())))
        for answer, ids in tokens.items()
        if answer in reasons
    ]
    return Domain(knowledge, tuple(labelled), tuple(dropped))


def reference_matrix(relation: Relation, source: Domain, target: Domain) -> npt.NDArray[np.bool_]:
    """Return which target labels are right, or stand for several answers of which one is.

    It is ``(n_target_labels, n_source_labels)`` like W; a column without True has no reference.
    """
    rows: dict[str, list[int]] = {}
    for row, label in enumerate(target.labels):
        for answer in label.answers:
            rows.setdefault(answer.identity, []).append(row)
    facts = relation.reference or {}
    matrix = np.zeros((len(target.labels), len(source.labels)), dtype=np.bool_)
    for column, label in enumerate(source.labels):
        for answer in label.answers:
            for fact in facts.get(answer.identity, ()):
                matrix[rows.get(fact, []), column] = True
    return matrix


@dataclass(frozen=True)
class TokenizedRelation:
    """A relation with the domains of its source and target under one tokenizer."""

    relation: Relation
    source: Domain
    target: Domain
    reference_mask: npt.NDArray[np.bool_]  #: The `reference_matrix`.

    @classmethod
    def of(
        cls,
        name: str,
        catalogue: Catalogue,
        tokenizer: "PreTrainedTokenizerBase",
        subwords: bool = False,
    ) -> "TokenizedRelation":
        """Look up a relation, such as ``city->country``, and tokenize its answers.

        With `subwords`, beginnings of words are labels of the target, too.
        """
        relation = catalogue.relation(name)
        source = build_domain(relation.source, tokenizer)
        keep = tuple(Completeness) if subwords else WHOLE_WORDS
        target = build_domain(relation.target, tokenizer, keep)
        return cls(relation, source, target, reference_matrix(relation, source, target))

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
