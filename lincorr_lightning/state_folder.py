"""The folder of a state cache: its files, its bound, and the command ``lincorr cache``.

Each LM has a folder in it, with an ``lm.json`` that describes the LM, and files of states whose
names begin with their number of prompts. Nothing else there is touched. torch is not imported, so
that the command answers at once.
"""

from __future__ import annotations

import re
import sys
from contextlib import suppress
from datetime import datetime
from pathlib import Path

from lincorr_lightning.errors import ConfigError
from lincorr_lightning.io import read_json

GIB = 2**30
LM_FILE = "lm.json"
# Also those that a run which was killed has left behind.
_NAME = re.compile(r"((?P<n_prompts>\d+)-[0-9a-f]{32}|\.part-[0-9a-f]{8})\.safetensors")
_FOLDER = re.compile("[0-9a-f]{32}")


def lm_folders(folder: Path) -> list[Path]:
    """Return the folders of LMs in a state cache."""
    return [path for path in folder.iterdir() if _FOLDER.fullmatch(path.name) and path.is_dir()]


def state_files(folder: Path) -> dict[str, int]:
    """Return the number of prompts of each file of states in the folder of an LM, by its name.

    0 for one that is not complete.
    """
    found = {path.name: _NAME.fullmatch(path.name) for path in folder.iterdir()}
    return {name: int(match["n_prompts"] or 0) for name, match in found.items() if match}


def drop_oldest(folder: Path, most: float) -> None:
    """Remove the files of a state cache that were not used for longest, above a size in bytes.

    A process that reads one of them goes on to do so.
    """
    used = []
    for path in (lm / name for lm in lm_folders(folder) for name in state_files(lm)):
        with suppress(FileNotFoundError):  # another run has removed it
            used.append((path.stat().st_mtime, path.stat().st_size, path))
    size = sum(one for _, one, _ in used)
    for _, freed, path in sorted(used):
        if size <= most:
            return
        path.unlink(missing_ok=True)
        size -= freed


def cache(folder: str, clear: bool = False) -> None:
    """Show the LMs of a state cache, with dtype, prompts, size and last use; or remove its states.

    Args:
        folder: The folder that runs name as model.lm.state_cache.
        clear: Whether to remove the states of all LMs.
    """
    root = Path(folder).expanduser()
    if not root.is_dir():
        raise ConfigError(
            f"there is no folder {root}. Name the one that was --model.lm.state_cache of a run."
        )
    lms = [lm for lm in sorted(lm_folders(root)) if (lm / LM_FILE).is_file()]
    lines = [("LM", "dtype", "prompts", "MiB", "last use", "folder")]
    for lm in lms:
        info, files = read_json(lm / LM_FILE, ConfigError, "Remove its folder."), state_files(lm)
        stats = [path.stat() for path in map(lm.joinpath, files) if path.exists()]
        size = sum(one.st_size for one in stats) / 2**20
        used = max((one.st_mtime for one in stats), default=lm.stat().st_mtime)
        when = datetime.fromtimestamp(used).strftime("%Y-%m-%d %H:%M")
        name, dtype = (str(info.get(key)) for key in ("name_or_path", "dtype"))
        lines.append((name, dtype, f"{sum(files.values()):,}", f"{size:,.1f}", when, lm.name))
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        cells = [cell.ljust(width) for cell, width in zip(line, widths, strict=True)]
        sys.stdout.write("  ".join(cells).rstrip() + "\n")
    if clear:
        for lm in lms:
            for name in [*state_files(lm), LM_FILE]:
                (lm / name).unlink(missing_ok=True)
            with suppress(OSError):  # it holds what is not of the cache
                lm.rmdir()
        sys.stdout.write(f"removed the states of {len(lms)} LMs\n")
