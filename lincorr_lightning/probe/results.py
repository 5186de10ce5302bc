"""The results of a linear probe: what ``results.json``, tables, figures and loggers get."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, product, zip_longest
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from lincorr_lightning.io import safe_names
from lincorr_lightning.knowledge import Domain
from lincorr_lightning.linear_map.layout import JointLayout, Pair, wordings_of
from lincorr_lightning.linear_map.scores import (
    FORMATS,
    HEADINGS,
    LOGGED,
    NUMBERS,
    WAYS,
    PairScore,
    hits_of,
)
from lincorr_lightning.linear_map.weights import shown_labels
from lincorr_lightning.probe.verdict import verdict
from lincorr_lightning.results.results import Figure, Results
from lincorr_lightning.results.table import Table, number, short_name

_FLOATS = npt.NDArray[np.floating[Any]]
_MAX_WEIGHT_FIGURES = 12  # a run over all knowledge has thousands of pairs with a reference
_MAX_PATHS = 6  # panels
_MAX_SHOWN = 16  # labels of either side in a figure of W
_MAX_SCALAR_PAIRS = 600  # TensorBoard gets slow beyond some thousand tags; tables have every pair
_HITS = [f"{way}_{n}" for way in WAYS for n in ("1", "3", "5", "n")]
_LEVELS = ["best_macro_1", "chance_influenced_1", "chance_influencing_1"]
_SUMMARY = [  # as many columns as a terminal has room for
    "pair",
    "label_mean",
    "random_label_mean",
    "excess_over_random",
    "macro_1",
    "causal_inner_product_macro_1",
    "best_macro_1",
    "control_label_mean",
]


@dataclass(frozen=True)
class ProbeFindings:
    """Scores, maps and subjects of a probe, from which its results are made."""

    phase: str  #: First part of the log keys, ``val`` or ``test``.
    scores: Sequence[PairScore]  #: Of each pair, means over its wordings if there are several.
    wordings: Sequence[PairScore]  #: Scores of each wording.
    weights: Mapping[Pair, _FLOATS]  #: W of each pair, ``(n_target_labels, n_source_labels)``.
    layout: JointLayout
    path: Sequence[Mapping[Pair, Mapping[str, Any]]]
    """Numbers at each ridge strength; empty when stored maps were scored."""
    subjects: Mapping[str, Sequence[str]]  #: Subjects of each half.
    n_fit: int
    n_test: int

    @property
    def drawn(self) -> list[PairScore]:
        """The first pairs with a reference, in their order, or those of the highest r."""
        scored = [score for score in self.scores if score["label_mean"] is not None]
        judged = [score for score in scored if self.layout.reference(score.ends).any()]
        best = sorted(scored, key=lambda score: -score["label_mean"])
        return (judged or best)[:_MAX_WEIGHT_FIGURES]


def probe_results(findings: ProbeFindings, lm: str, ridge: float | str) -> Results:
    """Build the results of a probe.

    `lm` is the name of the LM for titles, `ridge` the run's, a number or ``auto``.
    """
    scores, layout = findings.scores, findings.layout
    values: dict[str, Any] = {
        "n_fit": int(findings.n_fit),
        "n_test": int(findings.n_test),
        "control": layout.control,
        "pairs": [score.to_json() for score in scores],
    }
    if findings.path:
        values["ridge_path"] = [
            {
                "source": score.source,
                "target": score.target,
                "path": [_point(point[score.ends]) for point in findings.path],
            }
            for score in scores
        ]
    if layout.left_out:
        values["left_out"] = dict(layout.left_out)
    lm = short_name(lm)
    strengths = {f"{score['ridge']:g}" for score in scores}
    note = (
        f"{findings.n_test:,} held-out subjects; maps fitted on {findings.n_fit:,}; ridge "
        f"{strengths.pop() if len(strengths) == 1 else ridge}"
    )
    tables = {table.name: table for table in _tables(findings)}
    numbers = {score.ends: score.numbers for score in scores}
    ending = " of every ordered pair, source to target."
    drawn = pair_matrices(_MATRICES, numbers, ending, f" in {lm}", note)
    matrices = {table.name: (table, figure) for table, figure in drawn}
    first = next((score.pair for score in scores if score["best_macro_1"] is not None), "")
    rows = tables["answers"].frame.to_dict("records") if "answers" in tables else []
    alone = [row["answer"] for row in rows if row["pair"] == first and row["only_w"] is True]
    return Results(
        study="linear_probe",
        values=values,
        scalars=dict(_scalars(scores, findings.phase)),
        tables=[*tables.values(), *(table for table, _ in matrices.values())],
        figures=list(_figures(findings, tables, matrices, lm)),
        verdict=verdict(scores, alone),
    )


def _point(point: Mapping[str, Any]) -> dict[str, Any]:
    hits = {way: hits_of(point, way) for way in WAYS}
    return {"ridge": point["ridge"], "label_mean": point["label_mean"], **hits}


def subjects_table(subjects: Mapping[str, Sequence[str]]) -> Table:
    """Return the table of all subjects and their halves."""
    rows = [(subject, half) for half, members in subjects.items() for subject in members]
    return Table.of("subjects", rows, ("subject", "half"), "Subjects, and the half each one is in")


def _scalars(scores: Sequence[PairScore], phase: str) -> Iterator[tuple[str, float]]:
    shown = sorted(scores, key=lambda score: score["influenced_n"] is None)[:_MAX_SCALAR_PAIRS]
    safe = safe_names(score.pair for score in shown)
    for key, score in product(LOGGED, shown):
        if (value := score[key]) is not None:
            yield f"{phase}/{key}/{safe[score.pair]}", float(value)


class Matrix(NamedTuple):
    """A number of all pairs: the table and the heat map ``<name>_matrix``."""

    number: str
    name: str
    caption: str
    unit: str = "Pearson r"
    limits: tuple[float, float] = (-1.0, 1.0)  #: Values of the extreme colours.


_MATRICES = (
    Matrix("label_mean", "correlation", "r per answer"),
    Matrix("excess_over_random", "random_words", "r above random words", "difference of r"),
    Matrix("label_std", "std", "Standard deviation of r over answers", "of r", (0.0, 1.0)),
    Matrix("instance_mean", "instance", "r per subject"),
)


def pair_matrices(
    matrices: Sequence[Matrix],
    numbers: Mapping[Pair, Mapping[str, Any]],
    caption_end: str,
    title_end: str,
    note: str,
) -> Iterator[tuple[Table, Figure]]:
    """Yield table and heat map of each matrix whose number is known for some pair.

    They have a row per source and a column per target; a figure's caption and title begin with what
    it shows.
    """
    from pandas import Series

    from lincorr_lightning.results.plots import pairs_heatmap

    names = dict.fromkeys(name for pair in numbers for name in pair)
    rows, columns = (
        [name for name in names if name in side] for side in zip(*numbers, strict=True)
    )
    for matrix in matrices:
        values = {pair: number(each.get(matrix.number)) for pair, each in numbers.items()}
        if any(value is not None for value in values.values()):
            frame = Series(values, dtype="float64").unstack().reindex(index=rows, columns=columns)
            name = f"{matrix.name}_matrix"
            cells = frame.rename_axis("source").reset_index()
            table = Table(name, cells, matrix.caption, formats=dict.fromkeys(columns, ".2f"))
            options = {
                "title": matrix.caption + title_end,
                "subtitle": note,
                "value_label": matrix.unit,
                "limits": list(matrix.limits),
            }
            caption = matrix.caption + caption_end
            yield table, Figure(name, caption, pairs_heatmap, [table], options)


def _tables(findings: ProbeFindings) -> Iterator[Table]:
    scores, texts = findings.scores, findings.layout.domains
    # Those without the number are last.
    excess = {score.ends: score["excess_over_random"] for score in scores}
    ranked = sorted(scores, key=lambda x: (excess[x.ends] is None, -(excess[x.ends] or 0.0)))
    most = max((score["excess_over_random_labels"] or 0 for score in scores), default=0)
    first = compared = ""  # stored maps have no random words, which are fitted on the same rows
    if most:
        first = ", those with the highest r above random words first"
        compared = (
            "of maps from as many random words; above random words: of up to "
            f"{most} answers and as many words, not the difference of these. "
        )
    yield Table.of(
        "summary",
        [score.row() for score in ranked],
        _SUMMARY,
        f"Pairs on {findings.n_test:,} held-out subjects{first}",
        f"r per answer (over subjects); {compared}W right: share of answers (mean by right answer) "
        "to which W gives the highest weight; of the nearest word in the LM's head; of the best "
        "baseline. Unrelated prompt: r from the same words after it.",
        headline=True,
        headings=HEADINGS,
        formats=FORMATS,
    )
    columns = ["source", "target", *NUMBERS]
    rows = [score.row() for score in scores]
    yield Table.of(
        "pairs", rows, columns, "Every score of every pair", headings=HEADINGS, formats=FORMATS
    )
    yield Table.of(
        "label_wise",
        [
            (score.pair, label, number(r))
            for score in scores
            for label, r in zip(texts[score.target].texts, score.label_r, strict=True)
        ],
        ("pair", "label", "r"),
        "r of every answer of the target",
        "Empty where its logit never changes.",
    ).sampled("label", label_mean="r")
    if any(score.ranks for score in scores):
        yield _answers(findings)
    if findings.path:
        points = [
            {"pair": score.pair, **{name: score[name] for name in _LEVELS}, **point[score.ends]}
            for score in scores
            for point in findings.path
        ]
        names = ["pair", "ridge", "label_mean", *_HITS, "macro_1", *_LEVELS]
        caption = "Correlation and precision at every ridge strength"
        yield Table.of("ridge_path", points, names, caption, headings=HEADINGS, formats=FORMATS)
    rows = [
        {"completeness": kind, "pair": score.pair, **part}
        for score in scores
        for kind, part in score.completeness.items()
    ]
    if rows:
        columns = ["completeness", "pair", "n_labels", "label_mean", *_HITS[:4]]
        yield Table.of("completeness", rows, columns, "Scores by completeness of the target labels")
    if len(findings.wordings) > len(scores):
        yield _wordings(findings)
    cells = [cell for score in findings.drawn for cell in _weight_cells(findings, score)]
    yield Table.of("weights", cells, _WEIGHT_COLUMNS, "The part of W that figures show")
    yield subjects_table(findings.subjects)


def _answers(findings: ProbeFindings) -> Table:
    """Return the rank of the best right target of each source label, by W and each baseline."""
    rows: list[dict[str, Any]] = []
    for score in (one for one in findings.scores if one.ranks):
        reference = findings.layout.reference(score.ends)
        source, target = (shown_names(findings.layout.domains[name]) for name in score.ends)
        for row, i in enumerate(np.flatnonzero(reference.any(0))):
            ranks = {f"rank_{name}": int(each[row]) for name, each in score.ranks.items()}
            near = ranks.get("rank_causal_inner_product")
            rows.append(
                {
                    "pair": score.pair,
                    "answer": source[i],
                    "reference": "|".join(target[j] for j in np.flatnonzero(reference[:, i])),
                    "only_w": None if near is None else ranks["rank_W"] == 1 < near,
                    **ranks,
                }
            )
    names = dict.fromkeys(key for row in rows for key in row)
    return Table.of(
        "answers",
        rows,
        [*names],
        "Rank of the best right target of each source answer, by W and by each baseline",
        "only_w: W is right, and the nearest word (causal_inner_product) is not.",
        formats={name: "d" for name in names if name.startswith("rank_")},
    ).sampled("answer", only_w="only_w")


# Weights of W and of the nearest word, as shares of the largest one of the source label.
_WEIGHT_COLUMNS = ("pair", "source", "target", "share", "nearest_share", "reference")


def shown_part(weight: _FLOATS, reference: npt.NDArray[np.bool_]) -> tuple[list[int], list[int]]:
    """Choose rows and columns of W, ``(n_target, n_source)``, at most 16 each.

    They are the first right target labels, and for each of them its first source label, then its
    second, and so on: the same whatever W is. Without any right label they are the target labels
    with the highest weights and the source labels of these.
    """
    if reference.any():
        first = reference.argmax(0)[reference.any(0)]
        targets = list(dict.fromkeys(first.tolist()))[:_MAX_SHOWN]
        members = [np.flatnonzero(reference[target]).tolist() for target in targets]
    else:
        targets = np.argsort(-weight.max(1), kind="stable")[:_MAX_SHOWN].tolist()
        members = np.argsort(-weight[targets], axis=1, kind="stable").tolist()
    in_turn = dict.fromkeys(chain(*zip_longest(*members)))
    chosen = [source for source in in_turn if source is not None][:_MAX_SHOWN]
    order = {source: i for i, of_one in enumerate(members) for source in reversed(of_one)}
    return targets, sorted(chosen, key=lambda source: order[source])


def _weight_cells(findings: ProbeFindings, score: PairScore) -> Iterator[tuple[Any, ...]]:
    weight, right = findings.weights[score.ends], findings.layout.reference(score.ends)
    domains = [findings.layout.domains[name] for name in score.ends]
    source, target = map(shown_names, domains)
    # Whole answers, if there are some, are easier to read than first words of them.
    is_whole = [
        [text in answers for text, answers in zip(one.texts, one.answer_texts, strict=True)]
        for one in domains
    ]
    whole = right & np.outer(is_whole[1], is_whole[0])
    targets, sources = shown_part(weight, whole if whole.any() else right)
    shares = _shares(weight)
    near = None if score.nearness is None else _shares(score.nearness.cpu().numpy())
    for i, j in product(targets, sources):
        nearest = None if near is None else float(near[i, j])
        yield score.pair, source[j], target[i], float(shares[i, j]), nearest, bool(right[i, j])


def _shares(matrix: _FLOATS) -> _FLOATS:
    largest = np.abs(matrix).max(0)
    return matrix / np.where(largest, largest, 1.0)


def shown_names(domain: Domain) -> list[str]:
    """Return the labels of a kind of knowledge as `shown_labels`."""
    return shown_labels(domain.texts, domain.answer_texts)


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


def _english_names(domains: Iterable[Domain]) -> dict[str, str]:
    """Return English names of labels in other scripts, which fonts may lack."""
    return {
        name: label.answers[0].identity
        for domain in domains
        for name, label in zip(shown_names(domain), domain.labels, strict=True)
        if not name.isascii()
    }


def _figures(
    findings: ProbeFindings,
    tables: Mapping[str, Table],
    matrices: Mapping[str, tuple[Table, Figure]],
    lm: str,
) -> Iterator[Figure]:
    # matplotlib takes long to import, and not every run draws.
    from lincorr_lightning.probe import figures

    shown = findings.drawn
    safe = safe_names(score.pair for score in shown)
    of_w = [
        Figure(
            f"weights_{safe[score.pair]}",
            f"W of {score.pair} beside the nearest word.",
            figures.weights_figure,
            [tables["weights"]],
            {
                "pair": score.pair,
                "lm": lm,
                "ridge": score["ridge"],
                "right": [score["macro_1"], score["causal_inner_product_macro_1"]],
                "english": _english_names(findings.layout.domains[name] for name in score.ends),
            },
        )
        for score in shown
    ]
    yield from of_w[:1]
    yield Figure(
        "random_words",
        "r of each pair beside random words, and its distance from these.",
        figures.random_words_figure,
        [tables["pairs"]],
        {"lm": lm, "partial_out": list(findings.layout.partial_out)},
    )
    main = ("correlation_matrix",) if len(findings.scores) > 2 else ()
    yield from (matrices[name][1] for name in main if name in matrices)
    if "ridge_path" in tables and shown:
        ridges = {score.pair: score["ridge"] or 0.0 for score in shown[:_MAX_PATHS]}
        draw, options = figures.ridge_path_figure, {"ridges": ridges, "lm": lm}
        caption = "r and right answers along the ridge."
        yield Figure("ridge_path", caption, draw, [tables["ridge_path"]], options)
    others = [*of_w[1:], *(figure for name, (_, figure) in matrices.items() if name not in main)]
    yield from (replace(figure, is_main=False) for figure in others)
