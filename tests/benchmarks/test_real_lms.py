"""The modules that run and sum up every study on pretrained LMs, on the embedded one."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import lincorr_lightning.lm
from benchmarks import common
from benchmarks.real_lms import findings, permuted_ablation, repair, ridge_precision, run, tables
from lincorr_lightning.cli import main
from lincorr_lightning.errors import LincorrError

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
    kinds = {
        tuple(option.partition("=")[0] for option in one.options): one.options
        for one in run.plan(run.SIZES[0], "texts.jsonl")
    }
    for options in kinds.values():
        with pytest.raises(SystemExit) as end:
            main([*options, "--print_config"])
        assert end.value.code in (0, None), options
        assert capsys.readouterr().out


def pair(source: str, target: str, r: float, control: float, q: float) -> dict[str, Any]:
    return {"source": source, "target": target, "label_mean": r, "control_label_mean": control,
            "q": q}  # fmt: skip


def _write(folder: Path, name: str, results: dict[str, Any]) -> None:
    folder.mkdir(exist_ok=True)
    (folder / f"{name}.json").write_text(json.dumps({"results": results}))


@pytest.mark.parametrize(
    ("r", "q", "cell"),
    [(0.9, 0.01, "holds: 0.90, control 0.30"), (0.9, 0.2, "FAILS: 0.90, control 0.30"),
     (0.2, 1e-9, "FAILS: 0.20, control 0.30")],
)  # fmt: skip
def test_a_finding_can_fail(tmp_path: Path, r: float, q: float, cell: str) -> None:
    lm = findings.LMS[0]
    _write(tmp_path / lm, "probe", {"pairs": [pair("city", "country", r, 0.3, q)]})
    head, _, *rows = findings.findings_table(findings.read_lms(tmp_path)).splitlines()
    assert head.split("|")[2].strip() == lm
    cells = {claim.strip(): [c.strip() for c in more] for _, claim, *more in
             (row.split("|") for row in rows)}  # fmt: skip
    assert cells[findings.R][:2] == [cell, "not run"]
    assert cells[findings.RIDGE][0] == cells[findings.PRECISE][0] == "not run"


def test_w_is_precise_if_its_intervals_lie_above_the_vocabulary_s() -> None:
    def scores(low: float) -> dict[str, Any]:
        return {
            **pair("city", "country", 0.8, 0.3, 0.0),
            "excess_over_unembedding": {"low": low}, "excess_over_random_labels": {"low": -low},
            "precision": {
                "influenced": {"1": 0.4}, "baselines": {"a": {"1": 0.1}, "b": {"1": 0.35}},
            },
            "baselines": {"random_source_labels": {"mean": 0.79}},
        }  # fmt: skip

    for lows, holds in (([0.1, 0.2, -0.1], True), ([0.1, -0.1, -0.2], False)):
        runs = {"relations": {"pairs": [scores(low) for low in lows]}}
        above = sum(low > 0 for low in lows)
        numbers = f"{above} of 3 relations; city→country 0.40, baseline 0.35"
        assert findings.precise(runs) == (holds, numbers)
        assert findings.above_random_words(runs)[0] is not holds


def test_edits_are_counted_by_reference(tmp_path: Path) -> None:
    """Three edits of two names of one country, one of another; "US" is right for three."""
    file = tmp_path / "outcomes.csv"
    file.write_text(
        "reference,outcome\nUS|USA,generalized\nUS|USA,hallucinated\nUS,hallucinated\n"
        "NA,generalized\n"
    )
    found = findings.by_reference(file)
    assert found["shares"] == (0.5, 0.75)
    assert found["macro"] == (pytest.approx((0.5 + 0 + 1) / 3), pytest.approx(2 / 3))
    assert findings.beats_constant({"lora_city_to_country": {"by_reference": found}}) == (
        False, "50%, constant 75%; by country 50%, 67%",
    )  # fmt: skip


def outcomes(generalized: float, random: float) -> dict[str, Any]:
    return {
        "generalized": generalized, "random": random, "gradient_correlation": 0.5,
        "gradients": {"city->country": {"permuted_gradient_correlation": 0.6}},
    }  # fmt: skip


def test_known_edits_are_those_whose_reference_leads_in_context() -> None:
    edited = SimpleNamespace(
        logits=lambda name: np.array([[2.0, 1.0], [2.0, 1.0], [1.0, 2.0], [1.0, 2.0]]),
        arrays={"reference": np.array([[True, False]] * 4)},
        failed=np.array([False, True, True, True]),
    )
    assert findings.known_generalize({"lora_forecasts": [edited]}) == (True, "50%, 0% otherwise")
    edited.failed = np.array([False, True, False, True])
    assert findings.known_generalize({"lora_forecasts": [edited]}) == (False, "50%, 50% otherwise")


def test_a_repair_is_judged_by_each_seed_and_what_else_it_changes() -> None:
    def seed(before: float, after: float, perplexity: float, **changed: Any) -> dict[str, Any]:
        same = {"source_learned": 1.0, "controls": {"color": 0.5}, "right_before": 0.0}
        stages = {
            "before": {"hallucinated": before, **same},
            "after": {"hallucinated": after, **same, **changed},
        }
        return {"held_out": stages, "perplexity": {"before": 10.0, "after": perplexity}}

    good, weak, costly = seed(0.4, 0.2, 10.2), seed(0.4, 0.25, 10.0), seed(0.4, 0.1, 10.5)
    judge = findings.repair_halves
    found = "40% → 20%; right without an edit 0%; perplexity +2.0%"
    assert judge({"repair_edits_1": good}) == (True, found)
    for changed in (
        {"source_learned": 0.97}, {"controls": {"color": 0.44}}, {"right_before": 0.3},
    ):  # fmt: skip
        assert not judge({"repair_edits_1": seed(0.4, 0.2, 10.2, **changed)})[0]
    assert not judge({"repair_edits_1": good, "repair_edits_2": weak})[0]
    assert not judge({"repair_edits_3": costly})[0]
    with pytest.raises(KeyError):
        judge({"repair_edits_0": good})


@pytest.mark.nightly
def test_documents_have_the_tables_of_the_committed_runs() -> None:
    text = common.all_text()
    assert "<!-- findings: begin -->" in text
    made = findings.tables(tables.REAL_LMS, findings.load(tables.REAL_LMS))
    made |= repair.tables(tables.REAL_LMS)
    assert common.placed(text, made) == text


def test_outcomes_are_judged_by_their_rules() -> None:
    runs = {
        "lora_city_to_country": outcomes(0.5, 0.01),
        "lora_X+1_to_X+2": outcomes(0.5, 0.1),
    }
    assert findings.generalizes(runs) == (True, "50%, random 1%")
    assert findings.hallucinates(runs) == (False, "50%, random 10%")
    assert findings.gradient(runs) == (False, "0.50, permuted 0.60")


def test_the_ratio_counts_edits_of_all_seeds(tmp_path: Path) -> None:
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


def test_every_variant_is_a_command(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    runs = list(repair.plan("some-lm", str(tmp_path), (0, 1)))
    assert len({one.name for one in runs}) == len(runs) == 2 * len(repair.VARIANTS)
    for one in runs[: len(repair.VARIANTS)]:
        with pytest.raises(SystemExit) as exit_info:
            main([*one.options, "--print_config"])
        assert exit_info.value.code == 0
        assert "RepairDataModule" in capsys.readouterr().out


def test_permuted_ablation(capsys: pytest.CaptureFixture[str], tmp_path: Path, rows: Rows) -> None:
    output = tmp_path / "numbers.json"
    chosen = ("learn with the second layer", "80 labels")
    short = ("--model.compose.epochs=2", "--model.learn.epochs=2", "--data.n_paired=64")
    permuted_ablation.main(only=chosen, n_seeds=1, output=str(output), options=short)
    table = rows(capsys.readouterr().out)[-2:]
    numbers = json.loads(output.read_text())
    assert [row[0] for row in table] == list(numbers) == list(chosen)
    assert table[0][1].startswith("20 / ") and table[1][1].startswith("80 / ")
    # What is there is not measured again.
    output.write_text(json.dumps(numbers | {"128 paired subjects": numbers["80 labels"]}))
    more = (*chosen, "128 paired subjects")
    permuted_ablation.main(only=more, n_seeds=1, output=str(output))
    assert {row[0] for row in rows(capsys.readouterr().out)} == set(more)


def test_ridge_precision_finds_a_known_map(tmp_path: Path) -> None:
    """Of a linear relation with little noise, W pairs all labels; of permuted subjects, few."""
    random = torch.Generator().manual_seed(0)
    x = torch.randn(1000, 8, generator=random)
    y = x.roll(1, 1) + 0.01 * torch.randn(1000, 8, generator=random)
    reference = torch.eye(8, dtype=torch.bool).roll(1, 0)
    found = ridge_precision.measure(x, y, reference, 1000)
    assert found["path"][0]["influenced"]["1"] == 1 and found["path"][0]["r"] > 0.99
    assert found["path"][0]["permuted"]["influenced"]["1"] < 0.6
    (low, high), *_ = (bounds["influenced"] for bounds in
                       ridge_precision.intervals(x, y, reference, 3))  # fmt: skip
    assert low == high == 1


def test_logits_are_read_once(tmp_path: Path) -> None:
    model = lincorr_lightning.LanguageModel.from_pretrained("tiny-world")
    names = ["city", "country"]
    first = ridge_precision.read_logits(model, names, 12, tmp_path, seed=0)
    assert {name: len(logits) for name, logits in first.items()} == dict.fromkeys(names, 12)
    prompts = [f"{x} lives in the city of" for x in lincorr_lightning.lm.sample_subjects(
        model.tokenizer, 12, seed=0)]  # fmt: skip
    tokens = lincorr_lightning.knowledge.build_domain(
        lincorr_lightning.Catalogue.load()["city"], model.tokenizer
    ).token_ids
    torch.testing.assert_close(first["city"], model.domain_logits(prompts, tokens).float())
    model.joint_logits = None  # type: ignore[method-assign, assignment]
    again = ridge_precision.read_logits(model, names, 12, tmp_path, seed=0)
    assert torch.equal(first["city"], again["city"])
    with pytest.raises(SystemExit, match="logits of another LM"):
        ridge_precision.read_logits(model, names, 12, tmp_path, seed=1)
