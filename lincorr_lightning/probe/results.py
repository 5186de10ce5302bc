"""The results of a linear probe: what ``results.json``, tables, figures and loggers get."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from itertools import product
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from lincorr_lightning.errors import listed
from lincorr_lightning.io import safe_names
from lincorr_lightning.linear_map.baselines import LabelCount
from lincorr_lightning.linear_map.layout import JointLayout, Pair, wordings_of
from lincorr_lightning.linear_map.scores import SPREAD, PairScore, number_columns
from lincorr_lightning.results.results import Figure, Results
from lincorr_lightning.results.table import Mean, Table, columns_of, number, short_name

if TYPE_CHECKING:
    from matplotlib.figure import Figure as MatplotlibFigure
    from pandas import DataFrame

_FLOATS = npt.NDArray[np.floating[Any]]
_MAX_WEIGHT_FIGURES = 12  # a run over all knowledge has thousands of pairs with a reference
_MAX_INFLUENCE_TABLES = 100
_MAX_SCALAR_PAIRS = 600  # TensorBoard gets slow beyond some thousand tags; tables have every pair
_HITS = [f"{way}_{n}" for way in ("influenced", "influencing") for n in ("1", "3", "5", "n")]
_LEVELS = ["best_baseline_1", "chance_influenced_1", "chance_influencing_1"]
_PATH_COLUMNS = ["pair", "ridge", "label_mean", *_HITS, *_LEVELS]
_OF_POINT = ("ridge", "label_mean", "influenced", "influencing")


@dataclass(frozen=True)
class ProbeFindings:
    """Scores, maps and subjects of a probe, from which its results are made."""

    phase: str  #: First part of the log keys, ``val`` or ``test``.
    scores: Sequence[PairScore]  #: Of each pair, means over its wordings if there are several.
    wordings: Sequence[PairScore]  #: Scores of each wording.
    weights: Mapping[Pair, _FLOATS]  #: W of each pair, ``(n_target_labels, n_source_labels)``.
    layout: JointLayout
    path: Sequence[Mapping[Pair, PairScore]]
    """Scores at each ridge strength; empty when stored maps were scored."""
    label_counts: Sequence[LabelCount]
    subjects: Mapping[str, Sequence[str]]  #: Subjects of each half.
    n_fit: int
    n_test: int

    def notable(self, limit: int) -> list[PairScore]:
        """Return the pairs with a reference by descending r, or a few pairs if none has one."""
        scored = [score for score in self.scores if score.label_mean is not None]
        with_reference = [s for s in scored if self.layout.references.get(s.ends) is not None]
        best = sorted(with_reference or scored, key=lambda score: -(score.label_mean or 0.0))
        return best[: limit if with_reference else min(limit, _MAX_WEIGHT_FIGURES)]


def probe_results(
    findings: ProbeFindings, lm: str, ridge: float | str, partial_out: Sequence[str] = ()
) -> Results:
    """Build the results of a probe.

    `lm` is the name of the LM for titles, `ridge` the run's, a number or ``auto``, and
    `partial_out` the knowledge that was partialled out.
    """
    scores, layout = findings.scores, findings.layout
    known_for_some = {
        "ridge_path": [
            {
                "source": score.source,
                "target": score.target,
                "path": [point[score.ends].select(*_OF_POINT) for point in findings.path],
            }
            for score in (scores if findings.path else ())
        ],
        "left_out": dict(layout.left_out),
    }
    values = {
        "n_fit": int(findings.n_fit),
        "n_test": int(findings.n_test),
        "control": layout.control,
        "pairs": [score.to_json() for score in scores],
        **{key: value for key, value in known_for_some.items() if value},
    }
    lm = short_name(lm)
    strengths = {f"{score.ridge:g}" for score in scores}
    note = (
        f"{findings.n_test:,} held-out subjects; maps fitted on {findings.n_fit:,}; ridge "
        f"{strengths.pop() if len(strengths) == 1 else ridge}"
    )
    ending = " of every ordered pair, source to target."
    matrices = list(pair_matrices(_MATRICES, scores, ending, f" in {lm}", note))
    every = [*_tables(findings), *(table for table, _ in matrices)]
    tables = {table.name: table for table in every}
    figures = [figure for _, figure in matrices]
    figures += _figures(findings, tables, lm, partial_out)
    # The first picture is of what no other words have.
    figures.sort(key=lambda figure: figure.name != "random_words_matrix")
    return Results(
        study="linear_probe",
        values=values,
        scalars=dict(_scalars(scores, findings.phase)),
        tables=every,
        figures=figures,
    )


def subjects_table(subjects: Mapping[str, Sequence[str]]) -> Table:
    """Return the table of all subjects and their halves."""
    rows = [(subject, half) for half, members in subjects.items() for subject in members]
    return Table.of("subjects", rows, ("subject", "half"), "Subjects, and the half each one is in")


def _scalars(scores: Sequence[PairScore], phase: str) -> Iterator[tuple[str, float]]:
    shown = sorted(scores, key=lambda score: score.influenced_n is None)[:_MAX_SCALAR_PAIRS]
    safe = safe_names(score.pair for score in shown)
    priority = {one.name: one.metadata.get("logged") for one in fields(PairScore)}
    for first, score in product((1, 2), shown):
        for key in (key for key, value in priority.items() if value == first):
            if (value := getattr(score, key)) is not None:
                yield f"{phase}/{key}/{safe[score.pair]}", float(value)


class Matrix(NamedTuple):
    """A number of all pairs: the table and the heat map ``<name>_matrix``."""

    number: str  #: Field of the pairs' records.
    name: str
    caption: str
    unit: str = "Pearson r"
    is_signed: bool = True  #: Whether colours go from -highest to highest, and not from 0.


_OF_STD = "standard deviation of r"
_MATRICES = (
    Matrix("label_mean", "correlation", "Label-wise correlation"),
    Matrix("label_std", "std", "Standard deviation of label-wise r over labels", _OF_STD, False),
    Matrix("instance_mean", "instance", "Instance-wise correlation"),
    Matrix(
        "excess_over_random",
        "random_words",
        "Label-wise correlation above that of random words",
        "difference of r",
    ),
)


def pair_matrices(
    matrices: Sequence[Matrix], scores: Sequence[Any], caption_end: str, title_end: str, note: str
) -> Iterator[tuple[Table, Figure]]:
    """Yield table and heat map of each matrix whose number is known for some pair.

    They have a row per source and a column per target. `scores` are records of one class with
    ``source``, ``target`` and the numbers; a figure's caption and title begin with what it shows.
    """
    from pandas import Series

    names = dict.fromkeys(name for score in scores for name in (score.source, score.target))
    sources, targets = {score.source for score in scores}, {score.target for score in scores}
    rows, columns = ([name for name in names if name in side] for side in (sources, targets))
    for matrix in matrices:
        values = {(s.source, s.target): number(getattr(s, matrix.number)) for s in scores}
        if any(value is not None for value in values.values()):
            frame = Series(values, dtype="float64").unstack().reindex(index=rows, columns=columns)
            name = f"{matrix.name}_matrix"
            cells = frame.rename_axis("source").reset_index()
            draw = partial(_draw, matrix, frame, matrix.caption + title_end, note)
            yield (
                Table(name, cells, matrix.caption, formats=dict.fromkeys(columns, ".2f")),
                Figure(name, matrix.caption + caption_end, draw),
            )


def _draw(matrix: Matrix, frame: "DataFrame", title: str, note: str) -> "MatplotlibFigure":
    # matplotlib takes long to import, and not every run draws.
    from lincorr_lightning.results.plots import correlation_heatmap

    highest = max(float(np.nanmax(np.abs(frame.to_numpy()))), 0.01)
    limits = -highest if matrix.is_signed else 0.0, highest
    return correlation_heatmap(frame, title, note, matrix.unit, limits)


def _tables(findings: ProbeFindings) -> Iterator[Table]:
    scores, texts = findings.scores, findings.layout.domains
    _, _, formats = columns_of(PairScore)
    # Those of no evidence, whose labels never vary, are last.
    ranked = sorted(scores, key=lambda x: math.inf if x.evidence is None else -x.evidence)
    yield Table.of(
        "summary",
        ranked,
        ["pair", *formats],
        f"Label-wise r on {findings.n_test:,} held-out subjects",
        f"{_cautions(scores)}Sorted by r above the control prompt, which names no source. "
        "Random words: as many in place of the source labels. r above random words: of a few of "
        "either (model.random_labels), not the difference of the columns before. Hit@1: share of "
        "source labels whose highest weight in W leads to a right target label; its best baseline "
        "knows the vocabulary alone. See docs/concepts.md.",
        headline=True,
    )
    yield Table.of("pairs", scores, number_columns(), "Every score of every pair")
    yield Table.of(
        "label_wise",
        [
            (score.pair, label, number(r))
            for score in scores
            for label, r in zip(texts[score.target].texts, score.label_r, strict=True)
        ],
        ("pair", "label", "r"),
        "Label-wise r of every target label",
        "Empty where the label never changes.",
    ).sampled("label", label_mean="r")
    if findings.path:
        points = [
            replace(point[score.ends], best_baseline_1=score.best_baseline_1)
            for score in scores
            for point in findings.path
        ]
        caption = "Correlation and precision at every ridge strength"
        yield Table.of("ridge_path", points, _PATH_COLUMNS, caption)
    if any(score.p is not None for score in scores):
        columns = ["pair", *number_columns()]
        yield Table.of("ranking", ranked, columns, "Pairs by how far r lies above its control")
    if parts := [part for score in scores for part in score.completeness.items()]:
        columns = ["completeness", "pair", "n_labels", "label_mean", *_HITS[:4]]
        rows = [{"completeness": kind, **part.row()} for kind, part in parts]
        yield Table.of("completeness", rows, columns, "Scores by completeness of the target labels")
    if len(findings.wordings) > len(scores):
        yield _spread(scores)
        yield _wordings(findings)
    if findings.label_counts:
        yield Table.of(
            "random_words",
            findings.label_counts,
            caption="Label-wise r of maps from some source labels, and from as many random words",
            note="Means and standard deviations over draws, for the targets' held-out logits.",
        )
    influences = [
        {"pair": score.pair, **influence._asdict()}
        for score in findings.notable(_MAX_INFLUENCE_TABLES)
        for influence in top_influences(
            findings.weights[score.ends],
            texts[score.source].texts,
            texts[score.target].texts,
            reference=findings.layout.references.get(score.ends),
        )
    ]
    hit = Mean("in_reference", where={"direction": "influenced", "rank": 1})
    columns, caption = ["pair", *Influence._fields], "Highest weights of every label"
    yield Table.of("influences", influences, columns, caption).sampled("label", influenced_1=hit)
    yield subjects_table(findings.subjects)


def _cautions(scores: Sequence[PairScore]) -> str:
    """Return for which pairs W must not be read as what the LM knows, and what helps."""
    judged = [score for score in scores if score.influenced_1 is not None]
    has_ridge = any(score.ridge for score in judged)
    sentences = []
    if wrong := [score.pair for score in judged if (score.influenced_1 or 0) < 0.5]:
        sentences.append(
            f"W is imprecise, most source labels lead to a wrong target: {listed(wrong)}."
        )
        if not has_ridge:
            sentences.append("If Hit@1 rises in figures/ridge_path.png, set model.ridge to auto.")
    if has_ridge:
        sentences.append(
            "A ridge lowers r of the control prompt, too: set model.ridge 0 to compare."
        )
    low = {score.pair: score.above_best_baseline_low for score in judged}
    if alike := [pair for pair, bound in low.items() if bound is not None and bound <= 0]:
        sentences.append(
            "W pairs no more labels right than the vocabulary alone (95 % over source "
            f"labels): {listed(alike)}."
        )
    return "".join(f"{sentence}\n" for sentence in sentences)


def _spread(scores: Sequence[PairScore]) -> Table:
    """Return the spread over wordings of the numbers of the headline table."""
    _, headings, formats = columns_of(PairScore)
    shown = [name for name in SPREAD if name in formats]
    form = "{mean:.2f} ± {std:.2f} ({low:.2f} to {high:.2f})"
    rows = [
        {"pair": score.pair, "wordings": spread["n"]}
        | {name: form.format(**spread[name]) for name in shown if name in spread}
        for score in scores
        if (spread := score.templates)
    ]
    caption = "Spread over wordings: mean ± standard deviation (lowest to highest)"
    columns = ["pair", "wordings", *shown]
    return Table.of("spread", rows, columns, caption, headline=True, headings=headings)


def _wordings(findings: ProbeFindings) -> Table:
    prompt = {name: one.knowledge.template for name, one in findings.layout.domains.items()}
    by_wording = {score.ends: score for score in findings.wordings}
    rows = []
    for pair, wordings in wordings_of(by_wording).items():
        for i, ends in enumerate(wordings, start=1):
            source, target = (prompt[name] for name in ends)
            names = {"pair": "->".join(pair), "wording": i, "source": source, "target": target}
            rows.append(by_wording[ends].row() | names)
    columns = dict.fromkeys(["pair", "wording", *rows[0]])
    return Table.of("wordings", rows, [*columns], "Every score of every pair in each wording")


class Influence(NamedTuple):
    """One of the highest weights of a label."""

    direction: str
    """``influenced``: `token` is a target of the source `label`; ``influencing``: `token` is a
    source of the target `label`."""
    label: str
    rank: int  #: 1 for the highest weight.
    token: str  #: The label at the other end.
    weight: float
    in_reference: bool | None
    """Whether the reference pairs the two; None for labels without a reference."""


def top_influences(
    weight: _FLOATS,
    source_labels: Sequence[str],
    target_labels: Sequence[str],
    n: int = 5,
    reference: npt.NDArray[np.bool_] | None = None,
) -> list[Influence]:
    """Return the `n` highest weights of every label, in both directions.

    The weights are W, ``(n_target_labels, n_source_labels)``; `reference` says which label pairs
    are in the reference, shaped like W.

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
    known = np.zeros(weight.shape, dtype=bool) if reference is None else reference
    for direction, labels, tokens, matrix, right in (
        ("influenced", source_labels, target_labels, weight.T, known.T),
        ("influencing", target_labels, source_labels, weight, known),
    ):
        order = np.argsort(-matrix, axis=1, kind="stable")[:, :n]
        for i, label in enumerate(labels):
            for rank, j in enumerate(order[i], start=1):
                is_right = bool(right[i, j]) if right[i].any() else None
                ends = direction, label, rank, tokens[j]
                rows.append(Influence(*ends, float(matrix[i, j]), is_right))
    return rows


def _figures(
    findings: ProbeFindings, tables: Mapping[str, Table], lm: str, partial_out: Sequence[str]
) -> Iterator[Figure]:
    # matplotlib takes long to import, and not every run draws.
    from lincorr_lightning.probe import figures

    pairs = tables["pairs"].frame
    caption = "Label-wise r of each pair beside random words, control prompt and permuted baseline."
    yield Figure("nulls", caption, partial(figures.nulls_figure, pairs, lm))
    if "ranking" in tables:
        caption = "Label-wise r above its control, with 95 % intervals over subjects."
        frame = tables["ranking"].frame
        yield Figure("ranking", caption, partial(figures.ranking_figure, frame, partial_out, lm))
    shown = findings.notable(_MAX_WEIGHT_FIGURES)
    names = [score.pair for score in shown]
    if "ridge_path" in tables and shown:
        ridges = {score.pair: score.ridge or 0.0 for score in shown}
        draw = partial(figures.ridge_path_figure, tables["ridge_path"].frame, ridges, lm)
        yield Figure("ridge_path", "Label-wise r and Hit@1 along the ridge.", draw)
    safe = safe_names(names)
    for score in shown:
        draw = partial(
            figures.top_weights_figure,
            findings.weights[score.ends],
            findings.layout.domains[score.source],
            findings.layout.domains[score.target],
            f"W of {score.pair} in {lm}",
            f"ridge {score.ridge:g}",
            findings.layout.references.get(score.ends),
        )
        yield Figure(f"weights_{safe[score.pair]}", f"Part of W of {score.pair}.", draw)
