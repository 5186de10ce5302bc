"""Texts about the embedded tiny world, for studies of whole texts that need no file."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.resources import as_file, files
from typing import NamedTuple

import numpy as np

from lincorr_lightning.data.tiny_world.word_tokenizer import words_of
from lincorr_lightning.data.tiny_world.world import Statement, World
from lincorr_lightning.knowledge import Catalogue

# People that a text goes around among; a corpus each.
CIRCLES = (1, 2, 3, 4, 6, 8, 12, 16)


class Text(NamedTuple):
    """A text and what it belongs to.

    Attributes:
        where: The place it stands at, for messages.
        corpus: Texts of one kind.
        text: The text.
    """

    where: str
    corpus: str
    text: str


def world_texts(n_texts: int, n_words: int, seed: int = 0) -> Iterator[Text]:
    """Write texts of true statements about invented people, such as the embedded LM was trained on.

    A text tells of a circle of 1 to 16 people, in an order of chance, who lives where and likes
    what: the more people, the less can be foreseen of it. Texts with a circle of one size are one
    corpus.

    Args:
        n_texts: How many.
        n_words: Words and signs of each, at least.
        seed: Of the people and the order.
    """
    with as_file(files("lincorr_lightning.lm").joinpath("tiny_world", "world.json")) as path:
        world = World.load(path)
    knowledges = [k for k in Catalogue.load().select(["attribute"]) if k.language == "en"]
    invented = set(list(world.people)[: world.config.n_people])
    told: dict[str, list[Statement]] = {}
    for statement in world.statements(knowledges):
        if statement.subject in invented:
            told.setdefault(statement.subject, []).append(statement)
    names = list(told)
    for number in range(n_texts):
        rng = np.random.default_rng([seed, number])
        size = CIRCLES[number % len(CIRCLES)]
        circle = [names[i] for i in rng.choice(len(names), size, replace=False)]
        sentences: list[str] = []
        length = 0
        while length < n_words:
            # Nobody is told the same twice before all is told.
            rounds = [statement for name in circle for statement in told[name]]
            for i in rng.permutation(len(rounds)):
                sentences.append(f"{rounds[i].text}.")
                length += len(words_of(sentences[-1]))
                if length >= n_words:
                    break
        corpus = f"{size} people" if size > 1 else "1 person"
        yield Text(f"text {number} of the tiny world", corpus, " ".join(sentences))
