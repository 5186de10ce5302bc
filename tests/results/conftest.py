"""Folders of runs, written by `Results.write` as studies do."""

import shutil
import subprocess
from collections.abc import Callable, Iterable, Mapping, Sequence
from html.parser import HTMLParser
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml
from matplotlib.figure import Figure as MatplotlibFigure

from lincorr_lightning.results.results import Figure, Results
from lincorr_lightning.results.table import Table

Make = Callable[..., Path]


class Column(NamedTuple):
    key: str
    heading: str = ""
    format: str = ""


def make_table(
    name: str, columns: Iterable[Column | str], rows: Iterable[Any], *args: Any, **options: Any
) -> Table:
    full = [Column(one) if isinstance(one, str) else one for one in columns]
    headings = {one.key: one.heading for one in full if one.heading}
    formats = {one.key: one.format for one in full if one.format}
    keys = [one.key for one in full]
    return Table.of(name, rows, keys, *args, headings=headings, formats=formats, **options)


def draw(colour: str = "white") -> Callable[[], MatplotlibFigure]:
    return lambda: MatplotlibFigure((3, 2), dpi=60, facecolor=colour)


def lm_info(name: str, n_parameters: int | None = 1_000_000, **fingerprint: str) -> dict[str, Any]:
    known = {"tokenizer": "t", "config": "c", "dtype": "float32", "weights": f"w of {name}"}
    known |= fingerprint
    return {"name_or_path": name, "dtype": known["dtype"], "fingerprint": known,
            "n_parameters": n_parameters}  # fmt: skip


def probe_results(
    lm: Mapping[str, Any], r: float, hits: tuple[float, ...], settings: Mapping[str, Any]
) -> Results:
    precision = {
        way: dict(zip("135", rates, strict=True))
        for way, rates in (("influenced", hits[:3]), ("influencing", hits[3:]))
    }
    pairs = [
        {"source": "city", "target": "country", "label_mean": r, "precision": precision},
        {"source": "city", "target": "color", "label_mean": 0.2, "precision": None},
    ]
    rows = [["city->country", r, r - 0.95, hits[0]], ["city->color", 0.2, r - 0.95, None]]
    columns = ["pair", Column("r", format=".2f"), Column("excess", "above control", "+.2f"),
               Column("hit", "Hit@1", ".2f")]  # fmt: skip
    weights = [["Paris", "France", 0.1 * i, i == 0] for i in range(130)]
    return Results(
        "linear_probe",
        {"n_fit": 500, "n_test": 501, "pairs": pairs, "seconds": 76.4},
        {"val/label_mean": r},
        [
            make_table("pairs", columns, rows, caption="Pairs and their r.", headline=True),
            make_table(
                "influences", ["label", "token", Column("weight", "W", ".2f"), "in_reference"],
                weights, "Highest weights.", "Of labels with a reference.",
            ),
        ],
        [Figure("matrix", "Label-wise r of all pairs.", draw("grey"))],
        lm,
        {"ridge": 0.0, "lm": {"name_or_path": lm["name_or_path"]}, "data": {"seed": 3}, **settings},
    )  # fmt: skip


def save(results: Results, folder: Path, verb: str = "fit") -> Path:
    results.write(folder)
    config = yaml.safe_dump({"seed_everything": 7, "model": {"init_args": {"seed": 5}}})
    (folder / "config.yaml").write_text(f"# lincorr {verb} --config config.yaml\n{config}")
    return folder


@pytest.fixture
def probe(tmp_path: Path) -> Make:
    """Writes the folder of a linear probe."""
    numbers = count()

    def make(
        lm: str = "tiny-world",
        r: float = 0.9,
        hits: tuple[float, ...] = (0.5, 0.6, 0.7, 0.8, 0.9, 1.0),
        n_parameters: int | None = 1_360_000,
        fingerprint: Mapping[str, str] | None = None,
        **settings: Any,
    ) -> Path:
        info = lm_info(lm, n_parameters, **(fingerprint or {}))
        folder = tmp_path / "probes" / f"version_{next(numbers)}"
        return save(probe_results(info, r, hits, settings), folder)

    return make


@pytest.fixture
def finetune(tmp_path: Path) -> Make:
    """Writes the folder of a source fine-tune."""

    def make(lm: str = "tiny-world", generalized: float = 0.86) -> Path:
        columns = ["subject", "source_answer"]
        columns += [Column(f"weight_{name}", "", ".2f") for name in ("reference", "answer", "max")]
        rows = [("Emma", "Shanghai", 0.48, 0.47, 0.51), ("Ada", "Oslo", 0.69, None, None)]
        values = {"relation": "city->country", "generalized": generalized, "random": 0.04,
                  "gradient_correlation": 0.845, "logit_correlation": None}  # fmt: skip
        tables = [make_table("cases", columns, rows, "Cases.")]
        results = Results("source_finetune", values, tables=tables, lm=lm_info(lm))
        return save(results, tmp_path / "finetune")

    return make


@pytest.fixture
def ablation(tmp_path: Path) -> Make:
    """Writes the folder of a vocabulary ablation, of which a test reads two numbers."""

    def make(lm: str = "tiny-world") -> Path:
        shares = {"permuted": 0.25, "reference": 0.75}
        mappings = [{"mapping": name, "generalized": share} for name, share in shares.items()]
        values = {"relation": "city->country", "mappings": mappings}
        results = Results("vocabulary_ablation", values, lm=lm_info(lm, None))
        return save(results, tmp_path / "ablation")

    return make


@pytest.fixture
def geometry(tmp_path: Path) -> Make:
    """Writes the folder of a study of which the report knows nothing."""

    def make(lm: str = "tiny-world") -> Path:
        table = make_table(
            "closeness", ["layer", Column("spearman", format=".2f"), Column("p", format=".4f")],
            [["all", -0.001, 0.0123], ["1", None, 1.0]], "Closeness.", headline=True,
        )  # fmt: skip
        results = Results(
            "knowledge_geometry", {"n_subjects": 40, "depth": {"a": 1.5, "b": [1, 2]}},
            tables=[table], figures=[Figure("closeness", "Closeness by layer.", draw())],
            lm=lm_info(lm),
        )  # fmt: skip
        return save(results, tmp_path / "geometry", "test")

    return make


# -- pages -------------------------------------------------------------------------------------

BROWSERS = (
    "chromium", "chromium-browser", "chromium-headless-shell", "google-chrome",
    "google-chrome-stable", "chrome", "microsoft-edge",
)  # fmt: skip
VOID = {"meta", "img", "br", "wbr", "link", "hr", "input"}


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
            self.tables.setdefault(self._caption, self._rows)

    def handle_data(self, data: str) -> None:
        if "style" not in self.open:
            self.text += data
        if self._cell is not None:
            self._cell.append(data)

    def all(self, tag: str) -> list[dict[str, Any]]:
        return [attributes for name, attributes in self.tags if name == tag]


@pytest.fixture
def read_page() -> Callable[[Path], Page]:
    """Reads a page."""
    return lambda path: Page(path.read_text(encoding="utf-8"))


@pytest.fixture(scope="session")
def browse(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., str]:
    """Runs a headless Chromium with some options; returns its output."""
    program = next(filter(None, map(shutil.which, BROWSERS)), None)
    if program is None:
        pytest.skip(f"no browser on this machine: install one of {', '.join(BROWSERS[:4])}")
    profile = tmp_path_factory.mktemp("profile")

    def run(*options: str) -> str:
        fixed: Sequence[str] = [
            program, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
            "--no-first-run", f"--user-data-dir={profile}", "--virtual-time-budget=10000",
        ]  # fmt: skip
        done = subprocess.run(
            [*fixed, *options], capture_output=True, text=True, timeout=120, check=True
        )
        return done.stdout

    return run
