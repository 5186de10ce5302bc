"""What the figures draw, against the tables they are drawn from."""

import numpy as np
import pytest
from pandas import DataFrame

from lincorr_lightning.geometry import figures
from lincorr_lightning.geometry.closeness import KnowledgeCloseness
from lincorr_lightning.geometry.results import knowledge_geometry_results
from lincorr_lightning.linear_map.scores import PairScore

SCALINGS, KS, NAMES = (2, 4), (1, 2, 31), ["a", "b", "c", "d", "e"]


def make_closeness(n_layers: int) -> KnowledgeCloseness:
    rng = np.random.default_rng(0)
    pairs = [(a, b) for i, a in enumerate(NAMES) for b in NAMES[i + 1 :]]
    scores = [PairScore(a, b, label_mean=rng.random()) for a, b in pairs]
    return KnowledgeCloseness(
        n_subjects=100, scores=scores,
        layers=range(1, n_layers + 1), range_scalings=SCALINGS, ks=KS,
        dimension={name: rng.uniform(1, 9, (n_layers, 2)) for name in NAMES},
        overlap={pair: rng.random((n_layers, 3)) for pair in pairs},
        wording={pair: rng.random() for pair in pairs}, n_permutations=120, seed=0,
    )  # fmt: skip


def curves(axes) -> list[np.ndarray]:
    return [np.asarray(line.get_ydata()) for line in axes.get_lines()]


def draw(results, name):
    return results.figure(name).draw()


def test_closeness_is_a_point_per_pair() -> None:
    closeness = make_closeness(2)
    figure = draw(knowledge_geometry_results(closeness, "some-lm"), "closeness")
    (line,) = figure.axes[0].get_lines()
    x, y = np.asarray(line.get_xdata()), np.asarray(line.get_ydata())
    assert x == pytest.approx([values[:, 1].mean() for values in closeness.overlap.values()])
    assert y == pytest.approx([score.label_mean for score in closeness.scores])
    rho = closeness.test("overlap", "k=2", "r").spearman
    assert f"{abs(rho):.2f}".lstrip("0") in figure.axes[0].get_title(loc="left")


def test_rho_by_layer() -> None:
    closeness = make_closeness(3)
    results = knowledge_geometry_results(closeness, "some-lm")
    (curve,) = {tuple(line) for line in curves(draw(results, "rho_by_layer").axes[0])
                if len(line) == 3}  # fmt: skip
    tests = [t for t in closeness.tests if (t.setting, t.given) == ("k=2", None)]
    assert curve == pytest.approx([t.spearman for t in tests if t.layer != "all"])


def test_history_is_a_heat_map_per_observable() -> None:
    rows = [(name, layer, step, 10 * layer + step) for name in ("overlap_k=2", "angle")
            for layer in (1, 10, 2) for step in (0, 5)]  # fmt: skip
    frame = DataFrame(
        [*rows, ("loss", None, 0, 1.0)], columns=["observable", "layer", "step", "mean"]
    )
    figure = figures.history_figure(frame, "means")
    first = figure.axes[0]
    assert first.get_title(loc="left") == "overlap with the next layer, k = 2"
    assert first.get_images()[0].get_array().tolist() == [[10, 15], [20, 25], [100, 105]]
