"""Sampling of subjects from a tokenizer's vocabulary (paper, section 3.2: arbitrary strings)."""

from __future__ import annotations

import math
from collections.abc import Collection
from functools import lru_cache
from importlib.resources import files
from typing import TYPE_CHECKING, Literal
from unicodedata import category

import numpy as np

from lincorr_lightning.errors import ConfigError, SubjectsError, require

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SubjectKind = Literal["any", "words", "names"]

_BROKEN_CHARACTER = "\ufffd"
_WORDPIECE_MARK = "##"
_WORD_MARKS = ("Ġ", "▁")  # of byte-level BPE and of SentencePiece
# Control, invisible format, surrogate and private-use characters.
_UNUSABLE = frozenset({"Cc", "Cf", "Cs", "Co"})


def usable_strings(tokenizer: PreTrainedTokenizerBase, whole_words: bool = False) -> list[str]:
    """Return the strings of the vocabulary that can be a subject.

    Each id is decoded on its own and stripped. Special and added tokens are excluded, and strings
    that are empty or contain white space, a control character or an incomplete character.
    Duplicates are merged (" Paris" and "Paris" are one subject), and WordPiece's ``##`` is removed.

    With `whole_words`, they are strings of two or more letters whose token begins a word (" Paris",
    but not "ris"). The vocabulary does not say where a word ends: " Par" is one of them. They are
    in the order of their token ids.
    """
    left_out = frozenset(tokenizer.all_special_ids) | frozenset(tokenizer.added_tokens_decoder)
    return list(_decode_usable(tokenizer, len(tokenizer), left_out, whole_words))


# Decoding a large vocabulary takes seconds, and a run with several callbacks needs it often.
@lru_cache(maxsize=4)
def _decode_usable(
    tokenizer: PreTrainedTokenizerBase, n_tokens: int, left_out: frozenset[int], whole_words: bool
) -> tuple[str, ...]:
    del n_tokens  # part of the key: tokens may be added
    ids = sorted(set(tokenizer.get_vocab().values()).difference(left_out))
    # As an array, of which transformers need not test each element.
    rows = np.array(ids)[:, None]
    texts = tokenizer.batch_decode(rows, clean_up_tokenization_spaces=False)
    model = getattr(getattr(tokenizer, "backend_tokenizer", None), "model", None)
    is_wordpiece = type(model).__name__ == "WordPiece" or hasattr(tokenizer, "wordpiece_tokenizer")
    tokens = tokenizer.convert_ids_to_tokens(ids) if whole_words else texts
    marked = any(token.startswith(_WORD_MARKS) for token in tokens)
    strings: dict[str, None] = {}
    for text, token in zip(texts, tokens, strict=True):
        string = text.strip().removeprefix(_WORDPIECE_MARK if is_wordpiece else "")
        if whole_words:
            is_first = not (marked or token.startswith(_WORDPIECE_MARK))
            begins = token.startswith(_WORD_MARKS) or is_first
            if not (begins and len(string) > 1 and string.isalpha()):
                continue
        is_broken = _BROKEN_CHARACTER in string or not _UNUSABLE.isdisjoint(map(category, string))
        if len(string.split()) == 1 and not is_broken:
            strings[string] = None
    return tuple(strings)


def sample_subjects(
    tokenizer: PreTrainedTokenizerBase,
    n: int,
    words_per_subject: int = 1,
    seed: int = 0,
    kind: SubjectKind = "any",
) -> list[str]:
    """Sample subjects without replacement, reproducibly on every machine.

    The sample of a smaller `n` is a prefix of the sample of a larger one. A subject has
    `words_per_subject` strings of the vocabulary, joined by spaces: of the `kind` ``any``, as in
    the paper, or ``words``, see `usable_strings`; ``names`` are a given name and a family name,
    such as Emma Garcia, the same for every LM.
    """
    parts = _parts(tokenizer, words_per_subject, kind)
    available = _count(parts)
    if n > available:
        limit = f"the vocabulary has {available} subjects of {words_per_subject} string(s)"
        more = " or raise words_per_subject"
        if kind == "names":
            limit = f"there are {available} names"
            more = ""
        raise SubjectsError(f"n_subjects is {n}, but {limit}. Lower n_subjects{more}.")
    return _draw(parts, n, seed)


def _count(parts: list[list[str]]) -> int:
    return math.prod(map(len, parts))


def _draw(parts: list[list[str]], n: int, seed: int) -> list[str]:
    """Draw the first subjects of a Fisher-Yates shuffle of all combinations of the parts' strings.

    It uses PCG64's raw words: NumPy guarantees their stream across versions, not its samplers'.
    """
    population = _count(parts)
    bits = np.random.PCG64(seed)
    moved: dict[int, int] = {}
    subjects = []
    for first in range(n):
        chosen = first + _below(population - first, bits, -(-population.bit_length() // 64) or 1)
        index = moved.get(chosen, chosen)
        moved[chosen] = moved.pop(first, first)
        words = []
        for part in parts:
            index, word = divmod(index, len(part))
            words.append(part[word])
        subjects.append(" ".join(words))
    return subjects


def _parts(
    tokenizer: PreTrainedTokenizerBase, words_per_subject: int, kind: SubjectKind
) -> list[list[str]]:
    require("data.words_per_subject", words_per_subject, at_least=1)
    if kind == "names":
        if words_per_subject != 1:
            raise ConfigError(
                f"data.words_per_subject is {words_per_subject}, but data.subject_kind is names, "
                "which are a given name and a family name each. Leave it at 1."
            )
        text = (files(__package__) / "names.txt").read_text(encoding="utf-8")
        given_names, family_names = text.split("# family")
        return [given_names.split("# given")[1].split(), family_names.split()]
    return [usable_strings(tokenizer, kind == "words")] * words_per_subject


def sample_up_to(
    tokenizer: PreTrainedTokenizerBase,
    n: int,
    excluding: Collection[str] = (),
    seed: int = 0,
    kind: SubjectKind = "any",
    words_per_subject: int = 1,
) -> list[str]:
    """Sample up to n subjects as `sample_subjects` does, without those of `excluding`."""
    excluded = set(excluding)
    parts = _parts(tokenizer, words_per_subject, kind)
    sample = _draw(parts, min(n + len(excluded), _count(parts)), seed)
    return [subject for subject in sample if subject not in excluded][:n]


def _below(bound: int, bits: np.random.PCG64, n_words: int) -> int:
    """Return a uniform integer below a bound, by rejection sampling."""
    space = 1 << (64 * n_words)
    while True:
        value = 0
        for word in bits.random_raw(n_words).tolist():
            value = (value << 64) | word
        if value < space - space % bound:
            return value % bound
