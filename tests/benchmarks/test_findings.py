"""Runs of pretrained LMs, here of the embedded one, and the tables of the committed results."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest
from pandas import DataFrame
from scipy import stats

import lincorr_lightning.lm
from benchmarks import common
from benchmarks.real_lms import edits, feature_flow, findings, geometry, run
from lincorr_lightning.cli import main

TINY_WORLD = Path(lincorr_lightning.lm.__file__).parent / "tiny_world"


def test_a_run_leaves_its_numbers_or_its_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def cost_of(command: list[str], errors: Path, cwd: Path) -> common.Cost:
        assert command[:3] == [sys.executable, "-m", "lincorr_lightning"] and cwd == common.ROOT
        if "--model.knowledge=[cities]" in command:
            errors.write_text("a warning\nlincorr: error: cities")
            raise SystemExit
        main(command[3:])
        return common.Cost(12.3, 4.5, 2048)

    monkeypatch.setattr(run, "cost_of", cost_of)
    options = "fit", "--config", "configs/linear_probe.yaml", "--data.n_subjects=60"
    for name, knowledge in (("probe", "[city, country]"), ("wrong", "[cities]")):
        one = run.Run(
            name, (*options, f"--model.knowledge={knowledge}"), ("pairs",), ("random_words",)
        )
        run.execute(one, TINY_WORLD, tmp_path / "lm")
    found = json.loads((tmp_path / "lm" / "probe.json").read_text())
    assert {pair["source"] for pair in found["results"]["pairs"]} == {"city", "country"}
    assert (found["seconds"], found["peak_gib"]) == (12, 2.0)
    assert (tmp_path / "lm" / "probe_random_words.png").read_bytes().startswith(b"\x89PNG")
    assert "cities" in json.loads((tmp_path / "lm" / "wrong.json").read_text())["error"]


def test_every_kind_of_run_parses() -> None:
    """All runs of the smallest LM; of those with the same options, one."""
    runs = list(run.plan(10**8, "texts.jsonl"))
    assert len({each.name for each in runs}) == len(runs)
    kinds = {tuple(word.partition("=")[0] for word in each.options): each for each in runs}
    for each in kinds.values():
        with pytest.raises(SystemExit) as end:
            main([*each.options, "--print_config"])
        assert end.value.code in (0, None), each


@pytest.mark.nightly
def test_documents_and_files_have_the_tables_of_the_committed_results(tmp_path: Path) -> None:
    numbers = findings.read_all(run.REAL_LMS)
    found = numbers.tables()
    of_flow = feature_flow.tables(run.REAL_LMS)
    of_geometry = geometry.tables(run.REAL_LMS, geometry.FILE)
    made = [
        (findings.documented(numbers, found), found.values()),
        (feature_flow.documented(of_flow), of_flow),
        (geometry.documented(of_geometry), of_geometry),
    ]
    text = common.all_text()
    for shown, tables in made:
        assert all(f"<!-- {name}: begin -->" in text for name in shown)
        assert common.placed(text, shown) == text
        for table in tables:
            common.write_table(table, tmp_path)
            file = f"{table.name}.csv"
            committed = common.read_csv(run.REAL_LMS / "tables" / file)
            assert committed.equals(common.read_csv(tmp_path / file)), file


def test_leads_are_over_answers() -> None:
    """Two of three answers generalize; a constant is right everywhere. The interval is SciPy's."""
    group, failed = np.array([0, 0, 1, 2, 2, 2]), np.array([0, 0, 0, 1, 1, 1], dtype=bool)
    cases = {
        "reference": [f"land{i}|x" for i in group],
        "outcome": np.where(failed, "hallucinated", "generalized"),
        "nearest_risk": [1, 1, -1, 1, 1, 1],
    }
    edited = edits.EditRun("a", "city→country", "lora", "any", 0.5, 0.5, DataFrame(cases))
    row = edits.outcomes_of(edited)
    assert (row.generalized, row.by_answer) == pytest.approx((1 / 2, 2 / 3))
    assert (row.nearest_word, row.nearest_by_answer) == pytest.approx((1 / 6, 1 / 3))
    leads = np.array([0, 0, -1])
    interval = stats.ttest_1samp(leads, 0).confidence_interval()
    assert row.lead == pytest.approx((leads.mean(), *interval))
