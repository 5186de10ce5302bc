"""What the figures draw, against the arrays they are drawn from."""

import numpy as np
import pytest

from lincorr_lightning.geometry import figures
from lincorr_lightning.geometry.closeness import KnowledgeCloseness, PairScore
from lincorr_lightning.geometry.profiles import TokenProfiles

LEVELS, SCALINGS, KS, NAMES = [0, 2], [2, 4], [1, 2, 31], ["a", "b", "c", "d", "e"]


def make_profiles(n_layers: int) -> TokenProfiles:
    rng = np.random.default_rng(0)

    def draw(*shape: int) -> np.ndarray:
        return rng.uniform(1, 9, (6, len(LEVELS), *shape))

    names = ("cosine_mean", "cosine_std", "angle_mean", "angle_std")
    return TokenProfiles(
        n_tokens=64, n_skipped=0, prompts=list("uvwxyz"), corpora=["one"] * 6, shuffles=LEVELS,
        layers=range(1, n_layers + 1), range_scalings=SCALINGS, ks=KS,
        dimension=draw(n_layers, 2), overlap=draw(n_layers - 1, 3),
        profiles={name: draw(n_layers) for name in names}, logits_dimension=draw(2), loss=draw(),
        entropy=draw(), corpus_dimension=np.empty((0, n_layers, 2)), corpus_loss=np.empty(0),
    )  # fmt: skip


def make_closeness(n_layers: int) -> KnowledgeCloseness:
    rng = np.random.default_rng(0)
    pairs = [(a, b) for i, a in enumerate(NAMES) for b in NAMES[i + 1 :]]
    return KnowledgeCloseness(
        n_subjects=100, scores=[PairScore(a, b, rng.random(), None) for a, b in pairs],
        layers=range(1, n_layers + 1), range_scalings=SCALINGS, ks=KS,
        dimension={name: rng.uniform(1, 9, (n_layers, 2)) for name in NAMES},
        overlap={pair: rng.random((n_layers, 3)) for pair in pairs},
        wording={pair: rng.random() for pair in pairs}, n_permutations=120, seed=0,
    )  # fmt: skip


def curves(axes) -> list[np.ndarray]:
    return [np.asarray(line.get_ydata()) for line in axes.get_lines()]


def text(figure) -> str:
    return " ".join(text.get_text() for text in figure.texts)


def test_profiles_are_means_over_prompts() -> None:
    profiles = make_profiles(3)
    figure = figures.profiles_figure(profiles, "some-lm")
    assert "some-lm" in text(figure)
    shown = [profiles.dimension[..., 0], profiles.overlap[..., 1],
             profiles.profiles["cosine_mean"], profiles.profiles["angle_mean"]]  # fmt: skip
    for axes, values in zip(figure.axes, shown, strict=True):
        for level, curve in enumerate(curves(axes)):
            assert curve == pytest.approx(values[:, level].mean(0))


def test_r_of_dimension_and_loss() -> None:
    profiles = make_profiles(4)
    figure = figures.dimension_loss_figure(profiles, "some-lm")
    curve = curves(figure.axes[0])[1]  # the first line is at 0
    for layer, r in enumerate(curve):
        x, y = np.log(profiles.dimension[:, 0, layer, 0]), np.log(profiles.loss[:, 0])
        assert r == pytest.approx(np.corrcoef(x, y)[0, 1])


def test_closeness_is_a_point_per_pair() -> None:
    closeness = make_closeness(2)
    figure = figures.closeness_figure(closeness, "some-lm")
    (line,) = figure.axes[0].get_lines()
    x, y = np.asarray(line.get_xdata()), np.asarray(line.get_ydata())
    assert x == pytest.approx([values[:, 1].mean() for values in closeness.overlap.values()])
    assert y == pytest.approx([score.r for score in closeness.scores])
    test = closeness.test("overlap", "k=2", "r")
    assert test is not None
    assert f"{abs(test.spearman):.2f}" in figure.axes[0].get_title(loc="left")


def test_rho_dimension_and_overlap_by_layer() -> None:
    closeness = make_closeness(3)
    curve = curves(figures.rho_figure(closeness, "some-lm").axes[0])[0]
    expected = [
        test.result.spearman
        for test in closeness.tests
        if test.result is not None and test.layer is not None and test.given is None
        and (test.closeness, test.setting) == ("overlap", "k=2")
    ]  # fmt: skip
    assert curve == pytest.approx(expected) and len(expected) == 3
    panels = figures.dimension_figure(closeness, "some-lm").axes
    for name, last, by_layer in zip(NAMES, curves(panels[0]), curves(panels[1]), strict=True):
        assert last == pytest.approx(closeness.dimension[name][-1])
        assert by_layer == pytest.approx(closeness.dimension[name][:, 0])
    image = figures.overlap_matrix_figure(closeness, "some-lm").axes[0].get_images()[0]
    shown = np.ma.filled(image.get_array(), np.nan)
    assert shown[0, 1] == pytest.approx(closeness.overlap["a", "b"][:, 1].mean())
