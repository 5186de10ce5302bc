"""What reading will take, estimated before any weights are read, against what it takes."""

import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lincorr_lightning import LanguageModel
from lincorr_lightning.errors import LanguageModelError
from lincorr_lightning.lm import LMConfig, cost

CPU = torch.device("cpu")
TEMPLATES = ("{} lives in the city of", "{} lives in the country of", "the {} saw a")
SUBJECTS = ["Paris", "Oslo Lima", "a"]


def read(lm: LanguageModel, subjects: Any) -> torch.Tensor:
    prompts = [[template.replace("{}", x) for x in subjects] for template in TEMPLATES]
    return lm.joint_logits(prompts, [[5, 6, 7]] * len(TEMPLATES))


def without_weights(folder: Path, copy: Path) -> str:
    ignored = shutil.ignore_patterns("*.safetensors")
    return str(shutil.copytree(folder, copy, ignore=ignored))


def test_size_and_tokens_are_those_of_the_lm(
    architecture: str, lm_folder: Any, tmp_path: Path
) -> None:
    """Also those of LMs with layers of several types; the folder has no weights."""
    whole = LanguageModel.from_pretrained(str(lm_folder(architecture)))
    folder = without_weights(lm_folder(architecture), tmp_path / "lm")
    lm = LanguageModel(LMConfig(folder, share_prefixes=False, tokens_per_forward=1))
    found = cost.estimate_reading(lm, read, SUBJECTS, CPU)
    assert not lm.is_loaded
    assert found.n_parameters == whole.model.num_parameters()
    assert found.n_bytes == sum(p.numel() * p.element_size() for p in whole.model.parameters())
    rows = [whole.rows([t.replace("{}", x) for x in SUBJECTS]) for t in TEMPLATES]
    assert found.n_tokens * len(SUBJECTS) == sum(len(row) for each in rows for row in each)
    assert found.how == "one by one" and found.seconds > 0


def test_shared_beginnings_are_read_once(lm_folder: Any) -> None:
    lm = LanguageModel(LMConfig(str(lm_folder("llama")), share_prefixes=True))
    found = cost.estimate_reading(lm, read, SUBJECTS[:1], CPU)
    rows = [lm.rows([t.replace("{}", SUBJECTS[0])])[0] for t in TEMPLATES]
    beginnings = {tuple(row[: i + 1]) for row in rows for i in range(len(row))}
    assert found.n_tokens == len(beginnings) < sum(map(len, rows))


def test_each_further_layer_takes_what_the_second_adds(
    lm_folder: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    times = {1: 3.0, 2: 3.5}
    monkeypatch.setattr(cost, "_seconds", lambda read, lm, subjects: times[lm.n_layers])
    lm = LanguageModel(LMConfig(str(lm_folder("llama"))))
    lm._model_config.num_hidden_layers = 9
    found = cost.estimate_reading(lm, read, SUBJECTS, CPU)
    assert found.seconds * len(SUBJECTS) == pytest.approx(3.0 + 8 * 0.5)


def test_an_lm_whose_layers_are_not_counted_is_refused(lm_folder: Any) -> None:
    lm = LanguageModel(LMConfig(str(lm_folder("llama"))))
    lm._model_config = SimpleNamespace(get_text_config=lambda: SimpleNamespace())  # type: ignore
    with pytest.raises(LanguageModelError, match="no num_hidden_layers"):
        cost.estimate_reading(lm, read, SUBJECTS, CPU)
