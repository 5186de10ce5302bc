"""States that the head reads after prompts, kept on disk: no later run reads these prompts again.

The folder of an LM is named by the hash of all that may change the bits of a state: its
fingerprint, its code, how it is read, versions and device. A file there holds the states after the
prompts of one domain and one call: ``states``, ``(n_prompts, hidden_size)``; ``keys``,
``(n_prompts, 2)``, hashes of their token ids; and ``sums``, ``(n_prompts,)``, which show damage.
Files are written completely or not at all and never changed, so that runs can share them.
"""

from __future__ import annotations

import hashlib
import inspect
import logging
import os
import sys
from array import array
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from lincorr_lightning.errors import OutputError
from lincorr_lightning.io import atomic_write, check_writable, regular_file, write_json
from lincorr_lightning.lm import fingerprint as prints
from lincorr_lightning.lm import products
from lincorr_lightning.state_folder import GIB, LM_FILE, drop_oldest, state_files
from lincorr_lightning.version import __version__

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_log = logging.getLogger(__name__)

_FORMAT = 1  # raise it where the same prompts would be read in another way
_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
_DAMAGES = (SafetensorError, OSError, KeyError, ValueError, IndexError, RuntimeError)


class StateCache:
    """The folder of states, for one LM at a time.

    Args:
        folder: Where the states are kept; it is made.
        gib: Its size in GiB, above which the states that were not used for longest are removed.

    Raises:
        OutputError: The folder cannot be written to.
    """

    def __init__(self, folder: str, gib: float) -> None:
        self.folder, self._most = Path(folder).expanduser().absolute(), gib * GIB
        check_writable(self.folder)
        self._lm = self.folder
        self._info: Mapping[str, Any] = {}
        self._keys: dict[str, NDArray[np.int64]] = {}  # of each file of the LM
        self._used: set[Path] = set()
        self._can_write = True

    def open(self, info: Mapping[str, Any], key: Mapping[str, Any]) -> None:
        """Turn to an LM by its `state_key`; `info` describes it for people."""
        lm = self.folder / prints.fingerprint_data(dict(key))
        if lm != self._lm:
            self._lm, self._info, self._keys = lm, {**info, "key": dict(key)}, {}

    def find(self, rows: Sequence[Sequence[int]]) -> tuple[Tensor | None, list[int]]:
        """Return the states after prompts, and the indices of those that are not known.

        `rows` are token ids. The states are ``(n_rows, hidden_size)``, on the CPU, with anything
        in the rows that are not known; None if none is.
        """
        self._list_files()
        missing = np.ones(len(rows), dtype=bool)
        states: Tensor | None = None
        if not self._keys or not rows:
            return None, list(range(len(rows)))
        wanted, names = _keys_of(rows), list(self._keys)
        known = np.concatenate(list(self._keys.values()))
        starts = np.cumsum([0, *map(len, self._keys.values())])
        order = np.argsort(known[:, 0], kind="stable")
        places = np.searchsorted(known[order, 0], wanted[:, 0]).clip(max=len(known) - 1)
        found = order[places]
        hits = np.flatnonzero((known[found] == wanted).all(1))
        files = np.searchsorted(starts, found[hits], side="right") - 1
        for file in np.unique(files):
            own = hits[files == file]
            part = self._read(names[file], found[own] - starts[file], wanted[own])
            if part is not None:
                if states is None:
                    states = part.new_empty(len(rows), part.shape[1])
                states[torch.from_numpy(own)] = part
                missing[own] = False
        return states, np.flatnonzero(missing).tolist()

    def store(self, rows: Sequence[Sequence[int]], states: Tensor) -> None:
        """Keep the states after prompts, ``(n_rows, hidden_size)``, in one file."""
        if not self._can_write or not rows:
            return
        keys, states = _keys_of(rows), states.cpu().contiguous()
        name = hashlib.blake2b(keys.tobytes(), digest_size=16).hexdigest()
        tensors = {"keys": torch.from_numpy(keys), "states": states, "sums": _sums(keys, states)}
        try:
            if not (self._lm / LM_FILE).exists():
                write_json(self._lm / LM_FILE, self._info)
            with atomic_write(self._lm / f"{len(rows)}-{name}.safetensors") as part:
                save_file(tensors, part)
            drop_oldest(self.folder, self._most)
        except (OutputError, OSError) as error:
            self._can_write = False
            _log.warning("No more states are kept in lm.state_cache: %s", error)

    def _list_files(self) -> None:
        """Read the keys of files that are new since the last call, and forget those removed."""
        names = state_files(self._lm) if self._lm.is_dir() else {}
        complete = sorted(name for name, n_prompts in names.items() if n_prompts)
        if complete != list(self._keys):
            old = self._keys
            self._keys = {}
            for name in complete:
                keys = old[name] if name in old else self._read_keys(name)
                if keys is not None:
                    self._keys[name] = keys

    def _read_keys(self, name: str) -> NDArray[np.int64] | None:
        try:
            with safe_open(regular_file(self._lm / name), framework="np") as file:
                keys: NDArray[np.int64] = file.get_tensor("keys")
            return keys.reshape(-1, 2)
        except _DAMAGES as error:
            self._drop(name, error)
            return None

    def _read(self, name: str, rows: NDArray[np.intp], keys: NDArray[np.int64]) -> Tensor | None:
        """Return the states of some rows of a file, ``(n_rows, hidden_size)``, None if damaged."""
        path = self._lm / name
        try:
            chosen = torch.from_numpy(rows)
            with safe_open(regular_file(path), framework="pt") as file:  # mapped into memory
                states = file.get_tensor("states").index_select(0, chosen)
                sums = file.get_tensor("sums")[chosen]
            if not torch.equal(sums, _sums(keys, states)):
                raise ValueError("its states are not those that were written")
            if path not in self._used:
                os.utime(path)
                self._used.add(path)
        except _DAMAGES as error:
            self._drop(name, error)
            return None
        return states

    def _drop(self, name: str, error: Exception) -> None:
        if isinstance(error, FileNotFoundError):  # another run has made room
            return
        with suppress(OSError):
            (self._lm / name).unlink(missing_ok=True)
        reason = " ".join(str(error).split())
        _log.warning("Reading prompts anew: %s is damaged (%s).", self._lm / name, reason)


def _keys_of(rows: Sequence[Sequence[int]]) -> NDArray[np.int64]:
    digests = [hashlib.blake2b(array("q", row).tobytes(), digest_size=16).digest() for row in rows]
    return np.frombuffer(b"".join(digests), dtype=np.int64).reshape(-1, 2).copy()


def _sums(keys: NDArray[np.int64], states: Tensor) -> Tensor:
    bits = states.view(_INTEGERS[states.dtype.itemsize])
    return bits.sum(1, dtype=torch.int64) + torch.from_numpy(keys.sum(1))


def obstacle(model: PreTrainedModel) -> str | None:
    """Return why the states of an LM are not kept, or None: its key must say all about them."""
    if any(parameter.requires_grad for parameter in model.parameters()):
        return "the LM is trained"
    for part in model.modules():
        # Of peft; what adapters do depends on which are active.
        if isinstance(getattr(part, "scaling", None), dict):
            return "the LM has adapters"
        if part._forward_hooks or part._forward_pre_hooks or "forward" in part.__dict__:
            return f"hooks change what {type(part).__name__} returns"
    if None in _code_of(model).values():
        return "the code of the LM is in no file"
    return None


def _code_of(model: PreTrainedModel) -> dict[str, str | None]:
    """Return hashes of the modules that an LM's code is in, beyond those of known versions."""
    names = {type(part).__module__ for part in model.modules()}
    own = sorted(name for name in names if name.split(".")[0] not in ("torch", "transformers"))
    return {name: _source_hash(name) for name in own}


@lru_cache(maxsize=256)
def _source_hash(module: str) -> str | None:
    try:
        return prints.fingerprint_data(inspect.getsource(sys.modules[module]))
    except (OSError, TypeError):
        return None


def state_key(
    model: PreTrainedModel, fingerprint: Mapping[str, str], settings: Sequence[Any]
) -> dict[str, Any]:
    """Return all that may change the bits of a state, but for its prompt."""
    device, is_cuda = model.device, model.device.type == "cuda"
    backends: Any = torch.backends.mkldnn, torch.backends.cuda
    return {
        **fingerprint,
        "buffers": prints.fingerprint_data(prints.bit_sums(model.buffers()).tolist()),
        "code": _code_of(model),
        "attention": getattr(model.config.get_text_config(), "_attn_implementation", None),
        "settings": list(settings),
        "device": torch.cuda.get_device_name(device) if is_cuda else device.type,
        "cpu": torch.backends.cpu.get_cpu_capability(),
        "threads": None if is_cuda else torch.get_num_threads(),  # which divide sums
        "products": [products.name(), *(one.matmul.fp32_precision for one in backends)],
        "versions": [__version__, torch.__version__, sys.modules["transformers"].__version__],
        "format": _FORMAT,
    }
