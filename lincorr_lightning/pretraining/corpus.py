"""The training text of a tiny world: its statements and its vocabulary."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

from transformers import PreTrainedTokenizerFast

from lincorr_lightning.data.tiny_world.words import build_tokenizer
from lincorr_lightning.data.tiny_world.world import Statement, World
from lincorr_lightning.errors import ConfigError
from lincorr_lightning.knowledge import Knowledge


@dataclass(frozen=True, slots=True)
class EncodedStatement:
    """A statement in tokens: those of the prompt, of the answer and of the full stop.

    `knowledge` is the index of its kind in `Corpus.knowledge`.
    """

    tokens: list[int]
    n_prompt: int
    knowledge: int

    @property
    def answer(self) -> int:
        """Token id of the answer."""
        return self.tokens[self.n_prompt]


@dataclass(frozen=True)
class Corpus:
    """Statements about a world, and the tokenizer of everything that is true, stated or not.

    `knowledge` are the names of its kinds. The training text makes the statements `encoded`;
    `second_homes` do not count in recall, where the first is right.
    """

    world: World
    tokenizer: PreTrainedTokenizerFast
    knowledge: tuple[str, ...]
    encoded: Sequence[EncodedStatement]
    second_homes: Sequence[EncodedStatement] = ()

    @classmethod
    def of(
        cls,
        world: World,
        knowledge: Sequence[Knowledge],
        tokenizer: PreTrainedTokenizerFast | None = None,
    ) -> "Corpus":
        """Return the statements of some kinds of knowledge; None builds their tokenizer."""
        tokenizer = tokenizer or build_tokenizer(*world.words(knowledge))
        read: Any = tokenizer
        # Masks would take longer than the ids themselves.
        ids = partial(
            read, add_special_tokens=False, return_attention_mask=False, return_token_type_ids=False
        )
        prompts = ids([kind.prompt("X") for kind in knowledge])["input_ids"]  # a subject: one token
        kind_of = {kind.name: (len(prompts[i]), i) for i, kind in enumerate(knowledge)}

        def encode(statements: Iterable[Statement]) -> list[EncodedStatement]:
            stated = list(statements)
            texts = ids([f"{each.text}." for each in stated])["input_ids"] if stated else []
            if any(tokenizer.unk_token_id in tokens for tokens in texts):
                raise ConfigError(
                    "the tiny world's tokenizer cannot read all its texts: adjacent words of one "
                    "are one word in another. Remove knowledge from data.knowledge."
                )
            pairs = zip(stated, texts, strict=True)
            return [EncodedStatement(ids, *kind_of[each.knowledge.name]) for each, ids in pairs]

        names = tuple(kind.name for kind in knowledge)
        encoded = encode(world.statements(knowledge))
        return cls(world, tokenizer, names, encoded, encode(world.second_homes(knowledge)))

    @cached_property
    def answers(self) -> list[list[int]]:
        """Token ids of the answers that are stated, for each kind of knowledge.

        A domain may hold words that are nobody's answer, such as "South" of South Korea.
        """
        answers: list[set[int]] = [set() for _ in self.knowledge]
        for statement in (*self.encoded, *self.second_homes):
            answers[statement.knowledge].add(statement.answer)
        return [sorted(tokens) for tokens in answers]
