from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from lincorr_lightning.functional import moments_of, segmented_pearson
from lincorr_lightning.metrics import InstancewisePearson, JointMoments

BLOCKS = [(slice(0, 4), slice(0, 6))]


def _rows() -> torch.Tensor:
    return torch.randn(50, 6, generator=torch.Generator().manual_seed(3)) * 2 + 20


def test_joint_moments_over_batches() -> None:
    metric = JointMoments(6, BLOCKS)
    for batch in _rows().split(17):
        metric.update(batch)
    together = moments_of(_rows(), BLOCKS)
    torch.testing.assert_close(metric.compute().products, together.products)
    torch.testing.assert_close(metric.compute().mean, together.mean)
    metric.reset()
    assert metric.gather().n == 0


def test_later_updates_leave_what_was_computed() -> None:
    metric, rows = JointMoments(6), _rows()
    metric.update(rows[:20])
    before = metric.compute()
    metric.update(rows[20:])
    for found, part in ((before, rows[:20]), (metric.compute(), rows)):
        scatter = np.cov(part.double().numpy().T, ddof=0) * len(part)
        np.testing.assert_allclose(found.scatter, scatter, atol=1e-11)


def test_joint_moments_survive_a_cast_of_the_module() -> None:
    module = torch.nn.ModuleList([JointMoments(6)]).half().to(torch.float32)
    module[0].update(_rows())
    assert module[0].compute().scatter.dtype == torch.float64


def test_instancewise_over_batches() -> None:
    prediction, target = _rows(), _rows().flip(0)
    metric = InstancewisePearson([2, 4])
    for p, t in zip(prediction.split(17), target.split(17), strict=True):
        metric.update(p, t)
    segments = torch.eye(2).repeat_interleave(torch.tensor([2, 4]), 0)
    torch.testing.assert_close(
        metric.compute(), segmented_pearson(prediction, target, segments).mean(0)
    )


def test_two_ranks_equal_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks whose states torchmetrics gathers: five batches, and one for the first rank alone."""
    for n_rows in (11, 50):
        _compare_ranks(monkeypatch, _rows().split(n_rows))


def _compare_ranks(monkeypatch: pytest.MonkeyPatch, batches: Sequence[torch.Tensor]) -> None:
    for kind, size in ((JointMoments, 6), (InstancewisePearson, [6])):
        ranks: list[Any] = []

        def gather(state: torch.Tensor, group: Any, ranks: list[Any] = ranks) -> list[torch.Tensor]:
            (name,) = [n for n in ranks[0]._defaults if getattr(ranks[0], n) is state]
            for rank in ranks:  # each rank does in its own `sync`
                if isinstance(rank, JointMoments):
                    rank._allocate()
            return [getattr(rank, name) for rank in ranks]

        monkeypatch.setattr("torchmetrics.metric.gather_all_tensors", gather)
        ranks += [kind(size, distributed_available_fn=lambda: True) for _ in range(2)]
        alone = kind(size)
        for i, batch in enumerate(batches):
            rows = (batch, batch.flip(1)) if kind is InstancewisePearson else (batch,)
            ranks[i % 2].update(*rows)
            alone.update(*rows)
        together, expected = ranks[0].compute(), alone.compute()
        if kind is InstancewisePearson:
            torch.testing.assert_close(together, expected, rtol=1e-12, atol=1e-12)
            continue
        for moments in (together, ranks[0].gather()):
            assert moments.n == 50
            torch.testing.assert_close(moments.scatter, expected.scatter, rtol=1e-12, atol=1e-12)
            assert torch.equal(moments.low, expected.low)
