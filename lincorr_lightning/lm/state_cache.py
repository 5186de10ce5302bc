"""States that the head reads after prompts, kept on disk: no later run reads these prompts again.

The folder of an LM is named by the hash of its `state_key`. A file there holds the states after the
prompts of one call, ``states``, ``(n_prompts, hidden_size)``, and hashes of the prompts' token ids,
``keys``, ``(n_prompts, 16)``. The last bits of a state depend on what is read together. Therefore
one of the prompts, ``check_prompt``, is read once more, alone; a later run must get the same bits,
``check_state``. Files are written completely or not at all and never changed, so that runs can
share them.
"""

from __future__ import annotations

import hashlib
import logging
import os
import time
from array import array
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from importlib.metadata import version
from itertools import islice
from pathlib import Path
from random import SystemRandom
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from lincorr_lightning.errors import OutputError
from lincorr_lightning.io import atomic_write, check_writable, regular_file, write_json
from lincorr_lightning.lm import fingerprint as prints
from lincorr_lightning.lm import products
from lincorr_lightning.lm.config import LMConfig
from lincorr_lightning.lm.modes import dtype_name
from lincorr_lightning.lm.state_folder import LM_FILE, STATE_FILES
from lincorr_lightning.version import __version__

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_log = logging.getLogger(__name__)

Reader = Callable[[Sequence[int]], Tensor]
_N_CHECKED = 4  # files, when the cache turns to an LM
_KEY_SIZE = 16
_random = SystemRandom()  # training draws nothing from it


class StateCache:
    """The folder of states, of at most some GiB, for one LM at a time; it verifies itself.

    When it turns to an LM, the check prompts of four of its files, drawn at random, are read again
    by the LM as it is now. If a state differs in any bit, as after a change of code (a kernel, an
    attention function, a global hook), all files of the LM are removed. Each rank does so before it
    takes a state. Changes that these prompts do not show, or that are made later in a run, are not
    noticed. A checksum, whenever a file is opened, covers the key of its LM, and names, shapes,
    dtypes and bits of all that it holds.

    A `Reader` is a function that returns the bits of the states after a prompt that is read alone,
    once in each way in which the LM reads prompts; uint8, on the CPU.
    """

    def __init__(self, folder: str, gib: float) -> None:
        self.folder = Path(folder).expanduser().absolute()
        self._size = gib * 2**30
        self._start = time.time()
        self._can_write = True
        self._lm_folder = self.folder
        self._lm: dict[str, Any] = {}
        self._files: set[Path] = set()  # of the LM, that are known
        self._places: dict[bytes, tuple[Path, int]] = {}  # file and row of each prompt
        self.n_found = 0  #: Prompts, since a run last logged them.
        self.n_requested = 0  #: Prompts, since a run last logged them.

    def prepare(self) -> None:
        """Make the folder; one that must not be written to is only read."""
        self._can_write = not self.folder.is_dir() or os.access(self.folder, os.W_OK)
        if self._can_write:
            check_writable(self.folder)
        else:
            _log.warning("lm.state_cache is only read: %s cannot be written to.", self.folder)

    def open(self, model: PreTrainedModel, config: LMConfig, read: Reader) -> None:
        """Turn to an LM as it is now, and verify its files."""
        key = state_key(model, config)
        lm_folder = self.folder / prints.fingerprint_data(key)
        if lm_folder == self._lm_folder:
            return
        self._lm_folder = lm_folder
        self._lm = {"name_or_path": config.name_or_path, **key}
        self._files, self._places = set(), {}
        paths = [*lm_folder.glob(STATE_FILES)]
        _random.shuffle(paths)
        for file in islice(filter(None, map(self._load, paths)), _N_CHECKED):
            if not torch.equal(read(file["check_prompt"].tolist()), file["check_state"]):
                why = "the LM computes other states than when they were stored"
                _log.warning("Discarding %s: %s.", lm_folder, why)
                for path in paths:
                    self._remove(path)
                return

    def find(
        self, rows: Sequence[Sequence[int]], keep: Callable[[Sequence[int], Tensor], None]
    ) -> list[int]:
        """Call `keep` with indices of known prompts and their states; return the other indices.

        `rows` are the token ids of prompts.
        """
        for path in sorted(self._lm_folder.glob(STATE_FILES)):
            if path not in self._files and (file := self._load(path)):
                self._files.add(path)
                keys = [key.tobytes() for key in file["keys"].numpy()]
                self._places |= {key: (path, row) for row, key in enumerate(keys)}
        known: dict[Path, dict[int, int]] = defaultdict(dict)
        for index, key in enumerate(map(_key, rows)):
            if key in self._places:
                path, row = self._places[key]
                known[path][index] = row
        missing = set(range(len(rows)))
        for path, places in known.items():
            if file := self._load(path):
                keep([*places], file["states"][[*places.values()]])
                missing -= places.keys()
                with suppress(OSError):  # it may only be read
                    os.utime(path)
        self.n_requested += len(rows)
        self.n_found += len(rows) - len(missing)
        return sorted(missing)

    def store(self, rows: Sequence[Sequence[int]], states: Tensor, read: Reader) -> None:
        """Keep prompts and the states after them in a file, unless the folder is full."""
        if not self._can_write:
            return
        keys = b"".join(map(_key, rows))
        prompt = _random.choice(rows)
        file = {
            "states": states.cpu().contiguous(),
            "keys": torch.frombuffer(bytearray(keys), dtype=torch.uint8).view(-1, _KEY_SIZE),
            "check_prompt": torch.tensor(prompt),
            "check_state": read(prompt),
        }
        name = f"{len(rows)}-{prints.fingerprint_data(keys.hex())}.safetensors"
        path = self._lm_folder / name
        try:
            if not path.with_name(LM_FILE).exists():
                write_json(path.with_name(LM_FILE), self._lm)
            with atomic_write(path) as part:
                save_file(file, part, {"checksum": self._checksum(file)})
            if not self._make_room():
                path.unlink()
                raise OutputError("those used since this run began exceed lm.state_cache_gib")
        except (OutputError, OSError) as error:
            self._can_write = False
            _log.warning("No more states are kept in lm.state_cache: %s", error)

    def _make_room(self) -> bool:
        """Remove files that were not used for longest, but none that was used since the run began.

        A process that reads a removed file goes on to do so. Returns whether the size is kept.
        """
        stats = {}
        for lm_file in self.folder.glob(f"*/{LM_FILE}"):
            for path in lm_file.parent.glob("*.safetensors"):
                with suppress(FileNotFoundError):  # another run has removed it
                    stats[path] = path.stat()
        size = sum(stat.st_size for stat in stats.values())
        for path, stat in sorted(stats.items(), key=lambda item: item[1].st_mtime):
            if size > self._size and stat.st_mtime < self._start:
                path.unlink(missing_ok=True)
                size -= stat.st_size
        return size <= self._size

    def _load(self, path: Path) -> dict[str, Tensor] | None:
        """Return the tensors of a file, mapped into memory; None if it cannot be used."""
        try:
            with safe_open(regular_file(path), "pt") as opened:
                file = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
                if (opened.metadata() or {}).get("checksum") == self._checksum(file):
                    return file
        except FileNotFoundError:  # another run has made room
            return None
        except (SafetensorError, OSError):
            pass
        _log.warning("Reading prompts anew: %s is damaged, or was not written for this LM.", path)
        self._remove(path)
        return None

    def _remove(self, path: Path) -> None:
        """Remove a file; one that must stay is ignored."""
        self._files.add(path)
        with suppress(OSError):
            path.unlink(missing_ok=True)
            self._files.remove(path)

    def _checksum(self, file: Mapping[str, Tensor]) -> str:
        return prints.fingerprint_data([self._lm_folder.name, prints.fingerprint_tensors(file)])


def _key(row: Sequence[int]) -> bytes:
    return hashlib.blake2b(array("q", row).tobytes(), digest_size=_KEY_SIZE).digest()


def state_key(model: PreTrainedModel, config: LMConfig) -> dict[str, Any]:
    """Return what the states of an LM depend on, but for prompts and code."""
    # Every bit, each time: whoever writes to weights need not say so.
    weights = {**model.state_dict(), **dict(model.named_buffers())}
    return {
        "dtype": dtype_name(model.dtype),
        "config": prints.fingerprint_config(model.config),
        "weights": prints.fingerprint_tensors(weights),
        "attention": getattr(model.config.get_text_config(), "_attn_implementation", None),
        "batches": [config.share_prefixes, config.compile, config.tokens_per_forward],
        "products": products.conditions(model.device),
        "versions": [__version__, torch.__version__, version("transformers")],
    }
