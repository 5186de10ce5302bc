"""Prompts that begin alike as one row of a forward, which reads what they share once.

The prompts about one X begin with BOS and X, and go on in few ways (" lives in the city of",
" lives in the country of"): as token ids they are the paths of a tree. Its nodes, depth first, are
a row; each attends to its ancestors alone and has its depth as its position, so that it sees what
it would see in its own prompt. Prompts that share nothing are a tree with several roots. Whether an
LM heeds such a mask and such positions is tried, never taken for granted: `shared_prefixes`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from lincorr_lightning.lm.head import to_device

MOST_NODES = 256
"""Tokens of a tree; attention within a row grows with their square, what is saved does not."""

_ALIGNED = 8


class PromptTree(NamedTuple):
    """Prompts as paths from the root, or from one of several roots.

    Attributes:
        token_ids: Of each node, depth first.
        parents: Of each node, smaller than itself; -1 at a root.
        ends: Each prompt's index, and the node it ends at.
    """

    token_ids: list[int]
    parents: tuple[int, ...]
    ends: list[tuple[int, int]]


class TreeBatch(NamedTuple):
    """Trees as the LM takes them.

    Attributes:
        input_ids: Padded on the right, ``(n_trees, length)``.
        position_ids: Depth of each node, same shape.
        attention_mask: 0 at ancestors and at the node itself, else the dtype's least number,
            ``(n_trees, 1, length, length)``.
    """

    input_ids: Tensor
    position_ids: Tensor
    attention_mask: Tensor


def grow_trees(rows: Mapping[int, Sequence[int]], most: int = MOST_NODES) -> Iterator[PromptTree]:
    """Make prompts to trees.

    Args:
        rows: Token ids of each prompt, none empty, by the prompt's index.
        most: Nodes of a tree; a longer prompt is a tree by itself.

    Yields:
        Trees that hold each prompt once.
    """
    token_ids: list[int] = []
    parents: list[int] = []
    ends: list[tuple[int, int]] = []
    path: list[int] = []  # nodes of the prompt before
    for row, index in sorted((list(row), index) for index, row in rows.items()):
        shared = 0
        for node, token in zip(path, row, strict=False):
            if token_ids[node] != token:
                break
            shared += 1
        if ends and len(token_ids) + len(row) - shared > most:
            yield PromptTree(token_ids, tuple(parents), ends)
            token_ids, parents, ends, path, shared = [], [], [], [], 0
        del path[shared:]
        for token in row[shared:]:
            parents.append(path[-1] if path else -1)
            path.append(len(token_ids))
            token_ids.append(token)
        ends.append((index, path[-1]))
    if ends:
        yield PromptTree(token_ids, tuple(parents), ends)


@lru_cache(maxsize=256)
def _shape(parents: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Which nodes each node sees, ``(n, n)`` bool, and its depth, ``(n,)``.

    X's of as many tokens give trees of the same shape, so that few shapes serve a whole run.
    """
    sees = torch.eye(len(parents), dtype=torch.bool)
    for node, parent in enumerate(parents):
        if parent >= 0:
            sees[node] |= sees[parent]
    return sees, sees.sum(1) - 1


def pack_trees(
    trees: Sequence[PromptTree], pad_id: int, dtype: torch.dtype, device: torch.device
) -> TreeBatch:
    """Pad trees to one length, with the mask that keeps their branches apart.

    Args:
        trees: At least one.
        pad_id: Any token id; nothing attends to padding, and padding only to itself.
        dtype: The LM's.
        device: The LM's.
    """
    length = max(len(tree.token_ids) for tree in trees)
    if device.type != "cpu":
        length += -length % _ALIGNED  # an accelerator's kernels would copy any other mask
    ids = [tree.token_ids + [pad_id] * (length - len(tree.token_ids)) for tree in trees]
    kinds = {parents: kind for kind, parents in enumerate({tree.parents: 0 for tree in trees})}
    sees = torch.eye(length, dtype=torch.bool).repeat(len(kinds), 1, 1)
    depths = torch.zeros(len(kinds), length, dtype=torch.long)
    for parents, kind in kinds.items():
        n = len(parents)
        sees[kind, :n, :n], depths[kind, :n] = _shape(parents)
    which = torch.tensor([kinds[tree.parents] for tree in trees])
    hidden = to_device(~sees, device)
    mask = torch.zeros(hidden.shape, dtype=dtype, device=device)
    mask = mask.masked_fill_(hidden, torch.finfo(dtype).min).unsqueeze(1)
    return TreeBatch(
        to_device(torch.tensor(ids), device),
        to_device(depths[which], device),
        # Trees of one shape need one mask.
        mask.expand(len(trees), -1, -1, -1) if len(kinds) == 1 else mask[to_device(which, device)],
    )
