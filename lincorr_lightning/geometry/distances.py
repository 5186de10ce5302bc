"""Nearest tokens of every token in each layer; a distance matrix lives no longer than its batch.

Squared distances come from matrix products in float32. What float32 cannot resolve is recomputed in
float64: from differences where few distances cancel or the order of neighbors is uncertain, from
products where many cancel. Copies (tokens with equal hidden states) are found by comparison, left
out, and mapped back.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor

from lincorr_lightning.errors import require

# Columns whose products are summed at a time, so that a cloud of next-token probabilities is not
# copied as a whole.
_COLUMNS = 8192
# Tokens whose products with later ones are taken at a time.
_STRIP = 256
# Ranks beyond k that are computed, to see where an uncertain order at k ends.
_MARGIN = 4
# A squared distance below this multiple of its error has lost too many digits.
_DIGITS = 2**10
# If more than this fraction of all distances is lost, products are cheaper than differences.
_MANY = 1 / 64
# Largest squared norms of a layer that float32 can hold with its products.
_SAFE = (1e-24, 1e30)


class NearestTokens(NamedTuple):
    """The nearest distinct tokens of every token.

    Tokens of a layer with equal hidden states are copies of the first of them. Neighbors are first
    tokens only, and a copy has the neighbors of its first token: no distance is zero.

    Attributes:
        distances: Euclidean distances, increasing, ``(..., n_tokens, max_rank)``, float64; inf if a
            layer has fewer distinct tokens.
        indices: Positions of these tokens, same shape, int64; -1 if there are fewer.
        first: Position of the first token with the same hidden state, ``(..., n_tokens)``, int64;
            a token's own position unless it is a copy.
        k: Rank up to which neighbors are in the order of float64 distances; beyond, tokens whose
            distances agree within the error of float32 may be swapped.
    """

    distances: Tensor
    indices: Tensor
    first: Tensor
    k: int

    @property
    def distinct(self) -> Tensor:
        """Whether a token is not a copy, ``(..., n_tokens)`` bool."""
        return self.first == torch.arange(self.first.shape[-1], device=self.first.device)


@torch.no_grad()
def nearest_tokens(hidden: Tensor, max_rank: int, k: int | None = None) -> NearestTokens:
    """Find the nearest distinct tokens of each token of each layer.

    Args:
        hidden: Hidden states, ``(..., n_layers, n_tokens, d)``, of any floating dtype; the last
            leading dimension is layers, the others are prompts. Next-token probabilities,
            ``(..., 1, n_tokens, n_vocabulary)``, are a cloud as well.
        max_rank: Number of neighbors; for GRIDE the largest n2.
        k: Number of neighbors in exact order; for overlaps the largest k. None takes all, which is
            slower.

    Raises:
        ConfigError: k is not within 1 and max_rank.
        ValueError: The shape is wrong, there are fewer than max_rank + 1 tokens, or a layer, which
            is named, has NaN or infinite hidden states.

    Example:
        >>> line = torch.tensor([[[0.0], [1.0], [3.0], [1.0]]])
        >>> nearest = nearest_tokens(line, max_rank=2)
        >>> nearest.indices.tolist(), nearest.first.tolist()
        ([[[1, 2], [0, 2], [1, 0], [0, 2]]], [[0, 1, 2, 1]])
    """
    k = max_rank if k is None else k
    _check(hidden, max_rank, k)
    *leading, n_tokens, width = hidden.shape
    layers = hidden.reshape(-1, n_tokens, width)
    distances = hidden.new_empty(len(layers), n_tokens, max_rank, dtype=torch.float64)
    indices = hidden.new_empty(len(layers), n_tokens, max_rank, dtype=torch.int64)
    first = torch.arange(n_tokens, device=hidden.device).repeat(len(layers), 1)
    size = layers_per_batch(layers)
    products = Products(layers, size)
    for start in range(0, len(layers), size):
        here = slice(start, min(start + size, len(layers)))
        listed = _list_nearest(layers[here], products, max_rank, k)
        _check_finite(layers[here], listed.norms, start, tuple(leading))
        copied = _mark_copies(layers[here], listed, first[here])
        if not copied:
            distances[here], indices[here] = _settle(layers[here], listed, max_rank, k)
            continue
        for i, layer in enumerate(range(here.start, here.stop)):
            if i in copied:
                found = _among_distinct(layers[layer], first[layer], max_rank, k)
            else:
                found = _settle(layers[here][i : i + 1], listed.layer(i), max_rank, k)
            distances[layer], indices[layer] = found
    shape = (*leading, n_tokens, max_rank)
    return NearestTokens(
        distances.reshape(shape), indices.reshape(shape), first.reshape(*leading, n_tokens), k
    )


def layer_name(position: int, leading: tuple[int, ...]) -> str:
    """Return the name of a layer for messages, as ``layer 2 of prompt 1``."""
    if len(leading) < 2:
        return f"layer {position}"
    prompt, layer = divmod(position, leading[-1])
    return f"layer {layer} of prompt {prompt}"


def numbers_at_once(device: torch.device) -> int:
    """Return how many numbers to process at a time: a CPU caches them, a GPU is kept busy."""
    return 2**20 if device.type == "cpu" else 2**26


def layers_per_batch(layers: Tensor) -> int:
    """Return how many of the layers, ``(n_layers, n_tokens, d)``, to process at a time."""
    _, n_tokens, width = layers.shape
    numbers = numbers_at_once(layers.device)
    size = min(numbers // n_tokens**2, 8 * numbers // (n_tokens * min(width, _COLUMNS)))
    return max(1, min(len(layers), size))


class Products:
    """Inner products of all pairs of tokens, for at most `size` of the layers at a time.

    Its memory is reused: allocating it for each batch takes longer than filling it. `dtype` is
    float32, or float64 if the layers are, unless given.
    """

    def __init__(self, layers: Tensor, size: int, dtype: torch.dtype | None = None) -> None:
        _, n_tokens, width = layers.shape
        dtype = dtype or torch.promote_types(layers.dtype, torch.float32)
        columns = min(width, _COLUMNS)
        self._block = layers.new_empty(size * n_tokens * columns, dtype=dtype)
        self._sum = layers.new_empty(size, n_tokens, n_tokens, dtype=dtype)
        self._part = torch.empty_like(self._sum) if width > columns else self._sum

    def about_mean(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Return ``x·y``, ``(n, n_tokens, n_tokens)``, and ``|x|²`` relative to the mean token.

        Distances do not depend on the origin; at the mean, products are small and lose the fewest
        digits when they cancel. The products are valid until the next call.
        """
        norms = tokens.new_zeros(tokens.shape[:2], dtype=torch.float64)
        product, part = self._sum[: len(tokens)], self._part[: len(tokens)]
        for i, columns in enumerate(torch.split(tokens, _COLUMNS, dim=-1)):
            columns = columns.to(self._sum.dtype)
            block = self._block[: columns.numel()].view(columns.shape)
            torch.sub(columns, columns.mean(1, keepdim=True), out=block)
            norms += torch.linalg.vector_norm(block, dim=-1).double() ** 2
            with full_precision(tokens.device):
                _multiply(block, part if i else product)
            if i:
                product += part
        return product, norms


def _multiply(tokens: Tensor, out: Tensor) -> None:
    """Compute ``x xᵀ`` of each layer; on the CPU, the upper triangle, which is mirrored."""
    n_tokens = tokens.shape[1]
    if tokens.device.type != "cpu" or n_tokens < 2 * _STRIP:
        torch.bmm(tokens, tokens.mT, out=out)
        return
    for x, product in zip(tokens, out, strict=True):
        for top in range(0, n_tokens, _STRIP):
            below = top + _STRIP
            torch.mm(x[top:below], x[top:].T, out=product[top:below, top:])
            product[below:, top:below] = product[top:below, below:].T


@contextmanager
def full_precision(device: torch.device) -> Iterator[None]:
    """Multiply float32 matrices in float32, without autocast, TF32 or bfloat16."""
    cuda, cpu = torch.backends.cuda.matmul, torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
    before = cuda.fp32_precision, cpu.fp32_precision
    cuda.fp32_precision = cpu.fp32_precision = "ieee"
    try:
        with torch.autocast(device.type, enabled=False):
            yield
    finally:
        cuda.fp32_precision, cpu.fp32_precision = before


class _Listed(NamedTuple):
    """Nearest tokens by their products."""

    distances: Tensor  # (n_layers, n_tokens, length), increasing, float64
    indices: Tensor  # positions of the tokens, same shape
    norms: Tensor  # squared norms relative to the mean token, (n_layers, n_tokens)
    error: float  # of a squared distance, as a fraction of |x|² + |y|²

    def layer(self, i: int) -> _Listed:
        one = slice(i, i + 1)
        return _Listed(self.distances[one], self.indices[one], self.norms[one], self.error)


def _check(hidden: Tensor, max_rank: int, k: int) -> None:
    if hidden.ndim < 3 or not hidden.is_floating_point():
        raise ValueError(
            f"hidden states {tuple(hidden.shape)} of {hidden.dtype} must be floating-point numbers "
            "(..., n_layers, n_tokens, d)"
        )
    require("k", k, at_least=1, at_most=max_rank)
    if hidden.shape[-2] <= max_rank:
        raise ValueError(
            f"{max_rank} neighbors need {max_rank + 1} tokens, but there are {hidden.shape[-2]}; "
            "take longer texts, or smaller range scalings and k"
        )


def _check_finite(tokens: Tensor, norms: Tensor, start: int, leading: tuple[int, ...]) -> None:
    wrong = ~norms.isfinite().all(1)
    if not bool(wrong.any()):
        return
    layer = int(wrong.nonzero()[0])
    what = "too large to be squared" if bool(tokens[layer].isfinite().all()) else "NaN or infinite"
    raise ValueError(
        f"hidden states of {layer_name(start + layer, leading)} are {what} (layers and prompts are "
        "counted from 0); load the LM in a wider dtype or leave the layer out"
    )


def _list_nearest(tokens: Tensor, products: Products, max_rank: int, k: int) -> _Listed:
    """Rank in float32; in float64 if float32 lacks the range or loses many distances."""
    product, norms = products.about_mean(tokens)
    if product.dtype != torch.float64:
        longest = norms.amax(1)
        if bool(((longest > _SAFE[0]) & (longest < _SAFE[1])).all()):
            listed = _rank(product, norms, tokens.shape[-1], max_rank, k)
            n_lost = int((listed.distances < _lost_below(listed)[..., None]).sum())
            if n_lost <= _MANY * product.numel():
                return listed
        product, norms = Products(tokens, len(tokens), torch.float64).about_mean(tokens)
    return _rank(product, norms, tokens.shape[-1], max_rank, k)


def _rank(product: Tensor, norms: Tensor, width: int, max_rank: int, k: int) -> _Listed:
    """Rank by distance; overwrites `product`."""
    # A token's own norm is constant along its row, so the ranking does without it.
    scores = product.mul_(-2).add_(norms[:, None].to(product.dtype))
    scores.diagonal(dim1=1, dim2=2).fill_(torch.inf)
    length = min(max(max_rank, k + _MARGIN), norms.shape[1] - 1)
    values, indices = scores.topk(length, largest=False)
    distances = values.double().add_(norms[..., None]).clamp_(min=0).sqrt_()
    # More than twice the largest error observed in sums of so many products.
    error = torch.finfo(product.dtype).eps * max(8, width**0.5 / 4)
    return _Listed(distances, indices, norms, error)


def _lost_below(listed: _Listed) -> Tensor:
    """Return the distance of each token below which digits are lost, ``(n_layers, n_tokens)``.

    It follows from ``|y| <= |x| + r``, so that ``|x|² + |y|² <= 3 |x|² + 2 r²``.
    """
    share = _DIGITS * listed.error
    return (listed.norms * (3 * share / (1 - 2 * share))).sqrt()


def _mark_copies(tokens: Tensor, listed: _Listed, first: Tensor) -> set[int]:
    """Mark copies in `first`, and return which layers have some."""
    suspects = listed.distances[..., 0] <= _lost_below(listed)
    copied = set()
    for layer in suspects.any(1).nonzero().flatten().tolist():
        positions = suspects[layer].nonzero().flatten()
        _, group = torch.unique(tokens[layer, positions], dim=0, return_inverse=True)
        earliest = positions.scatter_reduce(0, group, positions, "amin", include_self=False)[group]
        first[layer, positions] = earliest
        if bool((earliest != positions).any()):
            copied.add(layer)
    return copied


def _settle(tokens: Tensor, listed: _Listed, max_rank: int, k: int) -> tuple[Tensor, Tensor]:
    """Recompute what is uncertain, and sort; tokens are distinct."""
    distances, indices, norms, error = listed
    n_tokens, length = distances.shape[1:]
    lost = distances < _lost_below(listed)[..., None]
    # Only these ranks must be in exact order.
    window = min(k + _MARGIN, length)
    squared = distances[..., :window].square()
    # Error bound for any token as near as these, see `_lost_below`.
    doubt = error * (3 * norms[..., None] + 2 * squared[..., -1:])
    close = squared.diff(dim=-1) <= 2 * doubt
    if length < n_tokens - 1:
        # A token that is not listed may be nearer than one that is.
        unsure = lost[..., -1] | close[..., k - 1 :].all(-1)
        for layer in unsure.any(1).nonzero().flatten().tolist():
            rows = unsure[layer].nonzero().flatten()
            found = _from_all(tokens[layer], rows, length)
            distances[layer, rows], indices[layer, rows] = found
        sure = ~unsure[..., None]
        lost, close = lost & sure, close & sure
    again = lost
    again[..., : window - 1] |= close
    again[..., 1:window] |= close
    layer, token, rank = again.nonzero(as_tuple=True)
    other = indices[layer, token, rank]
    distances[layer, token, rank] = _from_differences(tokens, layer, token, other)
    rows = again.any(-1)
    distances[rows], indices[rows] = _sort(distances[rows], indices[rows])
    return distances[..., :max_rank], indices[..., :max_rank]


def _from_differences(tokens: Tensor, layer: Tensor, token: Tensor, other: Tensor) -> Tensor:
    # As many at a time as fit the cache of a CPU, or keep a GPU busy.
    size = max(1, numbers_at_once(tokens.device) // 16 // tokens.shape[-1])
    parts = zip(*(torch.split(part, size) for part in (layer, token, other)), strict=True)
    return torch.cat(
        [
            torch.linalg.vector_norm(tokens[la, t].double() - tokens[la, o].double(), dim=-1)
            for la, t, o in parts
        ]
    )


def _from_all(tokens: Tensor, rows: Tensor, length: int) -> tuple[Tensor, Tensor]:
    squared = tokens.new_zeros(len(rows), len(tokens), dtype=torch.float64)
    for columns in torch.split(tokens, _COLUMNS, dim=-1):
        wide = columns.double()
        squared += torch.cdist(wide[rows], wide, compute_mode="donot_use_mm_for_euclid_dist") ** 2
    squared.scatter_(1, rows[:, None], torch.inf)
    distances, indices = squared.sqrt().sort(dim=1, stable=True)
    return distances[:, :length], indices[:, :length]


def _sort(distances: Tensor, indices: Tensor) -> tuple[Tensor, Tensor]:
    """Sort by distance, then by position."""
    indices, order = indices.sort(dim=-1)
    distances, by_distance = distances.gather(-1, order).sort(dim=-1, stable=True)
    return distances, indices.gather(-1, by_distance)


def _among_distinct(tokens: Tensor, first: Tensor, max_rank: int, k: int) -> tuple[Tensor, Tensor]:
    """Return the neighbors of all tokens in a layer with copies, ``(n_tokens, d)``."""
    kept = (first == torch.arange(len(first), device=first.device)).nonzero().flatten()
    n_listed = min(max_rank, len(kept) - 1)
    shape = (len(tokens), max_rank)
    distances = tokens.new_full(shape, torch.inf, dtype=torch.float64)
    indices = tokens.new_full(shape, -1, dtype=torch.int64)
    if n_listed == 0:
        return distances, indices
    cloud = tokens[kept][None]
    k = min(k, n_listed)
    listed = _list_nearest(cloud, Products(cloud, 1), n_listed, k)
    near, who = _settle(cloud, listed, n_listed, k)
    group = torch.searchsorted(kept, first)
    distances[:, :n_listed], indices[:, :n_listed] = near[0, group], kept[who[0, group]]
    return distances, indices
