"""How near words are in the causal inner product of a head, by numpy and one word at a time."""

from collections import Counter

import numpy as np


def causal_nearness(head: np.ndarray, source: list[int], target: list[int]) -> np.ndarray:
    """Cosines ``(n_target, n_source)`` after C^(-1/2) of the rows that occur once."""
    counts = Counter(row.tobytes() for row in head)
    once = np.array([row for row in head if counts[row.tobytes()] == 1], float)
    values, vectors = np.linalg.eigh(np.cov(once.T))
    scale = [v**-0.5 if v >= 1e-6 * values.max() else 0.0 for v in values]
    root = sum(s * np.outer(v, v) for s, v in zip(scale, vectors.T, strict=True))
    sides = [np.array([root @ head[i].astype(float) for i in ids]) for ids in (source, target)]
    cities, countries = (side - side.mean(0) for side in sides)
    return np.array([[a @ b / (a @ a) ** 0.5 / (b @ b) ** 0.5 for b in cities] for a in countries])
