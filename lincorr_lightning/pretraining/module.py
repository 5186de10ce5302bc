"""Pre-training of a tiny Llama from nothing: how the embedded tiny world was made."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Any

import lightning as L
import torch
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor
from torch.nn.functional import cross_entropy
from torchmetrics import MeanMetric

from lincorr_lightning.errors import ConfigError
from lincorr_lightning.io import atomic_folder, check_writable, write_json
from lincorr_lightning.lm.sharding_strategy import refuse_sharding
from lincorr_lightning.pretraining.datamodule import (
    IGNORED,
    CorpusDataModule,
    PackedBatch,
    RecallBatch,
)
from lincorr_lightning.results.callback_results import collect_callback_results
from lincorr_lightning.results.provenance import versions
from lincorr_lightning.results.run_folder import is_dry_run, run_folder

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM, PreTrainedTokenizerBase

MODEL_FOLDER = "model"
MODEL_FILES = (
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "world.json",
)


@dataclass(frozen=True)
class LlamaSize:
    """Size of a Llama.

    Attributes:
        hidden_size: Width. The people's facts lie in their embeddings: it should be above the
            number of answers of all independent attributes together, or they will not fit side
            by side, and knowledges that have nothing to do with each other will correlate.
        intermediate_size: Width of the feed-forward networks.
        n_layers: Layers. One is enough for one fact about one subject, and learns fastest.
        n_heads: Attention heads of each layer.
        init_std: Standard deviation of the initial weights.
        logit_gain: Initial gain of the last norm. At 1 the first steps are spent on making logits
            large, and push all subjects' embeddings the same way.
        context: Longest text, in tokens.
    """

    hidden_size: int = 256
    intermediate_size: int = 768
    n_layers: int = 1
    n_heads: int = 4
    init_std: float = 0.02
    logit_gain: float = 5.0
    context: int = 64


class Pretraining(L.LightningModule):
    """Trains a Llama from random weights on the text of a `CorpusDataModule`.

    It learns by AdamW under a one-cycle schedule; the loss is taken where the corpus asks for it.
    Validation measures recall: the share of prompts whose true answer's first token is the most
    likely one of the whole vocabulary. At the end, ``model/`` in the run's folder holds the LM as
    Hugging Face loads it, with its tokenizer and its world: pass it as
    ``--model.lm.name_or_path``.

    Args:
        size: Of the LM.
        learning_rate: Highest learning rate.
        weight_decay: Of all matrices, the embedding included.
        off_target_penalty: Weight, at the end of the run, of the mean square of the logits of a
            knowledge's other answers; it grows from 0.
            Cross-entropy leaves them free as long as they are low; a factor of each subject's own
            then runs through all of them, and through all knowledges.
        mixing_epochs: The last epochs, in which subjects are mixed as the corpus says, in a cycle
            of their own; before that each is learned by itself. Without mixing the answers' logits
            are steps: teaching somebody a new city then takes the old country away, but brings no
            new one.
        mixing_learning_rate: Highest learning rate of these epochs.
        warmup: Share of a cycle's steps before its highest learning rate.
        betas: AdamW's decay of its two averages.
        save_dtype: How ``model/`` stores the weights: float32, bfloat16 or float16.
    """

    def __init__(
        self,
        size: LlamaSize | None = None,
        learning_rate: float = 3e-3,
        weight_decay: float = 0.3,
        off_target_penalty: float = 0.1,
        mixing_epochs: int = 2,
        mixing_learning_rate: float = 1e-3,
        warmup: float = 0.1,
        betas: tuple[float, float] = (0.9, 0.95),
        save_dtype: str = "float16",
    ) -> None:
        super().__init__()
        self.size = size or LlamaSize()
        if self.size.hidden_size % self.size.n_heads:
            raise ConfigError(
                f"model.size.hidden_size is {self.size.hidden_size}, which model.size.n_heads "
                f"({self.size.n_heads}) does not divide."
            )
        if save_dtype not in {"float32", "bfloat16", "float16"}:
            raise ConfigError(
                f"model.save_dtype is {save_dtype!r}; it must be float32, bfloat16 or float16."
            )
        self.save_hyperparameters(
            {
                "size": asdict(self.size),
                "learning_rate": learning_rate,
                "weight_decay": weight_decay,
                "off_target_penalty": off_target_penalty,
                "mixing_epochs": mixing_epochs,
                "mixing_learning_rate": mixing_learning_rate,
                "warmup": warmup,
                "betas": tuple(betas),
                "save_dtype": save_dtype,
            }
        )
        self.lm: LlamaForCausalLM | None = None
        self._answers: Tensor
        self._loss = MeanMetric()
        self._recall: dict[str, float] = {}
        self._started = 0.0

    # -- setting up ------------------------------------------------------------------------------

    def setup(self, stage: str) -> None:
        """Fail now, not when all the work is done.

        Raises:
            ConfigError: The strategy splits the LM.
            OutputError: The run's folder cannot be written.
        """
        del stage
        refuse_sharding(self.trainer, "Pretraining")
        folder = run_folder(self.trainer)
        if self.trainer.is_global_zero:
            check_writable(folder)

    def configure_model(self) -> None:
        """Make the LM, once the corpus has a vocabulary."""
        if self.lm is not None:
            return
        from transformers import LlamaConfig, LlamaForCausalLM

        tokenizer, size = self._corpus.tokenizer, self.size
        self.lm = LlamaForCausalLM(
            LlamaConfig(
                vocab_size=len(tokenizer),
                hidden_size=size.hidden_size,
                intermediate_size=size.intermediate_size,
                num_hidden_layers=size.n_layers,
                num_attention_heads=size.n_heads,
                num_key_value_heads=size.n_heads,
                max_position_embeddings=size.context,
                initializer_range=size.init_std,
                tie_word_embeddings=True,
                pad_token_id=tokenizer.pad_token_id,
                bos_token_id=None,
                eos_token_id=tokenizer.eos_token_id,
            )
        )
        with torch.no_grad():
            self.lm.model.norm.weight.fill_(size.logit_gain)
        answers = torch.zeros(len(self._corpus.answers), len(tokenizer))
        for row, token_ids in zip(answers, self._corpus.answers, strict=True):
            row[token_ids] = 1.0
        self.register_buffer("_answers", answers, persistent=False)

    @property
    def _corpus(self) -> CorpusDataModule:
        corpus = getattr(self.trainer, "datamodule", None)
        if not isinstance(corpus, CorpusDataModule):
            raise ConfigError(
                f"Pretraining takes its vocabulary from a CorpusDataModule; data is "
                f"{type(corpus).__name__}. Pass --data CorpusDataModule."
            )
        return corpus

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The corpus's, for callbacks that ask the LM."""
        return self._corpus.tokenizer

    def configure_optimizers(self) -> OptimizerLRScheduler:
        """AdamW, one cycle over all steps."""
        matrices = [p for p in self.parameters() if p.ndim > 1]
        vectors = [p for p in self.parameters() if p.ndim == 1]
        optimizer = torch.optim.AdamW(
            [
                {"params": matrices, "weight_decay": self.hparams["weight_decay"]},
                {"params": vectors, "weight_decay": 0.0},
            ],
            lr=self.hparams["learning_rate"],
            betas=self.hparams["betas"],
        )
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, self._rate)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": schedule, "interval": "step"},
        }

    def _rate(self, step: int) -> float:
        """Learning rate at a step, in units of the highest: one cycle, and one of the mixing."""
        total, start = self._n_steps
        relative = self.hparams["mixing_learning_rate"] / self.hparams["learning_rate"]
        if step < start or start == total:
            return one_cycle(step, start, self.hparams["warmup"])
        return relative * one_cycle(step - start, total - start, self.hparams["warmup"])

    @property
    def _n_steps(self) -> tuple[int, int]:
        """Steps of the run, and how many of them come before the mixing."""
        total = int(self.trainer.estimated_stepping_batches)
        epochs = self.trainer.max_epochs or -1
        mixing = min(self.hparams["mixing_epochs"], max(epochs - 1, 0))
        return total, total if epochs < 1 else total * (epochs - mixing) // epochs

    # -- training --------------------------------------------------------------------------------

    def on_fit_start(self) -> None:
        """Start the clock."""
        self._started = monotonic()

    def on_train_epoch_start(self) -> None:
        """The loss that is reported is the last epoch's."""
        self._loss.reset()

    def training_step(self, batch: PackedBatch, batch_idx: int) -> Tensor:
        """Cross-entropy at the tokens that are asked for; of a mixture, by shares."""
        del batch_idx
        assert self.lm is not None
        total, start = self._n_steps
        done = min(self.global_step / start, 1.0)
        mixing = start <= self.global_step < total
        hidden = self.lm.model(
            inputs_embeds=self._embed(batch, mixing),
            position_ids=batch.position_ids,
            use_cache=False,
        ).last_hidden_state
        asked = batch.targets != IGNORED
        # The head is most of the work of so small an LM: only where a loss is taken.
        targets = batch.targets[asked]
        logits = self.lm.lm_head(hidden[asked]).float()
        loss = cross_entropy(logits, targets)
        second = torch.full_like(targets, IGNORED)
        if mixing:
            second, share = batch.second_targets[asked], batch.second_shares[asked]
            first, other = (
                cross_entropy(logits, t, ignore_index=IGNORED, reduction="none")
                for t in (targets, second)
            )
            loss = torch.lerp(first, other, share).mean()
        asks = batch.asks[asked]
        if not batch.is_padding:
            self._loss.update(loss.detach(), weight=len(targets))
        n_answers = (asks != IGNORED).sum()
        share, share_of_answers = self._shares(batch, asked.sum(), n_answers)
        loss = loss * share
        self.log("loss", loss.detach(), prog_bar=True, batch_size=len(targets), sync_dist=True)
        if self.hparams["off_target_penalty"]:
            penalty = self._off_target(logits, targets, second, asks) * share_of_answers
            # It grows over the run: at full weight from the start it would outweigh learning.
            loss = loss + self.hparams["off_target_penalty"] * done**2 * penalty
        return loss

    def _shares(self, batch: PackedBatch, *counts: Tensor) -> Tensor:
        """Weights of means over these numbers of things; their mean over processes is then one."""
        own = torch.stack(counts).double() * (not batch.is_padding)
        total = self.trainer.strategy.reduce(own.clone(), reduce_op="sum")
        return (self.trainer.world_size * own / total.clamp(min=1)).float()

    def _embed(self, batch: PackedBatch, mixing: bool) -> Tensor:
        """The tokens' embeddings, subjects mixed with their partners."""
        assert self.lm is not None
        embedding = self.lm.get_input_embeddings()
        own: Tensor = embedding(batch.input_ids)
        if not mixing:
            return own
        return torch.lerp(own, embedding(batch.partners), batch.shares[..., None])

    def _off_target(self, logits: Tensor, targets: Tensor, second: Tensor, asks: Tensor) -> Tensor:
        """Mean square of the logits of a knowledge's other answers, where one is asked for."""
        of_answers = asks != IGNORED
        logits, targets, second, asks = (t[of_answers] for t in (logits, targets, second, asks))
        second = torch.where(second == IGNORED, targets, second)
        wrong = self._answers[asks].scatter(1, torch.stack([targets, second], 1), 0.0)
        squares = (logits.square() * wrong).sum(1) / wrong.sum(1).clamp(min=1)
        return squares.mean()

    # -- validation ------------------------------------------------------------------------------

    def on_validation_epoch_start(self) -> None:
        """Recall is counted afresh."""
        self._recall_sums = {name: MeanMetric().to(self.device) for name in self._corpus.knowledges}

    def validation_step(self, batch: RecallBatch, batch_idx: int) -> None:
        """Is the true answer the most likely token of all?"""
        del batch_idx
        assert self.lm is not None
        logits = self.lm(input_ids=batch.input_ids, use_cache=False, logits_to_keep=1).logits[:, -1]
        hits = logits.argmax(-1) == batch.answers
        self._recall_sums[batch.knowledge].update(hits.float())

    def on_validation_epoch_end(self) -> None:
        """Log recall, per knowledge and over all."""
        # Every process asks every metric: the order and number of collectives are the same.
        self._recall = {name: float(sum_.compute()) for name, sum_ in self._recall_sums.items()}
        self.log_dict({f"recall/{name}": value for name, value in self._recall.items()})
        mean = sum(self._recall.values()) / len(self._recall)
        self.log("recall", mean, prog_bar=True)

    # -- the end ---------------------------------------------------------------------------------

    def on_fit_end(self) -> None:
        """Write the LM and the numbers."""
        seconds = monotonic() - self._started
        loss = float(self._loss.compute())
        if not self.trainer.is_global_zero or is_dry_run(self.trainer):
            return
        folder = run_folder(self.trainer)
        self.save_model(folder / MODEL_FOLDER)
        corpus = self._corpus
        assert self.lm is not None
        assert corpus.world is not None
        write_json(
            folder / "results.json",
            {
                "study": "pretraining",
                "loss": loss,
                "recall": self._recall,
                "n_people": len(corpus.world.people),
                "n_tokens": len(corpus.tokenizer),
                "n_parameters": sum(p.numel() for p in self.lm.parameters()),
                "n_steps": self.trainer.global_step,
                "seconds": round(seconds, 1),
                "model": str(folder / MODEL_FOLDER),
                **collect_callback_results(self.trainer),
                "settings": {"model": dict(self.hparams), "data": dict(corpus.hparams)},
                "versions": versions(),
            },
        )

    def save_model(self, folder: Path) -> None:
        """Write the LM, its tokenizer and its world, whole or not at all.

        Args:
            folder: What Hugging Face's ``from_pretrained`` reads.

        Raises:
            OutputError: It cannot be written.
        """
        assert self.lm is not None
        dtype = getattr(torch, self.hparams["save_dtype"])
        weights = {name: value.to(dtype) for name, value in self.lm.state_dict().items()}
        if self.lm.config.tie_word_embeddings:
            del weights["lm_head.weight"]
        with atomic_folder(folder, MODEL_FILES) as new:
            self.lm.config.dtype = dtype
            self.lm.save_pretrained(new, state_dict=weights)
            self._corpus.save(new)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Refuse a checkpoint of another vocabulary.

        Raises:
            ConfigError: The corpus was made from another world.
        """
        assert self.lm is not None
        stored = checkpoint["state_dict"]["lm.model.embed_tokens.weight"].shape
        ours = self.lm.model.embed_tokens.weight.shape
        if stored != ours:
            raise ConfigError(
                f"the checkpoint's embedding is {tuple(stored)}, that of this corpus and size is "
                f"{tuple(ours)}. Go on with the config.yaml of the run that wrote it."
            )


def one_cycle(step: int, n_steps: int, warmup: float) -> float:
    """A cycle of learning rates: from 1/25 up to 1 and down to next to nothing, along cosines.

    Args:
        step: From 0.
        n_steps: Of the cycle.
        warmup: Share of the steps on the way up.

    Example:
        >>> [round(one_cycle(step, 11, 0.5), 2) for step in (0, 4, 5, 10)]
        [0.04, 0.97, 0.98, 0.0]
    """
    low, lowest = 1 / 25, 1 / 250_000
    top, last = warmup * n_steps - 1, n_steps - 1
    if step <= top:
        start, end, way = low, 1.0, step / max(top, 1e-9)
    else:
        start, end, way = 1.0, lowest, min((step - top) / max(last - top, 1e-9), 1.0)
    return end + (start - end) / 2 * (1 + math.cos(math.pi * way))
