"""What is on a page, against the files of the runs."""

import base64
import io
import json
import re
from collections.abc import Callable
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from lincorr_lightning.cli import main
from lincorr_lightning.errors import ReportError
from lincorr_lightning.results import report
from lincorr_lightning.results.report import write_report
from lincorr_lightning.results.results import Results
from lincorr_lightning.results.saved_run import SavedRun
from lincorr_lightning.results.table import Table

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
        if "style" not in self.open:
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
    assert "Run 1: some-lm" in page.text
    assert "Label-wise r of all pairs." in page.text


def test_headline_tables_come_before_figures_and_others_are_folded(
    probe: Make, tmp_path: Path
) -> None:
    text = write_report([probe()], tmp_path).read_text()
    run = text[text.index('id="run-1"') :]
    marks = [
        "Pairs and their r.</bdi></caption>",
        "<figure>",
        "<details>",
        "Highest weights.",
        "Run it again:",
        "All settings",
    ]
    places = [run.index(mark) for mark in marks]
    assert places == sorted(places)


def test_numbers_stand_beside_the_paper_s(probe: Make, finetune: Make, ablation: Make) -> None:
    folders = [
        probe("meta-llama/Meta-Llama-3-8B", r=0.8),
        probe("tiny-world"),
        finetune("meta-llama/Llama-3.2-3B", generalized=0.5),
        ablation("/copies/Llama-3.2-1B/"),
    ]
    (table,) = report.beside_paper([SavedRun.read(folder) for folder in folders])
    found = {tuple(row[1:4]): row[4:] for row in table.texts() if row[0] == "city->country"}
    for quantity, here, paper, *cells in (
        (
            "label-wise r",
            "Meta-Llama-3-8B",
            "llama-3-8b",
            "0.80",
            "0.78",
            "+0.02",
            "published notebook, 1,000 subjects",
        ),
        ("Hit@5 influencing", "Meta-Llama-3-8B", "llama-3-8b", "1.00", "0.78", "+0.22", "Table 2"),
        ("Hit@1 influenced", "tiny-world", "llama-3-8b", "0.50", "0.42", "", "Table 2"),
        (
            "generalized",
            "Llama-3.2-3B",
            "llama-3.2-3b",
            "50.00%",
            "53.70%",
            "−3.70 points",
            "Table 5",
        ),
        ("gradient r", "Llama-3.2-3B", "llama-3.2-3b", "0.84", "0.79", "+0.05", "Table 4"),
        (
            "maximum of W, Shanghai",
            "Llama-3.2-3B",
            "llama-3.2-3b",
            "0.51",
            "0.50",
            "+0.01",
            "Table 6",
        ),
        (
            "generalized, mapping reference",
            "Llama-3.2-1B",
            "llama-3",
            "75.00%",
            "97.66%",
            "−22.66 points",
            "Table 7",
        ),
    ):
        assert found[quantity, here, paper] == cells
    (alone,) = report.beside_paper([SavedRun.read(folders[1])])
    assert table.headline and not alone.headline
    assert {row[6] for row in alone.texts()} == {""}


def test_runs_are_side_by_side_by_size(probe: Make, page_of: Callable[..., Page]) -> None:
    runs = [
        probe("some/LM-13B", r=0.9, n_parameters=13_000_000_000, ridge=1.0),
        probe("me/LM-1B", r=0.5, n_parameters=1_240_000_000, ridge=2.0),
        probe("nobody/knows", r=0.3, n_parameters=None, ridge=3.0),
    ]
    page = page_of(*runs)
    groups, head, first, second = page.tables["Pairs and their r: by run"]
    assert groups == ["", "LM-1B", "LM-13B", "knows"]
    assert head == ["pair", *["r", "above control", "Hit@1"] * 3]
    assert first == [
        "city→country",
        "0.50",
        "−0.45",
        "0.50",
        "0.90",
        "−0.05",
        "0.50",
        "0.30",
        "−0.65",
        "0.50",
    ]
    assert second[:4] == ["city→color", "0.20", "−0.45", ""]
    # Comparing what was not measured alike would mislead.
    assert "The runs differ also in ridge (2.0 / 1.0 / 3.0)." in page.text
    (figure,) = [image for image in page.all("img") if image["alt"].startswith("Hit@N")]
    assert figure["alt"] == "Hit@N of W by LM (paper, Figure 4)."


def test_figures_are_as_wide_as_they_were_drawn(probe: Make, page_of: Callable[..., Page]) -> None:
    """In CSS pixels, of which an inch has 96."""
    images = page_of(probe("one")).all("img")
    for image in images:
        png = Image.open(io.BytesIO(base64.b64decode(image["src"].partition("base64,")[2])))
        assert int(image["width"]) == round(png.width / png.info["dpi"][0] * 96)
    assert images


def test_runs_of_one_lm_have_different_names(probe: Make, page_of: Callable[..., Page]) -> None:
    page = page_of(probe(ridge=1.0), probe(ridge=2.0))
    groups = page.tables["Pairs and their r: by run"][0]
    assert groups == ["", "tiny-world, version_0", "tiny-world, version_1"]
    # One LM has no curve over sizes.
    assert not [image for image in page.all("img") if image["alt"].startswith("Hit@N")]


def test_rows_are_joined_by_the_columns_that_identify_them(
    tmp_path: Path, page_of: Callable[..., Page]
) -> None:
    columns = ["relation", "mapping", "share", "comment"]
    for name, rows in (
        ("one", [["a", "x", 0.5, "one"], ["a", "y", 0.25, "two"]]),
        ("two", [["a", "y", 0.75, "three"], ["b", "x", 1.0, "four"]]),
    ):
        table = Table.of("t", rows, columns, "Shares.", "", True, formats={"share": ".0%"})
        Results("s", tables=[table], lm={"name_or_path": name}).write(tmp_path / name)
    page = page_of(tmp_path / "one", tmp_path / "two")
    assert page.tables["Shares: by run"] == [
        ["", "one", "two"],
        ["relation", "mapping", "share", "share"],
        ["a", "x", "50%", ""],
        ["a", "y", "25%", "75%"],
        ["b", "x", "", "100%"],
    ]


def test_any_study_is_shown(geometry: Make, probe: Make, page_of: Callable[..., Page]) -> None:
    page = page_of(geometry(), probe())
    assert page.tables["Spearman."] == [
        ["layer", "spearman", "p"],
        ["all", "0.00", "0.0123"],
        ["1", "", "1.0000"],
    ]
    numbers = page.tables["Numbers of results.json"]
    assert ["depth.a", "1.5"] in numbers and ["n_subjects", "40"] in numbers
    # Studies stand in the order in which their runs were named.
    assert page.text.index("Token geometry") < page.text.index("Linear probe")


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
    assert not re.search(r"url\(|@import|<script|<link|<iframe|<object", text)
    policy = next(m["content"] for m in page.all("meta") if "http-equiv" in m)
    assert policy.startswith("default-src 'none'")
    pictures = {image["src"].partition(",")[2] for image in page.all("img")}
    png = (run / "figures" / "matrix.png").read_bytes()
    assert base64.b64encode(png).decode() in pictures


def test_the_page_can_be_read_aloud(
    probe: Make, finetune: Make, page_of: Callable[..., Page]
) -> None:
    page = page_of(probe(), probe("b", ridge=1.0), finetune())
    assert page.all("html")[0]["lang"] == "en"
    assert all(len(image["alt"]) > 15 for image in page.all("img"))
    assert all(head["scope"] in ("col", "row", "colgroup") for head in page.all("th"))
    headings = [int(tag[1]) for tag, _ in page.tags if re.fullmatch(r"h[1-6]", tag)]
    assert headings[0] == 1 and headings.count(1) == 1
    assert all(below - above <= 1 for above, below in pairwise(headings))
    ids = [attributes["id"] for _, attributes in page.tags if "id" in attributes]
    assert len(ids) == len(set(ids))
    for link in page.all("a"):
        assert link["href"][1:] in ids


# -- refusals ------------------------------------------------------------------------------------


def refused(*runs: Path, match: str, output: Path) -> None:
    with pytest.raises(ReportError, match=match):
        write_report(runs, output)
    assert not output.exists()


def test_runs_that_do_not_belong_on_one_page(probe: Make, finetune: Make, tmp_path: Path) -> None:
    out = tmp_path / "out"
    refused(match="name the folder of a run", output=out)
    one, other = probe(fingerprint={"weights": "w1"}), probe(fingerprint={"weights": "w2"})
    match = f"{one} and {other} are of two LMs under one name, 'tiny-world': their weights"
    refused(one, other, match=match, output=out)
    refused(one, finetune(), match="two LMs under one name", output=out)
    half = probe(fingerprint={"weights": "w2", "dtype": "bfloat16"})
    # Of one run that is named twice, there is one.
    text = write_report([one, half, half / "results.json"], tmp_path / "both").read_text()
    assert "from the folders of 2 runs" in text
    path = other / "results.json"
    path.write_text(path.read_text().replace('"lincorr-lightning": "', '"lincorr-lightning": "0.'))
    refused(one, other, match=f"different versions of .*{other} ", output=out)
    (one / "figures" / "matrix.png").write_bytes(b"\x89PNG")
    refused(probe("b"), one, match=r"matrix\.png is no PNG", output=out)


# -- the command ---------------------------------------------------------------------------------


def test_the_command(probe: Make, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = [str(probe("a")), str(probe("b, c [1]"))]
    page = report.report([*runs, f"--output={tmp_path / 'out'}"])
    text = capsys.readouterr().out
    assert str(page) in text and "linear_probe.md, linear_probe.tex" in text
    assert "Pairs and their r: by run" in page.read_text()
    with pytest.raises(SystemExit):
        main(["report"])


@pytest.mark.slow
def test_a_real_run_from_the_command_line(small_lm: str, tmp_path: Path) -> None:
    cli = main(
        [
            "fit",
            "--config",
            "linear_probe.yaml",
            f"--model.lm.name_or_path={small_lm}",
            "--model.knowledge=[city,country,color]",
            "--data.n_subjects=300",
            "--trainer.enable_progress_bar=false",
            f"--trainer.default_root_dir={tmp_path}",
        ]
    )
    run = Path(cli.trainer.log_dir)
    main(["report", str(run), "--output", str(tmp_path / "out")])
    page = Page(tmp_path / "out" / "report.html")
    results = json.loads((run / "results.json").read_text())
    headline = [table for table in results["tables"] if table["headline"]]
    assert headline and all(table["caption"] in page.tables for table in headline)
    assert len(page.all("img")) == len(list((run / "figures").glob("*.png")))
    # The command on the page gives the same run again.
    command = re.search(r"lincorr (fit --config \S+)", page.text)
    assert command is not None
    again = main([*command[1].split(), f"--trainer.default_root_dir={tmp_path / 'again'}"])
    second = json.loads((Path(again.trainer.log_dir) / "results.json").read_text())
    assert second["pairs"] == results["pairs"]
