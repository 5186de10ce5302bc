"""Tokenize answers in running text, and grade how much of an answer its first token says."""

from collections import Counter
from collections.abc import Callable
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from lincorr_lightning.knowledge.schema import Answer, Knowledge

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_SUBJECT = "X"  # any subject will do to tokenize answers in context
_SENTENCEPIECE_SPACE = "▁"
_BROKEN_CHARACTER = "\ufffd"


class Completeness(StrEnum):
    """How much of its answer a label says (paper, appendix K)."""

    WHOLE = "whole"  #: The token is the whole answer, such as " China".
    PHRASE = "phrase"
    """The token is the first word of a longer answer, " South" for South Korea, or, in a script
    without spaces, its first characters: 洛 for 洛杉矶."""
    SUBWORD = "subword"  #: The token is the beginning of a word, such as " Br" for Brunei.


WHOLE_WORDS = (Completeness.WHOLE, Completeness.PHRASE)  #: Labels of the paper (appendix E).


def answer_tokens(
    knowledge: Knowledge, tokenizer: "PreTrainedTokenizerBase"
) -> list[list[int] | None]:
    """Tokenize the answers of a prompt in running text.

    Tokenized without the prompt, an answer would give "South" instead of " South" with one
    tokenizer, and a token that never follows a word with another; in context, each tokenizer does
    what it does for the LM. The exception are scripts without spaces, where one token may cover the
    end of the prompt and the answer (是中国 in Qwen's vocabulary): the answer is then tokenized by
    itself, because the LM continues after 是. Returns the token ids of each answer, in order; None
    if its first token overlaps the prompt.
    """
    prompt = knowledge.prompt(_SUBJECT)
    gap = " " if knowledge.leading_space else ""
    texts = [prompt, *(f"{prompt}{gap}{answer.text}" for answer in knowledge.answers)]
    options: Any = {"add_special_tokens": False, "return_attention_mask": False}
    head, *rows = tokenizer(texts, **options)["input_ids"]
    tokens: list[list[int] | None] = []
    for answer, text, ids in zip(knowledge.answers, texts[1:], rows, strict=True):
        after_prompt = None
        if ids[: len(head)] == head:
            after_prompt = ids[len(head) :]
        elif tokenizer.is_fast:  # offsets take time, and few answers need them
            offsets = tokenizer(text, return_offsets_mapping=True, **options)["offset_mapping"]
            at = next((i for i, (_, stop) in enumerate(offsets) if stop > len(prompt)), len(ids))
            if ids[at:] and len(prompt) <= offsets[at][0] <= len(prompt + gap):
                after_prompt = ids[at:]
        if not (after_prompt or gap):
            after_prompt = _tokens_alone(head, answer.text, tokenizer)
        tokens.append(after_prompt)
    return tokens


def _tokens_alone(
    head: list[int], text: str, tokenizer: "PreTrainedTokenizerBase"
) -> list[int] | None:
    """Return the tokens of an answer by itself, if they continue the prompt without a space."""
    ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    whole, start = (
        str(tokenizer.decode(part, clean_up_tokenization_spaces=False))
        for part in (head + ids, head)
    )
    return ids if whole == start + text else None


def unknown_words(knowledge: Knowledge, tokenizer: "PreTrainedTokenizerBase") -> list[str]:
    """Return the words of a prompt that a tokenizer has no token for.

    Only tokenizers with a token for unknown words (word-level, WordPiece) have any. An LM cannot
    be prompted with words that it has never seen.
    """
    unknown = tokenizer.unk_token_id
    words = knowledge.template.replace("{}", " ").split()
    if unknown is None or not words:  # of none, a tokenizer raises
        return []
    encoded = tokenizer(words, add_special_tokens=False, return_attention_mask=False)
    return [w for w, ids in zip(words, encoded["input_ids"], strict=True) if unknown in ids]


class TokenReader:
    """Decodes single tokens, and grades what they say of an answer; to be made once."""

    def __init__(self, tokenizer: "PreTrainedTokenizerBase") -> None:
        self.tokenizer = tokenizer
        self._special = frozenset(tokenizer.all_special_ids) | {
            token_id for token_id, token in tokenizer.added_tokens_decoder.items() if token.special
        }
        self._normalize = _normalizer(tokenizer)
        self._unknown = tokenizer.unk_token_id
        self._pieces: dict[int, str] = {}  # answers have many tokens in common

    def piece(self, token_id: int) -> str:
        """Decode one token, without surrounding space."""
        if token_id not in self._pieces:
            text = str(self.tokenizer.decode([token_id], clean_up_tokenization_spaces=False))
            self._pieces[token_id] = text.replace(_SENTENCEPIECE_SPACE, " ").strip()
        return self._pieces[token_id]

    def splits_words(self, ids: list[int]) -> bool:
        """Return whether tokens of a script without spaces can be the parts of a word.

        Not those of a word-level vocabulary, unknown ones, or Latin letters of a word (Spotify).
        """
        if any(character.isascii() for character in self.piece(ids[0])):
            return False
        backend = getattr(self.tokenizer, "backend_tokenizer", None)
        word_level = type(getattr(backend, "model", None)).__name__ == "WordLevel"
        return not word_level and self._unknown not in ids

    def grade(self, answer: Answer, ids: list[int]) -> Completeness | str:
        """Return how much of the answer its first token says, or why it cannot be a label."""
        if not ids or ids[0] == self._unknown:
            return "unknown word"
        if ids[0] in self._special:
            return "special token"
        text = self.piece(ids[0])
        if not text:
            # The tokenizer splits the space off, so every such answer begins with the same token.
            return "unknown word" if self._unknown in ids else "bare space"
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

    def spelling(self, token_id: int) -> str:
        """Return the text of a token with its spelling in the vocabulary and its id."""
        spelled = self.tokenizer.convert_ids_to_tokens(token_id)
        return f"{self.piece(token_id)} [{spelled} {token_id}]"

    def unique_texts(self, token_ids: list[int]) -> list[str]:
        """Return the text of each token, with its spelling where tokens read alike."""
        counts = Counter(map(self.piece, token_ids))
        return [self.spelling(i) if counts[self.piece(i)] > 1 else self.piece(i) for i in token_ids]


def _normalizer(tokenizer: "PreTrainedTokenizerBase") -> Callable[[str], str]:
    normalizer = getattr(getattr(tokenizer, "backend_tokenizer", None), "normalizer", None)
    if normalizer is None:
        return str.lower if getattr(tokenizer, "do_lower_case", False) else str
    return lambda text: normalizer.normalize_str(text).replace(_SENTENCEPIECE_SPACE, " ").strip()
