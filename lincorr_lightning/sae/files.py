"""Read the files of an SAE, with errors that name the file."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from lincorr_lightning.errors import SparseAutoencoderError
from lincorr_lightning.io import read_json

WAY_OUT = "Copy or download the SAE again, or pass another folder."


def fail_to_read(path: Path, reason: str) -> NoReturn:
    """Raise the error of a file that cannot be read."""
    raise SparseAutoencoderError(f"cannot read {path}: {reason}. {WAY_OUT}")


def raise_unsupported(path: Path, reason: str, way_out: str) -> NoReturn:
    """Raise the error of an SAE that is undamaged but cannot be used."""
    raise SparseAutoencoderError(f"cannot use the SAE of {path}: {reason}. {way_out}")


def read_config(path: Path) -> Mapping[str, Any]:
    """Read a JSON object.

    Raises:
        SparseAutoencoderError: The file is missing or damaged, or holds no object.
    """
    return read_json(path, SparseAutoencoderError, WAY_OUT)


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Read a safetensors file.

    Raises:
        SparseAutoencoderError: The file is missing or damaged.
    """
    if not path.is_file():
        fail_to_read(path, "there is no such file")
    try:
        return load_file(path)
    except (SafetensorError, OSError) as error:
        fail_to_read(path, f"it is damaged or cut short ({error})")


class TensorReader:
    """Look up the tensors of a file by name, in float32."""

    def __init__(self, path: Path, tensors: Mapping[str, Tensor]) -> None:
        self._path, self._tensors = path, tensors

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def __call__(self, name: str) -> Tensor:
        """Return a tensor in float32.

        Raises:
            SparseAutoencoderError: The file lacks it.
        """
        if name not in self._tensors:
            fail_to_read(self._path, f"it lacks {name} (it has {', '.join(self._tensors)})")
        return self._tensors[name].float()
