"""Sampling of subjects from a tokenizer's vocabulary (paper, section 3.2: arbitrary strings)."""

from __future__ import annotations

import unicodedata
from collections.abc import Collection, Iterator
from typing import TYPE_CHECKING

import numpy as np

from lincorr_lightning.errors import SubjectsError, require

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MIN_FITTED = 10
"""Subjects below which no map is fitted."""

_BROKEN_CHARACTER = "\ufffd"
_WORDPIECE_MARK = "##"
# Control, invisible format, surrogate and private-use characters.
_UNUSABLE = frozenset({"Cc", "Cf", "Cs", "Co"})


def usable_strings(tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Return the strings of the vocabulary that can be a subject.

    Each id is decoded on its own and stripped. Special and added tokens are excluded, and strings
    that are empty or contain white space, a control character or an incomplete character.
    Duplicates are merged (" Paris" and "Paris" are one subject), and WordPiece's ``##`` is removed.

    Args:
        tokenizer: Any Hugging Face tokenizer.

    Returns:
        Distinct strings in the order of their token ids.
    """
    left_out = set(tokenizer.all_special_ids) | set(tokenizer.added_tokens_decoder)
    ids = sorted(set(tokenizer.get_vocab().values()) - left_out)
    texts = tokenizer.batch_decode([[i] for i in ids], clean_up_tokenization_spaces=False)
    is_wordpiece = _is_wordpiece(tokenizer)
    strings: dict[str, None] = {}
    for text in texts:
        string = text.strip()
        if is_wordpiece:
            string = string.removeprefix(_WORDPIECE_MARK)
        if _is_usable(string):
            strings[string] = None
    return list(strings)


def _is_wordpiece(tokenizer: PreTrainedTokenizerBase) -> bool:
    model = getattr(getattr(tokenizer, "backend_tokenizer", None), "model", None)
    return type(model).__name__ == "WordPiece" or hasattr(tokenizer, "wordpiece_tokenizer")


def _is_usable(string: str) -> bool:
    return (
        len(string.split()) == 1
        and _BROKEN_CHARACTER not in string
        and _UNUSABLE.isdisjoint(map(unicodedata.category, string))
    )


def sample_subjects(
    tokenizer: PreTrainedTokenizerBase, n: int, words_per_subject: int = 1, seed: int = 0
) -> list[str]:
    """Sample subjects without replacement, reproducibly on every machine.

    The sample of a smaller `n` is a prefix of the sample of a larger one.

    Args:
        tokenizer: Tokenizer whose vocabulary is sampled.
        n: Number of subjects.
        words_per_subject: Number of vocabulary strings of a subject, joined by spaces.
        seed: Seed of the sample.

    Returns:
        `n` distinct strings.

    Raises:
        SubjectsError: The vocabulary has fewer subjects.
        ConfigError: `words_per_subject` is below 1.
    """
    require("data.words_per_subject", words_per_subject, at_least=1)
    strings = usable_strings(tokenizer)
    available = len(strings) ** words_per_subject
    if n > available:
        raise SubjectsError(
            f"n_subjects is {n}, but the vocabulary has {available} subjects of "
            f"{words_per_subject} string(s). Lower n_subjects or raise words_per_subject."
        )
    # The digits of an index in a number system with a digit for each string.
    scales = [len(strings) ** i for i in range(words_per_subject)]
    return [
        " ".join(strings[index // scale % len(strings)] for scale in scales)
        for index in _sample(available, n, seed)
    ]


def sample_up_to(
    tokenizer: PreTrainedTokenizerBase, n: int, excluding: Collection[str] = (), seed: int = 0
) -> list[str]:
    """Sample n subjects without some, or fewer if the vocabulary has fewer.

    Args:
        tokenizer: Tokenizer whose vocabulary is sampled.
        n: Number of subjects.
        excluding: Subjects that a linear map is used on, and so must not be fitted on.
        seed: Seed of the sample.

    Raises:
        SubjectsError: Fewer than `MIN_FITTED` subjects are left.
    """
    excluded = set(excluding)
    n_sampled = min(n + len(excluded), len(usable_strings(tokenizer)))
    sample = sample_subjects(tokenizer, n_sampled, seed=seed)
    others = [subject for subject in sample if subject not in excluded][:n]
    if excluded and len(others) < MIN_FITTED:
        raise SubjectsError(
            f"a linear map is fitted on other subjects than the {len(excluded)} that it is used "
            f"on, and the vocabulary has {len(others)} others; it needs {MIN_FITTED}. Use fewer "
            "subjects or edits, or name a linear map that is fitted already."
        )
    return others


def _sample(population: int, n: int, seed: int) -> Iterator[int]:
    """Yield the first `n` members of a Fisher-Yates shuffle of ``range(population)``.

    It uses PCG64's raw words: NumPy guarantees their stream across versions, and not that of its
    samplers.
    """
    bits = np.random.PCG64(seed)
    n_words = -(-population.bit_length() // 64) or 1
    moved: dict[int, int] = {}
    for first in range(n):
        chosen = first + _below(population - first, bits, n_words)
        yield moved.get(chosen, chosen)
        moved[chosen] = moved.pop(first, first)


def _below(bound: int, bits: np.random.PCG64, n_words: int) -> int:
    """Return a uniform integer below a bound, by rejection sampling."""
    space = 1 << (64 * n_words)
    limit = space - space % bound
    while True:
        value = 0
        for word in bits.random_raw(n_words).tolist():
            value = (value << 64) | word
        if value < limit:
            return value % bound
