"""Whole batches that are the same for any number of ranks, and their distribution over ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, Generic, TypeVar

from torch.utils.data import DataLoader, Dataset, DistributedSampler

from lincorr_lightning.distributed import DataShard, data_shard

Batch = TypeVar("Batch")


class BatchList(Dataset[Batch], Generic[Batch]):
    """A dataset of whole batches; item ``~i`` is the i-th batch as padding."""

    def __init__(self, batches: Sequence[Batch]) -> None:
        self._batches = batches

    def __len__(self) -> int:
        return len(self._batches)

    def __getitem__(self, index: int) -> Batch:
        if index >= 0:
            return self._batches[index]
        return replace(self._batches[~index], is_padding=True)  # type: ignore[type-var]


class PaddedBatchSampler(DistributedSampler[Any]):
    """Distributes whole batches over ranks; a rank that runs out gets padding batches.

    Lightning replaces any other sampler by one that repeats items to fill up, which would count
    some of them twice; it keeps a `DistributedSampler`. The batches do not depend on the number of
    ranks (see `batch_edges`), so neither does any statistic.
    """

    def __init__(self, dataset: Dataset[Any], shard: DataShard) -> None:
        super().__init__(dataset, num_replicas=shard.n, rank=shard.number, shuffle=False)
        self._counts = shard.counts

    def __iter__(self) -> Iterator[int]:
        n_batches = len(self.dataset)  # type: ignore[arg-type]
        for step in range(self.num_samples):
            index = step * self.num_replicas + self.rank
            if index >= n_batches:
                index = -1
            yield index if self._counts or index < 0 else ~index


def make_loader(batches: Sequence[Batch], trainer: Any) -> DataLoader[Batch]:
    """Return a loader of the batches that this rank reads.

    Args:
        batches: The batches of all ranks: dataclasses with a field ``is_padding``.
        trainer: The run's Trainer; None outside of a run.
    """
    dataset = BatchList(batches)
    sampler = PaddedBatchSampler(dataset, data_shard(trainer))
    return DataLoader(dataset, batch_size=None, sampler=sampler)
