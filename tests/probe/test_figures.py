"""A probe's figures: clusters against average linkage by hand, every number where it is drawn."""

import math

import numpy as np
import pytest
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from pandas import DataFrame

from lincorr_lightning.knowledge import Answer, Completeness, Domain, Label
from lincorr_lightning.linear_map.scores import PairScore
from lincorr_lightning.probe.figures import (
    cluster,
    cluster_heatmap,
    interesting_part,
    label_names,
    nulls_figure,
    ranking_figure,
    ridge_path_figure,
    top_weights_figure,
)
from lincorr_lightning.results import plots
from lincorr_lightning.results.plots import legible, to_png
from tests.figure_checks import LONG, assert_legible, texts


def names(n: int) -> list[str]:
    return [f"{'knowledge' if i % 3 else 'city'}{i}_{['es', 'zh'][i % 2]}" for i in range(n)]


# -- clusters -----


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
    order, links = cluster(r)
    distance = 1 - (r + r.T) / 2
    assert links[:, 2] == pytest.approx(by_hand(distance))
    assert sorted(order) == list(range(7))
    block = np.array([i % 3 for i in range(12)])
    order, _ = cluster(np.where(block[:, None] == block, 0.9, 0.1))
    assert (np.diff(block[order]) != 0).sum() == 2, "similar knowledge is side by side"


def test_a_pair_without_r_is_far_apart():
    r = np.array([[np.nan, 0.9, np.nan], [0.9, np.nan, np.nan], [np.nan, np.nan, np.nan]])
    assert cluster(r)[1][:, 2] == pytest.approx([0.1, 1.0])


def test_the_tree_stands_over_its_columns():
    r = np.random.default_rng(1).uniform(0, 1, (5, 5))
    figure = cluster_heatmap(DataFrame(r, names(5), names(5)), "t", "s")
    to_png(figure)
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


# -- heat map of W ---------------------------------------------------------------------------


def test_interesting_part_has_the_highest_weights() -> None:
    rng = np.random.default_rng(0)
    weight = rng.normal(size=(60, 80))
    targets, sources = interesting_part(weight, n=10)
    assert len(set(targets)) == len(set(sources)) == 10
    best = sorted(range(60), key=lambda i: -max(weight[i]))[:10]
    assert targets == best
    strongest = {int(np.argmax(weight[i])) for i in best}
    assert strongest <= set(sources)


def test_interesting_part_of_a_sharp_map_is_a_diagonal_and_that_of_a_small_one_all_of_it() -> None:
    weight = np.zeros((30, 40))
    where = np.random.default_rng(1).permutation(40)[:30]
    weight[np.arange(30), where] = np.linspace(0.5, 1.5, 30)
    part = interesting_part(weight, n=25)
    assert (np.diag(weight[np.ix_(*part)]) >= 0.5).all()
    targets, sources = interesting_part(np.random.default_rng(0).normal(size=(6, 25)))
    assert (sorted(targets), sorted(sources)) == (list(range(6)), list(range(25)))


def test_known_sources_come_with_their_references_and_strongest_targets() -> None:
    weight = np.random.default_rng(0).normal(size=(30, 40))
    reference = np.zeros((30, 40), dtype=bool)
    reference[[7, 3, 3, 9], [11, 5, 8, 5]] = True
    targets, sources = interesting_part(weight, 8, ([5, 11, 8], [20]), reference)
    assert sources == [5, 11, 8]
    assert targets[:4] == [3, 9, 7, 20]
    others = [i for i in range(30) if i not in {3, 9, 7, 20}]
    best = sorted(others, key=lambda i: -weight[i, sources].max())
    assert targets[4:] == best[:4]


def test_labels_are_found_by_any_name_and_shown_so_that_all_can_read_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    answers = [("Paris", "巴黎"), ("South Korea", "South Korea"), ("Italy", "Italy")]
    texts = ["巴黎", "South", "Italy"]
    labels = tuple(
        Label(i, text, (Answer(*answer),), Completeness.WHOLE)
        for i, (text, answer) in enumerate(zip(texts, answers, strict=True))
    )
    domain = Domain(None, labels, ())  # type: ignore[arg-type]
    wanted = ["Italy", "Atlantis", "South Korea", "Paris", "巴黎", "South"]
    assert domain.places(wanted) == [2, 1, 0]
    monkeypatch.setattr(plots, "has_glyphs", lambda text: "巴" not in text)
    assert label_names(domain) == ["Paris", "South…", "Italy"]
    monkeypatch.setattr(plots, "has_glyphs", lambda text: True)
    assert label_names(domain) == ["巴黎", "South…", "Italy"]


@pytest.mark.parametrize("shape", [(25, 3), (40, 60)])
def test_the_highest_weights_are_legible_and_those_of_the_reference_framed(
    shape: tuple[int, int],
) -> None:
    rng = np.random.default_rng(0)
    weight, reference = rng.normal(size=shape), rng.random(shape) < 0.1
    sources, targets = names(shape[1]), [f"label {i}" for i in range(shape[0])]
    figure = top_weights_figure(weight, sources, targets, f"W in {LONG}", "ridge 1", reference)
    assert_legible(figure)
    axes = figure.axes[0]
    shown = legible(sources)
    rows = [targets.index(label.get_text()) for label in axes.get_yticklabels()]
    columns = [shown.index(label.get_text()) for label in axes.get_xticklabels()]
    cut = np.ix_(rows, columns)
    (image,) = axes.collections
    np.testing.assert_array_equal(np.asarray(image.get_array()), weight[cut])
    assert np.abs(weight[cut]).max() == image.get_clim()[1] == -image.get_clim()[0]
    assert weight.max() in weight[cut]
    frames = {
        (round(p.get_y() + 0.5), round(p.get_x() + 0.5))
        for p in axes.patches
        if isinstance(p, Rectangle)
    }
    assert frames == set(map(tuple, np.argwhere(reference[cut]).tolist()))
    assert "framed: in the reference" in " ".join(t.get_text() for t, _ in texts(figure))
    assert (axes.get_ylabel(), axes.get_xlabel()) == ("target label", "source label")


def test_map_of_zeros_and_labels_of_all_kinds() -> None:
    labels = ["$\\frac{$", "a\nb\tc", "", "w" * 60, "_^{}\\"]
    figure = top_weights_figure(np.zeros((5, 5)), labels, labels, "100% of $W$ in a_b^c", "")
    assert_legible(figure)
    to_png(figure)
    shown = [label.get_text() for label in figure.axes[0].get_xticklabels()]
    assert shown[:3] == ["$\\frac{$", "a b c", "␣"]
    assert shown[3].startswith("wwww") and shown[3].endswith("…")


# -- ridge path ------------------------------------------------------------------------------


GRID = [0.0, *(10 ** (e / 2) for e in range(-2, 13))]


CHANCE = {"influenced": {"1": 0.04}, "influencing": {"1": 0.02}}


def path_figure(grid: list[float], ridges: list[float]) -> Figure:
    """The figure of pairs that have these ridges, of which the second has no reference."""
    rows = [
        {
            "pair": f"birthplace{i}->personality{i}",
            "ridge": ridge,
            "label_mean": 0.98 - 0.01 * j,
            "influenced_1": None if i == 1 else j / len(grid),
            "influencing_1": None if i == 1 else 1 - j / len(grid),
        }
        for i in range(max(len(ridges), 14))
        for j, ridge in enumerate(grid)
    ]
    chosen = [
        PairScore(
            f"birthplace{i}",
            f"personality{i}",
            ridge=ridge,
            best_baseline_1=0.4,
            precision=None if i else {"chance": CHANCE},
        )
        for i, ridge in enumerate(ridges)
    ]
    return ridge_path_figure(DataFrame(rows), chosen, LONG)


@pytest.mark.parametrize("n", [1, 2, 12])
def test_ridge_path_is_legible(n: int) -> None:
    figure = path_figure(GRID, [0.0 if i % 2 else 100.0 for i in range(n)])
    assert_legible(figure)
    assert len([axes for axes in figure.axes if axes.get_lines()]) == n
    assert f"{n} of 14 pairs" in " ".join(text.get_text() for text, _ in texts(figure))


def test_ridge_path_shows_its_numbers() -> None:
    axes = path_figure(GRID, [100.0]).axes[0]
    lines = {line.get_label(): line for line in axes.get_lines()}
    r = lines["label-wise r"]
    np.testing.assert_allclose(r.get_ydata(), [0.98 - 0.01 * j for j in range(len(GRID))])
    hits = lines["top-1 target of a source"].get_ydata()
    np.testing.assert_allclose(hits, [j / len(GRID) for j in range(len(GRID))])
    np.testing.assert_allclose(r.get_xdata(), GRID)
    ticks = [
        (tick, float(label.get_text()))
        for tick, label in zip(axes.get_xticks(), axes.get_xticklabels(), strict=True)
    ]
    assert ticks[0] == (0, 0) and all(at == value for at, value in ticks)
    places = axes.transData.transform([(tick, 0) for tick, _ in ticks])[:, 0]
    assert (np.diff(places) > 10).all(), "0 stands left of the smallest strength"
    assert lines["top-1 target of a source, by chance"].get_ydata()[0] == 0.04  # type: ignore[index]
    assert lines["top-1 source of a target, by chance"].get_ydata()[0] == 0.02  # type: ignore[index]
    assert lines["ridge of this run"].get_xdata()[0] == 100  # type: ignore[index]
    assert lines["ridge 0: the paper’s map"].get_xdata()[0] == 0  # type: ignore[index]


@pytest.mark.parametrize("grid", [[0.0], [1.0], [1e-6, 1e6]])
def test_odd_grids(grid: list[float]) -> None:
    figure = path_figure(grid, [50.0])
    assert_legible(figure)
    assert ("0" in [label.get_text() for label in figure.axes[0].get_xticklabels()]) == (0 in grid)


# -- nulls -----------------------------------------------------------------------------------


def scores(n: int) -> DataFrame:
    rows = [
        {
            "source": f"birthplace{i}",
            "target": f"personality{i}",
            "label_mean": math.cos(i),
            "permuted_label_mean": 0.01 * (i % 5 - 2),
            "control_label_mean": 0.3 * math.sin(i),
            "random_label_mean": 0.9 * math.cos(i),
        }
        for i in range(n)
    ]
    return DataFrame(rows)


@pytest.mark.parametrize("n", [1, 70])
def test_nulls_are_legible(n: int) -> None:
    frame = scores(n)
    figure = nulls_figure(frame, LONG)
    assert_legible(figure)
    (axes,) = figure.axes
    best = frame.sort_values("label_mean", ascending=False)[:40]
    shown = [label.get_text() for label in axes.get_yticklabels()]
    assert shown == (best["source"] + "->" + best["target"]).tolist()
    lines = {line.get_label(): line.get_xdata() for line in axes.get_lines()}
    for name, key in (
        ("this pair", "label_mean"),
        ("control prompt as the source", "control_label_mean"),
        ("permuted baseline", "permuted_label_mean"),
        ("random words as source labels", "random_label_mean"),
    ):
        np.testing.assert_array_equal(lines[name], best[key])
    low, high = axes.get_xlim()
    assert low < min(min(map(float, x)) for x in lines.values() if len(x) == len(best))
    assert high > 1
    note = " ".join(text.get_text() for text, _ in texts(figure))
    assert ("40 of 70 pairs" in note) == (n == 70)


def test_the_ranking_says_that_it_is_a_difference() -> None:
    frame = scores(3).assign(
        excess=[0.5, 0.2, -0.1], excess_error=0.1, q=[0.001, 0.5, 1.0], partial_label_mean=None
    )
    (axes,) = ranking_figure(frame, [], "an LM").axes
    assert axes.get_xlabel() == "r minus r of the control prompt"
    (axes,) = ranking_figure(frame.assign(excess=None), [], "an LM").axes
    assert axes.get_xlabel() == "r"


def test_unknown_nulls_are_left_out() -> None:
    frame = scores(2).astype(object)
    frame.loc[0, ["permuted_label_mean", "control_label_mean"]] = None
    frame.loc[1, "label_mean"] = None
    figure = nulls_figure(frame, "an LM")
    assert_legible(figure)
    assert len(figure.axes[0].get_yticklabels()) == 1
    to_png(nulls_figure(frame[1:], "one where nothing varies"))
