"""The table of repairs, and the runs that it is made of."""

import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from lincorr_lightning.cli import main

Script = Callable[[str], ModuleType]


@pytest.fixture
def repair(script: Script) -> ModuleType:
    return script("repair")


def part(hallucinated: float, in_context: float, right_before: float) -> dict[str, Any]:
    return {
        "n": 75, "source_learned": 1.0, "generalized": 1 - hallucinated,
        "hallucinated": hallucinated, "in_context": in_context,
        "controls": {"color": 0.25, "food": 0.5}, "right_before": right_before,
        "new_targets": {"n": 5, "hallucinated": hallucinated / 2},
    }  # fmt: skip


def test_the_table_shows_before_and_after(repair: ModuleType, tmp_path: Path) -> None:
    stages = {"before": part(0.52, 0.3, 0.0), "after": part(0.2, 0.9, 0.04)}
    points = [
        {"step": step, "pair": pair, "label_mean": r, "influenced": r}
        for step, r in ((0, 0.8), (7, 0.6))
        for pair in ("city->country", "city->color")
    ]  # fmt: skip
    results = {
        "shown": stages, "held_out": stages, "perplexity": {"before": 40.0, "after": 41.0},
        "n_steps": 7, "correlations": points,
    }  # fmt: skip
    (tmp_path / "some-lm").mkdir()
    file = tmp_path / "some-lm" / "repair_edits_0.json"
    file.write_text(json.dumps({"options": [], "results": results}))
    older = file.with_name("repair_edits_unpreserved_0.json")
    older.write_text(json.dumps({"options": [], "results": results}))
    (tmp_path / "some-lm" / "repair_source_0.json").write_text(json.dumps({"error": "no memory"}))
    tables = repair.tables(tmp_path)
    _, _, *rows = tables["repair_unpreserved"].splitlines()
    assert all("| edits | 0 |" in row for row in rows) and len(rows) == 2
    _, _, first, second = tables["repair"].splitlines()
    cells = [cell.strip().replace("\\", "") for cell in first.split("|")[1:-1]]
    assert cells == [
        "some-lm", "edits", "0", "75 shown", "100% → 100%", "48% → 80%",
        "52% (41–63) → 20% (13–30)", "26% → 10% (5 edits)", "0% → 4%", "25% → 25%", "50% → 50%",
        "30% → 90%", "0.80 → 0.60", "0.80 → 0.60", "0.80 → 0.60", "40.0 → 41.0",
    ]  # fmt: skip
    assert "75 held out" in second


def test_the_ratio_counts_edits_of_all_seeds(repair: ModuleType, tmp_path: Path) -> None:
    header = "part,stage,source_answer,outcome"
    cases = [
        ("before", ["Paris", "Paris", "Rome", "Oslo"], ["hallucinated"] * 4),
        ("after", ["Paris", "Paris", "Rome", "Oslo"], ["hallucinated"] + ["generalized"] * 3),
    ]  # fmt: skip
    rows = [
        f"held_out,{stage},{answer},{outcome}"
        for stage, answers, outcomes in cases
        for answer, outcome in zip(answers, outcomes, strict=True)
    ]
    files = [tmp_path / f"{seed}.csv" for seed in (1, 2)]
    for file in files:
        file.write_text("\n".join([header, *rows, "shown,before,Bern,hallucinated"]))
    n, before, after, low, high = repair.hallucination_ratio(files, "held_out")
    assert (n, before, after) == (8, 8, 2)
    # At the ends, resamples have answers without a hallucination after, or only half of Paris.
    assert 0 <= low < 0.25 < high <= 0.5


def test_every_variant_is_a_command(
    repair: ModuleType, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    runs = list(repair.plan("some-lm", str(tmp_path), (0, 1)))
    assert len({run.name for run in runs}) == len(runs) == 2 * len(repair.VARIANTS)
    for run in runs[: len(repair.VARIANTS)]:
        with pytest.raises(SystemExit) as exit_info:
            main([*run.options, "--print_config"])
        assert exit_info.value.code == 0
        assert "RepairDataModule" in capsys.readouterr().out
