"""Which of a knowledge's answers a word-level LM can give without ambiguity."""

from __future__ import annotations

from collections.abc import Collection

from lincorr_lightning.data.word_tokenizer import words_of
from lincorr_lightning.knowledge import Catalogue, Knowledge

MAY_SHARE = {"color": {"flower", "food", "drink"}}
"""Kinds that may share a word with others: without it there would be no orange. Of the other kinds
that are drawn, only answers that answer nothing else are taken, so that no correlation comes from
two domains that share a token."""


class PlainWords:
    """Answers that a word-level LM can give as one token, which means one thing only."""

    def __init__(self, catalogue: Catalogue) -> None:
        self._catalogue = catalogue
        self._kinds: dict[str, set[str]] = {}
        self.of_prompts: set[str] = set()
        self.all: set[str] = set()
        for knowledge in catalogue.select(["attribute"]):
            self.of_prompts.update(words_of(knowledge.prompt("X")))
            for answer in knowledge.answers:
                words = words_of(answer.text)
                self.all.update(words)
                self._kinds.setdefault(words[0], set()).add(knowledge.kind)
        self.all |= self.of_prompts

    def pick(
        self, name: str, n: int | None = None, used: Collection[str] = (), *, phrases: bool = False
    ) -> list[str]:
        """Identities of the first n plain answers (None: all); fewer if there are fewer.

        Answers that are words of the world anyway come first and all of them, plain or not: they
        will be labels of this knowledge, and should be somebody's answer.
        """
        knowledge = self._catalogue[name]
        firsts: dict[str, str] = {}
        for answer in knowledge.answers:
            firsts.setdefault(answer.identity, answer.text)
        known = [identity for identity, text in firsts.items() if text in used]
        plain = [
            identity
            for identity, text in firsts.items()
            if text not in used and self._is_plain(knowledge, text, phrases)
        ]
        missing = None if n is None else max(n - len(known), 0)
        return known + plain[:missing]

    def _is_plain(self, knowledge: Knowledge, text: str, phrases: bool) -> bool:
        words = words_of(text)
        others = self._kinds[words[0]] - {knowledge.kind} - MAY_SHARE.get(knowledge.kind, set())
        # Two answers that begin alike would be one label.
        alike = {a.identity for a in knowledge.answers if words_of(a.text)[0] == words[0]}
        in_prompts = words[0] in self.of_prompts
        return not others and not in_prompts and len(alike) == 1 and (phrases or len(words) == 1)
