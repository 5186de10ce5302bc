"""The results of the two studies of geometry: numbers, tables and figures.

Imported at the end of a run only, since it takes pandas and matplotlib.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

import numpy as np
from pandas import DataFrame

from lincorr_lightning.geometry import closeness as tests
from lincorr_lightning.geometry import figures as draw
from lincorr_lightning.geometry.closeness import ClosenessTest, KnowledgeCloseness
from lincorr_lightning.geometry.token_clouds import TokenProfiles
from lincorr_lightning.results.results import Figure, Results
from lincorr_lightning.results.table import Mean, Table, columns_of, number, short_name

Row = dict[str, Any]


def token_geometry_results(profiles: TokenProfiles, lm: str) -> Results:
    """Return the results of `TokenGeometry` (Viswanathan et al., 2025, arXiv 2501.10573)."""
    settings, prompts, lm = profiles.settings, profiles.prompts, short_name(lm)
    means = layer_means(profiles)
    values: Row = {
        "n_prompts": profiles.n_prompts, "n_skipped": profiles.n_skipped,
        "n_tokens": profiles.n_tokens, "n_corpora": prompts["corpus"].nunique(),
        "layers": profiles.layers["layer"].unique().tolist(),
        "range_scalings": list(settings.range_scalings), "ks": list(settings.ks),
        "shuffles": [_level(profiles, means, level) for level in prompts["shuffle"].unique()],
        "dimension_loss": list(_dimension_loss_rows(profiles)),
    }  # fmt: skip
    values["spearman"] = list(_spearman_rows(profiles, values["dimension_loss"]))
    first = means[means["shuffle"] == means["shuffle"].min()]
    scalars = {f"test/{name}": values["shuffles"][0][name] for name in ("loss", "entropy")}
    for row in first[first["key"].isin(profiles.shown)].itertuples():
        scalars[f"test/{str(row.key).replace(' ', '_')}/layer_{row.layer}"] = row.mean
    n2, correlations = settings.range_scalings[0], values["dimension_loss"]
    figures = [
        Figure("profiles", "Intrinsic dimension, overlap, cosine and angle by layer",
               partial(draw.profiles_figure, profiles, means, lm)),
        Figure("dimension_loss", f"Log intrinsic dimension (n2 = {n2}) and log loss over prompts",
               partial(draw.dimension_loss_figure, profiles, correlations, lm)),
    ]  # fmt: skip
    tables = _token_tables(profiles, means, values)
    return Results("token_geometry", values, scalars, tables, figures)


def _token_tables(profiles: TokenProfiles, means: DataFrame, values: Row) -> list[Table]:
    prompts, layers = profiles.prompts, profiles.layers
    formats, n2 = columns_of(tests.CorrelationTest)[2], profiles.settings.range_scalings[0]
    before, last = ({"layer": values["layers"][i]} for i in (max(-2, -len(values["layers"])), -1))
    return [
        _level_table(profiles, values),
        Table.of("spearman", values["spearman"], ["cloud", "layer", "n2", "spearman", "p", "n"],
                 "Spearman's rho of intrinsic dimension and loss of unshuffled texts",
                 "tokens: a cloud is the tokens of a prompt, rho is over prompts; prompts: a cloud "
                 "is the prompts of a corpus, rho is over corpora.",
                 headings={"spearman": "rho"}, formats=formats | {"p": ".4f"}),
        Table.of("dimension_loss", values["dimension_loss"], formats=formats,
                 caption="Correlation of log intrinsic dimension and log loss over prompts"),
        Table("layers", means.drop(columns="key"), formats={"mean": ".3f", "std": ".3f"},
              caption="Observables by layer: mean and standard deviation over prompts"),
        Table("prompts", prompts,
              "Loss, entropy and intrinsic dimension of the next-token probabilities by prompt",
              formats=dict.fromkeys(prompts.columns[3:], ".2f"),
              ).sampled("prompt", loss="loss", entropy="entropy"),
        Table("profiles", layers, "All observables by prompt, shuffling level and layer",
              formats=dict.fromkeys(layers.columns[3:], ".3f"),
              ).sampled("prompt", dimension=Mean(f"dimension n2={n2}", where=last),
                        overlap=Mean(f"overlap k={profiles.paper_k}", where=before),
                        cosine=Mean("cosine_mean", where=last)),
    ]  # fmt: skip


def layer_means(profiles: TokenProfiles) -> DataFrame:
    """Return mean and standard deviation over prompts of each observable, level and layer."""
    layers = profiles.layers
    cells = layers.drop(columns="prompt").melt(["shuffle", "layer"], var_name="key")
    # The last layer has no next one to overlap with.
    is_last = cells["layer"] == layers["layer"].max()
    cells = cells[~(is_last & cells["key"].str.startswith("overlap"))]
    groups = cells.groupby(["key", "shuffle", "layer"], sort=False)["value"]
    numbers = {"mean": groups.mean(), "std": groups.std(ddof=0), "n_prompts": groups.count()}
    means = DataFrame(numbers).reset_index()
    parts = means["key"].str.partition(" ")
    means.insert(1, "observable", parts[0])
    means.insert(2, "setting", parts[2])
    return means


def _level(profiles: TokenProfiles, means: DataFrame, level: int) -> Row:
    row: Row = {"shuffle": int(level)}
    prompts = profiles.prompts[profiles.prompts["shuffle"] == level]
    at_level = means[means["shuffle"] == level]
    values = {key: number(prompts[key].mean()) for key in prompts.columns[3:]}
    values |= {key: list(map(number, at_level["mean"][at_level["key"] == key]))
               for key in profiles.layers.columns[3:]}  # fmt: skip
    for key, value in values.items():
        name, _, setting = key.partition("=")
        if setting:
            row.setdefault(name.partition(" ")[0], {})[setting] = value
        else:
            row[name] = value
    return row


def _level_table(profiles: TokenProfiles, values: Row) -> Table:
    n2, k = profiles.settings.range_scalings[0], profiles.paper_k
    rows = []
    for level in values["shuffles"]:
        dimension = level["dimension"][str(n2)]
        overlap = [value for value in level["overlap"][str(k)] if value is not None]
        peak = int(np.argmax([value or 0 for value in dimension]))
        rows.append({
            **{key: level[key] for key in ("shuffle", "loss", "entropy")},
            "dimension": dimension[-1], "peak_dimension": dimension[peak],
            "overlap": overlap[-1] if overlap else None,
            "lowest_overlap": min(overlap, default=None), "cosine": level["cosine_mean"][-1],
            "peak_layer": values["layers"][peak],
        })  # fmt: skip
    return Table.of(
        "levels", rows, headline=True,
        caption=f"Token geometry by shuffling level, means over {values['n_prompts']:,} prompts of "
        f"{profiles.n_tokens:,} tokens ({profiles.n_skipped} too short)",
        headings={
            "shuffle": "cut in 4^S blocks, S", "dimension": f"ID (n2={n2}), last layer",
            "peak_dimension": "highest ID", "overlap": f"overlap (k={k}), last two layers",
            "lowest_overlap": "lowest overlap", "cosine": "cosine, last layer",
            "peak_layer": "layer of the highest ID"},
        formats={**dict.fromkeys(list(rows[0])[1:-1], ".2f"), "peak_layer": "d"},
    )  # fmt: skip


def _dimension_loss_rows(profiles: TokenProfiles) -> Iterator[Row]:
    prompts = profiles.prompts
    for (level, layer), rows in profiles.layers.groupby(["shuffle", "layer"], sort=False):
        loss = prompts["loss"][prompts["shuffle"] == level]
        for n2 in profiles.settings.range_scalings:
            x, y = (np.log(v.where(v > 0)) for v in (rows[f"dimension n2={n2}"], loss))
            test = tests.correlation_test(x, y)
            yield {"shuffle": level, "layer": layer, "n2": n2, **asdict(test)}


def _spearman_rows(profiles: TokenProfiles, dimension_loss: list[Row]) -> Iterator[Row]:
    """Yield rho of ID and loss (paper, table 1), which their logarithms have, too.

    The paper's prompt level by ESS, another estimator of the intrinsic dimension, is left out.
    """
    found = [{"cloud": "tokens", **row} for row in dimension_loss if row["shuffle"] == 0]
    corpora = profiles.corpora
    for layer, rows in corpora.groupby("layer", sort=False) if len(corpora) else ():
        for n2 in profiles.settings.range_scalings:
            test = tests.correlation_test(rows[f"dimension n2={n2}"], rows["loss"])
            found.append({"cloud": "prompts", "layer": layer, "n2": n2, **asdict(test)})
    for row in found:
        rho = {"spearman": row["spearman"], "p": row["spearman_p"], "n": row["n"]}
        yield {**{key: row[key] for key in ("cloud", "layer", "n2")}, **rho}


def knowledge_geometry_results(closeness: KnowledgeCloseness, lm: str) -> Results:
    """Return the results of `KnowledgeGeometry`."""
    lm, ks, scalings = short_name(lm), closeness.ks, closeness.range_scalings
    pairs = list(_pair_rows(closeness))
    tables = [_summary(closeness), *_closeness_tables(closeness, pairs)]
    figures = [Figure("closeness", "Closeness of two kinds of knowledge and scores of the maps",
                      partial(draw.closeness_figure, closeness, lm))]  # fmt: skip
    if len(closeness.layers) > 1:
        figures.append(Figure("rho_by_layer", "Rho of closeness and scores by layer",
                              partial(draw.rho_figure, closeness, lm)))  # fmt: skip
    values = {
        "n_subjects": closeness.n_subjects, "layers": list(closeness.layers),
        "range_scalings": list(scalings), "ks": list(ks),
        "chance_overlap": {str(k): k / (closeness.n_subjects - 1) for k in ks},
        "dimension": {
            name: {str(n2): [number(v) for v in by_layer[:, i]] for i, n2 in enumerate(scalings)}
            for name, by_layer in closeness.dimension.items()},
        "tests": list(map(asdict, closeness.tests)),
        "pairs": [
            {**row, "overlap": {str(k): by_layer[:, i].tolist() for i, k in enumerate(ks)}}
            for row, by_layer in zip(pairs, closeness.overlap.values(), strict=True)],
    }  # fmt: skip
    scalars = {
        f"test/{test.closeness}_{test.setting}".rstrip("_") + f"/{test.against}": test.spearman
        for test in closeness.tests
        if test.layer == "all" and test.given is None and test.spearman is not None}  # fmt: skip
    return Results("knowledge_geometry", values, scalars, list(filter(len, tables)), figures)


def _closeness_tables(closeness: KnowledgeCloseness, pairs: list[Row]) -> list[Table]:
    def rows(found: Mapping[Any, Any], settings: Sequence[int]) -> list[tuple[Any, ...]]:
        return [
            (*([of] if isinstance(of, str) else of), layer, setting, number(value))
            for of, by_layer in found.items()
            for layer, values in zip(closeness.layers, by_layer, strict=True)
            for setting, value in zip(settings, values, strict=True)
        ]

    return [
        Table.of("tests", ({**vars(one), "layer": None if one.layer == "all" else int(one.layer)}
                           for one in closeness.tests), ClosenessTest,
                 "Spearman's rho of closeness and scores of the maps over pairs", "given: the "
                 "wording of the prompts is partialled out; no layer: mean over all layers."),
        Table.of("pairs", pairs, formats=dict.fromkeys(list(pairs[0])[2:], ".2f"),
                 caption="Closeness of two kinds of knowledge and scores of the maps between them"),
        Table.of("dimension", rows(closeness.dimension, closeness.range_scalings),
                 ["knowledge", "layer", "n2", "dimension"],
                 "Intrinsic dimension of each kind of knowledge's prompts",
                 formats={"dimension": ".2f"}),
        Table.of("overlap", rows(closeness.overlap, closeness.ks),
                 ["a", "b", "layer", "k", "overlap"], formats={"overlap": ".3f"},
                 caption="Overlap of the neighborhoods of a subject under two prompts"),
    ]  # fmt: skip


def _summary(closeness: KnowledgeCloseness) -> Table:
    rows: dict[str, Row] = {}
    for test in closeness.tests:
        if test.layer == "all" and test.spearman is not None:
            name = test.closeness.replace("dimension_difference", "difference of log ID")
            name = f"{name} {test.setting}".strip()
            key = test.against + (f" given {test.given}" if test.given else "")
            row = rows.setdefault(name, {"closeness": name})
            row |= {key: test.spearman, f"{key} p": test.p}
    columns = list(dict.fromkeys(key for row in rows.values() for key in row))
    p = [key for key in columns if key.endswith(" p")]
    return Table.of(
        "closeness", rows.values(), columns,
        f"Closeness of {len(closeness.names)} kinds of knowledge and the scores of linear "
        f"maps between them, {closeness.n_subjects} subjects: Spearman's rho over pairs",
        "p by permutation of the kinds of knowledge (Mantel); given wording: the similarity of the "
        "prompts' wording is partialled out.", True, dict.fromkeys(p, "p"),
        {**dict.fromkeys(columns[1:], ".2f"), **dict.fromkeys(p, ".4f")},
    )  # fmt: skip


def _pair_rows(closeness: KnowledgeCloseness) -> Iterator[Row]:
    scores = {score.pair: score.row() for score in closeness.scores}
    matrices = closeness.score_matrices
    differences = {f"dimension_difference n2={n2}": closeness.difference_matrix(i)
                   for i, n2 in enumerate(closeness.range_scalings)}  # fmt: skip
    for (a, b), overlap in closeness.overlap.items():
        at = closeness.names.index(a), closeness.names.index(b)
        row: Row = {"a": a, "b": b, **{name: number(one[at]) for name, one in matrices.items()}}
        for way, pair in (("a->b", (a, b)), ("b->a", (b, a))):
            score = scores.get(pair, {})
            row[f"r {way}"] = score.get("label_mean")
            for n in ("1", "3", "5"):
                row[f"hit{n} {way}"] = score.get(f"influenced_{n}")
        row["wording"] = closeness.wording[a, b]
        row |= {f"overlap k={k}": number(overlap[:, n].mean()) for n, k in enumerate(closeness.ks)}
        row |= {name: number(matrix[at]) for name, matrix in differences.items()}
        yield row
