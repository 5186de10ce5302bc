"""The tables of docs/geometry.md: intrinsic dimension of texts as they are and shuffled.

    python -m benchmarks.real_lms.geometry
    python -m benchmarks.real_lms.geometry --run RUN

reads the files of ``run.py`` and ``token_geometry_1024.npz``, which has the observables of each
text of 1,024 tokens on SmolLM2; RUN is the folder of a run of TokenGeometry whose observables are
kept there first. Levels S of shuffling cut a text into 4^S blocks.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from jsonargparse import auto_cli
from numpy.typing import NDArray
from pandas import Series
from scipy import stats

from benchmarks import common
from benchmarks.common import Estimate
from benchmarks.real_lms.run import REAL_LMS
from benchmarks.real_lms.tables import LMS, load
from lincorr_lightning.results.table import Table, column

FILE = REAL_LMS / "smollm2-135m" / "token_geometry_1024.npz"
SCALES = (2, 8, 32, 128)
DIMENSIONS = tuple(f"dimension n2={n2}" for n2 in SCALES)
OVERLAP = "overlap k=2"
COSINE = "cosine_mean"
Array = NDArray[np.float64]


def keep(run: Path) -> None:
    """Write observables, ``(n_texts, n_levels, n_layers)``, and each text's losses and corpus."""
    rows, texts = (
        common.read_csv(run / "tables" / f"{name}.csv").set_index(["prompt", "shuffle", *more])
        for name, more in (("profiles", ["layer"]), ("prompts", []))
    )
    shape = [len(level) for level in rows.index.remove_unused_levels().levels]
    arrays = {
        name: rows[name].unstack().to_numpy(np.float32).reshape(shape)
        for name in (*DIMENSIONS, OVERLAP, COSINE)
    }
    arrays["loss"] = texts.loss.unstack().to_numpy(np.float32)
    np.savez_compressed(FILE, corpus=texts.corpus.unstack()[0].to_numpy(str), **arrays)


def beyond(differences: Array) -> tuple[int, int]:
    """Count the layers whose mean over texts is above and below 0 by more than its error.

    The error is the 95 % interval of Student's t.
    """
    test = stats.ttest_1samp(differences, 0)
    low, high = test.confidence_interval()
    return int((low > 0).sum()), int((high < 0).sum())


@dataclass(frozen=True)
class Shuffling:
    """A level of shuffling, at the layer where the dimension (2NN) of texts as they are peaks."""

    level: int = column("S", "d")
    loss: float = column(format=".2f")
    layer: int = column(format="d")
    dimension: float = column("ID (2NN)", ".2f")
    more: Estimate | None = column("ID, less that of S = 0", ".2f")
    higher: int | None = column("layers with a higher ID", "d")
    overlap: float = column(format=".2f")
    cosine: float = column(format=".2f")
    last_cosine: float = column("cosine, last layer", ".2f")


def shuffling(profiles: dict[str, Array]) -> Iterator[Shuffling]:
    """Yield a row for each level of shuffling."""
    dimension = profiles[DIMENSIONS[0]]
    peak = int(dimension[:, 0].mean(0).argmax())
    for level, loss in enumerate(profiles["loss"].mean(0)):
        change = dimension[:, level, peak] - dimension[:, 0, peak]
        yield Shuffling(
            level,
            float(loss),
            peak + 1,
            dimension[:, level, peak].mean(),
            common.mean_estimate(Series(change)) if level else None,
            beyond(dimension[:, level] - dimension[:, 0])[0] if level else None,
            profiles[OVERLAP][:, level, peak].mean(),
            profiles[COSINE][:, level, peak].mean(),
            profiles[COSINE][:, level, -1].mean(),
        )


@dataclass(frozen=True)
class Scale:
    """A range scaling: the dimension by layer, and its correlation with the loss of texts."""

    n2: int = column("n2", "d")
    peak: int = column("peak layer", "d")
    first: float = column("ID, first layer", ".2f")
    dimension: float = column("ID at the peak", ".2f")
    last: float = column("last layer", ".2f")
    shuffled: float = column("at the peak, all tokens shuffled", ".2f")
    higher: int = column("layers with a higher ID", "d")
    lower: int = column("with a lower ID", "d")
    r: Estimate = column("r of log ID and log loss there", ".2f")
    r_news: Estimate = column("within news", ".2f")
    r_essays: Estimate = column("within essays", ".2f")
    significant: int = column("layers with p < .01", "d")
    significant_news: int = column("within news", "d")


def scales(profiles: dict[str, Array], corpora: NDArray[np.str_]) -> Iterator[Scale]:
    """Yield a row for each range scaling."""
    log_loss = np.log(profiles["loss"][:, 0])
    for n2, name in zip(SCALES, DIMENSIONS, strict=True):
        mean = profiles[name].mean(0)
        peak = int(mean[0].argmax())
        logs = np.log(profiles[name][:, 0])
        tests = [
            [stats.pearsonr(logs[chosen, layer], log_loss[chosen]) for layer in range(len(mean[0]))]
            for chosen in (np.full(len(corpora), True), corpora == "news", corpora == "essays")
        ]
        at_peak = [test[peak] for test in tests]
        yield Scale(
            n2,
            peak + 1,
            mean[0, 0],
            mean[0, peak],
            mean[0, -1],
            mean[-1, peak],
            *beyond(profiles[name][:, -1] - profiles[name][:, 0]),
            *(Estimate(test.statistic, *test.confidence_interval()) for test in at_peak),
            *(sum(test.pvalue < 0.01 for test in layers) for layers in tests[:2]),
        )


@dataclass(frozen=True)
class Peak:
    """Where the dimension (2NN) of texts of 256 tokens peaks on an LM, and what shuffling does."""

    lm: str = column("LM")
    texts: int = column(format="d")
    layers: int = column(format="d")
    peak: int = column("peak layer", "d")
    dimension: float = column("ID (2NN)", ".2f")
    shuffled: float = column("shuffled", ".2f")
    higher: int = column("layers with a higher mean", "d")


def peaks(results: Path) -> Iterator[Peak]:
    """Yield a row for each LM."""
    for lm in LMS:
        found = load(lm, "token_geometry", results)
        if found:
            levels = [np.array(level["dimension"]["2"]) for level in found["shuffles"]]
            at = int(levels[0].argmax())
            yield Peak(
                lm,
                found["n_prompts"],
                len(levels[0]),
                at + 1,
                levels[0][at],
                levels[-1][at],
                int((levels[-1] > levels[0]).sum()),
            )


def tables(results: Path, file: Path) -> list[Table]:
    """Return all tables."""
    with np.load(file) as arrays:
        profiles = {name: arrays[name].astype(float) for name in arrays if name != "corpus"}
        corpora = arrays["corpus"]
    return [
        Table.of("geometry_shuffled", shuffling(profiles)),
        Table.of("geometry_scales", scales(profiles, corpora)),
        Table.of("geometry_lms", peaks(results)),
    ]


def documented(found: list[Table]) -> dict[str, str]:
    """Return what the document shows of the tables, by their markers."""
    shuffled, by_scale, _ = found
    return {
        "geometry_shuffled": common.shown(
            shuffled, "level loss dimension more higher overlap last_cosine"
        ),
        "geometry_scales": common.shown(
            by_scale,
            "n2 peak dimension last higher lower r r_news",
        ),
    }


def main(run: Path | None = None) -> None:
    """Write the tables, and put them into the document.

    Args:
        run: Folder of a run, whose observables are kept first.
    """
    if run is not None:
        keep(run)
    found = tables(REAL_LMS, FILE)
    for table in found:
        common.write_table(table, REAL_LMS / "tables")
    common.place_tables(documented(found))


if __name__ == "__main__":
    auto_cli(main)
