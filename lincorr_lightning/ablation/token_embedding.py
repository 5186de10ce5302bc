"""The token embedding of a checkpoint, without the rest of it."""

from __future__ import annotations

import json
import logging
import re
import zipfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor, nn

from lincorr_lightning.errors import LanguageModelError, SubjectsError
from lincorr_lightning.lm.config import LMConfig
from lincorr_lightning.lm.fingerprint import _digest, _json, _lane_sums, fingerprint_tokenizer
from lincorr_lightning.lm.loading import (
    Checkpoint,
    _explained,
    _first_line,
    find_checkpoint,
    read_config,
    read_tokenizer,
)

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

_log = logging.getLogger(__name__)

EmbeddingSource = Literal["input", "output"]

_SAFE, _PICKLED = "model.safetensors", "pytorch_model.bin"
# For architectures unknown to transformers, and for those whose checkpoints have older names than
# the module (transformers renames on loading: GPT-NeoX's embed_out, Qwen2-VL's embed_tokens).
_USUAL_INPUTS = (
    "embed_tokens.weight", "wte.weight", "word_embeddings.weight", "shared.weight",
    "tok_embeddings.weight", "embed_in.weight", "word_embedding.weight", "token_embedding.weight",
)  # fmt: skip
_USUAL_HEADS = ("lm_head.weight", "embed_out.weight", "output_layer.weight", "output.weight")
_IN_A_LAYER = re.compile(r"\.\d+\.")
_MANY = 12
# Rows are made float32 by so many texts or rows at a time: a whole vocabulary would be gigabytes.
_TEXTS_AT_ONCE = 512
_ROWS_AT_ONCE = 4096
_SHOWN_OF_TEXT = 60


@dataclass(frozen=True, eq=False)
class TokenEmbedding:
    """The vocabulary of an LM: a vector for each token.

    Attributes:
        weight: ``(n_tokens, d)``, as it is stored; mapped from the file where its format allows.
        key: Its name in the checkpoint.
        is_tied: Whether the LM's head is the same matrix; False too where there is no head.
        tokenizer: Says which row is which token.
        name_or_path: The checkpoint.
    """

    weight: Tensor
    key: str
    is_tied: bool
    tokenizer: PreTrainedTokenizerBase
    name_or_path: str

    @property
    def fingerprint(self) -> str:
        """Hash of the tokenizer and of every bit of the matrix; reads it once, at disk speed."""
        return _digest(
            fingerprint_tokenizer(self.tokenizer, ()).encode(),
            _json([list(self.weight.shape), str(self.weight.dtype)]),
            _lane_sums(self.weight),
        )

    def rows(self, token_ids: Sequence[int] | Tensor) -> Tensor:
        """Vectors of some tokens.

        Args:
            token_ids: As many as wanted, in any order, ``(n,)``.

        Returns:
            ``(n, d)``, a float32 copy.

        Raises:
            SubjectsError: A token id without a row.
        """
        ids = torch.as_tensor(token_ids, dtype=torch.long, device="cpu")
        # A negative id would silently count from the end.
        unknown = ids[(ids < 0) | (ids >= len(self.weight))]
        if len(unknown):
            raise SubjectsError(
                f"there is no row for the token id {int(unknown[0])} in {self.key} of "
                f"{self.name_or_path}; it has the tokens 0 to {len(self.weight) - 1}."
            )
        return self.weight[ids].float()

    def pooled(self, texts: Sequence[str]) -> Tensor:
        """Mean over each text's tokens, without special tokens and without padding.

        Args:
            texts: Any number, of any lengths, of at least one token each.

        Returns:
            ``(n_texts, d)``, float32.

        Raises:
            SubjectsError: A text has no token, or one beyond the matrix.
        """
        if isinstance(texts, str):
            raise SubjectsError(f"texts is the single string {texts!r}; pass a list of texts.")
        means = torch.empty(len(texts), self.weight.shape[1])
        for start in range(0, len(texts), _TEXTS_AT_ONCE):
            bags = self._bags(texts, start)
            # Means of bags, not of padded rows: nothing is there that must not count.
            flat = torch.tensor([token for ids in bags for token in ids])
            used, places = torch.unique(flat, return_inverse=True)
            starts = torch.tensor([0, *map(len, bags[:-1])]).cumsum(0)
            # In float64, so that a text's mean does not depend on the order of its sum.
            means[start : start + len(bags)] = nn.functional.embedding_bag(
                places, self.rows(used).double(), starts, mode="mean"
            )
        return means

    def _bags(self, texts: Sequence[str], start: int) -> list[list[int]]:
        """Token ids of some texts, each id with a row, each text with an id."""
        some = list(texts[start : start + _TEXTS_AT_ONCE])
        # Not verbose: that a text is longer than the LM's positions means nothing here.
        bags: list[list[int]] = self.tokenizer(some, add_special_tokens=False, verbose=False)[
            "input_ids"
        ]
        for index, (text, ids) in enumerate(zip(some, bags, strict=True), start):
            shown = text if len(text) <= _SHOWN_OF_TEXT else f"{text[:_SHOWN_OF_TEXT]}..."
            if not ids:
                raise SubjectsError(
                    f"text {index} ({shown!r}) has no token in the vocabulary of "
                    f"{self.name_or_path}, so it has no mean. Leave it out."
                )
            if max(ids) >= len(self.weight):  # tokens added to the tokenizer since
                raise SubjectsError(
                    f"text {index} ({shown!r}) has the token id {max(ids)}, but {self.key} of "
                    f"{self.name_or_path} has {len(self.weight)} rows only. Leave it out."
                )
        return bags


def read_token_embedding(config: LMConfig, tie: EmbeddingSource = "input") -> TokenEmbedding:
    """Read the vocabulary of a checkpoint: one tensor of it, and the tokenizer.

    Any Hugging Face checkpoint with an input embedding will do: a decoder, an encoder, or both.
    Only the file that holds the matrix is opened, and of that only the matrix is read, in the
    precision it is stored in.

    Args:
        config: A folder, a hub id or tiny-world; its `dtype` is not asked.
        tie: Where the head is a matrix of its own: ``input`` for the embedding, ``output`` for the
            head.

    Raises:
        LanguageModelError: There is no such checkpoint or matrix in it, it cannot be read, or it
            has fewer rows than the tokenizer has tokens.
    """
    checkpoint = find_checkpoint(config)
    layout = _layout(read_config(checkpoint, must_be_causal=False), config.trust_remote_code)
    tokenizer = read_tokenizer(checkpoint)
    weights = _Weights(checkpoint)
    inputs = _find(weights.keys, layout.inputs, _USUAL_INPUTS)
    head = _find([key for key in weights.keys if key != inputs], layout.heads, _USUAL_HEADS)
    if inputs is None and layout.ties:
        inputs, head = head, None  # a tied matrix may be stored under its other name
    if inputs is None:
        shown, n_more = ", ".join(sorted(weights.keys)[:_MANY]), len(weights.keys) - _MANY
        raise LanguageModelError(
            f"{checkpoint} has no token embedding: its tensors are {shown}"
            f"{f' and {n_more} more' if n_more > 0 else ''}. Pass a checkpoint with one."
        )
    # Two matrices of a config that ties: .bin files store the one twice. But T5 v1.1 has two.
    is_tied = layout.ties if head is None else layout.ties and weights.are_same(inputs, head)
    if tie == "output" and head is None and not is_tied:
        raise LanguageModelError(
            f"{checkpoint} has no output head to take the vocabulary from. Set model.tie to input."
        )
    key = head if tie == "output" and head is not None and not is_tied else inputs
    if head is not None and not is_tied:
        _log.warning(
            "The head of %s is not tied to its embedding: %s is taken for both, and not %s. "
            "model.tie chooses: input takes the embedding, output the head.",
            config.name_or_path, key, inputs if key == head else head,
        )  # fmt: skip
    weight = weights.read(key)[key].detach()
    _check(weight, key, checkpoint, tokenizer)
    return TokenEmbedding(weight, key, is_tied, tokenizer, config.name_or_path)


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


@dataclass(frozen=True)
class _Layout:
    """Names that the matrices may have, best first, and whether the LM has a tied head."""

    inputs: list[str]
    heads: list[str]
    ties: bool


def _layout(config: PreTrainedConfig, trusted: bool) -> _Layout:
    for build in _builders(config, trusted):
        try:
            with torch.device("meta"):  # names and ties, no numbers: instant for any size
                model = build()
            embedding = model.get_input_embeddings()
            head = model.get_output_embeddings()  # type: ignore[no-untyped-call]
        except Exception:  # an architecture that is unknown, or is no such kind
            continue
        heads = [f"{name}.weight" for name, part in model.named_modules() if part is head]
        # An embedding of patches has no matrix.
        matrix = getattr(embedding, "weight", None)
        shared = [name for name, p in model.named_parameters(remove_duplicate=False) if p is matrix]
        return _Layout(
            [name for name in shared if name not in heads],
            heads,
            ties=matrix is not None and getattr(head, "weight", None) is matrix,
        )
    return _Layout([], [], bool(getattr(config.get_text_config(), "tie_word_embeddings", False)))


def _builders(config: PreTrainedConfig, trusted: bool) -> Iterator[Callable[[], PreTrainedModel]]:
    """Ways to build the architecture: as the class that it was saved from, or a likely one."""
    import transformers as hf

    # The config of an encoder ties, also if it was saved without head: its class tells.
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
    """The tensor of a name, which a checkpoint has with or without its model's prefix."""
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


# -- from which file -------------------------------------------------------------------------


class _Weights:
    """The tensors of a checkpoint by name, none of them read yet."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint
        self._files = self._list()
        self.keys = self._files.keys()

    def _list(self) -> dict[str, str]:
        """File of each tensor; where there are several formats, that which transformers takes."""
        for whole in (_SAFE, _PICKLED):
            path = self._path(whole)
            if path is not None:
                with self._readable(whole):
                    return dict.fromkeys(_names_in(path), whole)
            name = f"{whole}.index.json"
            index = self._path(name)
            if index is not None:
                with self._readable(name):
                    return dict(json.loads(index.read_text(encoding="utf-8"))["weight_map"])
        raise LanguageModelError(
            f"{self._checkpoint} holds no weights: neither {_SAFE} nor {_PICKLED}, nor an index "
            f"of shards. {self._way_out('the weights')}"
        )

    def read(self, *keys: str) -> dict[str, Tensor]:
        """Map some tensors, opening each file once: tied ones stay one."""
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
        """Whether two tensors are equal in every number."""
        tensors = self.read(first, second)
        one, other = tensors[first], tensors[second]
        if one.shape != other.shape or one.dtype != other.dtype:
            return False
        if one.data_ptr() == other.data_ptr() and one.stride() == other.stride():
            return True
        starts = range(0, len(one), _ROWS_AT_ONCE)  # at the first difference it stops reading
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
        with _explained(checkpoint, name, lambda: "Is the network up?"):
            try:
                return Path(hf_hub_download(checkpoint.location, name, **options))
            except EntryNotFoundError as error:
                # Raised for a lost connection too, which does not mean that there is no such file.
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
                f"the weights of {self._checkpoint} cannot be read: {_first_line(error)}. The "
                f"file {name} is damaged or cut short; copy or download it again."
            ) from error


def _names_in(path: Path) -> list[str]:
    if path.suffix == ".safetensors":
        from safetensors import safe_open

        with safe_open(path, framework="pt") as file:
            return list(file.keys())
    return list(_unpickled(path))


def _tensors_in(path: Path, keys: Sequence[str]) -> dict[str, Tensor]:
    if path.suffix == ".safetensors":
        from safetensors import safe_open

        with safe_open(path, framework="pt") as file:
            return {key: file.get_tensor(key) for key in keys}
    tensors = _unpickled(path)
    return {key: tensors[key] for key in keys}


def _unpickled(path: Path) -> dict[str, Tensor]:
    """Tensors of a .bin, in the file until they are touched; none of its code is run."""
    # Files of before torch 1.6 are no archives and cannot be mapped: these are read as a whole.
    tensors: dict[str, Tensor] = torch.load(
        path, map_location="cpu", mmap=zipfile.is_zipfile(path), weights_only=True
    )
    return tensors
