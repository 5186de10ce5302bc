"""Which part of the data a process reads: batches for each, and no more processes than things."""

from __future__ import annotations

from fractions import Fraction
from typing import Any, NamedTuple, TypeVar

from torch import distributed

from lincorr_lightning.errors import SubjectsError

T = TypeVar("T")


class DataShard(NamedTuple):
    """The part of the data that a process reads.

    Processes that share each product of one LM (tensor parallelism) read the same part together.

    Attributes:
        number: Of the part.
        n: How many parts there are.
        counts: Whether what this process finds counts; of those that read the same, the first's
            does.
    """

    number: int
    n: int
    counts: bool


def data_shard(trainer: Any) -> DataShard:
    """The part of the data that this process reads.

    Args:
        trainer: The run's trainer; None outside of a run.
    """
    if trainer is None:
        return DataShard(0, 1, counts=True)
    mesh = getattr(trainer.lightning_module, "device_mesh", None)
    if mesh is None:
        return DataShard(trainer.global_rank, trainer.world_size, counts=True)
    data, together = mesh["data_parallel"], mesh["tensor_parallel"]
    return DataShard(data.get_local_rank(), data.size(), counts=together.get_local_rank() == 0)


def require_items(trainer: Any, n: int, what: str, way_out: str) -> None:
    """Refuse a run in which some process never has anything to do.

    Args:
        trainer: The run's trainer; None outside of a run.
        n: Number of things that are shared.
        what: What they are.
        way_out: The setting that gives more of them.

    Raises:
        SubjectsError: There are more processes than things; it names both numbers.
    """
    n_processes = data_shard(trainer).n
    if n_processes > n:
        raise SubjectsError(
            f"{n_processes} processes cannot share {n} {what}. Set trainer.devices (times "
            f"trainer.num_nodes) to at most {n}, or {way_out}."
        )


def batch_edges(
    trainer: Any, n: int, batch_size: int, *, least: int = 1, in_step: bool = False
) -> list[int]:
    """Where consecutive batches of nearly equal size begin and end.

    They are the same for any number of processes, unless some would be left without a batch: then
    there are more of them, and smaller.

    Args:
        trainer: The run's trainer; None outside of a run.
        n: Number of things that are shared.
        batch_size: Things of a batch at most.
        least: Things below which no batch is made smaller for the sake of a process.
        in_step: Whether the processes' batches are one step of training: then there is one for each
            at every step, and the steps are those of one process with a batch as large as theirs.

    Returns:
        Ascending from 0 to `n`, one number more than there are batches.

    Example:
        >>> batch_edges(None, 10, 4)
        [0, 3, 7, 10]
    """
    n_processes = data_shard(trainer).n
    n_batches = -(-n // batch_size)
    n_steps = -(-n // (batch_size * n_processes)) if in_step else 1
    n_batches = max(n_batches, min(n_steps * n_processes, n // least))
    # Exact, so that the batches of a step end where the step of one process does.
    return [round(Fraction(i * n, n_batches)) for i in range(n_batches + 1)]


def gather(own: T) -> list[T]:
    """What every process passes, in the order of their ranks; every process must call it.

    Args:
        own: Anything that can be pickled.
    """
    if not (distributed.is_available() and distributed.is_initialized()):
        return [own]
    gathered: list[Any] = [None] * distributed.get_world_size()
    distributed.all_gather_object(gathered, own)
    return gathered
