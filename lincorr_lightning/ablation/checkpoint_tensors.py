"""Reading single tensors of a checkpoint or GGUF file, without the rest of it."""

from __future__ import annotations

import zipfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from lincorr_lightning.errors import LanguageModelError
from lincorr_lightning.io import read_json
from lincorr_lightning.lm.loading import Checkpoint, explained, first_line

_SAFETENSORS, _BIN = "model.safetensors", "pytorch_model.bin"


def open_tensors(checkpoint: Checkpoint) -> CheckpointTensors | GGUFTensors:
    """Open a Hugging Face checkpoint or a GGUF file."""
    if checkpoint.gguf_file is not None:
        return GGUFTensors(checkpoint)
    return CheckpointTensors(checkpoint)


class GGUFTensors:
    """The tensors of a GGUF file by llama.cpp's names, such as ``token_embd.weight``."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        import gguf

        self._checkpoint = checkpoint
        path = Path(checkpoint.location) / str(checkpoint.gguf_file)
        try:
            tensors = gguf.GGUFReader(path).tensors
        except (OSError, ValueError, KeyError, IndexError) as error:
            raise LanguageModelError(
                f"the tensors of {checkpoint} cannot be read: {error}. Is the file complete? "
                "Compare its size, or download it again."
            ) from error
        self._tensors = {tensor.name: tensor for tensor in tensors}
        self.keys = self._tensors.keys()

    def read(self, *keys: str) -> list[Tensor]:
        """Return some tensors, dequantized to float32."""
        import gguf

        tensors = [self._tensors[key] for key in keys]
        try:
            arrays = [gguf.dequantize(tensor.data, tensor.tensor_type) for tensor in tensors]
        except NotImplementedError as error:
            raise LanguageModelError(
                f"{', '.join(keys)} of {self._checkpoint} cannot be dequantized: {error}. Update "
                "the package gguf, or pass the checkpoint that the file was made from."
            ) from error
        return [torch.from_numpy(array.copy()) for array in arrays]


class CheckpointTensors:
    """The tensors of safetensors or of torch's ``.bin``, whole or in shards.

    Where a checkpoint has several formats, it is the one that transformers loads.
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
                with self._readable(whole), _opened(path) as (names, _):
                    return dict.fromkeys(names, whole)
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

    def read(self, *keys: str) -> list[Tensor]:
        """Return some tensors, mapped from their files; tied ones remain the same tensor."""
        tensors: dict[str, Tensor] = {}
        for name in sorted({self._files[key] for key in keys}):
            wanted = [key for key in keys if self._files[key] == name]
            path = self._path(name)
            if path is None:
                raise LanguageModelError(
                    f"{self._checkpoint} lacks the file {name}, in which its index puts "
                    f"{wanted[0]}. {self._way_out('it')}"
                )
            with self._readable(name), _opened(path) as (_, read):
                tensors |= {key: read(key) for key in wanted}
        return [tensors[key] for key in keys]

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


@contextmanager
def _opened(path: Path) -> Iterator[tuple[Iterable[str], Callable[[str], Tensor]]]:
    """Open a file for its names and single tensors."""
    if path.suffix == ".safetensors":
        with safe_open(path, framework="pt") as file:
            yield file.keys(), file.get_tensor
        return
    # Files of torch before 1.6 are not zip archives and cannot be mapped: they are read whole.
    tensors: dict[str, Tensor] = torch.load(
        path, map_location="cpu", mmap=zipfile.is_zipfile(path), weights_only=True
    )
    yield tensors.keys(), tensors.__getitem__
