"""The table of docs/geometry.md: clouds of known dimension, by this package and by others.

    python tests/real_writers/write_dimensions.py FOLDER
    python -m benchmarks.docs_tables.dimensions FOLDER

The first command runs beside the packages of ``write_dimensions.txt``, and writes the clouds and
what DADApy and scikit-dimension estimate of them. ``tests/real_writers`` compares all numbers.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from jsonargparse import auto_cli

from benchmarks import common
from lincorr_lightning.geometry.observables import intrinsic_dimension, nearest_tokens
from lincorr_lightning.results.table import Table, column

SCALINGS = (2, 32)
PEERS = ("dadapy GRIDE", "skdim GRIDE", "skdim TwoNN", "skdim MLE")


@dataclass(frozen=True)
class Cloud:
    """Estimates of the dimension of a cloud; n2 is 2 where nothing else is said."""

    cloud: str
    known: int = column("dimensions", "d")
    ours: float = column("ours", ".2f")
    wide: float = column("ours, n2 = 32", ".2f")
    dadapy: float = column("DADApy, GRIDE", ".2f")
    gride: float = column("scikit-dimension, GRIDE", ".2f")
    twonn: float = column("TwoNN", ".2f")
    mle: float = column("MLE", ".2f")


def estimates(points: np.ndarray, scalings: tuple[int, ...] = SCALINGS) -> list[float]:
    """Return this package's estimates of the dimension of points, ``(n, d)``."""
    nearest = nearest_tokens(torch.from_numpy(points)[None], max(scalings))
    return intrinsic_dimension(nearest, scalings)[0].tolist()


def table(folder: Path) -> Table:
    """Return the table of a folder of clouds."""
    clouds = np.load(folder / "clouds.npz")
    computed = json.loads((folder / "computed.json").read_text(encoding="utf-8"))
    rows = []
    for name, known in computed["known"].items():
        peers = [np.ravel(computed["found"][f"{name}: {key}"])[0] for key in PEERS]
        rows.append(Cloud(name, known, *estimates(clouds[name]), *peers))
    return Table.of("dimensions", rows)


def main(folder: Path) -> None:
    """Put the table between its markers."""
    common.place_tables({"dimensions": table(folder).markdown()})


if __name__ == "__main__":
    auto_cli(main)
