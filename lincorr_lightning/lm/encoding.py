"""Encoding of prompts: token ids with one rule for leading special tokens, and no trailing ones."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lincorr_lightning.errors import LanguageModelError, SubjectsError, one_line

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_PLAIN_TEXT = "The city of"
_PROBE_TEXT = "The city of Paris lies in"
_MIN_PROBE = 6
_REQUEST = "Complete the sentence."  # of the user, where a chat has no prefix
_ANSWERS = "The city of Paris lies in", "9 x"  # of the assistant, to find where its turn begins

LONE_SURROGATE = re.compile("[\ud800-\udfff]")
"""Half of a UTF-16 surrogate pair, which is not a character; tokenizers raise an error for it."""


PAD_ID = 0
"""Token of padding. Any will do: it is on the right, where no true token attends to it. On the left
it would shift absolute positions, and recurrent LMs would read it."""


@dataclass(eq=False)
class PromptEncoder:
    """Converts prompts to token ids.

    A prompt starts with the special tokens that the tokenizer puts before a text (BOS for most
    LMs), exactly once, also if the prompt's text already has them. No EOS or SEP follows: it would
    move the position that predicts the answer. `add_bos` is that of `LMConfig`.

    Before the prompt stands the text `lead_in`; that of a chat has the special tokens itself.
    """

    tokenizer: "PreTrainedTokenizerBase"
    vocab_size: int | None = None
    max_length: int | None = None
    add_bos: bool | None = None
    lead_in: str = ""
    is_chat: bool = False

    def __post_init__(self) -> None:
        bos = self.tokenizer.bos_token_id
        if self.add_bos and bos is None:
            name = self.tokenizer.name_or_path
            raise LanguageModelError(f"lm.add_bos is true, but {name} has no BOS token. Set null.")
        self.prefix = [] if self.add_bos is False else _own_prefix(self.tokenizer)
        if self.add_bos and bos not in self.prefix:
            self.prefix = [bos]

    def rows(self, prompts: Sequence[str]) -> list[list[int]]:
        """Return the token ids of each prompt, unpadded."""
        if isinstance(prompts, str):
            raise SubjectsError(f"prompts is the single string {prompts!r}; pass a list of them.")
        for index, prompt in enumerate(prompts):
            if LONE_SURROGATE.search(prompt):
                raise SubjectsError(
                    f"prompt {index} ({prompt!r}) has an unpaired surrogate, which is not a "
                    "character. Remove it, or read the text as UTF-8."
                )
        if not prompts:  # tokenizers refuse an empty list
            return []
        texts = [self.lead_in + prompt for prompt in prompts]
        encoded = self.tokenizer(texts, add_special_tokens=False)["input_ids"]
        prefix = [] if self.is_chat else self.prefix
        rows = [ids if ids[: len(prefix)] == prefix else prefix + ids for ids in encoded]
        for index, (prompt, row) in enumerate(zip(prompts, rows, strict=True)):
            self._check(index, prompt, row)
        return rows

    def _check(self, index: int, prompt: str, row: list[int]) -> None:
        if len(row) <= len(self.prefix) or not prompt.strip():
            raise SubjectsError(
                f"prompt {index} ({prompt!r}) has no tokens of its own, so there is no position "
                "to read. Remove empty prompts."
            )
        if self.max_length is not None and len(row) > self.max_length:
            raise SubjectsError(
                f"prompt {index} ({prompt[:60]!r}...) has {len(row)} tokens; the LM has positions "
                f"for {self.max_length}. Shorten it, or model.prefix."
            )
        if self.vocab_size is not None and max(row) >= self.vocab_size:
            raise LanguageModelError(
                f"prompt {index} ({prompt!r}) has the token id {max(row)}, but the LM has "
                f"embeddings for {self.vocab_size} tokens only: tokenizer and weights do not "
                "match. Use both from one checkpoint."
            )

    def pad(self, rows: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
        """Return token ids, padded on the right, and attention mask, ``(n_rows, longest)``."""
        longest = max(map(len, rows), default=0)
        padded = [[*row, *[PAD_ID] * (longest - len(row))] for row in rows]
        ids = torch.tensor(padded, dtype=torch.long).reshape(len(rows), longest)
        ends = torch.tensor([len(row) for row in rows], dtype=torch.long)
        return ids, (torch.arange(longest) < ends.unsqueeze(1)).long()

    def probe(self) -> list[int]:
        """Return the token ids of a short text, to test an LM with."""
        ids = self.prefix + self.tokenizer(_PROBE_TEXT, add_special_tokens=False)["input_ids"]
        if len(set(ids)) < _MIN_PROBE:  # a vocabulary that has none of these words
            size = self.vocab_size or len(self.tokenizer)
            ids = self.prefix + torch.linspace(0, size - 1, _MIN_PROBE).long().tolist()
        return ids[: self.max_length]


def chat_lead_in(tokenizer: "PreTrainedTokenizerBase", prefix: str) -> str:
    """Return what a chat has before the assistant's text, after the `prefix` as the user's turn.

    A `LanguageModelError` if there is no template, or it fails, or changes the assistant's text.
    """
    request = {"role": "user", "content": prefix or _REQUEST}
    why = "there is none"
    starts: set[str] = set()
    if tokenizer.chat_template is not None:
        why = (
            "it does not write the assistant's text as it is, or what it writes before that is "
            "nothing, or changes with it or time"
        )
        try:
            for answer in _ANSWERS:
                turns = [request, {"role": "assistant", "content": answer}]
                chat = str(tokenizer.apply_chat_template(turns, tokenize=False))
                starts.add(chat.rpartition(answer)[0])  # empty without the answer
        except Exception as error:  # templates raise errors of many types
            starts.clear()
            why = one_line(error)
    if len(starts) == 1 and all(starts):
        return starts.pop()
    raise LanguageModelError(
        f"lm.chat_template is true, but the chat template of {tokenizer.name_or_path} cannot be "
        f"used: {why}. Set it to false, or name the tokenizer of an LM for chats as lm.tokenizer."
    )


def _own_prefix(tokenizer: "PreTrainedTokenizerBase") -> list[int]:
    plain = tokenizer(_PLAIN_TEXT, add_special_tokens=False)["input_ids"]
    full = tokenizer(_PLAIN_TEXT)["input_ids"]
    for start in range(len(full) - len(plain) + 1):
        if full[start : start + len(plain)] == plain:
            return list(full[:start])
    special = set(tokenizer.all_special_ids)
    count = next((i for i, token_id in enumerate(full) if token_id not in special), len(full))
    return list(full[:count])
