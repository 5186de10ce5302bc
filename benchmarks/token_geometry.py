"""Cost of token geometry: intrinsic dimension and overlap in all layers of a prompt.

    python -m venv dadapy && dadapy/bin/pip install dadapy==0.3.4
    python benchmarks/token_geometry.py --dadapy dadapy/bin/python

The size is that of an 8B LM and a prompt of 1,024 tokens; the hidden states are a random walk on a
curved cloud, unless a file is given. Each row is compared with the bare products of the same hidden
states. The minimum of several alternating runs is shown; memory is the peak beyond the hidden
states.

DADApy needs numpy < 2, and so an environment of its own. It computes the first layers only, and its
times are scaled to all layers. The naive overlap computes all distances of each layer with scipy,
sorts them, and loops over pairs of layers, ks and tokens. The last row does without the distances:
the same loop over the neighbors that DADApy has found for GRIDE.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from jsonargparse import auto_cli
from torch import Tensor

from lincorr_lightning.geometry.distances import NearestTokens, nearest_tokens
from lincorr_lightning.geometry.intrinsic_dimension import (
    RANGE_SCALINGS,
    intrinsic_dimension,
)
from lincorr_lightning.geometry.observables import consecutive_overlap
from lincorr_lightning.results.table import markdown_table

# Runs under the other interpreter.
DADAPY = """
import json, sys, time
import numpy as np
from dadapy import Data
from scipy.spatial.distance import cdist

folder, range_max, ks, n_jobs = json.loads(sys.argv[1])
layers = np.load(folder + "/hidden.npy")
times = [time.perf_counter()]

def overlap(neighbors):
    return [
        [[len(set(x[:k]) & set(y[:k])) / k for k in ks] for x, y in zip(a, b)]
        for a, b in zip(neighbors, neighbors[1:])
    ]

found = []
for layer in layers:
    cloud = Data(coordinates=layer, n_jobs=n_jobs)
    cloud.remove_identical_points()
    found.append(cloud.return_id_scaling_gride(range_max=range_max))
times.append(time.perf_counter())

neighbors = []
for layer in layers:
    distances = cdist(layer, layer)
    np.fill_diagonal(distances, np.inf)
    neighbors.append(np.argsort(distances, axis=1, kind="stable")[:, : max(ks)])
naive = overlap(neighbors)
times.append(time.perf_counter())

clouds = [Data(coordinates=layer, maxk=range_max, n_jobs=n_jobs) for layer in layers]
for cloud in clouds:
    cloud.compute_distances()
    cloud.return_id_scaling_gride(range_max=range_max)
overlap([cloud.dist_indices[:, 1:] for cloud in clouds])
times.append(time.perf_counter())

json.dump({
    "dimension": [ids.tolist() for ids, _, _ in found],
    "overlap": naive,
    "seconds": np.diff(times).tolist(),
}, open(folder + "/found.json", "w"))
"""


def random_walk(n_layers: int, n_tokens: int, width: int) -> Tensor:
    """Return layers that each add a curved step to the previous one, about a common direction."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.empty(n_layers, n_tokens, width)
    now = torch.randn(width, generator=generator).expand(n_tokens, width)
    for layer in range(n_layers):
        latent = torch.randn(n_tokens, 16, generator=generator)
        step = torch.sin(latent @ torch.randn(16, width, generator=generator) / 4)
        now = now + step + 0.05 * torch.randn(n_tokens, width, generator=generator)
        hidden[layer] = now
    hidden[:, 0] *= 50  # as the first token of a text often is
    return hidden


def run_dadapy(
    python: str, hidden: Tensor, range_max: int, ks: tuple[int, ...], threads: int
) -> dict[str, list[float]]:
    """Run DADApy under the interpreter that has it."""
    with tempfile.TemporaryDirectory() as folder:
        np.save(Path(folder) / "hidden.npy", hidden.numpy())
        arguments = json.dumps([folder, range_max, list(ks), threads])
        environment = os.environ | dict.fromkeys(
            ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), str(threads)
        )
        command = [python, "-W", "ignore", "-c", DADAPY, arguments]
        subprocess.run(command, check=True, env=environment)
        return json.loads((Path(folder) / "found.json").read_text(encoding="utf-8"))


def seconds(work: Callable[[], object], device: str) -> float:
    """Return the time of one call, including its work on the device."""
    start = time.perf_counter()
    work()
    if device != "cpu":
        torch.accelerator.synchronize()
    return time.perf_counter() - start


def peak_mib(device: str) -> float:
    """Return the peak memory of the process or of the device."""
    if device != "cpu":
        return torch.cuda.max_memory_allocated() / 2**20
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10


def now_mib(device: str) -> float:
    """Return the memory in use by the process or on the device."""
    if device != "cpu":
        return torch.cuda.memory_allocated() / 2**20
    pages = int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[1])
    return pages * resource.getpagesize() / 2**20


def main(
    n_layers: int = 32,
    n_tokens: int = 1_024,
    width: int = 4_096,
    hidden_states: Path | None = None,
    range_scalings: tuple[int, ...] = RANGE_SCALINGS,
    ks: tuple[int, ...] = (1, 2, 4, 8, 16, 31),
    dadapy: str | None = None,
    dadapy_layers: int = 3,
    threads: int = 2,
    repeats: int = 3,
    device: str = "cpu",
) -> None:
    """Print the table, and the largest difference from DADApy's numbers.

    Args:
        n_layers: Number of layers.
        n_tokens: Number of tokens of the prompt.
        width: Width of the hidden states.
        hidden_states: A .npy file (n_layers, n_tokens, width) to use instead of random ones.
        range_scalings: Range scalings of the intrinsic dimension.
        ks: Sizes of the neighborhoods whose overlap is taken.
        dadapy: A Python interpreter with DADApy; without it, its rows are left out.
        dadapy_layers: Number of layers that DADApy computes.
        threads: Number of CPU threads.
        repeats: Number of runs of each row.
        device: Such as cpu or cuda.
    """
    torch.set_num_threads(threads)
    if hidden_states is None:
        hidden = random_walk(n_layers, n_tokens, width)
    else:
        hidden = torch.from_numpy(np.load(hidden_states)).float()
    n_layers, n_tokens, width = hidden.shape
    hidden = hidden.to(device)
    deepest = max(*range_scalings, *ks)
    nearest: list[NearestTokens] = []
    found: list[Tensor] = []
    overlap: list[Tensor] = []

    def find() -> None:
        nearest[:] = [nearest_tokens(hidden, deepest)]

    def estimate() -> None:
        found[:] = [intrinsic_dimension(nearest[0], range_scalings)]

    def compare() -> None:
        overlap[:] = [consecutive_overlap(nearest[0], ks)]

    def multiply() -> None:
        for tokens in hidden:
            torch.matmul(tokens, tokens.mT)

    few = hidden[:1, :64, :64]  # libraries allocate and choose at the first call
    torch.matmul(few, few.mT)
    consecutive_overlap(nearest_tokens(few, 4), (1,))
    before = now_mib(device)
    times: dict[str, list[float]] = {}
    memory: dict[str, float] = {}
    bare, names = "bare products", ("nearest tokens", "intrinsic dimension", "overlap")
    for _ in range(repeats):
        for name, work in zip((*names, bare), (find, estimate, compare, multiply), strict=True):
            times.setdefault(name, []).append(seconds(work, device))
            memory.setdefault(name, peak_mib(device) - before)

    least = {name: min(runs) for name, runs in times.items()}
    together = sum(least[name] for name in names)
    order = {bare: least[bare], **{name: least[name] for name in names}, "all three": together}
    memory["all three"] = memory["overlap"]
    agreement = ""
    if dadapy is not None:
        part = hidden[:dadapy_layers].cpu()
        theirs = run_dadapy(dadapy, part, deepest, ks, threads)
        whole = n_layers / dadapy_layers
        gride, naive, shared = (part * whole for part in theirs["seconds"])
        order |= {"DADApy": gride, "naive overlap": naive, "DADApy, neighbors shared": shared}
        ranks = [2**i for i in range(1, int(np.log2(deepest)) + 1)]
        columns = [ranks.index(n2) for n2 in range_scalings]
        dimension = torch.tensor(theirs["dimension"]).double()[:, columns]
        ours = found[0][:dadapy_layers].cpu()
        far = float((ours / dimension - 1).abs().max())
        counted = torch.tensor(theirs["overlap"], dtype=torch.float64)
        same = torch.equal(overlap[0][: dadapy_layers - 1].cpu(), counted)
        agreement = (
            f"\nID differs from DADApy's by at most {far:.1e} of it; overlap is "
            f"{'equal' if same else 'NOT equal'} to the naive count.\n"
            f"DADApy and the naive overlap take {(gride + naive) / together:.1f} times as long as "
            f"all three; DADApy with shared neighbors {shared / together:.1f} times."
        )

    rows = [
        [
            name,
            f"{s:.2f}",
            f"{s / least[bare]:.2f}",
            f"{memory[name]:,.0f}" if name in memory else "",
        ]
        for name, s in order.items()
    ]
    where = f"{threads} threads" if device == "cpu" else torch.cuda.get_device_name()
    print(f"{n_layers} layers of {n_tokens:,} tokens, width {width:,}; {where}\n")
    print(markdown_table(["", "s", "x bare", "MiB beyond hidden states"], rows))
    print(agreement)


if __name__ == "__main__":
    auto_cli(main)
