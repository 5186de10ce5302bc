"""Ends of a run by SIGTERM and SIGINT: after the training step, with a checkpoint and one line."""

import shlex
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from lincorr_lightning.errors import LincorrError
from lincorr_lightning.terminal import printable, show_error

_OUTCOMES = {signal.SIGTERM: "terminated", signal.SIGINT: "interrupted"}
_REPEATED_S = 1.0  # launchers and terminals may send a signal twice within this time


class Terminated(BaseException):
    """A signal ends the run."""


class Termination:
    """Handler of SIGTERM and SIGINT in a process.

    The first signal raises `Terminated` in the main thread; in a training step after which a
    checkpoint can be saved, it only sets `signum`, and `SignalCheckpoint` raises when the step has
    ended. A later signal raises in any case.
    """

    signum: int | None = None  #: The signal that ends the run, once there is one.
    in_step = False  #: Whether a training step is running after which a checkpoint can be saved.
    checkpoint: str | Path | None = None  #: Path of the checkpoint to resume from, if there is one.
    is_resumable = False  #: Whether the same command, started again, continues where it stopped.
    is_installed = False  #: Whether the program handles signals.

    _received = 0.0

    def handle_signals(self) -> None:
        """Handle the signals, again after a Trainer has replaced the handlers, if installed."""
        for signum in _OUTCOMES if self.is_installed else ():
            if signal.getsignal(signum) is not signal.SIG_IGN:  # such as under nohup
                signal.signal(signum, self._on_signal)

    def _on_signal(self, signum: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self.signum is None:
            self.signum = signum
            self._received = now
            if not self.in_step:
                raise Terminated
        elif now - self._received > _REPEATED_S:
            raise Terminated

    def report(self) -> int:
        """Write the line that says how to go on; return the exit status, as shells report it."""
        # Every command imports this module, and few of them Lightning.
        from lightning_utilities.core.rank_zero import rank_zero_only

        signum = self.signum or signal.SIGTERM  # another rank may have received it
        if getattr(rank_zero_only, "rank", 0) == 0:  # it has no rank before Lightning is imported
            line = f"lincorr: {_OUTCOMES[signal.Signals(signum)]}"
            if self.is_resumable:
                line += "; start the same command again to go on"
            elif self.checkpoint:
                line += f"; resume with --ckpt_path {shlex.quote(printable(self.checkpoint, ''))}"
            sys.stderr.write(f"\n{line}\n" if sys.stderr.isatty() else f"{line}\n")
        return 128 + signum


current = Termination()  # the handler of this process; only the program `lincorr` installs it


def handle_signals() -> None:
    """Handle the signals of this process, also in one that a Trainer has started."""
    current.handle_signals()


@contextmanager
def exit_at_signals() -> Iterator[None]:
    """Exit with one line on SIGTERM (status 143) and SIGINT (130) in the ``with`` block.

    An error of this package, such as a checkpoint that cannot be written, is reported first.
    """
    current.is_installed = True
    current.handle_signals()
    try:
        yield
    except Terminated:
        sys.exit(current.report())
    except Exception as error:
        if current.signum is None:
            raise
        # Other errors are usually due to the signal, such as those of collective operations.
        if isinstance(error, LincorrError):
            show_error(error)
        sys.exit(current.report())
