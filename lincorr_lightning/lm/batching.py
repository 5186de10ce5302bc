"""Cutting prompts of unequal length into forwards that fit the memory."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import torch

from lincorr_lightning.errors import LanguageModelError
from lincorr_lightning.lm.memory import oom_reason
from lincorr_lightning.lm.sharding import RankSync

_log = logging.getLogger(__name__)

# On a CPU a forward is fastest while what passes between two layers stays in its cache; an
# accelerator needs much at once, up to about its own start.
_START_NUMBERS_CPU = 2**19
_START_TOKENS_CPU = (256, 4096)
_START_TOKENS_ACCELERATOR = 32768


class MicroBatches:
    """Runs something on rows of unequal length, in batches of like length.

    Args:
        tokens_per_forward: Most tokens in one batch, padding included (a single longer row goes
            alone). None begins with a size that suits the device, and halves it for good whenever
            memory runs out.
        width: Numbers in the LM's hidden state of a token; None: not known.
    """

    def __init__(self, tokens_per_forward: int | None = None, width: int | None = None) -> None:
        self.fixed = tokens_per_forward
        self.width = width
        self.adapted: int | None = None
        self.lock_step: RankSync | None = None

    def run(
        self,
        lengths: Sequence[int],
        device_type: str,
        ask: Callable[[list[int]], None],
        alike: bool = False,
    ) -> None:
        """Call `ask` with the indices of each batch.

        The longest rows come first, so that memory runs out at once if it does.

        Args:
            lengths: Tokens of each row.
            device_type: Where the forwards run, such as ``cuda``.
            ask: Deals with one batch in one forward; it is called again with a part of it if memory
                ran out.
            alike: Whether rows of a batch must be of one length, so that nothing is padded.

        Raises:
            LanguageModelError: Not even one row fits, or `tokens_per_forward` is too large.
        """
        order = sorted(range(len(lengths)), key=lambda i: -lengths[i])
        if self.lock_step is not None:
            self._run_in_step(self.lock_step, order, lengths, device_type, ask, alike)
            return
        start = 0
        while start < len(order):
            tokens = self.fixed or self.adapted or self._start(device_type)
            batch = _next_batch(order, start, lengths, tokens, alike)
            error = _memory_error(ask, batch)
            if error is None:
                start += len(batch)
                continue
            # Out of the except block, whose traceback kept the failed forward's tensors alive.
            if device_type == "cuda":
                torch.cuda.empty_cache()
            self._shrink(len(batch), lengths[batch[0]], error)

    def _run_in_step(
        self,
        lock_step: RankSync,
        order: list[int],
        lengths: Sequence[int],
        device_type: str,
        ask: Callable[[list[int]], None],
        alike: bool,
    ) -> None:
        """Ask as often as the process that has most to ask."""
        tokens = self.fixed or self._start(device_type)
        batches: list[list[int]] = []
        start = 0
        while start < len(order):
            batches.append(_next_batch(order, start, lengths, tokens, alike))
            start += len(batches[-1])
        # Agreed on once; a process that is done asks its shortest row again.
        n_idle = lock_step.most(len(batches)) - len(batches)
        for batch in [*batches, *[order[-1:]] * n_idle]:
            error = _memory_error(ask, batch)
            if error is not None:
                raise LanguageModelError(
                    f"a forward of batch size {len(batch)} and sequence length "
                    f"{lengths[batch[0]]} does not fit the memory: {error}. Lower "
                    f"lm.tokens_per_forward (it is {tokens}), which a split LM cannot adapt by "
                    "itself, or take more processes."
                )

    def _start(self, device_type: str) -> int:
        if device_type != "cpu":
            return _START_TOKENS_ACCELERATOR
        least, most = _START_TOKENS_CPU
        return min(max(least, _START_NUMBERS_CPU // (self.width or 1)), most)

    def _shrink(self, n_rows: int, length: int, error: str) -> None:
        where = f"a forward of batch size {n_rows} and sequence length {length}"
        if n_rows == 1:
            raise LanguageModelError(
                f"{where} does not fit the memory: {error}. Take a smaller LM, set lm.dtype to "
                "bfloat16, or use a device with more memory."
            )
        if self.fixed is not None:
            raise LanguageModelError(
                f"{where} does not fit the memory: {error}. Lower lm.tokens_per_forward (it is "
                f"{self.fixed}), or set it to null to let it adapt."
            )
        self.adapted = max(1, n_rows * length // 2)
        _log.warning("%s ran out of memory; at most %d tokens from now on.", where, self.adapted)


def _next_batch(
    order: list[int], start: int, lengths: Sequence[int], tokens: int, alike: bool
) -> list[int]:
    """The next rows that together have so many tokens, the longest first."""
    longest = lengths[order[start]]
    batch = order[start : start + max(1, tokens // longest)]
    return [row for row in batch if lengths[row] == longest] if alike else batch


def _memory_error(ask: Callable[[list[int]], None], batch: list[int]) -> str | None:
    """What went wrong if memory ran out, None if nothing did."""
    try:
        ask(batch)
    except (RuntimeError, MemoryError) as error:
        why = oom_reason(error)
        if why is None:
            raise
        return why
    return None
