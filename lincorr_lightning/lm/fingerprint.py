"""Fingerprints of LMs: hashes that are the same on every machine and differ after any change."""

import hashlib
import json
import re
from collections.abc import Hashable, Iterable, Sequence
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


def fingerprint_weights(module: nn.Module) -> str:
    """Hash of all parameters and persistent buffers: names, shapes, dtypes, and every bit.

    Each tensor's raw bits are added up as 64-bit integers in lanes, exactly: on any device, in any
    order. Any changed bit changes it; only words that change places within a lane are missed.
    """
    parts: list[bytes] = []
    seen: dict[Hashable, str] = {}
    for name, tensor in sorted(module.state_dict().items()):
        parts.append(_json([name, list(tensor.shape), str(tensor.dtype)]))
        # Tied weights are listed under each of their names; once through the memory is enough.
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        place = local.untyped_storage().data_ptr(), local.storage_offset(), tensor.shape
        first = seen.setdefault(place, name)
        parts.append(_lane_sums(tensor) if first == name else first.encode())
    return _digest(*parts)


def _lane_sums(tensor: Tensor) -> bytes:
    if isinstance(tensor, DTensor):  # the local shard is only a part of it
        tensor = tensor.full_tensor()
    words, tail = _words(tensor)
    n_whole = len(words) // _LANES * _LANES
    sums = words[:n_whole].view(-1, _LANES).sum(0)
    sums[: len(words) - n_whole] += words[n_whole:]
    return sums.cpu().numpy().tobytes() + tail.cpu().numpy().tobytes()


def _words(tensor: Tensor) -> tuple[Tensor, Tensor]:
    """Return the bits of a tensor as 64-bit integers, and the bytes that are left over."""
    raw = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    if raw.storage_offset() % 8:
        raw = raw.clone()
    n = len(raw) // 8 * 8
    return raw[:n].view(torch.int64), raw[n:]


def bit_sums(weights: Iterable[Tensor]) -> Tensor:
    """Return sums that show whether any weight has been written to, in whatever way.

    They are exact sums of the bits of each row, and the bits of the first row, of local shards: the
    same on all devices, and as fast as memory. Only values that change places within another row
    are missed. (The version counters of tensors miss all writes through ``Tensor.data``.)

    Returns:
        ``(n_sums,)``, int64, on the device of the first tensor.
    """
    own = [weight.to_local() if isinstance(weight, DTensor) else weight for weight in weights]
    parts = []
    for weight in own:
        words, tail = _words(weight)
        n_rows = len(weight) if weight.dim() > 1 and len(weight) else 1
        if len(tail) or len(words) % n_rows:
            n_rows = 1
        rows = words.view(n_rows, -1)
        parts += [rows.sum(1), rows[0], tail]
    device = own[0].device if own else None
    return torch.cat([part.to(device, torch.int64) for part in parts]) if own else torch.zeros(0)
