"""The head or the token embedding of a checkpoint, without the rest of it."""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from lincorr_lightning.errors import LanguageModelError, listed
from lincorr_lightning.io import read_json
from lincorr_lightning.lm import fingerprint as prints
from lincorr_lightning.lm import loading
from lincorr_lightning.lm.head import ROWS_BLOCK, VocabularyRows, head_of, is_plain
from lincorr_lightning.lm.loading import Checkpoint, explained
from lincorr_lightning.lm.modes import dtype_name

# Names of the modules, in the architectures of transformers and in GGUF files.
_HEADS = (
    "lm_head",
    "embed_out",
    "output_projection",
    "generator_lm_head",
    "lm_loss",
    "pred_layer.proj",
    "proj_out",
    "decoder",
    "output",
    "head",
)
_EMBEDDINGS = (
    "embed_tokens",
    "wte",
    "word_embeddings",
    "shared",
    "tok_embeddings",
    "embed_in",
    "word_embedding",
    "token_embedding",
    "embeddings",
    "tokens_embed",
    "input_embedding",
    "token_embd",
)
_IN_A_LAYER = re.compile(r"\.\d+\.")
# What follows the module's name where an adapter saves a matrix that it has trained as a whole.
_WHOLE = re.compile(r"((modules_to_save|original_module)\.)?(weight|bias)")
_FLOATS = torch.float16, torch.bfloat16, torch.float32, torch.float64
_COPY_AGAIN = "Copy or download the whole checkpoint again, or pass another one."

Open = Callable[[], AbstractContextManager[Any]]
"""Opens a stored tensor, of which slices are read."""


@dataclass(frozen=True, eq=False)
class StoredRows(VocabularyRows):
    """A matrix of a checkpoint that has a row for each token; it is read when it is needed.

    The rows have the precision in which they are stored; those of a GGUF file are dequantized to
    float32.
    """

    key: str  #: Name of the matrix in the checkpoint.
    shape: tuple[int, int]  #: Numbers of tokens and of columns.
    dtype: torch.dtype
    tokenizer: PreTrainedTokenizerBase
    checkpoint: Checkpoint
    open: Open

    def blocks(self) -> Iterator[Tensor]:
        with self.open() as matrix:
            for start in range(0, self.shape[0], ROWS_BLOCK):
                yield matrix[start : start + ROWS_BLOCK]

    def rows(self, token_ids: Sequence[int]) -> Tensor:
        with self.open() as matrix:
            return torch.cat([matrix[i : i + 1] for i in token_ids]).double()

    def whole(self) -> Tensor:
        """Return the whole matrix, ``(n_tokens, hidden_size)``, as it is stored."""
        with self.open() as matrix:
            weight: Tensor = matrix[:]
        return weight

    @cached_property
    def fingerprint(self) -> dict[str, str]:
        """Hashes of ``tokenizer`` and ``weights``, and the ``dtype``; reads the whole matrix."""
        blocks = [prints.fingerprint_tensors({"rows": block}) for block in self.blocks()]
        return {
            "tokenizer": prints.fingerprint_tokenizer(self.tokenizer, ()),
            "dtype": dtype_name(self.dtype),
            "weights": prints.fingerprint_data(blocks),
        }

    @property
    def info(self) -> dict[str, Any]:
        """Name or path, dtype, fingerprint and number of parameters, as in ``results.json``."""
        return {
            "name_or_path": self.checkpoint.request.name_or_path,
            "dtype": dtype_name(self.dtype),
            "fingerprint": self.fingerprint,
            "n_parameters": self.shape[0] * self.shape[1],
            **self.checkpoint.merged,
        }


def stored_embedding(
    checkpoint: Checkpoint, tokenizer: PreTrainedTokenizerBase, is_head: bool = False
) -> StoredRows:
    """Return the input embedding of a decoder, an encoder, or both; or a `stored_head`.

    It is known by its name. Of safetensors only the file that holds it is opened. Other files than
    safetensors and GGUF, and an LM whose adapter changes the matrix by more than its whole value,
    are read whole.

    Raises:
        LanguageModelError: There is no such matrix, it cannot be read, it is no matrix of
            floating-point numbers, or it has fewer rows than the tokenizer has tokens.
    """
    config = loading.read_config(checkpoint, must_be_causal=is_head)
    found = _find(checkpoint, config, is_head) or _read_lm(checkpoint, config, is_head)
    key, open_matrix = found[0], partial(_unchanged, checkpoint, found[1])
    with open_matrix() as matrix:
        shape = tuple(matrix.get_shape() if hasattr(matrix, "get_shape") else matrix.shape)
        dtype = matrix[:1].dtype
    if len(shape) != 2 or dtype not in _FLOATS:
        raise LanguageModelError(
            f"{key} of {checkpoint} is {shape} in {dtype}, not a matrix of floating-point numbers "
            "with a row for each token. If it is quantized, pass the checkpoint that it was made "
            "from."
        )
    if shape[0] <= (largest := max(tokenizer.get_vocab().values())):
        raise LanguageModelError(
            f"{key} of {checkpoint} has {shape[0]} rows, but the tokenizer's largest id is "
            f"{largest}, which needs {largest + 1}: tokenizer and weights do not belong together. "
            "Take both from one checkpoint."
        )
    return StoredRows(key, shape, dtype, tokenizer, checkpoint, open_matrix)


def stored_head(checkpoint: Checkpoint, tokenizer: PreTrainedTokenizerBase) -> StoredRows:
    """Return the output head of an LM, which is its token embedding where both are tied.

    It is found and read like a `stored_embedding`, and raises the same errors.
    """
    return stored_embedding(checkpoint, tokenizer, is_head=True)


def _find(
    checkpoint: Checkpoint, config: PreTrainedConfig, is_head: bool
) -> tuple[str, Open] | None:
    """Return the name of a matrix and how to open it; None if the LM must be read whole."""
    tensors = _tensors(checkpoint)
    if not tensors:
        return None
    kind = _HEADS if is_head else _EMBEDDINGS
    is_tied = bool(getattr(config.get_text_config(), "tie_word_embeddings", True))
    # transformers ties what the files do not hold: a head of their own counts.
    key = _key_of(tensors, kind)
    if key is None and is_head and is_tied:
        key = _key_of(tensors, _EMBEDDINGS)
    if key is None:
        names = sorted(tensors, key=lambda name: _IN_A_LAYER.search(name) is not None)
        raise LanguageModelError(
            f"{checkpoint} has no {'head' if is_head else 'token embedding'}: its tensors are "
            f"{listed(names)}. Pass a checkpoint with one"
            f"{' that is not quantized' if is_head else ''}."
        )
    if checkpoint.adapter is None:
        return key, tensors[key]
    trained = _tensors(checkpoint.adapter, "adapter_model.safetensors")
    changes = _parts_of(trained, kind)
    whole = _key_of(changes, kind)
    if whole and all(map(_WHOLE.fullmatch, changes.values())):
        return whole, trained[whole]
    # How peft merges a change of one of two tied matrices depends on the adapter.
    others = _parts_of(trained, (*_HEADS, *_EMBEDDINGS))
    is_kept = not others or (not changes and not is_tied)
    return (key, tensors[key]) if trained and is_kept else None


def _tensors(checkpoint: Checkpoint, whole: str = "model.safetensors") -> Mapping[str, Open]:
    """Return how to open each tensor of a checkpoint; none if its files are of another kind."""
    if checkpoint.gguf_file is not None:
        return _gguf_tensors(Path(checkpoint.location) / checkpoint.gguf_file, checkpoint)
    if path := loading.file_of(checkpoint, whole):
        with explained(checkpoint, whole, _COPY_AGAIN), safe_open(path, framework="pt") as file:
            return {key: partial(_open, checkpoint, whole, key) for key in file.keys()}  # noqa: SIM118
    index = f"{whole}.index.json"
    if path := loading.file_of(checkpoint, index):
        with explained(checkpoint, index, _COPY_AGAIN):
            files = read_json(path, LanguageModelError, _COPY_AGAIN)["weight_map"]
            return {key: partial(_open, checkpoint, file, key) for key, file in files.items()}
    return {}


@contextmanager
def _unchanged(checkpoint: Checkpoint, open_matrix: Open) -> Iterator[Any]:
    checkpoint.require_unchanged()
    with open_matrix() as matrix:
        yield matrix
    checkpoint.require_unchanged()


@contextmanager
def _open(checkpoint: Checkpoint, file: str, key: str) -> Iterator[Any]:
    path = loading.file_of(checkpoint, file)
    if path is None:
        raise LanguageModelError(
            f"{checkpoint} lacks the file {file}, in which its index puts {key}. {_COPY_AGAIN}"
        )
    with explained(checkpoint, file, _COPY_AGAIN), safe_open(path, framework="pt") as tensors:
        yield tensors.get_slice(key)


class _Dequantized:
    """A tensor of a GGUF file, whose slices of rows are dequantized to float32."""

    def __init__(self, tensor: Any) -> None:
        self._tensor = tensor
        self.shape = tuple(tensor.shape.tolist()[::-1])

    def __getitem__(self, rows: slice) -> Tensor:
        from gguf import dequantize

        return torch.tensor(dequantize(self._tensor.data[rows], self._tensor.tensor_type))


def _gguf_tensors(path: Path, checkpoint: Checkpoint) -> Mapping[str, Open]:
    from gguf import GGUFReader

    with explained(checkpoint, "the file", "It may be cut short: download it again."):
        tensors = GGUFReader(path).tensors
    return {tensor.name: partial(nullcontext, _Dequantized(tensor)) for tensor in tensors}


def _key_of(keys: Iterable[str], modules: Sequence[str]) -> str | None:
    """Return the shortest name of the weight of the first module that there is."""
    for module in modules:
        parts = _parts_of(keys, [module])
        if named := [key for key, part in parts.items() if part == "weight"]:
            return min(named, key=len)
    return None


def _parts_of(keys: Iterable[str], modules: Sequence[str]) -> dict[str, str]:
    """Return the names of tensors of modules outside of layers, with what follows the module's."""
    pattern = re.compile(rf"(?:.*\.)?(?:{'|'.join(map(re.escape, modules))})\.(.+)")
    matches = {key: pattern.fullmatch(key) for key in keys if not _IN_A_LAYER.search(key)}
    return {key: match[1] for key, match in matches.items() if match}


def _read_lm(checkpoint: Checkpoint, config: PreTrainedConfig, is_head: bool) -> tuple[str, Open]:
    """Read the LM whole: from a ``.bin`` of torch, or with the adapter to merge."""
    # The numbers of a GGUF file are dequantized to float32.
    is_gguf = checkpoint.gguf_file is not None
    settings = replace(checkpoint.request, dtype="float32" if is_gguf else "auto")
    lm: Any = loading.read_model(replace(checkpoint, request=settings), config)
    module: Any = head_of(lm) if is_head else lm.get_input_embeddings()
    if is_head and not is_plain(module):
        raise LanguageModelError(
            f"{checkpoint} has a head that multiplies by more than its weight, such as a quantized "
            "one, so that its tokens have no rows. Pass the checkpoint that it was made from."
        )
    weight: Tensor = module.weight
    names = dict(lm.named_parameters(remove_duplicate=False))
    key = next(name for name, parameter in names.items() if parameter is weight)
    return key, partial(nullcontext, weight.detach())
