"""Training SAEs without a Trainer, and the texts that a test run trains them on."""

from pathlib import Path

import lightning as L
import pytest
import torch

from lincorr_lightning.data.texts import TextsDataModule
from lincorr_lightning.errors import ConfigError
from lincorr_lightning.lm.config import LMConfig
from lincorr_lightning.lm.language_model import LanguageModel
from lincorr_lightning.sae.module import SparseAutoencoders
from lincorr_lightning.sae.stacked import SAESettings, train_saes


def test_saes_are_those_of_sparse_autoencoders_on_the_same_texts(
    small_lm: str, tmp_path: Path
) -> None:
    path = tmp_path / "texts.txt"
    path.write_text("\n".join(f"name{i} lives in the city of Paris" for i in range(90)))
    sizes = {"texts": [str(path)], "n_texts": 20, "n_tokens": 64, "batch_tokens": 16,
             "block_steps": 2}  # fmt: skip
    settings = SAESettings(n_features=24, k=3)
    lm = LanguageModel.from_pretrained(small_lm)
    fingerprint = lm.fingerprint
    data = TextsDataModule(lm, training_tokens=192, **sizes)
    data.setup("test")
    (steps,), texts = data.test_dataloader()
    assert len(steps) == 12
    found = train_saes(lm, steps, settings, seed=3)
    assert lm.fingerprint == fingerprint
    assert sum(len(batch.input_ids) for batch in texts) == 20

    study = SparseAutoencoders(LMConfig(name_or_path=small_lm), sae=settings, seed=3)
    trainer = L.Trainer(
        accelerator="cpu", max_epochs=1, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, limit_val_batches=0,
        default_root_dir=tmp_path,
    )  # fmt: skip
    trainer.fit(study, datamodule=TextsDataModule(study.lm, **sizes).complement(192))
    assert trainer.global_step == 12
    for hook_point, expected in study.trained().items():
        for name, tensor in expected.state_dict().items():
            assert torch.equal(found[hook_point].state_dict()[name], tensor), name


def test_training_texts_are_all_that_the_study_does_not_read() -> None:
    """Also where the study reads some kinds of knowledge and training reads all."""
    lm = LanguageModel(LMConfig())
    sizes = {"n_tokens": 600, "batch_tokens": 40, "block_steps": 3}
    data = TextsDataModule(lm, knowledge=["attribute"], n_texts=4000, **sizes)
    read, trained_on = set(data.read_texts()), set(data.complement(600)._all_texts())
    assert len(read) == 4000
    assert not trained_on & read
    assert trained_on | read == set(TextsDataModule(lm, **sizes)._all_texts())


def test_too_few_tokens_name_the_key_of_the_study() -> None:
    with pytest.raises(ConfigError, match=r"model\.training_tokens is 100, .* blocks of 32768"):
        TextsDataModule(training_tokens=100)
