"""A cache of the logits that several callbacks read from an LM in training."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from lincorr_lightning.errors import LanguageModelError
from lincorr_lightning.lm.batching import RowsContext
from lincorr_lightning.lm.fingerprint import bit_sums, switches_of
from lincorr_lightning.lm.language_model import LanguageModel

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

_TOKENIZER_NAMES = ("tokenizer", "processing_class", "processor")

AdapterContext = Callable[[Sequence[int]], AbstractContextManager[object]]
"""Function from adapter ids, one per row, to a context in which the rows use these adapters."""


class Query(NamedTuple):
    """A prompt, and the adapter that the LM reads it with."""

    prompt: str
    adapter_id: int | None = None
    """Index of the adapter if the LM trains several side by side; None for the LM without any."""
    subject: str = ""  #: Its prompts have a common prefix, which is computed once.


@dataclass(eq=False)
class QueryCache:
    """Logits of an LM in training, computed once for all callbacks that read them.

    In a pause of the training, such as that after a batch, the weights do not change, and all
    callbacks read together: they announce with `prefetch` what they read in the next pause, and its
    first `read` evaluates all of it, in one forward pass if memory allows. Logits are kept as long
    as the weights are the same, bit for bit. An LM that trains adapters side by side has an
    `AdapterContext`. What the module `holder` trains outside the LM counts as its weights, too.
    """

    lm: LanguageModel
    adapter_context: AdapterContext | None = None
    holder: nn.Module | None = None

    def __post_init__(self) -> None:
        self._columns: dict[int, int] = {}
        self._rows: dict[str, list[int]] = {}
        self._prefetched: dict[Query, int] = {}
        self._logits: dict[Query, Tensor] = {}
        self._pause = self._version = 0
        self._sums: Tensor | None = None  # of the weights, in the last pause that needed them
        self._switches: list[Any] = []
        self._is_checked = False  # whether `_version` is that of this pause

    @classmethod
    def of(
        cls,
        module: nn.Module,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase | str | None = None,
    ) -> QueryCache:
        """Return a cache for an LM that a module holds at any depth.

        If the module has a `LanguageModel` of this LM as ``language_model``, and a method
        ``adapter_context`` (an `AdapterContext`), they are used. The tokenizer may be a folder or a
        hub id; None looks for one in the module, and then in the LM's checkpoint.
        """
        lm = getattr(module, "language_model", None)
        if not (isinstance(lm, LanguageModel) and lm.is_loaded and lm.model is model):
            lm = LanguageModel.from_module(model, tokenizer_of(module, model, tokenizer))
        return cls(lm, getattr(module, "adapter_context", None), module)

    def register_tokens(self, token_ids: Sequence[int]) -> None:
        """Add tokens whose logits are kept; logits that lack them are dropped."""
        if new := [token for token in dict.fromkeys(token_ids) if token not in self._columns]:
            self._columns |= {token: len(self._columns) + i for i, token in enumerate(new)}
            self._logits.clear()

    def start_pause(self, weights_changed: bool = False) -> None:
        """Start a pause of the training; the weights are compared unless known to have changed."""
        self._pause += 1
        self._is_checked = False
        if weights_changed:
            self._forget()

    def weights_version(self) -> int:
        """Return a number that differs after any change of weights, or of what is switched on."""
        if not self._is_checked:
            # Looked up each time, since sharding replaces parameters.
            held = self.holder.parameters() if self.holder is not None else ()
            trained = (parameter for parameter in held if parameter.requires_grad)
            model = self.lm.model
            sums = bit_sums(dict.fromkeys(chain(model.parameters(), model.buffers(), trained)))
            switches = switches_of(model)
            same = self._sums is not None and torch.equal(sums, self._sums.to(sums.device))
            # All ranks that share an LM read it together, or none does.
            if self.lm.any_rank(not same or switches != self._switches):
                self._forget()
                self._sums = sums
                self._switches = switches
            self._is_checked = True
        return self._version

    def _forget(self) -> None:
        self._logits.clear()
        self._sums = None
        self._version += 1

    def exchange(self, model: PreTrainedModel) -> None:
        """Read another LM with the same tokenizer, which has taken the place of this one."""
        if model is not self.lm.model:
            config = self.lm.config
            self.lm = LanguageModel.from_module(
                model,
                self.lm.tokenizer,
                self.lm.prompt_prefix,
                add_bos=config.add_bos,
                chat_template=config.chat_template,
            )
            self._forget()

    def prefetch(self, queries: Sequence[Query]) -> None:
        """Announce queries that are read in the next pause, or later."""
        self._prefetched |= dict.fromkeys(queries, self._pause)

    def read(self, requests: Sequence[tuple[Sequence[Query], Sequence[int]]]) -> list[Tensor]:
        """Return the logits of tokens after prompts, ``(n_queries, n_tokens)`` per request.

        They are float64, on the CPU.
        """
        self.weights_version()
        self.register_tokens([token for _, tokens in requests for token in tokens])
        read = [query for queries, _ in requests for query in queries]
        if missing := dict.fromkeys(query for query in read if query not in self._logits):
            due = [query for query, since in self._prefetched.items() if since != self._pause]
            missing |= dict.fromkeys(query for query in due if query not in self._logits)
            for query in due:
                del self._prefetched[query]
            self._logits |= zip(missing, self._evaluate(list(missing)), strict=True)
        logits_of_requests = []
        for queries, tokens in requests:
            columns = [self._columns[token] for token in tokens]
            none = torch.zeros(0, len(columns), dtype=torch.float64)
            logits = [self._logits[query][columns] for query in queries]
            logits_of_requests.append(torch.stack(logits) if logits else none)
        return logits_of_requests

    def _evaluate(self, queries: Sequence[Query]) -> Tensor:
        new = [q.prompt for q in dict.fromkeys(queries) if q.prompt not in self._rows]
        self._rows |= zip(new, self.lm.rows(new), strict=True)
        rows = [self._rows[query.prompt] for query in queries]
        contexts = self.contexts([query.adapter_id for query in queries])
        groups = [(q.adapter_id, q.subject or q.prompt) for q in queries]
        # Half precision would round away the change by one optimizer step.
        return self.lm.logits_of_groups(rows, [*self._columns], groups, contexts).cpu()

    def contexts(self, adapter_ids: Sequence[int | None]) -> RowsContext | None:
        """Return a function from the rows of a forward pass to the context of their adapters.

        `adapter_ids` are those of all rows; None if no row uses an adapter.
        """
        context = self.adapter_context
        ids = [-1 if index is None else index for index in adapter_ids]
        if context is None or set(ids) <= {-1}:
            return None
        return lambda rows: context([ids[row] for row in rows])


def tokenizer_of(
    module: nn.Module, model: nn.Module, tokenizer: PreTrainedTokenizerBase | str | None = None
) -> PreTrainedTokenizerBase:
    """Find the tokenizer of an LM that a module holds, see `QueryCache.of`."""
    from transformers import AutoTokenizer, PreTrainedTokenizerBase

    if isinstance(tokenizer, PreTrainedTokenizerBase):
        return tokenizer
    if tokenizer is None:
        held = [getattr(module, name, None) for name in _TOKENIZER_NAMES]
        held += [part.tokenizer for part in module.modules() if isinstance(part, LanguageModel)]
        for candidate in [*held, *vars(module).values()]:
            if isinstance(candidate, PreTrainedTokenizerBase):
                return candidate
    origin = tokenizer or getattr(model, "name_or_path", "")
    try:
        loaded: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(origin)
    except (OSError, ValueError, KeyError) as error:
        raise LanguageModelError(
            f"{type(module).__name__} holds a causal LM, but no tokenizer was found in it or at "
            f"{origin or 'the path that the LM was loaded from'}. Keep the tokenizer as an "
            "attribute `tokenizer` of the module, or name its folder in the callback's `tokenizer`."
        ) from error
    return loaded
