"""How large an LM is, from what lies about."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from lincorr_lightning.lm.language_model import LanguageModel
from lincorr_lightning.results.report.lms import find_lm, find_size


def test_sizes_are_those_of_the_weights(small_lm: str) -> None:
    for name in small_lm, "tiny-world":
        model = LanguageModel.from_pretrained(name).model
        assert find_size(name) == (sum(p.numel() for p in model.parameters()), False)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("Qwen/Qwen2.5-0.5B-Instruct", (0.5e9, True)),
        ("EleutherAI/pythia-160m", (160e6, True)),
        ("mistralai/Mistral-7B-v0.3", (7.25e9, False)),
        ("some/LM-v2", (None, True)),
        ("x/abc123b4", (None, True)),
    ],
)
def test_sizes_by_name(name: str, expected: tuple[float | None, bool]) -> None:
    assert find_size(name) == expected


def test_a_damaged_folder_has_no_size(tmp_path: Path) -> None:
    save_file({"a": torch.zeros(3, 4)}, tmp_path / "model.safetensors")
    assert find_size(str(tmp_path)) == (12, False)
    (tmp_path / "model.safetensors").write_bytes(b"\xff" * 20)
    assert find_size(str(tmp_path))[0] is None


def test_a_pretrained_lm_is_named_by_its_folder() -> None:
    results = {"model": "runs/pretraining/version_0/model", "n_parameters": 12}
    lm = find_lm(results, {}, {}, Path("runs/pretraining/version_0"))
    assert (lm.short, lm.n_parameters, lm.guessed) == ("version_0/model", 12.0, False)
