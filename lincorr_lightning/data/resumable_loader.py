"""A loader of numbered steps that Lightning can resume in the middle of an epoch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Protocol, cast

from torch.utils.data import DataLoader, Dataset, DistributedSampler

from lincorr_lightning.errors import ConfigError

if TYPE_CHECKING:
    import lightning as L


class Steps(Protocol):
    """One process's steps of all epochs, each made from its number alone.

    That no state is kept is what lets a resumed run go on at any step with exactly the batches of
    the run that was not interrupted.
    """

    @property
    def dealt(self) -> dict[str, Any]:
        """What the contents of a step follow from."""

    def __len__(self) -> int:
        """Steps of one epoch, the same on all processes."""

    def __getitem__(self, index: int) -> Any:
        """The step of that number, counted over all epochs."""


class _FromThere(DistributedSampler[Any]):
    """The steps of one epoch in their order, less those that a resumed run has done.

    Each process has steps of its own already; Lightning would replace any sampler that is no
    `DistributedSampler` by one that deals them out again.
    """

    def __init__(self, steps: Steps, epoch: int) -> None:
        super().__init__(cast("Dataset[Any]", steps), num_replicas=1, rank=0, shuffle=False)
        # A run that is resumed takes its first batch before Lightning tells the epoch.
        self.set_epoch(epoch)
        self.done = (epoch, 0)

    def __iter__(self) -> Iterator[int]:
        epoch, n_done = self.done
        first = n_done if self.epoch == epoch else 0
        n = len(self.dataset)  # type: ignore[arg-type]
        return iter(range(self.epoch * n + first, (self.epoch + 1) * n))


class ResumableLoader(DataLoader[Any]):
    """Loader of a process's steps that Lightning can resume in the middle of an epoch.

    Its length stays that of a whole epoch: Lightning adds the batches that were done itself.

    Args:
        dataset: The steps.
        trainer: Counts what is done; None for a loader that nobody resumes.
        **options: Of a DataLoader, for Lightning, which makes some loaders anew.
    """

    def __init__(self, dataset: Steps, trainer: L.Trainer | None = None, **options: Any) -> None:
        self.trainer = trainer
        # Not current_epoch, which a run resumed at the end of an epoch counts up only later.
        epoch = 0 if trainer is None else _epochs(trainer).processed
        own = {"batch_size": None, "sampler": _FromThere(dataset, epoch)}
        super().__init__(cast("Dataset[Any]", dataset), **own | options)

    def state_dict(self) -> dict[str, Any]:
        """The epoch, and how many of its steps are done."""
        assert self.trainer is not None, "nobody counts"
        epochs = _epochs(self.trainer)
        batches: Any = self.trainer.fit_loop.epoch_loop.batch_progress.current
        epoch, done = epochs.processed, 0
        if epochs.processed < epochs.started:
            # A step whose weights are updated counts, though callbacks may still be at work on it.
            done = batches.processed
            if done >= self.trainer.num_training_batches:
                epoch, done = epoch + 1, 0
        return {"epoch": epoch, "done": done, "dealt": self._steps.dealt}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from there.

        Raises:
            ConfigError: Within an epoch, edits are now dealt out otherwise than before.
        """
        epoch, done = int(state_dict["epoch"]), int(state_dict["done"])
        if done and state_dict["dealt"] != self._steps.dealt:
            then, now = (_told(dealt) for dealt in (state_dict["dealt"], self._steps.dealt))
            raise ConfigError(
                f"the checkpoint is of the middle of an epoch, with {then}; this run has {now}, so "
                "that some texts would be trained twice or not at all. Use the settings of the run "
                "that wrote it, or begin anew."
            )
        if isinstance(self.sampler, _FromThere):
            self.sampler.done = (epoch, done)
            self.sampler.set_epoch(epoch)

    @property
    def _steps(self) -> Steps:
        return cast(Steps, self.dataset)


def _epochs(trainer: L.Trainer) -> Any:
    """How many epochs are begun and done, as the checkpoint has it."""
    return trainer.fit_loop.epoch_progress.current


def _told(dealt: dict[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in dealt.items())
