"""`lincorr reproduce` on a toy LM: plan, runs, resuming, and the page."""

from __future__ import annotations

import csv
import json
import math
import re
import shutil
from collections.abc import Callable, Sequence
from itertools import permutations
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from scipy import stats

from lincorr_lightning.cli import main
from lincorr_lightning.errors import ConfigError, LanguageModelError, ReportError
from lincorr_lightning.knowledge import Catalogue
from lincorr_lightning.linear_map import LinearMap
from lincorr_lightning.lm import loading
from lincorr_lightning.reproduce import command
from lincorr_lightning.reproduce.agreement import (
    agreement_tables,
    agreements,
    rank_correlation,
    table_numbers,
)
from lincorr_lightning.reproduce.plan import LMRuns, PlannedRun, all_items, select_items
from lincorr_lightning.results.saved_run import SavedRun
from tests.toys import NAMES, WORDS

pytestmark = pytest.mark.slow

CONFIGS = Path(__file__).parents[2] / "configs"
SIZE = {
    "probe": {
        "config": "correlation_matrix.yaml",
        "options": {"data.n_subjects": 80, "model.ridge": 0},
    },
    "edits": {
        "config": "source_finetune_lora.yaml",
        "options": {"data.n_edits": 5, "model.steps_per_edit": 2, "model.edits_per_step": 4},
    },
    "ablation": {
        "config": "vocabulary_ablation.yaml",
        "options": {
            "model.compose.epochs": 1,
            "model.learn.epochs": 1,
            "data.n_paired": 24,
            "data.n_new": 4,
            "data.max_source_labels": 3,
        },
    },
    "after": {"config": "resilience.yaml", "options": {"data.n_subjects": 80}},
}


def write_config(folder: Path, **changed: object) -> Path:
    """Settings of a size that a toy LM can serve."""
    content = yaml.safe_load((CONFIGS / "reproduce.yaml").read_text("utf-8"))
    path = folder / "settings.yaml"
    path.write_text(yaml.safe_dump(content | {"size": "toy", "sizes": {"toy": SIZE}} | changed))
    return path


@pytest.fixture(scope="module")
def reproduce(tmp_path_factory: pytest.TempPathFactory, small_lm: str) -> Callable[..., Path]:
    """Run the command on the toy LM."""
    folder = tmp_path_factory.mktemp("reproduce")

    def run(*args: str, lms: Sequence[str] = (small_lm,), output: str = "found", **changed) -> Path:
        own = [f"--lm={lm}" for lm in lms]
        paths = f"--config={write_config(folder, **changed)}", f"--output={folder / output}"
        main(["reproduce", *paths, *own, *args])
        return folder / output

    return run


@pytest.fixture(scope="module")
def found(reproduce: Callable[..., Path], small_lm: str) -> Path:
    """Return a reproduction of everything, with the LM itself as its tuned version."""
    return reproduce("--after", small_lm)


def numbers(folder: Path, run: str) -> dict:
    (path,) = folder.glob(f"runs/*/{run}/version_0/results.json")
    return json.loads(path.read_text("utf-8"))


def rows(folder: Path, name: str) -> list[dict[str, str]]:
    """Rows of the first table of a Markdown file, by heading without the toy LM's name."""
    (lm,) = (path.name for path in folder.glob("runs/*"))
    text = (folder / f"{name}.md").read_text("utf-8").replace("\\_", "_")
    head, _, *body = (
        [cell.strip().removeprefix(f"{lm} ") for cell in line.strip("|").split(" | ")]
        for line in text.split("\n\n")[2].splitlines()
    )
    return [dict(zip(head, row, strict=True)) for row in body]


def city_country(folder: Path, name: str) -> dict[str, str]:
    return next(row for row in rows(folder, name) if row["relation"] == "city→country")


def linear_map(folder: Path) -> LinearMap:
    (path,) = folder.glob("runs/*/probe_attribute/version_0/linear_map")
    return LinearMap.from_pretrained(path)


def test_every_table_and_figure_with_numbers_is_there():
    places = {place for item in all_items() for place in item.places}
    figures = {f"Figure {n}" for n in (*range(3, 6), *range(7, 25))}
    tables = {f"Table {n}" for n in (*range(2, 10), *range(14, 19))}
    assert places == figures | tables
    chosen = select_items(["Table 5", "figure3"])
    assert [item.places[0] for item in chosen] == ["Figure 3", "Table 5"]


def test_numbers_are_those_of_the_runs(found):
    row, edits = city_country(found, "table5"), numbers(found, "edits_city-country")
    assert row["paper, llama-3.2-3b generalized"] == "53.70%"
    share, difference = row["generalized"].rstrip(")").split(" (")
    assert share == f"{edits['generalized']:.2%}"
    expected = 100 * (edits["generalized"] - 0.537)
    assert float(difference.replace("−", "-")) == pytest.approx(expected, abs=0.006)
    assert row["edits"] == "5"
    probe = numbers(found, "probe_attribute")
    (pair,) = [p for p in probe["pairs"] if (p["source"], p["target"]) == ("city", "country")]
    value = city_country(found, "table2")["Hit@5 influenced"]
    assert value.split(" (")[0] == f"{pair['precision']['influenced']['5']:.2f}"


def test_what_the_vocabulary_lacks_is_said(found):
    text = (found / "table5.md").read_text("utf-8")
    assert (
        re.search(r"\| ceo→company \| 4.34% .*\|  \|  \|", text) and "the end of the page" in text
    )
    reasons = {row["run or knowledge"]: row for row in rows(found, "left_out")}
    assert "Table 5" in reasons["ceo"]["of"] and re.match("no|only|the", reasons["ceo"]["why"])
    assert "family math have labels" in reasons["probe_math"]["why"]


def test_influences_stand_beside_the_papers(found):
    weights = linear_map(found)
    w, cities = weights.weight("city->country").numpy(), weights.labels("city")
    by_country = dict(zip((x.strip() for x in weights.labels("country")), w, strict=True))
    body = [list(row.values()) for row in rows(found, "table15")]
    assert {"China", "Spain"} <= {row[0] for row in body}
    for country, paper, shown, shared in body:
        row = by_country[country]
        expected = [city.strip() for _, city in sorted(zip(-row, cities, strict=True))[:10]]
        assert shown.split(", ") == expected
        assert len(paper.split(", ")) == 10
        assert int(shared) == len(set(paper.split(", ")) & set(expected))


def test_tables_have_their_nulls(found):
    row, maps = city_country(found, "table2"), linear_map(found)
    # Each city has one country.
    expected = [min(n / len(maps.labels("country")), 1) for n in (1, 3, 5)]
    assert row["random influenced @1 @3 @5"].split() == [f"{x:.2f}" for x in expected]
    # A country has several cities: the mean probability that one of them is among N of all.
    reference = Catalogue.load().relation("city->country").reference
    cities = [x.strip() for x in maps.labels("city")]
    right = [sum(c.strip() in reference[x] for x in cities) for c in maps.labels("country")]
    n = len(cities)
    expected = [
        sum(1 - math.comb(n - k, drawn) / math.comb(n, drawn) for k in right if k)
        / sum(k > 0 for k in right)
        for drawn in (1, 3, 5)
    ]
    assert row["random influencing @1 @3 @5"].split() == [f"{x:.2f}" for x in expected]
    gradients = numbers(found, "edits_city-country")["gradients"]["city->country"]
    r, error = (gradients[f"gradient_correlation{x}"] for x in ("", "_error"))
    shown = city_country(found, "table4")["gradient r, 95 %"].replace("−", "-").split(" to ")
    expected = [r - 1.96 * error, min(r + 1.96 * error, 1)]
    assert [float(x) for x in shown] == pytest.approx(expected, abs=0.006)


def test_a_finished_run_is_not_repeated_and_a_missing_or_damaged_one_is(
    found, reproduce, small_lm, capsys
):
    before = {path: path.stat().st_mtime_ns for path in found.glob("runs/**/results.json")}
    (unfinished,) = found.glob("runs/*/after_attribute/version_0/results.json")
    unfinished.unlink()
    (damaged,) = found.glob("runs/*/edits_city-country/version_0/results.json")
    damaged.write_text("{")
    reproduce("--after", small_lm)
    state = json.loads((found / command.STATE).read_text("utf-8"))
    # States of prompts are kept, and a folder may go on with or without them.
    assert list((found / "states").rglob("*.safetensors"))
    assert not [key for run in state["runs"].values() for key in run["inputs"] if "state" in key]
    failed = {name.partition("/")[2] for name, one in state["runs"].items() if "error" in one}
    done = re.findall(r"^\[\d+/\d+\] \S+: (\S+)$", capsys.readouterr().out, re.MULTILINE)
    assert set(done) == {"after_attribute", "edits_city->country", *failed}
    after = {path: path.stat().st_mtime_ns for path in found.glob("runs/**/results.json")}
    assert before.keys() == after.keys()
    assert {path for path in before if before[path] != after[path]} == {unfinished, damaged}


def test_other_settings_are_refused(found, reproduce, make_lm, tmp_path):
    edits = SIZE["edits"]["options"] | {"data.n_edits": 6}
    sizes = {"toy": SIZE | {"edits": SIZE["edits"] | {"options": edits}}}
    with pytest.raises(ConfigError, match=r"data\.n_edits was 5 and is 6"):
        reproduce(sizes=sizes)
    other = make_lm(tmp_path / Path(next((found / "runs").iterdir())).name, seed=7)
    with pytest.raises(ConfigError, match=r"weights of the LM was"):
        reproduce(lms=[str(other)])
    with pytest.raises(ConfigError, match=r"after_attribute .*weights of the LM was"):
        reproduce("--after", str(other))


def test_a_tuned_lm_with_other_labels_is_refused_before_anything_runs(reproduce, make_lm, tmp_path):
    tuned = make_lm(tmp_path / "tuned", words=(*WORDS, *NAMES, "Shanghai"))
    with pytest.raises(ConfigError, match=r"other labels of \w+ than .*--after"):
        reproduce("--only=figure10", "--after", str(tuned), output="other")


def test_files_that_settings_name_are_part_of_a_run(tmp_path, monkeypatch):
    """Those of configs and options, at any place; not what the run writes, nor its LM."""
    monkeypatch.chdir(tmp_path)
    home, changed_since = tmp_path / "found/runs/lm", []
    read = [
        "a b, c.txt",
        "edits.jsonl",
        "texts/deep/one.txt",
        "more/edits.jsonl",
        "given.yaml",
        "map/config.json",
    ]
    written = [
        "lm/config.json",
        "checkpoints/a.ckpt",
        "found/runs/lm/probe/version_0/map.json",
        "runs/old.txt",
        "here.txt",
    ]
    for name in (*read, *written):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("before")
    made = [
        {"class_path": "Generalization", "init_args": {"edits": "edits.jsonl"}},
        {"class_path": "GradientCorrelation", "init_args": {"linear_map": "map"}},
        {"class_path": "ModelCheckpoint", "init_args": {"dirpath": "checkpoints"}},
    ]
    config = {
        "trainer": {"callbacks": made, "default_root_dir": "runs"},
        "model": {"init_args": {"lm": {"name_or_path": "lm"}, "prefix": "", "place": "."}},
        "data": {"init_args": {"subjects_file": "a b, c.txt", "sample_by": "line"}},
    }
    (tmp_path / "own.yaml").write_text(yaml.safe_dump(config))
    options = {
        "data.texts": ["texts"],
        "data.edits_file": "more/edits.jsonl",
        "model.a": ": \0 {",
        "trainer.default_root_dir": str(home),
        "model.linear_map": f"{home}/probe/version_0",
        "data.knowledge_files": ["gone.yaml", "given.yaml"],
    }
    run = PlannedRun("edits", home / "edits", "edits", "fit", ("own.yaml",), options)
    plan = LMRuns("lm", "lm")
    for name in (*read, *written):
        before = command.run_inputs(run, plan)
        with (tmp_path / name).open("a") as file:
            file.write("\n# after")
        after = command.run_inputs(run, plan)
        changed_since.append(sum(after[key] != before.get(key) for key in after))
    assert changed_since == [1] * len(read) + [0] * len(written)


def test_two_lms_share_a_page(reproduce, small_lm, make_lm, tmp_path):
    lms = [small_lm, str(make_lm(tmp_path / "other", seed=3))]
    folder = reproduce("--only=figure4,figure10", lms=lms, output="two")
    page = (folder / "report.html").read_text("utf-8")
    assert "Hit@N of W by LM (paper, Figure 4)" in page
    assert "Figure 10, other:" in page.replace("/<wbr>", "/")


@pytest.mark.parametrize(
    ("args", "changed", "message"),
    [
        (["--only=tabel5"], {}, r"no table or figure 'tabel5'.* table5"),
        (["--option=model.lm.dtyp=bfloat16"], {}, r"unexpected .* 'dtyp' of model\.lm"),
        (["--option=model.ridge"], {}, r"write KEY=VALUE"),
        (["--size=huge"], {}, r"size is 'huge'; .* has toy"),
        (["--after=a", "--after=b"], {}, r"2 tuned LMs for 1 LMs"),
        ([], {"tables": []}, r"settings.yaml: there is no option tables"),
        ([], {"sizes": {"toy": {"probe": SIZE["probe"]}}}, r"lacks ablation, after, edits"),
    ],
)
def test_bad_input(reproduce, args, changed, message):
    with pytest.raises(ConfigError, match=message):
        reproduce(*args, output="bad", **changed)


def test_bad_lms(reproduce, tmp_path, small_lm):
    with pytest.raises(LanguageModelError, match="nowhere"):
        reproduce(lms=["/nowhere"], output="bad")
    copy = shutil.copytree(small_lm, tmp_path / "copy" / Path(small_lm).name)
    with pytest.raises(ConfigError, match="two of the LMs have the name"):
        reproduce(lms=[small_lm, str(copy)], output="bad")


def test_agreement(found):
    """Rows, mean difference and rows above their null, from table 2's own cells."""
    page = (found / "report.html").read_text("utf-8")
    overview = page.split("Agreement with the paper: numbers")[-1].split("</table>")[0]
    body = [row for row in rows(found, "table2") if row["Hit@5 influenced"]]
    here = [float(row["Hit@5 influenced"].split(" (")[0]) for row in body]
    paper = [float(row["paper, llama-3-8b Hit@5 influenced"]) for row in body]
    random = [float(row["random influenced @1 @3 @5"].split()[2]) for row in body]
    cells = re.findall(r"<t[dh][^>]*>(?:<bdi>)?(.*?)(?:</bdi>)?</t[dh]>", overview)
    at = cells.index("Hit@5 influenced")
    assert cells[at + 3] == str(len(body))
    mean = (sum(here) - sum(paper)) / len(body)
    assert float(cells[at + 6].replace("−", "-")) == pytest.approx(mean, abs=0.011)
    above = sum(r > null for r, null in zip(here, random, strict=True))
    assert cells[at + 7] == f"{above} of {len(body)}"


def _probe_of_table_8(r) -> SavedRun:
    pairs = [
        {"source": s, "target": t, "label_mean": r(n), "control_label_mean": 0.4 + 0.2 * (i < 3)}
        for i, n in enumerate(table_numbers("Table 8"))
        for s, t in [n.relation.split("->")]
    ]
    return SavedRun("linear_probe", {"pairs": pairs})


def test_a_reproduction_on_the_tiny_world_says_what_it_cannot_show():
    finished = {"probe_simile": _probe_of_table_8(lambda n: 0.5)}
    for lm, is_synthetic in (("tiny-world", True), ("some-lm", False)):
        (table,) = agreement_tables(["Table 8"], [LMRuns("x", lm, finished=finished)], "s")
        assert ("cannot have the paper's order" in table.note) is is_synthetic
        assert ("that 7 of 10 numbers" in table.note) is is_synthetic


def test_agreement_over_relations():
    """ρ by scipy from numbers whose order is known."""
    numbers = table_numbers("Table 8")
    finished = {"probe_simile": _probe_of_table_8(lambda n: 1 - n.value)}
    (row,) = agreements(numbers, [LMRuns("some-lm", "some-lm", finished=finished)])
    assert (row.rows, row.rho, row.p) == (10, pytest.approx(-1), pytest.approx(1, abs=1e-3))
    shown = float(row.difference.replace("−", "-"))
    assert shown == pytest.approx(sum(1 - 2 * n.value for n in numbers) / 10, abs=0.006)


def test_the_interval_is_wilsons(found):
    p, n, z = numbers(found, "edits_city-country")["generalized"], 5, 1.96
    centre, half = p + z**2 / (2 * n), z * (p * (1 - p) / n + z**2 / (4 * n**2)) ** 0.5
    low, high = ((centre + sign * half) / (1 + z**2 / n) for sign in (-1, 1))
    shown = city_country(found, "table5")["generalized, 95 %"]
    assert shown == f"{max(low, 0):.0%} to {high:.0%}"


def test_a_page_of_nothing_is_an_error(reproduce, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)  # where there is a GPU, too
    with pytest.raises(ReportError, match="all runs failed"):
        reproduce("--only=figure10", "--overlays=trainer/gpu.yaml", output="gpu")


def test_cases_are_those_of_the_edits(found):
    (path,) = found.glob("runs/*/edits_city-country/version_0/tables/cases.csv")
    with path.open(newline="") as file:
        cases = {row["source_answer"]: row for row in csv.DictReader(file)}
    text = (found / "table6.md").read_text("utf-8").split("**Cases of")[1].split("\n\n")[1]
    _, _, *body = [[c.strip() for c in line.strip("|").split(" | ")] for line in text.splitlines()]
    wanted = {c for c, row in cases.items() if row["outcome"] in ("generalized", "hallucinated")}
    assert {row[0] for row in body} == wanted
    for city, _, _, outcome, _, _, weight in body:
        assert outcome == cases[city]["outcome"]
        expected = float(cases[city]["weight_max"])
        assert float(weight.replace("−", "-")) == pytest.approx(expected, abs=0.006)


def test_the_papers_cities_are_edited_and_an_error_of_another_run_stands_on_the_page(
    reproduce, make_lm, tmp_path, monkeypatch
):
    """Table 6 has the weights of the paper's cities, those of Shanghai for the map's China.

    The LM is read once for the first runs, and once more after the run that fails.
    """
    reads = []
    read = loading.read_model
    monkeypatch.setattr(loading, "read_model", lambda *a: reads.append(1) or read(*a))
    words = dict.fromkeys((*WORDS, *NAMES, ",", "Shanghai", "Denmark", "Copenhagen", "China"))
    lm = make_lm(tmp_path / "travelled", words=tuple(words))
    edits = SIZE["edits"] | {"options": {**SIZE["edits"]["options"], "data.n_edits": 100_000}}
    sizes = {"toy": SIZE | {"edits": edits}}
    folder = reproduce("--only=table6", lms=[str(lm)], output="cities", sizes=sizes)
    assert len(reads) == 2
    (path,) = folder.glob("runs/*/edits_printed/version_0/tables/cases.csv")
    with path.open(newline="", encoding="utf-8") as file:
        edited = {row["source_answer"] for row in csv.DictReader(file)}
    assert edited == {"Shanghai", "Copenhagen"}
    weights = linear_map(folder)
    w = weights.weight("city->country").numpy()
    names = [[x.strip() for x in weights.labels(end)] for end in ("city", "country")]
    expected = w[names[1].index("China"), names[0].index("Shanghai")]
    row = next(row for row in rows(folder, "table6") if row["answer"] == "Shanghai")
    assert row["W of the reference"].split(" (")[0].replace("−", "-") == f"{expected:.2f}"
    state = json.loads((folder / "reproduction.json").read_text("utf-8"))
    (entry,) = [one for name, one in state["runs"].items() if "edits_city" in name]
    assert "data.n_edits asks for 100000" in entry["error"]
    (row,) = [one for one in rows(folder, "left_out") if "edits_city" in one["run or knowledge"]]
    assert row["of"] == "Table 6" and "data.n_edits asks for 100000" in row["why"]


def test_a_plan_runs_nothing(reproduce, capsys):
    folder = reproduce("--plan", "--only=table4,figure9,figure4", output="planned")
    assert not folder.exists()
    said = capsys.readouterr().out
    assert "probe_attribute: correlation_matrix.yaml\n" in said
    assert re.search(r"left out: .*\bceo\b.* \(Table 4\): ", said)
    assert "left out: Figure 9: needs --after\n" in said
    assert "left out: Figure 4: needs 2 LMs\n" in said


def test_rank_correlations_are_tested_by_permutation():
    """Against all orders of six numbers, two of them tied."""
    x, y = np.array([1.0, 2, 3, 3, 5, 6]), np.array([1.0, 3, 2, 4, 6, 5])
    rho, p = rank_correlation(x, y)
    assert rho == pytest.approx(stats.spearmanr(x, y).statistic)
    orders = [stats.spearmanr(x, y[list(one)]).statistic for one in permutations(range(6))]
    assert p == pytest.approx(np.mean(np.array(orders) >= rho - 1e-9), abs=0.005)
