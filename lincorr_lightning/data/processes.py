"""Which part of the data a process reads, and refusing more processes than there is to share."""

from __future__ import annotations

from typing import Any, NamedTuple

from lincorr_lightning.errors import InputsError


class Share(NamedTuple):
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


def share_of(trainer: Any) -> Share:
    """The part of the data that this process reads.

    Args:
        trainer: The run's trainer; None outside of a run.
    """
    if trainer is None:
        return Share(0, 1, counts=True)
    mesh = getattr(trainer.lightning_module, "device_mesh", None)
    if mesh is None:
        return Share(trainer.global_rank, trainer.world_size, counts=True)
    data, together = mesh["data_parallel"], mesh["tensor_parallel"]
    return Share(data.get_local_rank(), data.size(), counts=together.get_local_rank() == 0)


def check_processes(trainer: Any, n: int, what: str, way_out: str) -> None:
    """Refuse a run in which some process never has anything to do.

    Args:
        trainer: The run's trainer; None outside of a run.
        n: Number of things that are shared.
        what: What they are.
        way_out: The setting that gives more of them.

    Raises:
        InputsError: There are more processes than things; it names both numbers.
    """
    n_processes = share_of(trainer).n
    if n_processes > n:
        raise InputsError(
            f"{n_processes} processes cannot share {n} {what}. Set trainer.devices (times "
            f"trainer.num_nodes) to at most {n}, or {way_out}."
        )
