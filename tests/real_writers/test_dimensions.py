"""Intrinsic dimension and overlap of clouds beside DADApy and scikit-dimension."""

import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from scipy.spatial.distance import cdist

from benchmarks.common import all_text, placed
from benchmarks.docs_tables.dimensions import estimates, table
from lincorr_lightning.geometry.observables import nearest_tokens, neighborhood_overlap
from tests.real_writers.conftest import Write

pytestmark = pytest.mark.nightly

# Estimates of others lose digits far from 0, and ties have limits of their own.
PLAIN = ("cube, 2", "cube, 5", "cube, 10", "normal, 5", "sphere, 4", "Swiss roll")
PLAIN += ("curved, 5 in 50", "curved, noise")
REPEATED = ("cube, 5, repeated", "curved, 5 in 50, repeated")
FAR, ROUNDED = "curved, far from 0", "cube, 2, rounded"
CLOUDS = (*PLAIN, FAR, ROUNDED, *REPEATED)
SCALED = ("dadapy GRIDE", "dadapy GRIDE, without copies", "skdim GRIDE")
ESTIMATORS = (*SCALED, "dadapy 2NN", "skdim TwoNN", "skdim TwoNN, all, mle", "skdim MLE")
SCALINGS = (2, 4, 8, 16, 32, 64)
PAIRS = (("curved, 5 in 50", "curved, noise"), REPEATED)
KS = (1, 2, 10, 30)


@pytest.fixture(scope="module")
def written(write: Write) -> SimpleNamespace:
    folder = write("dimensions")
    computed = json.loads((folder / "computed.json").read_text())
    return SimpleNamespace(folder=folder, clouds=np.load(folder / "clouds.npz"), **computed)


def log_ratios(points: np.ndarray) -> np.ndarray:
    """Of the distances to the second and the first neighbor, increasing."""
    first, second = np.sort(cdist(points, points), axis=1)[:, 1:3].T
    return np.sort(np.log(second / first))


def test_cases(written: SimpleNamespace) -> None:
    assert set(written.clouds) == set(written.known) == set(CLOUDS)
    cases = {f"{cloud}: {name}" for cloud in CLOUDS for name in ESTIMATORS}
    assert set(written.found) == cases | {" | ".join(pair) for pair in PAIRS}


@pytest.mark.parametrize("cloud", PLAIN)
@pytest.mark.parametrize("name", SCALED)
def test_gride(written: SimpleNamespace, cloud: str, name: str) -> None:
    ours = estimates(written.clouds[cloud], SCALINGS)
    np.testing.assert_allclose(written.found[f"{cloud}: {name}"], ours, rtol=1e-6)


@pytest.mark.parametrize("cloud", PLAIN)
def test_2nn(written: SimpleNamespace, cloud: str) -> None:
    """By maximum likelihood it is ours; by default, the slope of a line through the same ratios."""
    (ours,) = estimates(written.clouds[cloud], (2,))
    assert written.found[f"{cloud}: skdim TwoNN, all, mle"] == pytest.approx(ours, rel=1e-9)
    x = log_ratios(written.clouds[cloud])
    kept = int(0.9 * len(x))
    y = -np.log(1 - np.arange(1, kept + 1) / len(x))
    slope = x[:kept] @ y / (x[:kept] @ x[:kept])
    for name in ("dadapy 2NN", "skdim TwoNN"):
        assert written.found[f"{cloud}: {name}"] == pytest.approx(slope, rel=1e-6), name


@pytest.mark.parametrize("cloud", [cloud for cloud in CLOUDS if cloud != ROUNDED])
def test_dimension_is_near_the_known_one(written: SimpleNamespace, cloud: str) -> None:
    """Within four standard errors of 2NN, d / √N; ties make it too large, see the guide."""
    (ours,) = estimates(written.clouds[cloud], (2,))
    assert ours == pytest.approx(written.known[cloud], rel=4 / np.sqrt(1000))


@pytest.mark.parametrize("cloud", REPEATED)
def test_repeated_points_do_not_count(written: SimpleNamespace, cloud: str) -> None:
    ours = estimates(written.clouds[cloud], SCALINGS)
    distinct = estimates(written.clouds[cloud.removesuffix(", repeated")], SCALINGS)
    np.testing.assert_allclose(ours, distinct, rtol=1e-9)
    without = written.found[f"{cloud}: dadapy GRIDE, without copies"]
    np.testing.assert_allclose(without, ours, rtol=1e-6)
    # Elsewhere they do.
    assert written.found[f"{cloud}: dadapy GRIDE"][0] < 0.1 * ours[0]
    assert written.found[f"{cloud}: skdim MLE"] == 0
    far_from_ours = written.found[f"{cloud}: skdim GRIDE"][0] < 0.5 * ours[0]
    assert far_from_ours == cloud.startswith("curved")


def test_the_origin_does_not_matter(written: SimpleNamespace) -> None:
    """Others lose digits: their distances are from products of points that are not centered."""
    ours = estimates(written.clouds[FAR], SCALINGS)
    near = estimates(written.clouds["curved, 5 in 50"], SCALINGS)
    np.testing.assert_allclose(ours, near, rtol=1e-6)
    for name in ("dadapy GRIDE", "skdim GRIDE"):
        assert abs(written.found[f"{FAR}: {name}"][0] / ours[0] - 1) > 5e-3, name


def test_ties(written: SimpleNamespace) -> None:
    """A tie has the limit of the likelihood as μ → 1; scikit-dimension leaves it out."""
    points = np.unique(written.clouds[ROUNDED], axis=0)
    ours = estimates(written.clouds[ROUNDED], SCALINGS)
    distances = np.sort(cdist(points, points), axis=1)
    for n2, estimate in zip(SCALINGS, ours, strict=True):
        mu = np.maximum(distances[:, n2] / distances[:, n2 // 2], 1 + 1e-8)
        middle, high = np.percentile(mu, [50, 95])
        mu = mu[mu < middle + 20 * (high - middle)]
        steep = (n2 // 2 - 1) * np.sum(np.log(mu) / (1 - mu**-estimate))
        score = (len(mu) - 1) / estimate + steep - (n2 - 1) * np.log(mu).sum()
        assert abs(score) < 1e-4 * len(mu) / estimate
    # Their number falls with n2.
    gap = np.abs(np.divide(written.found[f"{ROUNDED}: dadapy GRIDE, without copies"], ours) - 1)
    assert gap[0] < 1e-6 and gap[1] > 5e-3 and gap[2:].max() < 1e-6
    gap = np.abs(np.divide(written.found[f"{ROUNDED}: skdim GRIDE"], ours) - 1)
    assert gap[0] > 0.1 and gap[4:].max() < 5e-3


@pytest.mark.parametrize("pair", PAIRS)
def test_overlap(written: SimpleNamespace, pair: tuple[str, str]) -> None:
    """DADApy takes the first of copies for the point itself, whichever it is."""
    one, other = (
        nearest_tokens(torch.from_numpy(written.clouds[name])[None], max(KS)).neighborhoods
        for name in pair
    )
    ours = neighborhood_overlap(one, other, KS).mean((0, 1)).numpy()
    others = np.array(written.found[" | ".join(pair)])
    if pair == REPEATED:
        copied = 200 / 1100  # points whose nearest is their copy in both clouds
        assert copied <= ours[0] < copied + 0.01 and others[0] < 0.75 * copied
    else:
        np.testing.assert_allclose(ours, others, rtol=1e-12)


def test_the_table_of_the_guide(written: SimpleNamespace) -> None:
    text = all_text()
    assert placed(text, {"dimensions": table(written.folder).markdown()}) == text
