"""What edits did after each optimizer step: a ripple of the subject, or a leak to everybody."""

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lincorr_lightning.functional import group_means, macro_mean
from lincorr_lightning.functional.significance import mean_interval
from lincorr_lightning.results.table import number

LEAK = "generalization/leak"
SPECIFIC = "generalization/specific"
BY_REFERENCE = (LEAK, SPECIFIC)  #: Numbers that are reported as means by reference.
CONTROL = "control_unchanged/"  #: Beginning of the keys of controls.
_LEARNED = "generalization/source_learned"
_GENERALIZED = "generalization/generalized"


class StepValues(NamedTuple):
    """Numbers of some edits after a step: their positions in the run, and ``(n,)`` by key."""

    ids: list[int]
    values: dict[str, Tensor]

    @classmethod
    def of(cls, ids: Sequence[int], values: Mapping[str, Tensor]) -> "StepValues":
        """Return those numbers of edits that are reported by step."""
        keys = (_LEARNED, _GENERALIZED, *BY_REFERENCE)
        kept = {k: x for k, x in values.items() if k in keys or k.startswith(CONTROL)}
        return cls(list(ids), kept)


def interval_by_reference(values: Tensor, references: Sequence[Hashable]) -> dict[str, Any]:
    """Return the mean by reference of a number of each edit, and its 95 % interval over them."""
    means = torch.tensor(group_means(values.tolist(), references), dtype=torch.float64)
    low, high = mean_interval(means)
    return {"mean": number(means.mean().item()), "low": number(low), "high": number(high)}


def step_rows(
    by_step: Mapping[int, StepValues], references: Sequence[Hashable]
) -> list[dict[str, Any]]:
    """Return what edits did after each step, see `StepRow`; ``controls`` is a mapping.

    `references` are those of all edits of the run, by their position.
    """
    return [_row(step, numbers, references) for step, numbers in sorted(by_step.items())]


def row_at_learned(
    by_step: Mapping[int, StepValues], references: Sequence[Hashable]
) -> dict[str, Any] | None:
    """Return the same of each edit at its first step with the source learned.

    Edits that were never learned do not count, and ``step`` is a mean; None if none was learned.
    """
    steps: dict[int, int] = {}
    taken: dict[str, list[Tensor]] = {}
    for step, (ids, values) in sorted(by_step.items()):
        for row, edit in enumerate(ids):
            if edit not in steps and values[_LEARNED][row]:
                steps[edit] = step
                for key, column_ in values.items():
                    taken.setdefault(key, []).append(column_[row])
    if not steps:
        return None
    numbers = StepValues(list(steps), {key: torch.stack(rows) for key, rows in taken.items()})
    return _row(sum(steps.values()) / len(steps), numbers, references)


def _row(step: float, numbers: StepValues, references: Sequence[Hashable]) -> dict[str, Any]:
    ids, values = numbers
    groups = [references[edit] for edit in ids]
    shares = {key: number(x.nanmean().item()) for key, x in values.items()}
    macro = {key: number(macro_mean(x.tolist(), groups)) for key, x in values.items()}
    specific = interval_by_reference(values[SPECIFIC], groups) if SPECIFIC in values else {}
    return {
        "step": step,
        "n_edits": len(ids),
        "source_learned": shares[_LEARNED],
        "generalized": shares[_GENERALIZED],
        "macro_generalized": macro[_GENERALIZED],
        "leak": macro.get(LEAK),
        "specific": specific.get("mean"),
        "specific_low": specific.get("low"),
        "specific_high": specific.get("high"),
        "controls": {
            key.removeprefix(CONTROL): share
            for key, share in shares.items()
            if key.startswith(CONTROL)
        },
    }


def last_steps(
    by_step: Mapping[int, StepValues], is_over: Callable[[float, float], bool]
) -> dict[int, int]:
    """Return the step that counts of each edit, if its steps end once it `is_over`.

    That is its last learned step before the first where `is_over` holds of whether it is learned
    and of its leak, or that one if it is the first; the last step of an edit that was never
    learned. What the edit does to its own target does not matter.
    """
    steps: dict[int, int] = {}
    is_learned: set[int] = set()
    over: set[int] = set()
    for step, (ids, values) in sorted(by_step.items()):
        for row, edit in enumerate(ids):
            learned, leak = float(values[_LEARNED][row]), float(values[LEAK][row])
            if edit in over or (edit in is_learned and not learned):
                continue
            if is_over(learned, leak):
                over.add(edit)
            if edit not in is_learned or edit not in over:
                steps[edit] = step
            if learned:
                is_learned.add(edit)
    return steps
