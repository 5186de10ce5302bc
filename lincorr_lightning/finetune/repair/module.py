"""Repair: fine-tunes an LM briefly, so that edits of a source generalize to the target."""

import copy
import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from operator import itemgetter
from pathlib import Path
from typing import Any, Literal

import torch
from lightning.pytorch.callbacks import EarlyStopping
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor
from torch.nn.functional import cross_entropy, kl_div, log_softmax
from transformers import PreTrainedModel

from lincorr_lightning.data.texts import TokenBatch
from lincorr_lightning.distributed import gather
from lincorr_lightning.errors import ConfigError, NonFiniteError, require, require_one_of
from lincorr_lightning.finetune import adapters
from lincorr_lightning.finetune.adapters import AdapterSettings, TrainedLMStudy
from lincorr_lightning.finetune.batches import EditTraining, answer_losses
from lincorr_lightning.finetune.edits import REPAIRED_SUBJECTS, repaired_subjects
from lincorr_lightning.finetune.optimizer_step import trained_edits
from lincorr_lightning.finetune.repair.datamodule import (
    DomainPrompts,
    RepairBatch,
    RepairDataset,
    StatementBatch,
)
from lincorr_lightning.finetune.repair.results import repair_results, summarize_cases
from lincorr_lightning.finetune.stacked_lora import StackedLoRA
from lincorr_lightning.functional import Outcome, outcome_codes
from lincorr_lightning.lm.config import LMConfig
from lincorr_lightning.lm.modes import evaluating
from lincorr_lightning.results.results import Results
from lincorr_lightning.results.run_folder import collect_callback_results, is_dry_run
from lincorr_lightning.study import FIXED_TRAINING, as_settings, require_batch

MAX_UNLEARNED = 0.02  # largest drop in the share of learned edits without a warning
_SEEDS_PER_EPOCH = 1_000_000


class Repair(TrainedLMStudy):
    """Fine-tunes an LM on a few hundred examples, and measures edits before and after.

    Examples are statements, or edits. An edit is first taught in an adapter of its own, as
    `SourceFinetune` with LoRA does; the loss is then that of a teacher (`teacher`) at the target
    prompt, in that adapter, plus the KL divergence of other knowledge from the LM before, and
    that of source and target without the adapter: subjects that are not edited keep theirs. Its
    gradient is that of the LM alone: the adapter is constant (Finn et al. 2017, section 5.2,
    first order). In either case, the KL divergence of predictions in other texts is added.

    Edits of the same relation are measured before and after, in the LM's own dtype: those of source
    answers that are in the examples (``shown``), and of others (``held_out``).

    It trains on any DataLoader that yields `RepairBatch` or `StatementBatch`, and measures batches
    of `RepairBatch` and `TokenBatch`, such as those of `RepairDataModule`.

    Args:
        lm: The LM that is repaired.
        method: ``lora``, or ``full`` for all weights.
        adapter: Rank, alpha and target modules of the repair's own adapter.
        learning_rate: Learning rate of AdamW.
        teacher: What the edited LM learns to say: the ``reference`` (cross-entropy), or what the LM
            before the repair says ``in_context``, without the edit, after the statement of the new
            answer (KL divergence over the target labels): its own conclusion, without a reference.
        preserve_weight: Weight of the KL divergence from the LM before the repair on preserved
            knowledge, over its labels (mean per prompt, in nats).
        preserve_unedited: Whether the same is done for source and target without an edit.
        text_weight: Weight of the KL divergence from the LM before the repair on preserved texts,
            over the vocabulary (mean per token, in nats).
        edit_adapter: Adapters that the edits are taught in.
        edit_learning_rate: Learning rate of the edits.
        steps_per_edit: Optimizer steps that teach an edit.
        edits_per_step: Edits that are taught side by side at most, on each rank.
        prefix: Text before each prompt, such as examples; with `lm.chat_template`, the user's turn.
        save_model: Whether to save the repaired LM, its adapter merged, as a Hugging Face
            checkpoint in ``model/`` of the run's folder: the LM to make one's own edits of. Its
            config.json lists the subjects of the examples of `RepairDataModule`.
    """

    study = "repair"
    batch_type = RepairBatch
    refused_callbacks = (*FIXED_TRAINING, EarlyStopping)
    free_settings = frozenset({"edits_per_step", "save_model"})
    edit_adapters: StackedLoRA  # after `prepare_lm`

    def __init__(
        self, lm: LMConfig = LMConfig(), method: Literal["full", "lora"] = "lora",
        adapter: AdapterSettings = AdapterSettings(rank=16, alpha=32), learning_rate: float = 5e-4,
        teacher: Literal["reference", "in_context"] = "reference",
        preserve_weight: float = 5.0, preserve_unedited: bool = True, text_weight: float = 5.0,
        edit_adapter: AdapterSettings = AdapterSettings(), edit_learning_rate: float = 2e-3,
        steps_per_edit: int = 10, edits_per_step: int = 32, save_model: bool = False,
        prefix: str = "",
    ) -> None:  # fmt: skip
        super().__init__(lm, method, learning_rate, adapter, prefix=prefix)
        require_one_of("model.teacher", teacher, ("reference", "in_context"))
        require("model.preserve_weight", preserve_weight, at_least=0)
        require("model.text_weight", text_weight, at_least=0)
        require("model.edit_learning_rate", edit_learning_rate, at_least=0)
        require("model.edits_per_step", edits_per_step, at_least=1)
        self.save_hyperparameters(logger=False)
        self.preserve_weight, self.preserve_unedited = preserve_weight, preserve_unedited
        self.text_weight, self.edits_per_step = text_weight, edits_per_step
        self.save_model, self.teacher = save_model, teacher
        self.edit_training = EditTraining(
            "lora", edit_learning_rate, steps_per_edit, as_settings(AdapterSettings, edit_adapter)
        )
        #: What each measured edit did, ``before`` the repair and ``after`` the last validation.
        self.cases: dict[str, list[dict[str, Any]]] = {"before": [], "after": []}
        self.perplexity: dict[str, float] = {}
        self._measured: list[dict[str, Any]] = []  # in this validation, on this rank
        self._text_losses: list[tuple[float, int]] = []
        # The LM before, where its own weights are trained; in a list, so that it is no submodule.
        self._reference: list[PreTrainedModel] = []

    def setup(self, stage: str) -> None:
        """Refuse settings with which the LM would not be measured before and after all epochs."""
        trainer = self.trainer
        epochs, every = trainer.max_epochs or -1, trainer.check_val_every_n_epoch or 1
        limits = trainer.num_sanity_val_steps, trainer.limit_val_batches, trainer.max_steps
        is_measured = limits == (math.inf, 1.0, -1) and epochs >= 1 and epochs % every == 0
        if stage == "fit" and not is_measured and not is_dry_run(trainer):
            raise ConfigError(
                "a repair measures all edits before it trains and after its last epoch. Set "
                "trainer.num_sanity_val_steps and trainer.max_steps to -1, limit_val_batches to "
                f"1.0, and max_epochs to a multiple of check_val_every_n_epoch ({every})."
            )
        kind = getattr(getattr(trainer, "datamodule", None), "kind", "edits")
        if self.teacher == "in_context" and kind != "edits":
            raise ConfigError(
                f"model.teacher in_context needs data.examples edits, not {kind}: a statement is "
                "learned as it is written, and has no teacher. Set model.teacher to reference."
            )
        super().setup(stage)

    def prepare_lm(self) -> None:
        """Add adapters for the edits and for the repair."""
        super().prepare_lm()
        model = self.lm.model
        if self.method == "full":
            self._reference = [copy.deepcopy(model).requires_grad_(False)]
        # Before peft's adapter, whose layers then contain those of the edits.
        self.edit_adapters = StackedLoRA(
            model, self.edits_per_step, self.edit_training.adapter
        ).requires_grad_(False)
        self.train_lm()

    def training_step(self, batch: RepairBatch | StatementBatch, batch_idx: int) -> Tensor:
        """Return the loss of statements, or of the target of edits."""
        statements = () if self.teacher == "in_context" else (StatementBatch,)
        require_batch(self, batch, RepairBatch, *statements)
        # Small gradients of edits would underflow in autocast.
        with evaluating(self.lm), torch.autocast(self.device.type, enabled=False):
            if isinstance(batch, StatementBatch):
                loss = answer_losses(self.lm.model, batch).mean()
            else:  # edits are taught before the texts take memory
                loss = self._edit_loss(batch)
            if len(batch.texts):
                loss = loss + self._text_loss(batch.texts)
        if not loss.isfinite():
            raise NonFiniteError(
                f"the loss is NaN or infinite at step {self.global_step}. Lower "
                f"model.learning_rate ({self.learning_rate}), or set model.lm.dtype to float32."
            )
        self._log("loss", loss)
        return loss

    def _log(self, name: str, value: Tensor) -> None:
        is_loss = name == "loss"
        self.log(f"train/{name}", value.detach(), prog_bar=is_loss, batch_size=1, sync_dist=True)

    def _text_loss(self, texts: Tensor) -> Tensor:
        ids = self._with_prefix(texts)
        before_repair: Any = self._reference[0] if self._reference else self.lm.model
        before_repair.to(self.device)  # the reference is no submodule, which Lightning would move
        with torch.no_grad(), adapters.without_adapter(before_repair):
            before = before_repair(input_ids=ids, use_cache=False).logits
        after = self.lm.model(input_ids=ids, use_cache=False).logits
        change = _divergence(*(logits.float().flatten(0, 1) for logits in (after, before)))
        self._log("text_kl", change)
        return self.text_weight * change

    def _with_prefix(self, tokens: Tensor) -> Tensor:
        prefix = torch.tensor([self.lm.prefix] * len(tokens), device=tokens.device).long()
        return torch.cat([prefix, tokens], 1)

    def _edit_loss(self, batch: RepairBatch) -> Tensor:
        # New adapters in each epoch, and others than those of the measured edits.
        with self._taught(batch, _SEEDS_PER_EPOCH * (self.current_epoch + 1)):
            target, *others = self._read(batch.target, *batch.others.values(), taught=True)
        if self.teacher == "in_context":
            loss = _divergence(target, batch.before["in_context"])
        else:
            log_p = log_softmax(target, 1)
            loss = -log_p.masked_fill(~batch.reference_mask, -torch.inf).logsumexp(1).mean()
        self._log("target_loss", loss)
        changes = {"preserve_kl": list(zip(others, batch.others, strict=True))}
        if self.preserve_unedited:
            unedited = self._read(batch.source, batch.target)
            changes["unedited_kl"] = list(zip(unedited, ("source", "target"), strict=True))
        for name, parts in changes.items():
            if parts:
                values = [_divergence(after, batch.before[kind]) for after, kind in parts]
                change = torch.stack(values).mean()
                self._log(name, change)
                loss = loss + self.preserve_weight * change
        return loss

    @contextmanager
    def _taught(self, batch: RepairBatch, first_seed: int = 0) -> Iterator[None]:
        first_seed += self.edit_training.adapter.seed
        seeds = [first_seed + number for number in batch.edits.ids]
        taught = trained_edits(self.lm, self.edit_adapters, batch.edits, self.edit_training, seeds)
        with ExitStack() as stack:
            with adapters.merged_adapter(self.lm.model):  # constant while the edits are trained
                stack.enter_context(taught)
            yield

    def _read(self, *prompts: DomainPrompts, taught: bool = False) -> list[Tensor]:
        """Return the logits after each kind of prompts, of the same subjects, in one pass.

        The prompts of a subject are successive rows; of `taught` edits, they share its adapter.
        """
        n, stack = len(prompts), self.edit_adapters
        rows = [row for own in zip(*(one.rows for one in prompts), strict=True) for row in own]
        context = (lambda chosen: stack.rows([i // n for i in chosen])) if taught else None
        logits = self.lm(rows, torch.cat([one.token_ids for one in prompts]), n, context)
        parts = logits.split([len(one.token_ids) for one in prompts], 1)
        return [part[kind::n] for kind, part in enumerate(parts)]

    def validation_step(self, batch: RepairBatch | TokenBatch, batch_idx: int) -> None:
        if batch.is_padding:  # the LM is not sharded, so that no other rank waits for this one
            return
        if isinstance(batch, TokenBatch):
            ids = self._with_prefix(batch.tokens)
            logits = self.lm.model(input_ids=ids[:, :-1], use_cache=False).logits.float()
            losses = cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="none")
            self._text_losses.append((float(losses.sum()), losses.numel()))
            return
        # Lightning validates in inference mode, whose tensors cannot be trained with.
        exactly = torch.autocast(self.device.type, enabled=False)
        with torch.inference_mode(False), evaluating(self.lm), exactly:
            self._measured += self._measure(copy.deepcopy(batch))

    def _measure(self, batch: RepairBatch) -> list[dict[str, Any]]:

        @torch.no_grad()
        def leading(*prompts: DomainPrompts, taught: bool = False) -> list[Tensor]:
            return [logits.argmax(1).cpu() for logits in self._read(*prompts, taught=taught)]

        others = batch.others.values()
        before, *old = leading(batch.target, *others)
        (in_context,) = leading(batch.in_context)
        with self._taught(batch):
            source, after, *new = leading(batch.source, batch.target, *others, taught=True)
        kept = {name: old[i] == new[i] for i, name in enumerate(batch.others)}
        mask, target_shown = batch.reference_mask.cpu(), batch.target_shown.tolist()
        codes = outcome_codes(before, after, mask)
        tokens = batch.target.token_ids.tolist()
        texts = [str(self.lm.tokenizer.decode([token])).strip() for token in tokens]
        return [
            {
                "part": batch.part, "number": batch.edits.ids[i], "subject": edit.subject,
                "source_answer": edit.answer,
                "reference": "|".join(texts[t] for t in mask[i].nonzero().flatten().tolist()),
                "answer_before": texts[before[i]], "answer_after": texts[after[i]],
                "outcome": list(Outcome)[int(codes[i])].value,
                "source_learned": bool(source[i] == edit.label), "target_shown": target_shown[i],
                "right_before": bool(mask[i, before[i]]),
                "in_context": bool(mask[i, in_context[i]]),
                "random": float(mask[i].double().mean()),
                **{f"{name}_unchanged": bool(same[i]) for name, same in kept.items()},
            }
            for i, edit in enumerate(batch.edits.edits)
        ]  # fmt: skip

    def on_validation_epoch_end(self) -> None:
        """Log the shares of all ranks' edits; those before training are only kept."""
        cases = [case for part in gather(self._measured) for case in part]
        measured = sorted(cases, key=itemgetter("part", "number"))
        losses = [pair for part in gather(self._text_losses) for pair in part]
        self._measured, self._text_losses = [], []
        stage = "before" if self.trainer.sanity_checking else "after"
        if stage == "before" and self.cases[stage]:  # of the run that is resumed
            return
        self.cases[stage] = measured
        if losses:
            total, n = (sum(column) for column in zip(*losses, strict=True))
            self.perplexity[stage] = math.exp(min(total / n, 700.0))  # the largest float
        if stage == "before":
            return
        before = summarize_cases(self.cases["before"])
        for part, summary in summarize_cases(measured).items():
            learned = before.get(part, summary)["source_learned"]
            if summary["source_learned"] < learned - MAX_UNLEARNED:
                rank_zero_warn(
                    f"the repaired LM learns {summary['source_learned']:.0%} of the {part} edits, "
                    f"and {learned:.0%} before: their outcomes cannot be compared. Lower "
                    "model.learning_rate, or raise model.steps_per_edit."
                )
            for name in ("source_learned", *Outcome):
                self.log(f"val/{part}/{name}", summary[name])
            for name, share in summary["macro"].items():
                self.log(f"val/{part}/macro_{name}", share)
        if losses:
            self.log("val/perplexity", self.perplexity[stage])

    @property
    def _dataset(self) -> RepairDataset | None:
        dataset = getattr(self.trainer.train_dataloader, "dataset", None)
        return dataset if isinstance(dataset, RepairDataset) else None

    def build_results(self) -> Results:
        if not self.cases["after"] and not is_dry_run(self.trainer):
            raise ConfigError(
                "training ended without a validation, so the repaired LM was not measured: remove "
                "callbacks that stop before trainer.max_epochs."
            )
        own = self.cases, self.perplexity, self.global_step, self._dataset
        return repair_results(*own, collect_callback_results(self.trainer))

    def write_artifacts(self, folder: Path) -> None:
        """Save the repaired LM if wanted."""
        if self.save_model:
            examples = () if self._dataset is None else self._dataset.examples
            subjects = repaired_subjects(self.lm) | {edit.subject for edit in examples}
            config = {REPAIRED_SUBJECTS: sorted(subjects)} if subjects else {}
            adapters.save_merged(self.lm, folder / "model", config)

    def checkpoint_state(self) -> dict[str, Any]:
        """Return the measurements."""
        return {"cases": self.cases, "perplexity": self.perplexity}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Take over the measurements."""
        self.cases, self.perplexity = dict(state["cases"]), dict(state["perplexity"])

    def _kept_keys(self, keys: Iterable[str]) -> set[str]:
        # The adapters of edits are new in every step.
        return {key for key in super()._kept_keys(keys) if not key.startswith("edit_adapters.")}


def _divergence(after: Tensor, before: Tensor) -> Tensor:
    log_p, log_before = log_softmax(after, 1), log_softmax(before, 1)
    return kl_div(log_p, log_before, log_target=True, reduction="batchmean")
