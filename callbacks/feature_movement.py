"""Movement of sparse-autoencoder features while an LM is fine-tuned."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any, NamedTuple

import lightning as L
import torch
from torch import Tensor

from lincorr_lightning.callbacks.relation_callback import RelationCallback
from lincorr_lightning.distributed import gather
from lincorr_lightning.errors import ConfigError, require
from lincorr_lightning.finetune.batches import EditBatch
from lincorr_lightning.results.results import Results
from lincorr_lightning.results.table import Column, Table
from lincorr_lightning.sae.formats import load_saes
from lincorr_lightning.sae.forwards import Forward, run_with_hooks
from lincorr_lightning.sae.hook_points import HookPoint
from lincorr_lightning.sae.hooks import find_hook_points, width_of

SIDES = ("source", "target")
COLUMNS = (
    "step", "hook_point", "prompt", "rank", "feature", "before", "after", "change", "on", "off",
)  # fmt: skip


class _Sums(NamedTuple):
    """Sums over the subjects of one step, hook point and prompt; tensors are ``(n_features,)``."""

    n: int
    before: Tensor
    after: Tensor
    moved: Tensor
    on: Tensor
    off: Tensor
    # The SAE's squared error, and the squared distance of the activations from its bias.
    error: float
    total: float


_Measurement = dict[tuple[HookPoint, str], _Sums]


def _add(sums: _Measurement, more: _Measurement) -> None:
    """Add the sums over other subjects of the same step."""
    for key, other in more.items():
        sums[key] = _Sums(*map(operator.add, sums[key], other)) if key in sums else other


class FeatureMovement(RelationCallback):
    """Counts which features of sparse autoencoders (SAEs) move while an LM is fine-tuned.

    Features are read at the last position of the source and target prompts of fixed subjects, and
    compared with those before training. The SAEs are not trained; ``explained`` shows how well they
    still fit the LM.

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
        subjects: Subjects of the prompts; None takes those of the run's edits, or samples the
            vocabulary.
        n_watch: Number of these subjects at most.
        least: Mean absolute change above which a feature counts as moved, relative to a typical
            activation.
        n_top: Number of features in the table, per step, hook point and prompt.
        every_n_steps: Optimizer steps between two measurements.
        lm: Name of the LM in ``module.named_modules()``, if there are several.
        tokenizer: Folder or hub id of the LM's tokenizer, if none is found.
        knowledge_files: YAML files with more knowledge.
        seed: Seed of sampled subjects.

    Attributes:
        results: Hook point -> prompt -> the scalars after training, and ``top``, the features that
            moved most.
    """

    study = "feature_movement"
    uses_maps = False

    def __init__(
        self,
        saes: str | list[str],
        relation: str | None = None,
        subjects: list[str] | None = None,
        n_watch: int = 64,
        least: float = 0.1,
        n_top: int = 10,
        every_n_steps: int = 10,
        lm: str | None = None,
        tokenizer: str | None = None,
        knowledge_files: list[str] | None = None,
        seed: int = 1,
    ) -> None:
        super().__init__(
            relation, every_n_steps=every_n_steps, lm=lm, tokenizer=tokenizer,
            knowledge_files=knowledge_files, seed=seed,
        )  # fmt: skip
        require("FeatureMovement.n_watch", n_watch, at_least=1)
        require("FeatureMovement.n_top", n_top, at_least=1)
        require("FeatureMovement.least", least, above=0)
        if subjects == []:
            raise ConfigError("FeatureMovement.subjects is empty; name some, or null.")
        self.saes = saes
        self.subjects = subjects
        self.n_watch = n_watch
        self.least = least
        self.n_top = n_top

    def reset(self) -> None:
        """Forget the measurements of an earlier run."""
        super().reset()
        self._base: dict[HookPoint, Tensor] = {}
        self._sums: dict[int, _Measurement] = {}
        self._is_independent = False

    # -- measuring ---------------------------------------------------------------------------------

    def open(self, trainer: L.Trainer) -> None:
        """Read the SAEs and choose the subjects."""
        super().open(trainer)
        model = self.cache.lm.model
        n_layers = 1 + max(hook_point.layer for hook_point in find_hook_points(model))
        self._saes = {}
        for hook_point, sae in load_saes(self.saes, self.cache.lm).items():
            sae.check_fits(width_of(model), n_layers, self.cache.lm.config.name_or_path)
            self._saes[hook_point] = sae.folded().requires_grad_(False).to(model.device)
        edited = [edit.subject for edit in self.run_edits]
        chosen = self.subjects or edited[: self.n_watch] or self.sample_subjects(self.n_watch)
        self._watched = list(dict.fromkeys(chosen))
        everybody = dict.fromkeys([*self._watched, *edited])
        self._rows = {subject: row for row, subject in enumerate(everybody)}

    @torch.no_grad()
    def start(self, trainer: L.Trainer) -> None:
        """Record the features before training."""
        del trainer
        if not self._base:
            self._base = self._activations(list(self._rows))
        n = len(self._rows)
        self._features: dict[tuple[HookPoint, str], Tensor] = {}
        self._typical: dict[HookPoint, float] = {}
        for hook_point, sae in self._saes.items():
            x = self._base[hook_point].to(sae.decoder.device)
            features = [sae.encode(x[:n]).cpu(), sae.encode(x[n:]).cpu()]
            self._features |= zip([(hook_point, side) for side in SIDES], features, strict=True)
            n_active = sum(int((part > 0).sum()) for part in features)
            self._typical[hook_point] = sum(float(part.sum()) for part in features) / max(
                n_active, 1
            )

    def _activations(
        self, subjects: Sequence[str], adapter_ids: Sequence[int | None] | None = None
    ) -> dict[HookPoint, Tensor]:
        """Return the activations after the source prompts and then the target prompts."""
        relation = self.tokenized
        prompts = [*relation.source_prompts(subjects), *relation.target_prompts(subjects)]
        rows = self.cache.lm.rows(prompts)
        found: dict[HookPoint, Tensor] = {}

        def collect(forward: Forward) -> None:
            for hook_point in self._saes:
                x = forward.at_positions(hook_point, forward.last).float().cpu()
                found.setdefault(hook_point, x.new_empty(len(rows), x.shape[1]))[forward.cases] = x

        context = self.cache.contexts([*(adapter_ids or [None] * len(subjects))] * len(SIDES))
        run_with_hooks(
            self.cache.lm,
            rows,
            collect,
            hook_points=list(self._saes),
            logits=False,
            context=context,
        )
        return found

    @torch.no_grad()
    def _measure(
        self, subjects: Sequence[str], adapter_ids: Sequence[int | None] | None = None
    ) -> _Measurement:
        activations = self._activations(subjects, adapter_ids)
        rows = [self._rows[subject] for subject in subjects]
        found = {}
        for hook_point, sae in self._saes.items():
            device = sae.decoder.device
            for side, x in zip(SIDES, activations[hook_point].to(device).chunk(2), strict=True):
                old = self._features[hook_point, side][rows].to(device)
                new = sae.encode(x)
                found[hook_point, side] = _Sums(
                    len(subjects),
                    before=_total(old),
                    after=_total(new),
                    moved=_total((new - old).abs()),
                    on=_total((old <= 0) & (new > 0)),
                    off=_total((old > 0) & (new <= 0)),
                    error=float((x - sae.decode(new)).double().square().sum()),
                    total=float((x - sae.decoder_bias).double().square().sum()),
                )
        return found

    def after_optimizer_step(self, trainer: L.Trainer, edit_batch: EditBatch | None) -> None:
        """Measure if due."""
        if edit_batch is None:
            return super().after_optimizer_step(trainer, None)
        self._is_independent = True
        if edit_batch.edits and self.is_due(trainer.global_step, edit_batch):
            found = self._measure(*self.own_subjects(edit_batch))
            _add(self._sums.setdefault(edit_batch.step + 1, {}), found)
        return None

    def measure(self, trainer: L.Trainer) -> None:
        """Measure the movement of the watched subjects' features."""
        self._sums[trainer.global_step] = self._measure(self._watched)
        self._log_step(trainer, trainer.global_step)

    # -- results -----------------------------------------------------------------------------------

    def _scalars(self, hook_point: HookPoint, sums: _Sums) -> dict[str, float]:
        change = sums.moved / sums.n
        before = float(sums.before.sum()) / sums.n
        return {
            "change": float(change.sum()) / before if before else 0.0,
            "moved": float((change > self.least * self._typical[hook_point]).sum()),
            "on": float(sums.on.sum()) / sums.n,
            "off": float(sums.off.sum()) / sums.n,
            "explained": 1 - sums.error / sums.total if sums.total else float("nan"),
        }

    def _log_step(self, trainer: L.Trainer, step: int) -> None:
        scalars = {
            f"{self.numbered('features')}/{hook_point.id}/{side}/{name}": value
            for (hook_point, side), sums in self._sums[step].items()
            for name, value in self._scalars(hook_point, sums).items()
        }
        self.log_scalars(trainer, scalars, step)

    def _top(self, step: int) -> list[tuple[Any, ...]]:
        """Return the features that moved most, as rows of the table."""
        rows: list[tuple[Any, ...]] = []
        for (hook_point, side), sums in self._sums[step].items():
            n = min(self.n_top, len(sums.moved))
            order = torch.argsort(sums.moved, descending=True, stable=True)[:n].tolist()
            for rank, index in enumerate(order):
                if sums.moved[index] > 0:
                    columns = (sums.before, sums.after, sums.moved, sums.on, sums.off)
                    values = [float(column[index]) / sums.n for column in columns]
                    name = f"{hook_point.id}.{index}"
                    rows.append((step, hook_point.id, side, rank + 1, name, *values))
        return rows

    def finish(self, trainer: L.Trainer) -> Results:
        """Return the movement after training, with a table of the features that moved most."""
        if any(gather(self._is_independent)):
            by_step: dict[int, _Measurement] = {}
            for part in gather(self._sums):
                for step, found in part.items():
                    _add(by_step.setdefault(step, {}), found)
            self._sums = dict(sorted(by_step.items()))
            for step in self._sums:
                self._log_step(trainer, step)
        elif trainer.global_step not in self._sums:
            self.measure(trainer)
        tops = {step: self._top(step) for step in sorted(self._sums, reverse=True)}
        values: dict[str, Any] = {}
        if tops:
            last, top = next(iter(tops.items()))
            for (hook_point, side), sums in self._sums[last].items():
                own = [row for row in top if row[1:3] == (hook_point.id, side)]
                values.setdefault(hook_point.id, {})[side] = {
                    **self._scalars(hook_point, sums),
                    "top": [dict(zip(COLUMNS[3:], row[3:], strict=True)) for row in own],
                }
        table = Table.from_rows(
            self.study,
            [*COLUMNS[:5], *(Column(key, format=".3g") for key in COLUMNS[5:])],
            [row for top in tops.values() for row in top],
            f"Features that moved most on the prompts of {self.tag}, the last step first",
            "before, after, change: mean activation and mean absolute change; on, off: share of "
            "the prompts at which the feature became active or inactive",
        )
        return Results(self.study, values, tables=[table])

    # -- resuming ----------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the measurements so far, and the activations before training."""
        sums = {
            step: [(point.layer, point.kind, side, tuple(s)) for (point, side), s in found.items()]
            for step, found in self._sums.items()
        }
        return {
            **super().state_dict(),
            "base": [(point.layer, point.kind, x) for point, x in self._base.items()],
            "sums": sums,
            "is_independent": self._is_independent,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from a checkpoint's measurements."""
        super().load_state_dict(state_dict)
        self._base = {HookPoint(layer, kind): x for layer, kind, x in state_dict["base"]}
        self._sums = {
            step: {(HookPoint(layer, kind), side): _Sums(*s) for layer, kind, side, s in found}
            for step, found in state_dict["sums"].items()
        }
        self._is_independent = state_dict["is_independent"]


def _total(values: Tensor) -> Tensor:
    """Return the sum over subjects, float64 on the CPU."""
    return values.double().sum(0).cpu()
