"""Reading single tensors of a checkpoint, without the rest of it."""

from __future__ import annotations

import zipfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from lincorr_lightning.errors import LanguageModelError
from lincorr_lightning.io import read_json
from lincorr_lightning.lm.loading import Checkpoint, explained, first_line

_SAFETENSORS, _BIN = "model.safetensors", "pytorch_model.bin"
_ROWS_AT_ONCE = 4096  # compared at a time, so that tensors are not read whole


class CheckpointTensors:
    """The tensors of a Hugging Face checkpoint by name, each read only when it is needed.

    Supported are safetensors and torch's ``.bin``, whole or in shards. Where a checkpoint has
    several formats, it is the one that transformers loads.

    Args:
        checkpoint: The checkpoint.

    Attributes:
        keys: Names of the tensors.

    Raises:
        LanguageModelError: It has no weights, or a file is damaged.
    """

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint
        self._files = self._list()
        self.keys = self._files.keys()

    def _list(self) -> dict[str, str]:
        """Return the file of each tensor."""
        for whole in (_SAFETENSORS, _BIN):
            path = self._path(whole)
            if path is not None:
                with self._readable(whole):
                    return dict.fromkeys(_names_in(path), whole)
            name = f"{whole}.index.json"
            index = self._path(name)
            if index is not None:
                with self._readable(name):
                    way_out = self._way_out("it")
                    return dict(read_json(index, LanguageModelError, way_out)["weight_map"])
        raise LanguageModelError(
            f"{self._checkpoint} has no weights: neither {_SAFETENSORS} nor {_BIN}, nor an index "
            f"of shards. {self._way_out('the weights')}"
        )

    def read(self, *keys: str) -> dict[str, Tensor]:
        """Return some tensors, mapped from their files; tied ones remain the same tensor.

        Raises:
            LanguageModelError: A file is missing or damaged.
        """
        tensors: dict[str, Tensor] = {}
        for name in sorted({self._files[key] for key in keys}):
            wanted = [key for key in keys if self._files[key] == name]
            path = self._path(name)
            if path is None:
                raise LanguageModelError(
                    f"{self._checkpoint} lacks the file {name}, in which its index puts "
                    f"{wanted[0]}. {self._way_out('it')}"
                )
            with self._readable(name):
                tensors |= _tensors_in(path, wanted)
        return tensors

    def are_same(self, first: str, second: str) -> bool:
        """Return whether two tensors are equal in every number.

        Raises:
            LanguageModelError: A file is missing or damaged.
        """
        tensors = self.read(first, second)
        one, other = tensors[first], tensors[second]
        if one.shape != other.shape or one.dtype != other.dtype:
            return False
        if one.data_ptr() == other.data_ptr() and one.stride() == other.stride():
            return True
        starts = range(0, len(one), _ROWS_AT_ONCE)  # stops reading at the first difference
        return all(
            torch.equal(one[i : i + _ROWS_AT_ONCE], other[i : i + _ROWS_AT_ONCE]) for i in starts
        )

    def _path(self, name: str) -> Path | None:
        checkpoint = self._checkpoint
        if checkpoint.is_folder:
            path = Path(checkpoint.location) / name
            return path if path.is_file() else None
        from huggingface_hub import hf_hub_download
        from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError

        options = {k: v for k, v in checkpoint.options.items() if k != "trust_remote_code"}
        with explained(checkpoint, name, "Is the network up?"):
            try:
                return Path(hf_hub_download(checkpoint.location, name, **options))
            except EntryNotFoundError as error:
                # Raised for a lost connection too, when the file may well exist.
                if checkpoint.is_online and isinstance(error, LocalEntryNotFoundError):
                    raise
                return None

    def _way_out(self, what: str) -> str:
        checkpoint = self._checkpoint
        if checkpoint.is_folder or checkpoint.is_online:
            return f"Copy or download {what}, or pass another checkpoint."
        return f"Run `hf download {checkpoint.location}` where there is network."

    @contextmanager
    def _readable(self, name: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # the readers raise anything
            raise LanguageModelError(
                f"the weights of {self._checkpoint} cannot be read: {first_line(error)}. The "
                f"file {name} is damaged or cut short; copy or download it again."
            ) from error


def _names_in(path: Path) -> list[str]:
    if path.suffix == ".safetensors":
        with safe_open(path, framework="pt") as file:
            return list(file.keys())
    return list(_load_bin(path))


def _tensors_in(path: Path, keys: Sequence[str]) -> dict[str, Tensor]:
    if path.suffix == ".safetensors":
        with safe_open(path, framework="pt") as file:
            return {key: file.get_tensor(key) for key in keys}
    tensors = _load_bin(path)
    return {key: tensors[key] for key in keys}


def _load_bin(path: Path) -> dict[str, Tensor]:
    # Files of torch before 1.6 are not zip archives and cannot be mapped: they are read whole.
    tensors: dict[str, Tensor] = torch.load(
        path, map_location="cpu", mmap=zipfile.is_zipfile(path), weights_only=True
    )
    return tensors
