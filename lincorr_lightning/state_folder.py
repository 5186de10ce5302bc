"""The folder of a state cache: its files, its bound, and the command ``lincorr cache``.

Each LM has a folder in it, with an ``lm.json`` that describes the LM, and files of states whose
names begin with their number of prompts. Nothing else there is touched. torch is not imported.
"""

import re
import sys
from contextlib import suppress
from datetime import datetime
from pathlib import Path

from lincorr_lightning.errors import ConfigError
from lincorr_lightning.io import read_json

GIB = 2**30
LM_FILE = "lm.json"
# Also what a run that was killed has left behind.
_NAME = re.compile(r"((?P<n_prompts>\d+)-[0-9a-f]{32}|\.part-[0-9a-f]{8})\.safetensors")


def _folders(folder: Path) -> list[Path]:
    return [one for one in sorted(folder.iterdir()) if re.fullmatch("[0-9a-f]{32}", one.name)]


def state_files(folder: Path) -> dict[str, int]:
    """Return the number of prompts in each file of an LM's folder, if any; 0 if incomplete."""
    with suppress(FileNotFoundError, NotADirectoryError):  # another run may remove it
        found = {path.name: _NAME.fullmatch(path.name) for path in folder.iterdir()}
        return {name: int(match["n_prompts"] or 0) for name, match in found.items() if match}
    return {}


def drop_oldest(folder: Path, most: float, start: float) -> bool:
    """Remove the files of a state cache that were not used for longest, above a size in bytes.

    A process that reads one of them goes on to do so. Those used since a time go last, the latest
    first, or the next run would find none of what it reads first. Returns whether any of them went.
    """
    used = []
    for path in (lm / name for lm in _folders(folder) for name in state_files(lm)):
        with suppress(FileNotFoundError):  # another run has removed it
            used.append((path.stat().st_mtime, path.stat().st_size, path))
    size, is_own = sum(one for _, one, _ in used), False
    # A file that is being written has a name with a dot, and goes last.
    used.sort(key=lambda x: (x[0] >= start, x[2].name[0] == ".", -abs(x[0] - start)))
    for when, freed, path in used:
        if size <= most:
            break
        path.unlink(missing_ok=True)
        size, is_own = size - freed, when >= start
    return is_own


def cache(folder: str, clear: bool = False) -> None:
    """Show the LMs of a state cache, with dtype, prompts, size and last use; or remove all of it.

    Args:
        folder: The folder that runs name as model.lm.state_cache.
        clear: Whether to remove the states of all LMs.
    """
    root = Path(folder).expanduser()
    if not root.is_dir():
        raise ConfigError(f"there is no folder {root}. Name the --model.lm.state_cache of a run.")
    lines = [("LM", "dtype", "prompts", "MiB", "last use", "folder")]
    for lm in _folders(root):
        files, info = state_files(lm), {"name_or_path": "unknown", "dtype": "unknown"}
        with suppress(ConfigError):  # it is lacking or damaged
            info |= read_json(lm / LM_FILE, ConfigError, "")
        paths = [path for path in (lm / LM_FILE, *map(lm.joinpath, files)) if path.exists()]
        stats = [path.stat() for path in paths or [lm]]
        size = f"{sum(one.st_size for one in stats) / 2**20:,.1f}"
        used = f"{datetime.fromtimestamp(max(one.st_mtime for one in stats)):%Y-%m-%d %H:%M}"
        name, dtype, n = str(info["name_or_path"]), str(info["dtype"]), f"{sum(files.values()):,}"
        lines.append((name, dtype, n, size, used, lm.name))
        if clear:
            for path in paths:
                path.unlink(missing_ok=True)
            with suppress(OSError):  # it holds what is not of the cache
                lm.rmdir()
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        cells = [cell.ljust(width) for cell, width in zip(line, widths, strict=True)]
        sys.stdout.write("  ".join(cells).rstrip() + "\n")
    sys.stdout.write(f"{'removed the ' if clear else ''}states of LMs: {len(lines) - 1}\n")
