"""Which edits are in which step, of which epoch, on which rank."""

from collections import Counter

import pytest
import torch
from lightning.fabric.utilities.apply_func import move_data_to_device
from lightning.pytorch.plugins import DoublePrecision

from lincorr_lightning.finetune.batches import EditDataset, EditTraining, edit_batch
from lincorr_lightning.finetune.edits import Edit, ResolvedEdits
from lincorr_lightning.knowledge import Catalogue


def edit(subject, tokens):
    return Edit(subject, "answer", tuple(tokens), 0, (0,), 0, 0)


def dataset(rows, *options):
    """Edits with these tokens of prompt and answer; no relation is needed here."""
    edits = [edit(f"x{i}", answer) for i, (_, answer) in enumerate(rows)]
    resolved = ResolvedEdits(None, edits, catalogue=Catalogue.load())
    return EditDataset(resolved, [prompt for prompt, _ in rows], *options)


def steps_of(n, training, n_ranks, epoch=0, seed=0):
    rows = [([i + 1, 1], [2]) for i in range(n)]
    ranks = [dataset(rows, training, seed, rank, n_ranks) for rank in range(n_ranks)]
    assert len({len(steps) for steps in ranks}) == 1
    length = len(ranks[0])
    return [[steps[epoch * length + i] for i in range(length)] for steps in ranks]


def check_padding(batch):
    """A batch without edits still has a row to run, without a loss."""
    assert batch.edits == batch.ids == [] and batch.input_ids.shape == (1, 2)
    assert (batch.labels == -100).all()


@pytest.mark.parametrize(("n", "n_ranks"), [(1, 1), (1, 2), (7, 2), (16, 2), (17, 1), (25, 3)])
def test_joint_edits_come_once_an_epoch_on_any_number_of_ranks(n, n_ranks):
    for epoch in (0, 1, 5):
        ranks = steps_of(n, EditTraining(protocol="joint", edits_per_step=4), n_ranks, epoch)
        assert len(ranks[0]) == -(-n // (4 * n_ranks))
        members = Counter(i for rank in ranks for batch in rank for i in batch.ids)
        assert members == Counter(range(n))
        for together in zip(*ranks, strict=True):
            sizes = [len(batch.ids) for batch in together]
            assert max(sizes) - min(sizes) <= 1
            assert max(sizes) <= 4
        for rank in ranks:
            for batch in rank:
                assert (batch.n_steps, batch.first, batch.last) == (0, False, False)
                assert [edit.subject for edit in batch.edits] == [f"x{i}" for i in batch.ids]
                if batch.ids:
                    assert (batch.input_ids[:, 0] - 1).tolist() == batch.ids
                    assert batch.labels.tolist() == [[-100, 2, -100]] * len(batch.ids)
                else:
                    check_padding(batch)


def test_joint_edits_have_an_order_of_their_own_each_epoch():
    def order(epoch, seed):
        (rank,) = steps_of(30, EditTraining(protocol="joint", edits_per_step=4), 1, epoch, seed)
        return [i for batch in rank for i in batch.ids]

    orders = [order(epoch, seed) for epoch in (0, 1, 2) for seed in (0, 1)]
    assert len({tuple(each) for each in orders}) == len(orders)
    assert order(1, 0) == orders[2]


@pytest.mark.parametrize(("n", "n_ranks"), [(1, 1), (1, 2), (7, 2), (16, 2), (17, 1), (25, 3)])
def test_independent_edits_stay_together_for_all_their_steps(n, n_ranks):
    ranks = steps_of(n, EditTraining(edits_per_step=4, n_steps=3), n_ranks, epoch=1)
    groups = []
    for rank in ranks:
        for at in range(0, len(rank), 3):
            group = rank[at : at + 3]
            assert [(batch.step, batch.first, batch.last) for batch in group] == [
                (0, True, False),
                (1, False, False),
                (2, False, True),
            ]
            assert all(batch.n_steps == 3 for batch in group)
            assert group[0].ids == group[1].ids == group[2].ids
            if group[0].ids:
                groups.append(group[0].ids)
            else:
                check_padding(group[0])
    everyone = list(range(n))
    assert sorted(groups) == [everyone[i : i + 4] for i in range(0, n, 4)]
    assert [batch.ids for batch in ranks[0]][:3] == [everyone[:4]] * 3


def test_lightning_moves_and_converts_a_batch_and_keeps_its_edits():
    batch = edit_batch([edit("x", [3])], [7], [[1, 2]], step=1, n_steps=4)
    moved = move_data_to_device(batch, torch.device("meta"))
    assert {moved.input_ids.device.type, moved.labels.device.type} == {"meta"}
    assert (moved.edits, moved.ids, moved.step, moved.n_steps) == (batch.edits, [7], 1, 4)
    assert batch.input_ids.device.type == "cpu"
    assert DoublePrecision().convert_input(batch).edits == batch.edits
