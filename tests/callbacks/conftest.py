"""Runs of a user's own fine-tune of the small LM."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
from transformers import AutoTokenizer, Trainer

from lincorr_lightning.linear_map.artifact import LinearMap, PairMap
from lincorr_lightning.linear_map.weights import LabelSet
from tests.callbacks import naive
from tests.toys import save_toy_lm


@pytest.fixture
def fit(small_lm: str, make_trainer: Callable[..., L.Trainer]) -> Callable[..., L.Trainer]:
    """Train the small LM, or a given module, with some callbacks."""

    def train(
        *callbacks: Any, module: Any = None, data: Any = None, ckpt_path: Any = None, **options: Any
    ) -> L.Trainer:
        trainer = make_trainer(*callbacks, **options)
        trainer.fit(
            module or naive.Module(small_lm), data or naive.sentences(small_lm), ckpt_path=ckpt_path
        )
        return trainer

    return train


@pytest.fixture(scope="session")
def gpt2_folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Folder of a GPT-2 with the small LM's words and dropout."""
    dropout = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.2)
    folder = tmp_path_factory.mktemp("gpt2")
    return str(save_toy_lm(folder, architecture="gpt2", num_hidden_layers=1, **dropout))


@pytest.fixture(scope="session")
def own_map(tmp_path_factory: pytest.TempPathFactory, small_lm: str) -> SimpleNamespace:
    """Folder of a random linear map city->country, and its W and b."""
    tokenizer = AutoTokenizer.from_pretrained(small_lm)
    labels = {"city": naive.CITIES, "country": naive.COUNTRIES}
    ids = {name: tokenizer.convert_tokens_to_ids(words) for name, words in labels.items()}
    random = np.random.default_rng(3)
    weight, bias = random.normal(size=(11, 12)), random.normal(size=11)

    def save(name: str, ids: dict[str, list[int]]) -> str:
        folder = tmp_path_factory.mktemp(name) / "linear_map"
        one = PairMap(torch.from_numpy(weight), torch.from_numpy(bias), ridge=0.0)
        sets = [LabelSet(k, naive.TEMPLATES[k], labels[k], ids[k]) for k in ids]
        LinearMap({"city->country": one}, sets, "made by hand", {}).save(folder)
        return str(folder)

    other = save("other_map", ids | {"city": [i + 1 for i in ids["city"]]})
    return SimpleNamespace(folder=save("map", ids), other=other, weight=weight, bias=bias)


@pytest.fixture
def hugging_face(small_lm: str, tmp_path: Path) -> Callable[..., Trainer]:
    """Train the small LM on sentences, or on given rows, in a Trainer of Hugging Face."""

    def train(*callbacks: Any, rows: Any = None, **options: Any) -> Trainer:
        return naive.train_by_hugging_face(small_lm, tmp_path / "out", callbacks, rows, **options)

    return train
