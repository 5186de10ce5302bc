"""The entry point of the program: its exit status, and one line for an error."""

import os
import sys
from io import TextIOWrapper

from lincorr_lightning.cli.program import main
from lincorr_lightning.cli.termination import exit_at_signals
from lincorr_lightning.errors import LincorrError

# Messages of gloo and NCCL about another process.
_LOST_RANK = ("closed by peer", "reset by peer", "remote process exited")


def console() -> None:
    """Run the program: errors that the user can mend are one line, without a traceback."""
    # Tokenizers would warn of forked processes.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ["MPLBACKEND"] = "agg"  # with one that is not installed, matplotlib has no import
    if isinstance(sys.stdout, TextIOWrapper):  # may be in ASCII; a "?" could be a sign of a number
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        with exit_at_signals():
            main()
            sys.stdout.flush()
    except BrokenPipeError:  # the reader has seen enough, as with `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except LincorrError as error:
        sys.stderr.write(f"lincorr: error: {error}\n")
        sys.exit(error.exit_status)
    except RuntimeError as error:
        # The error of the other process is on the screen.
        if not any(sign in str(error) for sign in _LOST_RANK):
            raise
        sys.stderr.write("lincorr: error: another process of this run failed; see its error.\n")
        sys.exit(1)
