import torch
from torch import Tensor

from lincorr_lightning.functional import labelwise_pearson
from lincorr_lightning.metrics import MeanRStandardError, Scale

SIZES = [3, 2]


def _sample(n: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Prediction, truth and a null's prediction; labels are correlated."""
    generator = torch.Generator().manual_seed(seed)
    common = torch.randn(n, 1, generator=generator, dtype=torch.float64)
    noise = torch.randn(3, n, sum(SIZES), generator=generator, dtype=torch.float64)
    truth = common + 0.7 * noise[0] + 5
    return truth + 0.5 * noise[1] - 2, truth, 3 * (common + noise[2])


def _metric(n: int = 100_000) -> MeanRStandardError:
    prediction, truth, null = _sample(n, 1)

    def scale(values: Tensor) -> Scale:
        return Scale(values.mean(0), values.std(0), labelwise_pearson(values, truth))

    return MeanRStandardError(SIZES, scale(truth), scale(prediction), scale(null))


def _by_target(r: Tensor) -> Tensor:
    return torch.stack([part.mean() for part in r.split(SIZES)])


def test_errors_are_the_spread_over_samples() -> None:
    n = 300
    own, above = [], []
    for seed in range(2, 802):
        prediction, truth, null = _sample(n, seed)
        own.append(_by_target(labelwise_pearson(prediction, truth)))
        above.append(own[-1] - _by_target(labelwise_pearson(null, truth)))
    metric = _metric()
    metric.update(*_sample(100 * n, 2))
    error = 10 * metric.compute()
    torch.testing.assert_close(error[0], torch.stack(own).std(0), rtol=0.08, atol=0)
    torch.testing.assert_close(error[1], torch.stack(above).std(0), rtol=0.08, atol=0)


def test_batches_do_not_matter() -> None:
    rows = _sample(120, 2)
    whole, cut = _metric(), _metric()
    whole.update(*rows)
    for i, j in ((0, 50), (50, 51), (51, 120)):
        cut.update(*(part[i:j] for part in rows))
    torch.testing.assert_close(whole.compute(), cut.compute(), rtol=1e-10, atol=0)


def test_labels_without_r_are_left_out() -> None:
    rows = [part.clone() for part in _sample(200, 2)]
    whole = _metric()
    r = whole._prediction.r.clone()
    r[1] = torch.nan
    assert whole._null is not None
    without = MeanRStandardError(SIZES, whole._target, whole._prediction._replace(r=r), whole._null)
    without.update(*rows)
    kept = [0, 2, 3, 4]
    scales = whole._target, whole._prediction, whole._null
    fewer_scales = (Scale(*(values[kept] for values in scale)) for scale in scales)
    fewer = MeanRStandardError([2, 2], *fewer_scales)
    fewer.update(*(part[:, kept] for part in rows))
    torch.testing.assert_close(without.compute(), fewer.compute())


def test_one_row_has_no_spread() -> None:
    metric = _metric(1000)
    metric.update(*_sample(1, 2))
    assert metric.compute().isnan().all()


def test_without_a_null_the_excess_is_r_itself() -> None:
    scaled = _metric(1000)
    metric = MeanRStandardError(SIZES, scaled._target, scaled._prediction)
    prediction, truth, _ = _sample(100, 2)
    metric.update(prediction, truth, None)
    own, above = metric.compute()
    assert torch.equal(own, above)
