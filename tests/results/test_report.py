"""What is on a page, against the files of the runs."""

import base64
import hashlib
import json
import re
import struct
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from lincorr_lightning.cli import main
from lincorr_lightning.errors import ReportError
from lincorr_lightning.results import report
from lincorr_lightning.results.report import write_report

Make = Callable[..., Path]


class Page(HTMLParser):
    """A page's tables by caption and its text; fails on tags that are not closed in their order."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, Any]]] = []
        self.tables: dict[str, list[list[str]]] = {}
        self.text = ""
        self.feed(path.read_text(encoding="utf-8"))
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in ("meta", "img", "wbr"):
            self.open.append(tag)
        if tag == "table":
            self._caption, self._rows = "", []
        elif tag == "tr":
            self._rows.append([])
        elif tag in ("td", "th"):
            self._rows[-1].append("")

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag
        if tag == "table":
            self.tables.setdefault(self._caption, self._rows)

    def handle_data(self, data: str) -> None:
        if not {"style", "script"} & {*self.open}:
            self.text += data
        if "caption" in self.open:
            self._caption += data
        elif {"td", "th"} & {*self.open}:
            self._rows[-1][-1] += data

    def all(self, tag: str) -> list[dict[str, Any]]:
        return [attributes for name, attributes in self.tags if name == tag]


@pytest.fixture
def page_of(tmp_path: Path) -> Callable[..., Page]:
    """Reads the page of some runs."""
    return lambda *runs: Page(write_report(runs, tmp_path / "out"))


def test_a_run_is_shown_as_its_files_are(probe: Make, page_of: Callable[..., Page]) -> None:
    run = probe("/data/hub/some-lm", r=0.876)
    page = page_of(run)
    assert page.tables["Pairs and their r."] == [
        ["pair", "r", "above control", "Hit@1"],
        ["city→country", "0.88", "−0.07", "0.50"],
        ["city→color", "0.20", "−0.07", ""],
    ]
    weights = page.tables["Highest weights."]
    assert weights[0] == ["label", "token", "W", "in reference"]
    assert weights[1:3] == [["Paris", "France", "0.00", "yes"], ["Paris", "France", "0.10", "no"]]
    assert len(weights) == 1 + report.MAX_FOLDED_ROWS
    where = run / "tables" / "influences.csv"
    assert f"Of labels with a reference. The first 100 of 130 rows; all: {where}." in page.text
    assert ["n_test", "501"] in page.tables["Numbers of results.json"]
    for text in (
        "seed_everything: 7",
        "float32",
        "1.36M",
        "76 s",
        "torch ",
        f"lincorr fit --config {run}/config.yaml",
    ):
        assert text in page.text, text
    # The LM's path is in the settings alone.
    assert "/data/hub/some-lm" not in page.text.replace(str(run), "")
    assert "Linear probe 1: some-lm" in page.text
    assert "Label-wise r of all pairs." in page.text
    # A single run needs no list of runs; cells that are numbers have all digits to sort by.
    assert not page.all("nav") and "Runs" not in page.tables
    digits = [cell["data-value"] for cell in page.all("td") if "data-value" in cell]
    assert digits[:3] == ["0.876", str(0.876 - 0.95), "0.5"]


def test_runs_are_listed_by_study_and_size(
    probe: Make, finetune: Make, page_of: Callable[..., Page]
) -> None:
    large = probe("some/LM-13B", n_parameters=13_000_000_000)
    unknown = probe("nobody/knows", n_parameters=None)
    small = probe("me/LM-1B", n_parameters=1_240_000_000)
    runs = [finetune(), large, unknown, small, small / "results.json"]
    page = page_of(*runs)
    rows = [(row[2], row[3], row[5]) for row in page.tables["Runs"][1:]]
    assert rows == [
        ("tiny-world", "1M", str(runs[0])),
        ("LM-1B", "1.24B", str(small)),
        ("LM-13B", "13B", str(large)),
        ("knows", "", str(unknown)),
    ]
    assert "Linear probe 2: LM-1B" in page.text


def test_the_verdict_is_the_first_that_a_page_says(probe: Make, tmp_path: Path) -> None:
    runs = [probe(), probe(r=0.2)]
    values = json.loads((runs[0] / "results.json").read_text())
    (runs[0] / "results.json").write_text(json.dumps({**values, "verdict": ["a->b: W.", "<b>"]}))
    one, both = (Page(write_report(some, tmp_path / "out")).text for some in (runs[:1], runs))
    assert re.search(r"probe 1:[^:]*a→b: W\.\s*<b>.*float32", one, re.DOTALL)
    assert one.count("a→b: W.") == 1  # of several runs, among the contents and with the run
    assert re.search(
        r"probe 1:[^:]*: a→b: W\..*probe 1:.*a→b: W\.\s*<b>.*probe 2:", both, re.DOTALL
    )


def test_the_page_needs_nothing_but_itself(
    probe: Make, finetune: Make, geometry: Make, tmp_path: Path
) -> None:
    run = probe()
    path = write_report([run, finetune(), geometry()], tmp_path / "out")
    page, text = Page(path), path.read_text()
    for _, attributes in page.tags:
        for name in "src", "href", "srcset", "action", "data", "poster":
            value = attributes.get(name)
            assert value is None or value.startswith(("#", "data:image/png;base64,")), value
    assert not re.search(r"url\(|@import|<link|<iframe|<object", text)
    policy = next(m["content"] for m in page.all("meta") if "http-equiv" in m)
    assert policy.startswith("default-src 'none'") and "script-src 'sha256-" in policy
    ((attributes, script),) = re.findall("<script(.*?)>(.*?)</script>", text, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert attributes == "" and f"'sha256-{digest}'" in policy
    images = {image["src"].partition(",")[2]: image for image in page.all("img")}
    png = (run / "figures" / "matrix.png").read_bytes()
    image = images[base64.b64encode(png).decode()]
    assert (int(image["width"]), int(image["height"])) == struct.unpack(">II", png[16:24])
    assert (image["loading"], image["decoding"]) == ("lazy", "async")


def test_what_is_no_run_is_refused_before_anything_is_written(probe: Make, tmp_path: Path) -> None:
    with pytest.raises(ReportError, match="name the folder of a run"):
        write_report([], tmp_path / "out")
    damaged = probe("b")
    (damaged / "figures" / "matrix.png").write_bytes(b"\x89PNG")
    with pytest.raises(ReportError, match=r"matrix\.png cannot be read as PNG"):
        write_report([probe(), damaged], tmp_path / "out")
    assert not (tmp_path / "out").exists()


# -- the command ---------------------------------------------------------------------------------


def test_the_command(probe: Make, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = [str(probe("a")), str(probe("b, c [1]"))]
    page = report.report([*runs, f"--output={tmp_path / 'out'}"])
    text = capsys.readouterr().out
    assert str(page) in text and "linear_probe_1.md, linear_probe_2.md" in text
    with pytest.raises(SystemExit):
        main(["report"])
