"""Which knowledges belong together: hierarchical clustering of their correlations."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

_FLOATS = npt.NDArray[np.floating[Any]]


class Clusters(NamedTuple):
    """A tree over knowledges.

    Attributes:
        order: Indices, so that no branches cross and neighbours are as alike as the tree allows.
        links: As `scipy.cluster.hierarchy.linkage` has them, ``(n - 1, 4)``.
    """

    order: list[int]
    links: _FLOATS


def cluster(matrix: _FLOATS) -> Clusters:
    """Cluster knowledges by average linkage, at a distance of 1 - r.

    A tie has two directions; their mean counts. A pair without r (its labels never vary) is as far
    apart as one with r = 0.

    Args:
        matrix: r, ``(n, n)``, source row, target column; the diagonal does not count.

    Raises:
        ValueError: The matrix is not square, or has fewer than two rows.
    """
    from scipy.cluster.hierarchy import leaves_list, linkage
    from scipy.spatial.distance import squareform

    n = len(matrix)
    if matrix.shape != (n, n) or n < 2:
        raise ValueError(f"a square matrix of two rows or more is needed, not {matrix.shape}")
    r = np.nan_to_num(np.asarray(matrix, dtype=float), nan=0.0)
    distance = 1.0 - (r + r.T) / 2
    np.fill_diagonal(distance, 0.0)
    links = linkage(squareform(distance, checks=False), "average", optimal_ordering=True)
    return Clusters([int(leaf) for leaf in leaves_list(links)], links)
