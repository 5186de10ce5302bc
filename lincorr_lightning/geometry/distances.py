"""Nearest tokens of every token, layer by layer, without a distance matrix that outlives its batch.

Squared distances come from matrix products in float32. What float32 cannot tell is computed again
in float64: from differences where a few distances cancel or neighbors are in doubtful order, from
products where many cancel. Copies (tokens with equal hidden states) are found by comparison, taken
out, and mapped back.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor

# Columns whose products are added up at a time: the cloud of a vocabulary's probabilities is not
# copied as a whole.
_COLUMNS = 8192
# Tokens whose products with those after them are taken at a time.
_STRIP = 256
# Ranks beyond k that are looked at, so that a doubtful order at k can be seen to end.
_MARGIN = 4
# A squared distance below so many times its error has lost too many digits.
_DIGITS = 2**10
# More lost distances than this share of all pairs are cheaper by products than by differences.
_MANY = 1 / 64
# Layers whose longest token has its squared norm outside come too near to float32's limits.
_SAFE = (1e-24, 1e30)


class NearestTokens(NamedTuple):
    """The nearest distinct tokens of every token.

    Tokens of a layer whose hidden states are equal are copies of the first of them. Lists hold
    first ones only, and a copy has the list of its first: no distance is zero.

    Attributes:
        distances: Euclidean, increasing, ``(..., n_tokens, max_rank)``, float64; inf where a layer
            has fewer distinct tokens.
        indices: Positions of these tokens, likewise, int64; -1 where there are fewer.
        first: Position of the first token with the same hidden state, ``(..., n_tokens)``, int64;
            a token's own position unless it is a copy.
        k: Up to this rank the order is that of distances in float64; beyond, tokens whose
            distances agree within the error of float32 may have changed places.
    """

    distances: Tensor
    indices: Tensor
    first: Tensor
    k: int

    @property
    def distinct(self) -> Tensor:
        """Which tokens are no copies, ``(..., n_tokens)`` bool."""
        return self.first == torch.arange(self.first.shape[-1], device=self.first.device)


@torch.no_grad()
def nearest_tokens(hidden: Tensor, max_rank: int, k: int | None = None) -> NearestTokens:
    """Find the nearest distinct tokens of each token of each layer.

    Args:
        hidden: Hidden states, ``(..., n_layers, n_tokens, d)``, of any floating dtype; the last
            of the leading dimensions counts layers, those before it prompts. Probabilities of the
            next token, ``(..., 1, n_tokens, n_vocabulary)``, are a cloud as well.
        max_rank: How many neighbors are listed; for GRIDE the largest n2.
        k: How many of them are needed in exact order; for overlaps the largest k. All by default,
            which takes longer.

    Raises:
        ValueError: The shape is another, there are fewer than max_rank + 1 tokens, k is not within
            1 and max_rank, or a layer, which is named, has NaN or infinite hidden states.

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
    """Name a layer in a message.

    Args:
        position: Where it is in the flattened leading dimensions.
        leading: These dimensions, layers last.

    Example:
        >>> layer_name(7, (9,)), layer_name(7, (2, 5))
        ('layer 7', 'layer 2 of prompt 1')
    """
    if len(leading) < 2:
        return f"layer {position}"
    prompt, layer = divmod(position, leading[-1])
    return f"layer {layer} of prompt {prompt}"


def numbers_at_once(device: torch.device) -> int:
    """How many numbers to work on at a time: a processor caches them, a GPU is kept busy."""
    return 2**20 if device.type == "cpu" else 2**26


def layers_per_batch(layers: Tensor) -> int:
    """How many layers ``(n_layers, n_tokens, d)`` to take at a time."""
    _, n_tokens, width = layers.shape
    numbers = numbers_at_once(layers.device)
    size = min(numbers // n_tokens**2, 8 * numbers // (n_tokens * min(width, _COLUMNS)))
    return max(1, min(len(layers), size))


class Products:
    """Products of all pairs of tokens, a batch of layers at a time, in memory that is used anew.

    To allocate this memory for each batch would take longer than to fill it.

    Args:
        layers: What the batches come from, ``(n_layers, n_tokens, d)``.
        size: Layers in a batch, at most.
        dtype: Of the products; float32 by default, or float64 if the layers are.
    """

    def __init__(self, layers: Tensor, size: int, dtype: torch.dtype | None = None) -> None:
        _, n_tokens, width = layers.shape
        dtype = dtype or torch.promote_types(layers.dtype, torch.float32)
        columns = min(width, _COLUMNS)
        self._block = layers.new_empty(size * n_tokens * columns, dtype=dtype)
        self._sum = layers.new_empty(size, n_tokens, n_tokens, dtype=dtype)
        self._part = torch.empty_like(self._sum) if width > columns else self._sum

    def about_mean(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """``x·y`` and ``|x|²`` about the mean token: distances do not change with the origin.

        Near the mean the products are smallest, and least is lost when they cancel.

        Args:
            tokens: ``(n, n_tokens, d)``, n at most `size`.

        Returns:
            ``(n, n_tokens, n_tokens)``, valid until the next call, and ``(n, n_tokens)``, float64.
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
    """``x xᵀ`` of each layer; a processor takes what is above the diagonal, and mirrors it."""
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
    """Multiply float32 matrices in float32: without autocast, TF32 or bfloat16."""
    cuda, cpu = torch.backends.cuda.matmul, torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
    before = cuda.fp32_precision, cpu.fp32_precision
    cuda.fp32_precision = cpu.fp32_precision = "ieee"
    try:
        with torch.autocast(device.type, enabled=False):
            yield
    finally:
        cuda.fp32_precision, cpu.fp32_precision = before


class _Listed(NamedTuple):
    """What the products tell of the nearest tokens, ``(n_layers, n_tokens, length)``.

    Attributes:
        distances: Increasing, float64.
        indices: Whose they are.
        norms: Squared norms about the mean token, ``(n_layers, n_tokens)``.
        error: Share of ``|x|² + |y|²`` that a squared distance may be wrong by.
    """

    distances: Tensor
    indices: Tensor
    norms: Tensor
    error: float

    def layer(self, i: int) -> _Listed:
        one = slice(i, i + 1)
        return _Listed(self.distances[one], self.indices[one], self.norms[one], self.error)


def _check(hidden: Tensor, max_rank: int, k: int) -> None:
    if hidden.ndim < 3 or not hidden.is_floating_point():
        raise ValueError(
            f"hidden states {tuple(hidden.shape)} of {hidden.dtype} must be floating-point numbers "
            "(..., n_layers, n_tokens, d)"
        )
    if not 1 <= k <= max_rank:
        raise ValueError(f"k is {k}; it must be within 1 and max_rank, {max_rank}")
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
    """In float32; in float64 if that has not the range, or loses many distances."""
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
    """Overwrites `product`."""
    # The own norm is the same along a row and left out of the ranking.
    scores = product.mul_(-2).add_(norms[:, None].to(product.dtype))
    scores.diagonal(dim1=1, dim2=2).fill_(torch.inf)
    length = min(max(max_rank, k + _MARGIN), norms.shape[1] - 1)
    values, indices = scores.topk(length, largest=False)
    distances = values.double().add_(norms[..., None]).clamp_(min=0).sqrt_()
    # Twice and more what sums of so many products were seen to be off by, of any sign.
    error = torch.finfo(product.dtype).eps * max(8, width**0.5 / 4)
    return _Listed(distances, indices, norms, error)


def _lost_below(listed: _Listed) -> Tensor:
    """Distance of each token below which digits are lost, ``(n_layers, n_tokens)``.

    From ``|y| <= |x| + r``, and so ``|x|² + |y|² <= 3 |x|² + 2 r²``.
    """
    share = _DIGITS * listed.error
    return (listed.norms * (3 * share / (1 - 2 * share))).sqrt()


def _mark_copies(tokens: Tensor, listed: _Listed, first: Tensor) -> set[int]:
    """Enter copies in `first`; tell which layers have some."""
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
    """Compute again what is in doubt, and sort; tokens are distinct.

    Returns:
        Distances and indices, ``(n_layers, n_tokens, max_rank)``.
    """
    distances, indices, norms, error = listed
    n_tokens, length = distances.shape[1:]
    lost = distances < _lost_below(listed)[..., None]
    # The order is asked for in a window of ranks only.
    window = min(k + _MARGIN, length)
    squared = distances[..., :window].square()
    # Of any token as near as these, for the reason given at `_lost_below`.
    doubt = error * (3 * norms[..., None] + 2 * squared[..., -1:])
    close = squared.diff(dim=-1) <= 2 * doubt
    if length < n_tokens - 1:
        # Some token that is not listed may be nearer than one that is.
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
    # Few enough at a time to stay in the cache, or to keep an accelerator busy.
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
    """By distance, then by position."""
    indices, order = indices.sort(dim=-1)
    distances, by_distance = distances.gather(-1, order).sort(dim=-1, stable=True)
    return distances, indices.gather(-1, by_distance)


def _among_distinct(tokens: Tensor, first: Tensor, max_rank: int, k: int) -> tuple[Tensor, Tensor]:
    """Neighbors in a layer ``(n_tokens, d)`` that has copies, for copies too."""
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
