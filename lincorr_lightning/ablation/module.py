"""Vocabulary ablation: a feed-forward network between frozen embeddings (paper, section 6)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from time import monotonic
from typing import Any, cast, get_args

import lightning as L
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from lincorr_lightning.ablation.batches import Phase, PhaseName, TextBatch, TrainingPlan
from lincorr_lightning.ablation.mappings import MAPPINGS, MappingName
from lincorr_lightning.ablation.networks import NetworkSettings, StackedNetworks
from lincorr_lightning.ablation.pooled_texts import Candidates, PooledTexts
from lincorr_lightning.ablation.results import ablation_results
from lincorr_lightning.ablation.scores import RunScores, baselines, cases, score, score_paired
from lincorr_lightning.ablation.token_embedding import (
    EmbeddingSource,
    TokenEmbedding,
    read_token_embedding,
)
from lincorr_lightning.errors import ConfigError, NonFiniteError, require
from lincorr_lightning.knowledge.catalogue import split_names
from lincorr_lightning.lm.config import LMConfig
from lincorr_lightning.lm.sharding_strategy import refuse_sharding
from lincorr_lightning.results.loggers import log_scalars
from lincorr_lightning.results.results import Results
from lincorr_lightning.results.run_folder import (
    is_dry_run,
    prepare_run_folder,
    run_settings,
    write_results,
)


@dataclass(frozen=True)
class PhaseSettings:
    """Hyper-parameters of a phase of training."""

    epochs: int = 40
    """Passes over the texts; 0 skips the phase."""

    batch_size: int = 256
    """Texts per step."""

    learning_rate: float = 1e-3
    """Learning rate of AdamW, whose state is reset at the beginning of the phase."""

    weight_decay: float = 0.3
    """Weight decay of AdamW."""

    def __post_init__(self) -> None:
        """Check the settings."""
        lowest = {"epochs": 0, "batch_size": 1, "learning_rate": 0, "weight_decay": 0}
        for name, least in lowest.items():
            names = f"model.compose.{name} or model.learn.{name}"
            require(names, getattr(self, name), at_least=least)


class VocabularyAblation(L.LightningModule):
    """Trains one feed-forward network between pretrained token embeddings.

    A text is the mean of its tokens' embeddings; the output of the network times the same
    embeddings gives the logits. The phase *compose* reads paired texts, the phase *learn* the
    source texts of new subjects; then the network is evaluated on their target texts. The
    embeddings are frozen.

    Each mapping and seed has a network of its own, all trained side by side; seeds draw subjects,
    permutation and weights. The phase *uncomposed* also trains each of them on the new subjects
    before it has composed anything: what it gets right then is due to similar embeddings alone.

    It trains on any DataLoader that yields `TextBatch`, and logs
    ``val/<phase>/<share>/<mapping>``, such as ``val/learn/generalized/reference``.

    Args:
        lm: LM whose vocabulary is used; only the token embedding of a checkpoint is read.
        embedding_source: Matrix that is both input and output, for an LM with an untied head:
            ``input`` for its embedding, ``output`` for its head.
        mapping: ``reference``, ``permuted`` or ``letters``, or several of them.
        seeds: Seeds; each mapping is trained once per seed.
        skip_compose_baseline: Whether to also measure what is generalized without the compose
            phase.
        candidates: Tokens that the training softmax is over: the ``vocabulary``, or those of the
            ``texts``.
        network: Settings of the network.
        compose: Settings of the phase of paired texts.
        learn: Settings of the phase of source texts.
        score_every: Epochs between two evaluations.

    Raises:
        ConfigError: A setting is out of range.

    Attributes:
        results: Scores after training, on rank 0; None before.
    """

    batch_type = TextBatch

    def __init__(
        self,
        lm: LMConfig = LMConfig(),  # noqa: B008 (frozen)
        embedding_source: EmbeddingSource = "input",
        mapping: str | list[str] = "reference",
        seeds: list[int] | None = None,
        skip_compose_baseline: bool = True,
        candidates: Candidates = "texts",
        network: NetworkSettings = NetworkSettings(),  # noqa: B008 (frozen)
        compose: PhaseSettings = PhaseSettings(),  # noqa: B008 (frozen)
        learn: PhaseSettings = PhaseSettings(200, 128, 3e-3),  # noqa: B008 (frozen)
        score_every: int = 10,
    ) -> None:
        super().__init__()
        lm = LMConfig(**lm) if isinstance(lm, Mapping) else lm
        network = NetworkSettings(**network) if isinstance(network, Mapping) else network
        compose = PhaseSettings(**compose) if isinstance(compose, Mapping) else compose
        learn = PhaseSettings(**learn) if isinstance(learn, Mapping) else learn
        mappings = cast(tuple[MappingName, ...], tuple(split_names(mapping)))
        all_seeds = tuple([0] if seeds is None else seeds)
        for name, chosen, known in (
            ("mapping", mappings, MAPPINGS),
            ("candidates", (candidates,), get_args(Candidates)),
            ("embedding_source", (embedding_source,), get_args(EmbeddingSource)),
        ):
            if not chosen or len(set(chosen)) < len(chosen) or not set(chosen) <= set(known):
                raise ConfigError(
                    f"model.{name} is {', '.join(map(repr, chosen)) or 'empty'}; it must be of "
                    f"{', '.join(known)}, each once."
                )
        if not all_seeds or len(set(all_seeds)) < len(all_seeds) or min(all_seeds) < 0:
            raise ConfigError(
                f"model.seeds is {list(all_seeds)}; it must hold whole numbers, each once."
            )
        require("model.learn.epochs", learn.epochs, at_least=1)
        require("model.score_every", score_every, at_least=1)
        self._network_settings, self._settings = network, {"compose": compose, "learn": learn}
        phases: list[Phase] = []
        if compose.epochs:
            if skip_compose_baseline:
                phases.append(Phase("uncomposed", learn.epochs, learn.batch_size))
            phases.append(Phase("compose", compose.epochs, compose.batch_size))
        phases.append(Phase("learn", learn.epochs, learn.batch_size))
        self.plan = TrainingPlan(lm, mappings, all_seeds, tuple(phases))
        """What the study needs of its data, for `PairedTextsDataModule`."""
        self.save_hyperparameters(
            {
                "lm": asdict(lm), "embedding_source": embedding_source, "mapping": list(mappings),
                "seeds": list(all_seeds), "skip_compose_baseline": skip_compose_baseline,
                "candidates": candidates, "network": asdict(network), "compose": asdict(compose),
                "learn": asdict(learn), "score_every": score_every,
            },
            logger=False,
        )  # fmt: skip
        self.embedding: TokenEmbedding | None = None
        self.texts: PooledTexts | None = None
        self.scores: dict[str, list[RunScores]] = {}
        self.history: dict[str, list[tuple[int, float]]] = {}
        self.results: Results | None = None
        self._batch: TextBatch | None = None
        self._started = 0.0

    # -- setting up ------------------------------------------------------------------------------

    def setup(self, stage: str) -> None:
        """Check the trainer and the run's folder before anything is trained."""
        del stage
        refuse_sharding(self.trainer, "VocabularyAblation")
        if self.trainer.max_epochs not in (1, None) and not is_dry_run(self.trainer):
            raise ConfigError(
                f"trainer.max_epochs is {self.trainer.max_epochs}, but all phases together are one "
                "epoch of the trainer. Set it to 1, and the epochs of the phases as "
                "model.compose.epochs and model.learn.epochs."
            )
        if self.trainer.accumulate_grad_batches != 1:
            raise ConfigError(
                "trainer.accumulate_grad_batches must be 1; set model.compose.batch_size and "
                "model.learn.batch_size instead."
            )
        prepare_run_folder(self.trainer)

    def configure_model(self) -> None:
        """Read the token embedding, and initialize the networks."""
        if self.embedding is not None:
            return
        self.embedding = read_token_embedding(self.plan.lm, self.hparams["embedding_source"])
        self.networks = StackedNetworks(
            len(self.plan.seeds) * len(self.plan.mappings),
            self.embedding.weight.shape[1],
            self._network_settings,
        )
        self._reset_networks()

    def _reset_networks(self) -> None:
        # The networks of a seed begin with the same weights, so that only the mapping differs.
        self.networks.reset([seed for seed in self.plan.seeds for _ in self.plan.mappings])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return AdamW over the networks; each phase sets its own rates."""
        # Lightning's gradient scaler for float16 does not support the fused one.
        fused = self.trainer.precision != "16-mixed"
        return torch.optim.AdamW(
            self.networks.parameters(), lr=self._settings["learn"].learning_rate, fused=fused
        )

    # -- training --------------------------------------------------------------------------------

    def on_train_start(self) -> None:
        """Start the clock."""
        self._started = monotonic()

    def on_train_batch_start(self, batch: TextBatch, batch_idx: int) -> None:
        """Pool the texts once; at the beginning of a phase, reset optimizer and networks."""
        del batch_idx
        if self.texts is None or self.texts.corpus is not batch.corpus:
            self.texts = self._pool(batch)
        if not batch.begins:
            return
        optimizer = self.optimizers(use_pl_optimizer=False)
        assert isinstance(optimizer, torch.optim.Optimizer)
        optimizer.state.clear()
        settings = self._settings["compose" if batch.phase == "compose" else "learn"]
        for group in optimizer.param_groups:
            group["lr"] = settings.learning_rate
            group["weight_decay"] = settings.weight_decay
        if batch.phase != "learn" or self._settings["compose"].epochs == 0:
            self._reset_networks()

    def _pool(self, batch: TextBatch) -> PooledTexts:
        assert self.embedding is not None
        corpus, plan = batch.corpus, self.plan
        if (corpus.mappings, corpus.seeds) != (plan.mappings, plan.seeds):
            raise ConfigError(
                f"the texts are for the mappings {', '.join(corpus.mappings)} and the seeds "
                f"{list(corpus.seeds)}, the study for {', '.join(plan.mappings)} and "
                f"{list(plan.seeds)}. Pass plan=module.plan to the data."
            )
        return PooledTexts(
            corpus, self.embedding, self.hparams["candidates"], self._network_settings, self.device
        )

    def training_step(self, batch: TextBatch, batch_idx: int) -> Tensor:
        """Return the sum of the networks' cross-entropies."""
        del batch_idx
        self._batch = batch
        texts = self._texts
        logits = texts.logits(self.networks(texts.inputs(batch.rows)))
        answers = texts.answers_to(batch.rows)
        losses = cross_entropy(logits.flatten(0, 1), answers.reshape(-1), reduction="none").view_as(
            answers
        )
        # Gradients of networks are independent; each rank has a part of the step's texts.
        loss = losses.sum() * (self.trainer.world_size / batch.n_rows)
        if batch.ends_epoch:
            mean = losses.detach().mean() if losses.numel() else loss.detach()
            if not bool(mean.isfinite()):
                raise NonFiniteError(
                    f"the loss is NaN or infinite in epoch {batch.epoch} of the phase "
                    f"{batch.phase}. Lower its learning_rate, or model.network.input_rms."
                )
            self.log("train/loss", mean, prog_bar=True, batch_size=batch.n_rows)
        return loss

    @property
    def _texts(self) -> PooledTexts:
        assert self.texts is not None, "pooled at the beginning of the first step"
        return self.texts

    def configure_gradient_clipping(
        self,
        optimizer: torch.optim.Optimizer,
        gradient_clip_val: int | float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        """Clip each network by its own norm."""
        if gradient_clip_val and gradient_clip_algorithm != "value":
            self.networks.clip_gradients(float(gradient_clip_val))
            return
        self.clip_gradients(optimizer, gradient_clip_val, gradient_clip_algorithm)

    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        """Step, and score the networks before any callback saves them and their scores."""
        super().optimizer_step(*args, **kwargs)
        assert self._batch is not None
        self._score(self._batch)

    def _score(self, batch: TextBatch) -> None:
        """Score the networks every `score_every` epochs, and at the end of a phase."""
        every: int = self.hparams["score_every"]
        if not batch.ends_epoch or ((batch.epoch + 1) % every and not batch.ends):
            return
        if batch.phase == "compose":
            self._log(batch.phase, score_paired(self._texts, self.networks))
        if batch.phase != "compose" or batch.ends:
            scores = score(self._texts, self.networks)
            if batch.ends:
                self.scores[batch.phase] = scores
            if batch.phase != "compose":
                shape = (len(self.plan.seeds), len(self.plan.mappings))
                found = {
                    name: torch.tensor([getattr(one, name) for one in scores]).view(shape)
                    for name in ("source_learned", "generalized")
                }
                self._log(batch.phase, {name: v.mean(0).tolist() for name, v in found.items()})

    def _log(self, phase: PhaseName, shares: Mapping[str, list[float]]) -> None:
        """Log shares by mapping."""
        scalars = {
            f"val/{phase}/{name}/{mapping}": value
            for name, values in shares.items()
            for mapping, value in zip(self.plan.mappings, values, strict=True)
        }
        step = self.global_step + 1  # Lightning counts a step after it is done
        log_scalars(self.trainer, scalars, step)
        for key, value in scalars.items():
            self.history.setdefault(key, []).append((step, value))

    def on_train_end(self) -> None:
        """Write the results."""
        if is_dry_run(self.trainer) or not self.trainer.is_global_zero:
            return
        seconds = monotonic() - self._started
        if self.texts is None:  # resumed after the last step
            self.texts = self._pool(self.trainer.train_dataloader.dataset[0])  # type: ignore[union-attr]
        texts, embedding = self.texts, self.embedding
        assert embedding is not None
        self.results = ablation_results(
            texts.corpus,
            embedding,
            run_settings(self.trainer),
            composed=self.scores.get("learn") or score(texts, self.networks),
            uncomposed=self.scores.get("uncomposed", ()),
            baselines=baselines(texts),
            history=self.history,
            cases=cases(texts, self.networks, embedding.tokenizer),
            seconds=seconds,
        )
        write_results(self.trainer, self.results)

    # -- checkpoints -----------------------------------------------------------------------------

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Store the settings, the fingerprint of the embedding, and the scores so far."""
        checkpoint["ablation"] = {
            "settings": run_settings(self.trainer),
            "embedding": self._fingerprint,
            "scores": {name: [asdict(s) for s in runs] for name, runs in self.scores.items()},
            "history": {key: list(points) for key, points in self.history.items()},
        }

    @cached_property
    def _fingerprint(self) -> dict[str, str]:
        assert self.embedding is not None
        return self.embedding.fingerprint

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Restore the scores."""
        stored = checkpoint.get("ablation")
        if stored is None or "scores" not in stored:
            raise ConfigError(
                "this is not a checkpoint of VocabularyAblation. Pass one that this study wrote."
            )
        self.configure_model()
        theirs, ours = stored["settings"], run_settings(self.trainer)
        different = [
            f"{kind}.{name}"
            for kind, then, now in (("model", theirs, ours), ("data", theirs["data"], ours["data"]))
            for name, value in then.items()
            if name not in ("lm", "data", "texts_file") and now.get(name) != value
        ]
        if stored["embedding"] != self._fingerprint:
            different.append("model.lm")
        if different:
            raise ConfigError(
                f"the checkpoint was written with another {different[0]}. Use the settings of the "
                "run that wrote it (its config.yaml), or start a new run."
            )
        self.scores = {
            name: [RunScores(**one) for one in runs] for name, runs in stored["scores"].items()
        }
        self.history = {
            key: [(int(step), float(share)) for step, share in points]
            for key, points in stored["history"].items()
        }
