"""Training SAEs without a Trainer, and the texts that a test run trains them on."""

from pathlib import Path

import lightning as L
import pytest
import torch
from torch.utils.data import DataLoader

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
    trainer.fit(study, DataLoader(steps, batch_size=None))
    assert trainer.global_step == 12
    for hook_point, expected in study.trained().items():
        for name, tensor in expected.state_dict().items():
            assert torch.equal(found[hook_point].state_dict()[name], tensor), name


def test_training_texts_are_all_that_the_study_does_not_read() -> None:
    """Also where the study reads some kinds of knowledge and training reads all."""
    lm = LanguageModel(LMConfig())
    sizes = {"n_tokens": 600, "batch_tokens": 40, "block_steps": 3}
    data = TextsDataModule(lm, knowledge=["attribute"], n_texts=4000, training_tokens=600, **sizes)
    read, trained_on = data.read_texts(), data.other_blocks()._rows
    assert len(read) == 4000
    rows = {tuple(lm.tokenizer(text)["input_ids"]) for text in read}
    assert not rows & set(map(tuple, trained_on))
    everything = TextsDataModule(lm, n_texts=10**6, **sizes).read_texts()
    assert len(trained_on) + len(read) == len(everything) - 1  # one is held out


def test_too_few_tokens_name_the_key_of_the_study() -> None:
    data = TextsDataModule(LanguageModel(LMConfig()), training_tokens=100)
    with pytest.raises(ConfigError, match=r"0 blocks of 32768.*model\.training_tokens"):
        data.test_dataloader()
