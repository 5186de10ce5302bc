"""Asking an LM in training, on behalf of several watchers, each thing once."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from lincorr_lightning.errors import LanguageModelError
from lincorr_lightning.lm.finder import causal_lm_of
from lincorr_lightning.lm.language_model import LanguageModel

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_TOKENIZER_NAMES = ("tokenizer", "processing_class", "processor")


class Query(NamedTuple):
    """A prompt, and who is asked.

    Attributes:
        prompt: The prompt.
        which: Where the LM is trained as several copies side by side: the copy; else None.
    """

    prompt: str
    which: int | None = None


class QueryCache:
    """What the watchers of one LM want to know at one moment of its training.

    Watchers say beforehand what they will want; the first of them that asks at a new moment has
    all of it asked, in one forward as far as memory allows, and the others read it.

    Attributes:
        lm: The LM.
        shared: For watchers to leave what the others need as well.

    Args:
        lm: The LM, with the weights that are trained.
        copies: Makes a context from copies' numbers, one a row, in which the rows of a forward
            belong to these copies; None if there is one LM only.
    """

    def __init__(
        self,
        lm: LanguageModel,
        copies: Callable[[Sequence[int]], AbstractContextManager[object]] | None = None,
    ) -> None:
        self.lm = lm
        self.shared: dict[str, Any] = {}
        self._copies = copies
        self._column: dict[int, int] = {}
        self._rows: dict[str, list[int]] = {}
        self._wanted: dict[Query, Hashable] = {}
        self._state: Hashable = None
        self._known: dict[Query, Tensor] = {}

    def register_tokens(self, token_ids: Sequence[int]) -> None:
        """Announce tokens; what is known of other tokens only is forgotten."""
        new = [token for token in dict.fromkeys(token_ids) if token not in self._column]
        if new:
            self._column |= {token: len(self._column) + i for i, token in enumerate(new)}
            self._known.clear()

    def prefetch(self, queries: Sequence[Query], moment: Hashable) -> None:
        """Announce queries that are asked after the next update, if not later.

        Args:
            queries: Prompts, and of which copy.
            moment: The present one; what is asked at it is asked without these.
        """
        self._wanted |= dict.fromkeys(queries, moment)

    def read(
        self, about: Sequence[tuple[Sequence[Query], Sequence[int]]], moment: Hashable
    ) -> list[Tensor]:
        """Logits of some tokens after some prompts, and of others after others.

        Args:
            about: Prompts, and of which copy, with the tokens to read after them.
            moment: Another one after each update, such as the number of updates.

        Returns:
            ``(n_questions, n_tokens)`` of each, float64, on the CPU.
        """
        self.register_tokens([token for _, tokens in about for token in tokens])
        # A module may also change weights between two steps, such as to begin from a base anew.
        state = moment, sum(parameter._version for parameter in self.lm.model.parameters())
        if state != self._state:
            self._state = state
            self._known.clear()
        asked = [question for queries, _ in about for question in queries]
        missing = dict.fromkeys(q for q in asked if q not in self._known)
        if missing:
            due = [question for question, since in self._wanted.items() if since != moment]
            missing |= dict.fromkeys(q for q in due if q not in self._known)
            for question in due:
                del self._wanted[question]
            self._known |= zip(missing, self._ask(list(missing)), strict=True)
        return [self._columns(*part) for part in about]

    def _columns(self, queries: Sequence[Query], token_ids: Sequence[int]) -> Tensor:
        columns = torch.tensor([self._column[token] for token in token_ids])
        if not queries:
            return torch.zeros(0, len(columns), dtype=torch.float64)
        return torch.stack([self._known[question] for question in queries])[:, columns]

    def _ask(self, queries: Sequence[Query]) -> Tensor:
        new = [q.prompt for q in dict.fromkeys(queries) if q.prompt not in self._rows]
        self._rows |= zip(new, self.lm.rows(new), strict=True)
        rows = [self._rows[question.prompt] for question in queries]
        around = self.around([question.which for question in queries])
        return self.lm.logits_of_rows(rows, list(self._column), around).cpu()

    def around(
        self, which: Sequence[int | None]
    ) -> Callable[[list[int]], AbstractContextManager[object]] | None:
        """Contexts for forwards in which each row belongs to a copy of the LM.

        Args:
            which: Of each row: the copy, or None for the LM as it is.

        Returns:
            From the numbers of a forward's rows to its context; None if no row is of a copy.
        """
        copies = self._copies
        if copies is None or all(copy is None for copy in which):
            return None
        numbers = [-1 if copy is None else copy for copy in which]
        return lambda batch: copies([numbers[row] for row in batch])


_caches: WeakKeyDictionary[Any, dict[int, QueryCache]] = WeakKeyDictionary()


def get_query_cache(
    run: object,
    module: nn.Module,
    lm: str | None = None,
    tokenizer: PreTrainedTokenizerBase | str | None = None,
) -> QueryCache:
    """Get the one cache at which all watchers of an LM in a run ask.

    Args:
        run: What the cache lives as long as: the Trainer.
        module: Holds the LM somewhere inside. If it has a method ``adapter_context``, that makes
            the context of `QueryCache`.
        lm: The LM's name in ``module.named_modules()``, if there are several.
        tokenizer: The LM's tokenizer, or a folder or hub id; None looks for one in the module, and
            then beside the checkpoint that the LM came from.

    Raises:
        LanguageModelError: There is no causal LM, or no tokenizer.
    """
    model = causal_lm_of(module, lm)
    caches = _caches.setdefault(run, {})
    if id(model) not in caches:
        asked = getattr(module, "language_model", None)
        if not (isinstance(asked, LanguageModel) and asked.is_loaded and asked.model is model):
            asked = LanguageModel.from_module(model, tokenizer_of(module, model, tokenizer))
        caches[id(model)] = QueryCache(asked, getattr(module, "adapter_context", None))
    return caches[id(model)]


def close_query_caches(run: object) -> None:
    """Forget what was asked in a run.

    Args:
        run: As passed to `get_query_cache`.
    """
    _caches.pop(run, None)


def tokenizer_of(
    module: nn.Module,
    model: nn.Module,
    tokenizer: PreTrainedTokenizerBase | str | None = None,
) -> PreTrainedTokenizerBase:
    """Find the tokenizer of an LM that a module holds.

    Args:
        module: Holds the LM, and perhaps the tokenizer.
        model: The LM.
        tokenizer: The tokenizer, or a folder or hub id; None looks for one.

    Raises:
        LanguageModelError: There is none.
    """
    from transformers import AutoTokenizer, PreTrainedTokenizerBase

    if isinstance(tokenizer, PreTrainedTokenizerBase):
        return tokenizer
    if tokenizer is None:
        held = [getattr(module, name, None) for name in _TOKENIZER_NAMES]
        held += [part.tokenizer for part in module.modules() if isinstance(part, LanguageModel)]
        held += list(vars(module).values())
        for candidate in held:
            if isinstance(candidate, PreTrainedTokenizerBase):
                return candidate
    origin = tokenizer or getattr(model, "name_or_path", "")
    try:
        found: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(origin)
    except (OSError, ValueError, KeyError) as error:
        raise LanguageModelError(
            f"{type(module).__name__} holds a causal LM, but no tokenizer was found in it or at "
            f"{origin or 'the place that the LM came from'}. Keep the tokenizer as an attribute "
            "`tokenizer` of the module, or name its folder in the callback's `tokenizer`."
        ) from error
    return found
