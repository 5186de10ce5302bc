"""The DataModule of pre-training: statements to learn, and prompts that measure recall."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from lincorr_lightning.data.loaders import ResumableLoader
from lincorr_lightning.data.tiny_world.world import World
from lincorr_lightning.distributed import data_shard
from lincorr_lightning.errors import ConfigError, require
from lincorr_lightning.knowledge import Catalogue
from lincorr_lightning.pretraining.corpus import Corpus, EncodedStatement
from lincorr_lightning.study import StudyData

IGNORED = -100  #: Target of a token that adds nothing to the loss.

_ROW_LENGTH = 32  # tokens of a row that statements are packed into, more than any of them has
# Statements are drawn in blocks of this size, not of a batch's. Another gives another tiny world.
_DRAWN_TOGETHER = 256


@dataclass  # not frozen: Lightning copies a batch field by field when it moves it to a device
class PackedBatch:
    """Statements side by side in rows; each begins at position 0 and attends only to itself.

    All tensors have the shape ``(n_rows, length)``. Targets are the tokens that follow, and
    `knowledge` the index of the kind whose answer follows, or `IGNORED`. A batch that `is_padding`
    only keeps a rank in step with the others.
    """

    input_ids: Tensor
    position_ids: Tensor
    targets: Tensor
    knowledge: Tensor
    is_padding: bool = False


_Drawn = tuple[EncodedStatement, bool]
"""A statement, and whether it has full loss."""


@dataclass
class RecallBatch:
    """Prompts of one kind of knowledge, ``(n_prompts, n_tokens)``, and tokens of their answers."""

    knowledge: str
    input_ids: Tensor
    answers: Tensor


@dataclass(eq=False)
class PackedStatements(Dataset[PackedBatch]):
    """The training batches of one rank over all epochs, each determined by the seed and its index.

    What is drawn for a statement follows from its position in the epoch, not from its batch: ranks
    with smaller batches read what one process reads. As no state is kept, a resumed run continues
    with the batches of an uninterrupted one.

    `repeats` are how often an epoch has each statement, by kind of knowledge; empty for once. This
    rank reads shard `rank` of `n_shards`. The other fields are settings of `CorpusDataModule`.
    """

    corpus: Corpus
    batch_size: int = 256
    full_loss_fraction: float = 0.1
    repeats: Sequence[int] = ()
    second_home_repeats: int = 1
    seed: int = 0
    rank: int = 0
    n_shards: int = 1
    _epoch: tuple[int, list[_Drawn]] = field(default=(-1, []), init=False)

    @cached_property
    def _statements(self) -> list[EncodedStatement]:
        repeats = self.repeats or [1] * len(self.corpus.knowledge)
        repeated = [s for s in self.corpus.encoded for _ in range(repeats[s.knowledge])]
        return repeated + list(self.corpus.second_homes) * self.second_home_repeats

    def __len__(self) -> int:
        """Number of steps of an epoch, the same on all ranks."""
        return -(-len(self._statements) // (self.batch_size * self.n_shards))

    def __getitem__(self, index: int) -> PackedBatch:
        """Return a batch by its index over all epochs; one without statements is padding."""
        epoch, step = divmod(index, len(self))
        if self._epoch[0] != epoch:
            self._epoch = epoch, self._draw(epoch)
        first = (step * self.n_shards + self.rank) * self.batch_size
        drawn = self._epoch[1][first : first + self.batch_size]
        return replace(_pack(drawn or self._epoch[1][:1]), is_padding=not drawn)

    def _draw(self, epoch: int) -> list[_Drawn]:
        order = np.random.default_rng([self.seed, epoch]).permutation(len(self._statements))
        drawn: list[_Drawn] = []
        for block, start in enumerate(range(0, len(order), _DRAWN_TOGETHER)):
            members = [self._statements[i] for i in order[start : start + _DRAWN_TOGETHER]]
            rng = np.random.default_rng([self.seed, epoch, block])
            has_full_loss = rng.random(len(members)) < self.full_loss_fraction
            drawn += zip(members, has_full_loss.tolist(), strict=True)
        return drawn


def recall_prompts(corpus: Corpus) -> list[RecallBatch]:
    """Return all prompts of the stated statements, one batch for each kind of knowledge."""
    batches = []
    for index, name in enumerate(corpus.knowledge):
        members = [s for s in corpus.encoded if s.knowledge == index]
        prompts = torch.tensor([s.tokens[: s.n_prompt] for s in members])
        batches.append(RecallBatch(name, prompts, torch.tensor([s.answer for s in members])))
    return batches


def _pack(statements: Sequence[_Drawn]) -> PackedBatch:
    """Put statements side by side.

    With full loss, every token from the third on is a target; subject and verb cannot be predicted.
    Otherwise a statement ends before the answer, its only target, which saves most of the work.
    """
    rows: list[list[tuple[int, ...]]] = [[]]
    for statement, full in statements:
        tokens = statement.tokens
        n = len(tokens) - 1 if full else statement.n_prompt
        if len(rows[-1]) + n > _ROW_LENGTH:
            rows.append([])
        for i in range(n):
            is_answer = i == statement.n_prompt - 1
            target = tokens[i + 1] if is_answer or (full and i > 0) else IGNORED
            knowledge = statement.knowledge if is_answer else IGNORED
            rows[-1].append((tokens[i], i, target, knowledge))
    length = max(map(len, rows))
    # Rows are filled up with statements of one padding token and without a target.
    empty = (0, 0, IGNORED, IGNORED)
    table = torch.tensor([row + [empty] * (length - len(row)) for row in rows])
    input_ids, positions, targets, kinds = (c.contiguous() for c in table.unbind(-1))
    return PackedBatch(input_ids, positions, targets, kinds)


class CorpusDataModule(StudyData):
    """Text about a tiny world, to pre-train a tiny LM on.

    Training reads every stated fact once an epoch, in a different order each epoch; validation
    reads every prompt of these facts.

    Args:
        n_people: People of the tiny world that facts are stated about, from the first; None takes
            all: 1,650 invented names, and then the other words.
        knowledge: Kinds of knowledge or families that are stated; None takes attributes and math.
        batch_size: Statements per step.
        full_loss_fraction: Share of the statements of which not the answer alone is learned.
        repeats: Knowledge or family -> how often an epoch states each of its facts, once by
            default. What only one prompt states is learned later than what many state.
        second_home_repeats: How often an epoch states each second home. Use less than `repeats` has
            for city, so that the first home is the most likely answer.
        seed: Seed of the order of the statements, and of which have full loss.
    """

    batch_type = PackedBatch
    settings_per_rank = frozenset({"batch_size"})

    def __init__(
        self,
        n_people: int | None = None,
        knowledge: list[str] | None = None,
        batch_size: int = 256,
        full_loss_fraction: float = 0.1,
        repeats: dict[str, int] | None = None,
        second_home_repeats: int = 1,
        seed: int = 0,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        require("data.full_loss_fraction", full_loss_fraction, at_least=0, at_most=1)
        self.require_at_least("n_people", n_people=1, batch_size=1, second_home_repeats=0)
        for name, n in (repeats or {}).items():
            require(f"data.repeats.{name}", n, at_least=1)
        self.knowledge, self.repeats = knowledge or ["attribute", "math"], repeats or {}
        self.corpus: Corpus | None = None

    def setup(self, stage: str | None = None) -> None:
        """Read the world and make its statements, identical on all ranks."""
        if self.corpus is not None:
            return
        catalogue = Catalogue.load()
        world = World.load()
        n_known = len(world.people)
        n_people = self.hparams["n_people"] or n_known
        require("data.n_people", n_people, at_most=n_known)
        world = world.first(n_people)
        corpus = Corpus.of(world, catalogue.select(self.knowledge))
        repeats = dict.fromkeys(corpus.knowledge, 1)
        for name, n in self.repeats.items():
            chosen = repeats.keys() & {kind.name for kind in catalogue.select([name])}
            if not chosen:
                raise ConfigError(
                    f"data.repeats names {name!r}, which is not stated; add it to data.knowledge."
                )
            repeats |= dict.fromkeys(chosen, n)
        self._repeats = list(repeats.values())
        self.corpus = corpus

    def train_dataloader(self) -> ResumableLoader:
        assert self.corpus is not None, "setup makes it"
        shard = data_shard(self.trainer)
        names = "batch_size", "full_loss_fraction", "second_home_repeats", "seed"
        settings = {name: self.hparams[name] for name in names} | {"repeats": self._repeats}
        statements = PackedStatements(self.corpus, **settings, rank=shard.number, n_shards=shard.n)
        return ResumableLoader(statements, self.trainer)

    def val_dataloader(self) -> DataLoader[RecallBatch]:
        assert self.corpus is not None, "setup makes it"
        return DataLoader(recall_prompts(self.corpus), batch_size=None)  # type: ignore[arg-type]
