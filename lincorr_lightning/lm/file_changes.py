"""Changes of an LM's files while it is read from them: its parts would not be of one LM.

Weights whose dtype is that of their file are mapped from it, and processes share their memory. Who
replaces the file (``mv``) leaves them as they are; who writes into it (``cp``, `torch.save`)
changes them. One that is cut short ends a process that reads it (SIGBUS), unless noticed before.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor, nn

_MAPS = Path("/proc/self/maps")  # of Linux

Stamp = tuple[int, ...]
"""Device and inode of a file, its size, and two times that change when it is written to."""


def stamps(paths: Iterable[str | Path]) -> dict[str, Stamp]:
    """Return the stamp of each file by its absolute path; empty where there is none."""
    found: dict[str, Stamp] = {}
    for path in map(Path.absolute, map(Path, paths)):
        found[str(path)] = ()
        with suppress(OSError):
            stat = path.stat()
            # `cp -p` sets the time of a change, but not that of the inode.
            times = stat.st_mtime_ns, stat.st_ctime_ns
            found[str(path)] = stat.st_dev, stat.st_ino, stat.st_size, *times
    return found


def mapped_files(module: nn.Module) -> dict[str, Stamp]:
    """Return the files that weights of a module are mapped from, where the system lists them."""
    weights = chain(module.parameters(), module.buffers())
    addresses = sorted(_address(weight) for weight in weights if weight.device.type == "cpu")
    lines = _MAPS.read_text(errors="surrogateescape").splitlines() if _MAPS.exists() else []
    files = set()
    for line in lines:
        span, _, _, _, inode, *name = line.split(maxsplit=5)
        if name and inode != "0":
            start, end = (int(number, 16) for number in span.split("-"))
            first = bisect_left(addresses, start)
            if first < len(addresses) and addresses[first] < end:
                files |= {*name}
    return stamps(files)


def _address(weight: Tensor) -> int:
    with suppress(RuntimeError):  # of a subclass without memory of its own
        return weight.data_ptr()
    return 0


def written_into(module: nn.Module, before: Mapping[str, Stamp]) -> dict[str, Stamp]:
    """Return those of the `mapped_files` of before that were written to, with their new stamps."""
    now = stamps(before)
    changed = {p for p, old in before.items() if now[p] != old and now[p][:2] == old[:2]}
    return {path: now[path] for path in changed & mapped_files(module).keys()} if changed else {}
