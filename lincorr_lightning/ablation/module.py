"""Does the tie come from the vocabulary alone (paper, section 6)?"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from time import monotonic
from typing import Any, Literal, cast, get_args

import lightning as L
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from lincorr_lightning.ablation.datamodule import PairedTextsDataModule
from lincorr_lightning.ablation.mappings import MAPPINGS, MappingName, map_labels
from lincorr_lightning.ablation.phases import PhaseName, TextBatch, TextPhase, TextPlan
from lincorr_lightning.ablation.pooled_texts import Candidates, PooledTexts
from lincorr_lightning.ablation.results import RunScores
from lincorr_lightning.ablation.run_results import score_runs, write_results
from lincorr_lightning.ablation.stacked_networks import NetworkSettings, StackedNetworks
from lincorr_lightning.ablation.token_embedding import (
    EmbeddingSource,
    TokenEmbedding,
    read_token_embedding,
)
from lincorr_lightning.errors import ConfigError, NonFiniteError
from lincorr_lightning.io import check_writable
from lincorr_lightning.knowledge.catalogue import split_names
from lincorr_lightning.lm.config import LMConfig
from lincorr_lightning.lm.sharding_strategy import refuse_sharding
from lincorr_lightning.results.run_folder import is_dry_run, run_folder

_SIDES: tuple[Literal["source", "target"], ...] = ("source", "target")


@dataclass(frozen=True)
class PhaseSettings:
    """How one phase is trained."""

    epochs: int = 40
    """How often each text is read; 0 leaves the phase out."""

    batch_size: int = 256
    """Texts of a step."""

    learning_rate: float = 1e-3
    """Of AdamW, which begins each phase anew."""

    weight_decay: float = 0.3
    """Of AdamW."""

    def __post_init__(self) -> None:
        """Refuse what no phase can be."""
        if self.epochs < 0 or self.batch_size < 1:
            raise ConfigError(
                f"a phase has epochs {self.epochs} and batch_size {self.batch_size}; they must be "
                "at least 0 and 1."
            )


class VocabularyAblation(L.LightningModule):
    """Trains one feed-forward network between pretrained token embeddings.

    A text is the mean of its tokens' embeddings; the network's output times the same embeddings
    gives the logits. In the phase *compose* it reads paired texts, in *learn* the source texts of
    new subjects; then it is asked for their targets. The embeddings stay as they are.

    Every mapping and seed is a network of its own, all trained side by side; seeds draw subjects,
    permutation and weights. With `uncomposed` each of them also learns before it has composed
    anything: what it gets right then is closeness of the embeddings alone.

    Args:
        lm: Whose vocabulary; of a checkpoint only the embedding is read.
        tie: Which matrix is both input and output, where an LM's head is its own: ``input``, its
            embedding, or ``output``, its head.
        mapping: ``reference``, ``permuted`` or ``letters``, or several of them.
        seeds: One run of each mapping per seed.
        uncomposed: Whether to measure what is generalized without the compose phase too.
        candidates: Among which tokens the answer is told in training: ``vocabulary``, or those of
            the ``texts``.
        network: The feed-forward network.
        compose: The phase of paired texts.
        learn: The phase of source texts.
        score_every: Epochs between two scores.

    Raises:
        ConfigError: Settings that contradict each other.
    """

    def __init__(
        self,
        lm: LMConfig = LMConfig(),  # noqa: B008 (frozen)
        tie: EmbeddingSource = "input",
        mapping: str | list[str] = "reference",
        seeds: list[int] | None = None,
        uncomposed: bool = True,
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
        self.mappings = cast(tuple[MappingName, ...], tuple(split_names(mapping)))
        self.seeds = tuple([0] if seeds is None else seeds)
        for name, chosen, known in (
            ("mapping", self.mappings, MAPPINGS),
            ("candidates", (candidates,), get_args(Candidates)),
            ("tie", (tie,), get_args(EmbeddingSource)),
        ):
            if not chosen or len(set(chosen)) < len(chosen) or not set(chosen) <= set(known):
                raise ConfigError(
                    f"model.{name} is {', '.join(map(repr, chosen)) or 'empty'}; it must be of "
                    f"{', '.join(known)}, each once."
                )
        if not self.seeds or len(set(self.seeds)) < len(self.seeds) or min(self.seeds) < 0:
            raise ConfigError(
                f"model.seeds is {list(self.seeds)}; it must hold whole numbers, each once."
            )
        if learn.epochs < 1 or score_every < 1:
            raise ConfigError("model.learn.epochs and model.score_every must be at least 1.")
        self.lm_config, self.network, self.tie = lm, network, tie
        self.compose, self.learn = compose, learn
        self.save_hyperparameters(
            {
                "lm": asdict(lm), "tie": tie, "mapping": list(self.mappings),
                "seeds": list(self.seeds), "uncomposed": uncomposed, "candidates": candidates,
                "network": asdict(network), "compose": asdict(compose), "learn": asdict(learn),
                "score_every": score_every,
            },
            logger=False,
        )  # fmt: skip
        self.embedding: TokenEmbedding | None = None
        self.finished: dict[str, list[RunScores]] = {}
        self.history: dict[str, list[tuple[int, float]]] = {}
        self._started = 0.0

    @property
    def text_plan(self) -> TextPlan:
        """How the DataModule deals texts into steps."""
        composes = self.compose.epochs > 0
        phases = [
            TextPhase("uncomposed", self.learn.epochs, self.learn.batch_size),
            TextPhase("compose", self.compose.epochs, self.compose.batch_size),
            TextPhase("learn", self.learn.epochs, self.learn.batch_size),
        ]
        wanted = [composes and bool(self.hparams["uncomposed"]), composes, True]
        return TextPlan(
            tuple(phase for phase, want in zip(phases, wanted, strict=True) if want), self.seeds
        )

    # -- setting up ------------------------------------------------------------------------------

    def setup(self, stage: str) -> None:
        """Refuse what cannot work, before the vocabulary is read.

        Raises:
            ConfigError: Settings that contradict each other.
            OutputError: The run's folder cannot be written.
        """
        del stage
        refuse_sharding(self.trainer, "VocabularyAblation")
        if self.trainer.max_epochs not in (1, None) and not is_dry_run(self.trainer):
            raise ConfigError(
                f"trainer.max_epochs is {self.trainer.max_epochs}, but all phases are one of the "
                "trainer's epochs. Set it to 1, and the phases' own as model.compose.epochs and "
                "model.learn.epochs."
            )
        if self.trainer.accumulate_grad_batches != 1:
            raise ConfigError(
                "trainer.accumulate_grad_batches must be 1; set model.compose.batch_size and "
                "model.learn.batch_size instead."
            )
        if not is_dry_run(self.trainer):
            folder = run_folder(self.trainer)
            if self.trainer.is_global_zero:
                check_writable(folder)

    @property
    def _data(self) -> PairedTextsDataModule:
        data = getattr(self.trainer, "datamodule", None)
        if not isinstance(data, PairedTextsDataModule):
            raise ConfigError(
                "VocabularyAblation is trained on a PairedTextsDataModule; data is "
                f"{type(data).__name__}. Pass --data PairedTextsDataModule."
            )
        return data

    def configure_model(self) -> None:
        """Read the vocabulary, pool the texts, make the networks."""
        if self.embedding is not None:
            return
        embedding = read_token_embedding(self.lm_config, self.tie)
        self.prepare(embedding, self._data)

    def prepare(self, embedding: TokenEmbedding, data: PairedTextsDataModule) -> None:
        """Pool the texts of all seeds and make the networks.

        Args:
            embedding: The frozen vocabulary.
            data: What is told.

        Raises:
            LincorrError: The relation, its labels or its texts do not fit this vocabulary.
        """
        tokenizer = embedding.tokenizer
        self.labels = data.labels(tokenizer)
        self.told = [data.texts(self.labels, tokenizer, seed) for seed in self.seeds]
        self.mapped = [
            [map_labels(self.labels, name, tokenizer, seed) for name in self.mappings]
            for seed in self.seeds
        ]
        self.texts = PooledTexts(
            embedding, self.labels, self.told, self.mapped, self.hparams["candidates"], self.network
        )
        self.networks = StackedNetworks(
            len(self.seeds) * len(self.mappings), embedding.weight.shape[1], self.network
        )
        self._reset()
        self.embedding = embedding

    def _reset(self) -> None:
        # Mappings of one seed begin alike, so that nothing but the mapping is compared.
        self.networks.reset([seed for seed in self.seeds for _ in self.mappings])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """AdamW over the networks; each phase sets its own rates."""
        # Lightning's scaler of float16 gradients does not know the fused one.
        fused = self.trainer.precision != "16-mixed"
        return torch.optim.AdamW(
            self.networks.parameters(), lr=self.learn.learning_rate, fused=fused
        )

    # -- training --------------------------------------------------------------------------------

    def on_train_start(self) -> None:
        """Take the time."""
        self._started = monotonic()

    def _phase(self, batch: TextBatch) -> PhaseName:
        return self.text_plan.phases[batch.phase].name

    def on_train_batch_start(self, batch: TextBatch, batch_idx: int) -> None:
        """Begin a phase: rates of its own, no memory of the last one's gradients."""
        del batch_idx
        if not batch.begins:
            return
        name = self._phase(batch)
        optimizer = self.optimizers(use_pl_optimizer=False)
        assert isinstance(optimizer, torch.optim.Optimizer)
        optimizer.state.clear()
        settings = self.compose if name == "compose" else self.learn
        for group in optimizer.param_groups:
            group["lr"] = settings.learning_rate
            group["weight_decay"] = settings.weight_decay
        if name != "learn" or self.compose.epochs == 0:
            self._reset()

    def training_step(self, batch: TextBatch, batch_idx: int) -> Tensor:
        """Cross-entropy of the answers, of each network for itself.

        Raises:
            NonFiniteError: The loss is NaN or infinite at the end of an epoch.
        """
        del batch_idx
        logits = self.texts.logits(self.networks(self.texts.inputs(batch.rows)))
        answers = self.texts.answers_to(batch.rows)
        losses = cross_entropy(logits.flatten(0, 1), answers.reshape(-1), reduction="none").view_as(
            answers
        )
        # A network's gradient does not see the others; a process has a share of the step's texts.
        loss = losses.sum() * (self.trainer.world_size / batch.n_rows)
        if batch.ends_epoch:
            mean = losses.detach().mean() if losses.numel() else loss.detach()
            if not bool(mean.isfinite()):
                raise NonFiniteError(
                    f"the loss is NaN or infinite in epoch {batch.epoch} of the phase "
                    f"{self._phase(batch)}. Lower its learning_rate, or model.network.input_rms."
                )
            self.log("loss", mean, prog_bar=True, batch_size=batch.n_rows)
        return loss

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

    def on_train_batch_end(self, outputs: Any, batch: TextBatch, batch_idx: int) -> None:
        """Score the networks now and then, and at the end of a phase."""
        del outputs, batch_idx
        every: int = self.hparams["score_every"]
        if not batch.ends_epoch or ((batch.epoch + 1) % every and not batch.ends):
            return
        name = self._phase(batch)
        shares = self._composed() if name == "compose" else {}
        if name != "compose" or batch.ends:
            scores = self.scores()
            for what in ("source_learned", "generalized") if name != "compose" else ():
                values = torch.tensor([getattr(score, what) for score in scores])
                shares[what] = values.view(len(self.seeds), -1).mean(0).tolist()
            if batch.ends:
                self.finished[name] = scores
        for what, values_of in shares.items():
            for mapping, share in zip(self.mappings, values_of, strict=True):
                tag = f"{name}/{what}/{mapping}"
                # By the loggers themselves: Lightning would log it at every later step again.
                self.log(tag, share, batch_size=1, logger=False)
                for logger in self.trainer.loggers:
                    logger.log_metrics({tag: share}, step=self.global_step)
                self.history.setdefault(tag, []).append((self.global_step, share))

    @torch.no_grad()
    def _composed(self) -> dict[str, list[float]]:
        """Shares of the paired texts that are known, by mapping; of all candidates."""
        found = {}
        for side in _SIDES:
            rows = self.texts.rows_of("paired", side)
            logits = self.texts.logits(self.networks(self.texts.inputs(rows)))
            answers = self.texts.answers_to(rows)
            hits = logits.argmax(-1).view_as(answers) == answers
            found[f"{side}_learned"] = hits.double().mean((0, 2)).tolist()
        return found

    @torch.no_grad()
    def scores(self) -> list[RunScores]:
        """What every network says of the new subjects, mapping by mapping of each seed."""
        said = [
            self.texts.logits(self.networks(self.texts.inputs(self.texts.rows_of("new", side))))
            for side in _SIDES
        ]
        return score_runs(self.texts, self.mappings, self.seeds, *said)

    def on_train_end(self) -> None:
        """Write the numbers, tables and figures."""
        if is_dry_run(self.trainer) or not self.trainer.is_global_zero:
            return
        seconds = monotonic() - self._started
        write_results(self, self._data, run_folder(self.trainer), seconds)

    # -- checkpoints -----------------------------------------------------------------------------

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Say what it is of, and what was found so far."""
        checkpoint["ablation"] = {
            "hparams": dict(self.hparams),
            "data": dict(self._data.hparams),
            "embedding": self._fingerprint,
            "finished": {k: [asdict(s) for s in v] for k, v in self.finished.items()},
            "history": {tag: list(points) for tag, points in self.history.items()},
        }

    @cached_property
    def _fingerprint(self) -> str:
        assert self.embedding is not None
        return self.embedding.fingerprint

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Go on where that run was.

        Raises:
            ConfigError: The checkpoint is of another study, vocabulary, or way of training.
        """
        stored = checkpoint.get("ablation")
        if stored is None:
            raise ConfigError("the checkpoint is none of VocabularyAblation. Pass one of its own.")
        self.configure_model()
        other = [
            f"{kind}.{name}"
            for kind, ours in (("model", self.hparams), ("data", self._data.hparams))
            for name, value in stored["hparams" if kind == "model" else "data"].items()
            if name not in ("lm", "texts_file") and ours.get(name) != value
        ]
        if stored["embedding"] != self._fingerprint:
            other.append("model.lm")
        if other:
            raise ConfigError(
                f"the checkpoint was written with another {other[0]}. Use the settings of the run "
                "that wrote it (its config.yaml), or begin anew."
            )
        self.finished = {k: [RunScores(**s) for s in v] for k, v in stored["finished"].items()}
        self.history = {k: [tuple(p) for p in v] for k, v in stored["history"].items()}
