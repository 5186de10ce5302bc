"""Which features of sparse autoencoders move while an LM is taught something?"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import lightning as L
import torch
from torch import Tensor

from lincorr_lightning.callbacks.watcher import RelationCallback, adapter_ids, edits_of, independent
from lincorr_lightning.distributed import gather
from lincorr_lightning.errors import ConfigError
from lincorr_lightning.io import write_csv
from lincorr_lightning.results.loggers import tensorboard_writers
from lincorr_lightning.results.run_folder import is_dry_run, run_folder
from lincorr_lightning.results.tables import markdown_table
from lincorr_lightning.sae.formats import load_saes
from lincorr_lightning.sae.forwards import Forward, run_with_hooks
from lincorr_lightning.sae.hook_points import HookPoint
from lincorr_lightning.sae.hooks import find_hook_points, width_of

SIDES = ("source", "target")
COLUMNS = ("step", "place", "prompt", "rank", "feature", "before", "after", "change", "on", "off")


class _Sums(NamedTuple):
    """Sums over the subjects asked at one step, of one place and side; ``(n_features,)`` each."""

    n: int
    before: Tensor
    after: Tensor
    moved: Tensor
    on: Tensor
    off: Tensor
    # Of the SAE itself: squared error, and squared distance from nothing but its bias.
    missed: float
    total: float

    def plus(self, other: _Sums) -> _Sums:
        """Of the subjects of both."""
        return _Sums(*(a + b for a, b in zip(self, other, strict=True)))  # type: ignore[operator]


def _add(
    known: dict[tuple[HookPoint, str], _Sums], more: dict[tuple[HookPoint, str], _Sums]
) -> None:
    """Add the sums of other subjects at the same step."""
    for key, sums in more.items():
        known[key] = known[key].plus(sums) if key in known else sums


class FeatureMovement(RelationCallback):
    """Counts which features of sparse autoencoders (SAEs) move as an LM is fine-tuned.

    Features are read at the last position of the source's and the target's prompts about the
    subjects that are watched, and compared with those before training. The SAEs stay as they are,
    those of the LM before training: `explained` tells how well they still fit.

    Scalars of each place and prompt: ``change`` (sum over features of the mean absolute change, as
    a share of all activation before), ``moved`` (features whose mean absolute change is above
    `least` of a typical activation), ``on`` and ``off`` (features of a prompt that became active
    and inactive), ``explained`` (share of the activations' squared distance from the SAE's bias
    that it rebuilds). Where each edit is trained from the base weights, its own subject is asked in
    its own copy of the LM, and numbers are means over all edits after as many steps.

    Args:
        saes: Folder that holds a folder for each SAE, or their folders, in any known format.
        relation: As ``city->country``; None takes that of the run's edits.
        subjects: Who is watched; None takes subjects of the run's edits, or samples the vocabulary.
        n_watch: How many of these, or how many are sampled.
        least: From what mean absolute change on a feature counts as moved.
        n_top: Features that the table tells of, for each step, place and prompt.
        every_n_steps: Optimizer steps between two measurements.
        lm: Name of the LM in ``module.named_modules()``, if there are several.
        tokenizer: Folder or hub id of its tokenizer, if none is found.
        knowledge_files: YAML files with knowledge of your own.
        seed: Of subjects that are sampled.

    Attributes:
        results: HookPoint -> prompt -> the scalars after training, and ``top``, the features that moved
            most.
    """

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
        if n_watch < 1 or n_top < 1 or least <= 0 or subjects == []:
            raise ConfigError(
                f"FeatureMovement has n_watch {n_watch}, n_top {n_top}, least {least} and "
                f"subjects {subjects}; the first two must be at least 1, least above 0, and "
                "subjects null or not empty."
            )
        self.saes = saes
        self.subjects = subjects
        self.n_watch = n_watch
        self.least = least
        self.n_top = n_top

    def begin(self) -> None:
        """Forget all that was seen in another run."""
        super().begin()
        self.results: dict[str, Any] = {}
        self._base: dict[HookPoint, Tensor] = {}
        self._typical: dict[HookPoint, float] = {}
        self._sums: dict[int, dict[tuple[HookPoint, str], _Sums]] = {}
        self._is_independent = False

    # -- asking ----------------------------------------------------------------------------------

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Read the SAEs, and the features before anything changes.

        Raises:
            SparseAutoencoderError: An SAE cannot be read or does not fit the LM.
        """
        self.open(trainer, pl_module)
        if not is_dry_run(trainer):
            run_folder(trainer)  # agreed on by all processes, before one of them writes
        model = self.cache.lm.model
        n_layers = 1 + max(hook_point.layer for hook_point in find_hook_points(model))
        self._saes = {}
        for hook_point, sae in load_saes(self.saes, self.cache.lm).items():
            sae.check_fits(width_of(model), n_layers, self.cache.lm.config.name_or_path)
            self._saes[hook_point] = sae.folded().requires_grad_(False).to(model.device)
        edits = edits_of(trainer)
        self._edits = [edit.subject for edit in edits or ()]
        watched = self.subjects or self._edits[: self.n_watch] or self.sample_subjects(self.n_watch)
        self._watched = list(dict.fromkeys(watched))
        self._asked = list(dict.fromkeys([*self._watched, *self._edits]))
        self.watch_from(trainer)
        if not self._base:
            self._base = self._read(self._asked)

    def _read(
        self, subjects: Sequence[str], which: Sequence[int | None] | None = None
    ) -> dict[HookPoint, Tensor]:
        """Activations after the source prompts and then the target prompts, on the CPU."""
        prompts = [*self.asked.source_prompts(subjects), *self.asked.target_prompts(subjects)]
        rows = self.cache.lm.rows(prompts)
        found: dict[HookPoint, Tensor] = {}

        def look(forward: Forward) -> None:
            for hook_point in self._saes:
                x = forward.at_positions(hook_point, forward.last).float().cpu()
                found.setdefault(hook_point, x.new_empty(len(rows), x.shape[1]))[forward.cases] = x

        around = self.cache.around([*(which or [None] * len(subjects))] * len(SIDES))
        run_with_hooks(self.cache.lm, rows, look, hook_points=list(self._saes), context=around)
        return found

    @torch.no_grad()
    def _measure(
        self, subjects: Sequence[str], which: Sequence[int | None] | None = None
    ) -> dict[tuple[HookPoint, str], _Sums]:
        now = self._read(subjects, which)
        numbers = [self._asked.index(subject) for subject in subjects]
        found = {}
        for hook_point, sae in self._saes.items():
            device = sae.decoder.device
            for i, side in enumerate(SIDES):
                then = self._base[hook_point][[n + i * len(self._asked) for n in numbers]].to(
                    device
                )
                x = now[hook_point][i * len(subjects) : (i + 1) * len(subjects)].to(device)
                old, new = sae.encode(then), sae.encode(x)
                found[hook_point, side] = _Sums(
                    len(subjects),
                    before=_total(old),
                    after=_total(new),
                    moved=_total((new - old).abs()),
                    on=_total((old <= 0) & (new > 0)),
                    off=_total((old > 0) & (new <= 0)),
                    missed=float((x - sae.decode(new)).double().square().sum()),
                    total=float((x - sae.decoder_bias).double().square().sum()),
                )
        return found

    def after_optimizer_step(self, trainer: L.Trainer, batch: Any) -> None:
        """Measure, if it is time."""
        step = trainer.global_step
        edit_batch = independent(batch)
        if edit_batch is None:
            if self.is_due(step):
                self._sums[step] = self._measure(self._watched)
                self._log(trainer, step)
            return
        self._is_independent = True
        if edit_batch.edits and (self.is_due(edit_batch.step + 1) or edit_batch.last):
            subjects = [self._edits[edit] for edit in edit_batch.edits]
            found = self._measure(subjects, adapter_ids(edit_batch))
            _add(self._sums.setdefault(edit_batch.step + 1, {}), found)

    # -- numbers ---------------------------------------------------------------------------------

    def _numbers(self, hook_point: HookPoint, sums: _Sums) -> dict[str, float]:
        """Scalars of one place and side."""
        change = sums.moved / sums.n
        before = float(sums.before.sum()) / sums.n
        return {
            "change": float(change.sum()) / before if before else 0.0,
            "moved": float((change > self.least * self._typical_activation(hook_point)).sum()),
            "on": float(sums.on.sum()) / sums.n,
            "off": float(sums.off.sum()) / sums.n,
            "explained": 1 - sums.missed / sums.total if sums.total else float("nan"),
        }

    def _typical_activation(self, hook_point: HookPoint) -> float:
        """Of a feature that is active before training, on the mean over features and prompts."""
        if hook_point not in self._typical:
            sae = self._saes[hook_point]
            base = sae.encode(self._base[hook_point].to(sae.decoder.device))
            self._typical[hook_point] = float(base.sum() / (base > 0).sum().clamp(min=1))
        return self._typical[hook_point]

    def _log(self, trainer: L.Trainer, step: int) -> None:
        numbers = {}
        for (hook_point, side), sums in self._sums[step].items():
            for name, value in self._numbers(hook_point, sums).items():
                numbers[f"features/{hook_point.id}/{side}/{name}"] = value
        self.log_numbers(trainer, numbers, step)

    def _top(self, step: int) -> list[tuple[Any, ...]]:
        """Rows of the table: the features that moved most."""
        rows: list[tuple[Any, ...]] = []
        for (hook_point, side), sums in self._sums[step].items():
            n = min(self.n_top, len(sums.moved))
            order = torch.argsort(sums.moved, descending=True, stable=True)[:n].tolist()
            for rank, index in enumerate(order):
                if sums.moved[index] > 0:
                    columns = (sums.before, sums.after, sums.moved, sums.on, sums.off)
                    values = [float(column[index]) / sums.n for column in columns]
                    rows.append(
                        (step, hook_point.id, side, rank + 1, f"{hook_point.id}.{index}", *values)
                    )
        return rows

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Put the numbers together and write the table."""
        del pl_module
        if any(gather(self._is_independent)):
            together: dict[int, dict[tuple[HookPoint, str], _Sums]] = {}
            for part in gather(self._sums):
                for step, found in part.items():
                    _add(together.setdefault(step, {}), found)
            self._sums = dict(sorted(together.items()))
            for step in self._sums:
                self._log(trainer, step)
        elif trainer.global_step not in self._sums:
            self._sums[trainer.global_step] = self._measure(self._watched)
            self._log(trainer, trainer.global_step)
        if not self._sums:
            return
        last = max(self._sums)
        top = self._top(last)
        self.results = {}
        for (hook_point, side), sums in self._sums[last].items():
            own = [row for row in top if (row[1], row[2]) == (hook_point.id, side)]
            self.results.setdefault(hook_point.id, {})[side] = {
                **self._numbers(hook_point, sums),
                "top": [dict(zip(COLUMNS[3:], row[3:], strict=True)) for row in own],
            }
        if trainer.is_global_zero and not is_dry_run(trainer):
            number = self.siblings(trainer).index(self)
            name = f"feature_movement_{number + 1}" if number else "feature_movement"
            rows = [row for step in self._sums for row in self._top(step)]
            write_csv(run_folder(trainer) / "tables" / f"{name}.csv", COLUMNS, rows)
        for writer in tensorboard_writers(trainer):
            table = markdown_table(COLUMNS[1:], [row[1:] for row in top])
            writer.add_text("features that moved most", table, trainer.global_step)  # type: ignore[no-untyped-call]

    # -- resuming --------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """What was seen so far; features before training cannot be asked again."""
        sums = {
            step: [
                (hook_point.layer, hook_point.kind, side, tuple(s))
                for (hook_point, side), s in found.items()
            ]
            for step, found in self._sums.items()
        }
        return {
            **super().state_dict(),
            "base": [
                (hook_point.layer, hook_point.kind, x) for hook_point, x in self._base.items()
            ],
            "sums": sums,
            "is_independent": self._is_independent,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from there."""
        super().load_state_dict(state_dict)
        self._base = {HookPoint(layer, kind): x for layer, kind, x in state_dict["base"]}
        self._sums = {
            step: {(HookPoint(layer, kind), side): _Sums(*s) for layer, kind, side, s in found}
            for step, found in state_dict["sums"].items()
        }
        self._is_independent = state_dict["is_independent"]


def _total(values: Tensor) -> Tensor:
    """Over subjects, in float64, on the CPU."""
    return values.double().sum(0).cpu()
