"""Texts of others reach the terminal without control codes."""

import io
import logging
import sys
import unicodedata
import warnings

import pytest

from lincorr_lightning import terminal
from lincorr_lightning.cli import console
from lincorr_lightning.results.console import table_text
from lincorr_lightning.results.table import Table

HOSTILE = "\x1b[31mred\x1b]0;t\x07\x9b31m\r\u202e\u2066\u200f\u2028 [bold]b[/x] :smile:\\"
SHOWN = r"\x1b[31mred\x1b]0;t\x07\x9b31m\r\u202e\u2066\u200f\u2028 [bold]b[/x] :smile:" + "\\"


def controls(text: str) -> list[str]:
    """Signs that Unicode calls controls, or that turn or break lines."""
    turning = {"L", "R", "AL", "EN", "ES", "ET", "AN", "CS", "NSM", "BN", "WS", "ON"}
    return [
        sign
        for sign in text.replace("\n", "")
        if unicodedata.category(sign) in ("Cc", "Cs", "Zl", "Zp")
        or (unicodedata.category(sign) == "Cf" and unicodedata.bidirectional(sign) not in turning)
    ]


def test_every_control_is_shown_and_no_other_sign_is_changed() -> None:
    everything = "".join(map(chr, range(sys.maxunicode + 1)))
    assert not controls(terminal.printable(everything, ""))
    for name in ("Zürich", "東京", "مدينة", "नमस्ते", "می‌خواهم", "👩‍🔬", "two\nlines\tand tab"):
        assert terminal.printable(name) == name


def test_an_error_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["lincorr", "report", f"/no{HOSTILE}\nlincorr: done"])
    with pytest.raises(SystemExit):
        console()
    error = capsys.readouterr().err
    assert error.startswith(f"lincorr: error: /no{SHOWN}\\nlincorr: done is no folder")
    assert error.count("\n") == 1


def test_log_lines_and_warnings(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(logging, "_logRecordFactory", logging.getLogRecordFactory())
    out = io.TextIOWrapper(io.BytesIO(), "ascii")
    monkeypatch.setattr(sys, "stdout", out)
    with warnings.catch_warnings(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(warnings, "showwarning", None)
        terminal.make_messages_printable()
        warnings.warn(HOSTILE, stacklevel=1)
    handler = logging.StreamHandler()
    logging.getLogger("tests").addHandler(handler)
    logging.getLogger("tests").warning("%s: %d", HOSTILE, 3)
    logging.getLogger("tests").removeHandler(handler)
    error = capsys.readouterr().err
    assert f"UserWarning: {SHOWN}\n" in error and f"\n{SHOWN}: 3\n" in error
    assert not controls(error)
    terminal.write_out("東")  # which ASCII lacks
    out.flush()
    assert out.buffer.getvalue() == b"\\u6771"  # type: ignore[attr-defined]


def test_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    text = table_text([Table.of("t", [[HOSTILE], ["a\n\x1b"]], [HOSTILE], HOSTILE, HOSTILE)])
    assert not controls(text) and r"a\n\x1b" in text
    assert "".join(text.split()).count("".join(SHOWN.split())) == 4  # also in the folded cells
