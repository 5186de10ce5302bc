"""Movement of sparse-autoencoder features while an LM is fine-tuned."""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from lincorr_lightning.callbacks.periodic_callback import CallbackState
from lincorr_lightning.callbacks.relation import RelationCallback
from lincorr_lightning.finetune.cases import SIDES
from lincorr_lightning.results.results import Results
from lincorr_lightning.results.table import Table, column
from lincorr_lightning.sae.formats import check_fit, load_saes
from lincorr_lightning.sae.forwards import last_activations

_LEAST_CHANGE = 0.1  #: Mean absolute change, in typical activations, of a feature that moved.
_N_TOP = 10  #: Features in the table, per step, hook point and prompt.


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


@dataclass
class MovementState(CallbackState):
    """What a checkpoint keeps of a `FeatureMovement`."""

    base: dict[str, Tensor] = field(default_factory=dict)  #: Activations before training.
    moved: list[dict[str, Any]] = field(default_factory=list)  #: `MovedFeature` of all steps.
    values: dict[str, Any] = field(default_factory=dict)  #: Scalars of the last step.


class FeatureMovement(RelationCallback):
    """Counts which features of sparse autoencoders (SAEs) move while an LM is fine-tuned.

    Features are read at the last position of the source and target prompts of fixed subjects, and
    compared with those before training. The SAEs are not trained.

    Logs ``features/<hook point>/<source or target>/<name>``: ``change`` (sum over features of the
    mean absolute change, relative to the sum of all activations before), ``moved`` (number of
    features whose mean absolute change is above 0.1 of a typical activation), ``on`` and
    ``off`` (features per prompt that became active and inactive), ``explained`` (share of the
    activations' squared distance from the SAE's bias that it reconstructs).

    Args:
        saes: Folder with one folder per SAE, or the folders of SAEs, in any known format.
        relation: Relation; None takes that of the run's edits, or ``city->country`` without any.
        subjects: Subjects of the prompts; None takes those of the run's edits, or samples some.
        n_watch: Number of subjects at most, if none are given.
        seed: Seed of sampled subjects.
        **options: See `RelationCallback`.

    Attributes:
        results: Hook point -> prompt -> the scalars after training, and the ``top`` moved features.
    """

    study = "feature_movement"
    state_class = MovementState

    def __init__(
        self,
        saes: str | list[str],
        relation: str | None = None,
        subjects: list[str] | None = None,
        n_watch: int = 64,
        seed: int = 1,
        **options: Any,
    ) -> None:
        super().__init__(relation, **options)
        self.watch(subjects, n_watch, seed, least=1)
        self.saes = saes

    def open(self) -> Iterable[str]:
        self.resolve_relation()
        lm = self.run.cache.lm
        saes = load_saes(self.saes, lm)
        check_fit(saes.values(), lm)
        self._saes = {
            hook_point: sae.folded().requires_grad_(False).to(lm.model.device)
            for hook_point, sae in saes.items()
        }
        chosen = self.subjects or self.edited_subjects[: self.n_watch]
        chosen = chosen or self.sample_subjects(self.n_watch, self.seed)
        self._watched = list(dict.fromkeys(chosen))
        return self._watched

    def prepare(self) -> None:
        if not self.state.base:
            self.state.base = self._activations()

    def _activations(self) -> dict[str, Tensor]:
        """Return those of the source prompts, then of the target prompts, by hook point."""
        relation = self.tokenized
        cache = self.run.cache
        prompts = relation.source_prompts(self._watched) + relation.target_prompts(self._watched)
        context = cache.contexts([self.adapter_id] * len(prompts))
        rows = cache.lm.rows(prompts)
        activations = last_activations(cache.lm, rows, list(self._saes), context)
        return {hook_point.id: x.float() for hook_point, x in activations.items()}

    @torch.no_grad()
    def measure(self) -> None:
        activations = self._activations()
        step = self.run.step
        scalars: dict[str, float] = {}
        self.state.values = {}
        self.state.moved = [row for row in self.state.moved if row["step"] != step]
        for hook_point, sae in self._saes.items():
            point = hook_point.id
            device = sae.decoder.device
            base = sae.encode(self.state.base[point].to(device))
            active = base[base > 0]
            typical = float(active.sum()) / max(len(active), 1)
            parts = zip(SIDES, base.chunk(2), activations[point].to(device).chunk(2), strict=True)
            for side, old, x in parts:
                new = sae.encode(x)
                of_features = {
                    "before": old,
                    "after": new,
                    "change": (new - old).abs(),
                    "on": (old <= 0) & (new > 0),
                    "off": (old > 0) & (new <= 0),
                }
                means = {name: values.double().mean(0) for name, values in of_features.items()}
                error = (x - sae.decode(new)).double().square().sum()
                total = (x - sae.decoder_bias).double().square().sum()
                before = float(means["before"].sum())
                values = {
                    "change": float(means["change"].sum()) / before if before else 0.0,
                    "moved": float((means["change"] > _LEAST_CHANGE * typical).sum()),
                    "on": float(means["on"].sum()),
                    "off": float(means["off"].sum()),
                    "explained": float(1 - error / total) if total else math.nan,
                }
                prefix = f"{self.name.replace(self.study, 'features')}/{point}/{side}"
                scalars |= {f"{prefix}/{name}": value for name, value in values.items()}
                top = _most_moved(point, means)
                about = {"step": step, "hook_point": point, "prompt": side}
                self.state.moved += [about | row for row in top]
                self.state.values.setdefault(point, {})[side] = {**values, "top": top}
        self.log_scalars(scalars)

    def finish(self) -> Results:
        """Return the movement after training, with a table of the features that moved most."""
        self.measure_once()
        table = Table.of(
            self.study,
            sorted(self.state.moved, key=lambda row: -row["step"]),
            MovedFeature,
            f"Features that moved most on the prompts of {self.tag}, the last step first",
            "became active, became inactive: share of the prompts",
        )
        return Results(self.name, self.state.values, tables=[table])


def _most_moved(point: str, means: dict[str, Tensor]) -> list[dict[str, Any]]:
    order = means["change"].argsort(descending=True, stable=True)[:_N_TOP].tolist()
    return [
        {"rank": rank, "feature": f"{point}.{i}"} | {name: float(x[i]) for name, x in means.items()}
        for rank, i in enumerate(order, 1)
        if means["change"][i] > 0
    ]
