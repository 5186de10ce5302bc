"""The modules that measure time and memory, on sizes that take seconds."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks.speed import gpu, growth, reading, second_runs, stacked_edits, startup
from lincorr_lightning import Catalogue, LanguageModel

Rows = Callable[[str], list[list[str]]]


def test_stacked_edits(capsys: pytest.CaptureFixture[str], rows: Rows) -> None:
    stacked_edits.main(side_by_side=(1, 4), n_edits=4, steps=2, rank=2, repeats=1)
    table = rows(capsys.readouterr().out)
    assert [row[0] for row in table] == ["one at a time, peft", "1 side by side", "4 side by side"]
    assert all(float(row[4]) < 1e-3 for row in table[1:])


def test_growth(rows: Rows, tmp_path: Path) -> None:
    """Exponents of known laws, and what the runs of a sweep are given."""
    sizes = {
        str(n): {
            "size": n,
            "seconds": 5 + 3 * n**2,
            "MiB": 400 + 90 * n,
        }
        for n in (1.0, 2.0, 5.0, 10.0)
    }
    table = rows(growth.growth_table({"labels": sizes}))
    assert [row[:3] for row in table[:2]] == [["labels", "1.0", "8"], ["labels", "2.0", "17"]]
    assert (table[0][3], table[0][5], table[1][3]) == ("2.00", "1.00", "")
    (tmp_path / "words.yaml").write_text(growth.knowledge_of(["Paris", "Rome"]), encoding="utf-8")
    catalogue = Catalogue.load(str(tmp_path / "words.yaml"))
    for kind in ("first", "second"):
        assert [answer.text for answer in catalogue[kind].answers] == ["Paris", "Rome"]
    lm = LanguageModel.from_pretrained(str(growth.stored_lm("15M", tmp_path)))
    width, layers = growth.SHAPES["15M"]
    words = 2 * width * len(lm.tokenizer)
    assert lm.model.num_parameters() == layers * (16 * width**2 + 2 * width) + width + words
    assert 14e6 < lm.model.num_parameters() < 17e6


@pytest.mark.slow
def test_commands_that_need_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(startup, "RESULT", tmp_path / "startup.json")
    placed: dict[str, str] = {}
    monkeypatch.setattr(startup.common, "place_tables", placed.update)
    monkeypatch.setitem(
        startup.COMMANDS,
        "main job",
        (
            *startup.COMMANDS["main job"],
            "--model.knowledge=[city,country]",
            "--data.n_subjects=60",
        ),
    )
    names = ("lincorr --version", "lincorr weights", "lincorr compare")
    startup.main(n=1, warm_up=False, only=names)
    found = json.loads((tmp_path / "startup.json").read_text())
    assert [*found] == [*names] and "lincorr weights" in placed["startup"]
    assert all(0 < one["now"]["wall"][0] < 60 for one in found.values())


def test_the_process_that_measures_is_small() -> None:
    """The peak memory of a process is never below that of the one that starts it."""
    code = "import sys, benchmarks.speed.startup; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not {"torch", "pandas", "scipy", "matplotlib", "lightning"} & {*done.stdout.split()}


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_each_study_on_a_gpu_is_compared_with_the_cpu(device: str, tmp_path: Path) -> None:
    parts = [*gpu.parts("some-lm", device, tmp_path)]
    runs = [part for part in parts if part.run is not None]
    assert len({part.run for part in runs}) == len(runs) < len({part.name for part in parts})
    studies = [part.name.partition(":")[0] for part in runs]
    for study in ("probe", "LoRA edits, callbacks", "edited LM (tiny world)"):
        own = runs[studies.index(study)]
        assert own.name == f"{study}: CPU"
        assert not any("gpu.yaml" in word or "cuda" in word for word in own.command)
    kept = [part for part in runs if "states" in part.name]
    assert [part.name.rpartition(" ")[2] for part in kept] == ["written", "read"]
    options = [{w for w in part.command if "default_root_dir" not in w} for part in kept]
    assert options[0] == options[1] and any("state_cache" in word for word in options[0])
    for part in parts:
        assert ("some-lm" in " ".join(part.command)) is not (
            part.name.startswith("reading") or "(tiny world)" in part.name
        )


@pytest.mark.nightly
def test_second_runs(
    capsys: pytest.CaptureFixture[str], rows: Rows, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ends with an error if the cache changes a number."""
    monkeypatch.setattr(second_runs, "place_tables", lambda tables: None)
    second_runs.main(n_subjects=100, n=1)
    assert [row[0] for row in rows(capsys.readouterr().out)] == [*second_runs.RUNS]


def test_bare_products_are_those_of_the_linear_layers() -> None:
    lm = reading.make_lm(None, "small", "tiny-world", "float32", "cpu")
    weights = reading.weights_of(lm.model)
    assert len(weights) == 2 * 7
    counted = sum(p.numel() for p in lm.model.model.layers.parameters() if p.dim() == 2)
    assert sum(weight.numel() for weight in weights) == counted
    reading.bare_products(weights, [(2, 5), (1, 3)])()


@pytest.mark.parametrize("shape", ["", "small"])
def test_reading(capsys: pytest.CaptureFixture[str], rows: Rows, small_lm: str, shape: str) -> None:
    """All ways give the same logits of the labels, and as many prompts as they were asked."""
    lm = {"shape": shape, "dtype": "bfloat16"} if shape else {"lm": small_lm}
    knowledge = ("city", "country")
    reading.main(**lm, knowledge=knowledge, n_subjects=40, n_published=6, threads=1)
    table = rows(capsys.readouterr().out)
    assert [row[0] for row in table] == [
        "published",
        "transformers, batches",
        "ours, prompts one by one",
        "ours, shared prefixes",
    ]
    assert [int(row[1]) for row in table] == [12, 80, 80, 80]
    for row in table:
        assert float(row[7]) < (0.1 if shape else 1e-4) and float(row[8]) > 0.999
        ratio = float(row[2]) / float(table[0][2])
        assert float(row[3].removesuffix("x")) == pytest.approx(ratio, rel=0.02, abs=0.06)


def test_reading_finds_wrong_logits(
    small_lm: str,
    capsys: pytest.CaptureFixture[str],
    rows: Rows,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    right = reading.plain_batches
    monkeypatch.setattr(reading, "plain_batches", lambda lm, prompts: right(lm, prompts).flip(0))
    reading.main(small_lm, knowledge=("city", "country"), n_subjects=40, threads=1)
    wrong = rows(capsys.readouterr().out)[1]
    assert float(wrong[7]) > 0.01 and float(wrong[8]) < 0.999
