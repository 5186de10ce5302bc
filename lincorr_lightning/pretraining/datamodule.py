"""The tiny world's corpus: every true statement once an epoch, packed into rows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, DistributedSampler
from transformers import PreTrainedTokenizerFast

from lincorr_lightning.data.tiny_world.word_tokenizer import build_tokenizer
from lincorr_lightning.data.tiny_world.world import Statement, World, WorldConfig
from lincorr_lightning.distributed import data_shard
from lincorr_lightning.errors import ConfigError
from lincorr_lightning.knowledge import Catalogue

IGNORED = -100
"""Target of a token that no loss is taken at."""

# Statements whose chances are drawn at once, in the order of their epoch, whatever the batch size.
# Another number would make another tiny world of configs/pretraining.yaml.
_DRAWN_TOGETHER = 256


@dataclass  # not frozen: Lightning copies a batch field by field when it moves it to a device
class PackedBatch:
    """Statements side by side in rows; each one begins again at position 0 and sees only itself.

    Attributes:
        input_ids: Tokens, shape `(n_rows, row_length)`.
        position_ids: Position of each token within its statement, same shape.
        targets: Token that follows, or `IGNORED`, same shape.
        asks: Index of the knowledge whose answer follows, or `IGNORED`, same shape.
        partners: Token of a second subject where a subject is mixed with one; else the position's
            own token, same shape.
        shares: How much of the second subject is in the mixture, same shape; 0 elsewhere.
        second_targets: The second subject's answer where an answer is asked of a mixture, else
            `IGNORED`, same shape.
        second_shares: Its share there, same shape.
        is_padding: The batch only keeps a process in step with the others: it does not count.
    """

    input_ids: Tensor
    position_ids: Tensor
    targets: Tensor
    asks: Tensor
    partners: Tensor
    shares: Tensor
    second_targets: Tensor
    second_shares: Tensor
    is_padding: bool = False


@dataclass
class RecallBatch:
    """Prompts of one knowledge, all of one length, with the answers that are true.

    Attributes:
        knowledge: Name of the knowledge.
        input_ids: Prompts, shape `(n_prompts, n_tokens)`.
        answers: First token of each answer, shape `(n_prompts,)`.
    """

    knowledge: str
    input_ids: Tensor
    answers: Tensor


@dataclass(frozen=True, slots=True)
class _Encoded:
    """A statement in tokens: the prompt, the answer, and a full stop; where its subject stands."""

    tokens: list[int]
    n_prompt: int
    knowledge: int
    subject: int


@dataclass(frozen=True)
class _Epochs(Dataset[PackedBatch]):
    """All batches of all epochs, each made from the seed and its own number.

    What a statement draws follows from its place in its epoch alone, not from who shares its batch:
    several processes with smaller batches read what one process does.

    That no state is kept is what makes a run that is resumed at the end of an epoch go on with
    exactly the batches of the run that was not interrupted.
    """

    statements: Sequence[_Encoded]
    batch_size: int
    row_length: int
    read_in_full: float
    mixed: float
    seed: int
    _of_knowledge: dict[int, list[_Encoded]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for statement in self.statements:
            self._of_knowledge.setdefault(statement.knowledge, []).append(statement)

    def __len__(self) -> int:
        """Batches of one epoch."""
        return -(-len(self.statements) // self.batch_size)

    def __getitem__(self, index: int) -> PackedBatch:
        if index < 0:
            return replace(self[0], is_padding=True)
        epoch, batch = divmod(index, len(self))
        first = batch * self.batch_size
        last = min(first + self.batch_size, len(self.statements))
        blocks = range(first // _DRAWN_TOGETHER, -(-last // _DRAWN_TOGETHER))
        drawn = zip(*(self._draw(epoch, block) for block in blocks), strict=True)
        here = slice(first - blocks.start * _DRAWN_TOGETHER, last - blocks.start * _DRAWN_TOGETHER)
        in_full, shares, others = (np.concatenate(column)[here].tolist() for column in drawn)
        members = _shuffled(len(self.statements), self.seed, epoch)[first:last]
        chosen = [self.statements[i] for i in members]
        partners = [
            self._of_knowledge[statement.knowledge][other]
            for statement, other in zip(chosen, others, strict=True)
        ]
        return _pack(chosen, in_full, partners, shares, self.row_length)

    def _draw(self, epoch: int, block: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Of statements side by side in an epoch: read in full?, share and number of a partner."""
        members = _shuffled(len(self.statements), self.seed, epoch)
        members = members[block * _DRAWN_TOGETHER : (block + 1) * _DRAWN_TOGETHER]
        rng = np.random.default_rng([self.seed, epoch, block])
        in_full = rng.random(len(members)) < self.read_in_full
        is_mixed = rng.random(len(members)) < self.mixed
        shares = np.where(is_mixed & ~in_full, rng.random(len(members)), 0.0)
        alike = [len(self._of_knowledge[self.statements[i].knowledge]) for i in members]
        return in_full, shares, rng.integers(alike)


@lru_cache(maxsize=2)
def _shuffled(n: int, seed: int, epoch: int) -> np.ndarray:
    return np.random.default_rng([seed, epoch]).permutation(n)


def _pack(
    chosen: Sequence[_Encoded],
    in_full: Sequence[bool],
    partners: Sequence[_Encoded],
    shares: Sequence[float],
    row_length: int,
) -> PackedBatch:
    """Lay statements side by side.

    A statement read in full asks for each token from its third on; the subject and the verb after
    it are anybody's guess. The others ask for the first token of the answer, which is what there
    is to learn, and end there, which saves most of the work.
    """
    rows: list[list[tuple[float, ...]]] = [[]]
    for statement, full, other, share in zip(chosen, in_full, partners, shares, strict=True):
        tokens, n_prompt = statement.tokens, statement.n_prompt
        n = len(tokens) - 1 if full else n_prompt
        if len(rows[-1]) + n > row_length:
            rows.append([])
        for i in range(n):
            answer = i == n_prompt - 1
            asked = answer or (full and i > 0)
            target = tokens[i + 1] if asked else IGNORED
            own = (tokens[i], i, target, statement.knowledge if answer else IGNORED)
            here = share if i == statement.subject else 0.0
            partner = other.tokens[other.subject] if here else tokens[i]
            second = other.tokens[other.n_prompt] if answer and share else IGNORED
            rows[-1].append((*own, partner, here, second, share if answer else 0.0))
    length = max(map(len, rows))
    # Filled up with statements of one padding token each, of which nothing is asked.
    empty = (0, 0, IGNORED, IGNORED, 0, 0.0, IGNORED, 0.0)
    # Exact for whole numbers far beyond any vocabulary.
    table = torch.tensor([row + [empty] * (length - len(row)) for row in rows], dtype=torch.float64)
    columns = [column.contiguous() for column in table.unbind(-1)]
    is_share = (5, 7)
    typed = (c.float() if i in is_share else c.long() for i, c in enumerate(columns))
    return PackedBatch(*typed)  # type: ignore[arg-type]


class _EveryBatchOnce(DistributedSampler[Any]):
    """Deals the batches of one epoch out to the processes; Lightning tells it the epoch.

    A process that runs short gets a padding batch.
    """

    def __init__(self, dataset: _Epochs, rank: int, n_processes: int) -> None:
        super().__init__(dataset, num_replicas=n_processes, rank=rank, shuffle=False)

    def __iter__(self) -> Iterator[int]:
        n_batches = len(self.dataset)  # type: ignore[arg-type]
        for index in range(self.rank, self.total_size, self.num_replicas):
            yield self.epoch * n_batches + index if index < n_batches else -1


class CorpusDataModule(L.LightningDataModule):
    """Text about the tiny world, to pre-train a tiny LM on.

    Training sees every true statement once an epoch, in an order of its own each epoch; validation
    asks every prompt that has one true answer.

    Args:
        world: The world that is spoken about.
        knowledges: What is said of it: knowledges or families.
        batch_size: Statements per step.
        row_length: Tokens of a row that statements are packed into.
        read_in_full: Share of the statements of which every word counts; of the others only the
            answer does.
        repeats: Knowledge or family -> how often an epoch states each of its facts, if not once.
            What a single prompt tells is learned later than what follows from a city, which many
            prompts tell.
        mixed: Share of the statements whose subject is mixed with another one, which the answer
            then follows by shares. Between any two people there is then a way on which all that
            follows from one another changes together.
        pair: Two knowledges, as ``city->country``, of which `together` speaks; None: none.
        together: Share of the people of whom both knowledges of `pair` are stated. Of each other
            person the text says one of the two and never the other, half of them the first.
        knowledge_files: YAML files with knowledge of your own.
        seed: Seed of the order, and of whom what is said of.
    """

    def __init__(
        self,
        world: WorldConfig | None = None,
        knowledges: list[str] | None = None,
        batch_size: int = 256,
        row_length: int = 64,
        read_in_full: float = 0.1,
        repeats: dict[str, int] | None = None,
        mixed: float = 0.5,
        pair: str | None = None,
        together: float = 1.0,
        knowledge_files: list[str] | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__()
        shares = {"read_in_full": read_in_full, "mixed": mixed, "together": together}
        for name, share in shares.items():
            if not 0 <= share <= 1:
                raise ConfigError(f"data.{name} is {share}; it is a share, from 0 to 1.")
        counts = {"batch_size": batch_size}
        counts |= {f"repeats.{name}": value for name, value in (repeats or {}).items()}
        for name, value in counts.items():
            if value < 1:
                raise ConfigError(f"data.{name} is {value}; it must be at least 1.")
        self.world_config = world or WorldConfig()
        # Plain data only: torch loads a checkpoint that holds anything else only if told to trust.
        self.save_hyperparameters(ignore=["world"])
        self.save_hyperparameters({"world": asdict(self.world_config)})
        self.world: World | None = None
        self._first_epoch = 0

    def setup(self, stage: str | None = None) -> None:
        """Make the world, its tokenizer and its corpus; the same on every process."""
        del stage
        if self.world is not None:
            return
        catalogue = Catalogue.load(*(self.hparams["knowledge_files"] or ()))
        spoken = self.hparams["knowledges"] or ["attribute", "math"]
        knowledges = catalogue.select(spoken)
        world = World.generate(self.world_config, catalogue, spoken)
        everything = list(world.statements(knowledges))
        statements, self.unsaid = self._divide(everything, catalogue)
        self.tokenizer = build_tokenizer(*world.words(knowledges))
        self.knowledges = tuple(knowledge.name for knowledge in knowledges)
        self._by_name = {knowledge.name: knowledge for knowledge in knowledges}
        self._repeats = [1] * len(knowledges)
        for name, often in (self.hparams["repeats"] or {}).items():
            chosen = [k.name for k in catalogue.select([name]) if k.name in self.knowledges]
            if not chosen:
                raise ConfigError(
                    f"data.repeats names {name!r}, of which nothing is said; "
                    "add it to data.knowledges."
                )
            for knowledge_name in chosen:
                self._repeats[self.knowledges.index(knowledge_name)] = often
        self._encoded = _encode(statements, self.tokenizer, self.knowledges)
        # The answers that somebody gives; a domain may hold words that are none, such as the
        # South of South Korea where nobody lives there but some live in South America.
        answers: list[set[int]] = [set() for _ in knowledges]
        for statement in self._encoded:
            answers[statement.knowledge].add(statement.tokens[statement.n_prompt])
        self.answers = [sorted(given) for given in answers]
        self._check_statements(statements)
        self.world = world

    def _divide(
        self, statements: Sequence[Statement], catalogue: Catalogue
    ) -> tuple[list[Statement], list[Statement]]:
        """Statements that are made, and those that never are."""
        if self.hparams["pair"] is None:
            return list(statements), []
        relation = catalogue.relation(self.hparams["pair"])
        pair = relation.source.name, relation.target.name
        known = {statement.knowledge.name for statement in statements}
        missing = [name for name in pair if name not in known]
        if missing:
            raise ConfigError(
                f"data.pair is {relation.name}, but nothing is said of {missing[0]}; "
                "add it to data.knowledges."
            )
        people = list(dict.fromkeys(s.subject for s in statements if s.knowledge.name in pair))
        order = np.random.default_rng(self.hparams["seed"]).permutation(len(people))
        n_both = round(self.hparams["together"] * len(people))
        # Of each other person one is left out, in turn.
        left_out = {people[i]: pair[rank % 2] for rank, i in enumerate(order[n_both:].tolist())}
        said: list[Statement] = []
        unsaid: list[Statement] = []
        for statement in statements:
            silent = left_out.get(statement.subject) == statement.knowledge.name
            (unsaid if silent else said).append(statement)
        return said, unsaid

    def truths(self, name: str) -> tuple[list[Statement], list[Statement]]:
        """What is true of people by one knowledge: what the text says, and what it never says.

        Args:
            name: Of the knowledge.
        """
        assert self.world is not None, "set up first"
        unsaid = [s for s in self.unsaid if s.knowledge.name == name]
        silent = {s.subject for s in unsaid}
        every = self.world.statements([self._by_name[name]]) if name in self._by_name else ()
        return [s for s in every if s.subject not in silent], unsaid

    def _check_statements(self, statements: Sequence[Statement]) -> None:
        unknown = self.tokenizer.unk_token_id
        for statement, encoded in zip(statements, self._encoded, strict=True):
            if unknown in encoded.tokens:
                raise ConfigError(
                    f"the tiny world's tokenizer cannot read {statement.text!r}: words that stand "
                    "side by side there are one word elsewhere. Leave "
                    f"{statement.knowledge.name!r} out of data.knowledges, or change its prompt."
                )
        longest = max(len(statement.tokens) for statement in self._encoded)
        if self.hparams["row_length"] < longest:
            raise ConfigError(
                f"data.row_length is {self.hparams['row_length']}, the longest statement has "
                f"{longest} tokens; make it at least that."
            )

    def save(self, folder: Path) -> None:
        """Write the tokenizer, and the world as ``world.json``, beside an LM's weights."""
        assert self.world is not None, "set up first"
        self.tokenizer.save_pretrained(folder)
        self.world.save(folder / "world.json")

    def state_dict(self) -> dict[str, Any]:
        """How many epochs are done."""
        assert self.trainer is not None
        return {"epoch": self.trainer.fit_loop.epoch_progress.current.processed}  # type: ignore[attr-defined]

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on with the epoch after those."""
        self._first_epoch = int(state_dict["epoch"])

    def train_dataloader(self) -> DataLoader[PackedBatch]:
        """Every statement once, or as often as asked for."""
        epoch = self._first_epoch
        if self.trainer is not None:
            epoch = max(epoch, self.trainer.current_epoch)
        repeated = [s for s in self._encoded for _ in range(self._repeats[s.knowledge])]
        epochs = _Epochs(
            repeated,
            self.hparams["batch_size"],
            self.hparams["row_length"],
            self.hparams["read_in_full"],
            self.hparams["mixed"],
            self.hparams["seed"],
        )
        share = data_shard(self.trainer)
        sampler = _EveryBatchOnce(epochs, share.number, share.n)
        # A run that is resumed takes its first batch before Lightning tells the epoch.
        sampler.set_epoch(epoch)
        return DataLoader(epochs, batch_size=None, sampler=sampler)

    def val_dataloader(self) -> DataLoader[RecallBatch]:
        """The prompts of one knowledge after the other."""
        batches = []
        for index, name in enumerate(self.knowledges):
            members = [s for s in self._encoded if s.knowledge == index]
            prompts = torch.tensor([s.tokens[: s.n_prompt] for s in members])
            answers = torch.tensor([s.tokens[s.n_prompt] for s in members])
            batches.append(RecallBatch(name, prompts, answers))
        return DataLoader(batches, batch_size=None)  # type: ignore[arg-type]


def _encode(
    statements: Sequence[Statement],
    tokenizer: PreTrainedTokenizerFast,
    names: Sequence[str],
) -> list[_Encoded]:
    def ids(texts: list[str]) -> list[list[int]]:
        # Masks would take longer than the ids themselves.
        options = {"return_attention_mask": False, "return_token_type_ids": False}
        return list(tokenizer(texts, add_special_tokens=False, **options)["input_ids"])

    index = {name: i for i, name in enumerate(names)}
    texts = ids([f"{s.text}." for s in statements])
    prompts = ids([s.prompt for s in statements])
    # A subject is one token, after what its prompt says before it.
    knowledges = list({s.knowledge.name: s.knowledge for s in statements}.values())
    begins = ids([k.template.split("{}")[0] for k in knowledges])
    before = {k.name: len(begin) for k, begin in zip(knowledges, begins, strict=True)}
    return [
        _Encoded(
            text,
            len(prompt),
            index[statement.knowledge.name],
            before[statement.knowledge.name],
        )
        for statement, text, prompt in zip(statements, texts, prompts, strict=True)
    ]
