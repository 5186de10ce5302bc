"""Cost of token geometry: intrinsic dimension and overlap in all layers of a prompt.

    python -m venv dadapy && dadapy/bin/pip install dadapy==0.3.4
    python -m benchmarks.speed.token_geometry --dadapy dadapy/bin/python

The size is that of an 8B LM and a prompt of 1,024 tokens; the hidden states are a random walk on a
curved cloud. Each row is compared with the bare products of the same hidden states; the minimum of
several alternating runs is shown.

DADApy needs numpy < 2, and so an environment of its own. It computes the first layers only, and its
times are scaled to all layers. The naive overlap computes all distances of each layer with scipy,
sorts them, and loops over pairs of layers, ks and tokens. The last row does without the distances:
the same loop over the neighbors that DADApy has found for GRIDE.
"""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jsonargparse import auto_cli
from torch import Tensor

from benchmarks.common import least_time, markdown_table, read_numbers
from lincorr_lightning.geometry.observables import (
    RANGE_SCALINGS,
    intrinsic_dimension,
    nearest_tokens,
    neighborhood_overlap,
    neighborhoods,
)

N_LAYERS, N_TOKENS, WIDTH = 32, 1_024, 4_096
KS = (1, 2, 4, 8, 16, 31)
DADAPY_LAYERS = 3
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


def run_dadapy(python: str, hidden: Tensor, range_max: int, threads: int) -> dict[str, Any]:
    """Run DADApy under the interpreter that has it."""
    with tempfile.TemporaryDirectory() as folder:
        np.save(Path(folder) / "hidden.npy", hidden.numpy())
        arguments = json.dumps([folder, range_max, KS, threads])
        names = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
        environment = os.environ | dict.fromkeys(names, str(threads))
        command = [python, "-W", "ignore", "-c", DADAPY, arguments]
        subprocess.run(command, check=True, env=environment)
        return read_numbers(Path(folder) / "found.json")


def main(dadapy: str | None = None, threads: int = 2, repeats: int = 3) -> None:
    """Print the table, and the largest difference from DADApy's numbers.

    Args:
        dadapy: A Python interpreter with DADApy; without it, its rows are left out.
        threads: Number of CPU threads.
        repeats: Number of runs of each row.
    """
    torch.set_num_threads(threads)
    hidden = random_walk(N_LAYERS, N_TOKENS, WIDTH)
    deepest = max(*RANGE_SCALINGS, *KS)

    def ours() -> tuple[Tensor, Tensor]:
        nearest = nearest_tokens(hidden, deepest)
        near = neighborhoods(nearest, max(KS))
        overlap = neighborhood_overlap(near[:-1], near[1:], KS)
        return intrinsic_dimension(nearest, RANGE_SCALINGS), overlap

    times: dict[str, float] = {}
    for _ in range(repeats):
        _, bare = least_time(lambda: [torch.matmul(tokens, tokens.mT) for tokens in hidden])
        (dimension, overlap), seconds = least_time(ours)
        for name, one in (("bare products", bare), ("ours", seconds)):
            times[name] = min(one, times.get(name, one))
    agreement = ""
    if dadapy is not None:
        theirs = run_dadapy(dadapy, hidden[:DADAPY_LAYERS], deepest, threads)
        names = ("DADApy", "naive overlap", "DADApy, neighbors shared")
        whole = N_LAYERS / DADAPY_LAYERS
        times |= {n: s * whole for n, s in zip(names, theirs["seconds"], strict=True)}
        columns = [int(np.log2(n2)) - 1 for n2 in RANGE_SCALINGS]
        exact = torch.tensor(theirs["dimension"]).double()[:, columns]
        far = float((dimension[:DADAPY_LAYERS] / exact - 1).abs().max())
        counted = torch.tensor(theirs["overlap"], dtype=torch.float64)
        same = torch.equal(overlap[: DADAPY_LAYERS - 1], counted)
        agreement = (
            f"\nID differs from DADApy's by at most {far:.1e} of it; overlap is "
            f"{'equal' if same else 'NOT equal'} to the naive count."
        )
    rows = [
        [name, f"{s:.2f}", f"{s / times['bare products']:.2f}", f"{s / times['ours']:.2f}"]
        for name, s in times.items()
    ]
    print(f"{N_LAYERS} layers of {N_TOKENS:,} tokens, width {WIDTH:,}; {threads} threads\n")
    print(markdown_table(["", "s", "x bare", "x ours"], rows))
    print(agreement)


if __name__ == "__main__":
    auto_cli(main)
