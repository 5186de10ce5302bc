"""Teaches an LM source knowledge only (paper, sections 4.1 and 5)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict
from time import monotonic
from typing import Any, Literal

import lightning as L
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn.utils import get_total_norm

from lincorr_lightning.errors import ConfigError
from lincorr_lightning.finetune.adapters import (
    AdapterSettings,
    adapter_keys,
    add_adapter,
    check_resumable,
    name_states,
    save_merged,
)
from lincorr_lightning.finetune.datamodule import IGNORED, EditBatch, EditSchedule, EditsDataModule
from lincorr_lightning.finetune.forecasts import LEAD, EditForecasts
from lincorr_lightning.finetune.losses import answer_losses, edits_by_loss, nonfinite_error
from lincorr_lightning.finetune.run_results import write_results
from lincorr_lightning.finetune.stacked_lora import StackedLoRA
from lincorr_lightning.io import check_writable
from lincorr_lightning.lm.config import LMConfig
from lincorr_lightning.lm.language_model import LanguageModel
from lincorr_lightning.lm.sharding_strategy import check_strategy, is_sharded, shard_lm
from lincorr_lightning.results.run_folder import is_dry_run, run_folder

PROTOCOLS, METHODS = ("joint", "independent"), ("full", "lora")


class SourceFinetune(L.LightningModule):
    """Trains an LM on edits of its source knowledge; callbacks watch what else it comes to believe.

    The loss is the cross-entropy of the answer's tokens alone. Under the ``joint`` protocol all
    edits are trained in one run. Under ``independent`` each is trained from the base weights, which
    are restored exactly afterwards: what the paper's tables 4 to 6 count. Independent edits with
    LoRA are trained many at a time, each in an adapter of its own.

    The LM is trained in eval mode, without dropout: an edit then depends on nothing but itself, and
    a resumed run ends where an unbroken one does.

    Args:
        lm: The LM that is taught.
        protocol: ``joint`` or ``independent``.
        method: ``full``, or ``lora`` for low-rank adapters.
        adapter: Rank, alpha and target modules of the adapters.
        edits_per_step: Under ``joint`` the batch size; under ``independent`` with ``lora`` the
            edits trained side by side. Independent full fine-tuning does one at a time.
        steps_per_edit: Optimizer steps of each independent edit.
        learning_rate: Of AdamW; the paper's is 5e-6.
        weight_decay: Of AdamW.
        betas: AdamW's decay of its two averages.
        forecast: Whether to forecast each edit's outcome before training, from W and from the
            gradient, and to tell afterwards how good the forecasts were.
        forecast_lead: How far, in logits, the answer must lead in the forecast ``virtual_step``.
        save_model: Whether ``model/`` in the run's folder is to hold the trained LM, adapters
            merged, as a Hugging Face checkpoint; under ``joint`` only.

    Raises:
        LanguageModelError: The LM cannot be read, or has no such target modules.
        ConfigError: Settings that contradict each other.
    """

    def __init__(
        self,
        lm: LMConfig = LMConfig(),  # noqa: B008 (frozen)
        protocol: Literal["joint", "independent"] = "independent",
        method: Literal["full", "lora"] = "full",
        adapter: AdapterSettings = AdapterSettings(),  # noqa: B008 (frozen)
        edits_per_step: int = 8,
        steps_per_edit: int = 10,
        learning_rate: float = 5e-6,
        weight_decay: float = 0.0,
        betas: tuple[float, float] = (0.9, 0.999),
        forecast: bool = True,
        forecast_lead: float = LEAD,
        save_model: bool = False,
    ) -> None:
        super().__init__()
        lm = LMConfig(**lm) if isinstance(lm, Mapping) else lm
        adapter = AdapterSettings(**adapter) if isinstance(adapter, Mapping) else adapter
        for name, text, known in (("protocol", protocol, PROTOCOLS), ("method", method, METHODS)):
            if text not in known:
                raise ConfigError(f"model.{name} is {text!r}; it must be {' or '.join(known)}.")
        for name, value in (("edits_per_step", edits_per_step), ("steps_per_edit", steps_per_edit)):
            if value < 1:
                raise ConfigError(f"model.{name} is {value}; it must be at least 1.")
        if save_model and protocol == "independent":
            raise ConfigError(
                "model.save_model is true, but independent edits leave the LM as it was. "
                "Set model.protocol to joint, or model.save_model to false."
            )
        self.lm = LanguageModel(lm)
        self.save_hyperparameters(
            {
                "lm": asdict(lm), "protocol": protocol, "method": method,
                "adapter": asdict(adapter), "edits_per_step": edits_per_step,
                "steps_per_edit": steps_per_edit, "learning_rate": learning_rate,
                "weight_decay": weight_decay, "betas": tuple(betas), "forecast": forecast,
                "forecast_lead": forecast_lead, "save_model": save_model,
            },
            logger=False,
        )  # fmt: skip
        # Of LoRA, a checkpoint holds the adapter alone.
        self.strict_loading = method == "full"
        self.adapter_settings = adapter
        self.adapters: StackedLoRA | None = None
        self.forecasts: EditForecasts | None = None
        self._base: list[Tensor] = []
        self._batch: EditBatch | None = None
        self._in_step: list[tuple[list[int], Tensor]] = []
        self._started = 0.0
        self._n_own_steps = 0

    @property
    def language_model(self) -> LanguageModel:
        """The LM, for the DataModule and the callbacks."""
        return self.lm

    @property
    def is_independent(self) -> bool:
        """Whether each edit is trained from the base weights."""
        return str(self.hparams["protocol"]) == "independent"

    @property
    def is_stacked(self) -> bool:
        """Whether edits are trained side by side, each in its own adapter."""
        return self.is_independent and self.hparams["method"] == "lora"

    @property
    def edit_schedule(self) -> EditSchedule:
        """How the DataModule deals edits into steps."""
        alone = self.is_independent and not self.is_stacked
        return EditSchedule(
            self.hparams["protocol"],
            1 if alone else self.hparams["edits_per_step"],
            self.hparams["steps_per_edit"] if self.is_independent else 1,
        )

    def adapter_context(self, which: Sequence[int]) -> AbstractContextManager[object]:
        """Context in which row i of a forward is answered by the copy of the which[i]-th edit."""
        return nullcontext() if self.adapters is None else self.adapters.rows(which)

    # -- setting up ------------------------------------------------------------------------------

    def setup(self, stage: str) -> None:
        """Refuse what cannot work, before the LM is loaded.

        Raises:
            ConfigError: Settings that contradict each other.
            OutputError: The run's folder cannot be written.
        """
        del stage
        check_strategy(self.trainer)
        if is_sharded(self.trainer):
            wrong = [name for name in ("forecast", "save_model") if self.hparams[name]]
            if self.is_independent or wrong:
                raise ConfigError(
                    "an LM in pieces is taught joint edits, without forecast and without "
                    "save_model: set model.protocol to joint, model.forecast and model.save_model "
                    "to false, or lay configs/trainer/ddp.yaml over the study."
                )
        if self.is_independent and self.trainer.accumulate_grad_batches != 1:
            raise ConfigError(
                "trainer.accumulate_grad_batches is "
                f"{self.trainer.accumulate_grad_batches}, but independent edits are trained a step "
                "a batch. Leave it at 1, or set model.protocol to joint."
            )
        if not is_dry_run(self.trainer):
            folder = run_folder(self.trainer)
            if self.trainer.is_global_zero:
                check_writable(folder)

    def configure_callbacks(self) -> list[L.Callback]:
        """Watch the edits' own relation, also where the config names no callback that does."""
        from lincorr_lightning.callbacks import Generalization, GradientCorrelation

        relation = self._edits_data.relation.name
        found: list[L.Callback] = []
        for kind in (Generalization, GradientCorrelation):
            given = [c for c in self.trainer.callbacks if isinstance(c, kind)]  # type: ignore[attr-defined]
            if not any(c.relation in (None, relation) for c in given):
                # Lightning puts those that are returned in the place of all others of their kind.
                found += [*given, kind()]
        return found

    def configure_model(self) -> None:
        """Load the LM and say which weights are trained."""
        if self.lm.is_loaded:
            return
        model = self.lm.load().model
        self._fingerprint = self.lm.fingerprint
        if self.is_stacked:
            self.adapters = StackedLoRA(
                model,
                self.hparams["edits_per_step"],
                self.adapter_settings.rank,
                self.adapter_settings.alpha,
                self.adapter_settings.target_modules,
            )
        elif self.hparams["method"] == "lora":
            add_adapter(model, self.adapter_settings)
        else:
            model.requires_grad_(True)
            if self.is_independent:
                self._base = [p.detach().clone() for p in model.parameters()]
        shard_lm(self.lm, self.device_mesh)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """AdamW over what is trained."""
        return torch.optim.AdamW(
            [p for p in self.parameters() if p.requires_grad],
            lr=self.hparams["learning_rate"],
            betas=self.hparams["betas"],
            weight_decay=self.hparams["weight_decay"],
        )

    # -- training --------------------------------------------------------------------------------

    def on_train_start(self) -> None:
        """Forecast, while the LM is as it was."""
        self._started = monotonic()
        if self.is_independent and self.trainer.world_size > 1:
            # Each process trains edits of its own: their gradients have nothing to do with others'.
            self.trainer.strategy.model.require_backward_grad_sync = False  # type: ignore[union-attr, assignment]
        if self.hparams["forecast"] and self.forecasts is None:
            self.forecasts = EditForecasts.make(
                self.lm, self._edits_data, lead=self.hparams["forecast_lead"]
            )

    @property
    def _edits_data(self) -> EditsDataModule:
        data = getattr(self.trainer, "datamodule", None)
        if not isinstance(data, EditsDataModule):
            raise ConfigError(
                f"SourceFinetune is taught by an EditsDataModule; data is {type(data).__name__}. "
                "Pass --data EditsDataModule."
            )
        return data

    def on_train_batch_start(self, batch: EditBatch, batch_idx: int) -> None:
        """Begin an independent edit from the base weights."""
        del batch_idx
        if not batch.first:
            return
        optimizer = self.optimizers(use_pl_optimizer=False)
        assert isinstance(optimizer, torch.optim.Optimizer)
        optimizer.state.clear()
        if self.adapters is not None:
            self.adapters.reset([self.adapter_settings.seed + edit for edit in batch.edits])
        else:
            self._restore()

    @torch.no_grad()
    def _restore(self) -> None:
        for parameter, base in zip(self.lm.model.parameters(), self._base, strict=True):
            parameter.copy_(base)

    def training_step(self, batch: EditBatch, batch_idx: int) -> Tensor:
        """Cross-entropy of the answers' tokens.

        Raises:
            NonFiniteError: The loss is NaN or infinite; it says at which edits.
        """
        del batch_idx
        self._batch = batch
        copies = list(range(len(batch.input_ids)))
        with self.adapter_context(copies) if self.is_stacked else nullcontext():
            losses = answer_losses(self.lm.model, batch)
        self._require("the loss is", losses.isfinite())
        self._in_step.append((batch.edits, losses.detach()))
        asked = (batch.labels != IGNORED).any(1)
        summed, share = (losses * asked).sum(), self._share(asked)
        # The mean over the edits of all processes, of which each knows its own.
        self.log("loss", summed.detach() * share, prog_bar=True, batch_size=1, sync_dist=True)
        # Of edits side by side each has its own mean; the gradient of one does not see the others.
        return summed if self.is_independent else summed * share

    def _share(self, asked: Tensor) -> float:
        """Weight of one edit, so that the mean over processes is the mean over their edits."""
        n = asked.sum().double()
        total = self.trainer.strategy.reduce(n.clone(), reduce_op="sum")
        return self.trainer.world_size / max(float(total), 1.0)

    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        """Update, and look at the weights before a callback or a checkpoint does.

        Raises:
            NonFiniteError: A weight is NaN or infinite; it says at which edits.
        """
        super().optimizer_step(*args, **kwargs)
        assert self._batch is not None
        self._n_own_steps += bool(self._batch.edits)
        with torch.no_grad():
            if self.adapters is not None:
                parts = [p.flatten(1).isfinite().all(1) for p in self.adapters.parameters()]
                finite = torch.stack(parts).all(0)[: len(self._batch.input_ids)]
            else:
                # One pass over the weights, where a look at each of them would take several.
                norm = get_total_norm([p for p in self.parameters() if p.requires_grad])
                if isinstance(norm, DTensor):
                    norm = norm.full_tensor()
                finite = norm.isfinite().expand(len(self._batch.input_ids))
        # Of joint edits the weights are the same everywhere: all processes stop here, or none.
        self._require("after the update a weight is", finite, together=not self.is_independent)
        self._in_step.clear()

    def _require(self, what: str, finite: Tensor, together: bool = False) -> None:
        """Stop at edits that went nonfinite_error.

        Args:
            what: That is not finite, and of what.
            finite: Whether each row of the batch is as it should be.
            together: All processes stop here, and any edit of any of them may be why.
        """
        if bool(finite.all()):
            return
        assert self._batch is not None
        # The row of a process that has no edit belongs to none.
        rows = zip(self._batch.edits, finite.tolist(), strict=False)
        bad = edits_by_loss(self._in_step) if together else [i for i, good in rows if not good]
        raise nonfinite_error(
            self.trainer, what, [self._edits_data.edits[i] for i in bad], together,
            self.hparams["learning_rate"],
        )  # fmt: skip

    def configure_gradient_clipping(
        self,
        optimizer: torch.optim.Optimizer,
        gradient_clip_val: int | float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        """Clip; of edits side by side each by its own norm, as if it were alone."""
        if self.adapters is not None and gradient_clip_val and gradient_clip_algorithm != "value":
            self.adapters.clip_gradients(float(gradient_clip_val))
            return
        self.clip_gradients(optimizer, gradient_clip_val, gradient_clip_algorithm)

    # -- the end ---------------------------------------------------------------------------------

    def on_train_end(self) -> None:
        """Leave the LM as the protocol says, and write the numbers."""
        seconds = monotonic() - self._started
        n_steps = self._count_steps()
        if self._base:
            self._restore()
        if is_dry_run(self.trainer):
            return
        folder = run_folder(self.trainer)
        if self.trainer.is_global_zero:
            if self.hparams["save_model"]:
                save_merged(self.lm, folder / "model")
            write_results(self, self._edits_data, folder, seconds, n_steps)

    def _count_steps(self) -> int:
        """Optimizer steps; of independent edits each process takes its own."""
        if not self.is_independent or self.trainer.world_size == 1:
            return self.global_step
        own = torch.tensor(self._n_own_steps, device=self.device)
        return int(self.trainer.strategy.reduce(own, reduce_op="sum"))

    # -- checkpoints -----------------------------------------------------------------------------

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Of LoRA keep the adapter only; say which LM it is for, and what was foreseen."""
        if self.hparams["method"] == "lora":
            kept = adapter_keys(self)
            state = checkpoint["state_dict"]
            checkpoint["state_dict"] = {name: state[name] for name in state if name in kept}
        name_states(checkpoint, self)
        checkpoint["lm"] = {"name_or_path": self.lm.config.name_or_path, **self._fingerprint}
        checkpoint["n_processes"] = self.trainer.world_size
        checkpoint["forecasts"] = None if self.forecasts is None else self.forecasts.state()

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Take back what was foreseen before training.

        Raises:
            ConfigError: The checkpoint is of another study, LM, or way of training.
        """
        check_resumable(checkpoint, self.hparams, self._fingerprint)
        n_processes = max(self.trainer.world_size, checkpoint.get("n_processes", 1))
        if self.is_independent and n_processes > 1:
            # A checkpoint holds the first process's edit and numbers alone.
            raise ConfigError(
                f"independent edits on {n_processes} processes cannot be resumed: each process "
                "trains edits of its own, and the checkpoint holds those of the first. Begin anew, "
                "or train them on one process."
            )
        if checkpoint.get("forecasts") is not None:
            self.forecasts = EditForecasts.restored(checkpoint["forecasts"])
