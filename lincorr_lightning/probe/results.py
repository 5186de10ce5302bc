"""The results of a linear probe: what ``results.json``, tables, figures and loggers get."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from lincorr_lightning.io import safe_names
from lincorr_lightning.linear_map.layout import JointLayout, Pair
from lincorr_lightning.probe.scores import (
    RANKS,
    WAYS,
    PairScore,
    RidgePoint,
    hit_columns,
    rank_pairs,
)
from lincorr_lightning.probe.significance import Composition
from lincorr_lightning.results.pair_matrix import matrix_table, pair_matrix
from lincorr_lightning.results.results import Figure, Results
from lincorr_lightning.results.table import Table, columns_of

if TYPE_CHECKING:
    from pandas import DataFrame

_FLOATS = npt.NDArray[np.floating[Any]]
# A run over all knowledge has thousands of pairs with a reference.
_MAX_WEIGHT_FIGURES = 12
_MAX_INFLUENCE_TABLES = 100
# TensorBoard gets slow beyond some thousand tags; the tables have every pair.
_MAX_SCALAR_PAIRS = 600
# A tree over fewer kinds of knowledge shows nothing that the matrix does not.
_MIN_CLUSTERED = 4
_LOGGED = (
    "label_mean", "instance_mean", "control_label_mean", "permuted_label_mean", "excess", "ridge",
)  # fmt: skip
# Matrix tables and figures: name -> (the score's key, what it is).
_MATRICES = {
    "correlation_matrix": ("label_mean", "Label-wise correlation"),
    "std_matrix": ("label_std", "Standard deviation of label-wise r over labels"),
    "instance_matrix": ("instance_mean", "Instance-wise correlation"),
    "permuted_matrix": ("permuted_label_mean", "Label-wise correlation, permuted targets"),
    "control_matrix": ("control_label_mean", "Label-wise correlation, control prompt"),
}
_HIT1 = {"influenced_1": "top-1 target of a source", "influencing_1": "top-1 source of a target"}


@dataclass(frozen=True)
class ProbeFindings:
    """What a probe found.

    Attributes:
        scores: Scores of the pairs.
        weights: W of each pair, ``(n_target_labels, n_source_labels)``.
        layout: Domains, references, and knowledge left out.
        paths: Ridge path of each pair; empty when stored maps were scored.
        compositions: Scores of composed maps.
        subjects: Subjects of each half.
        n_fit: Number of subjects that the maps were fitted on.
        n_test: Number of subjects that they were scored on.
    """

    scores: Sequence[PairScore]
    weights: Mapping[Pair, _FLOATS]
    layout: JointLayout
    paths: Mapping[Pair, Sequence[RidgePoint]]
    compositions: Sequence[Composition]
    subjects: Mapping[str, Sequence[str]]
    n_fit: int
    n_test: int

    def matrix(self, name: str) -> DataFrame:
        """Return one of `_MATRICES`, a row per source and a column per target."""
        key, _ = _MATRICES[name]
        return pair_matrix({s.pair: getattr(s, key) for s in self.scores}, self.layout.domains)


@dataclass(frozen=True)
class Influence:
    """One of the highest weights of a label.

    Attributes:
        pair: The pair of W.
        direction: ``influenced``: `token` is a target of the source `label`; ``influencing``:
            `token` is a source of the target `label`.
        label: The label.
        rank: 1 for the highest weight.
        token: The label at the other end.
        weight: W between the two.
        in_reference: Whether the reference pairs the two; None for labels without a reference.
    """

    pair: str
    direction: str
    label: str
    rank: int
    token: str
    weight: float
    in_reference: bool | None


def top_influences(
    weight: _FLOATS,
    source_labels: Sequence[str],
    target_labels: Sequence[str],
    n: int = 5,
    reference: npt.NDArray[np.bool_] | None = None,
    pair: str = "",
) -> list[Influence]:
    """Return the highest weights of every label, in both directions.

    Args:
        weight: W, ``(n_target_labels, n_source_labels)``.
        source_labels: Labels of its columns.
        target_labels: Labels of its rows.
        n: Number of weights per label.
        reference: Which label pairs the reference has, shaped like W.
        pair: Name of the pair.

    Example:
        >>> w = np.array([[0.9, 0.1], [0.2, 0.7]])
        >>> for one in top_influences(w, ["Paris", "Rome"], ["France", "Italy"], n=1):
        ...     print(one.direction, one.label, one.token, one.weight)
        influenced Paris France 0.9
        influenced Rome Italy 0.7
        influencing France Paris 0.9
        influencing Italy Rome 0.7
    """
    rows: list[Influence] = []
    transposed = None if reference is None else reference.T
    for direction, labels, tokens, matrix, known in (
        ("influenced", source_labels, target_labels, weight.T, transposed),
        ("influencing", target_labels, source_labels, weight, reference),
    ):
        order = np.argsort(-matrix, axis=1, kind="stable")[:, :n]
        for i, label in enumerate(labels):
            judged = known is not None and bool(known[i].any())
            for rank, j in enumerate(order[i], start=1):
                right = bool(known[i, j]) if judged and known is not None else None
                cell = float(matrix[i, j])
                rows.append(Influence(pair, direction, label, rank, tokens[j], cell, right))
    return rows


def notable_pairs(
    scores: Sequence[PairScore], references: Mapping[Pair, object], limit: int
) -> list[PairScore]:
    """Return the pairs with a reference by descending r, or any pairs if none has one."""
    scored = [score for score in scores if score.label_mean is not None]
    with_reference = [score for score in scored if references.get(score.pair) is not None]
    best = sorted(with_reference or scored, key=lambda score: -(score.label_mean or 0.0))
    return best[: limit if with_reference else min(limit, _MAX_WEIGHT_FIGURES)]


def probe_results(
    found: ProbeFindings, phase: str, lm: str, ridge: float | str, partial_out: Sequence[str] = ()
) -> Results:
    """Build the results of a probe.

    Args:
        found: What the probe found.
        phase: First part of the log keys, ``val`` or ``test``.
        lm: Name of the LM, for titles.
        ridge: The run's ridge, a number or ``auto``.
        partial_out: Knowledge that was partialled out.
    """
    values: dict[str, Any] = {
        "n_fit": int(found.n_fit),
        "n_test": int(found.n_test),
        "control": found.layout.control,
        "pairs": [score.to_json() for score in found.scores],
    }
    if found.paths:
        values["ridge_path"] = [
            {"source": source, "target": target, "path": [asdict(point) for point in path]}
            for (source, target), path in found.paths.items()
        ]
    if found.layout.left_out:
        values["left_out"] = dict(found.layout.left_out)
    if found.compositions:
        values["transitivity"] = [asdict(one) for one in found.compositions]
    return Results(
        study="linear_probe",
        values=values,
        scalars=dict(_scalars(found.scores, phase)),
        tables=[*_tables(found), subjects_table(found.subjects)],
        figures=list(_figures(found, lm, ridge, partial_out)),
    )


def subjects_table(subjects: Mapping[str, Sequence[str]]) -> Table:
    """Return the table of all subjects and their halves."""
    rows = [(subject, half) for half, members in subjects.items() for subject in members]
    return Table.of("subjects", rows, ("subject", "half"), "Subjects, and the half each one is in")


# -- scalars ---------------------------------------------------------------------------------


def _scalars(scores: Sequence[PairScore], phase: str) -> Iterator[tuple[str, float]]:
    """Yield columns of the table of pairs, as ``val/label_mean/city-country``."""
    shown = sorted(scores, key=lambda s: s.precision is None)[:_MAX_SCALAR_PAIRS]
    safe = safe_names(score.name for score in shown)
    logged = (*_LOGGED, *(f"{way}_{n}" for way in WAYS for n in RANKS))
    for score in shown:
        row = score.row()
        for key in logged:
            if row[key] is not None:
                yield f"{phase}/{key}/{safe[score.name]}", float(row[key])


# -- tables ----------------------------------------------------------------------------------


def _tables(found: ProbeFindings) -> Iterator[Table]:
    scores, layout = found.scores, found.layout
    rows = [score.row() for score in scores]
    ranked = [{"rank": i, **s.row()} for i, s in enumerate(rank_pairs(scores), start=1)]
    _, headings, formats = columns_of(PairScore)
    unranked = [row for row, score in zip(rows, scores, strict=True) if score.evidence is None]
    yield Table.of(
        "summary",
        [*ranked, *unranked],
        ["pair", *headings, *_HIT1],
        f"Label-wise r on {found.n_test:,} held-out subjects",
        "By r minus that of the control prompt. Top-1: the share of labels whose highest weight in "
        "W leads to a label of the reference. An r of random words at the same prompts may be as "
        "high: see docs/concepts.md.",
        headline=True,
        headings=headings | _HIT1,
        formats=formats | dict.fromkeys(_HIT1, ".2f"),
    )
    yield Table.of("pairs", rows, list(rows[0])[1:], "Every score of every pair")
    labels = (
        (score.name, label, None if np.isnan(r) else r)
        for score in scores
        for label, r in zip(layout.domains[score.target].texts, score.label_r.tolist(), strict=True)
    )
    yield Table.of(
        "label_wise", labels, ("pair", "label", "r"), "Label-wise r of every target label",
        "Empty where the label never changes.",
    )  # fmt: skip
    for name, (_, what) in _MATRICES.items():
        matrix = found.matrix(name)
        if name == "correlation_matrix" or matrix.notna().any(axis=None):
            yield matrix_table(matrix, name, what)
    if found.paths:
        points = (
            {"pair": f"{source}->{target}", **asdict(point), **hit_columns(asdict(point))}
            for (source, target), path in found.paths.items()
            for point in path
        )
        yield Table.of(
            "ridge_path", points, ["pair", "ridge", "label_mean", *hit_columns(None)],
            "Correlation and precision at every ridge strength",
        )  # fmt: skip
    if any(score.p is not None for score in scores):
        columns = [
            "rank", "source", "target", "label_mean", "label_error", "control_label_mean", "excess",
            "excess_error", "p", "q", "partial_label_mean", "through_given",
        ]  # fmt: skip
        yield Table.of("ranking", ranked, columns, "Pairs by how far r lies above its control")
    if any(score.completeness for score in scores):
        kinds = (
            {"pair": score.name, "completeness": kind, **one, **hit_columns(one)}
            for score in scores
            for kind, one in score.completeness.items()
        )
        columns = ["pair", "completeness", "n_labels", "label_mean", *list(hit_columns(None))[:4]]
        yield Table.of(
            "completeness", kinds, columns, "Scores by completeness of the target labels"
        )
    if found.compositions:
        caption = "Composed maps beside the map of the pair"
        yield Table.of("transitivity", found.compositions, caption=caption)
    influences = (
        influence
        for score in notable_pairs(scores, layout.references, _MAX_INFLUENCE_TABLES)
        for influence in top_influences(
            found.weights[score.pair],
            layout.domains[score.source].texts,
            layout.domains[score.target].texts,
            reference=layout.references.get(score.pair),
            pair=score.name,
        )
    )
    caption = "Highest weights of every label, in both directions"
    yield Table.of("influences", influences, Influence, caption)


# -- figures ---------------------------------------------------------------------------------


def _figures(
    found: ProbeFindings, lm: str, ridge: float | str, partial_out: Sequence[str]
) -> Iterator[Figure]:
    # matplotlib takes long to import, and not every run draws.
    from lincorr_lightning.probe import figures
    from lincorr_lightning.results.heat_maps import correlation_heatmap
    from lincorr_lightning.results.style import short_name

    lm, scores, layout = short_name(lm), found.scores, found.layout
    strengths = {f"{score.ridge:g}" for score in scores}
    strength = strengths.pop() if len(strengths) == 1 else ridge
    note = f"{found.n_test:,} held-out subjects; maps fitted on {found.n_fit:,}; ridge {strength}"
    for name, (_, what) in _MATRICES.items():
        matrix = found.matrix(name)
        if name == "control_matrix" or (name == "permuted_matrix" and matrix.isna().all(axis=None)):
            continue
        options: dict[str, Any] = {"value_label": "Pearson r"}
        if name == "std_matrix":
            limit = max(float(np.nan_to_num(matrix.to_numpy()).max()), 0.01)
            options = {"value_label": "standard deviation of r", "limit": limit}
        draw = partial(correlation_heatmap, matrix, f"{what} in {lm}", note, **options)
        yield Figure(name, f"{what} of every ordered pair, source to target.", draw)
    r = found.matrix("correlation_matrix")
    n = len(r)
    is_square = list(r.index) == list(r.columns)
    if is_square and n >= _MIN_CLUSTERED and int(r.notna().to_numpy().sum()) == n * (n - 1):
        yield Figure(
            "clusters",
            "Label-wise correlation, ordered so that similar kinds of knowledge are neighbours.",
            partial(figures.cluster_heatmap, r, f"Clusters of knowledge in {lm}", note),
        )
    yield Figure(
        "nulls",
        "Label-wise r of each pair beside the permuted baseline and the control prompt.",
        partial(figures.nulls_figure, scores, f"Correlation beside its nulls in {lm}"),
    )
    if any(score.p is not None for score in scores):
        title = f"Correlation above its control in {lm}"
        yield Figure(
            "ranking",
            "Label-wise r above its control, with 95 % intervals over subjects.",
            partial(figures.ranking_figure, scores, partial_out, title),
        )
    if found.compositions:
        yield Figure(
            "transitivity",
            "Label-wise r of composed maps beside the map of the pair.",
            partial(figures.transitivity_figure, found.compositions, f"Composed maps in {lm}"),
        )
    shown = notable_pairs(scores, layout.references, _MAX_WEIGHT_FIGURES)
    drawn = [(score, found.paths[score.pair]) for score in shown if score.pair in found.paths]
    if drawn:
        title = f"Correlation and precision along the ridge in {lm}"
        yield Figure(
            "ridge_path",
            "Label-wise r and Hit@1 along the ridge.",
            partial(figures.ridge_path_figure, drawn, title, len(found.paths)),
        )
    safe = safe_names(score.name for score in shown)
    for score in shown:
        yield Figure(
            f"weights_{safe[score.name]}",
            f"Highest weights of W of {score.name}.",
            partial(
                figures.top_weights_figure,
                found.weights[score.pair],
                layout.domains[score.source].texts,
                layout.domains[score.target].texts,
                f"W of {score.name} in {lm}",
                f"ridge {score.ridge:g}",
                layout.references.get(score.pair),
            ),
        )
