import warnings

import numpy as np
import pytest
import torch
from scipy import stats

from lincorr_lightning.functional import labelwise_pearson, moments_of, segmented_pearson, summarize
from lincorr_lightning.functional.correlation import labelwise_pearson_from_moments


def _pair(n: int, d: int, scale: float, offset: float) -> tuple[torch.Tensor, torch.Tensor]:
    rng = np.random.default_rng(1)
    target = rng.normal(size=(n, d)) * scale + offset
    prediction = 0.5 * target + rng.normal(size=(n, d)) * scale
    return torch.from_numpy(prediction), torch.from_numpy(target)


@pytest.mark.parametrize(("scale", "offset"), [(1.0, 0.0), (2.0, 20.0), (1e-6, 0.0), (1.0, 1e4)])
def test_labelwise_and_instancewise_equal_scipy(scale: float, offset: float) -> None:
    prediction, target = _pair(200, 12, scale, offset)
    by_label = [stats.pearsonr(prediction[:, j], target[:, j])[0] for j in range(12)]
    np.testing.assert_allclose(labelwise_pearson(prediction, target), by_label, atol=1e-10)
    segments = torch.eye(3).repeat_interleave(torch.tensor([5, 3, 4]), 0)
    by_instance = segmented_pearson(prediction, target, segments)
    for column, part in enumerate((slice(0, 5), slice(5, 8), slice(8, 12))):
        pairs = zip(prediction[:, part], target[:, part], strict=True)
        expected = [stats.pearsonr(p, t)[0] for p, t in pairs]
        np.testing.assert_allclose(by_instance[:, column], expected, atol=1e-10)


def test_constant_labels_are_nan_and_left_out_of_the_mean() -> None:
    prediction, target = _pair(30, 4, 1.0, 0.0)
    target[:, 1] = 0.1
    prediction[:, 3] = -2.0
    r = labelwise_pearson(prediction, target)
    assert r.isnan().tolist() == [False, True, False, True]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        kept = [stats.pearsonr(prediction[:, j], target[:, j])[0] for j in (0, 2)]
    summary = summarize(r)
    assert (summary.n, summary.n_constant) == (2, 2)
    assert summary.mean == pytest.approx(np.mean(kept), abs=1e-12)
    assert summary.std == pytest.approx(np.std(kept), abs=1e-12)


def test_instances_whose_logits_are_all_equal_are_nan() -> None:
    prediction, target = _pair(40, 6, 2.0, 30.0)
    target[3, 2:], prediction[5, :2] = 1.25, 7.0
    segments = torch.eye(2).repeat_interleave(torch.tensor([2, 4]), 0)
    constant = segmented_pearson(prediction, target, segments).isnan()
    assert constant.nonzero().tolist() == [[3, 1], [5, 0]]


def test_a_constant_prediction_has_no_r() -> None:
    m = moments_of(_pair(50, 3, 1.0, 4.0)[0])
    weight = torch.tensor([[0.0, 0.0], [0.0, 2.0]], dtype=torch.float64)
    parts = m.scatter[:2, :2], m.scatter[:2, 1:], m.square[1:], m.constant[1:]
    r = labelwise_pearson_from_moments(weight, *parts)
    assert r[0].isnan() and float(r[1]) == pytest.approx(
        m.scatter[1, 2] / (m.square[1] * m.square[2]).sqrt()
    )
