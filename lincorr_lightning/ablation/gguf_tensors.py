"""Reading single tensors of a GGUF file, without the rest of it."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from lincorr_lightning.errors import LanguageModelError
from lincorr_lightning.lm.loading import Checkpoint


class GGUFTensors:
    """The tensors of a GGUF file by llama.cpp's names, each dequantized only when it is read.

    Args:
        checkpoint: A checkpoint that is a GGUF file.

    Attributes:
        keys: Names of the tensors, such as ``token_embd.weight``.

    Raises:
        LanguageModelError: The file is damaged or cut short.
    """

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

    def read(self, *keys: str) -> dict[str, Tensor]:
        """Return some tensors, dequantized to float32.

        Raises:
            LanguageModelError: This version of gguf cannot dequantize them.
        """
        import gguf

        try:
            return {
                key: torch.from_numpy(
                    gguf.dequantize(self._tensors[key].data, self._tensors[key].tensor_type).copy()
                )
                for key in keys
            }
        except NotImplementedError as error:
            raise LanguageModelError(
                f"{', '.join(keys)} of {self._checkpoint} cannot be dequantized: {error}. Update "
                "the package gguf, or pass the checkpoint that the file was made from."
            ) from error

    def are_same(self, first: str, second: str) -> bool:
        """Return whether two tensors are equal in every number."""
        tensors = self.read(first, second)
        return torch.equal(tensors[first], tensors[second])
