"""The results of token geometry: numbers, tables and figures.

Imported at the end of a run only, since it takes pandas and matplotlib.
"""

from collections.abc import Iterator
from dataclasses import asdict, astuple, dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import scipy
from pandas import DataFrame

from lincorr_lightning.geometry import figures as draw
from lincorr_lightning.geometry.token_clouds import TokenProfiles
from lincorr_lightning.results.results import Figure, Results
from lincorr_lightning.results.table import Mean, Table, column, columns_of, number, short_name

_MIN_POINTS = 4  # Fisher's interval needs as many
Row = dict[str, Any]


@dataclass(frozen=True)
class CorrelationTest:
    """Pearson's r with its 95 % interval, and Spearman's rho, of the same `n` points.

    All are None if there are too few points, or one of the numbers is constant.
    """

    pearson: float | None = column(format=".2f", default=None)
    low: float | None = column(format=".2f", default=None)
    high: float | None = column(format=".2f", default=None)
    pearson_p: float | None = column(format=".4f", default=None)
    spearman: float | None = column(format=".2f", default=None)
    spearman_p: float | None = column(format=".4f", default=None)
    n: int | None = column(format="d", default=None)


def correlation_test(x: npt.ArrayLike, y: npt.ArrayLike) -> CorrelationTest:
    """Correlate the points of which both numbers are finite; four at least."""
    points = np.stack([np.asarray(x, dtype=float), np.asarray(y, dtype=float)])
    points = points[:, np.isfinite(points).all(0)]
    if points.shape[1] < _MIN_POINTS or (np.ptp(points, axis=1) == 0).any():
        return CorrelationTest()
    linear, ranked = scipy.stats.pearsonr(*points), scipy.stats.spearmanr(*points)
    interval = linear.confidence_interval()
    test = CorrelationTest(
        pearson=float(linear.statistic), low=float(interval.low), high=float(interval.high),
        pearson_p=float(linear.pvalue), spearman=float(ranked.statistic),
        spearman_p=float(ranked.pvalue), n=points.shape[1],
    )  # fmt: skip
    return test if np.isfinite(astuple(test)).all() else CorrelationTest()


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
    formats, n2 = columns_of(CorrelationTest)[2], profiles.settings.range_scalings[0]
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
            test = correlation_test(x, y)
            yield {"shuffle": level, "layer": layer, "n2": n2, **asdict(test)}


def _spearman_rows(profiles: TokenProfiles, dimension_loss: list[Row]) -> Iterator[Row]:
    """Yield rho of ID and loss (paper, table 1), which their logarithms have, too.

    The paper's prompt level by ESS, another estimator of the intrinsic dimension, is left out.
    """
    found = [{"cloud": "tokens", **row} for row in dimension_loss if row["shuffle"] == 0]
    corpora = profiles.corpora
    for layer, rows in corpora.groupby("layer", sort=False) if len(corpora) else ():
        for n2 in profiles.settings.range_scalings:
            test = correlation_test(rows[f"dimension n2={n2}"], rows["loss"])
            found.append({"cloud": "prompts", "layer": layer, "n2": n2, **asdict(test)})
    for row in found:
        rho = {"spearman": row["spearman"], "p": row["spearman_p"], "n": row["n"]}
        yield {**{key: row[key] for key in ("cloud", "layer", "n2")}, **rho}
