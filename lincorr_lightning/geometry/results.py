"""The results of token geometry: numbers, tables and figures.

Imported at the end of a run only, since it takes pandas and matplotlib.
"""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import scipy
from pandas import DataFrame

from lincorr_lightning.geometry import figures as draw
from lincorr_lightning.geometry.token_clouds import TokenProfiles
from lincorr_lightning.results.results import Figure, Results
from lincorr_lightning.results.table import Mean, Table, column, number, percent, short_name, show

_MIN_POINTS = 4  # Fisher's interval needs as many


@dataclass(frozen=True)
class ShufflingLevel:
    """Means over the prompts at one shuffling level, at the first n2 and the k of the figures."""

    shuffle: int = column("cut in 4^S blocks, S")
    loss: float | None = column(format=".2f")
    entropy: float | None = column(format=".2f")
    dimension: float | None = column("intrinsic dimension, last layer", ".2f")
    peak_dimension: float | None = column("highest intrinsic dimension", ".2f")
    overlap: float | None = column("overlap, last two layers", ".2f")
    lowest_overlap: float | None = column("lowest overlap", ".2f")
    cosine: float | None = column("cosine, last layer", ".2f")
    peak_layer: int = column("layer of the highest intrinsic dimension", "d")


@dataclass(frozen=True)
class DimensionLoss:
    """Correlation of log intrinsic dimension and log loss, with its 95 % interval."""

    shuffle: int
    layer: int
    n2: int
    pearson: float | None = column(format=".2f", default=None)
    low: float | None = column(format=".2f", default=None)
    high: float | None = column(format=".2f", default=None)
    pearson_p: float | None = column(format=".4f", default=None)
    spearman: float | None = column(format=".2f", default=None)
    spearman_p: float | None = column(format=".4f", default=None)
    n: int | None = column(format="d", default=None)


def correlate(x: npt.ArrayLike, y: npt.ArrayLike) -> dict[str, Any]:
    """Return Pearson's r and Spearman's rho by the names of `DimensionLoss`.

    Of the points of which both numbers are finite; empty if there are fewer than four of these, or
    one of the numbers is constant.
    """
    points = np.stack([np.asarray(x, dtype=float), np.asarray(y, dtype=float)])
    points = points[:, np.isfinite(points).all(0)]
    if points.shape[1] < _MIN_POINTS or (np.ptp(points, axis=1) == 0).any():
        return {}
    linear = scipy.stats.pearsonr(*points)
    ranked = scipy.stats.spearmanr(*points)
    interval = linear.confidence_interval()
    numbers = {
        "pearson": float(linear.statistic),
        "low": float(interval.low),
        "high": float(interval.high),
        "pearson_p": float(linear.pvalue),
        "spearman": float(ranked.statistic),
        "spearman_p": float(ranked.pvalue),
        "n": points.shape[1],
    }
    return numbers if np.isfinite([*numbers.values()]).all() else {}


def token_geometry_results(profiles: TokenProfiles, lm: str) -> Results:
    """Return the results of `TokenGeometry` (Viswanathan et al., 2025, arXiv 2501.10573)."""
    settings = profiles.settings
    layers = profiles.layers["layer"].unique()
    means = layer_means(profiles)
    levels = [_level(profiles, means, level) for level in means["shuffle"].unique()]
    n2, k = settings.range_scalings[0], settings.shown_k
    summary = [_summarize(level, str(n2), str(k)) for level in levels]
    losses = profiles.prompts["loss"].repeat(len(layers)).to_numpy()
    dimension_loss = _correlations(profiles.layers.assign(loss=losses), settings.range_scalings)
    values = {
        "n_prompts": profiles.n_prompts,
        "n_skipped": profiles.n_skipped,
        "n_tokens": settings.n_tokens,
        "n_corpora": profiles.prompts["corpus"].nunique(),
        "layers": layers.tolist(),
        "range_scalings": settings.range_scalings,
        "ks": settings.ks,
        "shuffles": levels,
        "dimension_loss": [asdict(row) for row in dimension_loss],
    }
    scalars = {f"test/{name}": levels[0][name] for name in ("loss", "entropy")}
    logged = means[means["key"].isin(profiles.shown) & (means["shuffle"] == levels[0]["shuffle"])]
    for row in logged.itertuples():
        scalars[f"test/{str(row.key).replace(' ', '_')}/layer_{row.layer}"] = row.mean
    r = "Correlation of log intrinsic dimension and log loss over prompts"
    caption = (
        f"Token geometry by shuffling level, means over {profiles.n_prompts:,} prompts of "
        f"{settings.n_tokens:,} tokens ({profiles.n_skipped} too short)"
    )
    note = f"Intrinsic dimension at n2 = {n2}, overlap of the {k} nearest tokens."
    tables = [
        Table.of("levels", summary, ShufflingLevel, caption, note, headline=True),
        Table.of("dimension_loss", dimension_loss, DimensionLoss, r),
        *_prompt_tables(profiles, means),
    ]
    options = {
        "shown": list(profiles.shown),
        "n_prompts": profiles.n_prompts,
        "n_tokens": settings.n_tokens,
        "lm": short_name(lm),
    }
    caption = "Intrinsic dimension, overlap, cosine and angle by layer"
    by_layer = [table for table in tables if table.name == "layers"]
    figures = [Figure("profiles", caption, draw.profiles_figure, by_layer, options)]
    verdict = list(_verdict(summary, n2, dimension_loss, len(layers)))
    return Results("token_geometry", values, scalars, tables, figures, verdict=verdict)


def _verdict(
    levels: Sequence[ShufflingLevel], n2: int, losses: Sequence[DimensionLoss], n_layers: int
) -> Iterator[str]:
    written = levels[0]
    if written.peak_dimension is not None:
        yield (
            f"The tokens of a text span {show(written.peak_dimension, '.1f')} dimensions at most, "
            f"in layer {written.peak_layer} of {n_layers}, and {show(written.dimension, '.1f')} in "
            "the last."
        )
    if len(levels) > 1:
        highest = show(levels[-1].peak_dimension or 0, ".1f")
        yield f"With every token shuffled it is {highest} at most."
    at = [row for row in losses if (row.shuffle, row.layer, row.n2) == (0, written.peak_layer, n2)]
    if at and at[0].pearson is not None:
        low, high = at[0].low or 0, at[0].high or 0
        tells = "says nothing" if low <= 0 <= high else "goes with the loss"
        interval = f"{show(low, '.2f')} to {show(high, '.2f')}"
        yield (
            f"There it {tells}: r of both logarithms {show(at[0].pearson, '.2f')} over prompts "
            f"({percent(0.95)}: {interval})."
        )


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


def _level(profiles: TokenProfiles, means: DataFrame, level: int) -> dict[str, Any]:
    """Return the means over prompts at one level, by observable and setting; by layer in lists."""
    prompts = profiles.prompts[profiles.prompts["shuffle"] == level]
    values: dict[str, Any] = {"shuffle": int(level)}
    values |= {key: number(prompts[key].mean()) for key in prompts.columns[3:]}
    at_level = means[means["shuffle"] == level]
    for key in profiles.layers.columns[3:]:
        by_layer = [number(mean) for mean in at_level["mean"][at_level["key"] == key]]
        name, _, setting = key.partition(" ")
        if setting:
            values.setdefault(name, {})[setting.partition("=")[2]] = by_layer
        else:
            values[name] = by_layer
    return values


def _correlations(frame: DataFrame, range_scalings: Sequence[int]) -> list[DimensionLoss]:
    rows = []
    for (level, layer), points in frame.groupby(["shuffle", "layer"], sort=False):
        loss = np.log(points["loss"].where(points["loss"] > 0))
        for n2 in range_scalings:
            dimension = points[f"dimension n2={n2}"]
            numbers = correlate(np.log(dimension.where(dimension > 0)), loss)
            rows.append(DimensionLoss(int(level), int(layer), n2, **numbers))
    return rows


def _summarize(level: dict[str, Any], n2: str, k: str) -> ShufflingLevel:
    dimension = level["dimension"][n2]
    overlap = [value for value in level["overlap"][k] if value is not None] or [None]
    peak = int(np.argmax([value or 0 for value in dimension]))
    return ShufflingLevel(
        shuffle=level["shuffle"],
        loss=level["loss"],
        entropy=level["entropy"],
        dimension=dimension[-1],
        peak_dimension=dimension[peak],
        overlap=overlap[-1],
        lowest_overlap=min(overlap),
        cosine=level["cosine_mean"][-1],
        peak_layer=peak + 1,
    )


def _prompt_tables(profiles: TokenProfiles, means: DataFrame) -> list[Table]:
    dimension, overlap, cosine, _ = profiles.shown
    prompts = profiles.prompts
    layers = profiles.layers
    last = layers["layer"].max()
    caption = "Loss and entropy by prompt"
    by_prompt = Table(
        "prompts", prompts, caption, formats=dict.fromkeys(prompts.columns[3:], ".2f")
    )
    caption = "All observables by prompt, shuffling level and layer"
    by_layer = Table("profiles", layers, caption, formats=dict.fromkeys(layers.columns[3:], ".3f"))
    caption = "Observables by layer: mean and standard deviation over prompts"
    formats = {"mean": ".3f", "std": ".3f"}
    return [
        Table("layers", means.drop(columns="key"), caption, formats=formats),
        by_prompt.sampled("prompt", loss="loss", entropy="entropy"),
        by_layer.sampled(
            "prompt",
            dimension=Mean(dimension, where={"layer": int(last)}),
            overlap=Mean(overlap, where={"layer": int(last) - 1}),
            cosine=Mean(cosine, where={"layer": int(last)}),
        ),
    ]
