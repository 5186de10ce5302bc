"""The other scripts, on sizes that take seconds."""

import json
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
import scipy.linalg
import torch

from lincorr_lightning.ablation.networks import NetworkSettings, StackedNetworks
from lincorr_lightning.functional import LeastSquares
from lincorr_lightning.knowledge import Catalogue
from lincorr_lightning.lm.vocabulary import sample_up_to

Script = Callable[[str], ModuleType]
Rows = Callable[[str], list[list[str]]]


def test_solve(capsys: pytest.CaptureFixture[str], script: Script, rows: Rows) -> None:
    script("solve").main(n_source=12, n_targets=(5, 9), n_subjects=200, repeats=1)
    table = rows(capsys.readouterr().out)
    assert [row[0] for row in table] == 3 * ["12 to 5"] + 3 * ["12 to 9"]
    assert all(float(row[4]) < 1e-10 for row in table)


@pytest.mark.slow
def test_processes(capsys: pytest.CaptureFixture[str], script: Script, rows: Rows) -> None:
    script("processes").main(n_subjects=200, knowledge="[city, country]")
    one, two = rows(capsys.readouterr().out)
    assert (one[0], two[0]) == ("1", "2")
    assert float(two[6]) < 1e-6


@pytest.mark.slow
def test_memory_of_studies(rows: Rows) -> None:
    # From a small process: a child's peak begins with what its parent held as it was forked.
    path = str(Path(__file__).resolve().parents[2] / "benchmarks" / "study_memory.py")
    call = (
        f"import runpy; runpy.run_path({path!r})['main'](['linear_probe'], "
        "['--data.n_subjects=200', '--model.knowledge=[city, country]'])"
    )
    done = subprocess.run([sys.executable, "-c", call], capture_output=True, text=True, check=True)
    libraries, probe = rows(done.stdout)
    assert 100 < int(libraries[1].split()[0]) < int(probe[1].split()[0])


def test_startup(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, script: Script, rows: Rows
) -> None:
    output = tmp_path / "startup.json"
    here = str(Path(__file__).resolve().parents[2])
    only = ("lincorr --version", "lincorr --help")
    script("startup").main(n=3, before=here, only=only, output=str(output))
    numbers = json.loads(output.read_text())
    table = rows(capsys.readouterr().out)
    assert len(table) == len(only)
    for name, *cells, ratio in table:
        before, after = numbers[name]["before"], numbers[name]["after"]
        runs = [before["processor"], before["wall"], after["processor"], after["wall"]]
        assert cells == [f"{sorted(seconds)[1]:.2f} s" for seconds in runs]
        ratios = [a / b for a, b in zip(after["processor"], before["processor"], strict=True)]
        assert ratio == f"{sorted(ratios)[1]:.2f}"


def test_the_main_job_is_stopped_at_its_first_batch(script: Script, tmp_path: Path) -> None:
    startup = script("startup")
    times = startup.Times()
    command = startup.COMMANDS["main job, to its first batch"]
    kept = [argument.replace("{runs}", str(tmp_path)) for argument in command]
    times.add([*kept, "--data.n_subjects=100"], startup.HERE.parent)
    assert len(times.processor) == 1
    assert list(tmp_path.rglob("config.yaml")) and not list(tmp_path.rglob("results.json"))


def test_sampler(script: Script) -> None:
    """A sample counts with the time since the last one, within C code as well."""

    def python_code(seconds: float) -> None:
        end = time.process_time() + seconds
        while time.process_time() < end:
            pass

    def c_code(seconds: float) -> None:
        end = time.process_time() + seconds
        while time.process_time() < end:
            sum(range(2_000_000))

    sampler = script("sampler").Sampler()
    sampler.start()
    begin = time.process_time()
    python_code(0.3)
    middle = time.process_time()
    c_code(0.6)
    end = time.process_time()
    sampler.stop()

    def spent(function: Callable[..., None]) -> float:
        place = (__file__, function.__name__)
        return sum(s for stack, s in sampler.seconds.items() if place in stack)

    assert spent(python_code) == pytest.approx(middle - begin, abs=0.05)
    assert spent(c_code) == pytest.approx(end - middle, abs=0.05)


def test_parts_of_a_profile(script: Script) -> None:
    profile = script("profile_studies")

    linear = ("/any/torch/nn/modules/linear.py", "forward")
    llama = ("/any/transformers/models/llama/modeling_llama.py", "forward")
    head = ("/any/lincorr_lightning/lm/head.py", "_rows_product")
    backward = ("/any/torch/autograd/graph.py", "_engine_run_backward")
    callback = ("/any/callbacks/formation.py", "on_train_end")
    loop = ("/any/lightning/pytorch/loops/fit_loop.py", "advance")
    imports = ("<frozen importlib._bootstrap>", "_find_and_load")
    for stack, part in (
        ((linear, llama, callback, loop), profile.LM),
        ((linear, head, llama, loop), "head rows"),
        ((backward, loop), profile.BACKWARD),
        ((callback, loop), "callbacks"),
        ((loop,), "Lightning"),
        ((llama, imports, loop), "imports"),
        ((linear,), "other"),
        ((), "imports"),
    ):
        assert profile.part_of(stack) == part


@pytest.mark.slow
def test_profile_of_studies(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, script: Script, rows: Rows
) -> None:
    output = tmp_path / "profile.json"
    options = ("--model.knowledge=[city,country]", "--trainer.enable_progress_bar=false")
    script("profile_studies").main(
        "tiny-world", n_subjects=100, only=("linear probe",), options=options, output=str(output)
    )
    total, *shares = rows(capsys.readouterr().out)
    numbers = json.loads(output.read_text())["linear probe"]
    assert total == ["processor time", f"{sum(numbers['seconds'].values()):.0f} s"]
    listed = {part: float(share.rstrip("%")) for part, share in shares if share}
    assert sum(listed.values()) == pytest.approx(100, abs=1)
    assert {"LM, bare", "imports", "draw"} <= set(listed)
    # At least a token of each prompt: of two kinds of knowledge, and of the control.
    assert numbers["tokens"] > 3 * 100


@pytest.mark.slow
def test_profile_of_a_flow_through_trained_saes(tmp_path: Path, script: Script) -> None:
    """The LM is read without gradients: backward passes are those of the SAEs."""
    output = tmp_path / "profile.json"
    script("profile_studies").main(
        "tiny-world", n_subjects=40, layers=(1, 2), output=str(output),
        only=("sparse autoencoders", "feature flow"),
        options=("--trainer.enable_progress_bar=false",),
    )  # fmt: skip
    saes, flow = json.loads(output.read_text()).values()
    assert saes["seconds"]["networks"] > 0 and "backward" not in saes["seconds"]
    assert flow["seconds"]["statistics"] > 0


@pytest.mark.slow
def test_watching(
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    script: Script,
    rows: Rows,
) -> None:
    monkeypatch.chdir(tmp_path)
    script("watching").main(steps=4, repeats=1)
    table = rows(capsys.readouterr().out)
    assert len(table) == 6
    assert float(table[0][2].removesuffix("x")) == 1
    bare = float(table[0][1].split()[0])
    for row in table:
        # A step is printed to 0.1 ms.
        ratio = float(row[1].split()[0]) / bare
        assert float(row[2].removesuffix("x")) == pytest.approx(ratio, rel=0.1 / bare, abs=0.01)


def test_stacked_edits(capsys: pytest.CaptureFixture[str], script: Script, rows: Rows) -> None:
    script("stacked_edits").main(side_by_side=(1, 4), n_edits=4, steps=2, rank=2, repeats=1)
    table = rows(capsys.readouterr().out)
    assert [row[0] for row in table] == ["one at a time, peft", "1 side by side", "4 side by side"]
    assert all(float(row[4]) < 1e-3 for row in table[1:])


def test_parts_of_the_gpu_script(tmp_path: Path, script: Script) -> None:
    gpu = script("gpu")
    names = [part.name for part in gpu.parts("tiny-world", "cuda", tmp_path)]
    assert {"probe: CPU", "probe: ddp", "probe: fsdp", "the whole paper"} <= set(names)
    done = gpu.execute(gpu.Part("fine", ("-c", "print('text'); print('| 1 |')")), 60)
    assert done["tables"] == ["| 1 |"]
    assert "error" not in done
    assert gpu.execute(gpu.Part("bad", ("-c", "1/0")), 60)["error"].startswith("ZeroDivisionError")
    late = gpu.execute(gpu.Part("late", ("-c", "while True: pass")), 0.5)
    assert late["error"] == "not finished after 0 s"
    for name, r in (("one", 0.5), ("other", 0.75)):
        run = tmp_path / name / "version_0"
        run.mkdir(parents=True)
        content = {"pairs": [{"label_mean": r, "n_labels": 3}], "seconds": r}
        (run / "results.json").write_text(json.dumps(content))
    assert gpu.difference(tmp_path / "one", tmp_path / "other") == 0.25


def test_growth(script: Script) -> None:
    growth = script("growth")
    size = growth.Size(prompts=2, subjects=6, labels=5, layers=1, width=64)
    cost = growth.measure(size, repeats=1)
    lm = growth.make_lm(size)
    prompts = growth.prompts_of(2, sample_up_to(lm.tokenizer, 6, seed=0))
    # What two prompts of a subject have in common is read once.
    expected = 0
    for one, other in zip(*map(lm.rows, prompts), strict=True):
        shared = next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b))
        expected += len(one) + len(other) - shared
    assert cost.tokens == expected
    head = size.width * len(lm.tokenizer)
    layers = 4 * size.width**2 + 3 * size.width * 3 * size.width + 2 * size.width
    assert cost.parameters == head + layers + size.width


def test_published_method(capsys: pytest.CaptureFixture[str], script: Script, rows: Rows) -> None:
    script("published_method").main(n_subjects=120, batch=60)
    text = capsys.readouterr().out
    (difference,) = re.findall(r"predictions differ by (\S+)", text)
    assert 0 < float(difference) < 1e-3
    logits, fit, total = rows(text)
    for column in (1, 2):
        parts = [float(row[column].split()[0]) for row in (logits, fit, total)]
        assert parts[0] + parts[1] == pytest.approx(parts[2], abs=2e-3)
    assert float(total[1].split()[0]) > float(total[2].split()[0]) > 0


def test_all_pairs(capsys: pytest.CaptureFixture[str], script: Script, rows: Rows) -> None:
    script("all_pairs").main(n_fit=50, scale=0.03)
    text = capsys.readouterr().out
    names = [name for name, _ in catalogue_sizes()]
    sizes = [max(2, round(0.03 * n)) for _, n in catalogue_sizes()]
    n_pairs = len(names) * (len(names) - 1)
    assert f"{len(names)} kinds of knowledge, {sum(sizes):,} labels, {n_pairs:,} pairs" in text
    measured = [float(s) for s in re.findall(r"\d+ x \d+: ([\d.]+) s", text)]
    assert len(measured) == 3
    published, ours = rows(text)
    # Seconds are rounded to a tenth in the text.
    extrapolated = float(published[1].replace(",", ""))
    assert extrapolated == pytest.approx(sum(measured) / 3 * n_pairs, abs=0.05 * n_pairs + 1)
    assert 0 < float(ours[2].split()[0]) < 16


def catalogue_sizes() -> list[tuple[str, int]]:
    return [(each.name, len(each.answers)) for each in Catalogue.load().select(["all"])]


def test_all_pairs_are_solved(script: Script, monkeypatch: pytest.MonkeyPatch) -> None:
    """The maps against scipy's, on statistics of four kinds of knowledge."""
    module = script("all_pairs")
    sizes = [3, 2, 4, 5]
    scatter = module.statistics(sum(sizes), seed=1)
    weights = []

    class Recorded(LeastSquares):
        def weight(self, ridge: float | torch.Tensor) -> torch.Tensor:
            weights.append(super().weight(ridge))
            return weights[-1]

    monkeypatch.setattr(module, "LeastSquares", Recorded)
    assert module.solve_all(scatter, torch.zeros(sum(sizes), dtype=torch.float64), sizes) == 12
    start = 0
    for size, weight in zip(sizes, weights, strict=True):
        source = slice(start, start + size)
        expected = scipy.linalg.solve(scatter[source, source].numpy(), scatter[source].numpy()).T
        np.testing.assert_allclose(weight.numpy(), expected, atol=1e-9)
        start += size


def test_feature_matching(capsys: pytest.CaptureFixture[str], script: Script, rows: Rows) -> None:
    script("feature_matching").main(
        n_features=2048, width=256, n_layers=4, ks=(1, 5), threads=1, repeats=1
    )
    bare, *matched = rows(capsys.readouterr().out)
    assert [row[0] for row in (bare, *matched)] == ["bare products", "top-1", "top-5"]
    assert bare[2] == bare[4] == "1.00"
    for row in (bare, *matched):
        # Three predecessors were timed; of four layers, the first has two. Rounding: 0.05 and 0.5.
        assert float(row[6]) == pytest.approx(float(row[1]) * 11 / 3, abs=0.05 * 11 / 3 + 0.5)


FAKE_DADAPY = """
import numpy as np
from scipy.optimize import minimize_scalar
from scipy.spatial.distance import cdist

class Data:
    def __init__(self, coordinates, maxk=None, n_jobs=1):
        distances = cdist(coordinates, coordinates)
        self.dist_indices = np.argsort(distances, axis=1, kind="stable")
        self.distances = np.sort(distances, axis=1)

    def remove_identical_points(self):
        pass

    def compute_distances(self):
        pass

    def return_id_scaling_gride(self, range_max):
        ids = []
        for n2 in 2 ** np.arange(1, int(np.log2(range_max)) + 1):
            mu, n1 = self.distances[:, n2] / self.distances[:, n2 // 2], n2 // 2
            def loss(d):
                likelihood = (1 - 1 / len(mu)) * np.log(d) + (n2 - n1 - 1) * np.log(mu**d - 1)
                return -np.sum(likelihood - ((n2 - 1) * d + 1) * np.log(mu))
            ids.append(minimize_scalar(loss, bounds=(0.01, 100), method="bounded").x)
        return np.array(ids), None, None
"""


def test_token_geometry(
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    script: Script,
    rows: Rows,
) -> None:
    """Beside a stand-in for DADApy, which estimates dimensions and overlap the naive way."""
    (tmp_path / "dadapy.py").write_text(FAKE_DADAPY, encoding="utf-8")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    script("token_geometry").main(
        n_layers=3, n_tokens=128, width=32, range_scalings=(4, 8), ks=(1, 2), threads=1, repeats=1,
        dadapy=sys.executable, dadapy_layers=3,
    )  # fmt: skip
    text = capsys.readouterr().out
    (far,) = re.findall(r"ID differs from DADApy's by at most (\S+) of it", text)
    assert float(far) < 1e-3
    assert "overlap is equal to the naive count" in text
    table = {row[0]: row for row in rows(text)}
    assert list(table) == [
        "bare products", "nearest tokens", "intrinsic dimension", "overlap", "all three", "DADApy",
        "naive overlap", "DADApy, neighbors shared",
    ]  # fmt: skip
    parts = [float(table[name][1]) for name in ("nearest tokens", "intrinsic dimension", "overlap")]
    assert float(table["all three"][1]) == pytest.approx(sum(parts), abs=0.021)


@pytest.mark.slow
def test_generalization_over_seeds(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, script: Script, rows: Rows
) -> None:
    script("generalization").main(
        n_edits=4,
        relations=("city->country",),
        seeds=(0, 1),
        learning_rate=2e-3,
        forecast=False,
        output=str(tmp_path),
        options=("--model.steps_per_edit=2",),
    )
    ((_, learned, generalized, *_),) = rows(capsys.readouterr().out)
    runs = [json.loads(p.read_text()) for p in sorted(tmp_path.glob("*/*/results.json"))]
    assert {run["settings"]["learning_rate"] for run in runs} == {2e-3}
    for cell, key in ((learned, "source_learned"), (generalized, "generalized")):
        shares = [run[key] for run in runs]
        assert cell == f"{statistics.mean(shares):.0%} ± {statistics.stdev(shares):.0%}"


def test_permuted_ablation(
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    script: Script,
    rows: Rows,
) -> None:
    permuted = script("permuted_ablation")
    output = tmp_path / "numbers.json"
    chosen = ("all labels", "learn with the second layer")
    short = ("--model.compose.epochs=2", "--model.learn.epochs=2", "--data.n_paired=64")
    permuted.main(only=chosen, n_seeds=1, output=str(output), options=short)
    table = rows(capsys.readouterr().out)[-2:]
    numbers = json.loads(output.read_text())
    assert [row[0] for row in table] == list(numbers) == list(chosen)
    assert (table[0][1], table[1][1]) == ("87 / 22", "20 / 20")
    # What is there is not measured again.
    output.write_text(json.dumps(numbers | {"not centered": numbers["all labels"]}))
    permuted.main(only=(*chosen, "not centered"), n_seeds=1, output=str(output))
    assert [row[0] for row in rows(capsys.readouterr().out)] == [*chosen, "not centered"]


def test_learning_with_one_layer(script: Script) -> None:
    """The other one is frozen when the new subjects are read, not before."""
    callback = script("permuted_ablation").LearnWith("out")
    networks = StackedNetworks(2, 4, NetworkSettings())
    for phase, trained in (
        ("compose", {"weight_in", "bias_in", "weight_out", "bias_out"}),
        ("learn", {"weight_out", "bias_out"}),
    ):
        batch = SimpleNamespace(begins=True, phase=phase)
        callback.on_train_batch_start(None, SimpleNamespace(networks=networks), batch, 0)
        left = {name for name, p in networks.named_parameters() if p.requires_grad}
        assert left == trained
