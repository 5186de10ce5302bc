import functools

import numpy as np
import pytest
import torch
import torch.multiprocessing as mp
from torch import distributed

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


def _rank(rank: int, file: str, world: int) -> None:
    distributed.init_process_group(
        "gloo", init_method=f"file://{file}", rank=rank, world_size=world
    )
    moments, instance = JointMoments(6), InstancewisePearson([6])
    batches = _rows().split(11)  # five batches: ranks do not have equally many
    for batch in batches[rank::world]:
        moments.update(batch)
        instance.update(batch, batch.flip(1))
    alone_moments, alone_instance = JointMoments(6), InstancewisePearson([6])
    for batch in batches:
        alone_moments.update(batch)
        alone_instance.update(batch, batch.flip(1))
    alone = alone_moments._merged()
    for together in (moments.compute(), moments.gather()):
        assert together.n == 50
        torch.testing.assert_close(together.scatter, alone.scatter, rtol=1e-12, atol=1e-12)
        assert torch.equal(together.low, alone.low)
    single = alone_instance.total / alone_instance.count
    torch.testing.assert_close(instance.compute().reshape(1), single, rtol=1e-12, atol=1e-12)
    distributed.destroy_process_group()


@pytest.mark.slow
def test_two_ranks_equal_one(tmp_path) -> None:
    run = functools.partial(mp.spawn, args=(str(tmp_path / "store"), 2), nprocs=2)
    run(_rank)
