"""Source fine-tune: teaches an LM source knowledge (paper, sections 4.1 and 5)."""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from lincorr_lightning.distributed import gather
from lincorr_lightning.errors import CheckpointError, ConfigError, NonFiniteError, listed, require
from lincorr_lightning.finetune import batches
from lincorr_lightning.finetune.adapters import AdapterSettings, add_adapter, save_merged
from lincorr_lightning.finetune.batches import EditBatch, EditTraining
from lincorr_lightning.finetune.edits import Edit
from lincorr_lightning.finetune.results import finetune_results
from lincorr_lightning.finetune.stacked_lora import StackedLoRA
from lincorr_lightning.lm.config import LMConfig
from lincorr_lightning.lm.modes import HALF_PRECISIONS, dtype_name
from lincorr_lightning.lm.sharding_strategy import is_sharded
from lincorr_lightning.results.results import Results
from lincorr_lightning.results.run_folder import collect_callback_results
from lincorr_lightning.results.table import short_name
from lincorr_lightning.study import FIXED_TRAINING, LMStudy, as_settings


class SourceFinetune(LMStudy):
    """Trains an LM on edits of its source knowledge; callbacks measure what else changes.

    The loss is the cross-entropy of the answer's tokens alone. Under the ``joint`` protocol all
    edits are trained in one run. Under ``independent`` each is trained from the base weights, which
    are restored exactly afterwards: this is what the paper's tables 4 to 6 count. Independent edits
    with LoRA are trained many at a time, each in an adapter of its own.

    The LM is trained in eval mode, without dropout, so that an edit depends on nothing but itself
    and a resumed run ends where an uninterrupted one does.

    Args:
        lm: The LM that is taught.
        protocol: ``joint`` or ``independent``.
        method: ``full``, or ``lora`` for low-rank adapters.
        adapter: Rank, alpha and target modules of the adapters.
        edits_per_step: Batch size under ``joint``; edits trained side by side under ``independent``
            with ``lora``. Independent full fine-tuning trains one at a time.
        steps_per_edit: Optimizer steps of each independent edit.
        learning_rate: Learning rate of AdamW; the paper's is 5e-6.
        weight_decay: Weight decay of AdamW.
        prefix: Text before each prompt, such as examples; with `lm.chat_template`, the user's turn.
        save_model: Whether to save the trained LM, adapters merged, as a Hugging Face checkpoint
            in ``model/`` of the run's folder; under ``joint`` only.
    """

    study = "source_finetune"
    batch_type = EditBatch
    trains_lm = True
    float32_only = False
    shards_lm = True
    free_settings = frozenset({"save_model"})
    settings_per_rank = frozenset({"edits_per_step"})

    def __init__(
        self,
        lm: LMConfig = LMConfig(),
        protocol: Literal["joint", "independent"] = "independent",
        method: Literal["full", "lora"] = "full",
        adapter: AdapterSettings = AdapterSettings(),
        edits_per_step: int = 8,
        steps_per_edit: int = 10,
        learning_rate: float = 5e-6,
        weight_decay: float = 0.0,
        save_model: bool = False,
        prefix: str = "",
    ) -> None:
        super().__init__(lm, prefix)
        require("model.edits_per_step", edits_per_step, at_least=1)
        require("model.learning_rate", learning_rate, at_least=0)
        require("model.weight_decay", weight_decay, at_least=0)
        self.is_independent = protocol == "independent"
        if save_model and self.is_independent:
            raise ConfigError("independent edits leave the LM as it was: set save_model to false.")
        self.save_hyperparameters(logger=False)
        self.method = method
        self.learning_rate = learning_rate
        self.weight_decay = weight_decay
        self.save_model = save_model
        self.adapter_settings = as_settings(AdapterSettings, adapter)
        if self.is_independent:
            self.refused_callbacks = FIXED_TRAINING
            self.step_setting = "model.steps_per_edit"
        is_alone = self.is_independent and method == "full"
        #: How the edits are trained; `EditsDataModule` takes it as ``training``.
        self.edit_training = EditTraining(
            method, steps_per_edit, protocol, 1 if is_alone else edits_per_step
        )
        self.adapters: StackedLoRA | None = None
        self._base: list[Tensor] = []
        self._step_edits: list[Edit] = []  # since the last update
        self._seen: set[int] = set()
        self._n_steps_of_rank = 0

    def data_arguments(self) -> dict[str, Any]:
        return {**super().data_arguments(), "training": self.edit_training}

    def adapter_context(self, adapter_ids: Sequence[int]) -> AbstractContextManager[object]:
        """Return a context in which row i of a forward pass uses that adapter, if there are any."""
        return nullcontext() if self.adapters is None else self.adapters.rows(adapter_ids)

    def setup(self, stage: str) -> None:
        if is_sharded(self.trainer) and (self.is_independent or self.save_model):
            raise ConfigError(
                "a sharded LM is trained with model.protocol joint and model.save_model false. "
                "Set these, or add --config configs/trainer/ddp.yaml."
            )
        if self.is_independent:
            if self.trainer.max_epochs == self.trainer.max_steps == -1:
                raise ConfigError(
                    "trainer.max_epochs is -1, so the run would never end. Set it to 1."
                )
            if self.method == "lora" and self.trainer.gradient_clip_val:
                raise ConfigError(
                    "trainer.gradient_clip_val must be null: independent edits are trained side by "
                    "side. Lower model.learning_rate instead."
                )
        self._require_float32()
        super().setup(stage)

    def _require_float32(self) -> None:
        precision = "" if self._trainer is None else str(self._trainer.precision)
        is_half = self.method == "full" and self.lm.dtype in HALF_PRECISIONS
        if is_half or precision in ("bf16-true", "16-true"):
            raise ConfigError(
                f"the LM's weights are in {dtype_name(self.lm.dtype)}, with trainer.precision "
                f"{precision}: half precision rounds away updates of a small learning rate such as "
                "5e-6. Set model.lm.dtype to float32 and trainer.precision to 32-true or "
                "bf16-mixed; with model.method lora, model.lm.dtype may be bfloat16."
            )

    def prepare_lm(self) -> None:
        self._require_float32()  # the dtype may be known only now
        model = self.lm.model
        if self.method == "full":
            model.requires_grad_(True)
            if self.is_independent:
                self._base = [p.detach().clone() for p in model.parameters()]
        elif self.is_independent:
            size = self.edit_training.edits_per_step
            self.adapters = StackedLoRA(model, size, self.adapter_settings)
        else:
            add_adapter(model, self.adapter_settings)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        # Lightning's gradient scaler for float16 does not support the fused one.
        return torch.optim.AdamW(
            [p for p in self.parameters() if p.requires_grad],
            lr=self.learning_rate,
            weight_decay=self.weight_decay,
            fused=self.trainer.precision != "16-mixed",
        )

    def on_train_start(self) -> None:
        if self.is_independent and self.trainer.world_size > 1:
            # Each rank trains edits of its own: their gradients are not averaged.
            self.trainer.strategy.model.require_backward_grad_sync = False  # type: ignore[union-attr, assignment]

    def on_train_batch_start(self, batch: EditBatch, batch_idx: int) -> None:
        protocol = self.edit_training.protocol
        size = self.edit_training.edits_per_step
        fits = isinstance(batch, EditBatch) and (batch.n_steps > 0) == self.is_independent
        if not fits or (self.is_independent and len(batch.input_ids) > size):
            raise ConfigError(
                f"SourceFinetune trains on batches (EditBatch) of {size} {protocol} edits, and not "
                f"on {type(batch).__name__} of other edits. Pass EditsDataModule(..., "
                "training=module.edit_training), or a DataLoader of such batches."
            )
        if not batch.first:
            return
        optimizer = self.optimizers(use_pl_optimizer=False)
        assert isinstance(optimizer, torch.optim.Optimizer)
        optimizer.state.clear()
        if self.adapters is not None:
            self.adapters.reset([self.adapter_settings.seed + number for number in batch.ids])
        else:
            self._restore()

    @torch.no_grad()
    def _restore(self) -> None:
        for parameter, base in zip(self.lm.model.parameters(), self._base, strict=True):
            parameter.copy_(base)

    def training_step(self, batch: EditBatch, batch_idx: int) -> Tensor:
        self._seen.update(batch.ids)
        with self.adapter_context(range(len(batch.input_ids))):
            losses = batches.answer_losses(self.lm.model, batch)
        self._require_finite("the loss is", losses, batch.edits)
        self._step_edits += batch.edits
        has_loss = (batch.labels != batches.IGNORED).any(1)
        n_edits = self.trainer.strategy.reduce(has_loss.sum().double(), reduce_op="sum")
        # The mean over ranks is then that over edits: each rank knows its own edits only.
        weight = self.trainer.world_size / max(float(n_edits), 1.0)
        total = (losses * has_loss).sum()
        self.log("train/loss", total.detach() * weight, prog_bar=True, batch_size=1, sync_dist=True)
        # Edits side by side are summed: the gradient of one does not depend on the others.
        return total if self.is_independent else total * weight

    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        """Update, free the gradients, and check the weights before a callback uses them."""
        super().optimizer_step(*args, **kwargs)
        edits = self._step_edits
        self._n_steps_of_rank += bool(edits)
        with torch.no_grad():
            if self.adapters is not None:
                # A sum is not finite where a term is not, and takes a tenth of checking each.
                sums = [p.float().sum((1, 2)) for p in self.adapters.parameters()]
                total = torch.stack(sums).sum(0)[: max(len(edits), 1)]
            else:
                # One pass over the weights, where checking each of them would take several.
                total = self.trained_norm().reshape(1)
        # Joint weights are the same on all ranks: all of them stop here, or none.
        at = edits if self.is_independent else None
        self._require_finite("after the update a weight is", total, at)
        self._step_edits = []
        self.zero_grad()  # Lightning would keep the gradients during the next forward pass

    def _require_finite(self, what: str, values: Tensor, edits: list[Edit] | None) -> None:
        """Stop if a row's value is not finite, and name its edit; None names those of all ranks."""
        finite = values.isfinite().tolist()
        if all(finite):
            return
        if edits is None:
            edits = [edit for part in gather(self._step_edits) for edit in part]
        else:  # the row of a padding batch has no edit
            edits = [edit for edit, ok in zip(edits, finite, strict=False) if not ok]
        names = [f"{edit.subject!r} -> {edit.answer!r}" for edit in edits]
        where = listed(names, most=3, separator="; ")
        raise NonFiniteError(
            f"{what} NaN or infinite at step {self.trainer.global_step}, at the edit {where}. "
            f"Lower model.learning_rate (it is {self.learning_rate}), or set model.lm.dtype to "
            "float32. A checkpoint that was saved before is not affected."
        )

    def on_train_end(self) -> None:
        if self._base:
            self._restore()
        super().on_train_end()

    def build_results(self) -> Results:
        dataset = batches.edit_dataset(self.trainer)
        protocol = self.edit_training.protocol
        n_seen = len(set().union(*gather(self._seen)))
        n_steps = self.global_step
        if self.is_independent and self.trainer.world_size > 1:  # each rank takes its own
            n_steps = sum(gather(self._n_steps_of_rank))
        run = {
            "protocol": protocol,
            "method": self.method,
            "n_edits": n_seen if dataset is None else len(dataset.edits),
            "n_steps": n_steps,
            "seconds": self.seconds,
        }
        measured = collect_callback_results(self.trainer)
        history: dict[str, Any] = {}
        for callback in self.trainer.callbacks:  # type: ignore[attr-defined]
            if isinstance(getattr(callback, "output", None), Results):  # one of this package
                history |= callback.history
        name = short_name(self.lm.config.name_or_path)
        subtitle = f"{name}, {protocol}, {self.method}, learning rate {self.learning_rate:g}"
        edits = None if dataset is None else dataset.resolved
        return finetune_results(measured, run, edits, history, subtitle)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Replace the parameter numbers in the optimizer states by names.

        The numbers count the trained parameters on one rank, but all parameters where the LM is
        sharded; names are the same in both.
        """
        super().on_save_checkpoint(checkpoint)
        names = [name for name, p in self.named_parameters() if p.requires_grad]
        for state in checkpoint.get("optimizer_states", []):
            for group in state.get("param_groups", []):  # of a sharded LM, rank 0 alone has states
                by_number = dict(zip(group["params"], names, strict=True))
                group["params"] = list(names)
                state["state"] = {by_number[i]: values for i, values in state["state"].items()}

    def write_artifacts(self, folder: Path) -> None:
        if self.save_model:
            save_merged(self.lm, folder / "model")

    @property
    def is_resumable(self) -> bool:
        """Whether a checkpoint has all edits; rank 0 saves only its own in independent training."""
        return not self.is_independent or self.trainer.world_size == 1

    def checkpoint_state(self) -> dict[str, Any]:
        return {"n_ranks": self.trainer.world_size}

    def restore(self, state: Mapping[str, Any]) -> None:
        n_ranks = max(1 if self._trainer is None else self.trainer.world_size, state["n_ranks"])
        if self.is_independent and n_ranks > 1:
            raise CheckpointError(
                f"independent edits on {n_ranks} ranks cannot be resumed: rank 0 saves its own."
            )
