"""Movement of sparse-autoencoder features while an LM is fine-tuned."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import lightning as L
import torch
from torch import Tensor

from lincorr_lightning.callbacks.relation_callback import RelationCallback
from lincorr_lightning.distributed import gather
from lincorr_lightning.errors import ConfigError, require
from lincorr_lightning.finetune.batches import EditBatch
from lincorr_lightning.results.results import Results
from lincorr_lightning.results.table import Table, column
from lincorr_lightning.sae.formats import check_fit, load_saes
from lincorr_lightning.sae.forwards import last_activations

SIDES = ("source", "target")
_MEANS = ("before", "after", "change", "on", "off")

Sums = dict[str, Tensor]
"""Sums over subjects by name, float64: ``n`` subjects, the squared ``error`` of the SAE and the
``total`` squared distance from its bias; and of each feature, ``(n_features,)``, the activations
``before`` and ``after``, the absolute ``change``, and how often it went ``on`` and ``off``."""
Measurement = dict[str, Sums]  #: Sums by hook point and prompt, as ``residual.1/source``.


@dataclass(frozen=True)
class MovedFeature:
    """A feature that moved, at one step: means over subjects."""

    step: int
    hook_point: str
    prompt: str
    rank: int
    feature: str
    before: float = column("mean before", ".3g")
    after: float = column("mean after", ".3g")
    change: float = column("mean absolute change", ".3g")
    on: float = column("became active", ".3g")
    off: float = column("became inactive", ".3g")


def _add(measurement: Measurement, other: Measurement) -> None:
    for key, sums in other.items():
        earlier = measurement.get(key, {})
        measurement[key] = {name: earlier.get(name, 0) + value for name, value in sums.items()}


class FeatureMovement(RelationCallback):
    """Counts which features of sparse autoencoders (SAEs) move while an LM is fine-tuned.

    Features are read at the last position of the source and target prompts of fixed subjects, and
    compared with those before training. The SAEs are not trained.

    Logs ``features/<hook point>/<source or target>/<name>``: ``change`` (sum over features of the
    mean absolute change, relative to the sum of all activations before), ``moved`` (number of
    features whose mean absolute change is above `least` of a typical activation), ``on`` and
    ``off`` (features per prompt that became active and inactive), ``explained`` (share of the
    activations' squared distance from the SAE's bias that it reconstructs). If each edit is
    trained from the base weights, its own subject is evaluated in its own adapter, and numbers are
    means over all edits after the same number of steps.

    Args:
        saes: Folder with one folder per SAE, or the folders of SAEs, in any known format.
        relation: Relation, as ``city->country``; None takes that of the run's edits.
        subjects: Subjects of the prompts; None takes those of the run's edits, or samples some.
        n_watch: Number of these subjects at most.
        least: Mean absolute change, in typical activations, above which a feature has moved.
        n_top: Number of features in the table, per step, hook point and prompt.
        seed: Seed of sampled subjects.
        **options: See `RelationCallback`.

    Attributes:
        results: Hook point -> prompt -> the scalars after training, and the ``top`` moved features.
    """

    study = "feature_movement"
    kept = (*RelationCallback.kept, "_base", "_sums")

    def __init__(
        self,
        saes: str | list[str],
        relation: str | None = None,
        subjects: list[str] | None = None,
        n_watch: int = 64,
        least: float = 0.1,
        n_top: int = 10,
        seed: int = 1,
        **options: Any,
    ) -> None:
        super().__init__(relation, seed=seed, **options)
        require("FeatureMovement.n_watch", n_watch, at_least=1)
        require("FeatureMovement.n_top", n_top, at_least=1)
        require("FeatureMovement.least", least, above=0)
        if subjects == []:
            raise ConfigError("FeatureMovement.subjects is empty; name some, or null.")
        self.saes, self.subjects = saes, subjects
        self.n_watch, self.least, self.n_top = n_watch, least, n_top

    def reset(self) -> None:
        super().reset()
        self._base: dict[str, Tensor] = {}
        self._sums: dict[int, Measurement] = {}

    def open(self, trainer: L.Trainer) -> None:
        super().open(trainer)
        lm = self.cache.lm
        saes = load_saes(self.saes, lm)
        check_fit(saes.values(), lm)
        self._saes = {
            hook_point: sae.folded().requires_grad_(False).to(lm.model.device)
            for hook_point, sae in saes.items()
        }
        edited = [edit.subject for edit in self.run_edits]
        chosen = self.subjects or edited[: self.n_watch] or self.sample_subjects(self.n_watch)
        self._watched = list(dict.fromkeys(chosen))
        subjects = dict.fromkeys([*self._watched, *edited])
        self._rows = {subject: row for row, subject in enumerate(subjects)}
        self.declare_measured(self._watched)

    @torch.no_grad()
    def start(self, trainer: L.Trainer) -> None:
        """Record the features before training."""
        self._base = self._base or self._activations(list(self._rows))
        self._features: dict[str, Tensor] = {}
        self._typical: dict[str, float] = {}
        for hook_point, sae in self._saes.items():
            x = self._base[hook_point.id].to(sae.decoder.device)
            features = torch.stack([sae.encode(part).cpu() for part in x.chunk(2)])
            self._features |= {
                f"{hook_point.id}/{side}": part for side, part in zip(SIDES, features, strict=True)
            }
            active = features[features > 0]
            self._typical[hook_point.id] = float(active.sum()) / max(len(active), 1)
        super().start(trainer)

    def _activations(
        self, subjects: Sequence[str], adapter_ids: Sequence[int | None] | None = None
    ) -> dict[str, Tensor]:
        relation = self.tokenized
        prompts = [*relation.source_prompts(subjects), *relation.target_prompts(subjects)]
        rows = self.cache.lm.rows(prompts)
        context = self.cache.contexts([*(adapter_ids or [None] * len(subjects))] * len(SIDES))
        activations = last_activations(self.cache.lm, rows, list(self._saes), context)
        return {hook_point.id: x.float() for hook_point, x in activations.items()}

    @torch.no_grad()
    def _compare(
        self, subjects: Sequence[str], adapter_ids: Sequence[int | None] | None = None
    ) -> Measurement:
        activations = self._activations(subjects, adapter_ids)
        rows = [self._rows[subject] for subject in subjects]
        measurement: Measurement = {}
        for hook_point, sae in self._saes.items():
            x_of_sides = activations[hook_point.id].to(sae.decoder.device).chunk(2)
            for side, x in zip(SIDES, x_of_sides, strict=True):
                key = f"{hook_point.id}/{side}"
                old, new = self._features[key][rows].to(x.device), sae.encode(x)
                of_features = {
                    "before": old,
                    "after": new,
                    "change": (new - old).abs(),
                    "on": (old <= 0) & (new > 0),
                    "off": (old > 0) & (new <= 0),
                }
                measurement[key] = {
                    "n": torch.tensor(float(len(subjects)), dtype=torch.float64),
                    "error": (x - sae.decode(new)).double().square().sum().cpu(),
                    "total": (x - sae.decoder_bias).double().square().sum().cpu(),
                    **{name: each.double().sum(0).cpu() for name, each in of_features.items()},
                }
        return measurement

    def after_optimizer_step(self, trainer: L.Trainer, edit_batch: EditBatch | None) -> None:
        if edit_batch is None:
            super().after_optimizer_step(trainer, None)
        elif edit_batch.edits and self.is_due(self.step, edit_batch):
            measurement = self._compare(*self.own_subjects(edit_batch))
            _add(self._sums.setdefault(edit_batch.step + 1, {}), measurement)

    def measure(self, trainer: L.Trainer) -> None:
        self._sums[self.step] = self._compare(self._watched)
        self._log_step(trainer, self.step)

    def _scalars(self, key: str, sums: Sums) -> dict[str, float]:
        n, before = float(sums["n"]), float(sums["before"].sum())
        error, total = float(sums["error"]), float(sums["total"])
        least = self.least * self._typical[key.partition("/")[0]]
        return {
            "change": float(sums["change"].sum()) / before if before else 0.0,
            "moved": float((sums["change"] / n > least).sum()),
            "on": float(sums["on"].sum()) / n,
            "off": float(sums["off"].sum()) / n,
            "explained": 1 - error / total if total else float("nan"),
        }

    def _log_step(self, trainer: L.Trainer, step: int) -> None:
        scalars = {
            f"{self.numbered('features')}/{key}/{name}": value
            for key, sums in self._sums[step].items()
            for name, value in self._scalars(key, sums).items()
        }
        self.log_scalars(trainer, scalars, step)

    def _top(self, step: int, key: str) -> list[MovedFeature]:
        sums, (point, side) = self._sums[step][key], key.split("/")
        order = torch.argsort(sums["change"], descending=True, stable=True)[: self.n_top].tolist()
        return [
            MovedFeature(
                step,
                point,
                side,
                rank,
                f"{point}.{index}",
                *(float(sums[name][index] / sums["n"]) for name in _MEANS),
            )
            for rank, index in enumerate(order, 1)
            if sums["change"][index] > 0
        ]

    def finish(self, trainer: L.Trainer) -> Results:
        """Return the movement after training, with a table of the features that moved most."""
        if self.is_independent:
            by_step: dict[int, Measurement] = {}
            for part in gather(self._sums):
                for step, measurement in part.items():
                    _add(by_step.setdefault(step, {}), measurement)
            self._sums = dict(sorted(by_step.items()))
            for step in self._sums:
                self._log_step(trainer, step)
        else:
            self._measure_once(trainer)
        values: dict[str, Any] = {}
        moved: list[MovedFeature] = []
        for step in sorted(self._sums, reverse=True):
            for key, sums in self._sums[step].items():
                point, side = key.split("/")
                top = self._top(step, key)
                moved += top
                if step == max(self._sums):
                    rows = [
                        {name: getattr(feature, name) for name in ("rank", "feature", *_MEANS)}
                        for feature in top
                    ]
                    values.setdefault(point, {})[side] = {**self._scalars(key, sums), "top": rows}
        table = Table.of(
            self.name,
            moved,
            MovedFeature,
            f"Features that moved most on the prompts of {self.tag}, the last step first",
            "became active, became inactive: share of the prompts",
        )
        return Results(self.name, values, tables=[table])
