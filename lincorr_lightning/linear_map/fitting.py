"""Where maps are fitted: joint rows in, W and b out, with the ridge that the user asked for.

The probe, its resilience, the callbacks and the study of edited LMs all fit here, so that the same
subjects and the same request give the same map everywhere.
"""

import csv
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from lincorr_lightning.errors import SubjectsError, require, require_one_of
from lincorr_lightning.functional import HALF_DECADES, Moments, moments_of
from lincorr_lightning.functional.least_squares import strongest_within
from lincorr_lightning.io import regular_file
from lincorr_lightning.knowledge import TokenizedRelation
from lincorr_lightning.linear_map import solver
from lincorr_lightning.linear_map.artifact import LinearMap
from lincorr_lightning.linear_map.layout import JointLayout, Pair, RowReader
from lincorr_lightning.linear_map.solver import FittedMaps
from lincorr_lightning.lm.language_model import LanguageModel
from lincorr_lightning.lm.vocabulary import sample_up_to

Ridge = float | Literal["auto"]
"""Penalty on ``|W|^2``: 0 is the paper's map.

``auto`` takes for each pair the strongest of `HALF_DECADES` whose mean label-wise r stays within
``TOLERANCE`` of the best, judged on every fifth subject by maps that are fitted on the others. The
map itself is fitted on all.
"""

TOLERANCE = 0.02  #: What ``auto`` may cost in mean label-wise r.
_JUDGE_EVERY = 5
_MIN_FITTED = 10  # subjects that must remain to fit a map on


def check_ridge(ridge: Ridge, owner: str = "model") -> None:
    """Refuse a negative strength; messages name the `owner`, as in ``model.ridge``."""
    if isinstance(ridge, str):
        require_one_of(f"{owner}.ridge", ridge, ("auto", "a number"))
    else:
        require(f"{owner}.ridge", ridge, at_least=0)


class FitMoments(NamedTuple):
    """Second moments of the joint rows that maps are fitted on."""

    every: Moments  #: Of all rows.
    trying: Moments | None = None  #: Of rows that strengths are tried on; None without ``auto``.
    judging: Moments | None = None  #: Of rows that strengths are judged on.


def split_rows(rows: Tensor, first: int = 0) -> tuple[Tensor, Tensor]:
    """Return which rows strengths are tried on, and every fifth, on which they are judged.

    They are indices; `first` is the position of the first row among all, so that the same rows
    judge for any size of a batch.
    """
    is_judging = (torch.arange(len(rows)) + first) % _JUDGE_EVERY == _JUDGE_EVERY - 1
    is_judging = is_judging.to(rows.device)
    return (~is_judging).nonzero()[:, 0], is_judging.nonzero()[:, 0]


def fit_maps(moments: FitMoments, layout: JointLayout, ridge: Ridge) -> FittedMaps:
    """Fit W and b of all pairs of a layout from the moments of its rows, kept for their nulls."""
    if not isinstance(ridge, str):
        return solver.fit_layout(moments.every, layout, ridge)
    assert moments.trying is not None and moments.judging is not None
    ridges = choose_ridges(moments.trying, moments.judging, layout)
    return solver.fit_layout(moments.every, layout, ridges)


def choose_ridges(trying: Moments, judging: Moments, layout: JointLayout) -> dict[Pair, float]:
    """Return the strongest ridge of each pair whose r stays within ``TOLERANCE`` of the best."""
    chosen = {}
    for source in layout.sources:
        x, y = layout.problems[source]["y"]
        squares = solver.RidgeSolver(trying, x, y)
        weights = [squares.solve(ridge).weight for ridge in HALF_DECADES]
        scores = [*map(solver.Judge(judging, x, y).label_r, weights)]
        for target, r in solver.split_targets(layout, source, torch.stack(scores).cpu()):
            means = r.nanmean(1).tolist()
            chosen[source, target] = HALF_DECADES[strongest_within(means, TOLERANCE)]
    return chosen


def fit_linear_map(
    lm: LanguageModel,
    relation: TokenizedRelation,
    subjects: Sequence[str],
    ridge: Ridge = "auto",
    reader: RowReader | None = None,
) -> LinearMap:
    """Fit ``F_target(X) = W F_source(X) + b`` on some subjects (paper, section 3.2).

    The map is that of ``lincorr fit`` on the same subjects. The LM reads each prompt once; the
    `reader` keeps the rows that others have read.
    """
    check_ridge(ridge)
    layout = JointLayout.of_relation(relation)
    rows = (reader or RowReader(lm)).read(layout, subjects)
    parts = [moments_of(rows[part]) for part in split_rows(rows)] if ridge == "auto" else []
    return LinearMap.of(fit_maps(FitMoments(moments_of(rows), *parts), layout, ridge), lm)


def sample_fitted_subjects(
    tokenizer: PreTrainedTokenizerBase, n: int, applied_to: Collection[str]
) -> list[str]:
    """Sample up to n subjects to fit a map on, none of those that it is applied to."""
    require("n_subjects", n, at_least=3)
    others = sample_up_to(tokenizer, max(n, _MIN_FITTED), excluding=applied_to)
    if applied_to and len(others) < _MIN_FITTED:
        raise SubjectsError(
            f"a linear map must not be fitted on the {len(set(applied_to))} subjects that it is "
            f"applied to, and only {len(others)} others remain; it needs {_MIN_FITTED}. Use fewer "
            "subjects or edits, or pass a fitted map as linear_map."
        )
    return others[:n]


def read_fit_subjects(run: Path) -> set[str]:
    """Return the subjects that a probe's run fitted its maps on; empty if it has no list of them.

    The run's folder holds ``tables/subjects.csv`` beside ``linear_map/``.
    """
    path = run / "tables" / "subjects.csv"
    if not path.is_file():
        return set()
    with regular_file(path).open(newline="", encoding="utf-8") as file:
        return {row["subject"] for row in csv.DictReader(file) if row["half"] == "fit"}


def warn_of_fit_subjects(folder: str, subjects: Collection[str]) -> None:
    """Warn if the maps of ``linear_map/`` of a run are scored on subjects of its fit half."""
    if seen := read_fit_subjects(Path(folder).resolve().parent).intersection(subjects):
        rank_zero_warn(
            f"{len(seen)} of {len(subjects)} subjects, such as {min(seen)!r}, are among those that "
            f"the linear map {folder} was fitted on: scores on them are too good. Fit it on other "
            "subjects (data.seed of the probe), or let this run fit one (linear_map null)."
        )


def require_held_out(subjects: Sequence[str], fit_subjects: Collection[str]) -> None:
    """Refuse to score maps on subjects that they were fitted on."""
    if seen := set(fit_subjects).intersection(subjects):
        raise SubjectsError(
            f"{len(seen)} of {len(subjects)} held-out subjects, such as {min(seen)!r}, are among "
            "those that the maps were fitted on. Use the data settings of the run that fitted them "
            "(its config.yaml), or other subjects."
        )
