"""The scripts that run and sum up every study on pretrained LMs, on the embedded one."""

import importlib
import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

import lincorr_lightning.lm

Script = Callable[[str], ModuleType]
TINY_WORLD = Path(lincorr_lightning.lm.__file__).parent / "tiny_world"
OWN = ("fit", "--config", "configs/linear_probe.yaml", "--data.n_subjects=60")


@pytest.fixture
def real_lms(script: Script) -> ModuleType:
    return script("real_lms")


@pytest.fixture
def findings(script: Script) -> ModuleType:
    return script("real_lm_findings")


def test_a_run_leaves_its_numbers_and_figures(real_lms: ModuleType, tmp_path: Path) -> None:
    options = (*OWN, "--model.knowledge=[city, country]")
    run = real_lms.Run("probe", options, ("n_fit", "pairs"), ("nulls",))
    folder = tmp_path / "lm"
    real_lms.execute(run, TINY_WORLD, folder)
    content = json.loads((folder / "probe.json").read_text())
    assert content["results"]["n_fit"] == 30
    assert {p["source"] for p in content["results"]["pairs"]} == {"city", "country"}
    assert content["results"]["lm"]["name_or_path"] == "tiny_world"
    assert content["seconds"] > 0 and content["peak_gib"] > 0.1
    assert (folder / "probe_nulls.png").stat().st_size > 10_000
    assert not [option for option in content["options"] if str(tmp_path.parent) in option]


def test_a_run_that_fails_leaves_its_error(real_lms: ModuleType, tmp_path: Path) -> None:
    run = real_lms.Run("probe", (*OWN, "--model.knowledge=[cities]"), ())
    real_lms.execute(run, TINY_WORLD, tmp_path)
    content = json.loads((tmp_path / "probe.json").read_text())
    assert "cities" in content["error"] and "results" not in content


def test_every_run_is_planned_for_every_size(real_lms: ModuleType) -> None:
    for size in real_lms.SIZES:
        names = [run.name for run in real_lms.plan(size, "texts.jsonl")]
        assert len(names) == len(set(names))
        assert {"probe", "paper_pairs", "token_geometry", "lora_X+1_to_X+2"} <= set(names)


def pair(source: str, target: str, r: float, control: float, q: float) -> dict[str, Any]:
    return {"source": source, "target": target, "label_mean": r, "control_label_mean": control,
            "q": q}  # fmt: skip


def write(folder: Path, name: str, results: dict[str, Any]) -> None:
    folder.mkdir(exist_ok=True)
    (folder / f"{name}.json").write_text(json.dumps({"results": results}))


@pytest.mark.parametrize(
    ("r", "q", "cell"),
    [(0.9, 0.01, "holds: 0.90, control 0.30"), (0.9, 0.2, "FAILS: 0.90, control 0.30"),
     (0.2, 1e-9, "FAILS: 0.20, control 0.30")],
)  # fmt: skip
def test_a_finding_can_fail(
    findings: ModuleType, tmp_path: Path, r: float, q: float, cell: str
) -> None:
    lm = findings.LMS[0]
    write(tmp_path / lm, "probe", {"pairs": [pair("city", "country", r, 0.3, q)]})
    head, _, first, second, *_ = findings.findings_table(findings.read_lms(tmp_path)).splitlines()
    assert head.split("|")[2].strip() == lm
    assert [each.strip() for each in first.split("|")[2:4]] == [cell, "not run"]
    assert "not run" in second.split("|")[2]


def outcomes(generalized: float, random: float) -> dict[str, Any]:
    return {
        "generalized": generalized, "random": random, "gradient_correlation": 0.5,
        "gradients": {"city->country": {"permuted_gradient_correlation": 0.6}},
    }  # fmt: skip


def test_known_edits_are_those_whose_reference_leads_in_context(findings: ModuleType) -> None:
    run = SimpleNamespace(
        logits=lambda name: np.array([[2.0, 1.0], [2.0, 1.0], [1.0, 2.0], [1.0, 2.0]]),
        arrays={"reference": np.array([[True, False]] * 4)},
        failed=np.array([False, True, True, True]),
    )
    assert findings.known_generalize({"lora_forecasts": [run]}) == (True, "50%, 0% otherwise")
    run.failed = np.array([False, True, False, True])
    assert findings.known_generalize({"lora_forecasts": [run]}) == (False, "50%, 50% otherwise")


def test_a_repair_is_judged_by_each_seed_and_what_else_it_changes(findings: ModuleType) -> None:
    def run(before: float, after: float, perplexity: float, **changed: Any) -> dict[str, Any]:
        same = {"source_learned": 1.0, "controls": {"color": 0.5}, "right_before": 0.0}
        stages = {
            "before": {"hallucinated": before, **same},
            "after": {"hallucinated": after, **same, **changed},
        }
        return {"held_out": stages, "perplexity": {"before": 10.0, "after": perplexity}}

    good, weak, costly = run(0.4, 0.2, 10.2), run(0.4, 0.25, 10.0), run(0.4, 0.1, 10.5)
    judge = findings.repair_halves
    found = "40% → 20%; right without an edit 0%; perplexity +2.0%"
    assert judge({"repair_edits_1": good}) == (True, found)
    for changed in (
        {"source_learned": 0.97}, {"controls": {"color": 0.44}}, {"right_before": 0.3},
    ):  # fmt: skip
        assert not judge({"repair_edits_1": run(0.4, 0.2, 10.2, **changed)})[0]
    assert not judge({"repair_edits_1": good, "repair_edits_2": weak})[0]
    assert not judge({"repair_edits_3": costly})[0]
    with pytest.raises(KeyError):
        judge({"repair_edits_0": good})


def test_outcomes_are_judged_by_their_rules(findings: ModuleType) -> None:
    runs = {
        "lora_city_to_country": outcomes(0.5, 0.01),
        "lora_X+1_to_X+2": outcomes(0.5, 0.1),
    }
    assert findings.generalizes(runs) == (True, "50%, random 1%")
    assert findings.hallucinates(runs) == (False, "50%, random 10%")
    assert findings.gradient(runs) == (False, "0.50, permuted 0.60")


def test_documents_have_the_tables_of_the_committed_runs(findings: ModuleType) -> None:
    documents = importlib.import_module("documents")
    text = documents.all_text()
    assert "<!-- findings: begin -->" in text
    runs = findings.load(findings.RESULTS)
    assert documents.placed(text, findings.tables(findings.RESULTS, runs)) == text


def test_a_failed_run_is_no_finding(findings: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "probe.json").write_text(json.dumps({"error": "no memory", "seconds": 3}))
    assert findings.read_runs(tmp_path) == {}


def test_table_of_the_vocabulary_ablation(
    tmp_path: Path, findings: ModuleType, rows: Callable[[str], list[list[str]]]
) -> None:
    """Seeds of one run and of several files; what is not composed does not count."""

    def write_shares(name: str, shares: list[float]) -> None:
        mappings = ("reference", "permuted", "letters")
        runs = [
            {"mapping": mapping, "generalized": share / 2**i, "composed": True}
            for share in shares
            for i, mapping in enumerate(mappings)
        ]
        runs += [{**run, "generalized": 0.0, "composed": False} for run in runs]
        results = {
            "mappings": [{"mapping": "reference", "random": 0.05}], "runs": runs,
            "embedding": {"shape": [100, 8]}, "n_source_labels": 20, "n_target_labels": 10,
        }  # fmt: skip
        write(tmp_path / "lm", name, results)

    write_shares("ablation", [0.8, 0.4])
    write_shares("ablation_paper_0", [0.9])
    write_shares("ablation_paper_2", [0.7])
    shipped, paper, published = rows(findings.ablation_table(["lm", "absent"], tmp_path))
    start = ["lm", "8", "20 / 10", "2"]
    assert shipped == ["shipped", *start, "60% ± 28", "30% ± 14", "15% ± 7", "5%"]
    assert paper == ["paper", *start, "80% ± 14", "40% ± 7", "20% ± 4", "5%"]
    assert published[5:8] == ["97.7%", "22.7%", "36.7%"]
