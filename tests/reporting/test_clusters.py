"""Clusters of knowledges against average linkage done by hand."""

import numpy as np
import pytest

from lincorr_lightning.probe.clusters import cluster
from lincorr_lightning.results import heat_maps as figures


def by_hand(distance):
    """Heights at which groups join: always the two whose members are closest on average."""
    groups, heights = [[i] for i in range(len(distance))], []
    while len(groups) > 1:
        pairs = [(a, b) for a in range(len(groups)) for b in range(a)]
        mean = {
            (a, b): np.mean([distance[i, j] for i in groups[a] for j in groups[b]])
            for a, b in pairs
        }
        a, b = min(pairs, key=mean.__getitem__)
        heights.append(mean[a, b])
        groups[b] += groups.pop(a)
    return heights


def test_heights_are_those_of_average_linkage():
    r = np.random.default_rng(0).uniform(-0.2, 1, (7, 7))
    np.fill_diagonal(r, np.nan)
    found = cluster(r)
    distance = 1 - (r + r.T) / 2
    assert found.links[:, 2] == pytest.approx(by_hand(distance))
    assert sorted(found.order) == list(range(7))


def test_what_belongs_together_stands_side_by_side():
    block = np.array([i % 3 for i in range(12)])
    r = np.where(block[:, None] == block, 0.9, 0.1)
    order = block[cluster(r).order]
    assert (np.diff(order) != 0).sum() == 2


def test_a_pair_without_r_is_far_apart():
    r = np.array([[np.nan, 0.9, np.nan], [0.9, np.nan, np.nan], [np.nan, np.nan, np.nan]])
    assert cluster(r).links[:, 2] == pytest.approx([0.1, 1.0])


@pytest.mark.parametrize("shape", [(1, 1), (2, 3)])
def test_matrices_that_have_no_clusters(shape):
    with pytest.raises(ValueError, match="square matrix"):
        cluster(np.zeros(shape))


def test_the_tree_stands_over_its_columns():
    r = np.random.default_rng(1).uniform(0, 1, (5, 5))
    found = cluster(r)
    names = [f"k{i}" for i in found.order]
    figure = figures.correlation_heatmap(r, names, names, "t", links=found.links)
    figure.canvas.draw()
    (tree,) = figure.axes[0].child_axes
    assert len(tree.lines) == 4
    matrix, drawn = (axes.get_window_extent() for axes in (figure.axes[0], tree))
    assert drawn.y0 >= matrix.y1
    assert (drawn.x0, drawn.x1) == pytest.approx((matrix.x0, matrix.x1), abs=1)
    assert drawn.y1 <= figure.bbox.height
    feet = {
        round(x) for line in tree.lines for x, y in zip(*line.get_data(), strict=True) if y == 0
    }
    assert feet == set(range(5))
