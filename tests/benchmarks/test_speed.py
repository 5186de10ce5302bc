"""The modules that measure time and memory, on sizes that take seconds."""

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import scipy.linalg
import torch

from benchmarks.speed import (
    all_pairs,
    gpu,
    growth,
    half_precision,
    processes,
    published_method,
    reading,
    stacked_edits,
    token_geometry,
)
from lincorr_lightning.functional import LeastSquares
from lincorr_lightning.lm import sample_up_to

Rows = Callable[[str], list[list[str]]]


@pytest.mark.nightly
def test_processes(capsys: pytest.CaptureFixture[str], rows: Rows) -> None:
    processes.main(n_subjects=200, knowledge="[city, country]")
    one, two = rows(capsys.readouterr().out)
    assert (one[0], two[0]) == ("1", "2")
    assert float(two[6]) < 1e-6


def test_stacked_edits(capsys: pytest.CaptureFixture[str], rows: Rows) -> None:
    stacked_edits.main(side_by_side=(1, 4), n_edits=4, steps=2, rank=2, repeats=1)
    table = rows(capsys.readouterr().out)
    assert [row[0] for row in table] == ["one at a time, peft", "1 side by side", "4 side by side"]
    assert all(float(row[4]) < 1e-3 for row in table[1:])


def test_parts_of_the_gpu_script(tmp_path: Path) -> None:
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


def test_growth() -> None:
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


def test_published_method(capsys: pytest.CaptureFixture[str], rows: Rows) -> None:
    published_method.main(n_subjects=120, batch=60)
    text = capsys.readouterr().out
    (difference,) = re.findall(r"predictions differ by (\S+)", text)
    assert 0 < float(difference) < 1e-3
    logits, fit, total = rows(text)
    for column in (1, 2):
        parts = [float(row[column].split()[0]) for row in (logits, fit, total)]
        assert parts[0] + parts[1] == pytest.approx(parts[2], abs=2e-3)
    assert float(total[1].split()[0]) > float(total[2].split()[0]) > 0


def test_all_pairs_are_solved(monkeypatch: pytest.MonkeyPatch) -> None:
    """The maps against scipy's, on statistics of four kinds of knowledge."""
    sizes = [3, 2, 4, 5]
    scatter = all_pairs.statistics(sum(sizes), seed=1)
    weights = []

    class Recorded(LeastSquares):
        def weight(self, ridge: float | torch.Tensor) -> torch.Tensor:
            weights.append(super().weight(ridge))
            return weights[-1]

    monkeypatch.setattr(all_pairs, "LeastSquares", Recorded)
    assert all_pairs.solve_all(scatter, torch.zeros(sum(sizes), dtype=torch.float64), sizes) == 12
    start = 0
    for size, weight in zip(sizes, weights, strict=True):
        source = slice(start, start + size)
        expected = scipy.linalg.solve(scatter[source, source].numpy(), scatter[source].numpy()).T
        np.testing.assert_allclose(weight.numpy(), expected, atol=1e-9)
        start += size


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
    rows: Rows,
) -> None:
    """Beside a stand-in for DADApy, which estimates dimensions and overlap the naive way."""
    (tmp_path / "dadapy.py").write_text(FAKE_DADAPY, encoding="utf-8")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    token_geometry.main(
        n_layers=3, n_tokens=128, width=32, range_scalings=(4, 8), ks=(1, 2), threads=1, repeats=1,
        dadapy=sys.executable, dadapy_layers=3,
    )  # fmt: skip
    text = capsys.readouterr().out
    (far,) = re.findall(r"ID differs from DADApy's by at most (\S+) of it", text)
    assert float(far) < 1e-3
    assert "overlap is equal to the naive count" in text
    table = {row[0]: row for row in rows(text)}
    assert list(table) == [
        "bare products", "ours", "DADApy", "naive overlap", "DADApy, neighbors shared",
    ]  # fmt: skip
    assert table["bare products"][2] == table["ours"][3] == "1.00"


def test_bare_products_are_those_of_the_linear_layers() -> None:
    lm = reading.make_lm(None, "small", "tiny-world", "float32", "cpu")
    weights = reading.weights_of(lm.model)
    assert len(weights) == 2 * 7
    counted = sum(p.numel() for p in lm.model.model.layers.parameters() if p.dim() == 2)
    assert sum(weight.numel() for weight in weights) == counted
    reading.bare_products(weights, [(2, 5), (1, 3)])()


def test_half_precision(capsys: pytest.CaptureFixture[str], rows: Rows) -> None:
    half_precision.main(pairs=["city->country"], ridges=[100.0], n_subjects=400)
    exact, bfloat16, float16 = rows(capsys.readouterr().out)
    assert [row[1] for row in (exact, bfloat16, float16)] == ["float32", "bfloat16", "float16"]
    assert float(exact[2]) == float(exact[5]) == 0
    assert 0 < float(float16[2]) < float(bfloat16[2]) < 0.03
    assert 0 < float(float16[5]) < float(bfloat16[5]) < 0.03
    assert float(bfloat16[4]) == pytest.approx(float(exact[4]), abs=5e-3)


@pytest.mark.parametrize("shape", ["", "small"])
def test_reading(capsys: pytest.CaptureFixture[str], rows: Rows, small_lm: str, shape: str) -> None:
    """All ways give the same logits of the labels, and as many prompts as they were asked."""
    lm = {"shape": shape, "dtype": "bfloat16"} if shape else {"lm": small_lm}
    knowledge = ("city", "country")
    reading.main(**lm, knowledge=knowledge, n_subjects=40, n_published=6, threads=1)
    table = rows(capsys.readouterr().out)
    assert [row[0] for row in table] == [
        "published", "transformers, batches", "ours, prompts one by one", "ours, shared prefixes",
    ]  # fmt: skip
    assert [int(row[1]) for row in table] == [12, 80, 80, 80]
    for row in table:
        assert float(row[7]) < (0.1 if shape else 1e-4) and float(row[8]) > 0.999
        ratio = float(row[2]) / float(table[0][2])
        assert float(row[3].removesuffix("x")) == pytest.approx(ratio, rel=0.02, abs=0.06)


def test_reading_finds_wrong_logits(
    small_lm: str, capsys: pytest.CaptureFixture[str], rows: Rows,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    right = reading.plain_batches
    monkeypatch.setattr(reading, "plain_batches", lambda lm, prompts: right(lm, prompts).flip(0))
    reading.main(small_lm, knowledge=("city", "country"), n_subjects=40, threads=1)
    wrong = rows(capsys.readouterr().out)[1]
    assert float(wrong[7]) > 0.01 and float(wrong[8]) < 0.999
