"""The training text of a tiny world: its statements and its vocabulary."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from transformers import PreTrainedTokenizerFast

from lincorr_lightning.data.tiny_world.words import build_tokenizer
from lincorr_lightning.data.tiny_world.world import Statement, World
from lincorr_lightning.errors import ConfigError
from lincorr_lightning.knowledge import Catalogue


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

    `knowledge` are the names of its kinds. The training text makes the statements `stated`;
    `second_homes` do not count in recall, where the first is right.
    """

    world: World
    tokenizer: PreTrainedTokenizerFast
    knowledge: tuple[str, ...]
    stated: tuple[Statement, ...]
    second_homes: tuple[Statement, ...] = ()

    @property
    def encoded(self) -> list[EncodedStatement]:
        """The stated statements in tokens."""
        return self._encoded[: len(self.stated)]

    @property
    def encoded_second_homes(self) -> list[EncodedStatement]:
        """The statements of second homes in tokens."""
        return self._encoded[len(self.stated) :]

    @cached_property
    def _encoded(self) -> list[EncodedStatement]:
        def ids(texts: list[str]) -> list[list[int]]:
            # Masks would take longer than the ids themselves.
            options = {"return_attention_mask": False, "return_token_type_ids": False}
            return list(self.tokenizer(texts, add_special_tokens=False, **options)["input_ids"])

        statements = (*self.stated, *self.second_homes)
        kinds = {each.knowledge.name: each.knowledge for each in statements}
        prompts = ids([kind.prompt("X") for kind in kinds.values()])  # a subject is one token
        kind_of = {
            name: (len(prompt), self.knowledge.index(name))
            for name, prompt in zip(kinds, prompts, strict=True)
        }
        texts = ids([f"{statement.text}." for statement in statements])
        if any(self.tokenizer.unk_token_id in tokens for tokens in texts):
            raise ConfigError(
                "the tiny world's tokenizer cannot read all its texts: adjacent words of one are "
                "one word in another. Remove knowledge from data.knowledge, or change prompts."
            )
        return [
            EncodedStatement(tokens, *kind_of[statement.knowledge.name])
            for statement, tokens in zip(statements, texts, strict=True)
        ]

    @cached_property
    def answers(self) -> list[list[int]]:
        """Token ids of the answers that are stated, for each kind of knowledge.

        A domain may hold words that are nobody's answer, such as "South" of South Korea.
        """
        answers: list[set[int]] = [set() for _ in self.knowledge]
        for statement in self._encoded:
            answers[statement.knowledge].add(statement.answer)
        return [sorted(tokens) for tokens in answers]


def build_corpus(world: World, catalogue: Catalogue, stated: Sequence[str]) -> Corpus:
    """Return the statements about a world; `stated` are kinds of knowledge or families."""
    knowledge = catalogue.select(list(stated))
    return Corpus(
        world,
        build_tokenizer(*world.words(knowledge)),
        tuple(each.name for each in knowledge),
        stated=tuple(world.statements(knowledge)),
        second_homes=tuple(world.second_homes(knowledge)),
    )
