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


def test_processes_are_measured(tmp_path: Path) -> None:
    work = "x = bytes(2**26); print(sum(range(10**7)))"
    cost = common.cost_of([sys.executable, "-c", work])
    assert cost.peak_mib > 64 and cost.wall > cost.processor / 2 > 0
    errors = tmp_path / "errors"
    with pytest.raises(SystemExit, match="failed"):
        common.cost_of([sys.executable, "-c", "1 / 0"], errors)
    assert "ZeroDivisionError" in errors.read_text()


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


def test_every_run_is_planned_for_every_size() -> None:
    for size in run.SIZES:
        names = [one.name for one in run.plan(size, "texts.jsonl")]
        assert len(names) == len(set(names))
        assert {"probe", "paper_pairs", "token_geometry", "lora_X+1_to_X+2"} <= set(names)


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
    head, _, first, second, *_ = findings.findings_table(findings.read_lms(tmp_path)).splitlines()
    assert head.split("|")[2].strip() == lm
    assert [each.strip() for each in first.split("|")[2:4]] == [cell, "not run"]
    assert "not run" in second.split("|")[2]


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


def test_outcomes_are_judged_by_their_rules() -> None:
    runs = {
        "lora_city_to_country": outcomes(0.5, 0.01),
        "lora_X+1_to_X+2": outcomes(0.5, 0.1),
    }
    assert findings.generalizes(runs) == (True, "50%, random 1%")
    assert findings.hallucinates(runs) == (False, "50%, random 10%")
    assert findings.gradient(runs) == (False, "0.50, permuted 0.60")


@pytest.mark.nightly
def test_documents_have_the_tables_of_the_committed_runs() -> None:
    text = common.all_text()
    assert "<!-- findings: begin -->" in text
    made = findings.tables(tables.REAL_LMS, findings.load(tables.REAL_LMS))
    made |= repair.tables(tables.REAL_LMS)
    assert common.placed(text, made) == text


def test_a_failed_run_is_no_finding(tmp_path: Path) -> None:
    (tmp_path / "probe.json").write_text(json.dumps({"error": "no memory", "seconds": 3}))
    assert findings.read_runs(tmp_path) == {}


def test_table_of_the_vocabulary_ablation(tmp_path: Path, rows: Rows) -> None:
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
        _write(tmp_path / "lm", name, results)

    write_shares("ablation", [0.8, 0.4])
    write_shares("ablation_paper_0", [0.9])
    write_shares("ablation_paper_2", [0.7])
    shipped, paper, published = rows(tables.ablation_table(["lm", "absent"], tmp_path))
    start = ["lm", "8", "20 / 10", "2"]
    assert shipped == ["shipped", *start, "60% ± 28", "30% ± 14", "15% ± 7", "5%"]
    assert paper == ["paper", *start, "80% ± 14", "40% ± 7", "20% ± 4", "5%"]
    assert published[5:8] == ["97.7%", "22.7%", "36.7%"]


def test_the_peak_of_the_dimension_is_shown_with_that_of_shuffled_texts(
    tmp_path: Path, rows: Rows
) -> None:
    each = {"overlap": {"2": [0.5, 0.75]}, "cosine_mean": [0.1, 0.2, 0.3], "loss": 4.0}
    levels = [
        each | {"shuffle": 0, "dimension": {"2": [5.0, 9.0, 7.0]}},
        each | {"shuffle": 1, "dimension": {"2": [6.0, 11.5, 8.0]}},
    ]
    test = {"shuffle": 0, "n2": 2, "pearson": 0.5, "pearson_p": 0.01}
    numbers = {
        "n_prompts": 3, "layers": [1, 2, 3], "shuffles": levels,
        "dimension_loss": [test | {"layer": 2}, test | {"layer": 3, "pearson": 0.9}],
    }  # fmt: skip
    _write(tmp_path / "lm", "token_geometry", numbers)
    assert rows(tables.shuffling_table(["lm", "absent"], tmp_path)) == [
        ["lm", "0", "4.00", "2", "9.00", "0.75", "0.20", "0.30", "0.50 (p 0.0100)"],
        ["lm", "1", "4.00", "2", "11.50", "0.75", "0.20", "0.30", ""],
    ]
    table = tables.geometry_table(["lm", "absent"], tmp_path)
    assert rows(table) == [["lm", "3", "2", "1", "5.00", "2", "9.00 / 11.50", "3", "7.00"]]


def test_tables_of_the_feature_flow(tmp_path: Path, rows: Rows) -> None:
    cut = {"cut": "flow", "control": True, "n_features": 4, "fixed": 0.5, "target_only": None,
           "refitted": 0.25, "recall": 1.0}  # fmt: skip
    off = {"layer": 3, "method": "top-1", "n": 9, "matched_success": 0.25, "times_random": 5.0}
    best = {"n_answers": 2, "strength": 1.0, "behaviour": 0.5, "coherence": 0.5, "score": 0.25}
    numbers = {
        "deactivation_layers": [
            off | {"random_success": 0.05},
            off | {"layer": 4, "random_success": 0.0, "times_random": None},
        ],
        "relation": {
            "relation": "city->country",
            "cuts": [cut],
            "n_reference_pairs": 4,
            "n_other_pairs": 12,
            "shared_flow": 0.5,
            "shared_flow_permuted": 0.25,
        },
        "steering": {"single": best},
    }
    for name in ("feature_flow", "feature_flow_relation"):
        _write(tmp_path / "lm", name, numbers)
    table = tables.deactivation_table(["lm", "absent"], tmp_path)
    assert rows(table) == [
        ["lm", "3", "9", "25%, 5% (5.0 times)", "", ""],
        ["lm", "4", "9", "25%, 0%", "", ""],
    ]
    table = tables.flow_cut_table(["lm"], tmp_path)
    assert rows(table) == [
        ["lm", "city→country", "flow, control", "4", "0.50", "", "0.25", "1.00"]
    ]  # fmt: skip
    table = tables.flow_pair_table(["lm"], tmp_path)
    assert rows(table) == [["lm", "city→country", "4", "50%", "12", "25%"]]
    table = tables.steering_table(["lm"], tmp_path)
    assert rows(table) == [["lm", "single", "2", "1.000", "0.5000", "0.5000", "0.2500"]]


def test_quality_of_saes_is_averaged_over_layers(tmp_path: Path, rows: Rows) -> None:
    each = {"kind": "mlp_out", "n_features": 64, "l0": 2.0, "dead": 0.5, "loss_recovered": 0.5}
    points = [
        each | {"layer": 3, "explained_variance": 0.5},
        each | {"layer": 4, "explained_variance": 0.7},
        each | {"kind": "residual", "layer": 3, "explained_variance": 0.9},
        each | {"kind": "attention_out", "layer": 3, "explained_variance": 0.9},
    ]
    _write(tmp_path / "lm", "sparse_autoencoders", {"hook_points": points})
    table = rows(tables.sae_table(["lm"], tmp_path))
    assert [row[1] for row in table] == ["residual", "mlp out", "attention out"]
    assert table[1][2:5] == ["3–4", "64", "0.60 (0.50–0.70)"]


def part(hallucinated: float, in_context: float, right_before: float) -> dict[str, Any]:
    return {
        "n": 75, "source_learned": 1.0, "generalized": 1 - hallucinated,
        "hallucinated": hallucinated, "in_context": in_context,
        "controls": {"color": 0.25, "food": 0.5}, "right_before": right_before,
        "new_targets": {"n": 5, "hallucinated": hallucinated / 2},
    }  # fmt: skip


def test_the_table_shows_before_and_after(tmp_path: Path) -> None:
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
    (tmp_path / "some-lm" / "repair_source_0.json").write_text(json.dumps({"error": "no memory"}))
    _, _, first, second = repair.tables(tmp_path)["repair"].splitlines()
    cells = [cell.strip().replace("\\", "") for cell in first.split("|")[1:-1]]
    assert cells == [
        "some-lm", "edits", "0", "75 shown", "100% → 100%", "48% → 80%",
        "52% (41–63) → 20% (13–30)", "26% → 10% (5 edits)", "0% → 4%", "25% → 25%", "50% → 50%",
        "30% → 90%", "0.80 → 0.60", "0.80 → 0.60", "0.80 → 0.60", "40.0 → 41.0",
    ]  # fmt: skip
    assert "75 held out" in second


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


@pytest.mark.parametrize(
    ("phase", "trained"),
    [("compose", {"in", "out"}), ("learn", {"out"})],
)
def test_learning_with_one_layer(phase: str, trained: set[str]) -> None:
    """The other one is frozen when the new subjects are read, not before."""
    networks = torch.nn.ParameterDict({f"weight_{x}": torch.zeros(1) for x in ("in", "out")})
    batch = SimpleNamespace(begins=True, phase=phase)
    module = SimpleNamespace(networks=networks)
    permuted_ablation.LearnWith("out").on_train_batch_start(None, module, batch, 0)
    assert {name[7:] for name, p in networks.items() if p.requires_grad} == trained


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
