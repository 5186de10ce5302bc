"""Sparse autoencoders of an LM's activations, at all its places at once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from functools import cached_property
from time import monotonic
from typing import Any

import numpy as np
import torch
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor

from lincorr_lightning.data.texts import TextsDataModule, TokenRows, TokenStep
from lincorr_lightning.errors import ConfigError, NonFiniteError
from lincorr_lightning.frozen_lm import FrozenLMModule
from lincorr_lightning.lm.batching import MicroBatches
from lincorr_lightning.lm.config import LMConfig
from lincorr_lightning.lm.language_model import LanguageModel
from lincorr_lightning.lm.sharding_strategy import refuse_sharding
from lincorr_lightning.metrics import ReconstructionQuality
from lincorr_lightning.results.run_folder import is_dry_run, run_folder
from lincorr_lightning.sae import KINDS, HookKind, HookPoint
from lincorr_lightning.sae.hooks import find_hook_points, width_of
from lincorr_lightning.sae.loading import load_folder
from lincorr_lightning.sae.results import SCORED, SAEReport
from lincorr_lightning.sae.run_results import report_of, write_results
from lincorr_lightning.sae.scoring import read_activations, score_texts
from lincorr_lightning.sae.sparse_autoencoder import SparseAutoencoder
from lincorr_lightning.sae.stacked import SAESettings, StackedAutoencoders, StepLosses


class SparseAutoencoders(FrozenLMModule):
    """Trains an SAE at every place of an LM: after each layer, and what each MLP and attention add.

    The LM reads a block of texts, its activations are shuffled and each used once, then the next
    block; nothing is stored on the disk. All SAEs are one batched tensor, so that a step takes a
    few products. At the end of ``lincorr fit``, held-out texts tell for each place how much of the
    variance is explained, with how many features, how many of them are dead, and how much of the
    LM's loss is recovered; ``sparse_autoencoders/`` in the run's folder then holds the SAEs, each
    in a folder that `load_sae` reads. A run that is resumed gives the same weights, bit for bit on
    the same processor.

    ``lincorr validate`` scores a checkpoint, or SAEs of any known format (`saes`).

    Args:
        lm: Whose activations.
        kinds: residual, mlp_out, attention_out, or some of them.
        layers: Counted from 0; None takes all.
        sae: How each SAE is built.
        learning_rate: Highest, of Adam.
        warmup: Share of the steps on the way up to it.
        decay: Share of the steps, at the end, on the way down to 0.
        saes: Folder that holds a folder for each SAE, or their folders, in any known format, to
            score by ``lincorr validate`` instead of training any.
        seed: Of the initial weights.

    Raises:
        ConfigError: Settings that contradict each other.
        LanguageModelError: The LM cannot be read.
    """

    stacked: StackedAutoencoders | None

    def __init__(
        self,
        lm: LMConfig = LMConfig(),  # noqa: B008 (frozen)
        kinds: list[HookKind] = list(KINDS),  # noqa: B006 (never changed)
        layers: list[int] | None = None,
        sae: SAESettings = SAESettings(),  # noqa: B008 (frozen)
        learning_rate: float = 4e-3,
        warmup: float = 0.05,
        decay: float = 0.4,
        saes: str | list[str] | None = None,
        seed: int = 0,
    ) -> None:
        lm = LMConfig(**lm) if isinstance(lm, Mapping) else lm
        sae = SAESettings(**sae) if isinstance(sae, Mapping) else sae
        if not kinds or not set(kinds) <= set(KINDS):
            raise ConfigError(f"model.kinds is {kinds}; it must be some of {', '.join(KINDS)}.")
        if min(warmup, decay) < 0 or warmup + decay > 1:
            raise ConfigError(
                f"model.warmup is {warmup} and model.decay {decay}; they are shares of the steps, "
                "together at most 1."
            )
        super().__init__(lm)
        self.settings = sae
        self.save_hyperparameters(
            {
                "lm": asdict(lm), "kinds": list(kinds), "layers": layers, "sae": asdict(sae),
                "learning_rate": learning_rate, "warmup": warmup, "decay": decay, "saes": saes,
                "seed": seed,
            },
            logger=False,
        )  # fmt: skip
        self.stacked = None
        self.given: dict[HookPoint, SparseAutoencoder] = {}
        self.report: SAEReport | None = None
        self.history: dict[str, list[tuple[int, float]]] = {}
        self._quality: ReconstructionQuality | None = None
        self._scored: dict[HookPoint, SparseAutoencoder] = {}
        self._block = -1
        self._activations = self._order = torch.empty(0)
        self._batches = MicroBatches(lm.tokens_per_forward)
        self._started = 0.0

    @property
    def language_model(self) -> LanguageModel:
        """The LM, for the DataModule."""
        return self.lm

    # -- setting up ------------------------------------------------------------------------------

    def setup(self, stage: str) -> None:
        """Refuse what cannot work, before anything is read.

        Raises:
            ConfigError: Settings that contradict each other.
            OutputError: The run's folder cannot be written.
        """
        super().setup(stage)
        refuse_sharding(self.trainer, "SparseAutoencoders")
        if not isinstance(getattr(self.trainer, "datamodule", None), TextsDataModule):
            data = type(getattr(self.trainer, "datamodule", None)).__name__
            raise ConfigError(
                f"SparseAutoencoders reads the texts of a TextsDataModule; data is {data}. Pass "
                "--data TextsDataModule."
            )
        if stage == "fit":
            if self.hparams["saes"] is not None:
                raise ConfigError(
                    "model.saes names SAEs to score, not to train. Use `lincorr validate`, or set "
                    "it to null."
                )
            if self.trainer.max_epochs not in (1, None) and not is_dry_run(self.trainer):
                raise ConfigError(
                    f"trainer.max_epochs is {self.trainer.max_epochs}, but a run is one epoch. Set "
                    "it to 1; data.n_tokens says how much is read."
                )
            if self.trainer.accumulate_grad_batches != 1:
                raise ConfigError(
                    "trainer.accumulate_grad_batches must be 1; set data.batch_tokens instead."
                )

    def configure_model(self) -> None:
        """Load the LM, find its places, make the SAEs or read those that are given.

        Raises:
            SparseAutoencoderError: The LM has no such place, or a given SAE is of another LM.
        """
        super().configure_model()
        if self.stacked is not None or self.given:
            return
        model, name = self.lm.model, self.lm.config.name_or_path
        if self.hparams["saes"] is not None:
            n_layers = model.config.get_text_config().num_hidden_layers
            self.given = dict(sorted(load_folder(self.hparams["saes"], self.lm).items()))
            for sae in self.given.values():
                sae.check_fits(width_of(model), n_layers, name)
            find_hook_points(model, [hook_point.kind for hook_point in self.given], [0])
            return
        hook_points = find_hook_points(model, self.hparams["kinds"], self.hparams["layers"])
        self.stacked = StackedAutoencoders(
            hook_points, width_of(model), self.settings, self.hparams["seed"]
        )

    @property
    def _data(self) -> TextsDataModule:
        data = self.trainer.datamodule  # type: ignore[attr-defined]
        assert isinstance(data, TextsDataModule)
        return data

    @property
    def _saes(self) -> StackedAutoencoders:
        assert self.stacked is not None, "there is nothing to train"
        return self.stacked

    def configure_optimizers(self) -> OptimizerLRScheduler:
        """Adam, up, along and down."""
        optimizer = torch.optim.Adam(self._saes.parameters(), lr=self.hparams["learning_rate"])
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, self._rate)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": schedule, "interval": "step"},
        }

    @cached_property
    def _n_steps(self) -> int:
        # Not the trainer's estimate: asked for before a checkpoint's loops are restored, it would
        # have the loader begin anew.
        n = len(self._data.blocks(self.trainer.global_rank, self.trainer.world_size))
        return n if self.trainer.max_steps < 1 else min(n, self.trainer.max_steps)

    def _rate(self, step: int) -> float:
        total = self._n_steps
        up = (step + 1) / max(self.hparams["warmup"] * total, 1.0)
        down = (total - step) / max(self.hparams["decay"] * total, 1.0)
        return max(min(1.0, up, down), 0.0)

    # -- training --------------------------------------------------------------------------------

    def on_train_start(self) -> None:
        """Start the clock; of a new run, set scale and bias by the first process's first block."""
        self._started = monotonic()
        if self.trainer.global_step:
            return
        data = self._data
        self._fill(data.blocks(self.trainer.global_rank, self.trainer.world_size)[0].block)
        saes = self._saes
        saes.fit_input(self._activations)
        for tensor in (saes.input_scale, saes.decoder_bias):
            tensor.data.copy_(self.trainer.strategy.broadcast(tensor.data))

    def _fill(self, block: int) -> None:
        """Read a block of texts, and draw the order in which its tokens are used."""
        data, hook_points = self._data, self._saes.hook_points
        size = data.hparams["batch_tokens"] * data.hparams["block_steps"]
        shape = (len(hook_points), size, width_of(self.lm.model))
        if self._activations.shape != shape:
            self._activations = torch.empty(shape, dtype=self.lm.model.dtype, device=self.device)
        read_activations(
            self.lm.model, hook_points, data.rows_of(block), self._activations, data.n_skipped,
            self._batches.run,
        )  # fmt: skip
        order = np.random.default_rng([data.hparams["seed"], 2, block]).permutation(size)
        self._order = torch.from_numpy(order).to(self.device)
        self._block = block

    def training_step(self, batch: TokenStep, batch_idx: int) -> Tensor:
        """Losses of all SAEs on one step's tokens.

        Raises:
            NonFiniteError: An SAE's loss is NaN or infinite.
        """
        del batch_idx
        if batch.block != self._block:
            self._fill(batch.block)
        n = self._data.hparams["batch_tokens"]
        rows = self._order[batch.index * n : (batch.index + 1) * n]
        losses: StepLosses = self._saes(self._activations[:, rows])
        active, least = losses.active, losses.least
        if self.trainer.world_size > 1:
            # All processes remember the same, whichever of them saw a feature.
            active = self.trainer.strategy.reduce(active.clone(), reduce_op="sum")
            least = self.trainer.strategy.reduce(least.clone(), reduce_op="mean")
        self._saes.remember(active, least)
        if self.global_step % self.trainer.log_every_n_steps == 0:  # type: ignore[attr-defined]
            self._log_step(losses)
        return losses.total

    def _log_step(self, losses: StepLosses) -> None:
        saes = self._saes
        if not bool(losses.unexplained.isfinite().all()):
            hook_point = saes.hook_points[int((~losses.unexplained.isfinite()).nonzero()[0])]
            raise NonFiniteError(
                f"the loss of the SAE at {hook_point} is NaN or infinite in step {self.global_step}. "
                "Lower model.learning_rate; if it is so in step 0, the LM's activations are: set "
                "lm.dtype to float32."
            )
        dead = (saes.idle >= saes.settings.dead_after_steps).double().mean(1)
        curves = {"explained_variance": 1 - losses.unexplained, "dead": dead}
        if saes.settings.activation == "relu":
            curves["l0"] = losses.l0  # of the others it is k
        elif saes.settings.activation == "batchtopk":
            curves["threshold"] = saes.threshold
        values = {
            f"{what}/{hook_point.id}": value
            for what, of_hook_points in curves.items()
            for hook_point, value in zip(saes.hook_points, of_hook_points.tolist(), strict=True)
        }
        for tag, value in values.items():
            self.history.setdefault(tag, []).append((self.global_step, value))
        self.log_dict(values, batch_size=1)
        self.log("loss", losses.total.detach(), prog_bar=True, batch_size=1)

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Leave the decoder's norms out of the gradient."""
        del optimizer
        self._saes.project_gradient()

    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        """Step, and give the decoder's rows their norm back before anybody saves them."""
        super().optimizer_step(*args, **kwargs)
        self._saes.normalize()

    def trained(self) -> dict[HookPoint, SparseAutoencoder]:
        """The SAEs as they are now, on their own."""
        return self._saes.export(self.lm.config.name_or_path)

    @property
    def n_tokens(self) -> int:
        """Tokens trained on so far, over all processes."""
        of_step: int = self._data.hparams["batch_tokens"]
        return self.trainer.global_step * of_step * self.trainer.world_size

    # -- scoring ---------------------------------------------------------------------------------

    def on_validation_epoch_start(self) -> None:
        """Take the SAEs as they are used after training.

        Raises:
            ConfigError: There are none.
        """
        if self.stacked is not None:
            if self.trainer.state.fn == "validate" and not int(self.stacked.n_averaged):
                raise ConfigError(
                    "there are no trained SAEs to score. Pass --ckpt_path, or a folder of some "
                    "as --model.saes."
                )
            self._scored = self.trained()
        else:
            self._scored = {
                hook_point: sae.to(self.device) for hook_point, sae in self.given.items()
            }
        self._quality = ReconstructionQuality(
            len(self._scored),
            width_of(self.lm.model),
            max(sae.n_features for sae in self._scored.values()),
        ).to(self.device)

    def validation_step(self, batch: TokenRows, batch_idx: int) -> None:
        """Rebuild held-out activations, and let the LM go on with them."""
        del batch_idx
        assert self._quality is not None
        losses, n_targets = score_texts(
            self.lm.model, self._scored, batch.input_ids, batch.attention_mask, batch.counted,
            self._quality.update,
        )  # fmt: skip
        if bool(batch.counted.any()):
            self._quality.add_losses(losses, n_targets)

    def on_validation_epoch_end(self) -> None:
        """Score every place, over all processes."""
        assert self._quality is not None
        found = self._quality.gather()
        self.report = report_of(self.lm.config.name_or_path, self._scored, found)
        for score in self.report.scores:
            for what in SCORED:
                value = getattr(score, what)
                if value is not None:
                    self.log(f"held_out_{what}/{score.hook_point}", value)

    # -- the end ---------------------------------------------------------------------------------

    def on_train_end(self) -> None:
        """Write the SAEs and the numbers."""
        self._write(monotonic() - self._started)

    def on_validation_end(self) -> None:
        """Write the numbers of a run that only scores."""
        if self.trainer.state.fn == "validate":
            self._write(None)

    def _write(self, seconds: float | None) -> None:
        if is_dry_run(self.trainer) or not self.trainer.is_global_zero:
            return
        write_results(self, run_folder(self.trainer), seconds)

    # -- checkpoints -----------------------------------------------------------------------------

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Keep the curves; leave the LM out."""
        super().on_save_checkpoint(checkpoint)
        checkpoint["sparse_autoencoders"] = {
            "hparams": {k: v for k, v in self.hparams.items() if k not in ("lm", "saes")},
            "history": {tag: list(points) for tag, points in self.history.items()},
        }

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Refuse a checkpoint of other SAEs or another LM.

        Raises:
            ConfigError: It is of another study, or of SAEs of another size or training.
            LinearMapError: It is of another LM.
        """
        stored = checkpoint.get("sparse_autoencoders")
        if stored is None:
            raise ConfigError("the checkpoint is none of SparseAutoencoders. Pass one of its own.")
        super().on_load_checkpoint(checkpoint)
        other = [name for name, value in stored["hparams"].items() if self.hparams[name] != value]
        if other:
            raise ConfigError(
                f"the checkpoint was written with model.{other[0]} {stored['hparams'][other[0]]}, "
                f"this run has {self.hparams[other[0]]}. Use the settings of the run that wrote it "
                "(its config.yaml), or begin anew."
            )
        self.history = {
            tag: [tuple(p) for p in points] for tag, points in stored["history"].items()
        }
