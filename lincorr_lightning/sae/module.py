"""Train sparse autoencoders of an LM's activations, at all its hook points at once."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.callbacks import WeightAveraging
from torch import Tensor

from lincorr_lightning import study as studies
from lincorr_lightning.data.texts import TokenRows, TokenStep
from lincorr_lightning.errors import ConfigError, NonFiniteError, require
from lincorr_lightning.lm.config import LMConfig
from lincorr_lightning.metrics import ReconstructionQuality
from lincorr_lightning.results.results import Results
from lincorr_lightning.sae.formats import check_fit, load_saes, save_saes
from lincorr_lightning.sae.forwards import BlockActivations, score_texts
from lincorr_lightning.sae.hook_points import KINDS, HookKind, HookPoint
from lincorr_lightning.sae.hooks import find_hook_points, width_of
from lincorr_lightning.sae.results import SCORES, held_out_scores, sae_results
from lincorr_lightning.sae.sparse_autoencoder import SparseAutoencoder
from lincorr_lightning.sae.stacked import (
    LEARNING_RATE,
    SAESettings,
    StackedAutoencoders,
    StepLosses,
    learning_rate_factor,
)


class SparseAutoencoders(studies.LMStudy):
    """Trains an SAE at every hook point of an LM: after each layer, and each MLP and attention.

    A training batch is a `TokenStep`, some tokens of a block of texts. The LM reads a block once;
    its activations are shuffled over the block's steps and never stored. The learning rate of Adam
    increases linearly over the first 5 % of the steps and decreases linearly to 0 over the last
    40 %. A resumed run gives the same weights bit for bit on the same processor.

    A validation batch is `TokenRows`: held-out texts score, for each hook point, the explained
    variance, the active and the dead features and the LM's loss with the reconstruction. ``lincorr
    fit`` writes a folder per SAE that `load_sae` reads to ``sparse_autoencoders/`` in the run's
    folder. ``lincorr validate`` scores a checkpoint, or SAEs in any known format.

    Args:
        lm: The LM.
        kinds: Kinds of hook points: residual, mlp_out, attention_out.
        layers: Indices of layers, from 0; None takes all.
        sae: Size of each SAE.
        learning_rate: Peak learning rate of Adam.
        saes: SAEs for ``lincorr validate`` to score instead of a checkpoint's: a folder that holds
            a folder per SAE, or a list of such folders, in any known format.
        seed: Seed of the initial weights.
    """

    study = "sparse_autoencoders"
    batch_type = TokenRows
    free_settings = frozenset({"saes"})
    step_setting = "data.batch_tokens"
    refused_callbacks = (WeightAveraging,)

    def __init__(
        self,
        lm: LMConfig = LMConfig(),
        kinds: list[HookKind] = list(KINDS),  # noqa: B006
        layers: list[int] | None = None,
        sae: SAESettings = SAESettings(),
        learning_rate: float = LEARNING_RATE,
        saes: str | list[str] | None = None,
        seed: int = 0,
    ) -> None:
        require("model.learning_rate", learning_rate, above=0)
        self.sae = studies.as_settings(SAESettings, sae)
        super().__init__(studies.without_chat(lm))
        self.save_hyperparameters(logger=False)
        self.kinds = kinds
        self.layers = layers
        self.learning_rate = learning_rate
        self.saes = saes
        self.seed = seed
        self.stacked: StackedAutoencoders | None = None
        self.scores: dict[str, Any] | None = None  #: See `held_out_scores`.
        self.n_tokens = 0  #: Number of tokens that this rank trained on.
        self._loaded: dict[HookPoint, SparseAutoencoder] = {}
        self._reader: BlockActivations | None = None

    def setup(self, stage: str) -> None:
        super().setup(stage)
        if stage == "fit":
            studies.require_one_epoch(self.trainer, "data.n_tokens")

    def prepare_lm(self) -> None:
        if self.saes is not None:
            self._loaded = dict(sorted(load_saes(self.saes, self.lm).items()))
            check_fit(self._loaded.values(), self.lm)
            return
        hook_points = find_hook_points(self.lm.model, self.kinds, self.layers)
        width = width_of(self.lm.model)
        self.stacked = StackedAutoencoders(hook_points, width, self.sae, self.seed)

    @property
    def _trained(self) -> StackedAutoencoders:
        if self.stacked is None:
            raise ConfigError(
                "model.saes names SAEs to score, not to train. Run `lincorr validate`, or set null."
            )
        return self.stacked

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self._trained.parameters(), lr=self.learning_rate)

    def on_train_start(self) -> None:
        self._n_steps = self.trainer.estimated_stepping_batches
        if self._n_steps < 1:
            raise ConfigError("the training DataLoader has no length. Set trainer.max_steps.")

    def on_train_batch_start(self, batch: TokenStep, batch_idx: int) -> None:
        step = self.trainer.global_step
        # A scheduler would be a step off after a resume in the middle of the epoch.
        for group in self.trainer.optimizers[0].param_groups:
            group["lr"] = self.learning_rate * learning_rate_factor(step, self._n_steps)
        studies.require_batch(self, batch, TokenStep)
        saes = self._trained
        if self._reader is None:
            self._reader = BlockActivations(self.lm, saes.hook_points)
        self._activations = self._reader.read(batch)
        if step == 0 and batch_idx == 0:  # from the first block of rank 0
            saes.fit_input(self._reader.block)
            for tensor in (saes.input_scale, saes.decoder_bias):
                tensor.data.copy_(self.trainer.strategy.broadcast(tensor.data))

    def training_step(self, batch: TokenStep, batch_idx: int) -> Tensor:
        self.n_tokens += self._activations.shape[1]
        losses: StepLosses = self._trained(self._activations)
        n_active = losses.n_active
        least = losses.least
        if self.trainer.world_size > 1:
            # All ranks keep the same counts, whichever rank saw a feature.
            n_active = self.trainer.strategy.reduce(n_active.clone(), reduce_op="sum")
            least = self.trainer.strategy.reduce(least.clone(), reduce_op="mean")
        self._trained.remember(n_active, least)
        if self.global_step % self.trainer.log_every_n_steps == 0:  # type: ignore[attr-defined]
            self._log_step(losses)
        return losses.total

    def _log_step(self, losses: StepLosses) -> None:
        saes = self._trained
        if not losses.unexplained.isfinite().all():
            raise NonFiniteError(
                f"the loss of an SAE is NaN or infinite in step {self.global_step}. Lower "
                "model.learning_rate, or set model.lm.dtype to float32."
            )
        curves = {
            "explained_variance": 1 - losses.unexplained,
            "dead": (saes.idle >= saes.settings.dead_after_steps).double().mean(1),
            "threshold": saes.threshold,
        }
        for name, values in curves.items():
            for hook_point, value in zip(saes.hook_points, values.tolist(), strict=True):
                self.log(f"train/{name}/{hook_point.id}", value, batch_size=1)
        self.log("train/loss", losses.total.detach(), prog_bar=True, batch_size=1)

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        super().on_before_optimizer_step(optimizer)
        self._trained.project_gradient()

    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        """Step, and normalize the decoder before any callback saves it."""
        super().optimizer_step(*args, **kwargs)
        self._trained.normalize()

    def trained(self) -> dict[HookPoint, SparseAutoencoder]:
        """Return a copy of each SAE in its current state."""
        return self._trained.export(self.lm.config.name_or_path)

    def on_validation_epoch_start(self) -> None:
        if self.stacked is None:
            self._scored = {at: sae.to(self.device) for at, sae in self._loaded.items()}
        elif self.trainer.state.fn == "validate" and not int(self.stacked.n_averaged):
            raise ConfigError(
                "there are no trained SAEs to score. Pass --ckpt_path, or --model.saes FOLDER."
            )
        else:
            self._scored = self.trained()
        most = max(sae.n_features for sae in self._scored.values())
        quality = ReconstructionQuality(len(self._scored), width_of(self.lm.model), most)
        self._quality = quality.to(self.device)

    def validation_step(self, batch: TokenRows, batch_idx: int) -> None:
        studies.require_batch(self, batch, TokenRows)
        score_texts(self.lm.model, self._scored, batch, self._quality)

    def on_validation_epoch_end(self) -> None:
        self.scores = held_out_scores(self._scored, self._quality.gather())
        for score in self.scores["hook_points"]:
            for name in SCORES:
                if score[name] is not None:
                    self.log(f"val/{name}/{score['hook_point']}", score[name])

    def build_results(self) -> Results:
        n_tokens = torch.tensor(self.n_tokens, device=self.device)
        values = {
            "n_steps": self.trainer.global_step,
            "n_tokens": int(self.trainer.strategy.reduce(n_tokens, reduce_op="sum")),
            "seconds": self.seconds,
        }
        return sae_results(self.scores, values)

    def write_artifacts(self, folder: Path) -> None:
        if self.trainer.state.fn == "fit":
            save_saes(self.trained(), folder)

    def checkpoint_state(self) -> dict[str, Any]:
        return {"n_tokens": self.n_tokens, "scores": self.scores}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Refuse a checkpoint of other SAEs, also where they are only scored."""
        super().on_load_checkpoint(checkpoint)
        settings = {name: self.hparams[name] for name in ("sae", "kinds", "layers")}
        studies.require_same(checkpoint["hyper_parameters"], settings, "model.")

    def restore(self, state: Mapping[str, Any]) -> None:
        self.n_tokens = state["n_tokens"]
        self.scores = state["scores"]
