"""Micro-batches: prompts of unequal length in forward passes that fit the memory, on all ranks."""

import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
from torch import distributed

from lincorr_lightning.errors import LanguageModelError

_log = logging.getLogger(__name__)

RowsContext = Callable[[list[int]], AbstractContextManager[object]]
"""Function from the indices of the rows of a forward pass to the context that it runs in."""

# On a CPU, the activations between two layers should fit the cache; a GPU needs large batches.
_START_NUMBERS_CPU = 2**19
_START_TOKENS_CPU = (256, 4096)
_START_TOKENS_ACCELERATOR = 32768
# The CPU allocator and CUDA libraries raise plain RuntimeErrors.
_SIGNS = ("DefaultCPUAllocator", "ALLOC_FAILED", "CUDA out of memory")


def oom_reason(error: BaseException) -> str | None:
    """Return a one-line reason if an error means that memory ran out, else None."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return str(error).split(". ")[0] or type(error).__name__
    if isinstance(error, RuntimeError) and any(sign in str(error) for sign in _SIGNS):
        return "the allocator is out of memory"
    return None


@dataclass(eq=False)
class MicroBatches:
    """Runs a function on rows of unequal length, in batches of similar length."""

    fixed: int | None = None
    """Maximum tokens of a batch, padding included; a longer row is one alone. None starts with a
    size that suits the device, and halves it when memory runs out."""
    width: int | None = None  #: Hidden size of the LM; None if unknown.
    uniform_from: int | None = None
    """Length from which positions depend on the longest row of a batch, so that rows as long are
    batched with rows of their length alone; None if they never do."""
    adapted: int | None = None  #: The size, after memory ran out.
    shared_on: str | None = None
    """Type of the devices of ranks that share the LM, all of which must run equally often."""

    def is_uniform(self, length: int) -> bool:
        """Return whether rows of a length can only be batched with rows of the same length."""
        return self.uniform_from is not None and length >= self.uniform_from

    def max_over_ranks(self, number: int) -> int:
        """Return the maximum of a number over the ranks that share the LM."""
        if self.shared_on is None:
            return number
        largest = torch.tensor(int(number), device=self.shared_on)
        distributed.all_reduce(largest, distributed.ReduceOp.MAX)
        return int(largest)

    def run(
        self,
        lengths: Sequence[int],
        device_type: str,
        forward: Callable[[list[int]], None],
        equal_lengths: bool = False,
    ) -> None:
        """See `LanguageModel.in_batches`; the longest rows come first, to fail early."""
        rows = sorted(range(len(lengths)), key=lambda i: -lengths[i])

        def split(rows: list[int], tokens: int) -> list[list[int]]:
            batches: list[list[int]] = []
            while rows:
                longest = lengths[rows[0]]
                batch = rows[: max(1, tokens // longest)]
                if equal_lengths or self.is_uniform(longest):
                    batch = [row for row in batch if lengths[row] == longest]
                batches.append(batch)
                rows = rows[len(batch) :]
            return batches

        least, most = _START_TOKENS_CPU
        start = min(max(least, _START_NUMBERS_CPU // (self.width or 1)), most)
        start = start if device_type == "cpu" else _START_TOKENS_ACCELERATOR
        tokens = self.fixed or self.adapted or start
        batches = split(rows, tokens)
        # Ranks that share an LM run equally many passes: one that is done repeats its shortest row.
        batches += [rows[-1:]] * (self.max_over_ranks(len(batches)) - len(batches))
        while batches:
            try:
                forward(batches[0])
                del batches[0]
                continue
            except (RuntimeError, MemoryError) as exception:
                error = oom_reason(exception)
                if error is None:
                    raise
            # Out of the except block, whose traceback kept the failed forward's tensors alive.
            if device_type == "cuda":
                torch.cuda.empty_cache()
            tokens = self._lower(tokens, len(batches[0]), lengths[batches[0][0]], error)
            batches = split([row for batch in batches for row in batch], tokens)

    def _lower(self, tokens: int, n_rows: int, length: int, error: str) -> int:
        failed = f"a forward pass of batch size {n_rows} and sequence length {length}"
        # Ranks of a sharded LM that changed it on their own would wait for each other for ever.
        if n_rows > 1 and self.fixed is None and self.shared_on is None:
            self.adapted = max(1, n_rows * length // 2)
            _log.warning("%s ran out of memory; using at most %d tokens.", failed, self.adapted)
            return self.adapted
        way_out = "Use a smaller LM, set lm.dtype to bfloat16, or use a device with more memory."
        if n_rows > 1:
            way_out = (
                f"Lower lm.tokens_per_forward (it is {tokens}), or set it to null, which adapts it "
                "to the memory unless the LM is sharded."
            )
        raise LanguageModelError(f"{failed} does not fit the memory: {error}. {way_out}")
