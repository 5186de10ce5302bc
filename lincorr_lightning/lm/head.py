"""Logits of a few tokens at each prompt's last position, for any architecture.

The LM's own ``forward`` runs from end to end. Only its output layer is stood in for while it runs:
by one that takes the last position alone, and there computes the asked tokens' rows alone, in
float64. Whatever the LM does before its head (BERT's transform, Falcon-H1's multiplier) or after it
(Gemma's soft cap, Cohere's and Granite's scaling) it does itself, so no architecture is named here;
hooks on the LM, such as those of a sharding strategy, run as in any other forward.

That rests on two things: that the head is a plain linear layer, and that what follows it treats
each logit by itself. `select_logit_method` tries on a probe whether they hold, and else takes a slower
reading that needs neither.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from enum import Enum
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lincorr_lightning.errors import LanguageModelError
from lincorr_lightning.lm.memory import oom_reason

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_log = logging.getLogger(__name__)

_N_PROBE_TOKENS = 16
# Of the largest logit. Half precision rounds a whole vocabulary's product before we see it.
_TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-3}
_HALF_TOLERANCE = 0.1


class LogitMethod(Enum):
    """How logits are got out of an LM, fastest first."""

    ROWS = "the asked tokens' rows of the head at the last position"
    LAST = "the LM's own head at the last position, over its whole vocabulary"
    ALL = "the LM's own head at every position"


class UnusableHeadError(Exception):
    """The LM does not use its head in the way a reading needs."""


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy from the CPU without waiting for what the device still computes."""
    if device.type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


def head_of(model: PreTrainedModel) -> nn.Module | None:
    """The LM's output layer, if it has one of its own."""
    head = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    return head if isinstance(head, nn.Module) else None


def pad_right(input_ids: Tensor, attention_mask: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Move every row's true tokens to the front.

    With padding on the right, positions count from the first true token and no true token attends
    to padding, in every causal architecture and without position ids; with padding on the left,
    absolute positions are silently off, and recurrent LMs read the padding.

    Args:
        input_ids: Padded on either side, ``(n_rows, length)``.
        attention_mask: 1 at true tokens, same shape.

    Returns:
        Token ids, mask, and each row's last true position ``(n_rows,)``.
    """
    order = attention_mask.argsort(dim=1, descending=True, stable=True)
    mask = attention_mask.gather(1, order)
    return input_ids.gather(1, order), mask, mask.sum(1) - 1


def read_logits(
    model: PreTrainedModel,
    input_ids: Tensor,
    attention_mask: Tensor | None,
    last: Tensor,
    token_ids: Tensor,
    reading: LogitMethod,
) -> Tensor:
    """Logits of some tokens at one position of each row; differentiable.

    The head's product is taken in float64 (of hidden states and weights as they are), so that
    logits of rank d are of rank d up to 1e-15, and least squares sees it.

    Args:
        model: The LM.
        input_ids: Padded on the right, ``(n_rows, length)``.
        attention_mask: 1 at true tokens, same shape; None lets each token see all before it,
            which is the same for true tokens, and faster.
        last: The position to read in each row, ``(n_rows,)``.
        token_ids: The tokens to read, ``(n_tokens,)``.
        reading: What `select_logit_method` gave for this LM.

    Returns:
        ``(n_rows, n_tokens)``, float64.
    """
    if reading is LogitMethod.ALL:
        logits = call_model(model, input_ids, attention_mask=attention_mask).logits
        logits = logits[torch.arange(len(last), device=logits.device), last.to(logits.device)]
        return logits[:, token_ids.to(logits.device)].double()

    head = head_of(model)
    if head is None:
        raise UnusableHeadError
    own_forward = head.forward
    if reading is LogitMethod.ROWS and not _is_plain(head):
        raise UnusableHeadError

    def stand_in(hidden: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        hidden = _at(hidden, last, input_ids.shape)
        if reading is LogitMethod.LAST:
            return own_forward(hidden, *args, **kwargs)  # type: ignore[no-any-return]
        return _rows_product(cast(nn.Linear, head), hidden, token_ids.to(hidden.device))

    n_columns = len(token_ids) if reading is LogitMethod.ROWS else 1
    with patched_forward(head, stand_in):
        logits = call_model(model, input_ids, attention_mask=attention_mask).logits
    if logits.shape[:2] != (len(last), 1) or logits.shape[2] < n_columns:
        raise UnusableHeadError
    if reading is LogitMethod.LAST:
        logits = logits[:, :, token_ids.to(logits.device)]
    return logits[:, 0].double()


def read_positions(
    model: PreTrainedModel,
    input_ids: Tensor,
    blocks: Sequence[tuple[Tensor, Tensor]],
    **more: Tensor,
) -> list[Tensor]:
    """Logits of some tokens at some positions, and of others at others, by `LogitMethod.ROWS`.

    Args:
        model: The LM.
        input_ids: Token ids, ``(n_rows, length)``.
        blocks: Positions, counted through all rows, ``(n_positions,)``; with the tokens to read
            there, ``(n_tokens,)``.
        **more: What else the LM's forward is given.

    Returns:
        ``(n_positions, n_tokens)`` of each block, float64.

    Raises:
        UnusableHeadError: `LogitMethod.ROWS` is none for this LM.
    """
    head = head_of(model)
    if head is None or not _is_plain(head):
        raise UnusableHeadError

    def stand_in(hidden: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        del args, kwargs
        if hidden.dim() != 3 or hidden.shape[:2] != input_ids.shape:
            raise UnusableHeadError
        states = hidden.flatten(0, 1)
        products = [
            _rows_product(
                cast(nn.Linear, head),
                states.index_select(0, positions.to(states.device)),
                tokens.to(states.device),
            ).flatten()
            for positions, tokens in blocks
        ]
        return torch.cat(products).view(1, 1, -1)

    with patched_forward(head, stand_in):
        logits = call_model(model, input_ids, None, **more).logits
    sizes = [len(positions) * len(tokens) for positions, tokens in blocks]
    if logits.shape != (1, 1, sum(sizes)):
        raise UnusableHeadError
    return [
        part.view(len(positions), len(tokens)).double()
        for part, (positions, tokens) in zip(logits[0, 0].split(sizes), blocks, strict=True)
    ]


def read_hidden(
    model: PreTrainedModel, input_ids: Tensor, attention_mask: Tensor, last: Tensor
) -> Tensor:
    """What the LM's head is given at one position of each row, ``(n_rows, hidden_size)``.

    Raises:
        LanguageModelError: The LM does not give its head each position's hidden state.
    """
    seen: list[Tensor] = []

    def stand_in(hidden: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        del args, kwargs
        seen.append(_at(hidden, last, input_ids.shape)[:, 0])
        return hidden[..., :1]

    head = head_of(model)
    if head is not None:
        with patched_forward(head, stand_in), suppress(UnusableHeadError):
            call_model(model, input_ids, attention_mask=attention_mask)
    if len(seen) != 1:
        raise LanguageModelError(
            f"{type(model).__name__} computes its logits without giving an output layer the hidden "
            "state of each position, so the last one cannot be seen."
        )
    return seen[0]


def select_logit_method(
    model: PreTrainedModel, probe: Sequence[int], vocab_size: int
) -> LogitMethod:
    """Find the fastest reading that gives the LM's own logits.

    Args:
        model: The LM.
        probe: Token ids of a short text, at least two.
        vocab_size: Number of tokens of the head.

    Returns:
        The fastest reading that agrees with the LM's own full forward.

    Raises:
        LanguageModelError: A token changes the logits of the position before it: the LM is not
            causal, so a prompt has no position that predicts its next token.
    """
    ids = torch.tensor([list(probe)], device=model.device)
    mask = torch.ones_like(ids)
    last = torch.tensor([len(probe) - 2], device=model.device)
    tokens = torch.linspace(0, vocab_size - 1, min(_N_PROBE_TOKENS, vocab_size)).long()
    # Our readings see one token more than the LM's own forward, as a longer prompt's batch does.
    own = read_logits(model, ids[:, :-1], mask[:, :-1], last, tokens, LogitMethod.ALL)
    tolerance = _TOLERANCE.get(model.dtype, _HALF_TOLERANCE) * own.abs().max().clamp(min=1e-3)

    def agrees(reading: LogitMethod) -> bool:
        try:
            ours = read_logits(model, ids, None, last, tokens, reading)
        except (UnusableHeadError, RuntimeError, TypeError, ValueError, IndexError) as error:
            if oom_reason(error):
                raise
            return False
        return bool((ours - own).abs().max() <= tolerance)

    if not own.isfinite().all():
        return LogitMethod.ALL  # nothing agrees with NaN; the real prompt's answer will tell of it
    if not agrees(LogitMethod.ALL):
        raise LanguageModelError(
            f"{type(model).__name__} is not causal: a later token changes its logits at an earlier "
            "position. Pass a causal LM (for a BERT-like checkpoint: one with is_decoder true)."
        )
    for reading in (LogitMethod.ROWS, LogitMethod.LAST):
        if agrees(reading):
            break
    else:
        reading = LogitMethod.ALL
    if reading is not LogitMethod.ROWS:
        _log.warning(
            "The head of %s is not a plain linear layer whose logits can be taken row by row; "
            "reading %s instead, which is slower.",
            type(model).__name__,
            reading.value,
        )
    return reading


def takes_argument(model: PreTrainedModel, name: str) -> bool:
    """Whether an LM's forward can be given an argument."""
    parameters = inspect.signature(model.forward).parameters
    takes_all = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
    return takes_all or name in parameters


def call_model(
    model: PreTrainedModel,
    input_ids: Tensor,
    wanted: Mapping[str, Any] | None = None,
    **more: Tensor | None,
) -> Any:
    """Run an LM's own forward, from end to end.

    Args:
        model: The LM.
        input_ids: Padded on the right, ``(n_rows, length)``.
        wanted: What else is asked of the forward, as far as this LM's has it.
        **more: What it is given: attention mask, positions; None leaves one out.
    """
    asked = {"use_cache": False, "return_dict": True, **(wanted or {})}
    accepted = {name: value for name, value in asked.items() if takes_argument(model, name)}
    given = {name: value for name, value in more.items() if value is not None}
    return model(input_ids=input_ids, **given, **accepted)


def _at(hidden: Tensor, last: Tensor, shape: torch.Size) -> Tensor:
    if hidden.dim() != 3 or hidden.shape[:2] != shape:
        raise UnusableHeadError
    rows = torch.arange(len(last), device=hidden.device)
    return hidden[rows, last.to(hidden.device)].unsqueeze(1)


def _is_plain(head: nn.Module) -> bool:
    # What a LoRA, quantized or patched layer multiplies by is not its `weight` alone.
    return (
        isinstance(head, nn.Linear)
        and type(head).forward is nn.Linear.forward
        and "forward" not in head.__dict__
        and head.weight.is_floating_point()
    )


def _rows_product(head: nn.Linear, hidden: Tensor, token_ids: Tensor) -> Tensor:
    weight = head.weight.index_select(0, token_ids).double()
    bias = None if head.bias is None else head.bias.index_select(0, token_ids).double()
    with torch.autocast(hidden.device.type, enabled=False):
        return F.linear(hidden.double(), weight, bias)


@contextmanager
def patched_forward(head: nn.Module, forward: Callable[..., Tensor]) -> Iterator[None]:
    """Let a head's call run another forward; its hooks run as ever."""
    replaced = head.__dict__.get("forward")
    head.__dict__["forward"] = forward
    try:
        yield
    finally:
        if replaced is None:
            del head.__dict__["forward"]
        else:
            head.__dict__["forward"] = replaced
