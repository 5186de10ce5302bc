"""Whole texts as prompts of one length, batched the same everywhere."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import lightning as L
import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from lincorr_lightning.data.prompt_inputs import EveryBatchOnce
from lincorr_lightning.data.text_files import read_texts
from lincorr_lightning.data.world_texts import Text, world_texts
from lincorr_lightning.errors import ConfigError, InputsError
from lincorr_lightning.lm.language_model import LanguageModel

_SAMPLE = 96
# A token of a text is hardly ever longer; what lies beyond need not be cut into tokens.
_SIGNS_PER_TOKEN = 32


@dataclass  # not frozen: Lightning copies a batch field by field when it moves it to a device
class TokenBatch:
    """Prompts of one length.

    Attributes:
        tokens: Token ids, without what the LM's tokenizer puts in front, ``(n_prompts, n_tokens)``.
        first: Number of the first of them; the others follow.
        is_padding: The batch only keeps a process in step with the others: its forward runs (a
            sharded LM needs every process in it), its numbers do not count.
    """

    tokens: Tensor
    first: int
    is_padding: bool = False


class _TokenBatches(Dataset[TokenBatch]):
    """Consecutive batches; item -1 is a padding batch."""

    def __init__(self, rows: Sequence[Sequence[int]], batch_size: int) -> None:
        self._rows, self._size = torch.tensor(rows), batch_size

    def __len__(self) -> int:
        return -(-len(self._rows) // self._size)

    def __getitem__(self, index: int) -> TokenBatch:
        first = max(index, 0) * self._size
        return TokenBatch(self._rows[first : first + self._size], first, is_padding=index < 0)


def _as_is(batch: Any) -> Any:
    return batch


class TextPrompts(L.LightningDataModule):
    """The first tokens of whole texts, as many of each.

    Needs a LightningModule that holds its LM as ``lm``. Texts that are too short are skipped,
    counted and told of.

    Args:
        texts: A ``.txt`` file (one text), a ``.jsonl`` or ``.csv`` file (one text a row), or a
            folder with such files; null takes texts about the embedded tiny world.
        key: Where a row of ``.jsonl`` or ``.csv`` has its text. What it has as ``corpus``, if
            anything, says which texts belong together; else a file's rows, and a folder's ``.txt``
            files, are a corpus.
        n_tokens: Tokens of a prompt.
        n_texts: How many texts at most, the first ones; null takes all (96 of the tiny world's).
        batch_size: Prompts in a forward.
        seed: Of the tiny world's texts.

    Raises:
        ConfigError: A number that is too small.
    """

    def __init__(
        self,
        texts: str | None = None,
        key: str = "text",
        n_tokens: int = 1024,
        n_texts: int | None = None,
        batch_size: int = 1,
        seed: int = 0,
    ) -> None:
        super().__init__()
        least = (("n_tokens", n_tokens, 4), ("n_texts", n_texts, 1), ("batch_size", batch_size, 1))
        for name, value, minimum in least:
            if value is not None and value < minimum:
                raise ConfigError(f"data.{name} is {value}; it must be at least {minimum}.")
        self.save_hyperparameters()
        self.prompts: list[Text] = []
        self.n_skipped = 0
        self._rows: list[list[int]] = []

    def setup(self, stage: str) -> None:
        """Read the texts and cut them into tokens; the same on every process.

        Raises:
            ConfigError: The LM has positions for fewer tokens.
            InputsError: There are no texts, or all are too short.
        """
        del stage
        if self._rows:
            return
        lm = self._lm()
        n_tokens, n_texts = self.hparams["n_tokens"], self.hparams["n_texts"]
        room = None if lm.max_length is None else lm.max_length - len(lm.prefix)
        if room is not None and n_tokens > room:
            raise ConfigError(
                f"data.n_tokens is {n_tokens}, but {lm.config.name_or_path} reads {room} tokens of "
                "a text at most. Lower data.n_tokens."
            )
        longest = 0
        for text in self._texts():
            if len(self._rows) == n_texts:
                break
            row = _tokens(lm, text.text, n_tokens)
            longest = max(longest, len(row))
            if len(row) < n_tokens:
                self.n_skipped += 1
            else:
                self.prompts.append(text)
                self._rows.append(row)
        if not self._rows:
            raise InputsError(
                f"all {self.n_skipped} texts of data.texts {self.hparams['texts']} are shorter "
                f"than data.n_tokens, {n_tokens}; the longest has {longest}. Lower data.n_tokens, "
                "or take longer texts."
            )
        if self.n_skipped:
            rank_zero_warn(
                f"{self.n_skipped} of {self.n_skipped + len(self._rows)} texts are shorter than "
                f"data.n_tokens, {n_tokens}, and skipped."
            )

    def _texts(self) -> Any:
        if self.hparams["texts"] is not None:
            return read_texts(self.hparams["texts"], self.hparams["key"])
        # A word is a token at least.
        return world_texts(
            self.hparams["n_texts"] or _SAMPLE, self.hparams["n_tokens"], self.hparams["seed"]
        )

    def _lm(self) -> LanguageModel:
        module = self.trainer.lightning_module if self.trainer is not None else None
        lm = getattr(module, "lm", None)
        if not isinstance(lm, LanguageModel):
            raise ConfigError(
                "TextPrompts cuts texts into the tokens of the LightningModule's `lm`; "
                f"{type(module).__name__} has none. Choose a study of an LM, such as TokenGeometry."
            )
        return lm

    def test_dataloader(self) -> DataLoader[TokenBatch]:
        """All prompts, dealt out to the processes a batch at a time."""
        batches = _TokenBatches(self._rows, self.hparams["batch_size"])
        rank, n_processes = 0, 1
        if self.trainer is not None:
            rank, n_processes = self.trainer.global_rank, self.trainer.world_size
        return DataLoader(
            batches,
            batch_size=None,
            sampler=EveryBatchOnce(batches, rank, n_processes),
            collate_fn=_as_is,
        )


def _tokens(lm: LanguageModel, text: str, n_tokens: int) -> list[int]:
    """The first tokens of a text, fewer if it has fewer."""

    def cut(part: str) -> list[int]:
        return list(lm.tokenizer(part, add_special_tokens=False, verbose=False)["input_ids"])

    # One token more, which the cut may have spoiled.
    row = cut(text[: _SIGNS_PER_TOKEN * (n_tokens + 1)])
    if len(row) <= n_tokens:
        row = cut(text)
    return row[:n_tokens]
