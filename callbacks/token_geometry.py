"""How the cloud of a text's tokens changes while an LM is trained."""

from __future__ import annotations

import math
from contextlib import nullcontext
from typing import Any

import lightning as L
import torch
from lightning.pytorch.utilities import rank_zero_warn

from lincorr_lightning.callbacks.step_watch import PeriodicCallback
from lincorr_lightning.callbacks.watcher import independent
from lincorr_lightning.data.tokenized_texts import read_prompts
from lincorr_lightning.errors import ConfigError
from lincorr_lightning.geometry.history import GeometryHistory
from lincorr_lightning.geometry.token_clouds import CloudSettings, PromptGeometry, observe_prompts
from lincorr_lightning.lm.query_cache import get_query_cache
from lincorr_lightning.results.run_folder import is_dry_run, run_folder


class TokenGeometry(PeriodicCallback):
    """Intrinsic dimension, overlap, cosines and angles of the tokens of watch texts, as they train.

    The LM of any LightningModule reads a few texts by itself, in eval mode and without gradient:
    weights, optimizer, random streams and modes are as before afterwards. Every process reads the
    same and waits for nobody. What is told are means over the texts: a curve a layer in every
    logger, and a heat map of layer and step when training ends, as a figure, a table and in
    TensorBoard (Viswanathan et al., 2025, arXiv 2501.10573, while it happens).

    Where several edits are trained side by side, each in a copy of the LM, the first copy is
    watched.

    Args:
        texts: A ``.txt``, ``.jsonl`` or ``.csv`` file, or a folder with such files; None takes
            texts about the embedded tiny world.
        key: Where a row of ``.jsonl`` or ``.csv`` has its text.
        n_tokens: Tokens of each; shorter texts are skipped.
        n_texts: How many are read.
        every_n_steps: Optimizer steps between two measurements.
        range_scalings: The n2's of the intrinsic dimension; 2 is the 2NN estimator.
        ks: Sizes of the neighborhoods whose overlap with the next layer is taken.
        embedding_layer: Whether the token embedding is looked at too, as layer 0.
        lm: Name of the LM in ``module.named_modules()``, if there are several.
        tokenizer: Folder or hub id of its tokenizer, if none is found.
        seed: Of the tiny world's texts.

    Attributes:
        history: ``(step, value)`` by tag, such as ``token_geometry/dimension_n2=2/layer_1``.
        results: Observable and layer, as ``dimension_n2=2/layer_1`` -> the means ``before`` and
            ``after`` training.

    Raises:
        ConfigError: A setting that no run can have.
    """

    def __init__(
        self,
        texts: str | None = None,
        key: str = "text",
        n_tokens: int = 64,
        n_texts: int = 4,
        every_n_steps: int = 10,
        range_scalings: list[int] | None = None,
        ks: list[int] | None = None,
        embedding_layer: bool = False,
        lm: str | None = None,
        tokenizer: str | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__(every_n_steps, lm, tokenizer)
        for name, value, least in (("n_tokens", n_tokens, 4), ("n_texts", n_texts, 1)):
            if value < least:
                raise ConfigError(f"TokenGeometry.{name} is {value}; it must be at least {least}.")
        self.texts = texts
        self.key = key
        self.n_tokens = n_tokens
        self.n_texts = n_texts
        self.settings = CloudSettings.of(
            n_tokens, range_scalings or [2], ks or [2], embedding_layer, "TokenGeometry"
        )
        self.seed = seed
        self.begin()

    def begin(self) -> None:
        """Forget all that was seen in another run."""
        super().begin()
        self.results: dict[str, Any] = {}
        self._measured = -1

    @property
    def state_key(self) -> str:
        """Several may watch one run, each something else."""
        return self._generate_state_key(
            texts=self.texts, n_tokens=self.n_tokens, n_texts=self.n_texts, lm=self.lm,
            every_n_steps=self.every_n_steps, settings=repr(self.settings), seed=self.seed,
        )  # fmt: skip

    # -- a run -----------------------------------------------------------------------------------

    def close(self, trainer: L.Trainer) -> None:
        """Let go of the LM."""
        super().close(trainer)
        self.__dict__.pop("_asked", None)

    def state_dict(self) -> dict[str, Any]:
        """What was measured so far."""
        return {"history": self.history, "measured": self._measured}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from there."""
        self.history = state_dict["history"]
        self._measured = state_dict["measured"]

    # -- measuring -------------------------------------------------------------------------------

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Read the texts, and observe them before anything changes.

        Raises:
            LanguageModelError: The module holds no causal LM, or no tokenizer is found.
            SubjectsError: There are no texts, or all are too short.
        """
        self._asked = get_query_cache(trainer, pl_module, self.lm, self.tokenizer).lm
        if not is_dry_run(trainer):
            run_folder(trainer)  # agreed on by all processes, before one of them writes
        place = self.siblings(trainer).index(self)
        self._tag = f"token_geometry_{place + 1}" if place else "token_geometry"
        prompts = read_prompts(
            self._asked, self.texts, self.key, self.n_tokens, self.n_texts, self.seed,
            "TokenGeometry",
        )  # fmt: skip
        self._tokens = torch.tensor(prompts.rows)
        self._names = [text.where for text in prompts.texts]
        self.watch_from(trainer)
        self._copies = None
        if self._measured < 0:
            self.measure(trainer)

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """See whether copies of the LM are trained."""
        del trainer, batch_idx
        edit_batch = independent(batch)
        trained = edit_batch is not None and bool(edit_batch.edits)
        self._copies = getattr(pl_module, "adapter_context", None) if trained else None

    def measure(self, trainer: L.Trainer) -> None:
        """Observe the texts."""
        self._measured = trainer.global_step
        found = []
        # One at a time: beside what training keeps there may be little memory.
        for row, name in zip(self._tokens[:, None], self._names, strict=True):
            with nullcontext() if self._copies is None else self._copies([0]):
                found += observe_prompts(self._asked, row, [name], self.settings)
        numbers = {f"{self._tag}/{k}": v for k, v in self._means(found).items()}
        self.log_numbers(trainer, numbers, self._measured)

    def _means(self, found: list[PromptGeometry]) -> dict[str, float]:
        """Means over the texts of each observable of each layer; what has no end is left out."""
        clouds = [one.clouds for one in found]
        if clouds[0].overlap.shape[0] < 1 and not self.history:
            rank_zero_warn(
                "TokenGeometry sees one layer, so there is no next one to overlap with. Set its "
                "embedding_layer to look at the token embedding as well."
            )
        mean = {
            name: torch.stack([getattr(part, name) for part in clouds]).mean(0)
            for name in ("dimension", "overlap", "cosine_mean", "angle_mean")
        }
        curves = {f"dimension_n2={n}": mean["dimension"][:, i]
                  for i, n in enumerate(self.settings.range_scalings)}  # fmt: skip
        curves |= {f"overlap_k={k}": mean["overlap"][:, i] for i, k in enumerate(self.settings.ks)}
        curves |= {"cosine": mean["cosine_mean"], "angle": mean["angle_mean"]}
        layers = self.settings.layers(len(mean["cosine_mean"]))
        numbers = {
            f"{name}/layer_{layer}": float(value)
            for name, values in curves.items()
            for layer, value in zip(layers, values, strict=False)
        }
        numbers["loss"] = sum(one.loss for one in found) / len(found)
        numbers["entropy"] = sum(one.entropy for one in found) / len(found)
        return {name: value for name, value in numbers.items() if math.isfinite(value)}

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Draw layer and step, and write the numbers."""
        del pl_module
        if self._measured != trainer.global_step:
            self.measure(trainer)
        history = {
            name.removeprefix(f"{self._tag}/"): points for name, points in self.history.items()
        }
        self.results = {
            name: {"before": points[0][1], "after": points[-1][1]}
            for name, points in history.items()
        }
        told = GeometryHistory(
            history,
            f"{len(self._names)} texts of {self.n_tokens} tokens; a column a measurement",
        )
        if trainer.is_global_zero and not is_dry_run(trainer):
            told.write(run_folder(trainer), self._tag)
        told.show(trainer, self._tag)
