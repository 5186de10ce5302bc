"""The token embedding of a checkpoint, without the rest of it."""

import logging
import re
import zipfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import safe_open
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from lincorr_lightning.errors import LanguageModelError
from lincorr_lightning.io import read_json
from lincorr_lightning.lm import loading
from lincorr_lightning.lm.config import LMConfig
from lincorr_lightning.lm.fingerprint import fingerprint_tensors, fingerprint_tokenizer
from lincorr_lightning.lm.loading import Checkpoint, explained
from lincorr_lightning.lm.modes import dtype_name

_log = logging.getLogger(__name__)

EmbeddingSource = Literal["input", "output"]

# How the names of the two matrices end, in the architectures of transformers and in GGUF files.
_INPUTS = (
    "embed_tokens.weight",
    "wte.weight",
    "word_embeddings.weight",
    "shared.weight",
    "tok_embeddings.weight",
    "embed_in.weight",
    "word_embedding.weight",
    "token_embedding.weight",
    "token_embd.weight",
    "embeddings.weight",
    "tokens_embed.weight",
    "input_embedding.weight",
)
_HEADS = (
    "lm_head.weight",
    "embed_out.weight",
    "output_layer.weight",
    "output.weight",
    "lm_head.decoder.weight",
    "predictions.decoder.weight",
    "pred_layer.proj.weight",
    "head.weight",
)
_IN_A_LAYER = re.compile(r"\.\d+\.")
_MAX_LISTED = 12
_COPY_AGAIN = "Copy or download the whole checkpoint again, or pass another one."

_Tensors = dict[str, Callable[[], Tensor]]  #: How to read each tensor of a checkpoint.


@dataclass(frozen=True, eq=False)
class TokenEmbedding:
    """The token embedding of a checkpoint, with its tokenizer."""

    weight: Tensor
    """Embedding matrix in the checkpoint's precision, ``(n_tokens, d)``; mapped from the file."""
    key: str  #: Name of the matrix in the checkpoint.
    tokenizer: PreTrainedTokenizerBase
    checkpoint: Checkpoint

    @cached_property
    def fingerprint(self) -> dict[str, str]:
        """Hashes of ``tokenizer`` and ``weights``, and the ``dtype``; reads the whole matrix."""
        return {
            "tokenizer": fingerprint_tokenizer(self.tokenizer, ()),
            "dtype": dtype_name(self.weight.dtype),
            "weights": fingerprint_tensors({"weight": self.weight}),
        }

    @property
    def info(self) -> dict[str, Any]:
        """Name or path, dtype, fingerprint and number of parameters, as in ``results.json``."""
        return {
            "name_or_path": self.checkpoint.request.name_or_path,
            "dtype": dtype_name(self.weight.dtype),
            "fingerprint": self.fingerprint,
            "n_parameters": self.weight.numel(),
            **self.checkpoint.merged,
        }

    def rows(self, token_ids: Sequence[int] | Tensor) -> Tensor:
        """Return the embeddings of n tokens as a float32 copy, ``(n, d)``."""
        return self.weight[torch.as_tensor(token_ids)].float()

    def pooled(self, token_ids: Sequence[Sequence[int]]) -> Tensor:
        """Return the mean embedding of each text, ``(n_texts, d)``, float32."""
        flat = torch.tensor([token for ids in token_ids for token in ids])
        used, positions = torch.unique(flat, return_inverse=True)
        starts = torch.tensor([0, *map(len, token_ids[:-1])]).cumsum(0)
        # In float64, so that a text's mean does not depend on the order of its sum.
        rows = self.rows(used).double()
        return nn.functional.embedding_bag(positions, rows, starts, mode="mean").float()


def read_token_embedding(config: LMConfig, source: EmbeddingSource = "input") -> TokenEmbedding:
    """Read the token embedding of a checkpoint, and its tokenizer.

    Any Hugging Face checkpoint with an input embedding is supported: a decoder, an encoder, or
    both. The matrix is known by its name; of the checkpoint, only the file that holds it is opened,
    and only the matrix is read from it, in its stored precision (the `dtype` of the settings is
    ignored). Of an LM with an untied head, the `source` is the ``input``'s embedding or the head,
    ``output``. A `LanguageModelError` if there is no such checkpoint or matrix, it cannot be read,
    or it has fewer rows than the tokenizer has tokens.
    """
    checkpoint = loading.find_checkpoint(config)
    text_config = loading.read_config(checkpoint, must_be_causal=False).get_text_config()
    tokenizer = loading.read_tokenizer(checkpoint)
    tensors = _tensors(checkpoint)
    key, head = _find(tensors, _INPUTS), _find(tensors, _HEADS)
    if key is None:
        raise LanguageModelError(
            f"{checkpoint} has no token embedding: its tensors are "
            f"{', '.join(sorted(tensors)[:_MAX_LISTED])}, ... Pass a checkpoint with one."
        )
    ties = getattr(text_config, "tie_word_embeddings", False)
    # A config that ties may have two matrices: .bin files store the one twice, T5 v1.1 has two.
    if head is not None and not (ties and torch.equal(tensors[key](), tensors[head]())):
        key, other = (head, key) if source == "output" else (key, head)
        _log.warning(
            "The head of %s is not tied to its embedding: %s is used for both, and not %s. Choose "
            "by model.embedding_source: input for the embedding, output for the head.",
            config.name_or_path,
            key,
            other,
        )
    weight = tensors[key]()
    if weight.ndim != 2 or not weight.is_floating_point():
        raise LanguageModelError(
            f"{key} of {checkpoint} is {tuple(weight.shape)} in {weight.dtype}, not a matrix of "
            "floating-point numbers with a row for each token. If it is quantized, pass the "
            "checkpoint that it was made from."
        )
    if len(weight) <= (largest := max(tokenizer.get_vocab().values())):
        raise LanguageModelError(
            f"{key} of {checkpoint} has {len(weight)} rows, but the tokenizer's largest id is "
            f"{largest}, which needs {largest + 1}: tokenizer and weights do not belong together. "
            "Take both from one checkpoint."
        )
    return TokenEmbedding(weight, key, tokenizer, checkpoint)


def _find(keys: Iterable[str], endings: Sequence[str]) -> str | None:
    """Return the shortest name outside of layers with the first of `endings` that occurs."""
    outside = [key for key in sorted(keys, key=len) if not _IN_A_LAYER.search(key)]
    return next((k for end in endings for k in outside if f".{k}".endswith(f".{end}")), None)


def _gguf_tensors(checkpoint: Checkpoint) -> _Tensors:
    """Open a GGUF file; its tensors have llama.cpp's names, and are dequantized to float32."""
    import gguf

    path = Path(checkpoint.location) / str(checkpoint.gguf_file)
    with explained(checkpoint, "the tensors", "Is it complete? Compare its size."):
        tensors = gguf.GGUFReader(path).tensors

    def read(tensor: gguf.ReaderTensor) -> Tensor:
        way_out = "Update the package gguf, or pass the checkpoint that the file was made from."
        with explained(checkpoint, tensor.name, way_out):
            return torch.from_numpy(gguf.dequantize(tensor.data, tensor.tensor_type).copy())

    return {tensor.name: partial(read, tensor) for tensor in tensors}


def _tensors(checkpoint: Checkpoint) -> _Tensors:
    """Open safetensors or torch's ``.bin``, whole or in shards, whichever transformers loads.

    A GGUF file has llama.cpp's names; an LM with an adapter is read whole, to merge it.
    """
    if checkpoint.adapter is not None:
        in_stored_dtype = replace(checkpoint, request=replace(checkpoint.request, dtype="auto"))
        state = loading.read_model(in_stored_dtype, loading.read_config(checkpoint)).state_dict()
        return {name: partial(state.__getitem__, name) for name in state}
    if checkpoint.gguf_file is not None:
        return _gguf_tensors(checkpoint)
    for whole in ("model.safetensors", "pytorch_model.bin"):
        index = f"{whole}.index.json"
        if path := loading.file_of(checkpoint, whole):
            with explained(checkpoint, whole, _COPY_AGAIN), _opened(path) as (names, _):
                return {name: partial(_read, checkpoint, whole, name) for name in names}
        if path := loading.file_of(checkpoint, index):
            with explained(checkpoint, index, _COPY_AGAIN):
                shards = read_json(path, LanguageModelError, _COPY_AGAIN)["weight_map"].items()
            return {name: partial(_read, checkpoint, shard, name) for name, shard in shards}
    raise LanguageModelError(
        f"{checkpoint} has no weights: neither model.safetensors nor pytorch_model.bin, nor an "
        f"index of shards. {_COPY_AGAIN}"
    )


def _read(checkpoint: Checkpoint, file: str, key: str) -> Tensor:
    if (path := loading.file_of(checkpoint, file)) is None:
        raise LanguageModelError(
            f"{checkpoint} lacks the file {file}, in which its index puts {key}. {_COPY_AGAIN}"
        )
    with explained(checkpoint, file, _COPY_AGAIN), _opened(path) as (_, read):
        return read(key).detach()


@contextmanager
def _opened(path: Path) -> Iterator[tuple[Iterable[str], Callable[[str], Tensor]]]:
    if path.suffix == ".safetensors":
        with safe_open(path, framework="pt") as file:
            yield file.keys(), file.get_tensor
        return
    # Files of torch before 1.6 are not zip archives and cannot be mapped: they are read whole.
    tensors: dict[str, Tensor] = torch.load(
        path, map_location="cpu", mmap=zipfile.is_zipfile(path), weights_only=True
    )
    yield tensors.keys(), tensors.__getitem__
