"""The tables of docs/geometry.md on texts of 1,024 tokens, shuffled or as they are, by SmolLM2.

    python -m benchmarks.real_lms.shuffled_geometry [RUN_OF_SHUFFLED_TEXTS]

RUN is the folder of a run of TokenGeometry over several levels of shuffling; without one, its
numbers are those of ``token_geometry_shuffled_1024.npz``. ``run.py`` has the options of both runs.
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
FILE = FOLDER / "token_geometry_shuffled_1024.npz"
SCALES = (2, 8, 32, 128)
KEPT = [*(f"dimension n2={n2}" for n2 in SCALES), "overlap k=2", "cosine_mean"]
Array = NDArray[np.float64]


def keep(run: Path) -> None:
    """Write the observables of each text, level and layer, ``(n_texts, n_levels, n_layers)``."""
    rows = common.read_csv(run / "tables" / "profiles.csv").set_index(
        ["prompt", "shuffle", "layer"]
    )
    shape = [len(level) for level in rows.index.remove_unused_levels().levels]
    found = {name: rows[name].unstack().to_numpy().reshape(shape) for name in KEPT}
    np.savez_compressed(FILE, **{name: x.astype(np.float32) for name, x in found.items()})


def interval(differences: Array) -> tuple[Array, Array]:
    """Return the means over texts, and half of their 95 % interval (Student's t)."""
    n = len(differences)
    half = stats.t.ppf(0.975, n - 1) * differences.std(axis=0, ddof=1) / np.sqrt(n)
    return differences.mean(0), half


def beyond(differences: Array) -> tuple[int, int]:
    """Count the layers whose mean is above and below 0 by more than its interval."""
    mean, half = interval(differences)
    return int((mean > half).sum()), int((mean < -half).sum())


def levels(profiles: dict[str, Array], losses: list[float]) -> Iterator[list[Any]]:
    """Yield a row for each level of shuffling, beside the same texts as they are."""
    dimensions, overlap, cosine = profiles[KEPT[0]], profiles[KEPT[4]], profiles[KEPT[5]]
    peak = int(dimensions[:, 0].mean(0).argmax())
    for level, loss in enumerate(losses):
        row = [level, f"{loss:.2f}", peak + 1, *(
            f"{x[:, level, at].mean():.2f}"
            for x, at in ((dimensions, peak), (overlap, peak), (cosine, peak), (cosine, -1))
        )]  # fmt: skip
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


def losses_of(results: dict[str, Any]) -> Iterator[list[Any]]:
    """Yield a row for each range scaling: dimension, and its correlation with the loss."""
    for n2 in SCALES:
        own = results["shuffles"][0]["dimension"][str(n2)]
        peak, tests = int(np.argmax(own)), [
            one for one in results["dimension_loss"] if (one["shuffle"], one["n2"]) == (0, n2)
        ]  # fmt: skip
        shown = "{pearson:.2f} ({low:.2f} to {high:.2f})".format(**tests[peak])
        clear = sum(one["pearson_p"] < 0.01 for one in tests)
        ends = [1, f"{own[0]:.2f}", peak + 1, f"{own[peak]:.2f}", len(own), f"{own[-1]:.2f}"]
        yield [n2, *ends, shown, clear]


def tables() -> dict[str, str]:
    """Return the tables, by their markers."""
    with np.load(FILE) as file:
        profiles = {name: file[name].astype(float) for name in file}
    shuffled, plain = (
        common.read_numbers(FOLDER / f"token_geometry_{name}1024.json")["results"]
        for name in ("shuffled_", "")
    )
    losses = [one["loss"] for one in shuffled["shuffles"]]
    ends = ["first layer", "ID", "peak layer"]
    columns = {
        "geometry_shuffled": [
            "S", "loss", "layer", "ID (2NN)", "ID, less that of S = 0", "overlap (k = 2)", "cosine",
            "cosine, last layer", "layers with higher ID, by n2", "beyond the error: higher, lower",
            "overlap beyond the error: lower, higher",
        ],
        "geometry_scales": ["n2", *ends, "ID, by level of shuffling", "last layer", "ID"],
        "geometry_loss": [
            "n2", *ends, "ID", "last layer", "ID", "r of log ID and log loss at the peak",
            "p < .01 in",
        ],
    }  # fmt: skip
    rows = levels(profiles, losses), scales(profiles), losses_of(plain)
    made = zip(columns.items(), rows, strict=True)
    return {name: common.markdown_table(own, each) for (name, own), each in made}


def main(run: Path | None = None) -> None:
    """Put the tables into the document.

    Args:
        run: Folder of a run over shuffled texts, whose observables are kept first.
    """
    if run is not None:
        keep(run)
    common.place_tables(tables())


if __name__ == "__main__":
    auto_cli(main)
