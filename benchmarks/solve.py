"""Fitting a map against single LAPACK (or cuSOLVER) calls of the same size.

    python benchmarks/solve.py --threads 2

takes the logits of a source with `n_source` labels and of `n_target` target labels over
`n_subjects` subjects. Ours fits from second moments, of minimum norm also where the source has
fewer directions than labels, and for any number of ridge strengths. Beside it: one
`torch.linalg.solve` of the same normal equations (which a source of full rank needs), and one
`torch.linalg.lstsq` on the data itself. The least of some repeats is shown, and how far
predictions are from those of `lstsq`, relative to their spread.
"""

from __future__ import annotations

import platform
import time
from collections.abc import Callable

import torch
from jsonargparse import auto_cli
from torch import Tensor

from lincorr_lightning.functional import LeastSquares
from lincorr_lightning.results.table import markdown_table


def timed(work: Callable[[], Tensor], repeats: int, device: str) -> tuple[Tensor, float]:
    """What `work` returns, and the seconds it took: the least of some repeats."""
    seconds = []
    for _ in range(repeats + 1):
        start = time.perf_counter()
        result = work()
        if device == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    return result, min(seconds[1:])  # the first one warms up


def main(
    n_source: int = 242,
    n_targets: tuple[int, ...] = (242, 2_000, 5_000),
    n_subjects: int = 5_000,
    threads: int = 1,
    repeats: int = 3,
    device: str = "cpu",
) -> None:
    """Print the table.

    Args:
        n_source: Labels of the source.
        n_targets: Labels of all its targets together.
        n_subjects: Subjects of the fit half.
        threads: Number of CPU threads.
        repeats: Number of runs of each row.
        device: Device, cpu or cuda.
    """
    torch.set_num_threads(threads)
    machine = torch.cuda.get_device_name() if device == "cuda" else f"{threads} thread(s)"
    print(f"{platform.machine()}, {machine}, torch {torch.__version__}, float64\n")
    random = torch.Generator().manual_seed(0)
    rows = []
    for n_target in n_targets:
        x = torch.randn(n_subjects, n_source, generator=random, dtype=torch.float64)
        y = x @ torch.randn(n_source, n_target, generator=random, dtype=torch.float64)
        y += torch.randn(n_subjects, n_target, generator=random, dtype=torch.float64)
        x, y = x.to(device), y.to(device)
        x, y = x - x.mean(0), y - y.mean(0)
        xx, xy = x.T @ x, x.T @ y
        ways: dict[str, Callable[[], Tensor]] = {
            "ours, from moments": lambda xx=xx, xy=xy: LeastSquares(xx, xy).weight(0.0).T,  # type: ignore[misc]
            "linalg.solve, from moments": lambda xx=xx, xy=xy: torch.linalg.solve(xx, xy),  # type: ignore[misc]
            "linalg.lstsq, from the data": lambda x=x, y=y: torch.linalg.lstsq(x, y).solution,  # type: ignore[misc]
        }
        found = {name: timed(work, repeats, device) for name, work in ways.items()}
        exact, _ = found["linalg.lstsq, from the data"]
        _, ours = found["ours, from moments"]
        few = x[:100]
        for name, (weight, seconds) in found.items():
            far = (few @ (weight - exact)).norm() / (few @ exact).norm()
            rows.append(
                [f"{n_source} to {n_target:,}", name, f"{1000 * seconds:.1f} ms",
                 f"{seconds / ours:.2f}x", f"{float(far):.0e}"]
            )  # fmt: skip
    print(markdown_table(("labels", "way", "time", "of ours", "differs by"), rows))


if __name__ == "__main__":
    auto_cli(main)
