"""End a run from the command line at SIGTERM and SIGINT: in seconds, with one line and a status."""

from __future__ import annotations

import os
import shlex
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from time import monotonic
from types import FrameType
from typing import Any, NoReturn

# A training step under way has this long to end, so that a checkpoint can be saved after it.
_STEP_S = 2.0
# Whatever the main thread is doing then, such as one long operation of torch, the process ends.
_GRACE_S = 4.0
_OUTCOMES = {signal.SIGTERM: "terminated", signal.SIGINT: "interrupted"}
_RANKS = ("RANK", "SLURM_PROCID", "LOCAL_RANK")


class Terminated(BaseException):
    """A signal ends the run."""


class Termination:
    """What happens in a process at SIGTERM and SIGINT.

    The first signal raises `Terminated` in the main thread, in a training step only once it has
    ended or `_STEP_S` are over. A thread ends the process if that took too long. Signals that
    follow change nothing.

    Attributes:
        signum: The signal that ends the run, once there is one.
        in_step: Whether a training step is under way that a checkpoint can follow.
        checkpoint: Path of the checkpoint to resume from, if there is one.
        launcher: Lightning's launcher of the other ranks on this machine, if there is one.
    """

    def __init__(self) -> None:
        self.signum: int | None = None
        self.in_step = False
        self.checkpoint: str | Path | None = None
        self.launcher: Any = None
        self._is_installed = self._is_over = self._in_overtime = self._has_reported = False

    def install(self) -> None:
        """Handle the signals from now on; processes that are forked off do not."""
        # Python's handlers run in the main thread, between two bytecodes; a socket learns at once.
        signals, self._sender = socket.socketpair()
        self._sender.setblocking(False)
        signal.set_wakeup_fd(self._sender.fileno(), warn_on_full_buffer=False)
        threading.Thread(target=self._watch, args=(signals,), daemon=True).start()
        os.register_at_fork(after_in_child=self.uninstall)
        self._is_installed = True
        self.handle_signals()

    def handle_signals(self) -> None:
        """Handle the signals, which a Trainer that starts takes over, if this is installed."""
        for signum in _OUTCOMES if self._is_installed else ():
            if signal.getsignal(signum) is not signal.SIG_IGN:  # as under nohup
                signal.signal(signum, self._on_signal)

    def uninstall(self) -> None:
        """Leave the signals to Python."""
        if not self._is_installed:
            return
        self._is_installed = False
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        self._sender.close()

    def raise_pending(self) -> None:
        """Raise `Terminated` if there was a signal.

        Raises:
            Terminated: There was one.
        """
        if self.signum is not None:
            self._is_over = True
            raise Terminated

    def exit(self) -> NoReturn:
        """Report the end and exit."""
        self._is_over = True
        self._report()
        sys.exit(self._status)

    def _on_signal(self, signum: int, frame: FrameType | None) -> None:
        del frame
        self.signum = self.signum or signum
        if not self._is_over and (self._in_overtime or not self.in_step):
            self.raise_pending()

    def _watch(self, signals: socket.socket) -> None:
        signum = 0
        while signum not in _OUTCOMES:
            received = signals.recv(1)
            if not received:
                return
            signum = received[0]
        end = monotonic() + _GRACE_S
        threading.Event().wait(_STEP_S)
        self._in_overtime = True
        signal.raise_signal(signum)
        threading.Event().wait(end - monotonic())
        self.signum = self.signum or signum
        self._report()
        for process in getattr(self.launcher, "procs", ()):
            process.kill()
        os._exit(self._status)

    @property
    def _status(self) -> int:
        """The status by which shells report a process that a signal ended."""
        assert self.signum is not None
        return 128 + self.signum

    def _report(self) -> None:
        rank = next((os.environ[name] for name in _RANKS if name in os.environ), "0")
        if self._has_reported or rank != "0":
            return
        self._has_reported = True
        assert self.signum is not None
        line = f"lincorr: {_OUTCOMES[signal.Signals(self.signum)]}"
        if self.checkpoint:
            line += f"; resume with --ckpt_path {shlex.quote(str(self.checkpoint))}"
        # The main thread may hold the lock of sys.stderr.
        os.write(2, f"{line}\n".encode())


# Of this process; installed by the program `lincorr` alone.
current = Termination()


@contextmanager
def exit_at_signals() -> Iterator[None]:
    """Exit with one line at SIGTERM (status 143) and SIGINT (130) in the ``with`` block."""
    current.install()
    try:
        yield
    except BaseException:
        # What failed because of the signal, such as a collective operation, is no error.
        if current.signum is None:
            raise
    finally:
        if current.signum is None:
            current.uninstall()
    if current.signum is not None:
        current.exit()
