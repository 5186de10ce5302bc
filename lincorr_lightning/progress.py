"""Progress of long loops: bars in a terminal, and a line each minute where there is none."""

import sys
from collections.abc import Iterable, Iterator
from time import monotonic
from typing import Any, TypeVar

import lightning as L
from lightning.pytorch.callbacks import ProgressBar
from lightning.pytorch.utilities import rank_zero_only
from tqdm import tqdm

from lincorr_lightning.terminal import printable

T = TypeVar("T")

EVERY_S = 60.0  #: Seconds between two lines.


class LoopLines:
    """Prints how far a loop is, once a minute.

    Args:
        doing: What the loop does.
        total: Number of its items; 0 or infinity if it is not known.
    """

    def __init__(self, doing: str, total: float = 0) -> None:
        self.doing = doing
        self.total = total
        self.done = 0
        self._start = self._last = monotonic()

    def advance(self) -> None:
        """Count an item, and print a line if the last one was a minute ago."""
        self.done += 1
        now = monotonic()
        if now - self._last >= EVERY_S:
            self._last = now
            sys.stderr.write(f"{self.text(now - self._start)}\n")
            sys.stderr.flush()

    def text(self, seconds: float) -> str:
        """Return how far the loop is after so many seconds, and how long the rest will take."""
        if not 0 < self.total < float("inf"):
            return f"{self.doing} {self.done}"
        hours, minutes = divmod(round(seconds / self.done * (self.total - self.done) / 60), 60)
        left = f"{hours} h {minutes} min" if hours else f"{minutes} min"
        estimate = f", about {left} left" if self.done < self.total else ""
        return f"{self.doing} {self.done} of {self.total:.0f}{estimate}"


def progress(items: Iterable[T], doing: str, **bar: Any) -> Iterator[T]:
    """Yield items, on rank 0 with a bar if they take more than two seconds, or with `LoopLines`."""
    doing = printable(doing, "")
    hidden = getattr(rank_zero_only, "rank", 0) != 0
    if hidden or sys.stderr.isatty() or "ipykernel" in sys.modules:  # of a notebook
        yield from tqdm(items, doing, leave=False, delay=2, disable=hidden, **bar)
        return
    lines = LoopLines(doing, bar.get("total") or getattr(items, "__len__", int)())
    for item in items:
        yield item
        lines.advance()


class ProgressLines(ProgressBar):
    """Prints a line with an estimate each minute, for logs of runs without a terminal."""

    def __init__(self) -> None:
        super().__init__()
        self._loops: list[LoopLines] = []

    def disable(self) -> None:
        """Do nothing, where Lightning disables bars: only rank 0 prints."""

    def _begin(self, doing: str, batches: Any) -> None:
        total = sum(batches) if isinstance(batches, list) else batches
        self._loops.append(LoopLines(f"{doing}, batch", total))

    def on_train_start(self, trainer: L.Trainer, *_: Any) -> None:
        n = trainer.num_training_batches * max(1, (trainer.max_epochs or 1) - trainer.current_epoch)
        self._begin("training", n if trainer.max_steps < 0 else min(n, trainer.max_steps))

    def on_validation_start(self, trainer: L.Trainer, *_: Any) -> None:
        self._begin("validation", trainer.num_val_batches)

    def on_test_start(self, trainer: L.Trainer, *_: Any) -> None:
        self._begin("test", trainer.num_test_batches)

    def on_predict_start(self, trainer: L.Trainer, *_: Any) -> None:
        self._begin("prediction", trainer.num_predict_batches)

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any, **__: Any) -> None:
        if trainer.is_global_zero:
            self._loops[-1].advance()

    def on_train_end(self, *_: Any, **__: Any) -> None:
        self._loops.pop()

    on_validation_batch_end = on_test_batch_end = on_predict_batch_end = on_train_batch_end
    on_validation_end = on_test_end = on_predict_end = on_train_end
