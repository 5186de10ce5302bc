"""The edits of ``ripples.py`` as arrays: what they did after each step, and at steps of their own.

It reads the files of `EditRecorder`; ``ripple_tables.py`` has the tables.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from pandas import Series, factorize

from benchmarks.common import Estimate, mean_estimate
from benchmarks.real_lms.edit_explanations import explanations
from benchmarks.real_lms.edit_recorder import read_arrays
from benchmarks.real_lms.ripples import plan

FLOATS = npt.NDArray[np.float64]
INTS = npt.NDArray[np.int64]
LEARNED = "learned"
PEAK = "peak"
RULES: dict[str, float] = {LEARNED: 0.0, "p > .5": 0.5, "p > .9": 0.9}
"""Rules by which the step of each edit is chosen: the first with a larger probability."""


@dataclass(frozen=True)
class RippleRun:
    """The edits of one run on one LM, those of all seeds together, as arrays over the n edits.

    Attributes:
        arrays: Those of `EditRecorder`, with edits of all seeds.
        steps: Steps after which edits were measured.
        kept: Those of them with changes of logits.
        seed: Seed of each edit, ``(n,)``.
    """

    lm: str
    name: str
    relation: str
    arrays: Mapping[str, Any]
    steps: list[int]
    kept: list[int]
    seed: INTS

    @cached_property
    def group(self) -> INTS:
        """Number of the reference of each edit."""
        references = [row.tobytes() for row in self.arrays["reference"]]
        return factorize(np.array(references, dtype=object))[0].astype(np.int64)

    def by_answer(self, values: npt.NDArray[Any]) -> Estimate:
        """Return the mean over answers of a number of each edit, ``(n,)``, and its interval."""
        return mean_estimate(Series(values, dtype=float).groupby(self.group).mean().dropna())

    def is_right(self, labels: INTS) -> npt.NDArray[np.bool_]:
        """Return whether target labels, ``(..., n)``, are right for each edit."""
        reference = self.arrays["reference"]
        return np.asarray(reference[np.arange(len(reference)), labels])

    @cached_property
    def right_before(self) -> npt.NDArray[np.bool_]:
        """Whether the LM gives a right label before the edit."""
        return self.is_right(self.arrays["before"].argmax(1))

    @cached_property
    def nearest_right(self) -> npt.NDArray[np.bool_]:
        """Whether the nearest word is right."""
        return self.is_right(self.arrays["nearest"].argmax(1))

    @cached_property
    def in_context_right(self) -> npt.NDArray[np.bool_]:
        """Whether the LM gives a right label after the taught statement."""
        return self.is_right(self.arrays["in_context"].argmax(1))

    @cached_property
    def shares(self) -> dict[str, FLOATS]:
        """Numbers of each edit after each step, ``(s, n)``."""
        of = self.arrays
        n = len(of["labels"])
        rows = np.arange(n)[:, None]
        shares = {
            "probability": of["probability"].astype(float),
            LEARNED: of["learned"].astype(float),
            "own": (self.is_right(of["own"]) & ~self.right_before).astype(float),
        }
        for name in ("others", "nobody", "paraphrases"):
            before, after = (of["reference"][rows, of[key]] for key in (f"before_{name}", name))
            # Some targets have no other wordings.
            shares[name] = (after & ~before).sum(2) / (after.shape[2] or np.nan)
        shares["leak"] = shares.pop("others")
        shares["specific"] = shares["own"] - shares["leak"]
        shares["color"], shares["pet"] = np.moveaxis(of["controls"].astype(float), 2, 0)
        taught = np.full((len(self.steps), n), np.nan)
        taught[[self.steps.index(step) for step in self.kept]] = of["others_taught"].mean(2)
        shares["others_taught"] = taught
        return shares

    def newly_given(self, labels: INTS, step: int) -> tuple[FLOATS, FLOATS]:
        """Return to whom target labels, ``(n,)``, are given after a step, and were not before.

        Whether to each edit's own person, and the share of other people, ``(n,)``.
        """
        of, s = self.arrays, self.steps.index(step)
        own = (of["own"][s] == labels) & (of["before"].argmax(1) != labels)
        wanted = labels[:, None]
        others = (of["others"][s] == wanted) & (of["before_others"] != wanted)
        return own.astype(float), others.mean(1)

    def index_at(self, rule: str) -> INTS:
        """Return the position of each edit's step among `steps`, ``(n,)``; -1 for none.

        By a rule, or the same step of all edits, as text.
        """
        if rule.isdigit():
            return np.full(len(self.seed), self.steps.index(int(rule)))
        if rule == PEAK:
            return self._peak
        reached = (
            self.shares[LEARNED] > 0
            if rule == LEARNED
            else self.shares["probability"] > RULES[rule]
        )
        return np.where(reached.any(0), reached.argmax(0), -1)

    @cached_property
    def _peak(self) -> INTS:
        """The step at which edits of other seeds are most specific, mean over answers.

        With one seed, edits of the other half of the answers.
        """
        fold = self.seed if len({*self.seed}) > 1 else self.group % 2
        peak = np.zeros(len(fold), dtype=np.int64)
        for one in {*fold}:
            others = np.where(fold == one, np.nan, self.shares["specific"])
            peak[fold == one] = np.argmax([self.by_answer(row).value for row in others])
        return peak

    @cached_property
    def kept_peak(self) -> int:
        """Position in `kept` of the step that is the peak for most edits, or of the last before."""
        step = self.steps[int(np.bincount(self._peak).argmax())]
        return max(i for i, one in enumerate(self.kept) if one <= step)

    def at(self, index: INTS, values: FLOATS) -> FLOATS:
        """Return the values, ``(s, n)``, of each edit at its own step; NaN where it has none."""
        chosen = values[index, np.arange(values.shape[1])].astype(float)
        return np.where(index < 0, np.nan, chosen)


def read_run(results: Path, lm: str, name: str, relation: str) -> RippleRun | None:
    """Read a run, with all seeds that there are; None if there is none."""
    files = [
        results / run.path
        for run in plan()
        if (run.lm, run.name, run.relation) == (lm, name, relation)
    ]
    files = [file for file in files if file.exists()]
    if not files:
        return None
    abouts = [json.loads(file.with_suffix(".json").read_text("utf-8")) for file in files]
    parts = [_of_edits(read_arrays(file) | explanations(file)) for file in files]
    arrays = {
        key: np.concatenate([part[key] for part in parts], axis=int(key in _BY_STEP))
        for key in parts[0]
        if all(key in part for part in parts)
    }
    seeds = [
        np.full(len(part["labels"]), about["seed"])
        for part, about in zip(parts, abouts, strict=True)
    ]
    return RippleRun(
        lm, name, relation, arrays, abouts[0]["steps"], abouts[0]["kept"], np.concatenate(seeds)
    )


_BY_STEP = (
    *("probability", "learned", "own", "others", "nobody", "paraphrases", "controls"),
    *("change", "others_change", "predicted", "others_taught"),
)


def _of_edits(arrays: dict[str, Any]) -> dict[str, Any]:
    """Repeat what is of a whole run for each of its edits."""
    n = len(arrays["labels"])
    whole = ("before_others", "before_others_source", "before_nobody", "prior")
    return {key: np.tile(x, (n, 1)) if key in whole else x for key, x in arrays.items()}


def read_runs(results: Path) -> Iterator[RippleRun]:
    """Yield all runs that there are."""
    for lm, name, relation in dict.fromkeys((run.lm, run.name, run.relation) for run in plan()):
        run = read_run(results, lm, name, relation)
        if run is not None:
            yield run
