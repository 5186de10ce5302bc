"""Pre-training of a tiny Llama from random weights: how the embedded tiny world was made."""

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor
from torch.nn.functional import cross_entropy
from torchmetrics import MeanMetric

from lincorr_lightning.data.tiny_world.world import WORLD_FILE
from lincorr_lightning.errors import ConfigError, require
from lincorr_lightning.io import atomic_folder, safe_names
from lincorr_lightning.lm.language_model import LanguageModel
from lincorr_lightning.pretraining.corpus import Corpus
from lincorr_lightning.pretraining.datamodule import IGNORED, PackedBatch, RecallBatch
from lincorr_lightning.results.results import Results
from lincorr_lightning.results.run_folder import is_dry_run, run_folder
from lincorr_lightning.results.table import Table
from lincorr_lightning.study import Study, as_settings

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM, PreTrainedTokenizerBase

_FILES = (
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    WORLD_FILE,
)


_CONTEXT = 64  # longest text in tokens
_WEIGHT_DECAY = 0.3  # of all matrices, including the embedding
# Weight of the penalty at the end of the run. Cross-entropy leaves the logits of a domain's other
# answers free as long as they are low; a factor of each subject then affects them in all kinds.
_PENALTY = 0.1
_WARMUP = 0.1  # share of the steps before the highest learning rate
# Initial gain of the last norm. At 1, the first steps only make logits large and move all subjects'
# embeddings in the same direction.
_LOGIT_GAIN = 5.0


@dataclass(frozen=True)
class LlamaSize:
    """Size of a Llama.

    Attributes:
        hidden_size: Width. People's facts are stored in their embeddings: it should exceed the
            number of answers of all independent attributes together, or unrelated kinds of
            knowledge interfere and correlate.
        intermediate_size: Width of the feed-forward networks.
        n_layers: Number of layers. One is enough for facts of one step, and learns fastest.
        n_heads: Attention heads of each layer.
    """

    hidden_size: int = 256
    intermediate_size: int = 768
    n_layers: int = 1
    n_heads: int = 4

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            require(f"model.size.{name}", value, above=0)


class Pretraining(Study):
    """Trains a Llama from random weights on statements about a tiny world.

    It is trained by AdamW with a one-cycle schedule on batches of `PackedBatch`. Validation on
    `RecallBatch` measures recall: the share of prompts whose true answer is the most likely token
    of the whole vocabulary. At the end, ``model/`` in the run's folder holds the LM for Hugging
    Face, with its tokenizer and its world: pass it as ``--model.lm.name_or_path``.

    Vocabulary and answers are those of the attribute ``corpus`` of the datamodule. To train on
    DataLoaders instead, set this module's attribute `corpus` first.

    Args:
        size: Size of the LM.
        learning_rate: Highest learning rate.
    """

    study = "pretraining"
    batch_type = PackedBatch
    lm: "LlamaForCausalLM"  #: The LM, once `configure_model` has built it.
    corpus: Corpus
    _answers: Tensor

    def __init__(self, size: LlamaSize | None = None, learning_rate: float = 3e-3) -> None:
        super().__init__()
        self.size = as_settings(LlamaSize, size or LlamaSize())
        require("model.learning_rate", learning_rate, above=0)
        self.save_hyperparameters()
        self.learning_rate = learning_rate
        self._loss = MeanMetric()
        self._recall: dict[str, float] = {}

    @property
    def tokenizer(self) -> "PreTrainedTokenizerBase":
        """The tokenizer of the LM, for callbacks that evaluate prompts."""
        return self.corpus.tokenizer

    def configure_model(self) -> None:
        if hasattr(self, "lm"):
            return
        corpus = getattr(self, "corpus", None)
        if corpus is None:
            corpus = getattr(getattr(self.trainer, "datamodule", None), "corpus", None)
        if not isinstance(corpus, Corpus):
            raise ConfigError(
                "Pretraining takes its vocabulary from the corpus of its data, and there is none. "
                "Pass --data CorpusDataModule, or set module.corpus before you train."
            )
        with torch.device("cpu"):  # the Trainer's device would draw other numbers
            self.corpus, self.lm = corpus, build_llama(self.size, corpus.tokenizer)
            answers = torch.zeros(len(corpus.answers), len(corpus.tokenizer))
        for row, token_ids in zip(answers, corpus.answers, strict=True):
            row[token_ids] = 1.0
        self.register_buffer("_answers", answers, persistent=False)

    def configure_optimizers(self) -> OptimizerLRScheduler:
        matrices = [p for p in self.parameters() if p.ndim > 1]
        vectors = [p for p in self.parameters() if p.ndim == 1]
        groups: list[Any] = [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}]
        optimizer = torch.optim.AdamW(
            groups, self.learning_rate, betas=(0.9, 0.95), weight_decay=_WEIGHT_DECAY
        )
        # Unlike OneCycleLR, it is that of the whole length when a longer run is resumed.
        schedule = torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda step: one_cycle(step, self._n_steps)
        )
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    @property
    def _n_steps(self) -> int:
        steps = self.trainer.estimated_stepping_batches
        if math.isinf(steps):
            raise ConfigError("the learning rate needs the run's length. Set trainer.max_epochs.")
        return int(steps)

    def training_step(self, batch: PackedBatch, batch_idx: int) -> Tensor:
        """Return the cross-entropy of the targets, and the penalty of a domain's other answers."""
        if batch_idx == 0:  # no epoch starts after a checkpoint of the last step of one
            self._loss.reset()
        outputs = self.lm.model(
            input_ids=batch.input_ids, position_ids=batch.position_ids, use_cache=False
        )
        has_target = batch.targets != IGNORED
        # The head is most of the work of such a small LM: it runs only where there is a target.
        targets = batch.targets[has_target]
        logits = self.lm.lm_head(outputs.last_hidden_state[has_target]).float()
        loss = cross_entropy(logits, targets)
        knowledge = batch.knowledge[has_target]
        if not batch.is_padding:
            self._loss.update(loss.detach(), weight=len(targets))
        n_answers = (knowledge != IGNORED).sum()
        # Weights of the rank's means, by its counts; their mean over ranks is 1.
        counts = torch.stack([has_target.sum(), n_answers]).double() * (not batch.is_padding)
        n_total = self.trainer.strategy.reduce(counts.clone(), reduce_op="sum").clamp(min=1)
        weight, weight_of_answers = (self.trainer.world_size * counts / n_total).float()
        loss = loss * weight
        size = len(targets)
        self.log("train/loss", loss.detach(), prog_bar=True, batch_size=size, sync_dist=True)
        penalty = off_target_penalty(logits, targets, knowledge, self._answers)
        # At full weight from the start it would prevent learning.
        done = self.global_step / self._n_steps
        return loss + _PENALTY * done**2 * (penalty * weight_of_answers)

    def on_validation_epoch_start(self) -> None:
        self._hits = {name: MeanMetric().to(self.device) for name in self.corpus.knowledge}

    def validation_step(self, batch: RecallBatch, batch_idx: int) -> None:
        """Count prompts whose true answer is the most likely token of all."""
        logits = self.lm(input_ids=batch.input_ids, use_cache=False, logits_to_keep=1).logits[:, -1]
        self._hits[batch.knowledge].update((logits.argmax(-1) == batch.answers).float())

    def on_validation_epoch_end(self) -> None:
        self._recall = {name: float(hits.compute()) for name, hits in self._hits.items()}
        safe = safe_names(self._recall)
        # Not below val/recall: MLflow has files, of which none can be a folder as well.
        self.log_dict({f"val/recall_of/{safe[name]}": x for name, x in self._recall.items()})
        self.log("val/recall", sum(self._recall.values()) / len(self._recall), prog_bar=True)

    def build_results(self) -> Results:
        """Write the LM, whose fingerprint is part of the results, and return loss and recall."""
        folder = run_folder(self.trainer) / "model"
        n_prompts = Counter(self.corpus.knowledge[each.knowledge] for each in self.corpus.encoded)
        recall = Table.of(
            "recall",
            [(name, value, n_prompts[name]) for name, value in self._recall.items()],
            ["knowledge", "recall", "n_prompts"],
            "Share of the stated facts that the LM recalls, over the whole vocabulary",
            headline=True,
            headings={"n_prompts": "prompts"},
            formats={"recall": ".1%", "n_prompts": ","},
        )
        results = Results(
            self.study,
            values={
                "loss": float(self._loss.compute()),
                "recall": dict(self._recall),
                "n_people": len(self.corpus.world.people),
                "n_tokens": len(self.corpus.tokenizer),
                "n_parameters": sum(p.numel() for p in self.lm.parameters()),
                "n_steps": self.trainer.global_step,
                "seconds": self.seconds,
                "model": str(folder),
            },
            tables=[recall] if len(recall) else [],
        )
        if not self.trainer.is_global_zero or is_dry_run(self.trainer):
            return results
        save_llama(self.lm, self.corpus, folder)
        # As studies of the written LM see it.
        return replace(results, lm=LanguageModel.from_pretrained(str(folder)).info)

    def checkpoint_state(self) -> dict[str, Any]:
        """Return the loss of this epoch so far on each rank, and the last recall."""
        state: Any = self._loss.metric_state  # sums of losses and of weights
        ranks: Any = self.all_gather(torch.stack([*state.values()]))
        return {"loss": ranks.reshape(-1, len(state)).cpu(), "recall": dict(self._recall)}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Restore loss, recall and, while it trains, the progress of the run."""
        super().on_load_checkpoint(checkpoint)
        if self._trainer is not None and self.trainer.training:
            # The schedule's length needs the data, which needs the progress of the run.
            self.trainer.fit_loop.load_state_dict(checkpoint["loops"]["fit_loop"])

    def restore(self, state: Mapping[str, Any]) -> None:
        self._recall = dict(state["recall"])
        ranks = state["loss"]
        rank, n_ranks = (self.global_rank, self.trainer.world_size) if self._trainer else (0, 1)
        if n_ranks != len(ranks):
            ranks = ranks.sum(0) * torch.eye(n_ranks, 1)
        for name, value in zip(self._loss.metric_state, ranks[rank], strict=True):
            setattr(self._loss, name, value.to(self.device))


def build_llama(size: LlamaSize, tokenizer: "PreTrainedTokenizerBase") -> "LlamaForCausalLM":
    """Build a Llama with random weights and a tied head."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=size.hidden_size,
        num_hidden_layers=size.n_layers,
        intermediate_size=size.intermediate_size,
        num_attention_heads=size.n_heads,
        num_key_value_heads=size.n_heads,
        max_position_embeddings=_CONTEXT,
        tie_word_embeddings=True,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        # Fused attention takes twice as long at medium precision on a CPU.
        attn_implementation="eager",  # type: ignore[call-arg]
    )
    lm = LlamaForCausalLM(config)
    with torch.no_grad():
        lm.model.norm.weight.fill_(_LOGIT_GAIN)
    return lm


def save_llama(lm: "LlamaForCausalLM", corpus: Corpus, folder: Path) -> None:
    """Write an LM in float16, with its tokenizer and its world, whole or not at all."""
    weights = {name: value.half() for name, value in lm.state_dict().items()}
    del weights["lm_head.weight"]  # tied to the embedding
    with atomic_folder(folder, _FILES) as new:
        lm.config.dtype = torch.float16
        lm.save_pretrained(new, state_dict=weights)
        corpus.tokenizer.save_pretrained(new)
        corpus.world.save(new / WORLD_FILE)


def one_cycle(step: int, n_steps: int) -> float:
    """Return the learning rate of torch's `OneCycleLR`, relative to its highest."""
    top = _WARMUP * n_steps - 1
    if step <= top:
        start, end = 1 / 25, 1.0
        progress = step / max(top, 1e-9)
    else:
        start, end = 1.0, 1 / 250_000
        progress = min((step - top) / max(n_steps - 1 - top, 1e-9), 1.0)
    return end + (start - end) / 2 * (1 + math.cos(math.pi * progress))


def off_target_penalty(
    logits: Tensor, targets: Tensor, knowledge: Tensor, answers: Tensor
) -> Tensor:
    """Return the mean square of the logits of a domain's other answers.

    Only rows whose target is an answer count.

    Args:
        logits: ``(n, n_tokens)``.
        targets: Token that follows, ``(n,)``.
        knowledge: Index of the kind of knowledge that it answers, or `IGNORED`, ``(n,)``.
        answers: 1 where a token is an answer of a kind, else 0, ``(n_knowledge, n_tokens)``.
    """
    is_answer = knowledge != IGNORED
    wrong = answers[knowledge[is_answer]].scatter(1, targets[is_answer, None], 0.0)
    squares = (logits[is_answer].square() * wrong).sum(1)
    return (squares / wrong.sum(1).clamp(min=1)).mean()
