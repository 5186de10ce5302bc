"""Names that are markup elsewhere, and tables that other programs must read."""

import re
from pathlib import Path

import pytest
from markdown_it import MarkdownIt
from pandas import DataFrame, MultiIndex

from lincorr_lightning.results.plots import short
from lincorr_lightning.results.report import to_markdown, write_report
from lincorr_lightning.results.results import Figure, Results
from lincorr_lightning.results.saved_run import config_verb
from lincorr_lightning.results.table import Table, short_name
from tests.results.conftest import draw, lm_info

NASTY = "<img src=x onerror=alert(1)>&\"'`|$_%#{}\\~^ 東京 مدينة \u202eabc ]]> </script>"


def write_nasty(folder: Path, name: str) -> Path:
    """A run whose every text is this name."""
    rows, formats = [[name, 0.5], ["[a]", -0.5]], {"n": ".2f"}
    table = Table.of("t", rows, [name, "n"], name, name, True, {"n": name}, formats)
    Results(
        name,
        {name: name},
        tables=[table, Table.of("u", [[name]], [name], name)],
        figures=[Figure("f", name, draw())],
        lm=lm_info(name),
        settings={name: name},
    ).write(folder)
    return folder


def test_names_are_texts_and_nothing_else(tmp_path: Path) -> None:
    run = write_nasty(tmp_path / "<b>&", NASTY)
    (run / "config.yaml").write_text("seed: </code></pre><script>alert(1)</script>")
    text = write_report([run], tmp_path / "o<u>t").read_text(encoding="utf-8")
    body = text.partition("</style>")[2]
    assert not re.search(r"<(img src=x|b>|u>)", body) and body.count("<script>") == 1
    assert "&lt;img src=x onerror=alert(1)&gt;&amp;&#34;&#39;`|$_%#{}\\~^" in body
    assert "東京 مدينة" in body
    # Whatever direction a name takes on, it ends with the name.
    without = re.sub(
        r"<bdi>.*?</bdi>|<title>.*?</title>|\w+=\"[^\"]*\"|<code>.*?</code>", "", body, flags=re.S
    )
    assert "\u202e" not in without


def test_characters_that_no_text_file_can_hold(tmp_path: Path) -> None:
    write_report([write_nasty(tmp_path / "run", "nul \x00 and bell \x07")], tmp_path / "out")
    for path in (tmp_path / "out").iterdir():
        text = path.read_text(encoding="utf-8")
        assert "nul \ufffd and bell \ufffd" in text, path
        assert not re.search(r"[\x00-\x08\x0b\x0c\x0e-\x1f]", text)
    table = Table.of("half", [["b"]], ["a"], "half \ud800")
    assert "half \ufffd" in to_markdown("s", [table])


@pytest.fixture
def nasty_table() -> Table:
    """A table with groups of columns, and texts among its numbers."""
    columns = MultiIndex.from_tuples([("", "pair"), ("a", NASTY), ("[b]", "share")])
    rows = [["city->country", 0.5, "25.0%"], [NASTY, -0.5, ""], ["[a]", "text", "100.0%"]]
    frame = DataFrame(rows, columns=columns)
    formats = {NASTY: ".2f", "share": ".1%"}
    caption, note = f"A table of {NASTY}", f"Note: {NASTY}."
    return Table("t", frame, caption, note, headings={NASTY: NASTY}, formats=formats)


def test_markdown_is_read_back(nasty_table: Table) -> None:
    reader = MarkdownIt("commonmark", {"html": True}).enable(["table", "strikethrough"])
    tokens = reader.parse(to_markdown("Study & <b>", [nasty_table]))
    kinds = [token.type for token in tokens]
    assert kinds.count("table_open") == 1 and "html_block" not in kinds
    inline = [token for token in tokens if token.type == "inline"]
    children = {child.type for token in inline for child in token.children or ()}
    assert children <= {"text", "text_special", "strong_open", "strong_close"}
    texts = ["".join(child.content for child in token.children or ()) for token in inline]
    assert texts[0] == "Study & <b>"
    assert texts[1] == f"A table of {NASTY}"
    cells = texts[2:-1]
    assert cells == [
        "pair",
        f"a {NASTY}",
        "[b] share",
        "city→country",
        "0.50",
        "25.0%",
        NASTY,
        "−0.50",
        "",
        "[a]",
        "text",
        "100.0%",
    ]


def test_short_texts() -> None:
    assert [short(value) for value in (0.98, -0.141, -0.001, 1.0)] == [".98", "−.14", ".00", "1.00"]
    assert config_verb("# A.\n#   lincorr test --config configs/a.yaml\n") == "test"
    assert config_verb("a: 1\n") == "fit"
    paths = ("/data/some-lm/", "/cache/models--org--some-lm/snapshots/0a", "org/some-lm", "some-lm")
    assert {short_name(path) for path in paths} == {"some-lm"} and short_name("/") == "/"
