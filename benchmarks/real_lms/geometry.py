"""The tables of docs/geometry.md: intrinsic dimension of texts as they are and shuffled.

    python -m benchmarks.real_lms.geometry
    python -m benchmarks.real_lms.geometry --run RUN

reads the files of ``run.py`` and ``token_geometry_1024.npz``, which has the observables of each
text of 1,024 tokens on SmolLM2; RUN is the folder of a run of TokenGeometry whose observables are
kept there first. Levels S of shuffling cut a text into 4^S blocks.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from jsonargparse import auto_cli
from numpy.typing import NDArray
from pandas import Series
from scipy import stats

from benchmarks import common
from benchmarks.common import Estimate
from benchmarks.real_lms.run import REAL_LMS
from benchmarks.real_lms.tables import LMS, load
from lincorr_lightning.results.table import Table

FILE = REAL_LMS / "smollm2-135m" / "token_geometry_1024.npz"
SCALES = (2, 8, 32, 128)
DIMENSIONS = tuple(f"dimension n2={n2}" for n2 in SCALES)
OVERLAP = "overlap k=2"
COSINE = "cosine_mean"
LEVELS = {
    "level": "S",
    "dimension": "ID (2NN)",
    "more": "ID, less that of S = 0",
    "higher": "layers with a higher ID",
    "last_cosine": "cosine, last layer",
}
HEADINGS = {
    "peak": "peak layer",
    "dimension": "ID at the peak",
    "last": "last layer",
    "higher": "layers with a higher ID",
    "lower": "with a lower ID",
    "r": "r of log ID and log loss there",
    "r_news": "within news",
}
FORMATS = {
    **dict.fromkeys(("level", "n2", "peak", "higher", "lower"), "d"),
    **dict.fromkeys(("loss", "dimension", "more", "overlap", "last_cosine"), ".2f"),
    **dict.fromkeys(("last", "r", "r_news"), ".2f"),
}
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


def shuffling(profiles: dict[str, Array]) -> Iterator[dict[str, Any]]:
    """Yield a row for each level, at the layer where the dimension of texts as they are peaks."""
    dimension = profiles[DIMENSIONS[0]]
    peak = int(dimension[:, 0].mean(0).argmax())
    for level, loss in enumerate(profiles["loss"].mean(0)):
        change = dimension[:, level] - dimension[:, 0]
        yield {
            "level": level,
            "loss": loss,
            "layer": peak + 1,
            "dimension": dimension[:, level, peak].mean(),
            "more": common.mean_estimate(Series(change[:, peak])) if level else None,
            "higher": beyond(change)[0] if level else None,
            "overlap": profiles[OVERLAP][:, level, peak].mean(),
            "cosine": profiles[COSINE][:, level, peak].mean(),
            "last_cosine": profiles[COSINE][:, level, -1].mean(),
        }


def scales(profiles: dict[str, Array], corpora: NDArray[np.str_]) -> Iterator[dict[str, Any]]:
    """Yield a row for each range scaling: the dimension by layer, and its r with texts' loss.

    `higher` and `lower` count layers of which shuffling all tokens changes the dimension.
    """
    log_loss = np.log(profiles["loss"][:, 0])
    chosen = {f"_{corpus}": corpora == corpus for corpus in ("news", "essays")}
    chosen = {"": np.full(len(corpora), True), **chosen}
    for n2, name in zip(SCALES, DIMENSIONS, strict=True):
        mean = profiles[name].mean(0)
        peak = int(mean[0].argmax())
        higher, lower = beyond(profiles[name][:, -1] - profiles[name][:, 0])
        logs = np.log(profiles[name][:, 0].T)
        tests = {
            corpus: [stats.pearsonr(layer[texts], log_loss[texts]) for layer in logs]
            for corpus, texts in chosen.items()
        }
        at_peak = {corpus: test[peak] for corpus, test in tests.items()}
        yield {
            "n2": n2,
            "peak": peak + 1,
            "first": mean[0, 0],
            "dimension": mean[0, peak],
            "last": mean[0, -1],
            "shuffled": mean[-1, peak],
            "higher": higher,
            "lower": lower,
            **{
                f"r{corpus}": Estimate(test.statistic, *test.confidence_interval())
                for corpus, test in at_peak.items()
            },
            **{
                f"significant{corpus}": sum(test.pvalue < 0.01 for test in tests[corpus])
                for corpus in ("", "_news")
            },
        }


def peaks(results: Path) -> Iterator[dict[str, Any]]:
    """Yield a row for each LM: where the dimension (2NN) of texts of 256 tokens peaks."""
    for lm in LMS:
        if found := load(lm, "token_geometry", results):
            levels = [np.array(level["dimension"]["2"]) for level in found["shuffles"]]
            at = int(levels[0].argmax())
            yield {
                "lm": lm,
                "texts": found["n_prompts"],
                "layers": len(levels[0]),
                "peak": at + 1,
                "dimension": levels[0][at],
                "shuffled": levels[-1][at],
                "higher": int((levels[-1] > levels[0]).sum()),
            }


def tables(results: Path, file: Path) -> list[Table]:
    """Return all tables."""
    with np.load(file) as arrays:
        profiles = {name: arrays[name].astype(float) for name in arrays if name != "corpus"}
        corpora = arrays["corpus"]
    by_scale = scales(profiles, corpora)
    return [
        Table.of("geometry_shuffled", shuffling(profiles), headings=LEVELS, formats=FORMATS),
        Table.of("geometry_scales", by_scale, headings=HEADINGS, formats=FORMATS),
        Table.of("geometry_lms", peaks(results)),
    ]


def documented(found: list[Table]) -> dict[str, str]:
    """Return what the document shows of the tables, by their markers."""
    shuffled, by_scale, _ = found
    return {
        "geometry_shuffled": common.shown(
            shuffled, "level loss dimension more higher overlap last_cosine"
        ),
        "geometry_scales": common.shown(by_scale, "n2 peak dimension last higher lower r r_news"),
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
