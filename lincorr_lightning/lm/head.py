"""Logits of a few tokens at each prompt's last position, for any architecture.

The LM's own ``forward`` runs from end to end; only the forward of its output layer is patched, to
compute the requested tokens' rows at the last position, in float64. Everything before the head
(BERT's transform, Falcon-H1's multiplier) and after it (Gemma's soft cap, Cohere's and Granite's
scaling) stays the LM's own, so no architecture is named here, and hooks on the LM, such as those of
a sharding strategy, run as in any other forward pass.

This requires that the head is a plain linear layer and that what follows treats each logit
independently. `can_read_rows` tests both on a short text; other LMs compute all logits.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from threading import get_ident
from typing import TYPE_CHECKING, Any, Protocol, TypeGuard

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard
from torch.nn import functional as F

from lincorr_lightning.distributed import gather
from lincorr_lightning.errors import LanguageModelError, one_line
from lincorr_lightning.lm import products
from lincorr_lightning.lm.batching import oom_reason

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_log = logging.getLogger(__name__)

_N_PROBE_TOKENS = 16
ROWS_BLOCK = 4096  #: Rows of the head that are held at once.
_BLOCK = 256  # states that are multiplied at once, in float64 copies
# In units of the differences of logits between prompts. A wrong position or attention to a later
# token changes logits about as much as another prompt does; half precision by a few percent.
_TOLERANCE = 1e-3
_HALF_TOLERANCE = 0.1
_LEAST_SPREAD = 1e-2  # of the logits: prompts may happen to have the same
FAILURES = (RuntimeError, TypeError, ValueError, LookupError, AttributeError, AssertionError)
"""What the forward of an LM raises where it does not take an argument."""


class UnusableHeadError(Exception):
    """The rows of the LM's head cannot be read apart from the others."""


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy a CPU tensor to a device without waiting for the device."""
    if device.type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


def head_of(model: PreTrainedModel) -> nn.Module | None:
    """Return the LM's output layer, or None if it has none."""
    head = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    return head if isinstance(head, nn.Module) else None


def read_logits(
    model: PreTrainedModel,
    input_ids: Tensor,
    attention_mask: Tensor | None,
    last: Tensor,
    token_ids: Tensor,
    by_rows: bool,
) -> Tensor:
    """Return the logits of some tokens at the position `last` of each row.

    They are ``(n_rows, n_tokens)``, float64. Read `by_rows`, the product with the head is computed
    in float64, so that logits of a hidden size d have numerical rank d and least squares can use
    it. `input_ids` are padded on the right; without an `attention_mask` the LM uses a causal mask
    alone, which is the same for true tokens, and faster.
    """
    if by_rows:
        ends = flat_ends(input_ids, last)
        states = read_states(model, input_ids, ends, attention_mask=attention_mask)
        return logits_of_states(model, [(states, token_ids)], is_product=False)
    rows = torch.arange(len(last))
    length = input_ids.shape[1]
    keep = {}
    if "logits_to_keep" in inspect.signature(model.forward).parameters:
        keep["logits_to_keep"] = length - int(last.min())
    logits = call_model(model, input_ids, keep, attention_mask=attention_mask).logits
    columns = last - (length - logits.shape[1])  # whether or not it left out the first positions
    logits = logits[rows.to(logits.device), columns.to(logits.device)]
    return logits[:, token_ids.to(logits.device)].double()


def _with_head(
    model: PreTrainedModel,
    read: Callable[[nn.Linear, Tensor], Tensor],
    input_ids: Tensor,
    **more: Tensor | None,
) -> Tensor:
    """Run an LM whose head returns what `read` makes of the head and of the flattened states.

    That is ``(1, 1, n)``; what the LM makes of it is returned, ``(n,)``.
    """
    head = head_of(model)
    if not is_plain(head):
        raise UnusableHeadError

    thread = get_ident()

    def read_head(hidden: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if get_ident() != thread:  # somebody else's forward
            return type(head).forward(head, hidden, *args, **kwargs)
        if hidden.dim() != 3 or hidden.shape[:2] != input_ids.shape:
            raise UnusableHeadError
        return read(head, hidden.flatten(0, 1))

    head.__dict__["forward"] = read_head  # the head's hooks still run
    try:
        logits: Tensor = call_model(model, input_ids, None, **more).logits
    finally:
        del head.__dict__["forward"]
    return logits.flatten()


def read_states(
    model: PreTrainedModel, input_ids: Tensor, ends: Tensor, **more: Tensor | None
) -> Tensor:
    """Return what the head reads at positions of the flattened rows, ``(n_ends, hidden_size)``."""
    read: list[Tensor] = []

    def keep(head: nn.Linear, states: Tensor) -> Tensor:
        read.append(states.index_select(0, ends.to(states.device)))
        return states.new_zeros(1, 1, 1)

    _with_head(model, keep, input_ids, **more)
    return read[-1]


class States:
    """States after prompts, ``(n_prompts, hidden_size)``; without width before the first `keep`."""

    def __init__(self, n: int, device: torch.device) -> None:
        self.all = torch.empty(n, 0, device=device)

    def keep(self, indices: Sequence[int], states: Tensor) -> None:
        """Take the states after some prompts."""
        n = len(self.all)
        device = self.all.device
        if not self.all.shape[1]:
            self.all = torch.empty(n, states.shape[1], dtype=states.dtype, device=device)
        self.all[to_device(torch.tensor(indices), device)] = states.to(device)


@torch.no_grad()
def logits_of_states(
    model: PreTrainedModel, domains: Sequence[tuple[Tensor, Tensor]], is_product: bool
) -> Tensor:
    """Return the logits of domains side by side, ``(n_subjects, n_labels of all)``, float64.

    A domain is a pair of states, ``(n_subjects, hidden_size)``, and of tokens. Where logits are
    more than the product with the head's rows, or the head is sharded, the LM makes them, in one
    forward pass of one token. The bits do not depend on how the states were read.
    """
    sizes = [len(tokens) for _, tokens in domains]
    device = model.device
    n = len(domains[0][0])
    logits = torch.empty(n, sum(sizes), dtype=torch.float64, device=device)
    columns = torch.split(logits, sizes, dim=1)
    head = head_of(model)
    assert is_plain(head)
    if is_product or not n:
        for (states, tokens), column in zip(domains, columns, strict=True):
            for i in range(0, n, _BLOCK):
                block = states[i : i + _BLOCK].to(head.weight.device)
                column[i : i + _BLOCK] = _rows_product(head, block, tokens).to(device)
        return logits

    def products(head: nn.Linear, _: Tensor) -> Tensor:
        parts = [_rows_product(head, states, tokens).flatten() for states, tokens in domains]
        return torch.cat(parts).view(1, 1, -1)

    flat = _with_head(model, products, torch.zeros(1, 1, dtype=torch.long, device=device))
    for column, part in zip(columns, torch.split(flat, [n * k for k in sizes]), strict=True):
        column.copy_(part.view(n, -1))
    return logits


def flat_ends(input_ids: Tensor, last: Tensor) -> Tensor:
    """Return the positions `last` of each row, counted in the flattened rows."""
    return torch.arange(len(last), device=last.device) * input_ids.shape[1] + last


def probe_tokens(vocab_size: int) -> Tensor:
    """Return the tokens whose logits show whether two ways of reading an LM agree."""
    return torch.linspace(0, vocab_size - 1, min(_N_PROBE_TOKENS, vocab_size)).long()


def read_alone(
    model: PreTrainedModel, rows: Sequence[Sequence[int]], tokens: Tensor, by_rows: bool
) -> Tensor:
    """Return the logits of tokens after each row, ``(n_rows, n_tokens)``, by a pass for each."""
    parts = []
    for row in rows:
        ids = torch.tensor([list(row)], device=model.device)
        last = ids.new_tensor([len(row) - 1])
        parts.append(read_logits(model, ids, torch.ones_like(ids), last, tokens, by_rows))
    return torch.cat(parts)


def are_same(logits: Tensor, expected: Tensor, dtype: torch.dtype) -> bool:
    """Return whether logits after some prompts, ``(n, n_tokens)``, are the expected ones.

    Equal but for the rounding of a dtype, or of float32 products where they may be less precise;
    differences are in units of those between prompts.
    """
    spread = (expected - expected.mean(0)).norm().clamp(min=_LEAST_SPREAD * expected.norm())
    is_rounded = dtype.itemsize < 4 or products.precision() != "highest"
    tolerance = _HALF_TOLERANCE if is_rounded else _TOLERANCE
    return bool((logits.to(expected) - expected).norm() <= tolerance * spread)


def can_read_rows(
    model: PreTrainedModel, probe: Sequence[int], vocab_size: int, dtype: torch.dtype
) -> bool:
    """Return whether rows of the head give the LM's own logits on a short text.

    An LM whose tokens change the logits of an earlier position is refused: it is not causal, so no
    position of a prompt predicts the next token. `dtype` is that of its forward pass.
    """
    tokens = probe_tokens(vocab_size)
    last = torch.arange(max(len(probe) - 4, 0), len(probe) - 1, device=model.device)
    try:
        expected = read_alone(model, [probe[: i + 1] for i in last.tolist()], tokens, by_rows=False)
    except FAILURES as error:
        if oom_reason(error):
            raise
        raise LanguageModelError(
            f"{type(model).__name__} cannot be used: its forward pass fails on a short text "
            f"({one_line(error)}). If lm.dtype is a half precision, float32 may work."
        ) from error
    ids = torch.tensor([list(probe)] * len(last), device=model.device)

    def agrees(by_rows: bool) -> bool:
        try:  # with more tokens, as in a batch with longer prompts
            logits = read_logits(model, ids, None, last, tokens, by_rows)
        except (UnusableHeadError, *FAILURES) as error:
            if oom_reason(error):
                raise
            return False
        return are_same(logits, expected, dtype)

    if not expected.isfinite().all():
        return False  # NaN is reported for the actual prompts, with their text
    if not agrees(by_rows=False):
        raise LanguageModelError(
            f"{type(model).__name__} is not causal: a later token changes its logits at an earlier "
            "position, so that no position of a prompt predicts the next token. Pass a causal LM."
        )
    if agrees(by_rows=True):
        return True
    _log.warning(
        "The head of %s is not a plain linear layer whose rows can be computed separately; "
        "computing the logits of all tokens instead, which is slower.",
        type(model).__name__,
    )
    return False


def takes_argument(model: PreTrainedModel, name: str) -> bool:
    """Return whether an LM's forward takes an argument."""
    parameters = inspect.signature(model.forward).parameters
    takes_all = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
    return takes_all or name in parameters


def call_model(
    model: PreTrainedModel,
    input_ids: Tensor,
    optional: Mapping[str, Any] | None = None,
    **more: Tensor | None,
) -> Any:
    """Run an LM's own forward, without the `optional` arguments that it does not take."""
    options = {"use_cache": False, "return_dict": True, **(optional or {})}
    accepted = {name: value for name, value in options.items() if takes_argument(model, name)}
    required = {name: value for name, value in more.items() if value is not None}
    return model(input_ids=input_ids, **required, **accepted)


def is_plain(head: nn.Module | None) -> TypeGuard[nn.Linear]:
    """Return whether a head multiplies by its weight alone."""
    # A LoRA, quantized or patched layer multiplies by more than its `weight`.
    return (
        isinstance(head, nn.Linear)
        and type(head).forward is nn.Linear.forward
        and "forward" not in head.__dict__
        and head.weight.is_floating_point()
    )


def _rows_product(head: nn.Linear, hidden: Tensor, token_ids: Tensor) -> Tensor:
    token_ids = token_ids.to(hidden.device)
    weight = head.weight.index_select(0, token_ids).double()
    bias = None if head.bias is None else head.bias.index_select(0, token_ids).double()
    with torch.autocast(hidden.device.type, enabled=False):
        return F.linear(hidden.double(), weight, bias)


class VocabularyRows(Protocol):
    """A matrix with a row for each token, which need not be in memory.

    All ranks that share an LM must call a method together.
    """

    def blocks(self) -> Iterator[Tensor]:
        """Yield all rows in blocks, ``(n_rows, hidden_size)`` each, in any floating type."""

    def rows(self, token_ids: Sequence[int]) -> Tensor:
        """Return the rows of some tokens, ``(n_tokens, hidden_size)``, float64 on the CPU."""


class HeldRows(VocabularyRows):
    """The rows of a layer's matrix in memory, ``(n_tokens, hidden_size)``, whole or sharded."""

    def __init__(self, layer: nn.Linear) -> None:
        self._layer = layer  # whose matrix sharding replaces

    def blocks(self) -> Iterator[Tensor]:
        # Those of a sharded matrix are gathered one at a time.
        rows, is_whole = self._local()
        if is_whole:
            # mps has no float64
            yield from torch.split(rows.cpu() if rows.device.type == "mps" else rows, ROWS_BLOCK)
            return
        for start in range(0, max(gather(len(rows))), ROWS_BLOCK):
            yield torch.cat(gather(rows[start : start + ROWS_BLOCK].cpu()))

    def rows(self, token_ids: Sequence[int]) -> Tensor:
        rows, is_whole = self._local()
        if is_whole:
            return rows[torch.as_tensor(token_ids, device=rows.device)].cpu().double()
        first = sum(gather(len(rows))[: torch.distributed.get_rank()])
        held = {i: rows[i - first].cpu() for i in token_ids if 0 <= i - first < len(rows)}
        row_of = {i: row for of_rank in gather(held) for i, row in of_rank.items()}
        return torch.stack([row_of[i] for i in token_ids]).double()

    def _local(self) -> tuple[Tensor, bool]:
        """Return the rows of this rank, such that each row is on one, or the whole matrix."""
        weight = self._layer.weight.detach()
        if not isinstance(weight, DTensor):
            return weight, True
        coordinate = weight.device_mesh.get_coordinate()
        assert coordinate is not None
        placed = zip(weight.placements, coordinate, strict=True)
        is_copy = any(place != Shard(0) and index > 0 for place, index in placed)
        return weight.to_local()[: 0 if is_copy else None], False
