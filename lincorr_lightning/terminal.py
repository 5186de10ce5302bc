"""What reaches the terminal: texts of others, such as labels and paths, without its control codes.

Colors are left to rich, which adds them after the texts are made printable.
"""

import logging
import re
import sys
import warnings
from typing import TextIO

# C0 and C1 controls, signs that break or turn lines, and halves of characters.
_CONTROLS = re.compile(
    r"[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]"
)


def printable(text: object, keep: str = "\n\t") -> str:
    r"""Return a text with visible escapes, such as ``\x1b``, for controls except those to keep."""
    return _CONTROLS.sub(
        lambda sign: sign[0] if sign[0] in keep else ascii(sign[0])[1:-1], str(text)
    )


def write_out(text: str) -> None:
    """Write a text to the standard output."""
    sys.stdout.write(printable(text))


def show_error(error: object) -> None:
    """Write an error to the standard error, in one line."""
    sys.stderr.write(f"lincorr: error: {printable(error, '')}\n")


class _PrintableRecord(logging.LogRecord):
    def getMessage(self) -> str:
        return printable(super().getMessage())


def make_messages_printable() -> None:
    """Make log lines, warnings and what the output's encoding lacks printable, in this process."""

    def show_warning(
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        file: TextIO | None = None,
        line: str | None = None,
    ) -> None:
        text = warnings.formatwarning(message, category, filename, lineno, line)
        (file or sys.stderr).write(printable(text))

    warnings.showwarning = show_warning
    logging.setLogRecordFactory(_PrintableRecord)
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="backslashreplace")
