"""Texts that an LM reads, dealt out by tokens: what SAEs are trained on."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import numpy.typing as npt
import torch
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from lincorr_lightning.data.resumable_loader import ResumableLoader
from lincorr_lightning.data.row_files import read_rows
from lincorr_lightning.data.tiny_world.world import World
from lincorr_lightning.distributed import data_shard
from lincorr_lightning.errors import ConfigError, SubjectsError
from lincorr_lightning.knowledge import Catalogue
from lincorr_lightning.lm.language_model import LanguageModel
from lincorr_lightning.lm.loading import find_checkpoint

WORLD_FILE = "world.json"
# The embedded LM's own corpus (configs/pretraining.yaml).
SAID = (
    "attribute", "math", "birthplace_es", "city_es", "country_es", "continent_es", "language_es",
    "company_es", "job_es", "gender_es", "birthplace_zh", "city_zh", "country_zh", "continent_zh",
    "language_zh", "company_zh", "job_zh", "gender_zh", "object_color", "object_size",
    "object_heat", "object_price", "object_genre", "simile_color", "simile_size", "simile_heat",
    "simile_price", "simile_genre",
)  # fmt: skip


@dataclass  # not frozen: Lightning copies a batch field by field when it moves it to a device
class TokenStep:
    """One step's share of a block of texts; the texts themselves are asked for by their block.

    Attributes:
        block: Number of the block of texts.
        index: Number of the step within it.
    """

    block: int
    index: int


@dataclass
class TokenRows:
    """Held-out texts, padded on the right.

    Attributes:
        input_ids: ``(n_texts, longest)``.
        attention_mask: 1 at true tokens, same shape.
        counted: Where activations are read: true tokens but those skipped, bool, same shape.
    """

    input_ids: Tensor
    attention_mask: Tensor
    counted: Tensor


@dataclass(frozen=True)
class Blocks(Dataset[TokenStep]):
    """Texts in a shuffled order without end, cut into blocks of as many tokens.

    Nothing is kept between steps, so that a resumed run goes on with the texts of the run that was
    not interrupted.
    """

    order: npt.NDArray[np.int64]
    starts: npt.NDArray[np.int64]
    n_blocks: int
    steps_per_block: int
    rank: int
    n_processes: int
    told: Mapping[str, Any]

    @property
    def determined_by(self) -> dict[str, Any]:
        """What the contents of a step follow from."""
        return {**self.told, "n_processes": self.n_processes}

    def __len__(self) -> int:
        """Steps of this process."""
        return self.n_blocks // self.n_processes * self.steps_per_block

    def __getitem__(self, index: int) -> TokenStep:
        block, step = divmod(index % len(self), self.steps_per_block)
        return TokenStep(block * self.n_processes + self.rank, step)

    def texts(self, block: int) -> list[int]:
        """Which texts a block holds."""
        return self.order[self.starts[block] : self.starts[block + 1]].tolist()


class TextsDataModule(L.LightningDataModule):
    """Texts for an LM to read.

    They are dealt out in blocks of ``batch_tokens * block_steps`` tokens. Activations of a block
    are shuffled together; each is used once. Texts are read again when all have been.

    Args:
        texts: Files: ``.txt`` (a text a line), ``.jsonl`` or ``.csv`` (a field ``text``). None
            takes what the tiny world says, for an LM that has a ``world.json`` beside it.
        knowledges: What the world says: knowledges or families. None takes all it was trained on.
        n_tokens: Tokens to train on, over all processes.
        batch_tokens: Tokens of a step, of each process.
        block_steps: Steps whose tokens are shuffled together.
        max_length: Longest row in tokens; longer texts are cut into several.
        skip_tokens: Tokens at the beginning of a row that are not read. None skips the special
            tokens that the tokenizer puts there, whose activations are like no others.
        n_held_out: Texts that are kept for scoring; where nothing is trained, as many as there are
            if these are fewer.
        eval_batch_size: Held-out texts of a forward.
        knowledge_files: YAML files with knowledge of your own.
        seed: Of the order and of what is held out.

    Attributes:
        left_out: Texts that are neither trained on nor held out, as if they were not there.

    Raises:
        ConfigError: A setting has no meaning.
    """

    def __init__(
        self,
        texts: list[str] | None = None,
        knowledges: list[str] | None = None,
        n_tokens: int = 500_000,
        batch_tokens: int = 2048,
        block_steps: int = 16,
        max_length: int = 128,
        skip_tokens: int | None = None,
        n_held_out: int = 4000,
        eval_batch_size: int = 250,
        knowledge_files: list[str] | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        least = dict.fromkeys(("n_tokens", "batch_tokens", "block_steps", "eval_batch_size"), 1)
        least |= {"n_held_out": 1, "max_length": 2, "skip_tokens": 0}
        for name, lowest in least.items():
            value = self.hparams[name]
            if value is not None and value < lowest:
                raise ConfigError(f"data.{name} is {value}; it must be at least {lowest}.")
        if n_tokens < batch_tokens * block_steps:
            raise ConfigError(
                f"data.n_tokens is {n_tokens}, less than one block of data.batch_tokens * "
                f"data.block_steps = {batch_tokens * block_steps}. Train on more tokens, or make "
                "blocks smaller."
            )
        self._rows: list[list[int]] = []
        self._held_out: list[list[int]] = []
        self.left_out: frozenset[str] = frozenset()

    # -- reading ---------------------------------------------------------------------------------

    def setup(self, stage: str | None = None) -> None:
        """Read and tokenize the texts; the same on every process.

        Raises:
            SubjectsError: There are too few, or a file cannot be read.
            ConfigError: No texts are named and the LM has no world of its own.
        """
        trains = stage in (None, "fit")
        if self._held_out and (self._rows or not trains):
            return
        module = getattr(self.trainer, "lightning_module", None)
        lm = getattr(module, "language_model", None)
        if not isinstance(lm, LanguageModel):
            raise ConfigError(
                f"TextsDataModule tokenizes for the LM of a study such as SparseAutoencoders; "
                f"model is {type(module).__name__}."
            )
        self.prepare(lm, trains)

    def prepare(self, lm: LanguageModel, trains: bool = True) -> None:
        """Read the texts with an LM's tokenizer.

        Args:
            lm: The LM.
            trains: Whether texts are needed to train on, beside those that are held out.

        Raises:
            SubjectsError: There are too few, or a file cannot be read.
            ConfigError: No texts are named and the LM has no world of its own.
        """
        prefix = lm.prefix
        skip = self.hparams["skip_tokens"]
        self.n_skipped: int = len(prefix) if skip is None else skip
        texts = self._all_texts(lm)
        n_held_out: int = self.hparams["n_held_out"]
        held_out = self._held_out_of(len(texts))
        self.n_texts = len(texts)
        read = [i for i in range(len(texts)) if trains or i in held_out]
        rows = _token_rows([texts[i] for i in read], lm, self.hparams["max_length"])
        self._held_out = [
            row
            for i, of_text in zip(read, rows, strict=True)
            if i in held_out
            for row in of_text
            if len(row) > self.n_skipped + 1
        ]
        if not self._held_out:
            raise SubjectsError(
                f"none of the {len(held_out)} texts that are held out is longer than "
                f"{self.n_skipped + 1} tokens, of which {self.n_skipped} are not read. Name other "
                "texts as data.texts, or lower data.skip_tokens."
            )
        if not trains:
            if len(texts) < n_held_out:
                rank_zero_info(
                    f"data.n_held_out is {n_held_out}, but there are {len(texts)} different texts; "
                    "all of them are read"
                )
            return
        train = [
            row for i, of_text in zip(read, rows, strict=True) if i not in held_out
            for row in of_text
        ]  # fmt: skip
        self._rows = [row for row in train if len(row) > self.n_skipped]
        self._counts = np.array([len(row) - self.n_skipped for row in self._rows], dtype=np.int64)
        n_tokens = int(self._counts.sum())
        if n_tokens < self.hparams["batch_tokens"]:
            raise SubjectsError(
                f"there are {len(texts)} different texts, of which data.n_held_out = {n_held_out} "
                f"takes {len(held_out)}: {n_tokens} tokens are left to train on, and a step alone "
                f"takes {self.hparams['batch_tokens']}. Name more texts as data.texts, or lower "
                "data.n_held_out."
            )

    def held_out_texts(self, lm: LanguageModel) -> list[str]:
        """The texts that are held out, in no order.

        Args:
            lm: The LM, whose world's texts they may be.

        Raises:
            SubjectsError: A file cannot be read.
            ConfigError: No texts are named and the LM has no world of its own.
        """
        texts = self._all_texts(lm)
        return [texts[i] for i in self._held_out_of(len(texts))]

    def _all_texts(self, lm: LanguageModel) -> list[str]:
        """All that are different, without those that are left to another study."""
        return [text for text in dict.fromkeys(self._texts(lm)) if text not in self.left_out]

    def _held_out_of(self, n: int) -> set[int]:
        order = np.random.default_rng([self.hparams["seed"], 0]).permutation(n)
        return set(order[: self.hparams["n_held_out"]].tolist())

    def _texts(self, lm: LanguageModel) -> Iterator[str]:
        files = self.hparams["texts"]
        if files is not None:
            for path in files:
                yield from _read(path)
            return
        world = Path(find_checkpoint(lm.config).location) / WORLD_FILE
        if not world.is_file():
            raise ConfigError(
                f"data.texts is null, which stands for what the tiny world says, but "
                f"{lm.config.name_or_path} has no {WORLD_FILE} beside it. Name files of texts as "
                "data.texts."
            )
        catalogue = Catalogue.load(*(self.hparams["knowledge_files"] or ()))
        said = self.hparams["knowledges"] or list(SAID)
        for statement in World.load(world).statements(catalogue.select(said)):
            yield f"{statement.text}."

    # -- dealing ---------------------------------------------------------------------------------

    def blocks(self, rank: int = 0, n_processes: int = 1) -> Blocks:
        """Blocks of training texts.

        Args:
            rank: Number of the process.
            n_processes: How many there are.

        Raises:
            ConfigError: There is not one block for each process.
        """
        settings = self.hparams
        size = settings["batch_tokens"] * settings["block_steps"]
        n_blocks = settings["n_tokens"] // size
        if n_blocks < n_processes:
            raise ConfigError(
                f"data.n_tokens is {settings['n_tokens']}: {n_blocks} blocks of {size} tokens for "
                f"{n_processes} processes. Train on more tokens, or make blocks smaller."
            )
        # A block ends with a text, so that it is larger than asked for by less than one.
        needed = n_blocks * (size + int(self._counts.max()))
        epochs = -(-needed // int(self._counts.sum()))
        order = np.concatenate(
            [
                np.random.default_rng([settings["seed"], 1, epoch]).permutation(len(self._rows))
                for epoch in range(epochs)
            ]
        )
        ends = self._counts[order].cumsum()
        starts = [0]
        for _ in range(n_blocks):
            done = ends[starts[-1] - 1] if starts[-1] else 0
            starts.append(int(np.searchsorted(ends, done + size)) + 1)
        told = {
            name: settings[name]
            for name in ("n_tokens", "batch_tokens", "block_steps", "max_length", "seed")
        }
        return Blocks(
            order, np.array(starts), n_blocks, settings["block_steps"], rank, n_processes,
            told | {"n_texts": len(self._rows), "skipped": self.n_skipped},
        )  # fmt: skip

    def rows_of(self, block: int) -> list[list[int]]:
        """Token ids of the texts of a block.

        Args:
            block: Its number.
        """
        return [self._rows[i] for i in self._dealt.texts(block)]

    def train_dataloader(self) -> ResumableLoader:
        """Steps, each by its block and its number there."""
        share = data_shard(self.trainer)
        self._dealt = self.blocks(share.number, share.n)
        return ResumableLoader(self._dealt, self.trainer)

    def val_dataloader(self) -> DataLoader[TokenRows]:
        """Held-out texts, those of like length together; each process has a share of them."""
        rows = sorted(self._held_out, key=len)
        size: int = self.hparams["eval_batch_size"]
        batches = [pad_rows(rows[i : i + size], self.n_skipped) for i in range(0, len(rows), size)]
        share = data_shard(self.trainer)
        # As many for each process: what is added counts nowhere.
        while len(batches) % share.n:
            last = batches[-1]
            batches.append(
                TokenRows(last.input_ids, last.attention_mask, torch.zeros_like(last.counted))
            )
        sampler: DistributedSampler[Any] = DistributedSampler(
            batches,  # type: ignore[arg-type]
            num_replicas=share.n, rank=share.number, shuffle=False,
        )  # fmt: skip
        return DataLoader(batches, batch_size=None, sampler=sampler)  # type: ignore[arg-type]

    def test_dataloader(self) -> DataLoader[TokenRows]:
        """Held-out texts, for a study that trains nothing."""
        return self.val_dataloader()


def pad_rows(rows: Sequence[Sequence[int]], n_skipped: int = 0) -> TokenRows:
    """Pad token ids on the right.

    Args:
        rows: Token ids of each text.
        n_skipped: Tokens at the beginning of each that do not count.
    """
    lengths = torch.tensor([len(row) for row in rows])
    longest = int(lengths.max())
    ids = torch.tensor([[*row, *[0] * (longest - len(row))] for row in rows])
    positions = torch.arange(longest)
    mask = positions < lengths[:, None]
    return TokenRows(ids, mask.long(), mask & (positions >= n_skipped))


def _token_rows(texts: Sequence[str], lm: LanguageModel, max_length: int) -> list[list[list[int]]]:
    """Rows of each text, every one after the tokenizer's own prefix."""
    prefix = lm.prefix
    longest = max_length - len(prefix)
    if lm.max_length is not None:
        longest = min(longest, lm.max_length - len(prefix))
    if longest < 1:
        raise ConfigError(
            f"data.max_length is {max_length}, which the {len(prefix)} special tokens before each "
            "text fill alone. Make rows longer."
        )
    encoded = lm.tokenizer(
        list(texts), add_special_tokens=False, return_attention_mask=False, verbose=False
    )["input_ids"]
    return [
        [prefix + ids[start : start + longest] for start in range(0, len(ids), longest)]
        for ids in encoded
    ]


def _read(path: str | Path) -> Iterator[str]:
    path = Path(path)
    if path.suffix.lower() != ".txt":
        for where, entry in read_rows(path, "texts", ("text",)):
            text = entry.get("text") if isinstance(entry, Mapping) else None
            if not isinstance(text, str):
                raise SubjectsError(f'{where}: an object with a "text" is needed, not {entry!r}.')
            if text.strip():
                yield text
        return
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise SubjectsError(f"the texts in {path} cannot be read: {error}.") from error
    yield from (line.strip() for line in lines if line.strip())
