"""The ends of processes: by SIGTERM and SIGINT, within seconds, and with the first one of a run."""

import os
import shlex
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any

from lincorr_lightning.errors import LincorrError

# The current training step has this long to end, so that a checkpoint can be saved after it.
_STEP_S = 2.0
# Then saving has this long, before the process ends even in one long operation of torch.
_SAVE_S = 2.0
_OUTCOMES = {signal.SIGTERM: "terminated", signal.SIGINT: "interrupted"}
_RANKS = ("RANK", "SLURM_PROCID", "LOCAL_RANK")


class Terminated(BaseException):
    """A signal ends the run."""


class Termination:
    """Handler of SIGTERM and SIGINT in a process.

    The first signal raises `Terminated` in the main thread; during a training step, only when the
    step has ended or `_STEP_S` have passed. Later ones are ignored; a thread ends too long a step.
    """

    signum: int | None = None  #: The signal that ends the run, once there is one.
    in_step = False  #: Whether a training step is running after which a checkpoint can be saved.
    checkpoint: str | Path | None = None  #: Path of the checkpoint to resume from, if there is one.
    is_resumable = False  #: Whether the same command, started again, continues where it stopped.

    _is_installed = _is_over = _has_reported = False

    def install(self) -> None:
        """Handle the signals from now on, except in forked processes."""
        # Python's handlers wait for the main thread; the pipe is written to immediately.
        received, self._sender = os.pipe()
        os.set_blocking(self._sender, False)
        signal.set_wakeup_fd(self._sender, warn_on_full_buffer=False)
        threading.Thread(target=self._watch, args=(received,), daemon=True).start()
        os.register_at_fork(after_in_child=self.uninstall)
        self._own_hook, sys.unraisablehook = sys.unraisablehook, self._on_unraisable
        self._is_installed = True
        self.handle_signals()

    def handle_signals(self) -> None:
        """Handle the signals again after a Trainer has replaced the handlers, if installed."""
        for signum in _OUTCOMES if self._is_installed else ():
            if signal.getsignal(signum) is not signal.SIG_IGN:  # such as under nohup
                signal.signal(signum, self._on_signal)

    def uninstall(self) -> None:
        """Restore Python's default handlers."""
        if self._is_installed:
            self._is_installed = False
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            os.close(self._sender)
            sys.unraisablehook = self._own_hook

    def accept(self) -> None:
        """Ignore signals from now on, as one ends the run; another rank may have received it."""
        self.signum = self.signum or signal.SIGTERM
        self._is_over = True

    def report(self) -> int:
        """Write the line that says how to go on; return the exit status, as shells report it."""
        self.accept()
        assert self.signum is not None
        rank = next((os.environ[name] for name in _RANKS if name in os.environ), "0")
        if rank == "0" and not self._has_reported:
            self._has_reported = True
            line = f"lincorr: {_OUTCOMES[signal.Signals(self.signum)]}"
            if self.is_resumable:
                line += "; start the same command again to go on"
            elif self.checkpoint:
                line += f"; resume with --ckpt_path {shlex.quote(str(self.checkpoint))}"
            tell(line)
        return 128 + self.signum

    def _on_signal(self, signum: int, frame: FrameType | None) -> None:
        self.signum = self.signum or signum
        if not self._is_over and not self.in_step:
            self._is_over = True
            raise Terminated

    def _on_unraisable(self, unraisable: Any) -> None:
        """Let the watching thread's signal raise `Terminated` again if Python has ignored it."""
        if isinstance(unraisable.exc_value, Terminated):  # in a destructor
            self._is_over = False
        else:
            self._own_hook(unraisable)

    def _watch(self, received: int) -> None:
        signum = 0
        while signum not in _OUTCOMES:
            signum = int.from_bytes(os.read(received, 1))
            if not signum:  # uninstalled
                return
        time.sleep(_STEP_S)
        self.in_step = False
        signal.raise_signal(signum)
        time.sleep(_SAVE_S)
        self.signum = self.signum or signum
        os._exit(self.report())


current = Termination()  # the handler of this process; only the program `lincorr` installs it


def tell(line: str) -> None:
    """Write a line of its own to standard error, if that is there."""
    if threading.current_thread() is threading.main_thread():  # else another may hold its lock
        with suppress(OSError, ValueError, AttributeError):
            sys.stderr.flush()  # what a signal has interrupted
    raw: Any = getattr(getattr(sys.stderr, "buffer", None), "raw", None)
    before = ""
    if getattr(raw, "is_within_line", False):
        before, raw.is_within_line = "\n", False
    with suppress(OSError):
        os.write(2, f"{before}{line}\n".encode())


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
            tell(f"lincorr: error: {error}")
    finally:
        if current.signum is None:
            current.uninstall()
    if current.signum is not None:
        sys.exit(current.report())
