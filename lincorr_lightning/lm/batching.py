"""Micro-batches: prompts of unequal length in forward passes that fit the memory, on all ranks."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import torch
from torch import distributed

from lincorr_lightning.errors import LanguageModelError

_log = logging.getLogger(__name__)

# On a CPU a forward pass is fastest while the activations between two layers stay in the cache; an
# accelerator needs large batches.
_START_NUMBERS_CPU = 2**19
_START_TOKENS_CPU = (256, 4096)
_START_TOKENS_ACCELERATOR = 32768
# The CPU allocator and CUDA libraries raise plain RuntimeErrors.
_SIGNS = ("DefaultCPUAllocator", "ALLOC_FAILED", "CUDA out of memory")


def oom_reason(error: BaseException) -> str | None:
    """Return a one-line reason if an error means that memory ran out, else None.

    Example:
        >>> oom_reason(MemoryError("no room. And more"))
        'no room'
        >>> oom_reason(ValueError("no room"))
    """
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return str(error).split(". ")[0] or type(error).__name__
    if isinstance(error, RuntimeError) and any(sign in str(error) for sign in _SIGNS):
        return "the allocator is out of memory"
    return None


class RankSync:
    """Collective decisions of the ranks that share an LM; all must call them equally often."""

    def __init__(self, device_type: str) -> None:
        self._device = torch.device(device_type)

    def any(self, own: bool) -> bool:
        """Return whether `own` is true on any rank."""
        return bool(self.max(own))

    def max(self, own: int) -> int:
        """Return the maximum of `own` over all ranks."""
        number = torch.tensor(int(own), device=self._device)
        distributed.all_reduce(number, distributed.ReduceOp.MAX)
        return int(number)


class MicroBatches:
    """Runs a function on rows of unequal length, in batches of similar length.

    Args:
        tokens_per_forward: Maximum tokens of a batch, padding included; a single longer row is a
            batch of its own. None starts with a size that suits the device and halves it whenever
            memory runs out.
        width: Hidden size of the LM; None if unknown.
    """

    def __init__(self, tokens_per_forward: int | None = None, width: int | None = None) -> None:
        self.fixed = tokens_per_forward
        self.width = width
        self.adapted: int | None = None
        self.rank_sync: RankSync | None = None

    def run(
        self,
        lengths: Sequence[int],
        device_type: str,
        forward: Callable[[list[int]], None],
        equal_lengths: bool = False,
    ) -> None:
        """Call `forward` with the indices of each batch, see `LanguageModel.in_batches`.

        The longest rows come first, so that a lack of memory shows at once.
        """
        order = sorted(range(len(lengths)), key=lambda i: -lengths[i])

        def next_batch(start: int, tokens: int) -> list[int]:
            longest = lengths[order[start]]
            batch = order[start : start + max(1, tokens // longest)]
            return [row for row in batch if lengths[row] == longest] if equal_lengths else batch

        start = 0
        if self.rank_sync is not None:
            # Ranks of a sharded LM run as many forward passes as the one that has most.
            tokens = self.fixed or self._start(device_type)
            batches: list[list[int]] = []
            while start < len(order):
                batches.append(next_batch(start, tokens))
                start += len(batches[-1])
            # A rank that is done runs its shortest row again.
            n_idle = self.rank_sync.max(len(batches)) - len(batches)
            for batch in [*batches, *[order[-1:]] * n_idle]:
                error = _memory_error(forward, batch)
                if error is not None:
                    where = _named(len(batch), lengths[batch[0]])
                    raise LanguageModelError(
                        f"{where} does not fit the memory: {error}. Lower "
                        f"lm.tokens_per_forward (it is {tokens}; it does not adapt for a "
                        "sharded LM), or use more ranks."
                    )
            return
        while start < len(order):
            batch = next_batch(start, self.fixed or self.adapted or self._start(device_type))
            error = _memory_error(forward, batch)
            if error is None:
                start += len(batch)
                continue
            # Out of the except block, whose traceback kept the failed forward's tensors alive.
            if device_type == "cuda":
                torch.cuda.empty_cache()
            self._shrink(len(batch), lengths[batch[0]], error)

    def _start(self, device_type: str) -> int:
        if device_type != "cpu":
            return _START_TOKENS_ACCELERATOR
        least, most = _START_TOKENS_CPU
        return min(max(least, _START_NUMBERS_CPU // (self.width or 1)), most)

    def _shrink(self, n_rows: int, length: int, error: str) -> None:
        where = _named(n_rows, length)
        if n_rows == 1:
            raise LanguageModelError(
                f"{where} does not fit the memory: {error}. Use a smaller LM, set lm.dtype to "
                "bfloat16, or use a device with more memory."
            )
        if self.fixed is not None:
            raise LanguageModelError(
                f"{where} does not fit the memory: {error}. Lower lm.tokens_per_forward (it is "
                f"{self.fixed}), or set it to null to adapt to the memory."
            )
        self.adapted = max(1, n_rows * length // 2)
        _log.warning("%s ran out of memory; using at most %d tokens.", where, self.adapted)


def _named(n_rows: int, length: int) -> str:
    return f"a forward pass of batch size {n_rows} and sequence length {length}"


def _memory_error(forward: Callable[[list[int]], None], batch: list[int]) -> str | None:
    """Run a batch; return the reason if memory ran out, else None."""
    try:
        forward(batch)
    except (RuntimeError, MemoryError) as error:
        why = oom_reason(error)
        if why is None:
            raise
        return why
    return None
