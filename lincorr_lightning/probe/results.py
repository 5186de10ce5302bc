"""The results of a linear probe: what ``results.json``, tables, figures and loggers get."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from lincorr_lightning.io import safe_names
from lincorr_lightning.linear_map.layout import JointLayout, Pair
from lincorr_lightning.probe.ridge_path import RidgePoint
from lincorr_lightning.probe.scores import PairScore, rank_pairs
from lincorr_lightning.probe.significance import Composition
from lincorr_lightning.results.numbers import Rates, number, rates_as_json
from lincorr_lightning.results.pair_matrix import PairMatrix
from lincorr_lightning.results.results import Figure, Results
from lincorr_lightning.results.table import Column, Table

_FLOATS = npt.NDArray[np.floating[Any]]
# A run over all knowledge has thousands of pairs with a reference.
_MAX_WEIGHT_FIGURES = 12
_MAX_INFLUENCE_TABLES = 100
# TensorBoard gets slow beyond some thousand tags; the tables have every pair.
_MAX_SCALAR_PAIRS = 600
# A tree over fewer kinds of knowledge shows nothing that the matrix does not.
_MIN_CLUSTERED = 4
_RANKS = ("1", "3", "5")
_WAYS = ("influenced", "influencing")
_LOGGED = (
    "label_mean", "instance_mean", "control_label_mean", "permuted_label_mean", "excess", "ridge",
)  # fmt: skip
_RANKING = (
    "rank", "source", "target", "label_mean", "label_error", "control_label_mean", "excess",
    "excess_error", "p", "q", "partial_label_mean", "through_given",
)  # fmt: skip
# Matrix tables and figures: name -> (the score's key, what it is).
_MATRICES = {
    "correlation_matrix": ("label_mean", "Label-wise correlation"),
    "std_matrix": ("label_std", "Standard deviation of label-wise r over labels"),
    "instance_matrix": ("instance_mean", "Instance-wise correlation"),
    "permuted_matrix": ("permuted_label_mean", "Label-wise correlation, permuted targets"),
    "control_matrix": ("control_label_mean", "Label-wise correlation, control prompt"),
}
_SUMMARY = {
    "label_mean": "r", "label_std": "std", "permuted_label_mean": "permuted",
    "control_label_mean": "control", "excess": "", "influenced_1": "Hit@1 influenced",
    "influencing_1": "Hit@1 influencing",
}  # fmt: skip


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

    def matrix(self, name: str) -> PairMatrix:
        """Return one of `_MATRICES`."""
        key, _ = _MATRICES[name]
        return PairMatrix.of({s.pair: getattr(s, key) for s in self.scores}, self.layout.domains)


class Influence(NamedTuple):
    """One of the highest weights of a label.

    Attributes:
        direction: ``influenced``: `token` is a target of the source `label`; ``influencing``:
            `token` is a source of the target `label`.
        label: The label.
        rank: 1 for the highest weight.
        token: The label at the other end.
        weight: W between the two.
        in_reference: Whether the reference pairs the two; None for labels without a reference.
    """

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
) -> list[Influence]:
    """Return the highest weights of every label, in both directions.

    Args:
        weight: W, ``(n_target_labels, n_source_labels)``.
        source_labels: Labels of its columns.
        target_labels: Labels of its rows.
        n: Number of weights per label.
        reference: Which label pairs the reference has, shaped like W.

    Example:
        >>> w = np.array([[0.9, 0.1], [0.2, 0.7]])
        >>> [row[1:5] for row in top_influences(w, ["Paris", "Rome"], ["France", "Italy"], n=1)]
        ... # doctest: +NORMALIZE_WHITESPACE
        [('Paris', 1, 'France', 0.9), ('Rome', 1, 'Italy', 0.7),
         ('France', 1, 'Paris', 0.9), ('Italy', 1, 'Rome', 0.7)]
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
                rows.append(
                    Influence(direction, label, rank, tokens[j], float(matrix[i, j]), right)
                )
    return rows


def notable_pairs(
    scores: Sequence[PairScore], references: Mapping[Pair, object], limit: int
) -> list[PairScore]:
    """Return the pairs with a reference by descending r, or any pairs if none has one."""
    scored = [score for score in scores if number(score.label_mean) is not None]
    with_reference = [score for score in scored if references.get(score.pair) is not None]
    best = sorted(with_reference or scored, key=lambda score: -score.label_mean)
    return best[: limit if with_reference else min(limit, _MAX_WEIGHT_FIGURES)]


def probe_results(
    found: ProbeFindings, phase: str, lm: Mapping[str, Any], settings: Mapping[str, Any]
) -> Results:
    """Build the results of a probe.

    Args:
        found: What the probe found.
        phase: First part of the log keys, ``val`` or ``test``.
        lm: Name, dtype, fingerprint and size of the LM.
        settings: The study's settings.
    """
    values: dict[str, Any] = {
        "n_fit": int(found.n_fit),
        "n_test": int(found.n_test),
        "control": found.layout.control,
        "pairs": [score.to_json() for score in found.scores],
    }
    if found.paths:
        values["ridge_path"] = [
            {"source": source, "target": target, "path": [point.to_json() for point in path]}
            for (source, target), path in found.paths.items()
        ]
    if found.layout.left_out:
        values["left_out"] = dict(found.layout.left_out)
    if found.compositions:
        values["transitivity"] = [one.to_json() for one in found.compositions]
    return Results(
        study="linear_probe",
        values=values,
        scalars=dict(_scalars(found.scores, phase)),
        tables=[*_tables(found), subjects_table(found.subjects)],
        figures=list(_figures(found, str(lm["name_or_path"]), settings)),
        lm=lm,
        settings=settings,
    )


def subjects_table(subjects: Mapping[str, Sequence[str]]) -> Table:
    """Return the table of all subjects and their halves."""
    rows = [(subject, half) for half, members in subjects.items() for subject in members]
    return Table.from_rows(
        "subjects", ("subject", "half"), rows, "Subjects, and the half each one is in"
    )


# -- scalars ---------------------------------------------------------------------------------


def _scalars(scores: Sequence[PairScore], phase: str) -> Iterator[tuple[str, float]]:
    """Yield columns of the table of pairs, as ``val/label_mean/city-country``."""
    shown = sorted(scores, key=lambda s: s.precision is None)[:_MAX_SCALAR_PAIRS]
    safe = safe_names(score.name for score in shown)
    for score in shown:
        values = {key: getattr(score, key) for key in _LOGGED}
        for way, rates in (score.precision or {}).items():
            values |= {f"{way}_{n}": rates[n] for n in _RANKS}
        for key, value in values.items():
            if number(value) is not None:
                yield f"{phase}/{key}/{safe[score.name]}", float(value)


# -- tables ----------------------------------------------------------------------------------


def _tables(found: ProbeFindings) -> Iterator[Table]:
    scores, layout = found.scores, found.layout
    entries = [score.to_json() for score in scores]
    hits = [f"{way}_{n}" for way in _WAYS for n in (*_RANKS, "n")]
    plain = [key for key in entries[0] if key not in ("precision", "completeness")]
    yield _summary(scores, found.n_test)
    yield Table.from_rows(
        "pairs",
        [*plain, *hits],
        [[*(e[key] for key in plain), *_hits(e["precision"])] for e in entries],
        "Every score of every pair",
    )
    yield Table.from_rows(
        "label_wise",
        ("pair", "label", "r"),
        [
            (score.name, label, number(r))
            for score in scores
            for label, r in zip(
                layout.domains[score.target].texts, score.label_r.tolist(), strict=True
            )
        ],
        "Label-wise r of every target label",
        "Empty where the label never changes.",
    )
    for name, (_, what) in _MATRICES.items():
        matrix = found.matrix(name)
        if name == "correlation_matrix" or not matrix.is_empty:
            yield matrix.table(name, what)
    if found.paths:
        yield Table.from_rows(
            "ridge_path",
            ["pair", "ridge", "label_mean", *hits],
            [
                [f"{source}->{target}", number(point.ridge), number(point.label_mean),
                 *_hits({"influenced": point.influenced, "influencing": point.influencing})]
                for (source, target), path in found.paths.items()
                for point in path
            ],
            "Correlation and precision at every ridge strength",
        )  # fmt: skip
    if any(score.p is not None for score in scores):
        ranked = [{"rank": i, **s.to_json()} for i, s in enumerate(rank_pairs(scores), start=1)]
        caption = "Pairs by how far r lies above its control"
        yield Table.from_dicts("ranking", ranked, _RANKING, caption=caption)
    if any(score.completeness for score in scores):
        yield Table.from_rows(
            "completeness",
            ["pair", "completeness", "n_labels", "label_mean", *hits[: len(_RANKS) + 1]],
            [
                [score.name, kind, one.n_labels, number(one.label_mean),
                 *_hits({"influenced": one.influenced})[: len(_RANKS) + 1]]
                for score in scores
                for kind, one in score.completeness.items()
            ],
            "Scores by completeness of the target labels",
        )  # fmt: skip
    if found.compositions:
        composed = [one.to_json() for one in found.compositions]
        caption = "Composed maps beside the map of the pair"
        yield Table.from_dicts("transitivity", composed, list(composed[0]), caption=caption)
    yield Table.from_rows(
        "influences",
        ("pair", *Influence._fields),
        [
            (score.name, *row)
            for score in notable_pairs(scores, layout.references, _MAX_INFLUENCE_TABLES)
            for row in top_influences(
                found.weights[score.pair],
                layout.domains[score.source].texts,
                layout.domains[score.target].texts,
                reference=layout.references.get(score.pair),
            )
        ],
        "Highest weights of every label, in both directions",
    )


def _summary(scores: Sequence[PairScore], n_test: int) -> Table:
    """Return the pairs by evidence, those without r last."""
    columns = [Column("pair"), *(Column(key, name, ".2f") for key, name in _SUMMARY.items())]
    rows = []
    for score in [*rank_pairs(scores), *(one for one in scores if math.isnan(one.evidence))]:
        hits = {f"{way}_1": number(rates["1"]) for way, rates in (score.precision or {}).items()}
        rows.append({"pair": score.name, **score.to_json(), **hits})
    caption = f"Label-wise r on {n_test:,} held-out subjects"
    note = "By r minus that of the control prompt."
    return Table.from_dicts("summary", rows, columns, caption=caption, note=note, headline=True)


def _hits(precision: Mapping[str, Rates | None] | None) -> list[Any]:
    cells: list[Any] = []
    for way in _WAYS:
        rates = (precision or {}).get(way)
        cells += [None] * (len(_RANKS) + 1) if rates is None else rates_as_json(rates).values()
    return cells


# -- figures ---------------------------------------------------------------------------------


def _figures(found: ProbeFindings, lm: str, settings: Mapping[str, Any]) -> Iterator[Figure]:
    # matplotlib takes long to import, and not every run draws.
    from lincorr_lightning.probe import figures
    from lincorr_lightning.results.heat_maps import correlation_heatmap
    from lincorr_lightning.results.style import short_name

    lm, scores, layout = short_name(lm), found.scores, found.layout
    strengths = {f"{score.ridge:g}" for score in scores}
    ridge = strengths.pop() if len(strengths) == 1 else settings.get("ridge")
    note = f"{found.n_test:,} held-out subjects; maps fitted on {found.n_fit:,}; ridge {ridge}"
    for name, (_, what) in _MATRICES.items():
        matrix = found.matrix(name)
        if name == "control_matrix" or (name == "permuted_matrix" and matrix.is_empty):
            continue
        options: dict[str, Any] = {"value_label": "Pearson r"}
        if name == "std_matrix":
            limit = max(float(np.nan_to_num(matrix.cells).max()), 0.01)
            options = {"value_label": "standard deviation of r", "limit": limit}
        draw = partial(
            correlation_heatmap, matrix.cells, matrix.sources, matrix.targets, f"{what} in {lm}",
            note, **options,
        )  # fmt: skip
        yield Figure(name, f"{what} of every ordered pair, source to target.", draw)
    r = found.matrix("correlation_matrix")
    n = len(r.sources)
    is_square = r.sources == r.targets
    if is_square and n >= _MIN_CLUSTERED and np.isfinite(r.cells).sum() == n * (n - 1):
        yield Figure(
            "clusters",
            "Label-wise correlation, ordered so that similar kinds of knowledge are neighbours.",
            partial(
                figures.cluster_heatmap, r.cells, r.sources, f"Clusters of knowledge in {lm}", note
            ),
        )
    yield Figure(
        "nulls",
        "Label-wise r of each pair beside the permuted baseline and the control prompt.",
        partial(figures.nulls_figure, scores, f"Correlation beside its nulls in {lm}"),
    )
    if any(score.p is not None for score in scores):
        yield Figure(
            "ranking",
            "Label-wise r above its control, with 95 % intervals over subjects.",
            partial(
                figures.ranking_figure, scores, settings.get("partial_out") or (),
                f"Correlation above its control in {lm}",
            ),
        )  # fmt: skip
    if found.compositions:
        yield Figure(
            "transitivity",
            "Label-wise r of composed maps beside the map of the pair.",
            partial(figures.transitivity_figure, found.compositions, f"Composed maps in {lm}"),
        )
    shown = notable_pairs(scores, layout.references, _MAX_WEIGHT_FIGURES)
    drawn = {score.name: found.paths[score.pair] for score in shown if score.pair in found.paths}
    if drawn:
        yield Figure(
            "ridge_path",
            "Label-wise r and Hit@1 along the ridge.",
            partial(
                figures.ridge_path_figure, drawn, {score.name: score.ridge for score in shown},
                f"Correlation and precision along the ridge in {lm}", len(found.paths),
            ),
        )  # fmt: skip
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
