"""All pairs of all prompts from one joint set of statistics, against one regression after another.

    python -m benchmarks.speed.all_pairs

takes random statistics with the domain sizes of all 110 prompts that the paper prints, solves W and
b of all ordered pairs, and prints seconds and peak memory. Beside it the published way (one
scikit-learn regression per target label, on the rows), measured on three pairs and extrapolated.
"""

from __future__ import annotations

import resource
import time
from itertools import permutations

import numpy as np
import torch
from jsonargparse import auto_cli
from sklearn.linear_model import LinearRegression

from benchmarks.common import markdown_table
from lincorr_lightning import Catalogue
from lincorr_lightning.functional import LeastSquares

_MEASURED = 3


def peak_gib() -> float:
    """Return the peak memory of this process so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def statistics(n_columns: int, seed: int) -> torch.Tensor:
    """Return a scatter matrix of full rank: 2,000 rows with a common factor, and a ridge."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(2000, n_columns, generator=generator, dtype=torch.float64)
    rows += 3 * torch.randn(2000, 1, generator=generator, dtype=torch.float64)
    scatter = rows.T @ rows
    scatter.diagonal().add_(2000)
    return scatter


def solve_all(scatter: torch.Tensor, mean: torch.Tensor, sizes: list[int]) -> int:
    """Solve W and b from every kind of knowledge to all others, and return the number of pairs."""
    n_pairs, start = 0, 0
    maps = []
    for size in sizes:
        source = slice(start, start + size)
        weight = LeastSquares(scatter[source, source], scatter[source]).weight(0.0)
        maps.append((weight, mean - weight @ mean[source]))  # all are held, as a run does
        n_pairs += len(sizes) - 1
        start += size
    return n_pairs


def published_seconds(sizes: list[int], n_fit: int, seed: int) -> tuple[float, list[str]]:
    """Return the mean seconds per pair of the published way, and those of three pairs.

    They are the medians of three equal parts of all pairs, ordered by the cost of a regression.
    """
    rng = np.random.default_rng(seed)
    pairs = sorted(permutations(sizes, 2), key=lambda pair: pair[0] ** 2 * pair[1])
    seconds, shown = [], []
    for part in range(_MEASURED):
        n_source, n_target = pairs[(2 * part + 1) * len(pairs) // (2 * _MEASURED)]
        x, y = rng.normal(size=(n_fit, n_source)), rng.normal(size=(n_fit, n_target))
        start = time.perf_counter()
        for label in range(n_target):
            LinearRegression().fit(x, y[:, label])
        seconds.append(time.perf_counter() - start)
        shown.append(f"{n_source} x {n_target}: {seconds[-1]:.1f} s")
    return float(np.mean(seconds)), shown


def main(n_fit: int = 5000, scale: float = 1.0, seed: int = 0) -> None:
    """Time both ways.

    Args:
        n_fit: Number of subjects of the fit half; only the published way depends on it.
        scale: Factor of the domain sizes; below 1 for a quick look.
        seed: Seed of the statistics.
    """
    answers = [len(knowledge.answers) for knowledge in Catalogue.load().select(["all"])]
    sizes = [max(2, round(scale * n)) for n in answers]
    scatter = statistics(sum(sizes), seed)
    mean = torch.zeros(sum(sizes), dtype=torch.float64)
    start = time.perf_counter()
    n_pairs = solve_all(scatter, mean, sizes)
    ours = time.perf_counter() - start
    peak = peak_gib()
    theirs, shown = published_seconds(sizes, n_fit, seed)
    print(
        f"{len(sizes)} kinds of knowledge, {sum(sizes):,} labels, {n_pairs:,} pairs, "
        f"{torch.get_num_threads()} thread(s), torch {torch.__version__}\n"
        f"published way, {n_fit:,} subjects, measured: {'; '.join(shown)}\n"
    )
    rows = [
        ["published, extrapolated", f"{theirs * n_pairs:,.0f}", ""],
        ["ours, from existing statistics", f"{ours:.1f}", f"{peak:.1f} GiB"],
    ]
    print(markdown_table(("way", "seconds", "peak memory"), rows))


if __name__ == "__main__":
    auto_cli(main, as_positional=False)
