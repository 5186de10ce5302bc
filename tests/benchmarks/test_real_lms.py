"""The modules that run and sum up every study on pretrained LMs, on the embedded one."""

import json
import sys
from collections.abc import Callable
from dataclasses import asdict
from itertools import cycle, product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pandas import DataFrame, read_csv
from sklearn.metrics import roc_auc_score

import lincorr_lightning.lm
from benchmarks import common
from benchmarks.real_lms import ablation_grid, findings, nearest_word, run, tables
from lincorr_lightning.ablation.token_embedding import read_token_embedding
from lincorr_lightning.cli import main
from lincorr_lightning.errors import LincorrError
from lincorr_lightning.lm.config import LMConfig

Rows = Callable[[str], list[list[str]]]
TINY_WORLD = Path(lincorr_lightning.lm.__file__).parent / "tiny_world"
OWN = ("fit", "--config", "configs/linear_probe.yaml", "--data.n_subjects=60")


@pytest.fixture
def in_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs happen in this process."""

    def cost_of(command: list[str], errors: Path, cwd: Path) -> common.Cost:
        assert command[:3] == [sys.executable, "-m", "lincorr_lightning"] and cwd == common.ROOT
        try:
            main(command[3:])
        except LincorrError as error:
            errors.write_text(f"a warning\nlincorr: error: {error}")
            raise SystemExit from None
        return common.Cost(12.3, 4.5, 2048)

    monkeypatch.setattr(run, "cost_of", cost_of)


@pytest.mark.usefixtures("in_process")
def test_a_run_leaves_its_numbers_and_figures(tmp_path: Path) -> None:
    options = (*OWN, "--model.knowledge=[city, country]")
    one = run.Run("probe", options, ("n_fit", "pairs"), ("nulls",))
    folder = tmp_path / "lm"
    run.execute(one, TINY_WORLD, folder)
    content = json.loads((folder / "probe.json").read_text())
    assert content["results"]["n_fit"] == 30
    assert {p["source"] for p in content["results"]["pairs"]} == {"city", "country"}
    assert content["results"]["lm"]["name_or_path"] == "tiny_world"
    assert (content["seconds"], content["peak_gib"]) == (12, 2.0)
    assert (folder / "probe_nulls.png").stat().st_size > 10_000
    assert not [option for option in content["options"] if str(tmp_path.parent) in option]


@pytest.mark.usefixtures("in_process")
def test_a_run_that_fails_leaves_its_error(tmp_path: Path) -> None:
    one = run.Run("probe", (*OWN, "--model.knowledge=[cities]"), ())
    run.execute(one, TINY_WORLD, tmp_path)
    content = json.loads((tmp_path / "probe.json").read_text())
    assert "cities" in content["error"] and "results" not in content


@pytest.mark.slow
def test_every_kind_of_run_parses(capsys: pytest.CaptureFixture[str]) -> None:
    """All runs of the smallest LM; of those with the same options, one."""
    runs = list(run.plan(run.SIZES[0], "texts.jsonl"))
    assert len({one.name for one in runs}) == len(runs)
    kinds = {tuple(option.partition("=")[0] for option in one.options): one.options for one in runs}
    for options in kinds.values():
        with pytest.raises(SystemExit) as end:
            main([*options, "--print_config"])
        assert end.value.code in (0, None), options
        assert capsys.readouterr().out


def test_what_is_there_is_not_run_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A folder of one LM, whose first seed of the ablation was run before."""
    done: list[str] = []
    monkeypatch.setattr(run, "execute", lambda one, lm, folder: done.append(one.name))
    monkeypatch.setattr(run, "n_parameters_of", lambda lm: 10**8)
    _write(tmp_path / "results" / "lm", "ablation_paper_0", {})
    (tmp_path / "lms" / "lm").mkdir(parents=True)
    (tmp_path / "lms" / "lm" / "config.json").touch()
    monkeypatch.setattr(run, "TABLES", ())
    run.main(str(tmp_path / "lms"), only=("ablation_paper",), output=str(tmp_path / "results"))
    assert done == [f"ablation_paper_{seed}" for seed in range(1, 5)]


def pair(source: str, target: str, r: float, control: float, q: float) -> dict[str, Any]:
    return {
        "source": source,
        "target": target,
        "label_mean": r,
        "control_label_mean": control,
        "q": q,
    }


def _write(folder: Path, name: str, results: dict[str, Any]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.json").write_text(json.dumps({"results": results}))


@pytest.mark.parametrize(
    ("r", "q", "cell"),
    [
        (0.9, 0.01, "holds: 0.90, control 0.30"),
        (0.9, 0.2, "FAILS: 0.90, control 0.30"),
        (0.2, 1e-9, "FAILS: 0.20, control 0.30"),
    ],
)
def test_a_finding_can_fail(tmp_path: Path, r: float, q: float, cell: str) -> None:
    lm = findings.LMS[0]
    _write(tmp_path / lm, "probe", {"pairs": [pair("city", "country", r, 0.3, q)]})
    head, _, *rows = findings.findings_table(findings.read_lms(tmp_path)).splitlines()
    assert head.split("|")[2].strip() == lm
    cells = {
        claim.strip(): [c.strip() for c in more]
        for _, claim, *more in (row.split("|") for row in rows)
    }
    assert cells[findings.R][:2] == [cell, "not run"]
    assert cells[findings.RIDGE][0] == cells[findings.PRECISE][0] == "not run"


def test_w_is_precise_if_its_intervals_lie_above_the_vocabulary_s() -> None:
    def scored(low: float) -> dict[str, Any]:
        return {
            **pair("city", "country", 0.8, 0.3, 0.0),
            "excess_over_unembedding": {"low": low},
            "excess_over_random_labels": {"low": -low, "target": {"low": 0.1}},
            "precision": {
                "influenced": {"1": 0.4},
                "baselines": {"a": {"1": 0.1}, "b": {"1": 0.35}},
            },
            "baselines": {"random_source_labels": {"mean": 0.79}},
        }

    for lows, holds in (([0.1, 0.2, -0.1], True), ([0.1, -0.1, -0.2], False)):
        runs = {"probe": {"pairs": [scored(low) for low in lows]}}
        above = sum(low > 0 for low in lows)
        numbers = f"{above} of 3 relations; city→country 0.40, baseline 0.35"
        assert findings.precise(runs) == (holds, numbers)
        runs["probe"]["pairs"].append(
            {
                "source": "pet",
                "target": "color",
                "precision": None,
                "excess_over_random_labels": {"low": 0.1, "target": {"low": -0.1}},
            }
        )
        numbers = f"{3 - above} of 3, others 0 of 1; city→country 0.80"
        found = findings.above_random_words(runs)
        assert found == (not holds, f"{numbers}, words 0.79")


def test_edits_are_compared_with_what_needs_no_edit(tmp_path: Path) -> None:
    """Four edits of two names of one country, one of another, two of none; "US" is right for 4.

    The vocabulary alone is right for the two of Peru.
    """
    file = tmp_path / "outcomes.csv"
    rows = [
        "US|USA,generalized,.1",
        "US|USA,hallucinated,.1",
        "US,hallucinated,.2",
        "US,hallucinated,.2",
        "NA,generalized,0",
        "Peru,generalized,-.1",
        "Peru,unchanged,-.1",
    ]
    head = "subject,source_answer,reference,outcome,vocabulary_risk\n"
    file.write_text(head + "\n".join(f"x,y,{row}" for row in rows))
    found = findings.against_baselines(file)
    *shares, low, high = found["edits"]
    assert shares == pytest.approx([3 / 7, 4 / 7, 2 / 7])
    # Samples of one reference alone are not in the interval; of three of four they are.
    assert low <= -2 / 4 and high >= 1 / 2
    macro, constant, vocabulary, low, high = found["references"]
    assert macro == pytest.approx((1 / 2 + 0 + 1 + 1 / 2) / 4)
    assert (constant, vocabulary) == (1 / 2, 1 / 4)
    assert -0.75 <= low < macro - constant < high <= 0.75
    runs = {"outcomes_lora_city_to_country": {"beside": found}}
    cell = "50%, constant 50%, vocabulary 25%; by edit 43%, 57%, 29%"
    assert findings.beats_baselines(runs) == (False, cell)
    found["references"] = findings.Beside(0.5, 0.1, 0.2, 0.01, 0.8)
    assert findings.beats_baselines(runs)[0]
    sums = {"outcomes_lora_X+1_to_X+2": {"beside": {"edits": (0.1, 0.2, 0, 0, 0)}}}
    assert findings.hallucinates(sums) == (True, "10%, constant 20%")


def test_edits_stand_beside_their_baselines() -> None:
    beside = {"edits": (0.5, 0.4, 0.3, -0.2, 0.4), "references": (0.8, 0.1, 0.2, 0.5, 0.75)}
    found = {"n_edits": 20, "hallucinated": 0.3, "beside": beside}
    lms = {"a": {"outcomes_lora_X+1_to_X+2": found}, "b": {"outcomes_full_ceo_to_company": found}}
    *_, first, second = findings.edit_table(lms).splitlines()
    cells = "20 | 30% | 50% | 40% | 30% | +10 (−20 to +40)"
    cells += " | 80% | 10% | 20% | +60 (+50 to +75) |"
    assert first == f"| X+1→X+2 | 0% | a | {cells}"
    assert second == f"| ceo→company, all weights | 4% | b | {cells}"


def test_the_ablation_stands_beside_the_most_frequent_answer(tmp_path: Path, rows: Rows) -> None:
    for seed, (share, majority, skipped) in enumerate([(0.5, 0.4, 0.2), (0.7, 0.5, None)]):
        runs = [
            {
                "mapping": name,
                "composed": composed,
                "generalized": share - 0.1 * i + composed,
                "unrestricted": 0.25,
                "seed": seed,
            }
            for i, name in enumerate(("reference", "permuted", "letters"))
            for composed in (False, True)
        ]
        content = {
            "n_source_labels": 9,
            "n_target_labels": 8,
            "embedding": {"shape": [99, 4]},
            "runs": runs,
            "mappings": [{"majority": majority, "uncomposed": skipped}],
        }
        _write(tmp_path / "a", f"ablation_paper_{seed}", content)
    row, paper = rows(tables.ablation_table(["a", "b"], tmp_path))
    # Student's t of two seeds is 12.71, the standard error .1.
    assert row == [
        "paper",
        "a",
        "4",
        "9 / 8",
        "2",
        "160 ± 127",
        "150 ± 127",
        "140 ± 127",
        "25 ± 0",
        "20%",
        "",
        "45%",
    ]
    assert paper[-4:] == [""] * 4 and paper[5:8] == ["98", "23", "37"]


def test_balanced_edits_are_judged_by_each_seed(rows: Rows) -> None:
    def runs(*constants: float) -> dict[str, Any]:
        return {
            f"balanced{seed}_lora_city_to_country": {
                "beside": {"edits": (0.5 + seed / 10, one, 0.2, 0, 0)},
                "n_edits": 60,
                "macro": {"generalized": 0.7},
            }
            for seed, one in enumerate(constants, 1)
        }

    judged = findings.balanced_generalize
    # Student's t of three seeds is 4.303, the standard error .1/√3.
    assert judged(runs(0.1, 0.1, 0.1)) == (True, "70 ± 25 %, constant 10 ± 0, vocabulary 20 ± 0")
    assert not judged(runs(0.65, 0.1, 0.1))[0]
    with pytest.raises(KeyError):
        judged({"lora_city_to_country": {}})
    pooled = {"pooled": {"references": (0.65, 0.45, 0.4, 0.1, 0.3)}}
    (row,) = rows(findings.balanced_table({"a": runs(0.1, 0.1, 0.1) | pooled, "b": {}}))
    assert row[:6] == ["a", "60 + 60 + 60", "70 ± 25", "10 ± 0", "20 ± 0", "70 ± 0"]
    assert row[6:] == ["65% / 40%", "+20 (+10 to +30)"]


def test_gradient_r_stands_beside_its_nulls() -> None:
    r = {"gradient_correlation": 0.5, "gradient_correlation_all_steps": 0.3}
    own = {"city->country": {**r, "permuted_gradient_correlation": 0.6}, "city->color": r}
    runs = {"lora_city_to_country": {"n_edits": 9, "gradients": own}}
    assert findings.gradient(runs) == (False, "0.50, permuted 0.60; over all steps 0.30")
    table = findings.gradient_table({"a": runs, "b": {}})
    assert "| a | city→country | 9 | 0.50 | 0.60 | 0.50 | 0.30 | 0.30 |" in table


def test_edits_of_all_seeds_are_one_run(tmp_path: Path) -> None:
    head = "subject,source_answer,reference,outcome,vocabulary_risk,weight_reference\n"
    rows = [
        "NA,x,Peru,generalized,-.5,.25",
        "y,x,Spain,unchanged,.125,-1",
        "z,x,Peru,hallucinated,.25,0",
    ]
    (tmp_path / "a").mkdir()
    for seed, chosen in ((1, rows[:2]), (2, rows[2:])):
        file = tmp_path / "a" / f"balanced{seed}_lora_city_to_country.csv"
        file.write_text(head + "\n".join(chosen))
    (tmp_path / "a" / "balanced1_lora_X+1_to_X+2.csv").write_text(head + rows[0])
    (run,) = nearest_word.read_edits(tmp_path, "balanced")
    assert (run.lm, run.method, run.relation) == ("a", "lora", "city->country")
    assert run.failed.tolist() == [False, True, True] and run.group.tolist() == [0, 1, 0]
    assert {name: risk.tolist() for name, risk in run.risks.items()} == {
        nearest_word.NEAREST: [-0.5, 0.125, 0.25],
        nearest_word.WEIGHT: [-0.25, 1.0, 0.0],
        nearest_word.COUNT: [2.0, 1.0, 2.0],
    }
    assert not run.is_judged() and not run.is_judged(within=True)


def edit_run(group: Any, failed: Any, relation: str = "city->country", **risks: Any) -> Any:
    return nearest_word.EditRun(
        "a",
        "lora",
        relation,
        np.array(group),
        np.array(failed, dtype=bool),
        {name: np.array(risk, dtype=float) for name, risk in risks.items()},
    )


def test_areas_count_pairs_of_edits() -> None:
    """By loops over pairs, each as often as its references are drawn."""
    rng = np.random.default_rng(0)
    run = edit_run(rng.integers(6, size=40), rng.random(40) < 0.4, x=rng.integers(9, size=40))
    values = run.risks["x"]
    weights = common.drawn(run.group, 3, rng)
    assert (weights[0] == 1).all() and (weights.sum(1) == 6).all()
    for within in (False, True):
        found = nearest_word.areas(run, "x", weights, within)
        for area, drawn in zip(found, weights, strict=True):
            won = n = 0.0
            for i, j in product(run.failed.nonzero()[0], (~run.failed).nonzero()[0]):
                if not within or run.group[i] == run.group[j]:
                    # A reference that is drawn twice has no pairs with its copy.
                    times = drawn[run.group[i]] * (1 if within else drawn[run.group[j]])
                    won += times * ((values[i] > values[j]) + (values[i] == values[j]) / 2)
                    n += times
            assert area == pytest.approx(won / n)
    assert nearest_word.area(run, "x") == pytest.approx(roc_auc_score(run.failed, values))


def test_intervals_are_over_references_and_relations() -> None:
    """Copies of an edit say no more than the edit; another relation does."""
    rng = np.random.default_rng(3)
    failed = rng.random(120) < 0.5
    risk = failed + rng.normal(size=120)
    widths = []
    for times in (1, 5):
        group = np.repeat(np.arange(120), times)
        run = edit_run(group, np.repeat(failed, times), x=np.repeat(risk, times))
        area, low, high = common.interval(nearest_word.mean_areas([run], "x"))
        assert area == pytest.approx(roc_auc_score(failed, risk))
        assert low < area < high
        widths.append(high - low)
    assert widths[1] == pytest.approx(widths[0], rel=0.15)
    # Of two relations with areas 1 and 0, half of the samples have both.
    runs = [edit_run(np.arange(120), failed, x=sign * failed) for sign in (1, -1)]
    found = nearest_word.mean_areas(runs, "x")
    assert found[0] == 0.5 and set(found[1:]) == {0.0, 0.5, 1.0}
    assert np.mean(found[1:] == 0.5) == pytest.approx(0.5, abs=0.06)
    with pytest.raises(KeyError):
        nearest_word.mean_areas([], "x")


def test_a_forecast_leads_over_all_edits_and_within_references() -> None:
    """A risk that knows the reference alone leads over all edits, and not within one."""
    rng = np.random.default_rng(0)
    group = np.repeat(np.arange(20), 10)
    failed = rng.random(200) > np.where(group < 10, 0.1, 0.9)
    run = edit_run(group, failed, noise=rng.normal(size=200), truth=failed, by_reference=group < 10)
    judge = {
        name: findings.leads(name, "noise")({"lora_edits": [run]})
        for name in ("truth", "by_reference", "noise")
    }
    assert [holds for holds, _ in judge.values()] == [True, False, False]
    assert judge["truth"][1].startswith("1.00, ") and "; within 1.00, " in judge["truth"][1]
    assert "; within 0.50, " in judge["by_reference"][1]
    best = findings.leads("truth", "noise", "by_reference")({"lora_edits": [run]})
    assert best[1].startswith(f"1.00, {roc_auc_score(failed, group < 10):.2f} (")


def test_the_nearest_word_stands_beside_w(tmp_path: Path, rows: Rows) -> None:
    rng = np.random.default_rng(1)
    cases = DataFrame({"reference": [f"land{i % 20}" for i in range(200)]})
    cases["subject"] = cases["source_answer"] = "x"
    cases["outcome"] = rng.choice(["generalized", "hallucinated"], 200)
    failed = cases["outcome"] == "hallucinated"
    cases["vocabulary_risk"] = failed + rng.normal(size=200)
    cases["weight_reference"] = -failed + rng.normal(size=200)
    (tmp_path / "a").mkdir()
    cases.to_csv(tmp_path / "a" / "outcomes_lora_city_to_country.csv", index=False)
    (row,) = rows(nearest_word.nearest_table(tmp_path))
    assert row[:4] == ["sampled", "a", "lora", "1"]
    assert row[4].startswith(f"{roc_auc_score(failed, cases['vocabulary_risk']):.2f} (")
    assert row[5:8] == [f"{roc_auc_score(failed, -cases['weight_reference']):.2f}", "0.50", "1"]
    nearest_word.weights_figure(nearest_word.read_edits(tmp_path)).savefig(tmp_path / "w.png")
    assert (tmp_path / "w.png").stat().st_size > 10_000


def test_a_composition_exceeds_the_best_of_its_baselines_with_each_seed() -> None:
    def run(reference: list[float], permuted: list[float], majority: float) -> dict[str, Any]:
        shares = {("reference", True): reference, ("permuted", True): permuted}
        return {
            "mappings": [{"majority": majority}],
            "runs": [
                {"mapping": mapping, "composed": composed, "generalized": share}
                for (mapping, composed), own in shares.items()
                for share in own
            ],
        }

    judge = findings.composes("ablation", "other")
    found = run([0.9, 0.7], [0.5, 0.3], 0.1)
    assert judge({"ablation": found}) == (True, "80%, permuted 40% (2)")
    assert judge({"ablation": run([0.9, 0.7], [0.5, 0.3], 0.75)}) == (
        False,
        "80%, most frequent 75% (2)",
    )
    assert judge({"ablation": found, "other": run([0.2], [0.3], 0.1)})[1].endswith("(3)")
    with pytest.raises(KeyError):
        judge({})


def test_the_ablation_that_is_judged_is_the_cell_of_the_main_table(
    tmp_path: Path, rows: Rows
) -> None:
    """Each LM's cell of plain, centered networks that are trained alone, as the page prints it."""
    for line in rows(ablation_grid.tables(read_csv(ablation_grid.FILE))["ablation_readings"]):
        if line[3] == "plain, centered":
            share, nearest = line[6].split(" ± ")[0], line[10].split("%")[0]
            _, found = findings.composes("ablation_grid")(
                findings.of_grid(ablation_grid.FILE, line[0])
            )
            assert found == f"{share}%, nearest label {nearest}% ({line[5]})"
    assert findings.of_grid(tmp_path / "none.csv", "smollm2-135m") == {}


def test_cuts_and_steering_stand_beside_their_controls(tmp_path: Path, rows: Rows) -> None:
    cut = {"cut": "flow", "control": True, "n_features": 27, "target_only": 0.25, "recall": None}
    none = {**cut, "cut": "none", "control": False, "n_features": 0, "fixed": 0.7, "refitted": 0.7}
    draws = [cut | {"fixed": 0.5, "refitted": 0.25}, cut | {"fixed": 0.25, "refitted": 0.25}]
    found = {"lm": {}, "relation": {"relation": "city->country", "cuts": [none, *draws]}}
    (tmp_path / "lm").mkdir()
    (tmp_path / "lm" / "feature_flow.json").write_text(json.dumps({"results": found}))
    assert rows(tables.flow_cut_table(["lm"], tmp_path)) == [
        ["lm", "city→country", "none", "0", "0.70", "0.25", "0.70", ""],
        [
            "lm",
            "city→country",
            "flow, 2 controls",
            "27",
            "0.38 (0.25–0.50)",
            "0.25 (0.25–0.25)",
            "0.25 (0.25–0.25)",
            "",
        ],
    ]
    points = [
        (label, strategy, control, 2.0, 0.5 * n, 0.25, 0.125 * (not control), 10.0 ** (2 * n))
        for n, label in enumerate(("Peru", "Iran"))
        for strategy in ("single", "constant")
        for control in (False, True)
    ]
    columns = ["label", "strategy", "control", "strength", "behaviour", "coherence", "named"]
    frame = DataFrame(points, columns=[*columns, "perplexity"]).assign(score=0.5)
    frame.to_csv(tmp_path / "lm" / "feature_flow.csv", index=False)
    numbers = ["0.250", "0.250", "0.250", "0.250", "0.125", "0.000", "10", "10"]
    assert rows(tables.steering_table(["lm", "other"], tmp_path)) == [
        ["lm", strategy, "2", "2", *numbers] for strategy in ("single", "constant")
    ]


def test_geometry_peaks_by_range_scaling_with_the_loss_there() -> None:
    test = {"shuffle": 0, "pearson": 0.5, "low": 0.25, "high": 0.7, "pearson_p": 0.001}
    found = {
        "n_prompts": 9,
        "layers": [1, 2, 3],
        "shuffles": [
            {
                "shuffle": level,
                "loss": 3.0 + level,
                "cosine_mean": [0.1, 0.2 + level, 0.3],
                "dimension": {"2": [2.0, 5.0 + level, 4.0], "8": [6.0, 5.0 - level, 1.0]},
                "overlap": {"2": [0.7, 0.6 - level / 100]},
            }
            for level in (0, 5)
        ],
        "dimension_loss": [
            {**test, "layer": 2, "n2": 2},
            {**test, "layer": 1, "n2": 8, "pearson": -0.5},
            {**test, "layer": 1, "n2": 2, "pearson_p": 0.2},
            {**test, "layer": 3, "n2": 8},
            {**test, "layer": 2, "n2": 2, "shuffle": 5, "pearson": 0.9},
        ],
    }
    assert [" ".join(map(str, row)) for row in tables.geometry_rows(found)] == [
        "9 2 1 2.00 2 5.00 / 10.00 3 4.00 0.50 (0.25 to 0.70) 1",
        "9 8 1 6.00 1 6.00 / 6.00 3 1.00 -0.50 (0.25 to 0.70) 2",
    ]
    assert [" ".join(map(str, row)) for row in tables.shuffling_rows(found)] == [
        "0 3.00 2 5.00 0.60 0.20 0.30 0 / 0 0",
        "5 8.00 2 10.00 0.55 5.20 0.30 1 / 0 1",
    ]


@pytest.mark.nightly
def test_documents_have_the_tables_of_the_committed_runs() -> None:
    text = common.all_text()
    assert "<!-- findings: begin -->" in text
    made = findings.tables(tables.REAL_LMS)
    assert common.placed(text, made) == text


def test_ablation_grid_composes_once_for_all_ways_to_learn(tmp_path: Path) -> None:
    """What is found is what a whole run finds for each way; an embedding is cut as by an SVD."""
    cell = ablation_grid.Cell("tiny_world", kind="gated")
    measured = ablation_grid.measure(
        cell, TINY_WORLD, ablation_grid.BOTH, [0, 3], (1, 2), "32-true"
    )
    found = DataFrame(measured)
    assert len(found) == 3 * 2 * 2
    for way in ("network", "all", "embeddings"):
        options = [
            "fit",
            "--config",
            "configs/vocabulary_ablation_paper.yaml",
            "--model.seeds=[0, 3]",
            "--model.mapping=[reference, permuted]",
            f"--model.learn.train={way}",
            "--data.max_sources_per_target=1",
            "--model.network.kind=gated",
            "--model.compose.epochs=1",
            "--model.compose.batch_size=256",
            "--model.learn.epochs=2",
            f"--trainer.default_root_dir={tmp_path}",
            common.QUIET,
        ]
        whole = DataFrame(common.results_of(*options)["runs"])
        own = found[found["train"] == way]
        for share in ("generalized", "source_learned", "macro_generalized"):
            assert own[share].tolist() == pytest.approx(whole[share].tolist(), abs=0.02)
    (tmp_path / "cut").mkdir()
    ablation_grid.cut(TINY_WORLD, 5, tmp_path / "cut")
    table = read_token_embedding(LMConfig(str(TINY_WORLD))).weight.double().numpy()
    less = read_token_embedding(LMConfig(str(tmp_path / "cut"))).weight.double().numpy()
    middle = table - table.mean(0)
    *_, axes = np.linalg.svd(middle, full_matrices=False)
    distances = np.linalg.norm((table[:20, None] - table[None, :20]) @ axes[:5].T, axis=-1)
    assert np.linalg.norm(less[:20, None] - less[None, :20], axis=-1) == pytest.approx(
        distances, abs=1e-4
    )


def test_ablation_grid_goes_on_with_its_file(
    tmp_path: Path, rows: Rows, monkeypatch: pytest.MonkeyPatch
) -> None:
    shares, done, placed, trained = cycle([0.2, 0.6]), [], [], []

    def measure(cell: Any, _: Any, mappings: Any, seeds: list[int], *__: Any) -> list[Any]:
        done.append(cell)
        trained.append(mappings)
        return [
            {
                **asdict(cell),
                "dimensions": 4,
                "labels": "3 / 3",
                "train": way,
                "mapping": mapping,
                "seed": seed,
                "source_learned": 0.9,
                "generalized": next(shares),
                "macro_generalized": 0.5,
                "upper_bound": 0.3,
                "majority": 0.1,
                "nearest": 0.2,
                "macro_nearest": 0.4,
                "unrestricted": 0.35,
                "says_source": 0.15,
            }
            for way in ablation_grid.WAYS
            for mapping in mappings
            for seed in seeds
        ]

    monkeypatch.setattr(ablation_grid, "measure", measure)
    monkeypatch.setattr(ablation_grid.common, "place_tables", placed.append)
    output = str(tmp_path / "grid.csv")
    ablation_grid.main(("x/a",), str(tmp_path / "trial.csv"), 2)
    assert placed == [{}]  # documents keep their tables
    done.clear()
    placed.clear()
    monkeypatch.setattr(ablation_grid, "FILE", tmp_path / "grid.csv")
    ablation_grid.main(("x/a",), output, 2)
    assert len(done) == len(set(done)) > 5
    ablation_grid.main(("x/a",), output, 2)
    assert len(done) == len(set(done)) and placed[0] == placed[1]
    table = read_csv(output)
    lacks = (table["mapping"] == "permuted_targets") & (table["kind"] == "gated") & table["center"]
    table[~lacks].to_csv(output, index=False)
    done.clear()
    ablation_grid.main(("x/a",), output, 2)
    assert (done, trained[-1]) == (
        [ablation_grid.Cell("a", 0, 0, "gated", True)],
        ("letters", "permuted_targets"),
    )
    names = ["width", "per_target", "kind", "center", "mapping", "train", "seed", "epochs_factor"]
    again = read_csv(output)
    assert not again.duplicated(names).any() and len(again) == len(table)
    first, *_ = rows(placed[0]["ablation_readings"])
    # Two seeds with .2 and .6: the standard error is .2, times 12.7 of Student's t.
    assert first[:6] == ["a", "4", "3 / 3", "plain", "1x", "2"]
    assert first[6:9] == ["40 ± 254 / 40 ± 254"] * 3
    assert first[9:] == ["35% / 35% / 35%", "20% / 40%", "90%"]
    null = next(row for row in rows(placed[0]["ablation_nulls"]) if "–" in row)
    assert null[5:11] == ["network", "40 ± 254", "50 ± 0", "35 ± 0", "15 ± 0", "40 ± 254"]
    assert null[11:] == ["–", "40 ± 254", "30%", "10%", "20%", "40%"]


def test_leads_are_compared_seed_by_seed(rows: Rows) -> None:
    """Of two seeds: the standard error of .1 and .3 is .1, times 12.7 of Student's t."""
    shares = {
        ("plain", "reference"): (0.7, 0.5),
        ("plain", "permuted"): (0.2, 0.2),
        ("gated", "reference"): (0.9, 0.8),
        ("gated", "permuted"): (0.3, 0.2),
    }
    cell = {"lm": "a", "width": 0, "per_target": 1, "epochs_factor": 1, "train": "all"}
    table = [
        {
            **cell,
            "kind": kind,
            "center": False,
            "mapping": mapping,
            "seed": seed,
            "generalized": share,
        }
        for (kind, mapping), own in shares.items()
        for seed, share in enumerate(own)
    ]
    table += [{**row, "width": 256, "generalized": 0.0} for row in table]
    assert rows(ablation_grid.leads(DataFrame(table))) == [["a", "all", "40 ± 127", "20 ± 127"]]
