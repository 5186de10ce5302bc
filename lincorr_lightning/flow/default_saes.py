"""SAEs for a study that was given none."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

import lightning as L

from lincorr_lightning.data.texts import TextsDataModule
from lincorr_lightning.errors import ConfigError
from lincorr_lightning.lm.language_model import LanguageModel
from lincorr_lightning.sae.hook_points import HookPoint
from lincorr_lightning.sae.module import SparseAutoencoders
from lincorr_lightning.sae.run_results import SAE_FOLDER
from lincorr_lightning.sae.sparse_autoencoder import SparseAutoencoder
from lincorr_lightning.sae.stacked import SAESettings


def train_saes(
    lm: LanguageModel,
    data: TextsDataModule,
    n_tokens: int,
    sae: SAESettings,
    folder: Path | None,
    seed: int,
) -> dict[HookPoint, SparseAutoencoder]:
    """Train an SAE at every place of an LM, as `SparseAutoencoders` does by default.

    Args:
        lm: The LM.
        data: Whose texts are read, of all knowledges, but for those that it holds out.
        n_tokens: How many tokens.
        sae: How they are built.
        folder: The run's, in which they are kept as ``sparse_autoencoders/``; None keeps nothing,
            and takes but one step.
        seed: Of the initial weights.

    Raises:
        ConfigError: The tokens are fewer than a block that is shuffled together.
        SubjectsError: There are too few texts.
    """
    block = data.hparams["batch_tokens"] * data.hparams["block_steps"]
    if n_tokens < block:
        raise ConfigError(
            f"model.training_tokens is {n_tokens}, but SAEs are trained on blocks of {block} "
            "tokens. Set it to that or more, or pass SAEs as model.saes."
        )
    # Of a run from the command line they say how the DataModule was made, too.
    settings = {name: value for name, value in data.hparams.items() if not name.startswith("_")}
    # What is held out is the study's; nothing is scored here.
    settings |= {"n_tokens": n_tokens, "knowledges": None, "n_held_out": 1}
    own = TextsDataModule(**settings)
    own.left_out = frozenset(data.held_out_texts(lm))
    study = SparseAutoencoders(lm=lm.config, sae=sae, seed=seed)
    with TemporaryDirectory() as elsewhere:
        trainer = L.Trainer(
            accelerator="auto", devices=1, max_epochs=1, logger=False, enable_checkpointing=False,
            enable_model_summary=False, limit_val_batches=0, num_sanity_val_steps=0,
            default_root_dir=elsewhere, fast_dev_run=folder is None,
        )  # fmt: skip
        trainer.fit(study, datamodule=own)
    saes = study.trained()
    for hook_point, trained in saes.items() if folder is not None else ():
        trained.save(folder / SAE_FOLDER / hook_point.id)  # type: ignore[operator]
    return saes
