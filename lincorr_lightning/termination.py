"""Handling of SIGTERM and SIGINT: a run ends within seconds, with one line and its own status."""

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

from lincorr_lightning.errors import LincorrError

# The current training step has this long to end, so that a checkpoint can be saved after it.
_STEP_S = 2.0
# Then the process ends, even if the main thread is in one long operation of torch.
_GRACE_S = 4.0
# A signal in a finalizer is raised again after this time.
_AGAIN_S = 0.01
_OUTCOMES = {signal.SIGTERM: "terminated", signal.SIGINT: "interrupted"}
_RANKS = ("RANK", "SLURM_PROCID", "LOCAL_RANK")


class Terminated(BaseException):
    """A signal ends the run."""


class Termination:
    """Handler of SIGTERM and SIGINT in a process.

    The first signal raises `Terminated` in the main thread; during a training step, only when the
    step has ended or `_STEP_S` have passed. If that takes too long, a thread ends the process.
    Later signals are ignored.
    """

    signum: int | None = None
    """The signal that ends the run, once there is one."""
    in_step = False
    """Whether a training step is running after which a checkpoint can be saved."""
    checkpoint: str | Path | None = None
    """Path of the checkpoint to resume from, if there is one."""
    is_resumable = False
    """Whether the same command, started again, continues where it stopped."""
    launcher: Any = None
    """Lightning's launcher of the other ranks on this machine, if there is one."""

    _is_installed = _is_over = _in_grace_period = _has_reported = False

    def install(self) -> None:
        """Handle the signals from now on, except in forked processes."""
        # Python's handlers wait for the main thread; the socket is written to immediately.
        signals, self._sender = socket.socketpair()
        self._sender.setblocking(False)
        signal.set_wakeup_fd(self._sender.fileno(), warn_on_full_buffer=False)
        threading.Thread(target=self._watch, args=(signals,), daemon=True).start()
        os.register_at_fork(after_in_child=self.uninstall)
        sys.unraisablehook = self._on_unraisable
        self._is_installed = True
        self.handle_signals()

    def handle_signals(self) -> None:
        """Handle the signals again after a Trainer has replaced the handlers, if installed."""
        for signum in _OUTCOMES if self._is_installed else ():
            if signal.getsignal(signum) is not signal.SIG_IGN:  # such as under nohup
                signal.signal(signum, self._on_signal)

    def uninstall(self) -> None:
        """Restore Python's default handlers."""
        if not self._is_installed:
            return
        self._is_installed = False
        signal.set_wakeup_fd(-1)
        sys.unraisablehook = sys.__unraisablehook__
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        self._sender.close()

    def raise_pending(self) -> None:
        """Raise `Terminated` if a signal has been received."""
        if self.signum is not None:
            self.accept()
            raise Terminated

    def accept(self) -> None:
        """Ignore signals from now on, as one ends the run; another rank may have received it."""
        self.signum = self.signum or signal.SIGTERM
        self._is_over = True

    def exit(self) -> NoReturn:
        """Report the signal and exit."""
        self._is_over = True
        self._report()
        sys.exit(self._status)

    def _on_signal(self, signum: int, frame: FrameType | None) -> None:
        self.signum = self.signum or signum
        if not self._is_over and (self._in_grace_period or not self.in_step):
            self.raise_pending()

    def _on_unraisable(self, unraisable: sys.UnraisableHookArgs) -> None:
        """Raise again what was raised in a finalizer, whose exceptions Python ignores."""
        if self.signum is None or not isinstance(unraisable.exc_value, Terminated):
            sys.__unraisablehook__(unraisable)
            return
        self._is_over = False
        threading.Timer(_AGAIN_S, signal.raise_signal, [self.signum]).start()

    def _watch(self, signals: socket.socket) -> None:
        signum = 0
        while signum not in _OUTCOMES:
            received = signals.recv(1)
            if not received:
                return
            signum = received[0]
        end = monotonic() + _GRACE_S
        threading.Event().wait(_STEP_S)
        self._in_grace_period = True
        signal.raise_signal(signum)
        threading.Event().wait(end - monotonic())
        self.signum = self.signum or signum
        self._report()
        for process in getattr(self.launcher, "procs", ()):
            process.kill()
        os._exit(self._status)

    @property
    def _status(self) -> int:
        """Exit status, as shells report it for a process that a signal ended."""
        assert self.signum is not None
        return 128 + self.signum

    def _report(self) -> None:
        rank = next((os.environ[name] for name in _RANKS if name in os.environ), "0")
        if self._has_reported or rank != "0":
            return
        self._has_reported = True
        assert self.signum is not None
        line = f"lincorr: {_OUTCOMES[signal.Signals(self.signum)]}"
        if self.is_resumable:
            line += "; start the same command again to go on"
        elif self.checkpoint:
            line += f"; resume with --ckpt_path {shlex.quote(str(self.checkpoint))}"
        # The main thread may hold the lock of sys.stderr.
        os.write(2, f"{line}\n".encode())


# The handler of this process; only the program `lincorr` installs it.
current = Termination()


@contextmanager
def exit_at_signals() -> Iterator[None]:
    """Exit with one line on SIGTERM (status 143) and SIGINT (130) in the ``with`` block.

    An error of this package, such as a checkpoint that cannot be written, is reported first.
    """
    current.install()
    try:
        yield
    except BaseException as error:
        if current.signum is None:
            raise
        # Other errors are usually due to the signal, such as those of collective operations.
        if isinstance(error, LincorrError):
            os.write(2, f"lincorr: error: {error}\n".encode())
    finally:
        if current.signum is None:
            current.uninstall()
    if current.signum is not None:
        current.exit()
