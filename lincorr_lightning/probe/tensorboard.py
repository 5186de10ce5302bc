"""A probe's report in TensorBoard."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from lincorr_lightning.io import safe_names
from lincorr_lightning.probe.results import PairScore, ProbeReport
from lincorr_lightning.results.loggers import add_picture
from lincorr_lightning.results.numbers import number
from lincorr_lightning.results.tables import influence_markdown, markdown_table

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

# TensorBoard gets slow beyond some thousand tags; the files have every pair.
_MOST_SCALARS = 600
_MOST_TEXTS = 12
_MOST_ROWS = 100


def log_probe(report: ProbeReport, writer: SummaryWriter, step: int) -> None:
    """Add scalars, figures, tables and settings.

    Args:
        report: What the probe found.
        writer: Of the run's own log.
        step: Global step.
    """
    scalars = dict(_scalars(report))
    for tag, value in scalars.items():
        writer.add_scalar(tag, value, step)
    for name, picture in report.pictures.items():
        add_picture(writer, f"figures/{name}", picture, step)
    by_r = sorted(report.pairs, key=lambda s: -(number(s.label_mean) or -math.inf))
    writer.add_text("pairs", _pairs_table(by_r[:_MOST_ROWS], len(by_r)), step)
    closely = report.notable(_MOST_TEXTS)
    safe = safe_names(score.name for score in closely)
    for score in closely:
        text = influence_markdown(report.influences(score))
        writer.add_text(f"top_influences/{safe[score.name]}", text, step)
    _add_hparams(report, writer, scalars)


def _scalars(report: ProbeReport) -> Iterator[tuple[str, float]]:
    kept = sorted(report.pairs, key=lambda s: s.precision is None)[:_MOST_SCALARS]
    safe = safe_names(score.name for score in kept)
    for score in kept:
        values = {
            "label_wise": score.label_mean,
            "instance_wise": score.instance_mean,
            "control": score.control_label_mean,
            "permuted": score.permuted_label_mean,
            "excess": score.excess,
            "ridge": score.ridge,
        }
        for way, rates in (score.precision or {}).items():
            values |= {f"hit{n}_{way}": rates[n] for n in ("1", "3", "5") if n in rates}
        for group, value in values.items():
            if number(value) is not None:
                yield f"{group}/{safe[score.name]}", float(value or 0.0)


def _pairs_table(scores: list[PairScore], n_pairs: int) -> str:
    def hit1(score: PairScore, way: str) -> float | None:
        return number(score.precision[way]["1"]) if score.precision else None

    table = markdown_table(
        ("pair", "label-wise r", "unrelated prompt", "targets permuted", "excess", "ridge",
         "Hit@1 influenced", "Hit@1 influencing"),
        (
            (score.name, number(score.label_mean), number(score.control_label_mean),
             number(score.permuted_label_mean), score.excess, f"{score.ridge:g}",
             hit1(score, "influenced"), hit1(score, "influencing"))
            for score in scores
        ),
    )  # fmt: skip
    return table if len(scores) == n_pairs else f"{table}\n\n{len(scores)} of {n_pairs} pairs"


def _add_hparams(report: ProbeReport, writer: SummaryWriter, scalars: dict[str, float]) -> None:
    # `SummaryWriter.add_hparams` would open a second log in a folder of its own.
    from torch.utils.tensorboard.summary import hparams

    metrics = {tag: value for tag, value in scalars.items() if tag.startswith(("label", "hit1"))}
    flat = {"lm": report.lm, "n_fit": report.n_fit, **dict(_flat(report.settings))}
    file_writer = writer._get_file_writer()  # type: ignore[no-untyped-call]
    for summary in hparams(flat, dict(list(metrics.items())[:_MOST_ROWS])):  # type: ignore[no-untyped-call]
        file_writer.add_summary(summary)


def _flat(settings: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in settings.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}/")
        else:
            plain = isinstance(value, (bool, int, float, str))
            yield f"{prefix}{key}", value if plain else str(value)
