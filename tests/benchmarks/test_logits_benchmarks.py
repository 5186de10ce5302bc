"""The scripts that measure logits, on sizes that take seconds."""

import re
from collections.abc import Callable
from types import ModuleType

import pytest
import torch

Script = Callable[[str], ModuleType]
Rows = Callable[[str], list[list[str]]]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_logits(dtype: str, capsys: pytest.CaptureFixture[str], script: Script, rows: Rows) -> None:
    script("logits").main(shape="small", n_subjects=40, published=12, batch=20, dtypes=[dtype])
    text = capsys.readouterr().out
    assert f"small, 0M weights in linear layers, {dtype}" in text
    table = rows(text)
    assert [row[0] for row in table] == 2 * [
        "published", "ours, prompts one by one", "ours, shared prefixes",
    ]  # fmt: skip
    assert [int(row[1]) for row in table] == [12, 80, 80, 23, 92, 92]
    # How much faster is the machine's to say, and its other programs'; here, that it adds up.
    for published, *ours in (table[:3], table[3:]):
        for row in (published, *ours):
            ratio = float(row[4].replace(",", "")) / float(published[4].replace(",", ""))
            assert float(row[5].removesuffix("x")) == pytest.approx(ratio, rel=0.01, abs=0.06)
    shown = re.findall(
        r"differ from the published way's by (\S+) one by one and (\S+) shared", text
    )
    assert len(shown) == 2
    bound = 1e-4 if dtype == "float32" else 0.1
    assert all(0 < float(far) < bound for line in shown for far in line)


def test_bare_products_are_those_of_the_linear_layers(script: Script) -> None:
    logits = script("logits")
    lm, _ = logits.random_lm("small", "tiny-world", torch.float32, torch.device("cpu"))
    weights = logits.weights_of(lm.model)
    assert len(weights) == 2 * 7
    counted = sum(p.numel() for p in lm.model.model.layers.parameters() if p.dim() == 2)
    assert sum(weight.numel() for weight in weights) == counted
    logits.bare_products(weights, [(2, 5), (1, 3)])()


def test_half_precision(capsys: pytest.CaptureFixture[str], script: Script, rows: Rows) -> None:
    script("half_precision").main(pairs=["city->country"], ridges=[100.0], n_subjects=400)
    exact, bfloat16, float16 = rows(capsys.readouterr().out)
    assert [row[1] for row in (exact, bfloat16, float16)] == ["float32", "bfloat16", "float16"]
    assert float(exact[2]) == float(exact[5]) == 0
    assert 0 < float(float16[2]) < float(bfloat16[2]) < 0.03
    assert 0 < float(float16[5]) < float(bfloat16[5]) < 0.03
    assert float(bfloat16[4]) == pytest.approx(float(exact[4]), abs=5e-3)


def test_reading(
    capsys: pytest.CaptureFixture[str], script: Script, rows: Rows, small_lm: str
) -> None:
    """All ways give the same logits of the labels, and as many prompts as they were asked."""
    script("reading").main(
        small_lm, knowledge=("city", "country"), n_subjects=40, n_published=6, threads=1
    )
    table = rows(capsys.readouterr().out)
    assert [row[0] for row in table] == [
        "published", "transformers, batches", "ours, prompts one by one", "ours, shared prefixes",
    ]  # fmt: skip
    assert [int(row[1]) for row in table] == [12, 80, 80, 80]
    for row in table:
        assert float(row[7]) < 1e-4 and float(row[8]) == 1
        ratio = float(row[2]) / float(table[0][2])
        assert float(row[3].removesuffix("x")) == pytest.approx(ratio, rel=0.02, abs=0.06)


def test_reading_finds_wrong_logits(
    script: Script, small_lm: str, capsys: pytest.CaptureFixture[str], rows: Rows,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    reading = script("reading")
    right = reading.plain_batches
    monkeypatch.setattr(reading, "plain_batches", lambda lm, prompts: right(lm, prompts).flip(0))
    reading.main(small_lm, knowledge=("city", "country"), n_subjects=40, threads=1)
    wrong = rows(capsys.readouterr().out)[1]
    assert float(wrong[7]) > 0.01 and float(wrong[8]) < 0.999
