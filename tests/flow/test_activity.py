"""Activity of features, against loops over tokens."""

import numpy as np
import pytest
import torch

from lincorr_lightning.flow.text_statistics import FeatureActivity


def test_activity_is_counted_as_by_loops() -> None:
    random = np.random.default_rng(0)
    activity = FeatureActivity(6, n_context=3)
    values, peaks = [], {}
    for _ in range(3):
        lengths = [4, 2, 5]
        mask = np.arange(5) < np.array(lengths)[:, None]
        ids = np.where(mask, random.integers(1, 50, (3, 5)), 0)
        predicted = random.integers(1, 50, (3, 5))
        features = np.maximum(random.normal(size=(3, 5, 6)) - 0.3, 0)
        features[..., 5] = 0
        flat = torch.from_numpy(features)[torch.from_numpy(mask)].float()
        activity.update(flat, *(torch.from_numpy(part) for part in (ids, mask, predicted)))
        for text in range(3):
            for position in range(lengths[text]):
                values.append(features[text, position])
                for f in range(5):
                    value = features[text, position, f]
                    if value > peaks.get(f, (0,))[0]:
                        context = ids[text, max(0, position - 2) : position + 1].tolist()
                        peaks[f] = (value, context, predicted[text, position])
    table = np.array(values)
    assert activity.n_tokens == len(table) == 33
    assert activity.n_active.tolist() == (table > 0).sum(0).tolist()
    np.testing.assert_allclose(
        activity.mean[:5], [table[table[:, f] > 0, f].mean() for f in range(5)], rtol=1e-5
    )
    assert activity.mean[5] == 0 and activity.peak(5) is None
    for f, (value, context, predicted) in peaks.items():
        peak = activity.peak(f)
        assert peak is not None
        assert peak.activation == pytest.approx(value, rel=1e-6)
        assert (peak.context, peak.predicted) == (context, predicted)
