"""Datamodules of texts: rows of any length, and prompts of the first tokens of each text."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset

from lincorr_lightning.data.files import SampleBy, read_texts
from lincorr_lightning.data.loaders import ResumableLoader, make_loader
from lincorr_lightning.data.tiny_world import world as tiny_world
from lincorr_lightning.distributed import batch_edges, data_shard, require_items
from lincorr_lightning.errors import ConfigError, SubjectsError
from lincorr_lightning.knowledge import Catalogue
from lincorr_lightning.lm.language_model import LanguageModel
from lincorr_lightning.study import StudyData


@dataclass  # not frozen: Lightning copies a batch field by field when it moves it to a device
class TokenRows:
    """Texts, padded on the right: token ids and a mask of them, ``(n_texts, longest)``.

    An activation counts at the `counted` tokens, bool, same shape; at none if `is_padding`.
    """

    input_ids: Tensor
    attention_mask: Tensor
    counted: Tensor
    is_padding: bool = False

    def __post_init__(self) -> None:
        if self.is_padding:
            self.counted = torch.zeros_like(self.counted)


@dataclass
class TokenStep:
    """A training step: some of the tokens of a block of texts, whose activations are read once.

    Blocks have numbers, different for other texts, and steps an `index` in their block. The tokens
    are `positions` among the counted ones of all `texts` of the block, ``(batch_tokens,)``.
    """

    block: int
    index: int
    texts: TokenRows
    positions: Tensor


def pad_rows(rows: Sequence[Sequence[int]], n_skipped: int = 0) -> TokenRows:
    """Pad token ids on the right; the first `n_skipped` tokens of each text do not count."""
    ids = pad_sequence([torch.tensor(row) for row in rows], batch_first=True)
    positions = torch.arange(ids.shape[1])
    mask = positions < torch.tensor([len(row) for row in rows])[:, None]
    return TokenRows(ids, mask.long(), mask & (positions >= n_skipped))


@dataclass(eq=False)
class TextBlocks(Dataset[TokenStep]):
    """Training steps of one data shard: blocks of texts in an endless shuffled order.

    A step follows from its number alone, so that a resumed run continues with the texts that the
    interrupted run had left. The fields are arguments of `TextsDataModule`; `texts` are token ids.
    """

    texts: Sequence[list[int]]
    n_skipped: int
    n_tokens: int
    batch_tokens: int
    block_steps: int
    seed: int
    rank: int = 0
    n_shards: int = 1

    def __post_init__(self) -> None:
        size = self.batch_tokens * self.block_steps
        self.n_blocks = self.n_tokens // size
        if self.n_blocks < self.n_shards:
            raise ConfigError(
                f"{self.n_tokens} tokens to train on are {self.n_blocks} blocks of {size} for "
                f"{self.n_shards} ranks. Raise data.n_tokens (or model.training_tokens), or lower "
                "data.batch_tokens or data.block_steps."
            )
        counts = np.array([len(row) - self.n_skipped for row in self.texts], dtype=np.int64)
        # A block ends with a whole text, so it exceeds its size by less than one text.
        needed = self.n_blocks * (size + int(counts.max()))
        orders = [
            np.random.default_rng([self.seed, 1, epoch]).permutation(len(self.texts))
            for epoch in range(-(-needed // int(counts.sum())))
        ]
        self._order = np.concatenate(orders)
        ends = np.append(0, counts[self._order].cumsum())
        self._starts = [0]
        for _ in range(self.n_blocks):
            self._starts.append(int(np.searchsorted(ends, ends[self._starts[-1]] + size)))
        self._cached: tuple[int, TokenRows, Tensor] | None = None

    def __len__(self) -> int:
        """Steps of this shard in one epoch."""
        return self.n_blocks // self.n_shards * self.block_steps

    def __getitem__(self, index: int) -> TokenStep:
        shard_block, step = divmod(index % len(self), self.block_steps)
        block = shard_block * self.n_shards + self.rank
        texts, positions = self._read(block)
        n = self.batch_tokens
        return TokenStep(block, step, texts, positions[step * n : (step + 1) * n])

    def rows(self, block: int) -> list[list[int]]:
        """Return the token ids of a block's texts."""
        start, stop = self._starts[block : block + 2]
        return [self.texts[i] for i in self._order[start:stop]]

    def _read(self, block: int) -> tuple[TokenRows, Tensor]:
        if self._cached is None or self._cached[0] != block:
            size = self.batch_tokens * self.block_steps
            order = np.random.default_rng([self.seed, 2, block]).permutation(size)
            texts = pad_rows(self.rows(block), self.n_skipped)
            # Tokens of the last text beyond the block's size are in no step.
            texts.counted.view(-1)[texts.counted.flatten().nonzero()[size:, 0]] = False
            self._cached = block, texts, torch.from_numpy(order)
        return self._cached[1:]


class TextsDataModule(StudyData):
    """Texts for an LM to read, of any length.

    Training texts come in blocks of ``batch_tokens * block_steps`` tokens, whose activations are
    shuffled together; each is used once. After the last text the first ones follow in a new order.
    Other texts are held out for validation.

    Args:
        lm: The LM whose tokenizer cuts the texts; the program `lincorr` passes the LM of the study.
        texts: Files or folders: ``.txt``, ``.jsonl`` or ``.csv``. None takes the sentences about
            the tiny world that the LM was trained on, if ``world.json`` lies beside the LM.
        key: Field of a ``.jsonl`` or ``.csv`` row that holds its text.
        sample_by: Whether a ``.txt`` file has a text per ``line`` or is one ``document``.
        knowledge: Kinds of knowledge that sentences about the tiny world state, by name or family.
            None takes all that the LM was trained on.
        n_tokens: Number of tokens to train on, over all ranks.
        batch_tokens: Number of tokens of a step, on each rank.
        block_steps: Number of steps whose tokens are shuffled together.
        max_length: Maximum length of a row in tokens; longer texts are cut into several rows.
        skip_tokens: Number of tokens at the beginning of a row that do not count. None skips the
            tokenizer's special tokens, whose activations are unlike all others.
        n_held_out: Number of texts held out from training, for validation.
        n_texts: Maximum number of texts that a study without training reads; None: `n_held_out`.
        eval_batch_size: Number of held-out rows per batch.
        seed: Seed of the order and of the held-out texts.
        training_tokens: Number of tokens of other texts that a test run first trains SAEs on; the
            program `lincorr` passes that of the study. None or 0 trains none.
    """

    batch_type = TokenRows
    free_settings = frozenset({"texts", "eval_batch_size"})

    def __init__(
        self,
        lm: LanguageModel | None = None,
        texts: list[str] | str | None = None,
        key: str = "text",
        sample_by: SampleBy = "line",
        knowledge: list[str] | None = None,
        n_tokens: int = 500_000,
        batch_tokens: int = 2048,
        block_steps: int = 16,
        max_length: int = 128,
        skip_tokens: int | None = None,
        n_held_out: int = 4000,
        n_texts: int | None = None,
        eval_batch_size: int = 250,
        seed: int = 0,
        training_tokens: int | None = None,
    ) -> None:
        super().__init__(lm)
        self.save_hyperparameters(ignore=["lm", "training_tokens"])
        self.require_at_least(
            "n_texts",
            "skip_tokens",
            n_tokens=1,
            batch_tokens=1,
            block_steps=1,
            max_length=2,
            skip_tokens=0,
            n_held_out=1,
            n_texts=1,
            eval_batch_size=1,
        )
        self.training_tokens = training_tokens or 0
        self.n_skipped = 0
        self._rows: list[list[int]] = []
        self._held_out: list[list[int]] = []

    def setup(self, stage: str | None = None) -> None:
        """Read and tokenize the texts, the same on every rank."""
        trains = stage in (None, "fit")
        skip, n_texts, n_held_out = (
            self.hparams[name] for name in ("skip_tokens", "n_texts", "n_held_out")
        )
        self.n_skipped = len(self.language_model.prefix) if skip is None else skip
        texts = self._find_texts(self.hparams["knowledge"])
        held_out, others = self._split(texts, n_held_out if trains else n_texts or n_held_out)
        self._held_out = [row for row in self._tokenize(held_out) if len(row) > self.n_skipped + 1]
        if not self._held_out:
            raise SubjectsError(
                f"none of the {len(held_out)} texts that are held out is longer than "
                f"{self.n_skipped + 1} tokens. Take longer data.texts, or lower data.skip_tokens."
            )
        if trains:
            self._rows = self._training_rows(others)
            self.keep_contents(texts=[self._rows, self._held_out])
        elif self.training_tokens:  # on all knowledge
            read = set(held_out)
            others = [text for text in self._find_texts(None) if text not in read]
            self._rows = self._training_rows(self._split(others, 1)[1])

    def _find_texts(self, knowledge: Sequence[str] | None) -> list[str]:
        """Return the distinct texts, of the tiny world those about some knowledge (None: all)."""
        texts, key, sample_by = (self.hparams[name] for name in ("texts", "key", "sample_by"))
        if texts is not None:
            rows = read_texts(texts, key, sample_by)
            return list(dict.fromkeys(row.text for row in rows))
        name = self.language_model.config.name_or_path
        if (world := tiny_world.world_file(self.language_model.location)) is None:
            raise ConfigError(
                f"data.texts is null, for sentences about the tiny world, but {name} has no "
                f"{tiny_world.WORLD_FILE} beside it. Name files of texts."
            )
        kinds = Catalogue.load().select(knowledge or tiny_world.world_corpus())
        statements = tiny_world.World.load(world).statements(kinds)
        return list(dict.fromkeys(f"{statement.text}." for statement in statements))

    def _split(self, texts: Sequence[str], n: int) -> tuple[list[str], list[str]]:
        order = np.random.default_rng([self.hparams["seed"], 0]).permutation(len(texts))
        chosen, others = np.sort(order[:n]), np.sort(order[n:])
        return [texts[i] for i in chosen], [texts[i] for i in others]

    def _training_rows(self, texts: Sequence[str]) -> list[list[int]]:
        rows = [row for row in self._tokenize(texts) if len(row) > self.n_skipped]
        n_tokens = sum(len(row) - self.n_skipped for row in rows)
        if n_tokens < (n_needed := self.hparams["batch_tokens"]):
            raise SubjectsError(
                f"the {len(texts)} texts that are not held out have {n_tokens} tokens to train on, "
                f"and a step alone takes {n_needed}. Name more data.texts, or lower "
                "data.n_held_out or data.n_texts."
            )
        return rows

    def _tokenize(self, texts: Sequence[str]) -> list[list[int]]:
        lm = self.language_model
        longest = self.hparams["max_length"]
        n = min(longest, lm.max_length or longest) - len(lm.prefix)
        if not texts:
            return []
        encoded = lm.tokenizer(
            list(texts),
            add_special_tokens=False,
            return_attention_mask=False,
            return_token_type_ids=False,
            verbose=False,
        )["input_ids"]
        return [lm.prefix + ids[i : i + n] for ids in encoded for i in range(0, len(ids), n)]

    def blocks(self, rank: int = 0, n_shards: int = 1) -> TextBlocks:
        """Return the training steps of a data shard."""
        n_tokens = self.training_tokens or self.hparams["n_tokens"]
        settings = {name: self.hparams[name] for name in ("batch_tokens", "block_steps", "seed")}
        shard = {"rank": rank, "n_shards": n_shards}
        return TextBlocks(self._rows, self.n_skipped, n_tokens, **settings, **shard)

    def train_dataloader(self) -> ResumableLoader:
        shard = data_shard(self.trainer)
        return ResumableLoader(self.blocks(shard.number, shard.n), self.trainer)

    def val_dataloader(self) -> DataLoader[TokenRows]:
        """Return a loader of the held-out texts, those of similar length together."""
        size = self.hparams["eval_batch_size"]
        rows = sorted(self._held_out, key=len)
        batches = [pad_rows(rows[i : i + size], self.n_skipped) for i in range(0, len(rows), size)]
        return make_loader(batches, self.trainer)

    def test_dataloader(self) -> DataLoader[TokenRows] | list[DataLoader[Any]]:
        """Return a loader of texts; with `training_tokens`, `TextBlocks` of others come first."""
        if not self.training_tokens:
            return self.val_dataloader()
        blocks = [self.blocks()]
        return [DataLoader(blocks, batch_size=None), self.val_dataloader()]  # type: ignore[arg-type]


@dataclass  # not frozen: Lightning copies a batch field by field when it moves it to a device
class TokenBatch:
    """Prompts of one length, ``(n_prompts, n_tokens)``, without the tokenizer's special tokens.

    Each has a name, such as its file and line, and a corpus; the first one has the number `first`.
    Of the whole data, `n_skipped` texts were too short. For `is_padding` see `make_loader`.
    """

    tokens: Tensor
    names: list[str]
    corpora: list[str]
    first: int = 0
    n_skipped: int = 0
    is_padding: bool = False


class TokenizedTextDataModule(StudyData):
    """The first tokens of whole texts, equally many of each.

    Texts that are too short are skipped and counted, with a warning.

    Args:
        lm: The LM whose tokenizer cuts the texts; the program `lincorr` passes the LM of the study.
        texts: Files or folders: ``.txt``, ``.jsonl`` or ``.csv``. None takes texts about the tiny
            world that the LM was trained on; LMs without one get the embedded LM's world.
        key: Field of a ``.jsonl`` or ``.csv`` row that holds its text. The row's field ``corpus``,
            if there is one, names the corpus; else a file is a corpus.
        sample_by: Whether a ``.txt`` file has a text per ``line`` or is one ``document``.
        n_tokens: Number of tokens of a prompt.
        n_texts: Maximum number of texts, the first ones; None: all, or 96 about the tiny world.
        batch_size: Maximum number of prompts per batch.
        seed: Seed of the texts about the tiny world.
    """

    batch_type = TokenBatch

    def __init__(
        self,
        lm: LanguageModel | None = None,
        texts: list[str] | str | None = None,
        key: str = "text",
        sample_by: SampleBy = "line",
        n_tokens: int = 1024,
        n_texts: int | None = None,
        batch_size: int = 1,
        seed: int = 0,
    ) -> None:
        super().__init__(lm)
        self.save_hyperparameters(ignore=["lm"])
        self.require_at_least("n_texts", n_tokens=4, n_texts=1, batch_size=1)
        self.batch_size = batch_size
        self.prompts: TokenBatch

    def setup(self, stage: str) -> None:
        """Read and tokenize the texts, the same on every rank."""
        names = ("texts", "key", "sample_by", "n_tokens", "n_texts", "seed")
        settings = {name: self.hparams[name] for name in names}
        self.prompts = read_prompts(self.language_model, **settings)
        require_items(self.trainer, len(self.prompts.names), "texts", "give more texts")

    def test_dataloader(self) -> DataLoader[TokenBatch]:
        whole = self.prompts
        edges = batch_edges(self.trainer, len(whole.names), self.batch_size)
        batches = [
            TokenBatch(whole.tokens[i], whole.names[i], whole.corpora[i], i.start, whole.n_skipped)
            for i in (slice(*edge) for edge in pairwise(edges))
        ]
        return make_loader(batches, self.trainer)


def read_prompts(
    lm: LanguageModel,
    texts: str | Sequence[str] | None = None,
    key: str = "text",
    n_tokens: int = 1024,
    n_texts: int | None = None,
    seed: int = 0,
    owner: str = "data",
    sample_by: SampleBy = "line",
) -> TokenBatch:
    """Read texts and take the first tokens of each, as one batch; warn of those too short.

    The arguments are those of `TokenizedTextDataModule`; `owner` is the prefix of the settings in
    messages, as ``data`` of ``data.texts``.
    """
    limit = None if lm.max_length is None else lm.max_length - len(lm.prefix)
    if limit is not None and n_tokens > limit:
        raise ConfigError(
            f"{owner}.n_tokens is {n_tokens}; {lm.config.name_or_path} reads {limit} at most."
        )
    if texts is None:
        n_texts = n_texts or 96
        # A word is at least one token.
        world = tiny_world.world_file(lm.location)
        source = tiny_world.world_documents(n_texts, n_tokens, seed, world)
    else:
        source = read_texts(texts, key, sample_by, owner)
    kept: list[tuple[str, str, list[int]]] = []
    n_skipped = longest = 0
    for text in source:
        if len(kept) == n_texts:
            break
        ids = lm.tokenizer(text.text, add_special_tokens=False, verbose=False)["input_ids"]
        longest = max(longest, len(ids))
        if len(ids) < n_tokens:
            n_skipped += 1
        else:
            kept.append((text.where, text.corpus, ids[:n_tokens]))
    if not kept:
        raise SubjectsError(
            f"all {n_skipped} texts of {owner}.texts {texts} are shorter than {owner}.n_tokens, "
            f"{n_tokens}; the longest has {longest}. Lower {owner}.n_tokens, or take longer texts; "
            f"if .txt files are whole documents, set {owner}.sample_by to document."
        )
    if n_skipped:
        rank_zero_warn(
            f"{n_skipped} of {n_skipped + len(kept)} texts are shorter than {owner}.n_tokens, "
            f"{n_tokens}, and are skipped."
        )
    names, corpora, rows = map(list, zip(*kept, strict=True))
    return TokenBatch(torch.tensor(rows), names, corpora, n_skipped=n_skipped)
