"""The results of the two studies of geometry: numbers, tables and figures."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

import numpy as np

from lincorr_lightning.geometry import figures as draw
from lincorr_lightning.geometry.closeness import ClosenessTest, KnowledgeCloseness
from lincorr_lightning.geometry.mantel import (
    CORRELATION_KEYS,
    CorrelationTest,
    Floats,
    correlation_test,
)
from lincorr_lightning.geometry.profiles import TokenProfiles
from lincorr_lightning.results.numbers import number
from lincorr_lightning.results.results import Figure, Results
from lincorr_lightning.results.style import short_name
from lincorr_lightning.results.table import Column, Table

Row = dict[str, Any]

_TWO, _THREE = ".2f", ".3f"
_CORRELATION_COLUMNS = tuple(
    Column(key, format="d" if key == "n" else ".4f" if key.endswith("_p") else _TWO)
    for key in CORRELATION_KEYS
)

# -- token geometry --------------------------------------------------------------------------------


def token_geometry_results(
    profiles: TokenProfiles,
    lm: Mapping[str, Any],
    settings: Mapping[str, Any],
    included: Sequence[Results] = (),
) -> Results:
    """Return the results of `TokenGeometry` (Viswanathan et al., 2025, arXiv 2501.10573)."""
    n, name = len(profiles.prompts), short_name(lm["name_or_path"])
    n2, k = profiles.range_scalings[0], profiles.ks[profiles.paper_k]
    dimension_loss, entropy = list(_dimension_loss_rows(profiles)), list(_entropy_rows(profiles))
    spearman = list(_spearman_rows(profiles))
    values = {
        "n_prompts": n,
        "n_skipped": profiles.n_skipped,
        "n_tokens": profiles.n_tokens,
        "n_corpora": len(set(profiles.corpora)),
        "layers": list(profiles.layers),
        "range_scalings": list(profiles.range_scalings),
        "ks": list(profiles.ks),
        "shuffles": [_level(profiles, i) for i in range(len(profiles.shuffles))],
        "dimension_loss": dimension_loss,
        "entropy_correlation": entropy,
        "spearman": spearman,
    }
    columns = {
        "dimension": f"ID (n2={n2}), last layer", "peak_dimension": "highest ID",
        "overlap": f"overlap (k={k}), last two layers", "lowest_overlap": "lowest overlap",
        "cosine": "cosine, last layer",
    }  # fmt: skip
    tables = [
        Table.from_dicts(
            "levels",
            _level_rows(profiles),
            [
                Column("shuffle", "S"),
                Column("loss", format=_TWO),
                Column("entropy", format=_TWO),
                *(Column(key, heading, _TWO) for key, heading in columns.items()),
                Column("peak_layer", "layer of the highest ID", "d"),
            ],
            caption=f"Token geometry by shuffling level, means over {n:,} prompts of "
            f"{profiles.n_tokens:,} tokens ({profiles.n_skipped} too short)",
            headline=True,
        ),
        Table.from_dicts(
            "spearman",
            spearman,
            ["cloud", "layer", "n2", Column("spearman", "rho", _TWO), Column("p", format=".4f"),
             Column("n", format="d")],
            caption="Spearman's rho of intrinsic dimension and loss of unshuffled texts",
            note="tokens: a cloud is the tokens of a prompt, rho is over prompts; prompts: a cloud "
            "is the prompts of a corpus, rho is over corpora.",
        ),
        Table.from_dicts(
            "dimension_loss",
            dimension_loss,
            ["shuffle", "layer", "n2", *_CORRELATION_COLUMNS],
            caption="Correlation of log intrinsic dimension and log loss over prompts",
        ),
        Table.from_dicts(
            "entropy_correlation",
            entropy,
            ["x", "y", "shuffle", "n2", *_CORRELATION_COLUMNS],
            caption="Correlation of contextual entropy with the intrinsic dimension of the "
            "next-token probabilities and with the loss, over prompts",
        ),
        Table.from_dicts(
            "layers",
            _layer_rows(profiles),
            ["observable", "setting", "shuffle", "layer", Column("mean", format=_THREE),
             Column("std", format=_THREE), "n_prompts"],
            caption="Observables by layer: mean and standard deviation over prompts",
        ),
        _prompt_table(profiles),
        _profile_table(profiles),
    ]  # fmt: skip
    return Results(
        "token_geometry",
        values,
        scalars=_token_scalars(profiles),
        tables=tables,
        figures=[
            Figure("profiles", "Intrinsic dimension, overlap, cosine and angle by layer",
                   partial(draw.profiles_figure, profiles, name)),
            Figure("dimension_loss",
                   f"Log intrinsic dimension (n2 = {n2}) and log loss over prompts",
                   partial(draw.dimension_loss_figure, profiles, name)),
        ],
        lm=lm,
        settings=settings,
        included=included,
    )  # fmt: skip


def _dimension_loss_rows(profiles: TokenProfiles) -> Iterator[Row]:
    for i, level in enumerate(profiles.shuffles):
        for j, layer in enumerate(profiles.layers):
            for k, n2 in enumerate(profiles.range_scalings):
                found = profiles.dimension_loss(i, j, k)
                yield {"shuffle": level, "layer": layer, "n2": n2, **_numbers(found)}


def _entropy_rows(profiles: TokenProfiles) -> Iterator[Row]:
    for i, level in enumerate(profiles.shuffles):
        entropy = profiles.entropy[:, i]
        for k, n2 in enumerate(profiles.range_scalings):
            found = correlation_test(profiles.logits_dimension[:, i, k], entropy)
            row = {"x": "logits_dimension", "y": "entropy", "shuffle": level, "n2": n2}
            yield {**row, **_numbers(found)}
        found = correlation_test(entropy, profiles.loss[:, i])
        row = {"x": "entropy", "y": "loss", "shuffle": level, "n2": None}
        yield {**row, **_numbers(found)}


def _spearman_rows(profiles: TokenProfiles) -> Iterator[Row]:
    """Yield rho of ID and loss (paper, table 1).

    The paper's prompt level by ESS, another estimator of the intrinsic dimension, is left out.
    """
    clouds = []
    if 0 in profiles.shuffles:
        first = list(profiles.shuffles).index(0)
        clouds.append(("tokens", profiles.dimension[:, first], profiles.loss[:, first]))
    if len(profiles.corpus_loss):
        clouds.append(("prompts", profiles.corpus_dimension, profiles.corpus_loss))
    for cloud, dimension, loss in clouds:
        for j, layer in enumerate(profiles.layers):
            for k, n2 in enumerate(profiles.range_scalings):
                numbers = _numbers(correlation_test(dimension[:, j, k], loss))
                yield {
                    "cloud": cloud, "layer": layer, "n2": n2, "spearman": numbers["spearman"],
                    "p": numbers["spearman_p"], "n": numbers["n"],
                }  # fmt: skip


def _level(profiles: TokenProfiles, i: int) -> dict[str, Any]:
    """Return the means over prompts at a shuffling level."""
    observed: dict[str, Any] = {}
    for name, setting, _, values in profiles.curves():
        means = _means(values[:, i])
        if setting:
            observed.setdefault(name, {})[setting.split("=")[1]] = means
        else:
            observed[name] = means
    logits = _means(profiles.logits_dimension[:, i])
    return {
        "shuffle": profiles.shuffles[i],
        "loss": number(mean(profiles.loss[:, i])),
        "entropy": number(mean(profiles.entropy[:, i])),
        "logits_dimension": dict(zip(map(str, profiles.range_scalings), logits, strict=True)),
        **observed,
    }


def _level_rows(profiles: TokenProfiles) -> Iterator[Row]:
    for i, level in enumerate(profiles.shuffles):
        dimension = _means(profiles.dimension[:, i, :, 0])
        peak = max(range(len(dimension)), key=lambda j: dimension[j] or -math.inf)
        overlap = _means(profiles.overlap[:, i, :, profiles.paper_k])
        yield {
            "shuffle": level,
            "loss": number(mean(profiles.loss[:, i])),
            "entropy": number(mean(profiles.entropy[:, i])),
            "dimension": dimension[-1],
            "peak_dimension": dimension[peak],
            "peak_layer": profiles.layers[peak],
            "overlap": overlap[-1] if overlap else None,
            "lowest_overlap": min((v for v in overlap if v is not None), default=None),
            "cosine": _means(profiles.profiles["cosine_mean"][:, i])[-1],
        }


def _layer_rows(profiles: TokenProfiles) -> Iterator[Row]:
    for name, setting, layers, values in profiles.curves():
        for i, level in enumerate(profiles.shuffles):
            for layer, column in zip(layers, values[:, i].T, strict=True):
                finite = column[np.isfinite(column)]
                std = float(finite.std()) if len(finite) else None
                yield {
                    "observable": name, "setting": setting, "shuffle": level, "layer": layer,
                    "mean": number(mean(column)), "std": std, "n_prompts": len(finite),
                }  # fmt: skip


def _prompt_table(profiles: TokenProfiles) -> Table:
    logits = [Column(f"logits_dimension n2={n}", format=_TWO) for n in profiles.range_scalings]
    rows = [
        [prompt, corpus, level, *map(number, (profiles.loss[p, i], profiles.entropy[p, i],
                                              *profiles.logits_dimension[p, i]))]
        for p, (prompt, corpus) in enumerate(zip(profiles.prompts, profiles.corpora, strict=True))
        for i, level in enumerate(profiles.shuffles)
    ]  # fmt: skip
    columns: list[Column | str] = ["prompt", "corpus", "shuffle", Column("loss", format=_TWO),
                                   Column("entropy", format=_TWO), *logits]  # fmt: skip
    caption = "Loss, entropy and intrinsic dimension of the next-token probabilities by prompt"
    return Table.from_rows("prompts", columns, rows, caption)


def _profile_table(profiles: TokenProfiles) -> Table:
    curves = list(profiles.curves())
    names = [f"{curve.name} {curve.setting}".strip() for curve in curves]
    rows = [
        # The last layer has no next one to overlap with.
        [prompt, level, layer, *(number(values[p, i, j]) if j < values.shape[2] else None
                                 for _, _, _, values in curves)]
        for p, prompt in enumerate(profiles.prompts)
        for i, level in enumerate(profiles.shuffles)
        for j, layer in enumerate(profiles.layers)
    ]  # fmt: skip
    columns: list[Column | str] = ["prompt", "shuffle", "layer"]
    columns += [Column(name, format=_THREE) for name in names]
    return Table.from_rows(
        "profiles", columns, rows, "All observables by prompt, shuffling level and layer"
    )


def _token_scalars(profiles: TokenProfiles) -> dict[str, float]:
    """Return the means of the first level: loss, entropy, and the paper's curves by layer."""
    scalars = {"test/loss": mean(profiles.loss[:, 0]), "test/entropy": mean(profiles.entropy[:, 0])}
    shown = {("dimension", f"n2={profiles.range_scalings[0]}"), ("cosine_mean", ""),
             ("overlap", f"k={profiles.ks[profiles.paper_k]}"), ("angle_mean", "")}  # fmt: skip
    for name, setting, layers, values in profiles.curves():
        if (name, setting) in shown:
            key = f"test/{name}_{setting}".rstrip("_")
            for layer, column in zip(layers, values[:, 0].T, strict=True):
                scalars[f"{key}/layer_{layer}"] = mean(column)
    return scalars


# -- knowledge geometry ----------------------------------------------------------------------------


def knowledge_geometry_results(
    closeness: KnowledgeCloseness,
    lm: Mapping[str, Any],
    settings: Mapping[str, Any],
    included: Sequence[Results] = (),
) -> Results:
    """Return the results of `KnowledgeGeometry`."""
    pairs, name = list(_pair_rows(closeness)), short_name(lm["name_or_path"])
    tests = [_test_row(test) for test in closeness.tests]
    ks, scalings = closeness.ks, closeness.range_scalings
    values = {
        "n_subjects": closeness.n_subjects,
        "layers": list(closeness.layers),
        "range_scalings": list(scalings),
        "ks": list(ks),
        "chance_overlap": {str(k): k / (closeness.n_subjects - 1) for k in ks},
        "dimension": {
            name: {str(n2): [number(v) for v in found[:, i]] for i, n2 in enumerate(scalings)}
            for name, found in closeness.dimension.items()
        },
        "tests": tests,
        "pairs": [
            {**row, "overlap": {str(k): found[:, i].tolist() for i, k in enumerate(ks)}}
            for row, found in zip(pairs, closeness.overlap.values(), strict=True)
        ],
    }
    scalars = {
        f"test/{test.closeness}_{test.setting}".rstrip("_") + f"/{test.against}": (
            test.result.spearman
        )
        for test in closeness.tests
        if test.layer is None and test.given is None and test.result is not None
    }
    figures = [
        ("closeness", "Closeness of two kinds of knowledge and scores of the maps",
         draw.closeness_figure),
        ("overlap_matrix", "Overlap of neighborhoods of all pairs", draw.overlap_matrix_figure),
        ("dimension", "Intrinsic dimension of each kind of knowledge's prompts",
         draw.dimension_figure),
    ]  # fmt: skip
    if len(closeness.layers) > 1:
        figures.append(("rho_by_layer", "Rho of closeness and scores by layer", draw.rho_figure))
    tables = [
        _test_summary(closeness),
        Table.from_dicts(
            "tests",
            tests,
            ["closeness", "setting", "layer", "against", "given", Column("spearman", "rho", _TWO),
             Column("p", format=".4f"), "n_pairs", "n_permutations"],
            caption="Spearman's rho of closeness and scores of the maps over pairs",
            note="given: the wording of the prompts is partialled out.",
        ),
        Table.from_dicts(
            "pairs",
            pairs,
            ["a", "b", *(Column(key, format=_TWO) for key in list(pairs[0])[2:])],
            caption="Closeness of two kinds of knowledge and scores of the maps between them",
        ),
        Table.from_rows(
            "dimension",
            ["knowledge", "layer", "n2", Column("dimension", format=_TWO)],
            [
                [name, layer, n2, number(found[i, j])]
                for name, found in closeness.dimension.items()
                for i, layer in enumerate(closeness.layers)
                for j, n2 in enumerate(scalings)
            ],
            "Intrinsic dimension of each kind of knowledge's prompts",
        ),
        Table.from_rows(
            "overlap",
            ["a", "b", "layer", "k", Column("overlap", format=_THREE)],
            [
                [a, b, layer, k, number(found[i, j])]
                for (a, b), found in closeness.overlap.items()
                for i, layer in enumerate(closeness.layers)
                for j, k in enumerate(ks)
            ],
            "Overlap of the neighborhoods of a subject under two prompts",
        ),
    ]  # fmt: skip
    return Results(
        "knowledge_geometry",
        values,
        scalars=scalars,
        tables=[table for table in tables if table.rows],
        figures=[Figure(key, what, partial(show, closeness, name)) for key, what, show in figures],
        lm=lm,
        settings=settings,
        included=included,
    )


def _test_row(test: ClosenessTest) -> Row:
    row = {**test._asdict(), "layer": "all" if test.layer is None else str(test.layer)}
    result = row.pop("result")
    keys = ("spearman", "p", "n_pairs", "n_permutations")
    return {**row, **(dict.fromkeys(keys) if result is None else asdict(result))}


def _test_summary(closeness: KnowledgeCloseness) -> Table:
    """Return a row per measure of closeness, over the mean of all layers; empty without tests."""
    rows: dict[str, Row] = {}
    columns: dict[str, Column] = {}
    for test in closeness.tests:
        if test.layer is None and test.result is not None:
            name = test.closeness.replace("dimension_difference", "difference of log ID")
            name = f"{name} {test.setting}".strip()
            key = test.against + (f" given {test.given}" if test.given else "")
            columns[key] = Column(key, format=_TWO)
            columns[f"{key} p"] = Column(f"{key} p", "p", ".4f")
            rows.setdefault(name, {"closeness": name}).update(
                {key: test.result.spearman, f"{key} p": test.result.p}
            )
    return Table.from_dicts(
        "closeness",
        rows.values(),
        ["closeness", *columns.values()],
        caption=f"Closeness of {len(closeness.names)} kinds of knowledge and the scores of linear "
        f"maps between them, {closeness.n_subjects} subjects: Spearman's rho over pairs",
        note="p by permutation of the kinds of knowledge (Mantel); given wording: the similarity "
        "of the prompts' wording is partialled out.",
        headline=True,
    )


def _pair_rows(closeness: KnowledgeCloseness) -> Iterator[Row]:
    scores = {(score.source, score.target): score for score in closeness.scores}
    n2s = closeness.range_scalings
    differences = {n2: closeness.difference_matrix(i) for i, n2 in enumerate(n2s)}
    for (a, b), overlap in closeness.overlap.items():
        i, j = closeness.names.index(a), closeness.names.index(b)
        row: Row = {"a": a, "b": b}
        row |= {name: number(matrix[i, j]) for name, matrix in closeness.score_matrices.items()}
        for name, score in (("a->b", scores.get((a, b))), ("b->a", scores.get((b, a)))):
            row[f"r {name}"] = None if score is None else score.r
            for n in ("1", "3", "5"):
                row[f"hit{n} {name}"] = None if score is None else number(score.hits.get(n))
        row["wording"] = closeness.wording[a, b]
        row |= {f"overlap k={k}": number(overlap[:, n].mean()) for n, k in enumerate(closeness.ks)}
        row |= {f"dimension_difference n2={n2}": number(m[i, j]) for n2, m in differences.items()}
        yield row


# -- numbers ---------------------------------------------------------------------------------------


def mean(values: Floats) -> float:
    """Return the mean of the finite values, NaN if there are none."""
    finite = values[np.isfinite(values)]
    return float(finite.mean()) if len(finite) else math.nan


def _means(values: Floats) -> list[float | None]:
    """Return the mean over prompts, ``(n_prompts, n)``, of each column."""
    return [number(mean(column)) for column in values.T]


def _numbers(found: CorrelationTest | None) -> dict[str, Any]:
    return dict.fromkeys(CORRELATION_KEYS) if found is None else asdict(found)
