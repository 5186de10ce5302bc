"""Repair: fine-tunes an LM briefly, so that edits of a source generalize to the target."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor
from torch.nn.functional import cross_entropy, kl_div, log_softmax

from lincorr_lightning.data.tokenized_texts import TokenBatch
from lincorr_lightning.distributed import gather
from lincorr_lightning.errors import ConfigError, NonFiniteError, require
from lincorr_lightning.finetune.adapters import (
    AdapterSettings,
    TrainedLMStudy,
    add_adapter,
    save_merged,
    without_adapter,
)
from lincorr_lightning.finetune.batches import answer_losses
from lincorr_lightning.finetune.edits import REPAIRED_SUBJECTS, repaired_subjects
from lincorr_lightning.finetune.optimizer_step import EditTraining, trained_edits
from lincorr_lightning.finetune.repair.batches import (
    DomainPrompts,
    RepairBatch,
    RepairDataset,
    StatementBatch,
)
from lincorr_lightning.finetune.repair.results import MeasuredEdit, repair_results, summarize_edits
from lincorr_lightning.finetune.stacked_lora import StackedLoRA
from lincorr_lightning.functional import Outcome, outcome_codes
from lincorr_lightning.lm.config import LMConfig
from lincorr_lightning.lm.modes import evaluating
from lincorr_lightning.results.results import Results
from lincorr_lightning.results.run_folder import collect_callback_results, is_dry_run
from lincorr_lightning.study import as_settings

if TYPE_CHECKING:
    from transformers import PreTrainedModel

MAX_UNLEARNED = 0.02
"""Largest drop in the share of learned edits without a warning."""
_SEEDS_PER_EPOCH = 1_000_000


class Repair(TrainedLMStudy):
    """Fine-tunes an LM on a few hundred examples, and measures edits before and after.

    Examples are statements, or edits. An edit is first taught in an adapter of its own, as
    `SourceFinetune` with LoRA does; the loss is then the cross-entropy of its reference at the
    target prompt, in that adapter, plus the KL divergence of other knowledge from the LM before,
    and that of source and target without the adapter: subjects that are not edited keep theirs. Its
    gradient is that of the LM alone: the adapter is constant (Finn et al. 2017, section 5.2,
    first order). To the loss of either kind of example, the KL divergence of the LM's predictions
    in other texts is added.

    Edits of the same relation are measured before and after: those of source answers that are in
    the examples (``shown``), and of others (``held_out``). ``val/`` logs the shares. Edits are
    measured in the LM's own dtype, without autocast.

    It trains on any DataLoader that yields `RepairBatch` or `StatementBatch`, and measures batches
    of `RepairBatch` and `TokenBatch`, such as those of `RepairDataModule`.

    Args:
        lm: The LM that is repaired.
        method: ``lora``, or ``full`` for all weights.
        adapter: Rank, alpha and target modules of the repair's own adapter.
        learning_rate: Learning rate of AdamW.
        preserve_weight: Weight of the KL divergence from the LM before the repair on preserved
            knowledge, over its labels (mean per prompt, in nats).
        preserve_unedited: Whether the same is done for source and target without an edit.
        text_weight: Weight of the KL divergence from the LM before the repair on preserved texts,
            over the vocabulary (mean per token, in nats).
        edit_adapter: Adapters that the edits are taught in.
        edit_learning_rate: Learning rate of the edits.
        steps_per_edit: Optimizer steps that teach an edit.
        edits_per_step: Edits that are taught side by side at most, on each rank.
        save_model: Whether to save the repaired LM, its adapter merged, as a Hugging Face
            checkpoint in ``model/`` of the run's folder: the LM to make one's own edits of. Its
            config.json lists the subjects of the examples of `RepairDataModule`.

    Attributes:
        before: The measured edits before the repair.
        after: The measured edits after the last validation.

    Raises:
        LanguageModelError: The LM cannot be read, or has no such target modules.
        ConfigError: A setting is out of range.
    """

    study = "repair"
    batch_type = RepairBatch
    free_settings = frozenset({"edits_per_step", "save_model"})

    def __init__(
        self,
        lm: LMConfig = LMConfig(),  # noqa: B008 (frozen)
        method: Literal["full", "lora"] = "lora",
        adapter: AdapterSettings = AdapterSettings(rank=16, alpha=32),  # noqa: B008 (frozen)
        learning_rate: float = 5e-4,
        preserve_weight: float = 5.0,
        preserve_unedited: bool = True,
        text_weight: float = 5.0,
        edit_adapter: AdapterSettings = AdapterSettings(),  # noqa: B008 (frozen)
        edit_learning_rate: float = 2e-3,
        steps_per_edit: int = 10,
        edits_per_step: int = 32,
        save_model: bool = False,
    ) -> None:
        super().__init__(lm, method, learning_rate)
        require("model.preserve_weight", preserve_weight, at_least=0)
        require("model.text_weight", text_weight, at_least=0)
        require("model.edit_learning_rate", edit_learning_rate, at_least=0)
        require("model.edits_per_step", edits_per_step, at_least=1)
        self.save_hyperparameters(logger=False)
        self.adapter_settings = as_settings(AdapterSettings, adapter)
        self.preserve_weight, self.preserve_unedited = preserve_weight, preserve_unedited
        self.text_weight, self.edits_per_step = text_weight, edits_per_step
        self.save_model = save_model
        self.edit_training = EditTraining(
            "lora", edit_learning_rate, steps_per_edit, as_settings(AdapterSettings, edit_adapter)
        )
        self.edit_adapters: StackedLoRA | None = None
        self.before: list[MeasuredEdit] = []
        self.after: list[MeasuredEdit] = []
        self.perplexity: dict[str, float] = {}
        self._measured: list[MeasuredEdit] = []
        self._text_losses: list[tuple[float, int]] = []
        # The LM before, where its own weights are trained; in a list, so that it is no submodule.
        self._reference: list[PreTrainedModel] = []

    # -- setup -------------------------------------------------------------------------------------

    def setup(self, stage: str) -> None:
        """Refuse settings that cannot work, before the LM is loaded."""
        if stage == "fit" and not is_dry_run(self.trainer):
            self._require_both_measurements()
        super().setup(stage)

    def _require_both_measurements(self) -> None:
        """Refuse settings with which the LM would not be measured before and after all epochs."""
        trainer = self.trainer
        epochs, every = trainer.max_epochs or -1, trainer.check_val_every_n_epoch or 1
        for fits, settings, needs in (
            (trainer.num_sanity_val_steps == math.inf,
             f"num_sanity_val_steps is {trainer.num_sanity_val_steps}",
             "measures all edits before it trains. Set it to -1"),
            (trainer.limit_val_batches == 1.0,
             f"limit_val_batches is {trainer.limit_val_batches}",
             "measures all edits. Set it to 1.0, and data.n_edits to fewer edits"),
            (epochs >= 1 and trainer.max_steps == -1,
             f"max_epochs is {trainer.max_epochs} and trainer.max_steps {trainer.max_steps}",
             "ends with its last epoch, after which all edits are measured again. Set "
             "trainer.max_epochs alone"),
            (epochs % every == 0,
             f"max_epochs, {epochs}, is not a multiple of trainer.check_val_every_n_epoch, {every}",
             "measures all edits after its last epoch. Set both to the same number"),
        ):  # fmt: skip
            if not fits:
                raise ConfigError(f"trainer.{settings}, but a repair {needs}.")

    def prepare_lm(self) -> None:
        """Add adapters for the edits and for the repair."""
        super().prepare_lm()
        model = self.lm.model
        if self.method == "full":
            self._reference = [copy.deepcopy(model).requires_grad_(False)]
        # Before peft's adapter, whose layers then contain those of the edits.
        self.edit_adapters = StackedLoRA.of(
            model, self.edits_per_step, self.edit_training.adapter
        ).requires_grad_(False)
        if self.method == "full":
            model.requires_grad_(True)
        else:
            add_adapter(model, self.adapter_settings)

    def on_fit_start(self) -> None:
        """Move the LM as it was to the device of the trained one."""
        for model in self._reference:
            model.to(self.device)  # type: ignore[arg-type]

    # -- training ----------------------------------------------------------------------------------

    def training_step(self, batch: RepairBatch | StatementBatch, batch_idx: int) -> Tensor:
        """Return the loss of statements, or of the target of edits."""
        del batch_idx
        # Without autocast, as are the logits before: small gradients of edits would underflow.
        with evaluating(self.lm), torch.autocast(self.device.type, enabled=False):
            if not isinstance(batch, RepairBatch | StatementBatch):
                raise ConfigError(
                    "Repair trains on RepairBatch or StatementBatch, not on "
                    f"{type(batch).__name__}. Pass --data RepairDataModule."
                )
            loss = self._text_loss(batch.texts) if len(batch.texts) else torch.zeros(())
            if isinstance(batch, StatementBatch):
                loss = loss + answer_losses(self.lm.model, batch).mean()
            else:
                loss = loss + self._edit_loss(batch)
        if not loss.isfinite():
            raise NonFiniteError(
                f"the loss is NaN or infinite at step {self.global_step}. Lower "
                f"model.learning_rate (it is {self.learning_rate}), or set "
                "model.lm.dtype to float32."
            )
        self.log("train/loss", loss.detach(), prog_bar=True, batch_size=1, sync_dist=True)
        return loss

    def _text_loss(self, texts: Tensor) -> Tensor:
        """Return the weighted change of the predictions of each token of some texts."""
        ids = self._with_prefix(texts)
        # Before the graph of the trained LM: its adapter is switched off and on.
        with torch.no_grad():
            if self._reference:
                before = self._reference[0](input_ids=ids, use_cache=False).logits
            else:
                with without_adapter(self.lm.model):
                    before = self.lm.model(input_ids=ids, use_cache=False).logits
        after = self.lm.model(input_ids=ids, use_cache=False).logits
        change = kl_div(
            log_softmax(after.float().flatten(0, 1), 1),
            log_softmax(before.float().flatten(0, 1), 1),
            log_target=True,
            reduction="batchmean",
        )
        self.log("train/text_kl", change.detach(), batch_size=1, sync_dist=True)
        return self.text_weight * change

    def _with_prefix(self, tokens: Tensor) -> Tensor:
        prefix = torch.tensor([self.lm.prefix] * len(tokens), device=tokens.device).long()
        return torch.cat([prefix, tokens], 1)

    def _edit_loss(self, batch: RepairBatch) -> Tensor:
        assert self.edit_adapters is not None
        n = len(batch.edits.ids)
        self._check_size(n)
        # New adapters in each epoch, and others than those of the measured edits.
        epoch = self.edit_training.adapter.seed + _SEEDS_PER_EPOCH * (self.current_epoch + 1)
        seeds = [epoch + number for number in batch.edits.ids]
        with trained_edits(self.lm, self.edit_adapters, batch.edits, self.edit_training, seeds):
            log_p = log_softmax(self.lm(*batch.target), 1)
            target = -log_p.masked_fill(~batch.reference_mask, -torch.inf).logsumexp(1).mean()
            others = [
                self._change(prompts, batch.logits_before[name])
                for name, prompts in batch.other_prompts.items()
            ]
        changes = {"train/preserve_kl": others}
        if self.preserve_unedited:
            sides = zip((batch.source, batch.target), batch.unedited_before, strict=True)
            changes["train/unedited_kl"] = [self._change(*side) for side in sides]
        self.log("train/target_loss", target.detach(), batch_size=1, sync_dist=True)
        loss = target
        for name, values in changes.items():
            if values:
                change = torch.stack(values).mean()
                self.log(name, change.detach(), batch_size=1, sync_dist=True)
                loss = loss + self.preserve_weight * change
        return loss

    def _change(self, prompts: DomainPrompts, before: Tensor) -> Tensor:
        """Return the mean KL divergence of the labels' probabilities from those before (nats)."""
        log_p, log_before = (log_softmax(x, 1) for x in (self.lm(*prompts), before))
        return kl_div(log_p, log_before, log_target=True, reduction="batchmean")

    def _check_size(self, n: int) -> None:
        if n > self.edits_per_step:
            raise ConfigError(
                f"a batch has {n} edits, but at most {self.edits_per_step} are taught "
                "side by side. Raise model.edits_per_step, or lower data.batch_size and "
                "data.eval_batch_size."
            )

    # -- measuring ---------------------------------------------------------------------------------

    def validation_step(self, batch: RepairBatch | TokenBatch, batch_idx: int) -> None:
        """Measure edits, or the perplexity of texts."""
        del batch_idx
        if batch.is_padding:  # the LM is not sharded, so that no other rank waits for this one
            return
        if isinstance(batch, TokenBatch):
            losses = self._next_token_losses(batch.tokens)
            self._text_losses.append((float(losses.sum()), losses.numel()))
            return
        # Lightning validates in inference mode, whose tensors cannot be trained with.
        without_autocast = torch.autocast(self.device.type, enabled=False)
        with torch.inference_mode(False), evaluating(self.lm), without_autocast:
            self._measured += self._measure(copy.deepcopy(batch))

    @torch.no_grad()
    def _next_token_losses(self, tokens: Tensor) -> Tensor:
        ids = self._with_prefix(tokens)
        logits = self.lm.model(input_ids=ids[:, :-1], use_cache=False).logits.float()
        return cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="none")

    def _measure(self, batch: RepairBatch) -> list[MeasuredEdit]:
        assert self.edit_adapters is not None
        self._check_size(len(batch.edits.ids))
        seeds = [self.edit_training.adapter.seed + i for i in batch.edits.ids]
        with torch.no_grad():
            before, in_context = (
                self.lm(*prompts).argmax(1).cpu() for prompts in (batch.target, batch.in_context)
            )
            others = {name: self.lm(*p).argmax(1) for name, p in batch.other_prompts.items()}
        edits = batch.edits
        taught = trained_edits(self.lm, self.edit_adapters, edits, self.edit_training, seeds)
        with taught, torch.no_grad():
            source, after = (
                self.lm(*prompts).argmax(1).cpu() for prompts in (batch.source, batch.target)
            )
            kept = {n: self.lm(*batch.other_prompts[n]).argmax(1) == o for n, o in others.items()}
        mask, target_shown = batch.reference_mask.cpu(), batch.target_shown.tolist()
        codes = outcome_codes(before, after, mask)
        tokens = batch.target.token_ids.tolist()
        texts = [str(self.lm.tokenizer.decode([token])).strip() for token in tokens]
        return [
            MeasuredEdit(
                part=batch.part,
                number=edits.ids[i],
                subject=edit.subject,
                source_answer=edit.answer,
                reference="|".join(texts[t] for t in mask[i].nonzero().flatten().tolist()),
                answer_before=texts[before[i]],
                answer_after=texts[after[i]],
                outcome=list(Outcome)[int(codes[i])].value,
                source_learned=bool(source[i] == edit.label),
                target_shown=target_shown[i],
                in_context=bool(mask[i, in_context[i]]),
                random=float(mask[i].double().mean()),
                unchanged={name: bool(same[i]) for name, same in kept.items()},
            )
            for i, edit in enumerate(edits.edits)
        ]

    def on_validation_epoch_end(self) -> None:
        """Log the shares of all ranks' edits; those before training are only kept."""
        measured = sorted(
            (edit for part in gather(self._measured) for edit in part),
            key=lambda edit: (edit.part, edit.number),
        )
        losses = [pair for part in gather(self._text_losses) for pair in part]
        self._measured, self._text_losses = [], []
        stage = "before" if self.trainer.sanity_checking else "after"
        if stage == "before" and self.before:  # of the run that is resumed
            return
        if losses:
            total, n = (sum(column) for column in zip(*losses, strict=True))
            self.perplexity[stage] = math.exp(total / n)
        if stage == "before":
            self.before = measured
            return
        self.after = measured
        learned = {p: one["source_learned"] for p, one in summarize_edits(self.before).items()}
        for part, summary in summarize_edits(measured).items():
            if summary["source_learned"] < learned.get(part, 0.0) - MAX_UNLEARNED:
                rank_zero_warn(
                    f"the repaired LM learns {summary['source_learned']:.0%} of the {part} edits, "
                    f"and before the repair {learned[part]:.0%}: their outcomes cannot be "
                    "compared. Lower model.learning_rate, or raise model.steps_per_edit."
                )
            for name in ("source_learned", *Outcome):
                self.log(f"val/{part}/{name}", summary[name])
        if losses:
            self.log("val/perplexity", self.perplexity[stage])

    # -- results -----------------------------------------------------------------------------------

    @property
    def _dataset(self) -> RepairDataset | None:
        dataset = getattr(self.trainer.train_dataloader, "dataset", None)
        return dataset if isinstance(dataset, RepairDataset) else None

    def build_results(self) -> Results:
        """Return what the edits did before and after the repair, and what callbacks measured."""
        if len(self.after) != len(self.before) and not is_dry_run(self.trainer):
            raise ConfigError(
                "training ended without a validation, so the repaired LM was not measured: train "
                "to trainer.max_epochs, and remove callbacks that stop earlier."
            )
        return repair_results(
            self.before, self.after, self.perplexity, self.global_step, self._dataset,
            collect_callback_results(self.trainer),
        )  # fmt: skip

    def write_artifacts(self, folder: Path) -> None:
        """Save the repaired LM if wanted."""
        if self.save_model:
            examples = () if self._dataset is None else self._dataset.examples
            subjects = repaired_subjects(self.lm) | {edit.subject for edit in examples}
            config = {REPAIRED_SUBJECTS: sorted(subjects)} if subjects else {}
            save_merged(self.lm, folder / "model", config)

    # -- checkpoints -------------------------------------------------------------------------------

    def checkpoint_state(self) -> dict[str, Any]:
        """Return the measurements."""
        return {
            "before": [asdict(edit) for edit in self.before],
            "after": [asdict(edit) for edit in self.after],
            "perplexity": dict(self.perplexity),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Take over the measurements."""
        self.before = [MeasuredEdit(**edit) for edit in state["before"]]
        self.after = [MeasuredEdit(**edit) for edit in state["after"]]
        self.perplexity = dict(state["perplexity"])

    def _kept_keys(self, keys: Iterable[str]) -> set[str]:
        # The adapters of edits are new in every step.
        return {key for key in super()._kept_keys(keys) if not key.startswith("edit_adapters.")}
