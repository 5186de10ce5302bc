"""Time and memory of matching one layer's features with three predecessors, on random decoders.

    python benchmarks/feature_matching.py

The size is that of Gemma Scope's 16k SAEs of Gemma 2 2B. Each row is compared with the bare matrix
products of that size in the same run, which hold all cosines at once. The shortest of several runs
is shown, and the peak memory beyond the decoders. On a shared machine processor seconds are more
reliable than wall-clock time.
"""

from __future__ import annotations

import resource
import time
from collections.abc import Callable
from functools import partial

import torch
from jsonargparse import auto_cli
from torch import Tensor

from lincorr_lightning.flow.matching import match_features
from lincorr_lightning.results.table import markdown_table


def seconds(work: Callable[[], object], device: str) -> tuple[float, float]:
    """Return the wall-clock and the processor seconds of a call, device work included."""
    start, own = time.perf_counter(), time.process_time()
    work()
    if device != "cpu":
        torch.accelerator.synchronize()
    return time.perf_counter() - start, time.process_time() - own


def peak_mib(device: str) -> float:
    """Return the highest memory use so far, of the process or of the device."""
    if device != "cpu":
        return torch.cuda.max_memory_allocated() / 2**20
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10


def multiply(target: Tensor, sources: list[Tensor], out: Tensor) -> None:
    """Compute the bare products."""
    for source in sources:
        torch.mm(target, source.T, out=out)


def main(
    n_features: int = 16_384,
    width: int = 2_304,
    n_layers: int = 26,
    ks: tuple[int, ...] = (1, 5),
    threads: int = 2,
    repeats: int = 2,
    device: str = "cpu",
) -> None:
    """Print the table.

    Args:
        n_features: Number of features of each SAE.
        width: Width of the LM.
        n_layers: Number of layers to extrapolate to; the first has two predecessors, the others
            three.
        ks: Numbers of predecessors kept at each hook point.
        threads: Number of processor threads.
        repeats: Number of runs of each row; the matching has one more.
        device: Device, as cpu or cuda.
    """
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    target, *sources = [torch.randn(n_features, width, device=device) for _ in range(4)]
    small = torch.randn(64, width, device=device)
    multiply(small, [small], small @ small.T)  # libraries allocate and choose at the first call
    match_features(small, small, 5)

    before = peak_mib(device)
    times: dict[str, list[tuple[float, float]]] = {}
    memory: dict[str, float] = {}

    def measure(name: str, work: Callable[[], object]) -> None:
        times.setdefault(name, []).append(seconds(work, device))
        memory.setdefault(name, peak_mib(device) - before)

    def match(k: int) -> None:
        for source in sources:
            match_features(target, source, k)

    bare = "bare products"
    for k in ks:  # once before the whole matrix is held, which is not to count as theirs
        measure(f"top-{k}", partial(match, k))
    whole = torch.zeros(n_features, n_features, device=device)
    for _ in range(repeats):
        measure(bare, lambda: multiply(target, sources, whole))
        for k in ks:
            measure(f"top-{k}", partial(match, k))

    least = {
        name: [min(column) for column in zip(*runs, strict=True)] for name, runs in times.items()
    }
    share = (3 * n_layers - 1) / 3
    rows = []
    for name in (bare, *(f"top-{k}" for k in ks)):
        clock, own = least[name]
        row = [f"{clock:.1f}", f"{clock / least[bare][0]:.2f}"]
        row += [f"{own:.1f}", f"{own / least[bare][1]:.2f}"]
        row += ["" if name == bare else f"{memory[name]:,.0f}", f"{clock * share:,.0f}"]
        rows.append([name, *row])
    where = f"{threads} threads" if device == "cpu" else torch.cuda.get_device_name()
    print(f"{n_features:,} features of width {width:,} against three times as many; {where}\n")
    columns = ["", "s per layer", "x bare", "processor s", "x bare", "MiB beyond decoders"]
    columns += [f"s for {n_layers} layers"]
    print(markdown_table(columns, rows))


if __name__ == "__main__":
    auto_cli(main)
