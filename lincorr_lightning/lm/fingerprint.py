"""Fingerprints of LMs: hashes that are the same on every machine and differ after any change."""

import hashlib
import json
import re
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedTokenizerBase

# Keys of a configuration, at any depth, that are known not to change logits.
_IGNORED_KEYS = re.compile(
    "_name_or_path|architectures|(torch_)?dtype|transformers_version|use_cache|return_dict|"
    "output_(attentions|hidden_states)|id2label|label2id|problem_type|tokenizer_class|auto_map|"
    "initializer_range|.*dropout|.*pdrop"
)
_TEXTS = (
    "The city of Paris lies in South-West  Europe, isn't it?",
    " x = 12345.678\n\tprint(x)",
    "L'été à Zürich: «¿Qué?» 東京は日本の首都。 Москва القاهرة 🙂",
)
# What a module keeps that says nothing of what it computes, or is compared as a tensor.
_NO_SWITCHES = {"training", "_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"}
_NO_SWITCHES |= {"_output_capturing_hooks_installed"}  # by transformers, when states are read first
_CAPTURING = "transformers.utils.output_capturing"  # hooks of this module
_LANES = 4093  # a prime, so that no row is a whole number of lanes and swapped rows change the sums


def _digest(*parts: bytes) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for part in parts:
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.hexdigest()


def _json(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True, ensure_ascii=False, default=str).encode()


def fingerprint_data(value: Any) -> str:
    """Return a hash of mappings, sequences, texts and numbers."""
    return _digest(_json(value))


def fingerprint_tokenizer(
    tokenizer: "PreTrainedTokenizerBase", prefix: Sequence[int], lead_in: str = ""
) -> str:
    """Return a hash of the vocabulary, of how some texts are split, and of what precedes prompts.

    The behavior of the tokenizer is hashed and not its file, which also holds padding and
    truncation settings and changes between releases.
    """
    splits = [list(ids) for ids in tokenizer(list(_TEXTS), add_special_tokens=False)["input_ids"]]
    before = [*prefix, lead_in] if lead_in else list(prefix)
    return _digest(_json(tokenizer.get_vocab()), _json(splits), _json(before))


def fingerprint_config(config: "PreTrainedConfig") -> str:
    """Hash of all in an LM's configuration that may change logits, such as its rope_theta."""
    # Of the class's defaults, of which a new version of transformers may have more, differences.
    return _digest(_json(_without_ignored(config.to_diff_dict())))


def _without_ignored(value: Any) -> Any:
    if isinstance(value, dict):
        kept = {str(k): v for k, v in value.items() if not _IGNORED_KEYS.fullmatch(str(k))}
        return {key: _without_ignored(member) for key, member in kept.items()}
    return value


def fingerprint_tensors(tensors: Mapping[str, Tensor]) -> str:
    """Hash of tensors, such as those of a `state_dict`: names, shapes, dtypes, and `bit_sums`."""
    parts: list[bytes] = []
    seen: dict[Hashable, str] = {}
    for name, tensor in sorted(tensors.items()):
        parts.append(_json([name, list(tensor.shape), str(tensor.dtype)]))
        # Tied weights are listed under each of their names; once through the memory is enough.
        local = _local(tensor)
        place = local.untyped_storage().data_ptr(), local.storage_offset(), tensor.shape
        first = seen.setdefault(place, name)
        if first != name:
            parts.append(first.encode())
            continue
        whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        parts.append(b"".join(part.cpu().numpy().tobytes() for part in _lane_sums(whole)))
    return _digest(*parts)


def fingerprint_weights(model: nn.Module) -> str:
    """Hash of an LM's parameters and buffers, and of how its adapters of peft are switched."""
    weights = fingerprint_tensors(model.state_dict())
    adapted = [part for part in model.modules() if hasattr(part, "active_adapter")]
    if not adapted:
        return weights
    switches = [_switches_of_module(part, lambda _: None) for part in adapted]
    return _digest(weights.encode(), _json(switches))


def bit_sums(tensors: Iterable[Tensor]) -> Tensor:
    """Return sums, int64, that show whether any tensor was written to, in whatever way.

    The bits of each, of local shards, are added up as 64-bit integers in lanes, exactly: on any
    device, in any order, as fast as memory. Any changed bit changes them; only words that change
    places within a lane are missed. (Version counters miss all writes through ``Tensor.data``.)
    """
    local = [_local(tensor) for tensor in tensors]
    parts = [part for tensor in local for part in _lane_sums(tensor)]
    return torch.cat([part.to(local[0].device, torch.int64) for part in parts])


def switches_of(model: nn.Module) -> list[dict[str, Any]]:
    """Return what the modules of an LM keep beside parameters, to be compared later.

    It is what decides how they compute: which adapters are active or disabled, their scales, hooks,
    and replaced forwards, whoever made them. Modes and tensors are left out.
    """
    return [_switches_of_module(module, id) for module in model.modules()]


def _switches_of_module(module: nn.Module, of_object: Callable[[Any], Any]) -> dict[str, Any]:
    """Return copies of plain data that a module keeps; `of_object` stands for other objects."""

    def copy(value: Any) -> Any:
        if isinstance(value, (bool, int, float, str, type(None))):
            return value
        if isinstance(value, Mapping):
            kept = {k: x for k, x in value.items() if getattr(x, "__module__", "") != _CAPTURING}
            return {key: copy(member) for key, member in kept.items()}
        if isinstance(value, (list, tuple, set)):
            return [copy(member) for member in value]
        return of_object(value)

    return {
        key: copy(value)
        for key, value in vars(module).items()
        if key not in _NO_SWITCHES and not isinstance(value, Tensor)
    }


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _lane_sums(tensor: Tensor) -> tuple[Tensor, Tensor]:
    """Return the sums of the bits in each lane, and the bytes that are left over."""
    raw = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    if raw.storage_offset() % 8:
        raw = raw.clone()
    n_words = len(raw) // 8
    words = raw[: 8 * n_words].view(torch.int64)
    n_whole = n_words // _LANES * _LANES
    sums = words[:n_whole].view(-1, _LANES).sum(0)
    sums[: n_words - n_whole] += words[n_whole:]
    return sums, raw[8 * n_words :].clone()  # a view would keep all of a copy
