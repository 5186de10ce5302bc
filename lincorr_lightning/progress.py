"""Progress of long loops: bars in a terminal, and a line each minute where there is none."""

import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from threading import Event, Thread
from time import monotonic
from typing import Any, TypeVar

import lightning as L
from lightning.pytorch.callbacks import ProgressBar
from lightning.pytorch.utilities import rank_zero_only
from tqdm import tqdm

T = TypeVar("T")


@dataclass
class Loop:
    """A loop that is running since `start`, in seconds of the clock."""

    doing: str
    total: float | None
    start: float
    done: int = 0

    def text(self, now: float) -> str:
        """Return how far it is and, after the first item, about how long the others will take."""
        if not self.total or self.total == float("inf"):
            return f"{self.doing} {self.done}"
        left = (now - self.start) / max(self.done, 1) * (self.total - self.done)
        estimate = f", about {minutes(left)} left" if 0 < self.done < self.total else ""
        return f"{self.doing} {self.done} of {self.total:.0f}{estimate}"


_running: list[Loop] = []  # those of `progress`


def minutes(seconds: float) -> str:
    """Return a time in minutes, or in hours and minutes."""
    hours, rest = divmod(round(seconds / 60), 60)
    return f"{hours} h {rest} min" if hours else f"{rest} min"


def progress(items: Iterable[T], doing: str, **bar: Any) -> Iterator[T]:
    """Yield items, on rank 0 with a bar if they take more than two seconds, or `ProgressLines`."""
    if (hidden := getattr(rank_zero_only, "rank", 0) != 0) or sys.stderr.isatty():
        yield from tqdm(items, doing, leave=False, delay=2, disable=hidden, **bar)
        return
    total = bar.get("total") or getattr(items, "__len__", int)()
    _running.append(loop := Loop(doing, total, monotonic()))
    try:
        for item in items:
            yield item
            loop.done += 1
    finally:
        _running.remove(loop)


class ProgressLines(ProgressBar):
    """Prints a line with an estimate each minute, for logs of runs without a terminal.

    A thread prints, so that a batch that takes long, or the end of a run, does not silence it.

    Args:
        every: Seconds between two lines.
        clock: Clock in seconds.
        wait: Waits for so many seconds, and returns whether the run has ended; null: a real wait.
    """

    def __init__(
        self,
        every: float = 60.0,
        clock: Callable[[], float] = monotonic,
        wait: Callable[[float], bool] | None = None,
    ) -> None:
        super().__init__()
        self._ended = Event()
        self.every, self.clock, self._wait = every, clock, wait or self._ended.wait
        self._loops: list[Loop] = []
        self._start = clock()

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        self._trainer, self._start = trainer, self.clock()
        self._ended.clear()
        if trainer.is_global_zero:
            Thread(target=self.watch, daemon=True).start()

    def watch(self) -> None:
        """Print until the run ends."""
        while not self._wait(self.every):
            sys.stderr.write(f"{self.line()}\n")
            sys.stderr.flush()

    def line(self) -> str:
        """Return what is running, how far it is, and how long it will take."""
        now = self.clock()
        running = [loop.text(now) for loop in (*self._loops, *_running)]
        return f"after {minutes(now - self._start)}: {'; '.join(running) or 'computing'}"

    def _begin(self, doing: str, batches: Any) -> None:
        total = sum(batches) if isinstance(batches, list) else batches
        self._loops.append(Loop(f"{doing}, batch", total, self.clock()))

    def on_train_start(self, trainer: L.Trainer, *_: Any) -> None:
        n = trainer.num_training_batches * max(1, (trainer.max_epochs or 1) - trainer.current_epoch)
        self._begin("training", n if trainer.max_steps < 0 else min(n, trainer.max_steps))

    def on_validation_start(self, trainer: L.Trainer, *_: Any) -> None:
        check, n = trainer.num_sanity_val_batches, trainer.num_val_batches
        self._begin("validation", check if trainer.sanity_checking else n)

    def on_test_start(self, trainer: L.Trainer, *_: Any) -> None:
        self._begin("test", trainer.num_test_batches)

    def on_predict_start(self, trainer: L.Trainer, *_: Any) -> None:
        self._begin("prediction", trainer.num_predict_batches)

    def on_train_batch_end(self, *_: Any, **__: Any) -> None:
        self._loops[-1].done += 1

    def on_train_end(self, *_: Any, **__: Any) -> None:
        self._loops.pop()

    on_validation_batch_end = on_test_batch_end = on_predict_batch_end = on_train_batch_end
    on_validation_end = on_test_end = on_predict_end = on_train_end

    def teardown(self, *_: Any, **__: Any) -> None:
        """Stop printing."""
        self._ended.set()
        self._loops.clear()

    on_exception = teardown
