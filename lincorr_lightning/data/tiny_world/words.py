"""Words of the tiny world, and its word-level tokenizer."""

import re
from collections.abc import Collection, Iterable

from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

PAD, UNKNOWN, END = "<pad>", "<unk>", "<eos>"

# Scripts without spaces between words: a run of their letters is not one word.
_UNSPACED = "\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff"
_LETTER = rf"(?:(?![{_UNSPACED}])[^\W\d_])"
_LETTERS = f"{_LETTER}+"
_WORD = rf"[’']s(?!{_LETTER})|\d+|{_LETTERS}(?:-{_LETTERS})*|[^\s]"


def words_of(text: str, unspaced_words: Collection[str] = ()) -> list[str]:
    """Split text as the tokenizer does.

    A word is a run of letters (with inner hyphens), a number, the possessive ’s, or one character.
    In scripts without spaces only `unspaced_words` have several characters.
    """
    return re.findall(_pattern(unspaced_words), text)


def is_unspaced(text: str) -> bool:
    """Return whether a text is in a script without spaces between words."""
    return re.search(f"[{_UNSPACED}]", text) is not None


def first_word(text: str) -> str:
    """Return the first word of an answer; in a script without spaces, everything up to a space."""
    whole = text.split()[0]
    return whole if is_unspaced(whole) else words_of(whole)[0]


def build_tokenizer(
    words: Iterable[str], unspaced_words: Collection[str] = ()
) -> PreTrainedTokenizerFast:
    """Build a word-level tokenizer that knows some words, in their order.

    No token is added at the beginning of a text, so that a subject is always the first token.
    """
    tokens = dict.fromkeys((PAD, UNKNOWN, END, *words))
    vocabulary = {token: index for index, token in enumerate(tokens)}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token=UNKNOWN))
    backend.pre_tokenizer = pre_tokenizers.Split(
        Regex(_pattern(unspaced_words)), behavior="removed", invert=True
    )
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=backend,
        pad_token=PAD,
        unk_token=UNKNOWN,
        eos_token=END,
        padding_side="left",
    )


def _pattern(unspaced_words: Collection[str]) -> str:
    longest_first = sorted(unspaced_words, key=lambda word: (-len(word), word))
    return "|".join([*map(re.escape, longest_first), _WORD])
