"""Short ablations of the small LM's vocabulary."""

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import AutoTokenizer

from lincorr_lightning.ablation.datamodule import PairedTextsDataModule
from lincorr_lightning.ablation.module import PhaseSettings, VocabularyAblation
from lincorr_lightning.lm.config import LMConfig
from lincorr_lightning.lm.loading import find_checkpoint, read_tokenizer

# For test_token_embedding.py.
from tests.lm.conftest import lm_folder, pytest_generate_tests, small  # noqa: F401
from tests.toys import NO_FILES, quiet_trainer

COMPOSE = PhaseSettings(epochs=3, batch_size=16, learning_rate=1e-2)
LEARN = PhaseSettings(epochs=4, batch_size=8, learning_rate=1e-2)


@pytest.fixture
def ablate(small_lm: str, tmp_path: Path) -> Callable[..., SimpleNamespace]:
    """Run an ablation, and return module, data, trainer, results and folder."""

    def run(
        data: dict[str, Any] | None = None,
        trainer: dict[str, Any] | None = None,
        lm: str = small_lm,
        **model: Any,
    ) -> SimpleNamespace:
        settings = {"compose": COMPOSE, "learn": LEARN, "mapping": ["reference", "permuted"]}
        module = VocabularyAblation(LMConfig(lm), **settings | model)
        texts = PairedTextsDataModule(module.plan, **{"n_paired": 40, "n_new": 12} | (data or {}))
        options = dict(trainer or {})
        ckpt_path = options.pop("ckpt_path", None)
        made = quiet_trainer(tmp_path, **NO_FILES | options)
        made.fit(module, texts, ckpt_path=ckpt_path)
        folder = max(tmp_path.glob("vocabulary_ablation/*"), key=lambda path: int(path.name[8:]))
        results = json.loads((folder / "results.json").read_text(), parse_constant=pytest.fail)
        return SimpleNamespace(
            module=module, data=texts, trainer=made, results=results, folder=folder
        )

    return run


@pytest.fixture(scope="session")
def tokenizer(small_lm: str) -> Any:
    """Tokenizer of the small LM."""
    return AutoTokenizer.from_pretrained(small_lm)


@pytest.fixture(scope="session")
def world_tokenizer() -> Any:
    """Tokenizer of the embedded LM."""
    return read_tokenizer(find_checkpoint(LMConfig()))
