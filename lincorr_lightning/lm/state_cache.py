"""States that the head reads after prompts, kept on disk: no later run reads these prompts again.

The folder of an LM is named by the hash of all that may change the bits of a state: its
fingerprint, its code, how it is read, versions and device. A file there holds the states after the
prompts of one domain and one call: ``states``, ``(n_prompts, hidden_size)``; ``keys``,
``(n_prompts, 2)``, hashes of their token ids; and ``sums``, ``(n_prompts,)``, which show damage.
Files are written completely or not at all and never changed, so that runs can share them.
"""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import os
import sys
import time
from array import array
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from lincorr_lightning.errors import OutputError
from lincorr_lightning.io import atomic_write, check_writable, regular_file, write_json
from lincorr_lightning.lm import fingerprint as prints
from lincorr_lightning.lm import products
from lincorr_lightning.lm.config import LMConfig
from lincorr_lightning.state_folder import GIB, LM_FILE, drop_oldest, state_files
from lincorr_lightning.version import __version__

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_log = logging.getLogger(__name__)

_FORMAT = 2  # raise it where the same prompts would be read in another way
_LIBRARIES, _NOT_HASHED = ("torch", "transformers"), {*vars(torch.nn.Module()), "name_or_path"}
_NO_WRITING = (errno.EACCES, errno.EPERM, errno.EROFS)
_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
_DAMAGES = (SafetensorError, OSError, KeyError, ValueError, RuntimeError)


class StateCache:
    """The folder of states, of at most some GiB, for one LM at a time."""

    def __init__(self, folder: str, gib: float) -> None:
        self._lm = self.folder = Path(folder).expanduser().absolute()
        self._most, self._can_write, self._start = gib * GIB, True, time.time()
        self._info: dict[str, Any] = {}
        self._keys: dict[str, NDArray[np.int64]] = {}  # of each file of the LM
        self.n_found = self.n_requested = 0  #: Prompts, since a run last logged them.

    def prepare(self) -> None:
        """Make the folder; one that must not be written to is only read."""
        try:
            check_writable(self.folder)
        except OutputError as error:
            number = getattr(error.__cause__, "errno", None)
            if number not in _NO_WRITING or not self.folder.is_dir():
                raise
            self._can_write = False
            _log.warning("lm.state_cache is only read: %s", error)

    def open(self, name: str, key: Mapping[str, Any]) -> None:
        """Turn to the LM of a `state_key`, which has this name for people."""
        lm = self.folder / prints.fingerprint_data(key)
        if lm != self._lm:
            self._lm, self._info, self._keys = lm, {"name_or_path": name, **key}, {}

    def find(self, rows: Sequence[Sequence[int]]) -> tuple[Tensor | None, list[int]]:
        """Return the states after prompts, and the indices of those that are not known.

        `rows` are token ids. The states are ``(n_rows, hidden_size)``, on the CPU, with anything
        in the rows that are not known; None if none is.
        """
        states: Tensor | None = None
        missing = np.ones(len(rows), dtype=bool)
        self.n_requested += len(rows)
        self._list_files()
        if not any(map(len, self._keys.values())) or not rows:
            return states, list(range(len(rows)))
        names, known, wanted = [*self._keys], np.concatenate([*self._keys.values()]), _keys_of(rows)
        order = np.argsort(known[:, 0])
        found = order[np.searchsorted(known[order, 0], wanted[:, 0]).clip(max=len(known) - 1)]
        hits = np.flatnonzero((known[found] == wanted).all(1))
        starts = np.cumsum([0, *map(len, self._keys.values())])
        files = np.searchsorted(starts, found[hits], side="right") - 1
        for file in np.unique(files):
            own = hits[files == file]
            if content := self._load(names[file], found[own] - starts[file], wanted[own]):
                part = content["states"]
                states = part.new_empty(len(rows), part.shape[1]) if states is None else states
                states[torch.from_numpy(own)] = part
                missing[own] = False
        self.n_found += len(rows) - int(missing.sum())
        return states, np.flatnonzero(missing).tolist()

    def store(self, domains: Iterable[tuple[Sequence[Sequence[int]], Tensor]]) -> None:
        """Keep the rows of each domain and the states after them in a file, and hold the bound."""
        if not self._can_write:
            return
        try:
            for rows, states in domains:
                keys, states = _keys_of(rows), states.cpu().contiguous()
                name = f"{len(rows)}-{hashlib.blake2b(keys.tobytes(), digest_size=16).hexdigest()}"
                content = {"keys": torch.from_numpy(keys), "states": states}
                if not (self._lm / LM_FILE).exists():
                    write_json(self._lm / LM_FILE, self._info)
                with atomic_write(self._lm / f"{name}.safetensors") as part:
                    save_file(content | {"sums": _sums(keys, states)}, part)
            if drop_oldest(self.folder, self._most, self._start):  # once, as it looks at all files
                raise OutputError("those used since this run began exceed lm.state_cache_gib")
        except (OutputError, OSError) as error:
            self._can_write = False
            _log.warning("No more states are kept in lm.state_cache: %s", error)

    def _list_files(self) -> None:
        """Read the keys of files that are new since the last call, and forget those removed."""
        old, self._keys = self._keys, {}
        for name in sorted(name for name, n_prompts in state_files(self._lm).items() if n_prompts):
            if name in old:
                self._keys[name] = old[name]
            elif content := self._load(name):
                self._keys[name] = content["keys"].numpy().copy()

    def _load(
        self, name: str, rows: NDArray[np.intp] | None = None, keys: NDArray[np.int64] | None = None
    ) -> dict[str, Tensor]:
        """Return a file that is mapped into memory, or rows of it, which must have these keys.

        Nothing is returned, and the prompts are read again, if it is damaged or was removed.
        """
        path = self._lm / name
        try:
            content = load_file(regular_file(path))
            if content["keys"].shape != (len(content["states"]), 2):
                raise ValueError("its keys are not those of its states")
            if rows is not None and keys is not None:
                content = {part: tensor[torch.from_numpy(rows)] for part, tensor in content.items()}
                if not torch.equal(content["sums"], _sums(keys, content["states"])):
                    raise ValueError("its states are not those that were written")
                with suppress(OSError):  # it may only be read
                    os.utime(path)
        except FileNotFoundError:  # another run has made room
            return {}
        except _DAMAGES as error:
            try:
                path.unlink()
            except OSError:  # it stays, and is not read again
                self._keys[name] = np.empty((0, 2), dtype=np.int64)
            _log.warning("Reading prompts anew: %s is damaged (%s).", path, error)
            return {}
        return content


def _keys_of(rows: Sequence[Sequence[int]]) -> NDArray[np.int64]:
    digests = [hashlib.blake2b(array("q", row).tobytes(), digest_size=16).digest() for row in rows]
    return np.frombuffer(b"".join(digests), dtype=np.int64).reshape(-1, 2).copy()


def _sums(keys: NDArray[np.int64], states: Tensor) -> Tensor:
    rows = zip(keys, states.view(_INTEGERS[states.dtype.itemsize]).numpy(), strict=True)
    digests = [hashlib.blake2b(k.tobytes() + x.tobytes(), digest_size=8).digest() for k, x in rows]
    return torch.from_numpy(np.frombuffer(b"".join(digests), dtype=np.int64).copy())


def what_is_unknown(model: PreTrainedModel) -> str:
    """Return what the key of a frozen LM does not say about its states; empty if it says all."""
    for name, part in model.named_modules():
        if part._forward_hooks or part._forward_pre_hooks or "forward" in part.__dict__:
            return f"{name or 'the LM'} has hooks, as adapters of edits are"
        try:
            _described(name, part)
        except (TypeError, AttributeError, ValueError, RuntimeError):
            return f"{name or 'the LM'} has an attribute that cannot be hashed"
    return "its code is in no file" if None in _code_files(model) else ""


def _code_files(model: PreTrainedModel) -> list[str | None]:
    """Return the files of an LM's code that is neither torch's nor transformers'."""
    names = sorted({type(part).__module__ for part in model.modules()})
    own = [name for name in names if name.split(".")[0] not in _LIBRARIES]
    return [getattr(sys.modules[name], "__file__", None) for name in own]


def _described(name: str, layer: torch.nn.Module) -> list[str]:
    """Return what a layer is, and its attributes: all of others' code, else plain ones."""
    own = {k: v for k, v in vars(layer).items() if k not in _NOT_HASHED}
    if type(layer).__module__.split(".")[0] in _LIBRARIES:  # the LM's configuration says the rest
        own = {k: v for k, v in own.items() if isinstance(v, (int, float, str))}
    return [name, type(layer).__qualname__, json.dumps(own, sort_keys=True, default=_bits)]


def _bits(x: Any) -> Any:
    if isinstance(x, Tensor):
        return [str(x.dtype), list(x.shape), *prints.bit_sums([x]).tolist()]
    return sorted(x) if isinstance(x, set) else prints.fingerprint_config(x)


def state_key(
    model: PreTrainedModel, fingerprint: Mapping[str, str], config: LMConfig
) -> dict[str, Any]:
    """Return all that may change the bits of a state, but for its prompt.

    Of a `fingerprint`, which may be older, only what does not change is kept.
    """
    device, is_cuda = model.device, model.device.type == "cuda"
    backends: Any = torch.backends.mkldnn, torch.backends.cuda
    rounding = [one.matmul.fp32_precision for one in backends]  # "none", as none was set, is ieee
    code = [Path(name).read_text(encoding="utf-8") for name in _code_files(model) if name]
    return {
        **fingerprint,
        "config": prints.fingerprint_config(model.config),
        # Every bit, each time: whoever writes to weights need not say so.
        "weights": prints.fingerprint_weights(model),
        "buffers": prints.fingerprint_data(prints.bit_sums(model.buffers()).tolist()),
        "code": prints.fingerprint_data(code),
        "layers": prints.fingerprint_data([_described(*one) for one in model.named_modules()]),
        "attention": getattr(model.config.get_text_config(), "_attn_implementation", None),
        "batches": [config.share_prefixes, config.compile, config.tokens_per_forward],
        "device": torch.cuda.get_device_name(device) if is_cuda else device.type,
        "cpu": torch.backends.cpu.get_cpu_capability(),
        "format": _FORMAT,
        "threads": None if is_cuda else torch.get_num_threads(),  # which divide sums
        "products": [products.name(), *(name.replace("none", "ieee") for name in rounding)],
        "versions": [__version__, torch.__version__, sys.modules["transformers"].__version__],
    }
