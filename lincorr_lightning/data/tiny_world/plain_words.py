"""Which of a knowledge's answers a word-level LM can give without ambiguity."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from lincorr_lightning.data.tiny_world.word_tokenizer import first_word, is_unspaced, words_of
from lincorr_lightning.knowledge import Knowledge

MAY_SHARE = {"color": {"flower", "food", "drink"}}
"""Kinds that may share a word with others: without it there would be no orange. Of the other kinds
that are drawn, only answers that answer nothing else are taken, so that no correlation comes from
two domains that share a token."""


class PlainWords:
    """Answers that a word-level LM can give as one token, which means one thing only.

    Args:
        knowledges: Everything that the LM is asked, in all its languages. An answer is plain if it
            is in each of the languages that its kind is asked in.
    """

    def __init__(self, knowledges: Sequence[Knowledge]) -> None:
        self._knowledges = {knowledge.name: knowledge for knowledge in knowledges}
        self._kinds: dict[str, set[str]] = {}
        self._identities: dict[tuple[str, str], set[str]] = {}
        self.of_prompts: set[str] = set()
        self.all: set[str] = set()
        for knowledge in knowledges:
            self.of_prompts.update(words_of(knowledge.prompt("X")))
            for answer in knowledge.answers:
                word = first_word(answer.text)
                self.all.update(words_of(answer.text))
                self._kinds.setdefault(word, set()).add(knowledge.kind)
                alike = self._identities.setdefault((knowledge.name, word), set())
                alike.add(answer.identity)
        self.all |= self.of_prompts

    def pick(
        self, name: str, n: int | None = None, used: Collection[str] = (), *, phrases: bool = False
    ) -> list[str]:
        """Identities of the first n plain answers (None: all); fewer if there are fewer.

        Answers that are words of the world anyway come first and all of them, plain or not: they
        will be labels of this knowledge, and should be somebody's answer.
        """
        knowledge = self._knowledges[name]
        asked = {k.language: k for k in self._knowledges.values() if k.kind == knowledge.kind}
        names = {language: _first_names(k) for language, k in asked.items()}
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
                for language, other in asked.items()
            )
        ]
        missing = None if n is None else max(n - len(known), 0)
        return known + plain[:missing]

    def meanings(self, word: str) -> dict[str, set[str]]:
        """What a word answers: attribute -> identities, in whatever language it is asked."""
        found: dict[str, set[str]] = {}
        for name, knowledge in self._knowledges.items():
            if alike := self._identities.get((name, word)):
                attribute = name.removesuffix(f"_{knowledge.language}")
                found.setdefault(attribute, set()).update(alike)
        return found

    def _is_plain(self, knowledge: Knowledge, text: str, phrases: bool) -> bool:
        word = first_word(text)
        others = self._kinds[word] - {knowledge.kind} - MAY_SHARE.get(knowledge.kind, set())
        # Two answers that begin alike would be one label.
        alike = self._identities[knowledge.name, word]
        whole = phrases or is_unspaced(text) or words_of(text) == [word]
        return not others and word not in self.of_prompts and len(alike) == 1 and whole


def _first_names(knowledge: Knowledge) -> dict[str, str]:
    """Identity -> its first name in the knowledge's language."""
    names: dict[str, str] = {}
    for answer in knowledge.answers:
        names.setdefault(answer.identity, answer.text)
    return names
