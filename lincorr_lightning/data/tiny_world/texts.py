"""Texts about a tiny world, for studies that are given no texts of their own."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from importlib.resources import files
from pathlib import Path

import numpy as np

from lincorr_lightning.data.text_files import Text
from lincorr_lightning.data.tiny_world.word_tokenizer import words_of
from lincorr_lightning.data.tiny_world.world import Statement, World
from lincorr_lightning.knowledge import Catalogue
from lincorr_lightning.lm.config import TINY_WORLD

WORLD_FILE = "world.json"
"""Description of a world, in the folder of an LM that was trained on it."""

WORLD_CORPUS = (
    "attribute", "math", "birthplace_es", "city_es", "country_es", "continent_es", "language_es",
    "company_es", "job_es", "gender_es", "birthplace_zh", "city_zh", "country_zh", "continent_zh",
    "language_zh", "company_zh", "job_zh", "gender_zh", "object_color", "object_size",
    "object_heat", "object_price", "object_genre", "simile_color", "simile_size", "simile_heat",
    "simile_price", "simile_genre",
)  # fmt: skip
"""Knowledge that the embedded LM was trained on (``configs/pretraining.yaml``)."""

GROUP_SIZES = (1, 2, 3, 4, 6, 8, 12, 16)
"""Numbers of people that a text of `world_documents` is about; each is a corpus."""


def world_file(name_or_path: str) -> Path | None:
    """Return the description of the world that an LM was trained on, None if it has none."""
    embedded = Path(str(files("lincorr_lightning.lm") / "tiny_world"))
    folder = embedded if name_or_path == TINY_WORLD else Path(name_or_path).expanduser()
    path = folder / WORLD_FILE
    return path if path.is_file() else None


def world_sentences(
    path: Path, knowledge: Sequence[str] = WORLD_CORPUS, knowledge_files: Sequence[str] = ()
) -> Iterator[str]:
    """Yield every true sentence about a world, as the LM was trained on them."""
    kinds = Catalogue.load(*knowledge_files).select(knowledge)
    for statement in World.load(path).statements(kinds):
        yield f"{statement.text}."


def world_documents(
    n_texts: int, n_words: int, seed: int = 0, path: Path | None = None
) -> Iterator[Text]:
    """Yield texts of true sentences about a world's invented people.

    A text is about 1 to 16 people: its sentences state their attributes in random order. The more
    people, the less of a text is predictable. Texts about equally many people are one corpus.

    Args:
        n_texts: Number of texts.
        n_words: Minimum number of words and punctuation marks of each.
        seed: Seed of the people and the order.
        path: Description of the world; None takes the world of the embedded LM.
    """
    world = World.load(path or world_file(TINY_WORLD) or Path(WORLD_FILE))
    kinds = [k for k in Catalogue.load().select(["attribute"]) if k.language == "en"]
    invented = set(list(world.people)[: world.config.n_people])
    statements: dict[str, list[Statement]] = {}
    for statement in world.statements(kinds):
        if statement.subject in invented:
            statements.setdefault(statement.subject, []).append(statement)
    names = list(statements)
    for number in range(n_texts):
        rng = np.random.default_rng([seed, number])
        size = GROUP_SIZES[number % len(GROUP_SIZES)]
        group = [names[i] for i in rng.choice(len(names), size, replace=False)]
        sentences: list[str] = []
        length = 0
        while length < n_words:
            # No statement is repeated before all have been made.
            available = [statement for name in group for statement in statements[name]]
            for i in rng.permutation(len(available)):
                sentences.append(f"{available[i].text}.")
                length += len(words_of(sentences[-1]))
                if length >= n_words:
                    break
        corpus = f"{size} people" if size > 1 else "1 person"
        yield Text(f"text {number} of the tiny world", corpus, " ".join(sentences))
