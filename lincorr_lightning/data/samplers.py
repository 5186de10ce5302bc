"""Batches that are the same for any number of processes, and how they are dealt out to them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Generic, TypeVar

from torch.utils.data import DataLoader, Dataset, DistributedSampler

from lincorr_lightning.distributed import DataShard, data_shard

Batch = TypeVar("Batch")


class ConsecutiveBatches(Dataset[Batch], Generic[Batch]):
    """Things in their order, cut at edges; item ~i is the i-th batch for padding.

    Args:
        kind: Makes a batch of its things, the number of the first, and whether it is padding.
        things: What can be sliced.
        edges: Where batches begin and end, see `batch_edges`.
    """

    def __init__(
        self, kind: Callable[[Any, int, bool], Batch], things: Any, edges: Sequence[int]
    ) -> None:
        self._kind, self._things, self._edges = kind, things, edges

    def __len__(self) -> int:
        return len(self._edges) - 1

    def __getitem__(self, index: int) -> Batch:
        number = index if index >= 0 else ~index
        start, stop = self._edges[number], self._edges[number + 1]
        return self._kind(self._things[start:stop], start, index < 0)


class PaddedBatchSampler(DistributedSampler[Any]):
    """Deals whole batches out to processes; a process that runs short gets padding batches.

    Lightning replaces any other sampler by one that repeats rows to fill up, which counts some X's
    twice; it leaves a `DistributedSampler` alone. The batches themselves do not depend on the
    number of processes (see `batch_edges`), so neither does any statistic.

    Args:
        dataset: Whole batches; item ~i is the i-th one for padding.
        shard: What this process reads, and whether it counts.
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


def make_loader(
    batches: ConsecutiveBatches[Batch], trainer: Any, num_workers: int = 0
) -> DataLoader[Batch]:
    """The batches that this process reads.

    Args:
        batches: Those of all processes.
        trainer: The run's trainer; None outside of a run.
        num_workers: Processes that make them.
    """
    return DataLoader(
        batches,
        batch_size=None,
        sampler=PaddedBatchSampler(batches, data_shard(trainer)),
        num_workers=num_workers,
        collate_fn=_as_is,
    )


def _as_is(batch: Any) -> Any:
    return batch
