"""Stops a training of edits before they reach other people."""

from typing import Any

import lightning as L
import torch
from torch import Tensor

from lincorr_lightning.callbacks.generalization import Generalization
from lincorr_lightning.errors import ConfigError, require

_KEPT = ("best_step", "stopped_step", "specific", "weights")  # in a checkpoint


class StopAtLeak(L.Callback):
    """Ends a training where edits are learned and begin to leak, and restores its best weights.

    At each measurement of the run's `Generalization`: once at least `min_learned` of the edits are
    learned and they leak to more than `max_leak` of the other people, training stops. The weights
    become those of the measured step with the highest ``generalization/specific`` at which so many
    edits were learned; they are kept on the CPU. Works with any LightningModule, and in
    ``HuggingFaceCallback`` after the `Generalization`.

    Of edits that are each trained from the base weights (see `EditBatch`), the outcome counts that
    each has at its last learned step before it is stopped by the same rule, or there if that is the
    first; the steps after it are trained, but count no more.

    Args:
        min_learned: Least share of the edits that are learned, between 0 and 1.
        max_leak: Largest leak that does not stop, between 0 and 1.
        relation: Relation of the `Generalization`, as it names it; None takes the first one.

    Attributes:
        best_step: Updates after which the weights were best, None before; of independent edits,
            the mean of the steps that count.
        stopped_step: Updates after which training was stopped; None if it was not.
    """

    follows_measurements = True  # see `PeriodicCallback.setup`
    returned = ("best_step", "stopped_step")

    def __init__(
        self, min_learned: float = 0.9, max_leak: float = 0.1, relation: str | None = None
    ) -> None:
        super().__init__()
        for name, share in (("min_learned", min_learned), ("max_leak", max_leak)):
            require(f"StopAtLeak.{name}", share, at_least=0, at_most=1)
        self.min_learned = min_learned
        self.max_leak = max_leak
        self.relation = relation
        self._reset()

    def _reset(self) -> None:
        self.best_step: float | None = None
        self.stopped_step: int | None = None
        self.specific = -float("inf")  #: Of the step with the best weights.
        self.weights: dict[str, Tensor] = {}  #: The best ones.

    @property
    def state_key(self) -> str:
        return f"{type(self).__qualname__} {self.relation}"

    def is_over(self, learned: float, leak: float) -> bool:
        """Return whether training ends at this share of learned edits, and at this leak."""
        return learned >= self.min_learned and leak > self.max_leak

    def settings(self) -> dict[str, float | None]:
        """Return the rule and its steps, as in ``results.json``."""
        return {
            "min_learned": self.min_learned,
            "max_leak": self.max_leak,
            "best_step": self.best_step,
            "stopped_step": self.stopped_step,
        }

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        if stage != "fit":
            return
        self._reset()
        callbacks: list[L.Callback] = trainer.callbacks  # type: ignore[attr-defined]
        measures = [
            each
            for each in callbacks
            if isinstance(each, Generalization)
            and (each.relation is None or self.relation in (None, each.relation))
        ]
        if not measures or not measures[0].n_others:
            raise ConfigError(
                "StopAtLeak needs a Generalization with n_others of at least 1 among the "
                "callbacks" + (f", of {self.relation}." if self.relation else ".")
            )
        self._measures = measures[0]

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._measures.stop = self

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *_: Any) -> None:
        if self._measures.run.is_independent or self.stopped_step is not None:
            return
        step = self._measures.run.step
        now = {}
        for name in ("source_learned", "leak", "specific"):
            measured, now[name] = self._measures.latest(f"generalization/{name}")
            if measured != step:
                return
        if now["source_learned"] >= self.min_learned and now["specific"] > self.specific:
            self.specific = now["specific"]
            self.best_step = step
            self.weights = {
                name: parameter.detach().to("cpu", copy=True)
                for name, parameter in pl_module.named_parameters()
                if parameter.requires_grad
            }
        if self.is_over(now["source_learned"], now["leak"]):
            self.stopped_step = step
            trainer.should_stop = True

    @torch.no_grad()
    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if self.stopped_step is None:
            return
        for name, parameter in pl_module.named_parameters():
            if name in self.weights:
                parameter.copy_(self.weights[name])
        self.weights = {}

    def state_dict(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in _KEPT}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        for name in _KEPT:
            setattr(self, name, state_dict[name])
