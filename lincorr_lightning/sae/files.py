"""Read the files of an SAE, with errors that name the file."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn
from zipfile import BadZipFile, ZipFile, ZipInfo

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from lincorr_lightning.errors import SparseAutoencoderError
from lincorr_lightning.io import read_json

_WAY_OUT = "Copy or download the SAE again, or pass another folder."
_MAX_COMPRESSION = 1032  # of zip's deflate


def fail_to_read(path: Path, reason: str) -> NoReturn:
    """Raise the error of a file that cannot be read."""
    raise SparseAutoencoderError(f"cannot read {path}: {reason}. {_WAY_OUT}")


def raise_unsupported(path: Path, reason: str, way_out: str) -> NoReturn:
    """Raise the error of an SAE that is undamaged but cannot be used."""
    raise SparseAutoencoderError(f"cannot use the SAE of {path}: {reason}. {way_out}")


def read_config(path: Path) -> Mapping[str, Any]:
    """Read a JSON object."""
    return read_json(path, SparseAutoencoderError, _WAY_OUT)


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Read a ``.safetensors`` or ``.npz`` file of numbers; nothing is unpickled."""
    if not path.is_file():
        fail_to_read(path, "there is no such file")
    if path.suffix != ".npz":
        try:
            return load_file(path)
        except (SafetensorError, OSError) as error:
            fail_to_read(path, f"it is damaged or cut short ({error})")
    try:
        with ZipFile(path) as archive:
            for entry in archive.infolist():
                _check_size(archive, entry, path.stat().st_size)
        with np.load(path, allow_pickle=False) as arrays:
            return {name: torch.from_numpy(arrays[name]) for name in arrays.files}
    except (OSError, ValueError, EOFError, BadZipFile, TypeError, KeyError, MemoryError) as error:
        fail_to_read(path, f"it is damaged or holds pickled objects, which are not read ({error})")


def _check_size(archive: ZipFile, entry: ZipInfo, file_size: int) -> None:
    """Refuse an array that is too large for its file, before numpy allocates memory."""
    form = np.lib.format
    headers = {(1, 0): form.read_array_header_1_0, (2, 0): form.read_array_header_2_0}
    with archive.open(entry) as file:
        shape, _, dtype = headers[form.read_magic(file)](file)
    n_bytes = math.prod(shape) * dtype.itemsize
    if n_bytes > min(entry.file_size, _MAX_COMPRESSION * file_size):
        raise ValueError(f"{entry.filename} claims the shape {shape}, for which it is too short")
