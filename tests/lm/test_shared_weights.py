"""Reading the weights of an LM once for several studies."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from lincorr_lightning.finetune.stacked_lora import StackedLoRA
from lincorr_lightning.lm import loading
from lincorr_lightning.lm.config import LMConfig
from lincorr_lightning.lm.language_model import LanguageModel
from lincorr_lightning.lm.loading import weights_read_once


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Folders whose weights were read."""
    found: list[str] = []
    read = loading.read_model

    def count(checkpoint, config):
        found.append(str(checkpoint.location))
        return read(checkpoint, config)

    monkeypatch.setattr(loading, "read_model", count)
    return found


def load(folder: str | Path, **options: str) -> LanguageModel:
    return LanguageModel(LMConfig(str(folder), **options)).load()


def test_weights_are_read_once(small_lm: str, reads: list[str]) -> None:
    with weights_read_once():
        one, other = load(small_lm), load(small_lm)
    assert one.model is other.model
    assert len(reads) == 1
    assert load(small_lm).model is not one.model  # outside of the context
    assert len(reads) == 2


def test_trained_weights_are_read_again(small_lm: str, reads: list[str]) -> None:
    with weights_read_once():
        one = load(small_lm)
        before = next(one.model.parameters()).clone()
        with torch.no_grad():
            next(one.model.parameters()).add_(1)
        again = load(small_lm)
    assert torch.equal(next(again.model.parameters()), before)
    assert len(reads) == 2


def test_an_lm_with_adapters_is_read_again_unless_they_are_removed(
    small_lm: str, reads: list[str]
) -> None:
    with weights_read_once():
        one = load(small_lm)
        adapters = StackedLoRA(one.model, n=2, rank=2, alpha=2)
        assert load(small_lm).model is not one.model
        two = load(small_lm)
        adapters = StackedLoRA(two.model, n=2, rank=2, alpha=2)
        adapters.remove()
        assert load(small_lm).model is two.model
    assert len(reads) == 2


def test_another_lm_or_dtype_is_read(small_lm: str, reads: list[str], make_lm, tmp_path) -> None:
    other = make_lm(tmp_path / "other", seed=5)
    with weights_read_once():
        for folder, dtype in ((small_lm, "float32"), (other, "float32"), (other, "bfloat16")):
            load(folder, dtype=dtype)
    assert len(reads) == 3
