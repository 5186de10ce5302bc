"""Edits in TensorBoard: charts that lie over each other, cases and pictures."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from lincorr_lightning.io import safe_names
from lincorr_lightning.results.loggers import add_picture, tensorboard_writers

if TYPE_CHECKING:
    import lightning as L

    from lincorr_lightning.finetune.results import EditReport

_Charts = dict[str, list[Any]]
_OUTCOMES = ("generalized", "hallucinated", "unchanged", "source_learned")
_CORRELATIONS = (
    "gradient_correlation", "gradient_correlation_auto", "permuted_gradient_correlation",
    "logit_correlation",
)  # fmt: skip

_layouts: WeakKeyDictionary[L.Trainer, dict[str, _Charts]] = WeakKeyDictionary()


def add_scalar_layout(
    trainer: L.Trainer,
    relation: str,
    controls: Sequence[str],
    prefix: str = "",
    steps_of_edits: bool = False,
) -> None:
    """Tell TensorBoard which curves belong in one chart; "Custom Scalars" shows them.

    The first process tells every TensorBoard log of the run; without any, nothing happens. What
    was said before of other relations stays.

    Args:
        trainer: The run's trainer.
        relation: The relation that is watched, as ``city->country``.
        controls: Knowledges that must not move.
        prefix: Before the tags of outcomes and controls, where several relations are watched.
        steps_of_edits: Whether x is the step within an edit, as in independent edits.
    """
    logs = list(tensorboard_writers(trainer))
    if not logs:
        return
    # A log has one layout, the last that was written.
    layout = _layouts.setdefault(trainer, {})
    layout[relation] = _charts(relation, controls, prefix, "edit_step/" * steps_of_edits)
    for writer in logs:
        writer.add_custom_scalars(layout)  # type: ignore[no-untyped-call]


def _charts(relation: str, controls: Sequence[str], prefix: str, steps: str) -> _Charts:
    """Charts of the tags that the run writes, and no others."""
    before = re.escape(f"{prefix}{steps}") + ("" if steps else "generalization/")
    around = f"{prefix}{steps}"
    chances = ("reference", "old_answer")
    tags = {
        "generalized and hallucinated": [f"{before}{name}" for name in _OUTCOMES[:2]],
        "all outcomes": [f"{before}{name}" for name in _OUTCOMES],
        "probability": [_only(f"{around}probability/{name}") for name in chances],
        "controls unchanged": [_only(f"{around}control_unchanged/{name}") for name in controls],
        "correlation": [_only(f"{steps}{name}/{relation}") for name in _CORRELATIONS],
    }
    after = " after each step of an edit" if steps else ""
    return {f"{title}{after}": ["Multiline", chosen] for title, chosen in tags.items() if chosen}


def _only(tag: str) -> str:
    """A pattern for one tag: TensorBoard takes all tags that begin with a pattern."""
    return f"{re.escape(tag)}$"


def log_cases(trainer: L.Trainer, report: EditReport) -> None:
    """Add the case table as text, and the figures as images.

    The first process adds them to every TensorBoard log of the run; without any, nothing happens.

    Args:
        trainer: The run's trainer; its global step is theirs.
        report: What the edits did.
    """
    logs = list(tensorboard_writers(trainer))
    if not logs:
        return
    name = safe_names([report.relation])[report.relation]
    for writer in logs:
        writer.add_text(f"cases/{name}", report.markdown(), trainer.global_step)  # type: ignore[no-untyped-call]
        for title, picture in report.pictures.items():
            add_picture(writer, f"figures/{title}/{name}", picture, trainer.global_step)
