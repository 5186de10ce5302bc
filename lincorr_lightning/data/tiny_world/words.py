"""Words of the tiny world: its word-level tokenizer, its plain answers and its invented names."""

import re
from collections.abc import Collection, Iterable, Sequence
from importlib.resources import files

import numpy as np
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from lincorr_lightning.io import load_yaml
from lincorr_lightning.knowledge import Knowledge

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

    No token is added at the beginning of a text, so
    that a subject is always the first token.
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


MAY_SHARE = {"color": {"flower", "food", "drink"}}
"""Kinds of knowledge that may share a word with others: without it there would be no orange.

Of the other kinds only answers that answer nothing else are taken, so that no correlation arises
from a token that two domains share."""


class PlainWords:
    """Answers that a word-level LM can give as one token with one meaning.

    `knowledge` is everything that is stated, in all languages. An answer is plain if it is plain in
    each of the languages of its kind.
    """

    def __init__(self, knowledge: Sequence[Knowledge]) -> None:
        self._knowledge = {one.name: one for one in knowledge}
        self._kinds: dict[str, set[str]] = {}
        self._identities: dict[tuple[str, str], set[str]] = {}
        self.of_prompts: set[str] = set()
        self.all: set[str] = set()
        for one in knowledge:
            self.of_prompts.update(words_of(one.prompt("X")))
            for answer in one.answers:
                word = first_word(answer.text)
                self.all.update(words_of(answer.text))
                self._kinds.setdefault(word, set()).add(one.kind)
                self._identities.setdefault((one.name, word), set()).add(answer.identity)
        self.all |= self.of_prompts

    def pick(
        self, name: str, n: int | None = None, used: Collection[str] = (), *, phrases: bool = False
    ) -> list[str]:
        """Return identities of plain answers, at most n, in the order of the domain.

        Answers among the words that are `used` anyway come first and are all included, plain or
        not: they become labels, and should be somebody's answer. `phrases` may have several words.
        """
        knowledge = self._knowledge[name]
        texts = {identity: answer.text for identity, answer in knowledge.canonical.items()}
        known = [identity for identity, text in texts.items() if text in used]
        alike = [(k, k.canonical) for k in self._knowledge.values() if k.kind == knowledge.kind]
        plain = [
            identity
            for identity, text in texts.items()
            if text not in used
            and self._is_plain(knowledge, text, phrases)
            and all(
                identity in answers and self._is_plain(other, answers[identity].text, phrases=True)
                for other, answers in alike
            )
        ]
        return known + plain[: None if n is None else max(n - len(known), 0)]

    def meanings(self, word: str) -> dict[str, set[str]]:
        """Return attribute -> identities that a word is an answer of, in any language."""
        members: dict[str, set[str]] = {}
        for name, knowledge in self._knowledge.items():
            if alike := self._identities.get((name, word)):
                attribute = name.removesuffix(f"_{knowledge.language}")
                members.setdefault(attribute, set()).update(alike)
        return members

    def _is_plain(self, knowledge: Knowledge, text: str, phrases: bool) -> bool:
        word = first_word(text)
        others = self._kinds[word] - {knowledge.kind} - MAY_SHARE.get(knowledge.kind, set())
        # Two answers with the same first word would be one label.
        alike = self._identities[knowledge.name, word]
        whole = phrases or is_unspaced(text) or words_of(text) == [word]
        return not others and word not in self.of_prompts and len(alike) == 1 and whole


def invent_names(n: int, rng: np.random.Generator, taken: Collection[str] = ()) -> list[str]:
    """Draw n different names of one word, such as "Draeloth", that are not among those taken."""
    parts = load_yaml(files(__package__).joinpath("syllables.yaml").read_text("utf-8"))

    def draw(kind: str) -> str:
        return str(parts[kind][rng.integers(len(parts[kind]))])

    refused = {word.casefold() for word in taken}
    names: list[str] = []
    while len(names) < n:
        syllables = [draw("onsets") + draw("vowels") for _ in range(int(rng.integers(2, 4)))]
        name = "".join(syllables) + draw("codas")
        if name not in refused:
            refused.add(name)
            names.append(name.capitalize())
    return names
