"""The entry point of the program: its exit status, and one line for an error."""

import os
import sys

from lincorr_lightning.cli.program import main
from lincorr_lightning.cli.termination import exit_at_signals
from lincorr_lightning.errors import LincorrError
from lincorr_lightning.terminal import make_messages_printable, show_error

# Messages of gloo and NCCL about another process.
_LOST_RANK = ("closed by peer", "reset by peer", "remote process exited")


def console() -> None:
    """Run the program: errors that the user can mend are one line, without a traceback."""
    # Tokenizers would warn of forked processes.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ["MPLBACKEND"] = "agg"  # with one that is not installed, matplotlib has no import
    make_messages_printable()
    try:
        with exit_at_signals():
            main()
            sys.stdout.flush()
    except BrokenPipeError:  # the reader has seen enough, as with `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except LincorrError as error:
        show_error(error)
        sys.exit(error.exit_status)
    except Warning as error:
        show_error(f"-W or PYTHONWARNINGS made a warning an error; leave it out. {error}")
        sys.exit(1)
    except RuntimeError as error:
        # The error of the other process is on the screen.
        if not any(sign in str(error) for sign in _LOST_RANK):
            raise
        show_error("another process of this run failed; see its error.")
        sys.exit(1)
