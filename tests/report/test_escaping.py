"""Names that are markup elsewhere, and tables that other programs must read."""

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from markdown_it import MarkdownIt

from lincorr_lightning.results.report import write_report
from lincorr_lightning.results.report.document import Column, Table
from lincorr_lightning.results.report.text import to_latex, to_markdown

Make = Callable[..., Path]
NASTY = "<img src=x onerror=alert(1)>&\"'`|$_%#{}\\~^ 東京 مدينة \u202eabc ]]> </script>"


def test_names_are_texts_and_nothing_else(probe: Make, finetune: Make, tmp_path: Path) -> None:
    run = finetune(NASTY, relation=f"{NASTY}->country")
    for name in "subject", "cause":
        table = run / "tables" / "cases.csv"
        quoted = '"' + f"<i>{name}</i>".replace('"', '""') + '"'
        table.write_text(
            table.read_text().replace("Ada" if name == "subject" else "low prior", quoted)
        )
    (run / "figures" / "<b>&.png").write_bytes((run / "figures" / "outcomes.png").read_bytes())
    (run / "config.yaml").write_text(json.dumps({"seed": "</code></pre><script>alert(1)</script>"}))
    text = write_report([run, probe(NASTY)], tmp_path / "o<u>t").read_text(encoding="utf-8")
    body = text.partition("</style>")[2]
    assert not re.search(r"<(img src=x|script|b>|i>|u>)", body)
    assert "&lt;img src=x onerror=alert(1)&gt;&amp;&quot;&#x27;`|$_%#{}\\~^" in body
    assert "&lt;i&gt;subject&lt;/" in body and "東京 مدينة" in body
    # Whatever direction a name takes on, it ends with the name.
    without = re.sub(r"<bdi>.*?</bdi>|<title>.*?</title>|\w+=\"[^\"]*\"|<code>.*?</code>", "", body,
                     flags=re.S)  # fmt: skip
    assert "\u202e" not in without


def test_what_no_file_of_text_can_hold(finetune: Make, tmp_path: Path) -> None:
    run = finetune("half \ud800 and nul \x00 and bell \x07")
    write_report([run], tmp_path / "out")
    for path in (tmp_path / "out").iterdir():
        text = path.read_text(encoding="utf-8")
        assert "half \ufffd and nul \ufffd and bell \ufffd" in text, path
        assert not re.search(r"[\x00-\x08\x0b\x0c\x0e-\x1f]", text)


@pytest.fixture
def nasty_table() -> Table:
    return Table(
        f"A table of {NASTY}",
        [Column("pair"), Column(NASTY, "r"), Column("share", "share")],
        [["city->country", 0.5, 0.25], [NASTY, -0.5, None], ["[a]", "text", 1]],
        f"Note: {NASTY}.",
    )


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
    assert cells == ["pair", NASTY, "share", "city→country", "0.50", "25.0%", NASTY, "−0.50", "",
                     "[a]", "text", "100.0%"]  # fmt: skip


def read_latex(text: str) -> list[list[list[str]]]:
    """Cells of every table, by a reader that knows LaTeX's special signs; fails on a stray one."""
    lines = [line for line in text.splitlines() if not line.startswith("%")]
    code = re.sub(r"(?<!\\)%$", "", "\n".join(lines), flags=re.M)
    # Escaped signs stand for themselves; what is left of the special ones has its meaning.
    code = re.sub(r"\\([{}$&#%_])", lambda m: chr(0xE000 + ord(m[1])), code)
    code = re.sub(r"\\text(\w+)\{\}", "?", code)
    code = re.sub(r"\\shortstack\[r\]\{([^{}]*)\}", lambda m: m[1].replace("\\\\", " "), code)
    depth = 0
    for sign in code:
        depth += {"{": 1, "}": -1}.get(sign, 0)
        assert depth >= 0
    assert depth == 0
    assert code.count("$") % 2 == 0 and not re.search(r"[#~^_%]", code)
    stack: list[str] = []
    for kind, name in re.findall(r"\\(begin|end)\{(\w+)\}", code):
        if kind == "begin":
            stack.append(name)
        else:
            assert stack.pop() == name
    assert not stack
    tables = []
    for columns, body in re.findall(
        r"\\begin\{tabular\}\{([lr]+)\}(.*?)\\end\{tabular\}", code, re.S
    ):
        rows = re.sub(r"\\(top|mid|bottom)rule", "", body).split("\\\\")
        cells = [[cell.strip() for cell in row.split("&")] for row in rows[:-1]]
        assert rows[-1].strip() == ""
        assert {len(row) for row in cells} == {len(columns)}
        tables.append(cells)
    return tables


def test_a_long_table_in_latex_goes_over_pages() -> None:
    rows = [[f"k_{i}", i / 100] for i in range(80)]
    text = to_latex("x", [Table("Long", [Column("key"), Column("r", "r")], rows, "Note.")])
    assert read_latex(text) == []
    assert text.count("\\begin{longtable}{lr}") == 1 and "\\begin{table}" not in text
    body = text.partition("\\endhead")[2].partition("\\bottomrule")[0]
    assert [line.count("&") for line in body.split("\\\\")[:-1]] == [1] * 80


def test_latex_is_read_back(
    nasty_table: Table, probe: Make, finetune: Make, tmp_path: Path
) -> None:
    (table,) = read_latex(to_latex("study_name", [nasty_table]))
    assert len(table) == 4
    assert table[1] == ["city$\\rightarrow$country", "0.50", f"25.0{chr(0xE000 + ord('%'))}"]
    write_report([probe(), probe("b"), finetune(NASTY)], tmp_path)
    for path in tmp_path.glob("*.tex"):
        assert read_latex(path.read_text())
    (pairs, *_) = read_latex((tmp_path / "linear_probe.tex").read_text())
    assert pairs[1][0] == "city$\\rightarrow$country"
