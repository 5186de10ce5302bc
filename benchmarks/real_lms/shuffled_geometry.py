"""The tables of docs/geometry.md on texts of 1,024 tokens, as they are and shuffled, by SmolLM2.

    python -m benchmarks.real_lms.shuffled_geometry [--run RUN]

RUN is the folder of a run of TokenGeometry over several levels of shuffling; without one, its
numbers are those of ``token_geometry_1024.npz``. ``run.py`` has its options.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from jsonargparse import auto_cli
from numpy.typing import NDArray
from scipy import stats

from benchmarks import common
from benchmarks.real_lms.tables import REAL_LMS

FOLDER = REAL_LMS / "smollm2-135m"
FILE = FOLDER / "token_geometry_1024.npz"
SCALES = (2, 8, 32, 128)
KEPT = [*(f"dimension n2={n2}" for n2 in SCALES), "overlap k=2", "cosine_mean"]
Array = NDArray[np.float64]


def keep(run: Path) -> None:
    """Write observables, ``(n_texts, n_levels, n_layers)``, and each text's losses and corpus."""
    rows, texts = (
        common.read_csv(run / "tables" / f"{name}.csv").set_index(["prompt", "shuffle", *more])
        for name, more in (("profiles", ["layer"]), ("prompts", []))
    )
    shape = [len(level) for level in rows.index.remove_unused_levels().levels]
    found = {name: rows[name].unstack().to_numpy().reshape(shape) for name in KEPT}
    found["loss"] = texts.loss.unstack().to_numpy()
    arrays = {name: x.astype(np.float32) for name, x in found.items()}
    corpora = texts.corpus.unstack()[0].to_numpy(str)
    np.savez_compressed(FILE, corpus=corpora, **arrays)


def interval(differences: Array) -> tuple[Array, Array]:
    """Return the means over texts, and half of their 95 % interval (Student's t)."""
    n = len(differences)
    half = stats.t.ppf(0.975, n - 1) * differences.std(axis=0, ddof=1) / np.sqrt(n)
    return differences.mean(0), half


def beyond(differences: Array) -> tuple[int, int]:
    """Count the layers whose mean is above and below 0 by more than its interval."""
    mean, half = interval(differences)
    return int((mean > half).sum()), int((mean < -half).sum())


def levels(profiles: dict[str, Array]) -> Iterator[list[Any]]:
    """Yield a row for each level of shuffling, beside the same texts as they are."""
    dimensions, overlap, cosine = profiles[KEPT[0]], profiles[KEPT[4]], profiles[KEPT[5]]
    peak = int(dimensions[:, 0].mean(0).argmax())
    for level, loss in enumerate(profiles["loss"].mean(0)):
        row = [
            level,
            f"{loss:.2f}",
            peak + 1,
            *(
                f"{x[:, level, at].mean():.2f}"
                for x, at in ((dimensions, peak), (overlap, peak), (cosine, peak), (cosine, -1))
            ),
        ]
        if not level:
            yield [*row[:4], "", *row[4:], "", "", ""]
            continue
        more = [profiles[name][:, level] - profiles[name][:, 0] for name in KEPT]
        mean, half = (x[peak] for x in interval(more[0]))
        higher = " / ".join(f"{(x.mean(0) > 0).sum()}" for x in more[:4])
        counts = " / ".join("{}, {}".format(*beyond(x)) for x in more[:4])
        # No layer follows the last one.
        lower = "{1}, {0}".format(*beyond(more[4][:, :-1]))
        yield [*row[:4], f"{mean:.2f} ± {half:.2f}", *row[4:], higher, counts, lower]


def scales(profiles: dict[str, Array]) -> Iterator[list[Any]]:
    """Yield a row for each range scaling: the first layer, that of the peak, and the last one."""
    for n2 in SCALES:
        mean = profiles[f"dimension n2={n2}"].mean(0)
        peak = int(mean[0].argmax())
        shown = " / ".join(f"{x:.2f}" for x in mean[:, peak])
        yield [
            n2,
            1,
            common.two(mean[0, 0]),
            peak + 1,
            shown,
            mean.shape[1],
            common.two(mean[0, -1]),
        ]


def correlations_with_loss(
    profiles: dict[str, Array], corpora: NDArray[np.str_]
) -> Iterator[list[Any]]:
    """Yield a row for each range scaling: r of log dimension and log loss, of texts as they are.

    Over all texts and within each corpus, at the layer of the peak; and in how many layers it is
    significant over all texts and over those of the largest corpus.
    """
    log_loss = np.log(profiles["loss"][:, 0])
    names = corpora_by_size(corpora)
    for n2 in SCALES:
        dimensions = profiles[f"dimension n2={n2}"][:, 0]
        peak, own = int(dimensions.mean(0).argmax()), np.log(dimensions)
        tests = [
            [stats.pearsonr(own[chosen, layer], log_loss[chosen]) for layer in range(own.shape[1])]
            for chosen in (np.full(len(corpora), True), *(corpora == name for name in names))
        ]
        shown = (
            "{:.2f} ({:.2f} to {:.2f})".format(
                each[peak].statistic, *each[peak].confidence_interval()
            )
            for each in tests
        )
        clear = (sum(test.pvalue < 0.01 for test in each) for each in tests[:2])
        yield [n2, peak + 1, *shown, " / ".join(map(str, clear))]


def corpora_by_size(corpora: NDArray[np.str_]) -> list[str]:
    """Return the names of the corpora, that of the most texts first."""
    names, counts = np.unique(corpora, return_counts=True)
    return names[np.argsort(-counts)].tolist()


def tables() -> dict[str, str]:
    """Return the tables, by their markers."""
    with np.load(FILE) as file:
        profiles = {name: file[name].astype(float) for name in (*KEPT, "loss")}
        corpora = file["corpus"]
    within = [f"within {name} (n = {(corpora == name).sum()})" for name in corpora_by_size(corpora)]
    columns = {
        "geometry_shuffled": [
            "S",
            "loss",
            "layer",
            "ID (2NN)",
            "ID, less that of S = 0",
            "overlap (k = 2)",
            "cosine",
            "cosine, last layer",
            "layers with higher ID, by n2",
            "beyond the error: higher, lower",
            "overlap beyond the error: lower, higher",
        ],
        "geometry_scales": [
            "n2",
            "first layer",
            "ID",
            "peak layer",
            "ID, by level of shuffling",
            "last layer",
            "ID",
        ],
        "geometry_loss": [
            "n2",
            "peak layer",
            "r of log ID and log loss there",
            *within,
            f"p < .01 in: all / {within[0].split()[1]}",
        ],
    }
    rows = levels(profiles), scales(profiles), correlations_with_loss(profiles, corpora)
    made = zip(columns.items(), rows, strict=True)
    return {name: common.markdown_table(own, each) for (name, own), each in made}


def main(run: Path | None = None) -> None:
    """Put the tables into the document.

    Args:
        run: Folder of a run, whose observables are kept first.
    """
    if run is not None:
        keep(run)
    common.place_tables(tables())


if __name__ == "__main__":
    auto_cli(main)
