"""Edits in TensorBoard: charts that lie over each other, cases and pictures."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from lincorr_lightning.reporting.files import safe_names

if TYPE_CHECKING:
    import lightning as L
    from torch.utils.tensorboard import SummaryWriter

    from lincorr_lightning.reporting.canvas import Picture
    from lincorr_lightning.reporting.edit_report import EditReport

_Charts = dict[str, list[Any]]
_OUTCOMES = ("generalized", "hallucinated", "unchanged", "source_learned")
_CORRELATIONS = (
    "gradient_correlation", "gradient_correlation_auto", "permuted_gradient_correlation",
    "logit_correlation",
)  # fmt: skip

_layouts: WeakKeyDictionary[L.Trainer, dict[str, _Charts]] = WeakKeyDictionary()


def lay_over(trainer: L.Trainer, relation: str, controls: Sequence[str], prefix: str = "") -> None:
    """Tell TensorBoard which curves belong in one chart; "Custom Scalars" shows them.

    The first process tells every TensorBoard log of the run; without any, nothing happens. What
    was said before of other relations stays.

    Args:
        trainer: The run's trainer.
        relation: The relation that is watched, as ``city->country``.
        controls: Knowledges that must not move.
        prefix: Before the tags of outcomes and controls, where several relations are watched.
    """
    writers = list(_writers(trainer))
    if not writers:
        return
    # A log has one layout, the last that was written.
    layout = _layouts.setdefault(trainer, {})
    layout[relation] = _charts(relation, controls, prefix)
    for writer in writers:
        writer.add_custom_scalars(layout)  # type: ignore[no-untyped-call]


def _charts(relation: str, controls: Sequence[str], prefix: str) -> _Charts:
    before = re.escape(prefix)
    tags = {
        "generalized and hallucinated": [
            f"{before}generalization/{name}" for name in _OUTCOMES[:2]
        ],
        "all outcomes": [f"{before}generalization/{name}" for name in _OUTCOMES],
        "after each step of an edit": [f"{before}edit_step/{name}" for name in _OUTCOMES],
        "controls unchanged": [_only(f"{prefix}control_unchanged/{name}") for name in controls],
        "correlation": [_only(f"{name}/{relation}") for name in _CORRELATIONS],
        "correlation after each step of an edit": [
            _only(f"edit_step/{name}/{relation}") for name in _CORRELATIONS
        ],
    }
    return {title: ["Multiline", chosen] for title, chosen in tags.items() if chosen}


def _only(tag: str) -> str:
    """A pattern for one tag: TensorBoard takes all tags that begin with a pattern."""
    return f"{re.escape(tag)}$"


def tell_cases(trainer: L.Trainer, report: EditReport) -> None:
    """Add the case table as text, and the figures as images.

    The first process adds them to every TensorBoard log of the run; without any, nothing happens.

    Args:
        trainer: The run's trainer; its global step is theirs.
        report: What the edits did.
    """
    writers = list(_writers(trainer))
    if not writers:
        return
    name = safe_names([report.relation])[report.relation]
    for writer in writers:
        writer.add_text(f"cases/{name}", report.markdown(), trainer.global_step)  # type: ignore[no-untyped-call]
        for title, picture in report.pictures.items():
            _add_picture(writer, f"figures/{title}/{name}", picture, trainer.global_step)


def _writers(trainer: L.Trainer) -> Iterator[SummaryWriter]:
    from lightning.pytorch.loggers import TensorBoardLogger

    for logger in trainer.loggers if trainer.is_global_zero else ():
        if isinstance(logger, TensorBoardLogger):
            yield logger.experiment


def _add_picture(writer: SummaryWriter, tag: str, picture: Picture, step: int) -> None:
    # It is PNG already: `add_image` would ask for pixels and encode them again.
    from tensorboard.compat.proto.summary_pb2 import Summary

    image = Summary.Image(
        height=picture.height,
        width=picture.width,
        colorspace=3,
        encoded_image_string=picture.png,
    )
    file_writer = writer._get_file_writer()  # type: ignore[no-untyped-call]
    file_writer.add_summary(Summary(value=[Summary.Value(tag=tag, image=image)]), step)
