"""The token embedding of a checkpoint, without the rest of it."""

from __future__ import annotations

import logging
import re
import zipfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
from safetensors import safe_open
from torch import Tensor, nn

from lincorr_lightning.errors import LanguageModelError, SubjectsError
from lincorr_lightning.io import read_json
from lincorr_lightning.lm.config import LMConfig
from lincorr_lightning.lm.fingerprint import fingerprint_tokenizer, fingerprint_weights
from lincorr_lightning.lm.loading import (
    Checkpoint,
    explained,
    find_checkpoint,
    first_line,
    read_config,
    read_tokenizer,
)
from lincorr_lightning.lm.modes import dtype_name

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

_SAFETENSORS, _BIN = "model.safetensors", "pytorch_model.bin"
_log = logging.getLogger(__name__)

EmbeddingSource = Literal["input", "output"]

# For architectures unknown to transformers, and for checkpoints with older names than the module's
# (which transformers renames on loading: GPT-NeoX's embed_out, Qwen2-VL's embed_tokens).
_USUAL_INPUTS = (
    "embed_tokens.weight", "wte.weight", "word_embeddings.weight", "shared.weight",
    "tok_embeddings.weight", "embed_in.weight", "word_embedding.weight", "token_embedding.weight",
    "token_embd.weight",
)  # fmt: skip
_USUAL_HEADS = ("lm_head.weight", "embed_out.weight", "output_layer.weight", "output.weight")
_IN_A_LAYER = re.compile(r"\.\d+\.")
_MAX_LISTED = 12
# Texts pooled at a time: the rows of a whole vocabulary in float64 would be gigabytes.
_TEXTS_AT_ONCE = 512


@dataclass(frozen=True, eq=False)
class TokenEmbedding:
    """The token embedding of an LM, with its tokenizer.

    Attributes:
        weight: Embedding matrix in the precision of the checkpoint, ``(n_tokens, d)``; mapped from
            the file where its format allows.
        key: Name of the matrix in the checkpoint.
        is_tied: Whether the LM's head is the same matrix; False too where there is no head.
        tokenizer: Tokenizer of the checkpoint.
        name_or_path: The checkpoint.
    """

    weight: Tensor
    key: str
    is_tied: bool
    tokenizer: PreTrainedTokenizerBase
    name_or_path: str

    @property
    def fingerprint(self) -> dict[str, str]:
        """Hashes of ``tokenizer`` and ``weights``, and the ``dtype``; reads the whole matrix."""
        return {
            "tokenizer": fingerprint_tokenizer(self.tokenizer, ()),
            "dtype": dtype_name(self.weight.dtype),
            "weights": fingerprint_weights(nn.ParameterDict({"weight": self.weight})),
        }

    @property
    def info(self) -> dict[str, Any]:
        """Name or path, dtype, fingerprint and number of parameters, as in ``results.json``."""
        return {
            "name_or_path": self.name_or_path,
            "dtype": dtype_name(self.weight.dtype),
            "fingerprint": self.fingerprint,
            "n_parameters": self.weight.numel(),
        }

    def rows(self, token_ids: Sequence[int] | Tensor) -> Tensor:
        """Return the embeddings of n tokens as a float32 copy, ``(n, d)``."""
        ids = torch.as_tensor(token_ids, dtype=torch.long, device="cpu")
        # A negative id would silently count from the end.
        unknown = ids[(ids < 0) | (ids >= len(self.weight))]
        if len(unknown):
            raise SubjectsError(
                f"there is no row for the token id {int(unknown[0])} in {self.key} of "
                f"{self.name_or_path}; it has the tokens 0 to {len(self.weight) - 1}."
            )
        return self.weight[ids].float()

    def pooled(self, token_ids: Sequence[Sequence[int]]) -> Tensor:
        """Return the mean embedding of each text, ``(n_texts, d)``, float32."""
        empty = [index for index, ids in enumerate(token_ids) if not ids]
        if empty:
            raise SubjectsError(f"text {empty[0]} has no token, so it has no mean. Remove it.")
        means = torch.empty(len(token_ids), self.weight.shape[1])
        for start in range(0, len(token_ids), _TEXTS_AT_ONCE):
            bags = token_ids[start : start + _TEXTS_AT_ONCE]
            flat = torch.tensor([token for ids in bags for token in ids])
            used, positions = torch.unique(flat, return_inverse=True)
            starts = torch.tensor([0, *map(len, bags[:-1])]).cumsum(0)
            # In float64, so that a text's mean does not depend on the order of its sum.
            means[start : start + len(bags)] = nn.functional.embedding_bag(
                positions, self.rows(used).double(), starts, mode="mean"
            )
        return means


def read_token_embedding(config: LMConfig, source: EmbeddingSource = "input") -> TokenEmbedding:
    """Read the token embedding of a checkpoint, and its tokenizer.

    Any Hugging Face checkpoint with an input embedding is supported: a decoder, an encoder, or
    both. Only the file that holds the matrix is opened, and only the matrix is read from it, in its
    stored precision.

    Args:
        config: A folder, a GGUF file, a hub id or tiny-world; its `dtype` is ignored.
        source: For an LM with an untied head: ``input`` for the embedding, ``output`` for the head.

    Raises:
        LanguageModelError: There is no such checkpoint or matrix, it cannot be read, or it has
            fewer rows than the tokenizer has tokens.
    """
    checkpoint = find_checkpoint(config)
    layout = _layout(read_config(checkpoint, must_be_causal=False), config.trust_remote_code)
    tokenizer = read_tokenizer(checkpoint)
    tensors = _open_tensors(checkpoint)
    inputs = _find(tensors.keys, layout.inputs, _USUAL_INPUTS)
    head = _find([key for key in tensors.keys if key != inputs], layout.heads, _USUAL_HEADS)
    if inputs is None and layout.ties:
        inputs, head = head, None  # a tied matrix may be stored under its other name
    if inputs is None:
        listed, n_more = sorted(tensors.keys)[:_MAX_LISTED], len(tensors.keys) - _MAX_LISTED
        raise LanguageModelError(
            f"{checkpoint} has no token embedding: its tensors are {', '.join(listed)}"
            f"{f' and {n_more} more' if n_more > 0 else ''}. Pass a checkpoint with one."
        )
    # A config that ties may have two matrices: .bin files store the one twice, T5 v1.1 has two.
    is_tied = layout.ties and (head is None or _are_same(*tensors.read(inputs, head)))
    if source == "output" and head is None and not is_tied:
        raise LanguageModelError(
            f"{checkpoint} has no output head. Set model.embedding_source to input."
        )
    key = head if source == "output" and head is not None and not is_tied else inputs
    if head is not None and not is_tied:
        _log.warning(
            "The head of %s is not tied to its embedding: %s is used for both, and not %s. Choose "
            "by model.embedding_source: input for the embedding, output for the head.",
            config.name_or_path, key, inputs if key == head else head,
        )  # fmt: skip
    weight = tensors.read(key)[0].detach()
    _check(weight, key, checkpoint, tokenizer)
    return TokenEmbedding(weight, key, is_tied, tokenizer, config.name_or_path)


def _are_same(one: Tensor, other: Tensor) -> bool:
    alike = one.shape == other.shape and one.dtype == other.dtype
    return alike and torch.equal(one, other)


def _check(
    weight: Tensor, key: str, checkpoint: Checkpoint, tokenizer: PreTrainedTokenizerBase
) -> None:
    if weight.ndim != 2 or not weight.is_floating_point():
        raise LanguageModelError(
            f"{key} of {checkpoint} is {tuple(weight.shape)} in {weight.dtype}, not a matrix of "
            "floating-point numbers with a row for each token. If it is quantized, pass the "
            "checkpoint that it was made from."
        )
    largest = max(tokenizer.get_vocab().values())
    if len(weight) <= largest:
        raise LanguageModelError(
            f"{key} of {checkpoint} has {len(weight)} rows, but the tokenizer's largest id is "
            f"{largest}, which needs {largest + 1}: tokenizer and weights do not belong together. "
            "Take both from one checkpoint."
        )


# -- which tensor ----------------------------------------------------------------------------


class _Layout(NamedTuple):
    """Possible names of the matrices, best first, and whether the LM has a tied head."""

    inputs: list[str]
    heads: list[str]
    ties: bool


def _layout(config: PreTrainedConfig, trusted: bool) -> _Layout:
    for build in _builders(config, trusted):
        try:
            with torch.device("meta"):  # names alone, without weights: instant for any size
                model = build()
            embedding = model.get_input_embeddings()
            head = model.get_output_embeddings()  # type: ignore[no-untyped-call]
        except Exception:  # the architecture is unknown, or of another kind
            continue
        heads = [f"{name}.weight" for name, part in model.named_modules() if part is head]
        # An embedding of image patches has no matrix.
        matrix = getattr(embedding, "weight", None)
        shared = [name for name, p in model.named_parameters(remove_duplicate=False) if p is matrix]
        return _Layout(
            [name for name in shared if name not in heads],
            heads,
            ties=matrix is not None and getattr(head, "weight", None) is matrix,
        )
    return _Layout([], [], bool(getattr(config.get_text_config(), "tie_word_embeddings", False)))


def _builders(config: PreTrainedConfig, trusted: bool) -> Iterator[Callable[[], PreTrainedModel]]:
    """Yield ways to build the architecture: its own class, then the auto classes."""
    import transformers as hf

    # An encoder's config ties even if it was saved without a head; its own class knows.
    own = getattr(hf, (config.architectures or [""])[0], None)
    if own is not None:
        yield partial(own, config)
    for auto in (
        hf.AutoModelForMaskedLM, hf.AutoModelForCausalLM, hf.AutoModelForSeq2SeqLM, hf.AutoModel
    ):  # fmt: skip
        # Eager: the kernel that the config asks for may be missing on this machine.
        options = {"trust_remote_code": trusted, "attn_implementation": "eager"}
        yield partial(auto.from_config, config, **options)


def _find(keys: Iterable[str], names: Sequence[str], usual: Sequence[str]) -> str | None:
    """Return the tensor of a name, which may lack its model's prefix or have another one."""
    keys = sorted(keys, key=lambda key: (len(key), key))
    for name in names:
        for key in keys:
            if f".{key}".endswith(f".{name}") or f".{name}".endswith(f".{key}"):
                return key
    outside = [key for key in keys if not _IN_A_LAYER.search(key)]
    for ending in usual:
        for key in outside:
            if f".{key}".endswith(f".{ending}"):
                return key
    return None


# -- tensors of a file -----------------------------------------------------------------------


def _open_tensors(checkpoint: Checkpoint) -> _CheckpointTensors | _GGUFTensors:
    """Open a Hugging Face checkpoint or a GGUF file."""
    if checkpoint.gguf_file is not None:
        return _GGUFTensors(checkpoint)
    return _CheckpointTensors(checkpoint)


class _GGUFTensors:
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


class _CheckpointTensors:
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
