"""Split data over ranks, gather results from all of them, and end with rank 0."""

import ctypes
import signal
from contextlib import suppress
from fractions import Fraction
from typing import Any, NamedTuple, TypeVar

from lincorr_lightning.errors import SubjectsError

T = TypeVar("T")

_PR_SET_PDEATHSIG = 1  # of Linux's prctl


class DataShard(NamedTuple):
    """The part of the data that a rank reads: its number, of `n`.

    Ranks that compute each product of one LM together (tensor parallelism) read the same part;
    what the first of them finds `counts`.
    """

    number: int
    n: int
    counts: bool


def data_shard(trainer: Any) -> DataShard:
    """Return the part of the data that this rank reads."""
    if trainer is None:
        return DataShard(0, 1, counts=True)
    if (mesh := getattr(trainer.lightning_module, "device_mesh", None)) is None:
        return DataShard(trainer.global_rank, trainer.world_size, counts=True)
    data, tensor = mesh["data_parallel"], mesh["tensor_parallel"]
    return DataShard(data.get_local_rank(), data.size(), counts=tensor.get_local_rank() == 0)


def require_items(trainer: Any, n: int, what: str, way_out: str) -> None:
    """Refuse a run in which a rank would have none of the `n` items, such as ``edits``."""
    if (n_shards := data_shard(trainer).n) > n:
        raise SubjectsError(
            f"{n_shards} processes cannot share {n} {what}. Lower trainer.devices, or {way_out}."
        )


def batch_edges(trainer: Any, n: int, batch_size: int, *, least: int = 1) -> list[int]:
    """Return where consecutive batches of nearly equal size begin and end.

    They are the same for any number of ranks, unless some ranks would be left without a batch: then
    there are more batches, and smaller ones, but none of fewer than `least` items.
    """
    n_batches = -(-n // batch_size)
    n_batches = max(n_batches, min(data_shard(trainer).n, n // least))
    # Fractions are exact: the edges do not depend on rounding.
    return [round(Fraction(i * n, n_batches)) for i in range(n_batches + 1)]


def gather(value: T) -> list[T]:
    """Return what each rank passes, in the order of ranks; all ranks must call it."""
    from torch import distributed  # here: reports are made without torch

    if not (distributed.is_available() and distributed.is_initialized()):
        return [value]
    gathered: list[Any] = [None] * distributed.get_world_size()
    distributed.all_gather_object(gathered, value)
    return gathered


def exit_with_parent() -> None:
    """Kill this rank when rank 0 is gone, on Linux: NCCL would wait for minutes."""
    with suppress(AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
