"""Whole texts as prompts of one length, batched the same everywhere."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import lightning as L
import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor
from torch.utils.data import DataLoader

from lincorr_lightning.data.samplers import make_loader
from lincorr_lightning.data.text_files import read_texts
from lincorr_lightning.distributed import batch_edges, require_items
from lincorr_lightning.errors import ConfigError, SubjectsError
from lincorr_lightning.lm.language_model import LanguageModel
from lincorr_lightning.pretraining.texts import Text, world_texts

_SAMPLE = 96
# A token of a text is hardly ever longer; what lies beyond need not be cut into tokens.
_SIGNS_PER_TOKEN = 32


@dataclass  # not frozen: Lightning copies a batch field by field when it moves it to a device
class TokenBatch:
    """Prompts of one length.

    Attributes:
        tokens: Token ids, without what the LM's tokenizer puts in front, ``(n_prompts, n_tokens)``.
        first: Number of the first of them; the others follow.
        is_padding: The batch only keeps a process in step with the others: its forward runs (an
            LM in pieces needs every process in it), its numbers do not count.
    """

    tokens: Tensor
    first: int
    is_padding: bool = False


class TokenizedTextDataModule(L.LightningDataModule):
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
        batch_size: Prompts in a forward at most.
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
            SubjectsError: There are no texts, or all are too short.
        """
        del stage
        if self._rows:
            return
        wanted = {name: self.hparams[name] for name in ("key", "n_tokens", "n_texts", "seed")}
        found = read_prompts(self._lm(), self.hparams["texts"], **wanted)
        self.prompts, self._rows, self.n_skipped = found.texts, found.rows, found.n_skipped
        require_items(self.trainer, len(self._rows), "texts", "give more texts")

    def _lm(self) -> LanguageModel:
        module = self.trainer.lightning_module if self.trainer is not None else None
        lm = getattr(module, "lm", None)
        if not isinstance(lm, LanguageModel):
            raise ConfigError(
                "TokenizedTextDataModule cuts texts into the tokens of the LightningModule's `lm`; "
                f"{type(module).__name__} has none. Choose a study of an LM, such as TokenGeometry."
            )
        return lm

    def test_dataloader(self) -> DataLoader[TokenBatch]:
        """All prompts, dealt out to the processes a batch at a time."""
        edges = batch_edges(self.trainer, len(self._rows), self.hparams["batch_size"])
        rows = torch.tensor(self._rows)
        batches = [TokenBatch(rows[i:j], i) for i, j in pairwise(edges)]
        return make_loader(batches, self.trainer)


class Prompts(NamedTuple):
    """The first tokens of texts that are long enough.

    Attributes:
        texts: The texts.
        rows: Token ids of each, all as many.
        n_skipped: Texts that were too short.
    """

    texts: list[Text]
    rows: list[list[int]]
    n_skipped: int


def read_prompts(
    lm: LanguageModel,
    texts: str | None,
    key: str = "text",
    n_tokens: int = 1024,
    n_texts: int | None = None,
    seed: int = 0,
    who: str = "data",
) -> Prompts:
    """Read texts and cut them into tokens; what is skipped is told of.

    Args:
        lm: Whose tokens.
        texts: A file or a folder; None takes texts about the embedded tiny world.
        key: Where a row has its text.
        n_tokens: Tokens of a prompt.
        n_texts: How many at most.
        seed: Of the tiny world's texts.
        who: Whose settings these are, for messages.

    Raises:
        ConfigError: The LM has positions for fewer tokens.
        SubjectsError: There are no texts, or all are too short.
    """
    room = None if lm.max_length is None else lm.max_length - len(lm.prefix)
    if room is not None and n_tokens > room:
        raise ConfigError(
            f"{who}.n_tokens is {n_tokens}, but {lm.config.name_or_path} reads {room} tokens of a "
            f"text at most. Lower {who}.n_tokens."
        )
    if texts is None:
        # A word is a token at least.
        source = world_texts(n_texts or _SAMPLE, n_tokens, seed)
    else:
        source = read_texts(texts, key, who)
    found = Prompts([], [], 0)
    longest = 0
    for text in source:
        if len(found.rows) == n_texts:
            break
        row = _tokens(lm, text.text, n_tokens)
        longest = max(longest, len(row))
        if len(row) < n_tokens:
            found = found._replace(n_skipped=found.n_skipped + 1)
        else:
            found.texts.append(text)
            found.rows.append(row)
    if not found.rows:
        raise SubjectsError(
            f"all {found.n_skipped} texts of {who}.texts {texts} are shorter than {who}.n_tokens, "
            f"{n_tokens}; the longest has {longest}. Lower {who}.n_tokens, or take longer texts."
        )
    if found.n_skipped:
        rank_zero_warn(
            f"{found.n_skipped} of {found.n_skipped + len(found.rows)} texts are shorter than "
            f"{who}.n_tokens, {n_tokens}, and skipped."
        )
    return found


def _tokens(lm: LanguageModel, text: str, n_tokens: int) -> list[int]:
    """The first tokens of a text, fewer if it has fewer."""

    def cut(part: str) -> list[int]:
        return list(lm.tokenizer(part, add_special_tokens=False, verbose=False)["input_ids"])

    # One token more, which the cut may have spoiled.
    row = cut(text[: _SIGNS_PER_TOKEN * (n_tokens + 1)])
    if len(row) <= n_tokens:
        row = cut(text)
    return row[:n_tokens]
