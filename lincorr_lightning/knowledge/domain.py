"""From answers to labels: which token of any tokenizer stands for which answer.

The rule is the paper's (appendix E): an answer is represented by its first token in running text,
and only if that token is a whole word. Which of the labels mean their answer completely is what
appendix K (table 18) compares.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from lincorr_lightning.errors import DomainError, KnowledgeError
from lincorr_lightning.knowledge.schema import Answer, Knowledge, Relation

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_SUBJECT = "X"  # stands for the subject while answers are read in context
_SENTENCEPIECE_SPACE = "▁"
_BROKEN_CHARACTER = "\ufffd"


class Completeness(StrEnum):
    """How much of its answer a label's token says (paper, appendix K)."""

    WHOLE = "whole"
    """The token is all of an answer: " China"."""
    PHRASE = "phrase"
    """The token is a whole word of a longer answer: " South" of South Korea."""
    SUBWORD = "subword"
    """The token is the beginning of a word: " Br" of Brunei."""


WHOLE_WORDS = (Completeness.WHOLE, Completeness.PHRASE)
"""What the paper takes for labels (appendix E)."""


@dataclass(frozen=True)
class Label:
    """A token that stands for one or more answers.

    Attributes:
        token_id: Row of the LM head.
        text: The token as people read it, unique within its domain.
        answers: The answers that begin with this token, in the knowledge's order.
        completeness: How much the token says of the answer it says most of.
    """

    token_id: int
    text: str
    answers: tuple[Answer, ...]
    completeness: Completeness


@dataclass(frozen=True)
class Dropped:
    """An answer that no label stands for.

    Attributes:
        answer: The answer.
        reason: In a few words, such as `subword` or `unknown word`.
        tokens: The answer's tokens as people read them.
    """

    answer: Answer
    reason: str
    tokens: tuple[str, ...]


@dataclass(frozen=True)
class Domain:
    """The labels of one knowledge under one tokenizer.

    Attributes:
        knowledge: The knowledge.
        labels: In the order of the knowledge's answers.
        dropped: The answers without a label, in the same order.
    """

    knowledge: Knowledge
    labels: tuple[Label, ...]
    dropped: tuple[Dropped, ...]

    @property
    def token_ids(self) -> list[int]:
        """The token id of each label, each once."""
        return [label.token_id for label in self.labels]

    @property
    def texts(self) -> list[str]:
        """The text of each label, each once."""
        return [label.text for label in self.labels]

    @property
    def completeness(self) -> list[Completeness]:
        """How much each label says of its answer."""
        return [label.completeness for label in self.labels]

    @property
    def n_merged(self) -> int:
        """How many answers share the label of an earlier one."""
        return sum(len(label.answers) - 1 for label in self.labels)


def build_domain(
    knowledge: Knowledge,
    tokenizer: PreTrainedTokenizerBase,
    keep: Collection[Completeness] = WHOLE_WORDS,
) -> Domain:
    """Find the labels that stand for a knowledge's answers.

    Args:
        knowledge: The knowledge.
        tokenizer: Any Hugging Face tokenizer.
        keep: Which labels to keep. The paper keeps whole words: `WHOLE` and `PHRASE`.

    Returns:
        The labels and, with reasons, the answers that got none.

    Raises:
        DomainError: No label is left; the message counts the reasons.

    Example:
        >>> from tokenizers import Tokenizer, models, pre_tokenizers
        >>> from transformers import PreTrainedTokenizerFast
        >>> words = models.WordLevel({"[UNK]": 0, "South": 1, "France": 2}, unk_token="[UNK]")
        >>> backend = Tokenizer(words)
        >>> backend.pre_tokenizer = pre_tokenizers.Whitespace()
        >>> tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="[UNK]")
        >>> answers = tuple(Answer(name, name) for name in ("France", "South Korea", "Brunei"))
        >>> country = Knowledge("country", "attribute", "en", "{} is in", "country", answers)
        >>> domain = build_domain(country, tokenizer)
        >>> [(label.text, str(label.completeness)) for label in domain.labels]
        [('France', 'whole'), ('South', 'phrase')]
        >>> [(dropped.answer.text, dropped.reason) for dropped in domain.dropped]
        [('Brunei', 'unknown word')]
    """
    domain = sort_answers(knowledge, tokenizer, keep)
    if domain.labels:
        return domain
    reasons = Counter(dropped.reason for dropped in domain.dropped)
    counts = ", ".join(f"{count} {reason}" for reason, count in reasons.most_common())
    name = getattr(tokenizer, "name_or_path", "") or type(tokenizer).__name__
    raise DomainError(
        f"knowledge {knowledge.name!r}: the tokenizer {name} leaves no label for its "
        f"{len(knowledge.answers)} answers; dropped: {counts}. Leave this knowledge out, or take "
        f"an LM whose vocabulary has whole words of the language {knowledge.language!r}; "
        "`lincorr audit` shows what each tokenizer keeps."
    )


def sort_answers(
    knowledge: Knowledge,
    tokenizer: PreTrainedTokenizerBase,
    keep: Collection[Completeness] = WHOLE_WORDS,
    reader: TokenReader | None = None,
) -> Domain:
    """Do what `build_domain` does, but return a domain without labels too, for an audit.

    Args:
        knowledge: The knowledge.
        tokenizer: Any Hugging Face tokenizer.
        keep: Which labels to keep.
        reader: The tokenizer's reader, where one serves many knowledges: a vocabulary may have
            thousands of special tokens to collect.
    """
    kept_grades = frozenset(Completeness(grade) for grade in keep)
    reader = reader or TokenReader(tokenizer)
    graded: dict[int, list[tuple[Answer, Completeness]]] = {}
    refused: dict[Answer, tuple[str, list[int]]] = {}
    tokens = dict(zip(knowledge.answers, answer_tokens(knowledge, tokenizer), strict=True))
    for answer, ids in tokens.items():
        verdict = "merges with the prompt" if ids is None else reader.judge(answer, ids)
        if isinstance(verdict, Completeness):
            assert ids  # only a first token can be judged complete
            graded.setdefault(ids[0], []).append((answer, verdict))
        else:
            refused[answer] = (verdict, ids or [])

    labels: list[tuple[int, tuple[Answer, ...], Completeness]] = []
    for token_id, members in graded.items():
        best = min((grade for _, grade in members), key=list(Completeness).index)
        kept = []
        for answer, grade in members:
            # A word that merely begins with the letters of a label (" Man" of Manchester) is not
            # meant by it: labels of whole words are the same whether subwords are kept or not.
            strays = grade is Completeness.SUBWORD and best is not Completeness.SUBWORD
            if best in kept_grades and not strays:
                kept.append(answer)
            else:
                refused[answer] = (str(grade), tokens[answer] or [])
        if kept:
            labels.append((token_id, tuple(kept), best))

    texts = reader.unique_texts([token_id for token_id, _, _ in labels])
    return Domain(
        knowledge=knowledge,
        labels=tuple(
            Label(token_id, text, answers, grade)
            for text, (token_id, answers, grade) in zip(texts, labels, strict=True)
        ),
        dropped=tuple(
            Dropped(answer, refused[answer][0], tuple(map(reader.piece, refused[answer][1])))
            for answer in tokens
            if answer in refused
        ),
    )


def unknown_words(knowledge: Knowledge, tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Words of a knowledge's prompt that a tokenizer has no token for.

    An LM cannot be asked in words that it has never seen; only tokenizers with a token for
    unknown words (word-level, WordPiece) have any.

    Args:
        knowledge: The knowledge.
        tokenizer: Any Hugging Face tokenizer.
    """
    unknown = tokenizer.unk_token_id
    words = knowledge.template.replace("{}", " ").split()
    if unknown is None:
        return []
    encoded = tokenizer(words, add_special_tokens=False, return_attention_mask=False)
    return [w for w, ids in zip(words, encoded["input_ids"], strict=True) if unknown in ids]


def reference_matrix(relation: Relation, source: Domain, target: Domain) -> npt.NDArray[np.bool_]:
    """Lay a relation's reference out over labels.

    A label that stands for several answers is right where any of them is.

    Args:
        relation: A relation with a reference.
        source: The source's domain, n_source_labels.
        target: The target's domain, n_target_labels.

    Returns:
        True where the target label is a right answer to the source label, shape
        `(n_target_labels, n_source_labels)`, laid out like W. A column without a True has no
        reference among the labels.

    Raises:
        KnowledgeError: The relation has no reference, or the domains belong to other knowledges.
    """
    if relation.reference is None:
        raise KnowledgeError(
            f"relation {relation.name!r} has no reference, so that precision cannot be judged; add "
            f"facts of kind {relation.target.kind!r} to the entities of kind "
            f"{relation.source.kind!r} in a knowledge file, or do not ask for precision"
        )
    for side, domain in ((relation.source, source), (relation.target, target)):
        if side.name != domain.knowledge.name:
            raise KnowledgeError(
                f"relation {relation.name!r} needs the domain of {side.name!r}, "
                f"not that of {domain.knowledge.name!r}"
            )
    rows: dict[str, list[int]] = {}
    for row, label in enumerate(target.labels):
        for answer in label.answers:
            rows.setdefault(answer.identity, []).append(row)
    matrix = np.zeros((len(target.labels), len(source.labels)), dtype=np.bool_)
    for column, label in enumerate(source.labels):
        for answer in label.answers:
            for right in relation.reference.get(answer.identity, ()):
                matrix[rows.get(right, []), column] = True
    return matrix


def answer_tokens(
    knowledge: Knowledge, tokenizer: PreTrainedTokenizerBase
) -> list[list[int] | None]:
    """Tokenize a knowledge's answers in running text.

    Args:
        knowledge: The knowledge.
        tokenizer: Any Hugging Face tokenizer.

    Returns:
        The tokens of each answer, in their order; None where the first one reaches into the prompt.

    Text and answer tokenized apart would give "South" instead of " South" with one tokenizer and
    a word that never begins a sentence with another; in context every tokenizer shows what it
    does. Only where a script without spaces makes one token of the prompt's end and the answer
    (Qwen's 是中国) is the answer taken by itself: the LM is asked after 是, and goes on from there.
    """
    prompt = knowledge.prompt(_SUBJECT)
    gap = " " if knowledge.leading_space else ""
    encoded = tokenizer(
        [prompt, *(f"{prompt}{gap}{answer.text}" for answer in knowledge.answers)],
        add_special_tokens=False,
        return_attention_mask=False,
        return_offsets_mapping=tokenizer.is_fast,
    )
    head, *rows = encoded["input_ids"]
    _, *spans = encoded["offset_mapping"] if tokenizer.is_fast else [None] * (len(rows) + 1)
    found: list[list[int] | None] = []
    for ids, offsets in zip(rows, spans, strict=True):
        if ids[: len(head)] == head:
            found.append(ids[len(head) :])
        else:
            start = _first_after(offsets, len(prompt), len(gap)) if offsets else None
            found.append(None if start is None else ids[start:])
    if not gap:
        for index, answer in enumerate(knowledge.answers):
            found[index] = found[index] or _after_boundary(head, answer.text, tokenizer)
    return found


def _after_boundary(
    head: list[int], text: str, tokenizer: PreTrainedTokenizerBase
) -> list[int] | None:
    """Tokens of an answer by itself, if they read on from the prompt without a space."""
    ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    whole, start = (
        str(tokenizer.decode(part, clean_up_tokenization_spaces=False))
        for part in (head + ids, head)
    )
    return ids if whole == start + text else None


def _first_after(offsets: list[tuple[int, int]], end: int, gap: int) -> int | None:
    """Index of the token that begins where the prompt ends, if one does."""
    for index, (start, stop) in enumerate(offsets):
        if stop > end:
            return index if end <= start <= end + gap else None
    return None


class TokenReader:
    """Reads single tokens of one tokenizer as people would."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._special = frozenset(tokenizer.all_special_ids) | {
            token_id for token_id, token in tokenizer.added_tokens_decoder.items() if token.special
        }
        self._normalize = _normalizer(tokenizer)
        self._pieces: dict[int, str] = {}

    def piece(self, token_id: int) -> str:
        """The token decoded on its own, without space around it."""
        if token_id not in self._pieces:
            text = str(self._tokenizer.decode([token_id], clean_up_tokenization_spaces=False))
            self._pieces[token_id] = text.replace(_SENTENCEPIECE_SPACE, " ").strip()
        return self._pieces[token_id]

    def judge(self, answer: Answer, ids: list[int]) -> Completeness | str:
        """Say how much of the answer its first token says, or why it can say nothing."""
        unknown = self._tokenizer.unk_token_id
        if not ids or ids[0] == unknown:
            return "unknown word"
        if ids[0] in self._special:
            return "special token"
        text = self.piece(ids[0])
        if not text:
            # The tokenizer sets the space apart: it begins every such answer and tells none.
            return "unknown word" if unknown in ids else "bare space"
        if _BROKEN_CHARACTER in text:
            return "part of a character"
        word = answer.text.split()[0]
        if text == answer.text or text == self._normalize(answer.text):
            return Completeness.WHOLE
        if text == word or text == self._normalize(word):
            return Completeness.PHRASE
        if word.startswith(text) or self._normalize(word).startswith(text):
            return Completeness.SUBWORD
        return "reads otherwise"

    def unique_texts(self, token_ids: list[int]) -> list[str]:
        """The text of each token; where two read alike, the vocabulary's spelling as well."""
        counts = Counter(self.piece(token_id) for token_id in token_ids)
        texts = []
        for token_id in token_ids:
            text = self.piece(token_id)
            if counts[text] > 1:
                text = f"{text} [{self._tokenizer.convert_ids_to_tokens(token_id)} {token_id}]"
            texts.append(text)
        return texts


def _normalizer(tokenizer: PreTrainedTokenizerBase) -> Callable[[str], str]:
    """What the tokenizer does to letters before it looks them up, such as lower-casing."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    normalizer = getattr(backend, "normalizer", None)
    if normalizer is not None:
        return lambda text: str(
            normalizer.normalize_str(text).replace(_SENTENCEPIECE_SPACE, " ").strip()
        )
    if getattr(tokenizer, "do_lower_case", False):
        return str.lower
    return str
