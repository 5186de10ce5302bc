"""The entry point of the program: its streams, its exit status, and one line for an error."""

import errno
import io
import os
import sys
from pathlib import Path
from typing import Any

from lincorr_lightning.cli.program import main
from lincorr_lightning.cli.termination import exit_at_signals, tell
from lincorr_lightning.errors import LincorrError

# Messages of gloo and NCCL about another process.
_LOST_RANK = ("closed by peer", "reset by peer", "remote process exited")
_KEPT_OPTIONS = ("encoding", "errors", "line_buffering", "write_through")


def console() -> None:
    """Run the program: errors that the user can mend are one line, without a traceback."""
    _outlive_streams()
    # Tokenizers would warn of forked processes.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    try:
        with exit_at_signals():
            main()
    except LincorrError as error:
        sys.stderr.write(f"lincorr: error: {error}\n")
        sys.exit(error.exit_status)
    except RuntimeError as error:
        # The error of the other process is on the screen.
        if not any(sign in str(error) for sign in _LOST_RANK):
            raise
        sys.stderr.write("lincorr: error: another process of this run failed; see its error.\n")
        sys.exit(1)


class _Stream(io.FileIO):
    """Standard output or error, without which a run goes on: its results are in files."""

    is_within_line = False
    """Whether what was written last goes on, as a progress bar does."""

    def write(self, data: Any, /) -> int:
        """Write bytes; if they cannot be written, drop them and all that follow."""
        self.is_within_line = bytes(data[-1:]) != b"\n"
        try:
            return super().write(data)
        except OSError as error:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self.fileno())
            os.close(nowhere)
            if error.errno != errno.EPIPE:  # else the reader has seen enough, as with `| head`
                tell(f"lincorr: warning: the run goes on without output: {error.strerror}.")
            return len(data)


def _outlive_streams() -> None:
    """Let no closed or full standard output or error end this process."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:  # the next file would get this number, and all that is printed
            os.open(os.devnull, os.O_RDWR)
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, Path(os.devnull).open("w", encoding="utf-8"))  # noqa: SIM115
        elif stream is getattr(sys, f"__{name}__"):
            raw = io.BufferedWriter(_Stream(stream.fileno(), "w", closefd=False))
            options = {option: getattr(stream, option) for option in _KEPT_OPTIONS}
            setattr(sys, name, io.TextIOWrapper(raw, **options))
