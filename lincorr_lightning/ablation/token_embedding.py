"""The token embedding of a checkpoint, without the rest of it."""

import logging
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from lincorr_lightning.errors import LanguageModelError
from lincorr_lightning.io import read_json
from lincorr_lightning.lm import loading
from lincorr_lightning.lm.config import LMConfig
from lincorr_lightning.lm.fingerprint import fingerprint_tensors, fingerprint_tokenizer
from lincorr_lightning.lm.loading import Checkpoint, explained
from lincorr_lightning.lm.modes import dtype_name

_log = logging.getLogger(__name__)

# How the name of the matrix ends, in the architectures of transformers.
_ENDINGS = (
    "embed_tokens.weight",
    "wte.weight",
    "word_embeddings.weight",
    "shared.weight",
    "tok_embeddings.weight",
    "embed_in.weight",
    "word_embedding.weight",
    "token_embedding.weight",
    "embeddings.weight",
    "tokens_embed.weight",
    "input_embedding.weight",
)
_IN_A_LAYER = re.compile(r"\.\d+\.")
_MAX_LISTED = 12
_COPY_AGAIN = "Copy or download the whole checkpoint again, or pass another one."


@dataclass(frozen=True, eq=False)
class TokenEmbedding:
    """The token embedding of a checkpoint, with its tokenizer."""

    weight: Tensor
    """Embedding matrix in the checkpoint's precision, ``(n_tokens, d)``."""
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


def read_token_embedding(config: LMConfig) -> TokenEmbedding:
    """Read the input embedding of a checkpoint, and its tokenizer.

    A decoder, an encoder, or both are supported. Of safetensors, only the file that holds the
    matrix is opened, and only the matrix is read, in its stored precision (the `dtype` of the
    settings is ignored); it is known by its name. Other files, and an LM with an adapter, are read
    whole.

    Raises:
        LanguageModelError: There is no such checkpoint or matrix, it cannot be read, it is no
            matrix of floating-point numbers, or it has fewer rows than the tokenizer has tokens.
    """
    checkpoint = loading.find_checkpoint(config)
    lm_config = loading.read_config(checkpoint, must_be_causal=False)
    tokenizer = loading.read_tokenizer(checkpoint)
    files = _files_of_tensors(checkpoint)
    if files:
        key = _find_embedding(checkpoint, files)
        weight = _read_tensor(checkpoint, files[key], key)
    else:
        key, weight = _read_with_transformers(checkpoint, lm_config)
    if not getattr(lm_config.get_text_config(), "tie_word_embeddings", True):
        _log.warning(
            "The head of %s is not tied to its embedding, which the ablation uses for both.",
            config.name_or_path,
        )
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


def _files_of_tensors(checkpoint: Checkpoint) -> dict[str, str]:
    """Return the safetensors file of each tensor; none if the weights must be read otherwise."""
    if checkpoint.adapter is not None or checkpoint.gguf_file is not None:
        return {}
    whole = "model.safetensors"
    if path := loading.file_of(checkpoint, whole):
        with explained(checkpoint, whole, _COPY_AGAIN), safe_open(path, framework="pt") as file:
            return dict.fromkeys(file.keys(), whole)
    index = f"{whole}.index.json"
    if path := loading.file_of(checkpoint, index):
        with explained(checkpoint, index, _COPY_AGAIN):
            return dict(read_json(path, LanguageModelError, _COPY_AGAIN)["weight_map"])
    return {}


def _find_embedding(checkpoint: Checkpoint, keys: Iterable[str]) -> str:
    """Return the shortest name outside of layers with the first of the endings that occurs."""
    outside = [key for key in sorted(keys, key=len) if not _IN_A_LAYER.search(key)]
    for ending in _ENDINGS:
        for key in outside:
            if f".{key}".endswith(f".{ending}"):
                return key
    raise LanguageModelError(
        f"{checkpoint} has no token embedding: its tensors are "
        f"{', '.join(sorted(keys)[:_MAX_LISTED])}, ... Pass a checkpoint with one."
    )


def _read_tensor(checkpoint: Checkpoint, file: str, key: str) -> Tensor:
    path = loading.file_of(checkpoint, file)
    if path is None:
        raise LanguageModelError(
            f"{checkpoint} lacks the file {file}, in which its index puts {key}. {_COPY_AGAIN}"
        )
    with explained(checkpoint, file, _COPY_AGAIN), safe_open(path, framework="pt") as tensors:
        weight: Tensor = tensors.get_tensor(key)
    return weight


def _read_with_transformers(
    checkpoint: Checkpoint, lm_config: PreTrainedConfig
) -> tuple[str, Tensor]:
    """Read the LM whole: a GGUF file, a ``.bin`` of torch, or with the adapter to merge."""
    # The numbers of a GGUF file are dequantized to float32.
    is_gguf = checkpoint.gguf_file is not None
    settings = replace(checkpoint.request, dtype="float32" if is_gguf else "auto")
    lm: Any = loading.read_model(replace(checkpoint, request=settings), lm_config)
    weight: Tensor = lm.get_input_embeddings().weight
    key = next(name for name, parameter in lm.named_parameters() if parameter is weight)
    return key, weight.detach()
