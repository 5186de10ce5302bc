"""Which edits are in which step, of which epoch, on which process."""

from collections import Counter

import pytest

from lincorr_lightning.errors import ConfigError
from lincorr_lightning.finetune.batches import EditDataset, EditSchedule


def test_every_token_of_a_long_answer_is_asked_for():
    batch = EditDataset([([5, 6], [7, 8, 9]), ([4], [3])], EditSchedule("independent", 2))[0]
    assert batch.input_ids.tolist() == [[5, 6, 7, 8, 9], [4, 3, 0, 0, 0]]
    assert batch.labels.tolist() == [[-100, 7, 8, 9, -100], [3, -100, -100, -100, -100]]


def steps_of(n, plan, n_processes, epoch=0, seed=0):
    rows = [([i + 1, 1], [2]) for i in range(n)]
    dealt = [EditDataset(rows, plan, seed, rank, n_processes) for rank in range(n_processes)]
    assert len({len(steps) for steps in dealt}) == 1
    length = len(dealt[0])
    return [[steps[epoch * length + i] for i in range(length)] for steps in dealt]


def check_idle(batch):
    """A batch without edits still has something to run, and asks for nothing."""
    assert batch.edits == []
    assert batch.input_ids.shape == (1, 2)
    assert (batch.labels == -100).all()


@pytest.mark.parametrize("n_processes", [1, 2, 3])
@pytest.mark.parametrize("n", [1, 4, 7, 16, 17, 25])
def test_joint_edits_come_once_an_epoch_whoever_trains_them(n, n_processes):
    for epoch in (0, 1, 5):
        ranks = steps_of(n, EditSchedule("joint", 4), n_processes, epoch)
        assert len(ranks[0]) == -(-n // (4 * n_processes))
        members = Counter(i for rank in ranks for batch in rank for i in batch.edits)
        assert members == Counter(range(n))
        for together in zip(*ranks, strict=True):
            sizes = [len(batch.edits) for batch in together]
            assert max(sizes) - min(sizes) <= 1
            assert max(sizes) <= 4
        for rank in ranks:
            for batch in rank:
                assert (batch.n_steps, batch.first, batch.last) == (0, False, False)
                if batch.edits:
                    assert (batch.input_ids[:, 0] - 1).tolist() == batch.edits
                    assert batch.labels.tolist() == [[-100, 2, -100]] * len(batch.edits)
                else:
                    check_idle(batch)


def test_joint_edits_have_an_order_of_their_own_each_epoch():
    def order(epoch, seed):
        (rank,) = steps_of(30, EditSchedule("joint", 4), 1, epoch, seed)
        return [i for batch in rank for i in batch.edits]

    orders = [order(epoch, seed) for epoch in (0, 1, 2) for seed in (0, 1)]
    assert len({tuple(each) for each in orders}) == len(orders)
    assert order(1, 0) == orders[2]


@pytest.mark.parametrize("n_processes", [1, 2, 3])
@pytest.mark.parametrize("n", [1, 4, 7, 16, 17, 25])
def test_independent_edits_stay_together_for_all_their_steps(n, n_processes):
    ranks = steps_of(n, EditSchedule("independent", 4, steps_per_edit=3), n_processes, epoch=1)
    groups = []
    for rank in ranks:
        for at in range(0, len(rank), 3):
            group = rank[at : at + 3]
            assert [(batch.step, batch.first, batch.last) for batch in group] == [
                (0, True, False), (1, False, False), (2, False, True),
            ]  # fmt: skip
            assert all(batch.n_steps == 3 for batch in group)
            assert group[0].edits == group[1].edits == group[2].edits
            if group[0].edits:
                groups.append(group[0].edits)
            else:
                check_idle(group[0])
    everyone = list(range(n))
    assert sorted(groups) == [everyone[i : i + 4] for i in range(0, n, 4)]
    assert [batch.edits for batch in ranks[0]][:3] == [everyone[:4]] * 3


@pytest.mark.parametrize("bad", [("both", 8, 1), ("joint", 0, 1), ("independent", 8, 0)])
def test_a_plan_that_cannot_be_is_refused(bad):
    with pytest.raises(ConfigError, match="it must be"):
        EditSchedule(*bad)
