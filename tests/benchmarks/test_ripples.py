"""Edits step by step: what is kept of them, beside what callbacks say, and its statistics."""

import json
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from scipy.stats import pearsonr
from sklearn.metrics import roc_auc_score

from benchmarks.real_lms import (
    edit_explanations,
    edit_recorder,
    ripple_runs,
    ripple_tables,
    ripples,
)
from benchmarks.real_lms.edit_recorder import EditRecorder, read_arrays, write_arrays
from lincorr_lightning.callbacks import Generalization
from lincorr_lightning.cli import main
from lincorr_lightning.lm import LanguageModel

STEPS = [1, 2, 4]


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    """Six edits of the tiny world, kept by a recorder beside the callback of the package."""
    folder = tmp_path_factory.mktemp("ripples")
    path = folder / "tiny-world" / "ripples" / "lora_city_to_country_1.npz"
    about = {"lm": "tiny-world", "seed": 1}
    others = {"n_others": 3, "others_kind": "any", "seed": 1}
    recorder = {"steps": STEPS, "kept": [1, 4], "n_subjects": 60, "about": about, **others}
    of_package = {"edit_steps": STEPS, "controls": ["color", "pet"], "n_subjects": 60, **others}
    callbacks = [
        {
            "class_path": "benchmarks.real_lms.edit_recorder.EditRecorder",
            "init_args": {"path": str(path), **recorder},
        },
        {"class_path": "Generalization", "init_args": of_package},
    ]
    trainer = main(
        [
            *("fit", "--config", "configs/source_finetune_lora.yaml", "--model.steps_per_edit=4"),
            *("--data.n_edits=6", "--data.seed=1", "--model.edits_per_step=3"),
            f"--trainer.callbacks={json.dumps(callbacks)}",
            *("--trainer.enable_progress_bar=false", f"--trainer.default_root_dir={folder}/runs"),
        ]
    ).trainer
    (callback,) = [one for one in trainer.callbacks if isinstance(one, Generalization)]
    return SimpleNamespace(folder=folder, path=path, results=callback.results, callback=callback)


@pytest.fixture
def run(measured: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> ripple_runs.RippleRun:
    one = ripples.Ripples("lora", "tiny-world", "city->country", 1, ())
    monkeypatch.setattr(ripple_runs, "plan", lambda: [one])
    found = ripple_runs.read_run(measured.folder, "tiny-world", "lora", "city->country")
    assert found is not None
    return found


@pytest.mark.slow
def test_shares_by_step_are_those_of_the_package(
    run: ripple_runs.RippleRun, measured: SimpleNamespace
) -> None:
    rows = {row["step"]: row for row in measured.results["by_step"]}
    found = {row.step: row for row in ripple_tables.ripples(run)}
    for step in STEPS:
        expected, row = rows[step], found[str(step)]
        assert row.learned == pytest.approx(
            np.mean([np.mean(x) for x in _by_answer(run, run.shares["learned"][STEPS.index(step)])])
        )
        assert row.own.value == pytest.approx(expected["macro_generalized"])
        assert row.leak.value == pytest.approx(expected["leak"])
        assert row.specific.value == pytest.approx(expected["specific"])
        assert run.shares["color"][STEPS.index(step)].mean() == pytest.approx(
            expected["controls"]["color"]
        )


def _by_answer(run: ripple_runs.RippleRun, values: np.ndarray) -> list[list[float]]:
    groups = defaultdict(list)
    for group, value in zip(run.group, values, strict=True):
        groups[group].append(value)
    return list(groups.values())


@pytest.mark.slow
def test_changes_are_those_of_the_lm(run: ripple_runs.RippleRun, measured: SimpleNamespace) -> None:
    """After the last step, from the logits that the package's callback has read."""
    state = measured.callback.state
    ids, (after,) = state.readings_by_step()[3]
    change = (after["target"] - state.base["target"][ids]).numpy()
    assert np.abs(run.arrays["change"][-1] - change).max() <= 1 / 16
    leading = after["others/target"].numpy()
    assert (run.arrays["others"][-1] == leading).all()


@pytest.mark.slow
def test_gradients_and_contexts_explain_a_run(measured: SimpleNamespace) -> None:
    """The gradient says which way a tiny step of plain gradient descent goes, weight by weight."""
    lm = LanguageModel.from_pretrained("tiny-world").load()
    found = edit_explanations.explain(lm, measured.path)
    arrays = read_arrays(measured.path)
    n, t = arrays["before"].shape
    assert found["gradient"].shape == found["context_of_other"].shape == (n, t)
    assert found["rotated_margin"].shape == (n, edit_explanations.N_DRAWS)
    assert (np.abs(found["gradsim"]) <= 1).all()
    assert np.abs(found["gradient"]).max() == pytest.approx(1)


def test_row_r_is_pearsons_after_the_means_of_columns() -> None:
    rng = np.random.default_rng(0)
    first, second = rng.normal(size=(2, 5, 7))
    found = edit_explanations.row_r(first, second)
    centred = [x - x.mean(0) for x in (first, second)]
    expected = [pearsonr(a, b).statistic for a, b in zip(*centred, strict=True)]
    assert found == pytest.approx(expected)


def test_stored_arrays_come_back(tmp_path: Path) -> None:
    """Integers exactly, also negative ones, and others to half of their unit."""
    rng = np.random.default_rng(0)
    arrays = {
        "own": rng.integers(-300, 300, size=(3, 4)),
        "change": rng.normal(size=(3, 4)) * 10,
        "learned": rng.random((3, 4)) < 0.5,
    }
    write_arrays(tmp_path / "a.npz", arrays)
    found = read_arrays(tmp_path / "a.npz")
    assert (found["own"] == arrays["own"]).all()
    assert (found["learned"] == arrays["learned"]).all()
    half = edit_recorder.UNITS["change"] / 2
    assert np.abs(found["change"] - arrays["change"]).max() <= half


def test_a_matched_difference_is_between_edits_of_one_stratum(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two strata with known differences, weighted by n known times n others over both."""
    values = np.array([1.0, 0.0, 0.0, 1.0, 0.0, 0.0])
    known = np.array([True, False, False, True, True, False])
    run = SimpleNamespace(in_context_right=known, group=np.arange(6))
    monkeypatch.setattr(ripple_tables, "strata", lambda _: np.array([0, 0, 0, 1, 1, 1]))
    found = ripple_tables.matched_difference(run, np.ones(6, dtype=bool), values)  # type: ignore[arg-type]
    assert found is not None
    assert found.value == pytest.approx((2 / 3 * 1 + 2 / 3 * 0.5) / (4 / 3))


def test_every_run_parses() -> None:
    """One of each name: its options are those of the program."""
    by_name = {run.name: run for run in ripples.plan()}
    assert len({run.path for run in ripples.plan()}) == len([*ripples.plan()])
    for run in by_name.values():
        with pytest.raises(SystemExit) as end:
            main([*run.options, "--print_config"])
        assert end.value.code in (0, None), run
    assert EditRecorder.study


def test_auroc_is_that_of_scikit_learn() -> None:
    """Over all edits, and within answers as the mean over them, weighted by their pairs."""
    rng = np.random.default_rng(0)
    group, chosen = rng.integers(6, size=80), rng.random(80) < 0.4
    score = rng.integers(9, size=(80, 2))
    edited = SimpleNamespace(group=group)
    area, within = (
        ripple_tables.auroc(edited, score, chosen, among)  # type: ignore[arg-type]
        for among in (False, True)
    )
    assert area is not None and within is not None
    draws = score.T
    assert area.value == pytest.approx(np.mean([roc_auc_score(chosen, one) for one in draws]))
    answers = [group == number for number in range(6)]
    n_pairs = [chosen[own].sum() * (~chosen[own]).sum() for own in answers]
    parts = [[roc_auc_score(chosen[own], one[own]) for own in answers] for one in draws]
    expected = np.mean([np.average(part, weights=n_pairs) for part in parts])
    assert within.value == pytest.approx(expected)
    # A sample that has one answer twice and no other has its pairs alone.
    alone = np.array([[2.0 * (number == 3) for number in range(6)]])
    drawn = ripple_tables.areas(draws[0], chosen, group, alone)
    assert drawn == pytest.approx(parts[0][3])


@pytest.mark.slow
def test_a_window_is_where_the_interval_is_above_zero(run: ripple_runs.RippleRun) -> None:
    rows = list(ripple_tables.ripples(run))
    rows = [replace(row, step="10") if row.step == "4" else row for row in rows]
    found = ripple_tables.window(rows)
    above = [row.step for row in rows if row.step.isdigit() and row.specific.low > 0]
    assert found.steps == (", ".join(above) or "none")
    assert found.specific == next(row for row in rows if row.step == ripple_runs.PEAK).specific
