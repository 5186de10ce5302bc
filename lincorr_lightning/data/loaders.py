"""Loaders: whole batches that are the same for any number of ranks, and steps that resume."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, TypeVar, cast

import lightning as L
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from lincorr_lightning.distributed import data_shard
from lincorr_lightning.study import require_same

Batch = TypeVar("Batch")


def make_loader(batches: Sequence[Batch], trainer: Any) -> DataLoader[Batch]:
    """Return a loader of the batches that this rank reads, of those of all ranks.

    A rank that runs out gets batches with ``is_padding``: they only keep it in step, as a sharded
    LM needs all ranks in a forward pass, and their numbers do not count. The batches do not depend
    on the number of ranks (see `batch_edges`), so neither does any statistic.
    """
    shard = data_shard(trainer)
    n_steps = -(-len(batches) // shard.n)
    of_rank: list[Any] = list(batches[shard.number :: shard.n])
    if not shard.counts:
        of_rank = [replace(batch, is_padding=True) for batch in of_rank]
    if len(of_rank) < n_steps:
        of_rank.append(replace(batches[0], is_padding=True))  # type: ignore[type-var]
    dataset = cast("Dataset[Batch]", of_rank)
    return DataLoader(dataset, batch_size=None, sampler=own_steps(dataset))


def own_steps(dataset: Dataset[Batch]) -> DistributedSampler[Batch]:
    """Return a sampler of all steps of a dataset that holds those of this rank alone.

    Lightning replaces any other sampler by one that distributes the steps again.
    """
    return DistributedSampler[Batch](dataset, num_replicas=1, rank=0, shuffle=False)


class _ResumableSampler(DistributedSampler[Any]):
    """Yields the steps of an epoch in order, without those that a resumed run has done."""

    def __init__(self, dataset: Dataset[Any], epoch: int) -> None:
        super().__init__(dataset, num_replicas=1, rank=0, shuffle=False)
        # A resumed run fetches its first batch before Lightning sets the epoch.
        self.set_epoch(epoch)
        self.done = (epoch, 0)

    def __iter__(self) -> Iterator[int]:
        epoch, n_done = self.done
        first = n_done if self.epoch == epoch else 0
        n = len(self.dataset)  # type: ignore[arg-type]
        return iter(range(self.epoch * n + first, (self.epoch + 1) * n))


class ResumableLoader(DataLoader[Any]):
    """Loader of one rank's steps that Lightning can resume in the middle of an epoch.

    The length of the dataset is that of an epoch, the same on all ranks. It makes each step from
    its number, counted over all epochs, and may have an attribute ``determined_by``: what
    determines the content of a step, by name, beside the settings of study and data. Without a
    Trainer, which counts the steps, a loader is never resumed. `options` are those of torch's
    DataLoader, with which Lightning recreates it.
    """

    def __init__(
        self, dataset: Dataset[Any], trainer: L.Trainer | None = None, **options: Any
    ) -> None:
        self.trainer = trainer
        self._steps = cast(Any, dataset)
        # Not current_epoch, which a run resumed at the end of an epoch increments only later.
        loop: Any = None if trainer is None else trainer.fit_loop
        epoch = 0 if loop is None else loop.epoch_progress.current.processed
        defaults = {"batch_size": None, "sampler": _ResumableSampler(dataset, epoch)}
        super().__init__(dataset, **defaults | options)

    @property
    def _determined_by(self) -> dict[str, Any]:
        return getattr(self._steps, "determined_by", {"steps of an epoch": len(self._steps)})

    def state_dict(self) -> dict[str, Any]:
        """Return the epoch, and how many of its steps are done."""
        assert self.trainer is not None, "a loader without a Trainer counts no steps"
        loop: Any = self.trainer.fit_loop
        epochs = loop.epoch_progress.current
        epoch = epochs.processed
        done = 0
        if epochs.processed < epochs.started:
            # A step whose weights are updated is done, though callbacks may still work on it.
            done = loop.epoch_loop.batch_progress.current.processed
            if done >= self.trainer.num_training_batches:
                epoch += 1
                done = 0
        return {"epoch": epoch, "done": done, "determined_by": self._determined_by}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue after the steps that are done; `CheckpointError` if they would differ."""
        epoch = int(state_dict["epoch"])
        done = int(state_dict["done"])
        if done:  # else some data would be trained twice or not at all
            require_same(state_dict["determined_by"], self._determined_by)
        if isinstance(self.sampler, _ResumableSampler):
            self.sampler.done = (epoch, done)
            self.sampler.set_epoch(epoch)
