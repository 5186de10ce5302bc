"""Vocabulary ablation: a feed-forward network between frozen embeddings (paper, section 6)."""

from collections.abc import Mapping
from functools import cached_property
from typing import Any, cast, get_args

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from lincorr_lightning import study as studies
from lincorr_lightning.ablation import networks
from lincorr_lightning.ablation.datamodule import (
    LearnSettings,
    PairedCorpus,
    PhaseName,
    PhaseSettings,
    TextBatch,
    TrainingPlan,
)
from lincorr_lightning.ablation.mappings import MAPPINGS, MappingName
from lincorr_lightning.ablation.networks import Candidates, NetworkSettings, PooledTexts, Shares
from lincorr_lightning.ablation.token_embedding import TokenEmbedding, read_token_embedding
from lincorr_lightning.errors import ConfigError, NonFiniteError, require, require_one_of
from lincorr_lightning.knowledge.catalogue import split_names
from lincorr_lightning.lm.config import LMConfig
from lincorr_lightning.results.results import Results
from lincorr_lightning.results.run_folder import is_dry_run, log_scalars


class VocabularyAblation(studies.Study):
    """Trains one feed-forward network between pretrained token embeddings.

    A text is the mean of its tokens' embeddings; the output of the network times the same
    embeddings gives the logits. The phase *compose* reads paired texts, the phase *learn* the
    source texts of new subjects; then the network is evaluated on their target texts. Embeddings
    are frozen, but for those of the new subjects if `learn` trains them, too, or alone: the paper
    says that "the LM is tuned".

    Each mapping and seed has a network of its own, all trained side by side; seeds draw subjects,
    permutation and weights. The phase *uncomposed* also trains each of them on the new subjects
    before it has composed anything: what it gets right then is due to similar embeddings alone.

    It trains on any DataLoader that yields `TextBatch`, and logs
    ``val/<phase>/<share>/<mapping>``, such as ``val/learn/generalized/reference``.

    Args:
        lm: LM whose vocabulary is used. Only the token embedding of its checkpoint is read; inputs
            and outputs share it even if the LM's head is untied.
        mapping: ``reference``, ``permuted``, ``permuted_targets`` or ``letters``, or several.
        seeds: Seeds; each mapping is trained once per seed.
        skip_compose_baseline: Whether to also measure what is generalized without composing.
        candidates: Tokens that the softmax is over: the ``vocabulary``, or those of the ``texts``.
        network: Settings of the network.
        compose: Settings of the phase of paired texts.
        learn: Settings of the phase of source texts, and what it trains.
        score_every: Epochs between two evaluations.
    """

    study = "vocabulary_ablation"
    batch_type = TextBatch
    step_setting = "batch_size of model.compose and model.learn"
    refused_callbacks = studies.FIXED_TRAINING

    def __init__(
        self,
        lm: LMConfig = LMConfig(),
        mapping: str | list[str] = "reference",
        seeds: list[int] | None = None,
        skip_compose_baseline: bool = True,
        candidates: Candidates = "texts",
        network: NetworkSettings = NetworkSettings(),  # noqa: B008 (frozen)
        compose: PhaseSettings = PhaseSettings(),  # noqa: B008 (frozen)
        learn: LearnSettings = LearnSettings(200, 128, 3e-3),  # noqa: B008 (frozen)
        score_every: int = 10,
    ) -> None:
        super().__init__()
        lm = studies.without_chat(lm)
        network = studies.as_settings(NetworkSettings, network)
        compose = studies.as_settings(PhaseSettings, compose)
        learn = LearnSettings(**studies.plain(learn))
        mapping = split_names(mapping)
        seeds = [0] if seeds is None else list(seeds)
        require_one_of("model.candidates", candidates, get_args(Candidates))
        if not mapping or len(set(mapping)) < len(mapping) or not set(mapping) <= set(MAPPINGS):
            raise ConfigError(
                f"model.mapping is {', '.join(mapping) or 'empty'}; it must be of "
                f"{', '.join(MAPPINGS)}, each once."
            )
        if not seeds or len(set(seeds)) < len(seeds) or min(seeds) < 0:
            raise ConfigError(f"model.seeds is {seeds}; it must hold whole numbers, each once.")
        require("model.score_every", score_every, at_least=1)
        self.save_hyperparameters(logger=False)
        self.candidates = candidates
        self.network = network
        self.trained = learn.train
        self.score_every = score_every
        phases: dict[PhaseName, PhaseSettings] = {"compose": compose, "learn": learn}
        if skip_compose_baseline:
            phases = {"uncomposed": learn, **phases}
        self.plan = TrainingPlan(
            lm, cast(tuple[MappingName, ...], tuple(mapping)), tuple(seeds), phases
        )
        """What the study needs of its data, for `PairedTextsDataModule`."""
        self.texts: PooledTexts | None = None
        self.scores: dict[str, Shares] = {}
        self.history: dict[str, list[tuple[int, float]]] = {}
        self._batch: TextBatch | None = None

    def data_arguments(self) -> dict[str, Any]:
        """Return what the study needs of its data."""
        return {"plan": self.plan}

    def setup(self, stage: str) -> None:
        """Check the trainer before anything is trained."""
        studies.require_one_epoch(self.trainer, "model.compose.epochs and model.learn.epochs")
        if self.trainer.gradient_clip_val:
            raise ConfigError(
                "trainer.gradient_clip_val must be null: all networks are trained side by side. "
                "Lower learning_rate of model.compose and model.learn instead."
            )
        super().setup(stage)

    def configure_model(self) -> None:
        if hasattr(self, "networks"):
            return
        n_tokens = 0
        if self.trained != "network":
            if self._trainer is None:  # a checkpoint is loaded, which has the number of tokens
                return
            # Lightning has no loader yet, and to set one up would lose the state of a resumed one.
            loader: Any = self.trainer.fit_loop._data_source.dataloader()
            n_tokens = max(map(len, loader.dataset.corpus.new_tokens))
        self._make_networks(n_tokens)

    def _make_networks(self, n_tokens: int) -> None:
        with torch.device("cpu"):  # the Trainer's device would draw other numbers
            n = len(self.plan.seeds) * len(self.plan.mappings)
            d = self.embedding.weight.shape[1]
            self.networks = networks.StackedNetworks(n, d, self.network, n_tokens)
            self.reset_networks()

    @cached_property
    def embedding(self) -> TokenEmbedding:
        """The token embedding."""
        return read_token_embedding(self.plan.lm)

    def reset_networks(self) -> None:
        """Initialize the networks, at the beginning of a run and of all that learns anew.

        Those of a seed begin with the same weights, so that only the mapping differs.
        """
        self.networks.reset([seed for seed in self.plan.seeds for _ in self.plan.mappings])
        if self.texts is not None and self.networks.embeddings is not None:
            self.networks.embeddings.data.copy_(self.texts.per_network(self.texts.embeddings))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        # Lightning's gradient scaler for float16 does not support the fused one.
        fused = self.trainer.precision != "16-mixed"
        embeddings = self.networks.embeddings
        groups = [{"params": [p for p in self.networks.parameters() if p is not embeddings]}]
        if embeddings is not None:
            groups.append({"params": [embeddings]})
        # Each phase begins with its own learning rate.
        return torch.optim.AdamW(groups, fused=fused)

    def on_train_batch_start(self, batch: TextBatch, batch_idx: int) -> None:
        """Pool the texts; at the beginning of a phase, reset optimizer and networks."""
        self._pool(batch.corpus)
        if not batch.begins:
            return
        (optimizer,) = self.trainer.optimizers
        optimizer.state.clear()
        settings = self.plan.phases[batch.phase]
        train = "network" if batch.phase == "compose" else self.trained
        for group, other in zip(optimizer.param_groups, ("embeddings", "network"), strict=False):
            # With a rate of 0 nothing changes, and all parameters have gradients on all ranks.
            rate = 0.0 if train == other else settings.learning_rate
            group |= {"lr": rate, "weight_decay": settings.weight_decay}
        if batch.phase != "learn":
            self.reset_networks()

    def _pool(self, corpus: PairedCorpus) -> PooledTexts:
        if self.texts is None or self.texts.corpus is not corpus:
            if corpus.plan != self.plan:
                raise ConfigError(
                    f"the texts are for another study: {corpus.plan}. Pass plan=module.plan to "
                    "the data."
                )
            self.texts = PooledTexts(
                corpus, self.embedding, self.candidates, self.network, self.device
            )
        return self.texts

    def training_step(self, batch: TextBatch, batch_idx: int) -> Tensor:
        """Return the sum of the networks' cross-entropies."""
        self._batch = batch
        texts = self._pool(batch.corpus)
        logits = texts.logits(self.networks, batch.rows)
        answers = texts.answers_to(batch.rows)
        losses = cross_entropy(logits.flatten(0, 1), answers.reshape(-1), reduction="none")
        # Gradients of networks are independent; each rank has a part of the step's texts.
        loss = losses.sum() * (self.trainer.world_size / batch.n_rows)
        if batch.ends_epoch:
            mean = self.trainer.strategy.reduce(loss.detach() / answers.shape[:2].numel())
            if not bool(mean.isfinite()):
                raise NonFiniteError(
                    f"the loss is NaN or infinite in the phase {batch.phase}. Lower its "
                    "learning_rate."
                )
            self.log("train/loss", mean, prog_bar=True, batch_size=batch.n_rows)
        return loss

    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        """Step, and score the networks before any callback saves them and their scores."""
        super().optimizer_step(*args, **kwargs)
        batch = self._batch
        assert batch is not None
        if batch.ends or (batch.ends_epoch and (batch.epoch + 1) % self.score_every == 0):
            self._score(batch)

    def _score(self, batch: TextBatch) -> None:
        texts = self._pool(batch.corpus)
        if batch.phase == "compose":
            shares = networks.score_paired(texts, self.networks)
        else:
            scores = networks.score(texts, self.networks)
            if batch.ends:
                self.scores[batch.phase] = scores
            shares = {name: scores[name] for name in ("source_learned", "generalized")}
        scalars = {
            f"val/{batch.phase}/{name}/{mapping}": value
            for name, by_seed in shares.items()
            for mapping, value in zip(self.plan.mappings, np.mean(by_seed, 0).tolist(), strict=True)
        }
        step = self.global_step + 1  # Lightning counts a step after it is done
        log_scalars(self.trainer, scalars, step)
        for key, value in scalars.items():
            self.history.setdefault(key, []).append((step, value))

    def build_results(self) -> Results:
        from lincorr_lightning.ablation.results import ablation_results

        if "learn" not in self.scores and not is_dry_run(self.trainer):
            raise ConfigError(
                "networks are compared after all phases. Leave out trainer.max_steps, max_time, "
                "limit_train_batches, overfit_batches and callbacks that end a run, or lower the "
                "epochs of model.compose and model.learn."
            )
        # There are none if the run was resumed after the last step.
        texts = self.texts or self._pool(self.trainer.train_dataloader.dataset.corpus)  # type: ignore[union-attr]
        return ablation_results(
            texts.corpus,
            self.embedding,
            scores={"learn": networks.score(texts, self.networks)} | self.scores,
            baselines=networks.baselines(texts, self.embedding),
            history=self.history,
            cases=networks.cases(texts, self.networks, self.embedding.stored.tokenizer),
            seconds=self.seconds,
        )

    def checkpoint_state(self) -> dict[str, Any]:
        """Return the fingerprint of the embedding, and the scores so far."""
        embeddings = self.networks.embeddings
        return {
            "embedding": self.embedding.stored.fingerprint,
            "n_tokens": 0 if embeddings is None else embeddings.shape[1],
            "scores": self.scores,
            "history": self.history,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore the scores; refuse another embedding."""
        if not hasattr(self, "networks"):
            self._make_networks(state["n_tokens"])
        now = {"lm": self.embedding.stored.fingerprint}
        studies.require_same({"lm": state["embedding"]}, now, "model.")
        self.scores = state["scores"]
        self.history = state["history"]
