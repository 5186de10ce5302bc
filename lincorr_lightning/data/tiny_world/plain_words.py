"""Answers that a word-level LM can give without ambiguity."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from lincorr_lightning.data.tiny_world.word_tokenizer import first_word, is_unspaced, words_of
from lincorr_lightning.knowledge import Knowledge

MAY_SHARE = {"color": {"flower", "food", "drink"}}
"""Kinds of knowledge that may share a word with others: without it there would be no orange.

Of the other kinds only answers that answer nothing else are taken, so that no correlation arises
from a token that two domains share."""


class PlainWords:
    """Answers that a word-level LM can give as one token with one meaning.

    Args:
        knowledge: Everything that is stated, in all languages. An answer is plain if it is plain in
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
                alike = self._identities.setdefault((one.name, word), set())
                alike.add(answer.identity)
        self.all |= self.of_prompts

    def pick(
        self, name: str, n: int | None = None, used: Collection[str] = (), *, phrases: bool = False
    ) -> list[str]:
        """Return identities of plain answers, in the order of the domain.

        Args:
            name: Name of the knowledge.
            n: Largest number of answers; None for all.
            used: Words that the world has anyway. Answers that are among them come first and are
                all included, plain or not: they become labels, and should be somebody's answer.
            phrases: Whether answers of several words are included.
        """
        knowledge = self._knowledge[name]
        spoken = {k.language: k for k in self._knowledge.values() if k.kind == knowledge.kind}
        names = {language: _first_names(k) for language, k in spoken.items()}
        own = names[knowledge.language]
        known = [identity for identity, text in own.items() if text in used]
        plain = [
            identity
            for identity, text in own.items()
            if text not in used
            and self._is_plain(knowledge, text, phrases)
            and all(
                identity in names[language]
                and self._is_plain(other, names[language][identity], phrases=True)
                for language, other in spoken.items()
            )
        ]
        missing = None if n is None else max(n - len(known), 0)
        return known + plain[:missing]

    def meanings(self, word: str) -> dict[str, set[str]]:
        """Return attribute -> identities that a word is an answer of, in any language."""
        found: dict[str, set[str]] = {}
        for name, knowledge in self._knowledge.items():
            if alike := self._identities.get((name, word)):
                attribute = name.removesuffix(f"_{knowledge.language}")
                found.setdefault(attribute, set()).update(alike)
        return found

    def _is_plain(self, knowledge: Knowledge, text: str, phrases: bool) -> bool:
        word = first_word(text)
        others = self._kinds[word] - {knowledge.kind} - MAY_SHARE.get(knowledge.kind, set())
        # Two answers with the same first word would be one label.
        alike = self._identities[knowledge.name, word]
        whole = phrases or is_unspaced(text) or words_of(text) == [word]
        return not others and word not in self.of_prompts and len(alike) == 1 and whole


def _first_names(knowledge: Knowledge) -> dict[str, str]:
    """Return identity -> its first name in the language of the knowledge."""
    names: dict[str, str] = {}
    for answer in knowledge.answers:
        names.setdefault(answer.identity, answer.text)
    return names
