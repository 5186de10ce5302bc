"""Reading the files of an SAE, with errors that name the file."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from lincorr_lightning.errors import SparseAutoencoderError


def fail_to_read(path: Path, reason: str) -> NoReturn:
    """Say which file of an SAE cannot be read, and why."""
    raise SparseAutoencoderError(
        f"cannot read {path}: {reason}. Copy or download the SAE again, or pass another folder."
    )


def raise_unsupported(path: Path, reason: str, way_out: str) -> NoReturn:
    """Say why an SAE that is whole cannot be used, and what can."""
    raise SparseAutoencoderError(f"cannot use the SAE of {path}: {reason}. {way_out}")


def read_json(path: Path) -> Mapping[str, Any]:
    """Read a JSON object.

    Raises:
        SparseAutoencoderError: It is missing, damaged or no object.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        fail_to_read(path, (error.strerror or str(error)).lower())
    except ValueError as error:
        fail_to_read(path, f"it is no valid JSON ({error})")
    if not isinstance(content, dict):
        fail_to_read(path, "it is no JSON object")
    return content


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Read a safetensors file.

    Raises:
        SparseAutoencoderError: It is missing or damaged.
    """
    if not path.is_file():
        fail_to_read(path, "there is no such file")
    try:
        return load_file(path)
    except (SafetensorError, OSError) as error:
        fail_to_read(path, f"it is damaged or cut short ({error})")
