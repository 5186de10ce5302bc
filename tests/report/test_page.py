"""What stands on a page, against what the runs' files say."""

import base64
import json
import re
from collections.abc import Callable
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from lincorr_lightning.cli import main
from lincorr_lightning.results.report import write_report
from lincorr_lightning.results.report.command import gather

VOID = {"meta", "img", "br", "wbr", "link", "hr", "input"}
Make = Callable[..., Path]


class Page(HTMLParser):
    """A page's tables, figures and texts; fails on tags that are not closed in their order."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, Any]]] = []
        self.tables: dict[str, list[list[str]]] = {}
        self.text = ""
        self._caption: str | None = None
        self._rows: list[list[str]] = []
        self._cell: list[str] | None = None
        self.feed(html)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)
        if tag == "table":
            self._rows = []
        elif tag == "tr":
            self._rows.append([])
        elif tag in ("td", "th", "caption"):
            self._cell = []

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag
        if tag in ("td", "th", "caption"):
            text = "".join(self._cell or ())
            self._cell = None
            if tag == "caption":
                self._caption = text
            else:
                self._rows[-1].append(text)
        elif tag == "table":
            assert self._caption is not None
            self.tables[self._caption] = self._rows

    def handle_data(self, data: str) -> None:
        if "style" not in self.open:
            self.text += data
        if self._cell is not None:
            self._cell.append(data)

    def all(self, tag: str) -> list[dict[str, Any]]:
        return [attributes for name, attributes in self.tags if name == tag]


def page_of(*runs: Path, output: Path) -> Page:
    return Page(write_report(runs, output).read_text(encoding="utf-8"))


def test_a_probe_is_told_as_its_results_are(probe: Make, tmp_path: Path) -> None:
    run = probe(r=0.876)
    page = page_of(run, output=tmp_path / "out")
    head, first, second = page.tables["Pairs in tiny-world"]
    assert dict(zip(head, first, strict=True)) == {
        "pair": "city→country", "r": "0.88", "std": "0.03", "permuted": "0.00", "control": "0.40",
        "r above control": "0.48", "Hit@1 influenced": "0.50", "Hit@3 influenced": "0.60",
        "Hit@5 influenced": "0.70", "Hit@1 influencing": "0.80", "Hit@3 influencing": "0.90",
        "Hit@5 influencing": "1.00",
    }  # fmt: skip
    # No precision is an empty cell; below the control is a minus.
    assert second[0] == "city→color" and second[5:] == ["−0.20", *[""] * 6]
    assert ["city→country", "10", "0.88", "0.75", "0.50"] in page.tables["Ridge path in tiny-world"]
    moved = page.tables["Highest weights of city→country: targets that a source moves"]
    assert moved[1] == ["Paris", "France 0.83 ✓, Italy 0.11"]
    labels = page.tables["Labels whose logits follow best and worst, with their r"]
    assert labels[1][1] == "land5 0.95, land4 0.94, land3 0.93"
    command = f"lincorr fit --config {run}/config.yaml"
    for told in ("fitted on 500, scored on 501", "seed_everything 7", "torch 2.13.0", "float32",
                 "1.36M", "One day, {} saw a", command):  # fmt: skip
        assert told in page.text, told
    # The paper has none for this LM, and the page says so.
    assert "Beside the paper" not in page.tables
    other = page.tables["What the paper has for other LMs"]
    assert ["city→country", "Hit@1 influenced", "llama-3-8b", "0.42", "table 2"] in other


def test_the_papers_numbers_stand_beside_its_lms(
    probe: Make, finetune: Make, ablation: Make, tmp_path: Path
) -> None:
    runs = (
        probe("meta-llama/Meta-Llama-3-8B", r=0.8),
        finetune("meta-llama/Llama-3.2-3B", generalized=0.5),
        ablation("/copies/Llama-3.2-1B/"),
    )
    write_report(runs, tmp_path)
    text = (tmp_path / "report.html").read_text()
    assert Page(text)
    # Tables of one caption follow one another in the studies' order.
    tables = [Page(part).tables for part in _bodies(text)]
    rows = [row for table in tables for row in table.get("Beside the paper", ())[1:]]
    by_name = {(row[0], row[1]): row[2:] for row in rows}
    lm = "meta-llama/Meta-Llama-3-8B"
    notebook = "published notebook, 1,000 X's"
    assert by_name["city→country", "label-wise r"] == ["0.80", "0.78", "+0.02", notebook, lm]
    hit = by_name["city→country", "Hit@5 influencing"]
    assert hit == ["1.00", "0.78", "+0.22", "table 2", lm]
    small = "meta-llama/Llama-3.2-3B"
    told = by_name["city→country", "generalized"]
    assert told == ["50.00%", "53.70%", "−3.7 points", "table 5", small]
    assert by_name["city→country", "gradient r"] == ["0.84", "0.79", "+0.05", "table 4", small]
    case = by_name["city→country", "maximum of W, Shanghai"]
    assert case == ["0.51", "0.50", "+0.01", "table 6", small]
    mapping = by_name["city→country", "generalized, mapping reference"]
    assert mapping == ["75.00%", "97.66%", "−22.7 points", "table 7", "/copies/Llama-3.2-1B/"]


def _bodies(text: str) -> list[str]:
    """The page cut at its studies."""
    parts = text.split('<section id="study-')
    return [f'<section id="study-{part}'.split("</main>")[0] for part in parts[1:]]


def test_edits_and_ablations_are_told_as_their_results_are(
    finetune: Make, ablation: Make, tmp_path: Path
) -> None:
    page = page_of(finetune(), ablation(), output=tmp_path)
    head, row = page.tables["Edits and what became of the target"]
    assert dict(zip(head, row, strict=True)) == {
        "relation": "city→country", "LM": "tiny-world", "edits": "150", "learned": "100.0%",
        "generalized": "86.0%", "random": "4.0%", "hallucinated": "12.0%", "unchanged": "2.0%",
        "color unchanged": "93.0%", "gradient r": "0.84", "logit r": "0.56",
    }  # fmt: skip
    cases = page.tables["Cases of city→country"]
    assert cases[1][:6] == ["Ada", "Oslo", "Norway", "UK", "Canada", "hallucinated"]
    assert cases[1][6:] == ["0.69", "0.00", "0.69", "low prior"]
    assert ["virtual_step", "31.0%", "0.85"] in page.tables["How well the forecasts were"]
    assert "p = 0.086" in page.text
    _, first, second = page.tables["Generalized from the vocabulary alone"]
    assert first == ["city→country", "tiny-world", "reference", "2", "100.0%", "75.0%", "3.0%",
                     "25.0%", "+50.0", "50.0%", "4.0%", "12.5%"]  # fmt: skip
    assert (second[6], second[8]) == ("", "−12.5")
    assert "2,349 × 256" in page.text


def test_the_other_studies_and_unknown_ones(small_runs: list[Path], tmp_path: Path) -> None:
    page = page_of(*small_runs, output=tmp_path)
    assert page.tables["What is foreseen of the edits"][1][2:] == [
        "map_0",
        "15.0%",
        "5.0%",
        "80.0%",
    ]
    assert page.tables["Recall by knowledge"][2] == ["pet", "14.7%"]
    row = ["city→country", "0.90", "0.80", "−0.10", "0.85", "94.1%"]
    assert page.tables["Maps of base on tuned"][1] == row
    plain = page.tables["Results of token_geometry in tiny-world"]
    assert ["depth.a", "1.5"] in plain and ["depth.b", "1, 2"] in plain
    assert ["rows[0].x", "1"] in plain and ["rows[1].x", ""] in plain
    # Some of them do not tell their version, which must not go unsaid.
    assert "was not recorded" in page.text


def test_lms_stand_side_by_side_by_size(probe: Make, tmp_path: Path) -> None:
    sizes = {"some/LM-13B": 0.9, "meta-llama/Llama-3.2-1B": 0.5, "nobody/knows": 0.3}
    hits = {"some/LM-13B": 0.9, "meta-llama/Llama-3.2-1B": 0.1, "nobody/knows": 0.4}
    runs = [
        probe(lm, r=r, hits=(hits[lm],) * 6, weights=lm, ridge=r, control="x")
        for lm, r in sizes.items()
    ]
    page = page_of(*runs, output=tmp_path)
    r = page.tables["Label-wise r, by LM"]
    assert r[0] == ["pair", "Llama-3.2-1B (1.24B)", "LM-13B (13B)", "knows"]
    assert r[1] == ["city→country", "0.50", "0.90", "0.30"]
    precision = page.tables["Precision of W, by LM"]
    assert precision[1] == ["city→country", "influenced", "Hit@1", "0.10", "0.90", "0.40"]
    assert "about 13B" in page.text
    # The harm of comparing what was not measured alike.
    assert "The runs differ also in ridge (0.5 / 0.9 / 0.3)" in page.text
    assert any("Lines of Hit@N over 3 LMs" in image["alt"] for image in page.all("img"))


def test_runs_without_a_common_pair_are_not_compared(probe: Make, tmp_path: Path) -> None:
    one = probe("a")
    pair = {**json.loads((one / "results.json").read_text())["pairs"][0], "source": "gem_color"}
    page = page_of(one, probe("b", pairs=[pair]), output=tmp_path)
    assert "no pair in common" in page.text


def test_the_page_needs_nothing_but_itself(
    probe: Make, finetune: Make, small_runs: list[Path], tmp_path: Path
) -> None:
    run = probe()
    page = page_of(run, finetune(), *small_runs, output=tmp_path)
    text = (tmp_path / "report.html").read_text()
    for _, attributes in page.tags:
        for name in "src", "href", "srcset", "action", "data", "poster":
            value = attributes.get(name)
            assert value is None or value.startswith(("#", "data:image/png;base64,")), value
    assert not re.search(r"url\(|@import|<script|<link|<iframe|<object", text)
    policy = next(m["content"] for m in page.all("meta") if "http-equiv" in m)
    assert policy.startswith("default-src 'none'")
    # The pictures are the run's own, whole.
    pictures = {image["src"].partition(",")[2] for image in page.all("img")}
    own = (run / "figures" / "correlation_matrix.png").read_bytes()
    assert base64.b64encode(own).decode() in pictures


def test_the_page_can_be_read_aloud(probe: Make, finetune: Make, tmp_path: Path) -> None:
    page = page_of(probe(), finetune(), output=tmp_path)
    assert page.all("html")[0]["lang"] == "en"
    assert all(len(image["alt"]) > 20 for image in page.all("img"))
    assert all(head["scope"] in ("col", "row") for head in page.all("th"))
    headings = [int(tag[1]) for tag, _ in page.tags if re.fullmatch(r"h[1-6]", tag)]
    assert headings[0] == 1 and headings.count(1) == 1
    assert all(below - above <= 1 for above, below in pairwise(headings))
    ids = [attributes["id"] for _, attributes in page.tags if "id" in attributes]
    assert len(ids) == len(set(ids))
    for link in page.all("a"):
        assert link["href"][1:] in ids


def test_a_page_is_replaced_whole(probe: Make, tmp_path: Path) -> None:
    one = write_report([probe(r=0.9)], tmp_path / "out").read_bytes()
    two = write_report([probe(r=0.1)], tmp_path / "out").read_bytes()
    assert one != two
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert names == {"report.html", "linear_probe.md", "linear_probe.tex"}


def test_a_real_run_from_the_command_line(
    small_lm: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cli = main(
        [
            "fit", "--config", "linear_probe.yaml", f"--model.lm.name_or_path={small_lm}",
            "--model.knowledge=[city,country,color]", "--data.n_subjects=300",
            "--trainer.enable_progress_bar=false", f"--trainer.default_root_dir={tmp_path}",
        ]
    )  # fmt: skip
    run = Path(cli.trainer.log_dir)
    capsys.readouterr()
    main(["report", str(run), "--output", str(tmp_path / "out")])
    told = capsys.readouterr().out
    assert str(tmp_path / "out" / "report.html") in told and "linear_probe.tex" in told
    page = Page((tmp_path / "out" / "report.html").read_text())
    results = json.loads((run / "results.json").read_text())
    (rows,) = (rows for title, rows in page.tables.items() if title.startswith("Pairs in"))
    assert len(rows) == 1 + len(results["pairs"])
    by_pair = {row[0]: row for row in rows[1:]}
    for pair in results["pairs"]:
        row = by_pair[f"{pair['source']}→{pair['target']}"]
        assert float(row[1].replace("−", "-")) == pytest.approx(pair["label_mean"], abs=0.0051)
    assert len(page.all("img")) == len(list((run / "figures").glob("*.png")))
    # The command on the page gives the same run again.
    command = re.search(r"lincorr (fit --config \S+)", page.text)
    assert command is not None
    again = main([*command[1].split(), f"--trainer.default_root_dir={tmp_path / 'again'}"])
    second = json.loads((Path(again.trainer.log_dir) / "results.json").read_text())
    assert second["pairs"] == results["pairs"]


def test_many_runs_from_the_command_line(probe: Make, tmp_path: Path) -> None:
    runs = [str(probe("a")), str(probe("b, c [1]", weights="other"))]
    main(["report", *gather([*runs, f"--output={tmp_path / 'out'}"])])
    assert "Label-wise r, by LM" in Page((tmp_path / "out" / "report.html").read_text()).tables
