"""SAEs for a study that was given none."""

from __future__ import annotations

import logging
from pathlib import Path

import lightning as L

from lincorr_lightning.data.texts import TextsDataModule
from lincorr_lightning.lm import LMConfig
from lincorr_lightning.modules.sae_results import SAE_FOLDER
from lincorr_lightning.modules.sparse_autoencoders import SparseAutoencoders
from lincorr_lightning.reporting import run_folder
from lincorr_lightning.sae import Place, SparseAutoencoder

_log = logging.getLogger(__name__)


def train_saes(
    lm: LMConfig, data: TextsDataModule, n_tokens: int, folder: Path | None, seed: int
) -> dict[Place, SparseAutoencoder]:
    """Train an SAE at every place of an LM, with the defaults of `SparseAutoencoders`.

    Args:
        lm: The LM.
        data: Whose texts are read: those that it does not hold out.
        n_tokens: How many tokens.
        folder: In which the training's own run is kept; None keeps nothing.
        seed: Of the initial weights.

    Raises:
        InputsError: There are too few texts.
    """
    # Of a run from the command line they say how the DataModule was made, too.
    settings = {name: value for name, value in data.hparams.items() if not name.startswith("_")}
    own = TextsDataModule(**{**settings, "n_tokens": n_tokens, "knowledges": None})
    study = SparseAutoencoders(lm=lm, seed=seed)
    trainer = L.Trainer(
        accelerator="auto", devices=1, max_epochs=1, logger=False, enable_checkpointing=False,
        enable_model_summary=False, limit_val_batches=0, num_sanity_val_steps=0,
        default_root_dir=folder, fast_dev_run=folder is None,
    )  # fmt: skip
    trainer.fit(study, datamodule=own)
    if folder is not None:
        _log.info("SAEs are kept in %s for other runs.", run_folder(trainer) / SAE_FOLDER)
    return study.trained()
