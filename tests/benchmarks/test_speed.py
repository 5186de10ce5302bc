"""The modules that measure time and memory, on sizes that take seconds."""

from collections.abc import Callable

import pytest

from benchmarks.speed import growth, half_precision, published_method, reading, stacked_edits
from lincorr_lightning.lm import sample_up_to

Rows = Callable[[str], list[list[str]]]


def test_stacked_edits(capsys: pytest.CaptureFixture[str], rows: Rows) -> None:
    stacked_edits.main(side_by_side=(1, 4), n_edits=4, steps=2, rank=2, repeats=1)
    table = rows(capsys.readouterr().out)
    assert [row[0] for row in table] == ["one at a time, peft", "1 side by side", "4 side by side"]
    assert all(float(row[4]) < 1e-3 for row in table[1:])


def test_maps_of_two_ways_and_of_half_precision_agree(
    capsys: pytest.CaptureFixture[str], rows: Rows
) -> None:
    published_method.main(n_subjects=300)
    text = capsys.readouterr().out
    assert [row[0] for row in rows(text)] == ["logits", "fit", "total"]
    assert float(text.split("differ by ")[1].split()[0]) < 1e-4
    half_precision.main(pairs=("city->country", "city->pet"), n_subjects=300)
    for pair, precision, far, _, _, moved, hits in rows(capsys.readouterr().out):
        assert (float(far) == float(moved) == 0) is (precision == "float32")
        assert float(far) < 0.02 and (hits == "") is pair.endswith("pet")


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


def test_bare_products_are_those_of_the_linear_layers() -> None:
    lm = reading.make_lm(None, "small", "tiny-world", "float32", "cpu")
    weights = reading.weights_of(lm.model)
    assert len(weights) == 2 * 7
    counted = sum(p.numel() for p in lm.model.model.layers.parameters() if p.dim() == 2)
    assert sum(weight.numel() for weight in weights) == counted
    reading.bare_products(weights, [(2, 5), (1, 3)])()


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
