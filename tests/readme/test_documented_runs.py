"""A documented command of each shipped config runs, and so does the documents' Python code.

In small form and in one folder; nightly, all commands run, in the documents' order, and the tables
are compared with full runs.
"""

import json
import re
from collections.abc import Iterator
from contextlib import chdir
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest
from pandas import read_csv
from pandas.api.types import is_numeric_dtype
from transformers import TrainingArguments

from benchmarks.common import ROOT, placed
from benchmarks.docs_tables import probe
from benchmarks.speed import gpu
from lincorr_lightning.results import SavedRun
from lincorr_lightning.sae import load_sae
from tests.readme.commands import (
    TEXT,
    blocks,
    config_of,
    lincorr_commands,
    needs_other_files,
    run_folder_of,
    with_own_files,
)
from tests.toys import assert_is_last, drawn_figures

pytestmark = pytest.mark.slow

PROBE = "--data.n_subjects=200 --model.knowledge=[city,country,company]"
EDITS = "--data.n_edits=6"
ABLATION = "--model.compose.epochs=2 --model.learn.epochs=2"
SAES = "runs/sparse_autoencoders/version_0/sparse_autoencoders"
# Options that make a command of a config take seconds.
SMALL = {
    "linear_probe": PROBE,
    "correlation_matrix": PROBE,
    "resilience": PROBE,
    "token_geometry": "--data.n_texts=8",
    "source_finetune": EDITS,
    "source_finetune_lora": EDITS,
    "causal": EDITS,
    "edited_lm": "--model.n_subjects=200",
    "forecast": EDITS,
    "reproduce": "--only=figure7",
    "vocabulary_ablation": ABLATION,
    "vocabulary_ablation_paper": ABLATION,
    "pretraining": ("--trainer.max_steps=3 --trainer.limit_val_batches=1 --data.n_people=40"),
    "sparse_autoencoders": (
        "--data.n_tokens=4100 --data.batch_tokens=256 --data.n_held_out=40 "
        "--data.knowledge=[city,country] --model.sae.n_features=128"
    ),
    "feature_flow": (
        f"--model.saes={SAES} --model.n_subjects=200 --model.deactivation.n_cases=12 "
        "--data.n_texts=100 --model.steering.strengths=[0,1] --model.steering.n_answers=2 "
        "--model.steering.n_prompts=4 --model.steering.n_texts=4 --model.steering.n_new_tokens=4"
    ),
}
# Kinds of knowledge on one line determine one another in the tiny world.
RELATED = (
    "city birthplace country continent language landmark food drink flower vacation music mother "
    "father",
    "ceo company job vehicle",
    "sport hobby gender",
    "color personality",
)


def small_form(command: list[str]) -> list[str]:
    """A command with the reader's own files, and sizes that take seconds."""
    return [*with_own_files(command), *SMALL.get(config_of(command), "").split()]


NUMBER = re.compile(r"[-+]?\d+(\.\d*)?([eE][-+]?\d+)?")
WORDS = ("subject", "label", "token", "target_said", "source_said", "prompt", "id")
# What a command of a config does that its plain form, which runs otherwise, does not.
CHOSEN = {"correlation_matrix": "--model.partial_out"}
CKPT = "--ckpt_path"


def a_command_of_each_config() -> list[list[str]]:
    """And those that score and use a fitted map, and the page and the comparison of two runs."""
    found: dict[str, list[str]] = {}
    for command in lincorr_commands():
        name = config_of(command)
        is_plain = len(command) == 3 and name not in CHOSEN
        if name in SMALL and (is_plain or CHOSEN.get(name, "no option") in command):
            found.setdefault(name, command)
    assert set(found) == set(SMALL) == {path.stem for path in (ROOT / "configs").glob("*.yaml")}
    others = [
        c for c in lincorr_commands() if CKPT in c or c[0] in ("report", "compare", "weights")
    ]
    return [*(c for name, c in found.items() if name != "reproduce"), *others]


@pytest.fixture(scope="module")
def small_runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Path]]:
    """Run a command of each config in an empty folder, which is the current one.

    Yields:
        The run folders.
    """
    with chdir(tmp_path_factory.mktemp("user")):
        folders = [run_folder_of(small_form(one)) for one in a_command_of_each_config()]
        yield [folder for folder in folders if folder is not None]


def check_results(folders: list[Path]) -> None:
    """Every run but the predictions of the linear probe has results."""
    assert {folder.parent.name for folder in folders} == set(SMALL) - {"reproduce"}
    files = [folder / "results.json" for folder in folders]
    assert [path.parents[1].name for path in files if not path.is_file()] == ["linear_probe"]
    for path in filter(Path.is_file, files):
        assert_is_last(path)
    assert all(Path("runs", name, "report.html").is_file() for name in ("report", "compared"))


def test_a_command_of_each_config_runs(small_runs: list[Path]) -> None:
    check_results(small_runs)


@pytest.mark.nightly
def test_all_commands_run_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    commands = [one for one in lincorr_commands() if not needs_other_files(one)]
    with drawn_figures():
        folders = [run_folder_of(small_form(one)) for one in commands]
    check_results([folder for folder in folders if folder is not None])


def values_at(value: Any, path: str) -> list[Any]:
    """All values at a path such as ``pairs[].q``, where ``*`` is any key of a mapping."""
    found = [value]
    for key in path.replace("[]", ".[]").split("."):
        if key == "[]":
            found = [item for one in found if isinstance(one, list) for item in one]
        else:
            own = [one for one in found if isinstance(one, dict)]
            found = [v for one in own for k, v in one.items() if key in ("*", k)]
    return found


def test_every_number_of_the_concepts_is_in_a_run(small_runs: list[Path]) -> None:
    results = [json.loads(path.read_text()) for run in small_runs for path in run.glob("*.json")]
    columns: dict[str, set[str]] = {}
    for path in (path for run in small_runs for path in run.glob("tables/*.csv")):
        header = path.read_text(encoding="utf-8").splitlines()[0]
        columns.setdefault(path.name, set()).update(header.split(","))
    page = (ROOT / "docs" / "concepts.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| [^|]+ \| ([^|]*) \| ?([^|]*) ?\|$", page, re.MULTILINE)
    keys = [key for cell, _ in rows for key in re.findall("`([^`]+)`", cell)]
    keys = [key for key in keys if key != "results.json"]  # a heading
    assert len(keys) > 80
    assert not [key for key in keys if not any(values_at(one, key) for one in results)]
    for _, cell in rows:
        tables: list[str] = []
        for name in re.findall("`([^`]+)`", cell):
            if not name.endswith(".csv"):
                assert name in set().union(*(columns[table] for table in tables)), (tables, name)
                continue
            assert name in columns, name
            # A list of columns belongs to the tables named before it.
            tables = [*tables, name] if tables and f"`, `{name}`" in cell else [name]


def test_results_have_the_numbers_that_are_compared_between_devices(
    small_runs: list[Path],
) -> None:
    files = [run / "results.json" for run in small_runs if (run / "results.json").is_file()]
    results = {path.parents[1].name: json.loads(path.read_text()) for path in files}
    studies = gpu.PLAN["studies"].values()
    assert len(studies) > 9
    for study in studies:
        (config,) = re.findall(r"configs/(\w+)\.yaml", study["command"])
        found = [results[config][key] for key in study["numbers"]]
        assert all([*gpu.numbers_in(each)] for each in found), config


def test_columns_of_numbers_are_numeric(small_runs: list[Path]) -> None:
    """In every table of every study: numbers as text would be sorted as words."""
    runs = [SavedRun.read(run) for run in small_runs if (run / "results.json").is_file()]
    tables = [(run.folder, table) for run in runs for table in run.tables]
    assert {run.folder.parent.name for run in runs} == set(SMALL) - {"reproduce"}
    assert len({table.name for _, table in tables}) > 45
    n_sorted = 0
    for folder, table in tables:
        frame = table.to_pandas()
        cells = read_csv(folder / "tables" / f"{table.name}.csv", dtype=str, keep_default_na=False)
        for key, column in frame.items():
            texts = [text for text in cells[key] if text not in ("", "True", "False")]
            numbers = [float(text) for text in texts if NUMBER.fullmatch(text)]
            # Subjects and answers are any words of the vocabulary.
            if key in WORDS or not numbers:
                continue
            assert len(numbers) == len(texts), (folder, table.name, key)
            assert is_numeric_dtype(column), (folder, table.name, key)
            assert sorted(numbers) == column.dropna().sort_values().tolist()
            n_sorted += 1
    assert n_sorted > 250


@pytest.mark.usefixtures("small_runs")
def test_python_runs(capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    hugging_face = next(block for block in blocks("python") if "HuggingFaceCallback" in block)
    correlating = [block for block in blocks("python") if "import correlate" in block]
    (own_sae,) = (block for block in blocks("python") if "mine/mlp_out" in block)
    own_module, features, stopping = sorted(
        with_own_files(
            [
                one
                for one in blocks("python")
                if one not in (hugging_face, *correlating) and "mine/mlp_out" not in one
            ]
        ),
        key=lambda block: "EarlyStopping" in block,
    )
    readme = correlating[0]
    (api,) = with_own_files([block for block in correlating if "runs/my_probe" in block])
    exec(compile(readme, "README.md", "exec"), {})
    assert capsys.readouterr().out.split() == blocks("text")[0].split()
    assert Path("weights.pdf").is_file()
    script: dict[str, Any] = {"__name__": "readme"}
    exec(compile(own_module, "own_module.md", "exec"), script)
    (learned,) = re.findall(r"^learned (\d+)%, generalized \d+%$", capsys.readouterr().out, re.M)
    assert int(learned) > 0
    exec(compile(stopping, "own_module.md", "exec"), script)
    out = capsys.readouterr().out
    assert re.search(r"^stopped after \d+ steps, best in .*\.ckpt$", out, re.M), out
    assert script["callbacks"][0].results["by_step"][-1]["leak"] is not None
    mine = script["Mine"](*with_own_files(["path/to/checkpoint"]))
    rows = [dict(mine.tokenizer(text)) for text in script["texts"]]
    theirs = {
        "model": mine.net,
        "tokenizer": mine.tokenizer,
        "data": [row | {"labels": row["input_ids"]} for row in rows],
        "args": TrainingArguments(
            "out", per_device_train_batch_size=1, report_to=[], save_strategy="no", use_cpu=True
        ),
    }
    exec(compile(hugging_face, "own_module.md", "exec"), script | theirs)
    assert list(Path("out").rglob("cases.csv"))
    exec(compile(api, "api.md", "exec"), {})
    assert "linear_probe of tiny-world" in capsys.readouterr().out
    assert SavedRun.read("runs/my_probe").figures
    exec(compile(own_sae, "sparse_autoencoders.md", "exec"), {})
    assert load_sae("mine/mlp_out.1").width == 256
    names: dict[str, Any] = {}
    exec(compile(features, "feature_flow.md", "exec"), names)
    assert names["logits"].shape[:2] == names["features"].shape[:2]


def full_run(words: str, folder: Path) -> tuple[Path, dict[str, Any]]:
    """Run the first command that has these words as the documents have it."""
    command = next(one for one in lincorr_commands() if words in " ".join(one))
    run = run_folder_of([*command, f"--trainer.default_root_dir={folder}"])
    assert run is not None
    return run, json.loads((run / "results.json").read_text(encoding="utf-8"))


@pytest.mark.nightly
def test_probe_tables_are_those_of_full_runs(tmp_path: Path) -> None:
    """To the last digit but one: other processors round otherwise."""
    results = [
        full_run(words, tmp_path)[1]
        for words in ("configs/linear_probe.yaml", "simile_color", "--model.partial_out")
    ]
    fresh = placed(TEXT, probe.tables(*results))
    related = {pair for group in RELATED for pair in permutations(group.split(), 2)}
    pairs = {(pair["source"], pair["target"]): pair for pair in results[2]["pairs"]}
    found = {name for name, pair in pairs.items() if pair["q"] <= probe.FINDING}
    # Most related pairs are of no more than words: their states are nearly linear in one another.
    assert len(found - related) <= 0.05 * len(found) and len(found) > 40
    number = re.compile(r"(?<![\w.])-?\d*\.\d+")
    shown, expected = number.findall(TEXT), number.findall(fresh)
    assert len(shown) == len(expected)
    for ours, theirs in zip(shown, expected, strict=True):
        assert float(ours) == pytest.approx(float(theirs), abs=0.0201)
    assert number.sub("", TEXT) == number.sub("", fresh)


@pytest.mark.nightly
def test_feature_flow_table_is_that_of_a_full_run(tmp_path: Path) -> None:
    """Matched predecessors switch features off at least three times as often as random ones.

    And the features that carry both answers of city->country carry its correlation.
    """
    _, results = full_run("configs/feature_flow.yaml", tmp_path)
    for method in ("top-1", "top-5"):
        entry = results["deactivation"][method]
        assert entry["n"] >= 1000
        assert entry["matched_success"] >= 3 * entry["random_success"]
    relation = results["relation"]
    assert relation["shared_flow"] > 0.2
    assert relation["shared_flow_permuted"] < 0.05
    cuts = {(cut["cut"], cut["control"]): cut for cut in relation["cuts"]}
    assert cuts["none", False]["recall"] > 0.95
    # SAEs are trained a little differently with another number of threads.
    assert cuts["carriers", True]["recall"] > cuts["carriers", False]["recall"] + 0.05
    steering = results["steering"]
    graphs = [steering[name]["score"] for name in ("constant", "linear", "exponential")]
    assert max(graphs) > steering["single"]["score"]

    # On another processor, SAEs are trained a little differently.
    for method, entry in results["deactivation"].items():
        row = next(line for line in TEXT.splitlines() if line.startswith(f"| {method} | 0."))
        shown = [float(cell) for cell in row.strip("| ").split("|")[1:3]]
        found = [entry["matched_success"], entry["random_success"]]
        assert shown == pytest.approx(found, abs=0.08), row
