"""Processor time of a process by its stacks of Python functions, sampled.

The standard library alone, so that sampling can begin before anything is imported.
"""

from __future__ import annotations

import signal
import time
from collections import Counter
from types import FrameType

# File and name of each function. Code objects of different files may be equal.
Stack = tuple[tuple[str, str], ...]
_INTERVAL_S = 0.005


class Sampler:
    """Adds up the processor time of all threads by the main thread's stack, the innermost first.

    A sample counts with the time since the last one: a long matrix product, during which no sample
    can be taken, is counted in full, where it was called. The time before the start counts for the
    empty stack.
    """

    def __init__(self) -> None:
        self.seconds: Counter[Stack] = Counter()
        self._last = 0.0

    def start(self) -> None:
        """Begin to sample; in the main thread."""
        signal.signal(signal.SIGPROF, self._sample)
        signal.siginterrupt(signal.SIGPROF, False)
        signal.setitimer(signal.ITIMER_PROF, _INTERVAL_S, _INTERVAL_S)
        self._add(())

    def stop(self) -> None:
        """Stop sampling; the time since the last sample counts for the empty stack."""
        signal.setitimer(signal.ITIMER_PROF, 0)
        self._add(())

    def _sample(self, number: int, frame: FrameType | None) -> None:
        del number
        stack = []
        while frame is not None:
            stack.append((frame.f_code.co_filename, frame.f_code.co_name))
            frame = frame.f_back
        self._add(tuple(stack))

    def _add(self, stack: Stack) -> None:
        now = time.process_time()
        self.seconds[stack] += now - self._last
        self._last = now
