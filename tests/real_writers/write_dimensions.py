"""Write clouds of known dimension, and what DADApy and scikit-dimension estimate of them.

python write_dimensions.py FOLDER
"""

import json
import sys
import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np
import skdim
from dadapy import Data

N = 1000
COPIES = 100  # a tenth of the points
RANGE = 64  # the largest range scaling n2
KS = (1, 2, 10, 30)
NOISE = 0.02


def clouds() -> dict[str, tuple[int, np.ndarray]]:
    """Dimension and points of each cloud."""

    def uniform(seed: int, d: int, n: int = N) -> np.ndarray:
        return np.random.RandomState(seed).uniform(size=(n, d))

    def normal(seed: int, d: int, n: int = N) -> np.ndarray:
        return np.random.RandomState(seed).standard_normal((n, d))

    made = {f"cube, {d}": (d, uniform(d, d)) for d in (2, 5, 10)}
    made["normal, 5"] = 5, normal(5, 5)
    points = normal(6, 5)
    made["sphere, 4"] = 4, points / np.linalg.norm(points, axis=1, keepdims=True)
    turn, height = uniform(7, 2).T
    turn = 1.5 * np.pi * (1 + 2 * turn)
    made["Swiss roll"] = 2, np.stack([turn * np.cos(turn), 21 * height, turn * np.sin(turn)], 1)
    curved = np.cos(uniform(8, 5) @ normal(9, 50, 5) + 2 * np.pi * uniform(10, 50, 1))
    made["curved, 5 in 50"] = 5, curved
    made["curved, noise"] = 5, curved + NOISE * normal(11, 50)
    made["curved, far from 0"] = 5, curved + 1e6
    made["cube, 2, rounded"] = 2, np.round(made["cube, 2"][1] * 128)
    for name in ("cube, 5", "curved, 5 in 50"):
        d, points = made[name]
        made[f"{name}, repeated"] = d, np.concatenate([points, points[:COPIES]])
    return made


def gride(points: np.ndarray) -> list[float]:
    """DADApy's estimates at n2 = 2, 4, ... `RANGE`."""
    return Data(points, verbose=False).return_id_scaling_gride(range_max=RANGE)[0]


def without_copies(points: np.ndarray) -> list[float]:
    data = Data(points, verbose=False)
    data.remove_identical_points()
    return data.return_id_scaling_gride(range_max=RANGE)[0]


def skdim_gride(points: np.ndarray) -> list[float]:
    return skdim.id.GRIDE(multiscale=True, range_max=RANGE).fit(points).dimension_scales_


ESTIMATES: dict[str, Callable[[np.ndarray], float | list[float]]] = {
    "dadapy GRIDE": gride,
    "dadapy GRIDE, without copies": without_copies,
    "dadapy 2NN": lambda points: Data(points, verbose=False).compute_id_2NN()[0],
    "skdim GRIDE": skdim_gride,
    "skdim TwoNN": lambda points: skdim.id.TwoNN().fit(points).dimension_,
    "skdim TwoNN, all, mle": lambda points: (
        skdim.id.TwoNN(discard_fraction=0, method="mle").fit(points).dimension_
    ),
    "skdim MLE": lambda points: skdim.id.MLE().fit(points).dimension_,
}


def overlaps(points: np.ndarray, others: np.ndarray) -> list[float]:
    """DADApy's overlap of neighborhoods, at each of `KS`."""
    return [Data(points, maxk=max(KS)).return_data_overlap(others, k=k) for k in KS]


def main(folder: Path) -> None:
    warnings.simplefilter("ignore")
    found = {}
    made = clouds()
    for name, (_, points) in made.items():
        for estimator, estimate in ESTIMATES.items():
            try:
                found[f"{name}: {estimator}"] = np.asarray(estimate(points)).tolist()
            except ValueError as error:
                found[f"{name}: {estimator}"] = str(error)
    points = {name: points for name, (_, points) in made.items()}
    pairs = [("curved, 5 in 50", "curved, noise")]
    pairs += [("cube, 5, repeated", "curved, 5 in 50, repeated")]
    found |= {f"{a} | {b}": overlaps(points[a], points[b]) for a, b in pairs}
    np.savez(folder / "clouds.npz", **points)
    known = {name: d for name, (d, _) in made.items()}
    (folder / "computed.json").write_text(json.dumps({"known": known, "found": found}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
