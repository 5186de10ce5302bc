"""The folder of a state cache, and the command ``lincorr cache``; torch is not imported.

Each LM has a folder in it, with an ``lm.json`` that describes the LM, and files of states whose
names begin with their number of prompts. Other folders are not touched.
"""

from contextlib import suppress
from datetime import datetime
from pathlib import Path

from lincorr_lightning.errors import ConfigError
from lincorr_lightning.io import read_json
from lincorr_lightning.terminal import write_out

LM_FILE = "lm.json"
STATE_FILES = "[0-9]*-*.safetensors"


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
    for lm_file in sorted(root.glob(f"*/{LM_FILE}")):
        lm = {"name_or_path": "unknown", "dtype": "unknown"}
        with suppress(ConfigError):  # it is damaged
            lm |= read_json(lm_file, ConfigError, "")
        lm_folder = lm_file.parent
        n_prompts = sum(int(path.name.partition("-")[0]) for path in lm_folder.glob(STATE_FILES))
        files = [lm_file, *lm_folder.glob("*.safetensors")]  # also what a killed run left behind
        stats = [path.stat() for path in files]
        size = sum(stat.st_size for stat in stats) / 2**20
        used = datetime.fromtimestamp(max(stat.st_mtime for stat in stats))
        sizes = (f"{n_prompts:,}", f"{size:,.1f}", f"{used:%Y-%m-%d %H:%M}")
        lines.append((str(lm["name_or_path"]), str(lm["dtype"]), *sizes, lm_folder.name))
        if clear:
            for path in files:
                path.unlink(missing_ok=True)
            with suppress(OSError):  # it holds what is not of the cache
                lm_folder.rmdir()
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        cells = [cell.ljust(width) for cell, width in zip(line, widths, strict=True)]
        write_out("  ".join(cells).rstrip() + "\n")
    write_out(f"{'removed the ' if clear else ''}states of LMs: {len(lines) - 1}\n")
