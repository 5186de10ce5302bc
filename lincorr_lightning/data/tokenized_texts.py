"""The first tokens of whole texts: prompts of one length, batched alike on any number of ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor
from torch.utils.data import DataLoader

from lincorr_lightning.data.files import SampleBy, Text, read_texts
from lincorr_lightning.data.loaders import make_loader
from lincorr_lightning.data.tiny_world.world import world_documents, world_file
from lincorr_lightning.distributed import batch_edges, require_items
from lincorr_lightning.errors import ConfigError, SubjectsError, require
from lincorr_lightning.lm.language_model import LanguageModel
from lincorr_lightning.study import StudyData

DEFAULT_N_TEXTS = 96
"""Number of texts about the tiny world."""


class FirstTokens(NamedTuple):
    """Texts, their first tokens, and the number of texts that were too short."""

    texts: list[Text]
    rows: list[list[int]]
    n_skipped: int


@dataclass  # not frozen: Lightning copies a batch field by field when it moves it to a device
class TokenBatch:
    """Prompts of one length.

    Attributes:
        tokens: Token ids without the tokenizer's special tokens, ``(n_prompts, n_tokens)``.
        names: Name of each prompt, such as its file and line.
        corpora: Corpus of each prompt.
        first: Number of the first prompt; the others follow.
        n_skipped: Number of texts of the whole data that were too short.
        is_padding: Whether the batch only keeps a rank in step with the others: its forward pass
            runs, because a sharded LM needs all ranks, but its numbers do not count.
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
        n_texts: Maximum number of texts; the first ones are taken. None takes all, and 96 about
            the tiny world.
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
        require("data.n_tokens", n_tokens, at_least=4)
        require("data.batch_size", batch_size, at_least=1)
        if n_texts is not None:
            require("data.n_texts", n_texts, at_least=1)
        self.save_hyperparameters(ignore=["lm"])
        self.texts, self.key, self.sample_by = texts, key, sample_by
        self.n_tokens, self.n_texts = n_tokens, n_texts
        self.batch_size, self.seed = batch_size, seed
        self.prompts: FirstTokens | None = None

    def setup(self, stage: str) -> None:
        """Read and tokenize the texts, the same on every rank; see `read_prompts` for errors."""
        del stage
        if self.prompts is not None:
            return
        self.prompts = read_prompts(
            self.language_model, self.texts, self.key, self.n_tokens, self.n_texts, self.seed,
            sample_by=self.sample_by,
        )  # fmt: skip
        require_items(self.trainer, len(self.prompts.rows), "texts", "give more texts")

    def test_dataloader(self) -> DataLoader[TokenBatch]:
        """Return a loader of all prompts, shared by the ranks."""
        assert self.prompts is not None, "setup reads the texts"
        texts, rows, n_skipped = self.prompts
        edges = batch_edges(self.trainer, len(rows), self.batch_size)
        batches = [
            TokenBatch(
                torch.tensor(rows[start:stop]),
                [text.where for text in texts[start:stop]],
                [text.corpus for text in texts[start:stop]],
                start,
                n_skipped,
            )
            for start, stop in pairwise(edges)
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
) -> FirstTokens:
    """Read texts and take the first tokens of each; warn of those that are too short.

    The arguments are those of `TokenizedTextDataModule`; `owner` is the prefix of the settings in
    messages, as ``data`` of ``data.texts``.

    Raises:
        ConfigError: The LM has fewer positions than tokens are wanted.
        SubjectsError: There are no texts, or all are too short.
    """
    longest_input = None if lm.max_length is None else lm.max_length - len(lm.prefix)
    if longest_input is not None and n_tokens > longest_input:
        raise ConfigError(
            f"{owner}.n_tokens is {n_tokens}, but {lm.config.name_or_path} reads at most "
            f"{longest_input} tokens of a text. Lower {owner}.n_tokens."
        )
    if texts is None:
        # A word is at least one token.
        n_texts = n_texts or DEFAULT_N_TEXTS
        source = world_documents(n_texts, n_tokens, seed, world_file(lm.config.name_or_path))
    else:
        source = read_texts(texts, key, sample_by, owner)
    texts_read: list[Text] = []
    rows: list[list[int]] = []
    n_skipped = longest = 0
    for text in source:
        if len(rows) == n_texts:
            break
        ids = lm.tokenizer(text.text, add_special_tokens=False, verbose=False)["input_ids"]
        longest = max(longest, len(ids))
        if len(ids) < n_tokens:
            n_skipped += 1
        else:
            texts_read.append(text)
            rows.append(list(ids[:n_tokens]))
    if not rows:
        raise SubjectsError(
            f"all {n_skipped} texts of {owner}.texts {texts} are shorter than {owner}.n_tokens, "
            f"{n_tokens}; the longest has {longest}. Lower {owner}.n_tokens, or take longer texts; "
            f"if .txt files are whole documents, set {owner}.sample_by to document."
        )
    if n_skipped:
        rank_zero_warn(
            f"{n_skipped} of {n_skipped + len(rows)} texts are shorter than {owner}.n_tokens, "
            f"{n_tokens}, and are skipped."
        )
    return FirstTokens(texts_read, rows, n_skipped)
