"""How long a probe will ask its LM, told before it begins."""

from __future__ import annotations

from time import perf_counter
from typing import TYPE_CHECKING

from lightning.pytorch.utilities import rank_zero_info

from lincorr_lightning.data.subjects import SubjectsDataModule
from lincorr_lightning.distributed import data_shard

if TYPE_CHECKING:
    from lincorr_lightning.probe.module import LinearProbe

# X's that are read to tell how long the others will take.
_TRIAL = 16


def log_runtime_estimate(probe: LinearProbe) -> None:
    """Read a few X's, and say how long all of them will take.

    Every process must call it: an LM in several pieces answers with all of them.

    Args:
        probe: In a run that begins.
    """
    trainer = probe.trainer
    data = getattr(trainer, "datamodule", None)
    if not isinstance(data, SubjectsDataModule):
        return
    few = data.halves["test"][:_TRIAL]
    probe.joint_rows(few[:2])  # the first time is never like the others
    started = perf_counter()
    probe.joint_rows(few).sum().item()  # waits for an accelerator
    seconds = perf_counter() - started
    n = len(data.halves["test"])
    if trainer.state.fn == "fit":
        n += len(data.halves["fit"])
    processes = f" in {trainer.world_size} processes" if trainer.world_size > 1 else ""
    rank_zero_info(
        f"{len(probe.layout.domains)} prompts over {n:,} X's{processes}: at most about "
        f"{told(seconds / max(len(few), 1) * n / data_shard(trainer).n)} to read"
    )


def told(seconds: float) -> str:
    """A time as people say it.

    Example:
        >>> [told(seconds) for seconds in (0.2, 45.4, 130, 9000)]
        ['1 s', '45 s', '2 min', '2.5 h']
    """
    if seconds < 100:
        return f"{max(round(seconds), 1)} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"
