"""Prompts with common prefixes as one row of a forward pass, which computes each prefix once.

The prompts of one subject start with BOS and the subject and continue in a few ways (" lives in the
city of", " lives in the country of"): their token ids are paths in a tree. The nodes of the tree,
depth first, are one row; each node attends to its ancestors only and its position is its depth, so
that it sees what it would see in its own prompt. Prompts without a common prefix are a tree with
several roots. `shared_prefixes` tests for each LM whether it respects such masks and positions.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from lincorr_lightning.lm.head import to_device

MAX_NODES = 256
"""Maximum nodes of a tree: attention within a row grows quadratically, the savings do not."""

_ALIGNED = 8


class PromptTree(NamedTuple):
    """Prompts as paths from a root.

    Attributes:
        token_ids: Token of each node, depth first.
        parents: Parent of each node, -1 for a root; a parent precedes its children.
        ends: Pairs of a prompt's index and the node at which it ends.
    """

    token_ids: list[int]
    parents: tuple[int, ...]
    ends: list[tuple[int, int]]


def grow_trees(
    rows: Mapping[int, Sequence[int]], max_nodes: int = MAX_NODES
) -> Iterator[PromptTree]:
    """Yield trees that together contain each prompt once.

    Args:
        rows: Token ids of each prompt, not empty, by the prompt's index.
        max_nodes: Maximum nodes of a tree; a longer prompt is a tree of its own.
    """
    token_ids: list[int] = []
    parents: list[int] = []
    ends: list[tuple[int, int]] = []
    path: list[int] = []  # nodes of the previous prompt
    for row, index in sorted((list(row), index) for index, row in rows.items()):
        shared = 0
        for node, token in zip(path, row, strict=False):
            if token_ids[node] != token:
                break
            shared += 1
        if ends and len(token_ids) + len(row) - shared > max_nodes:
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
    """Return the ancestors of each node, ``(n, n)`` bool, and its depth, ``(n,)``.

    Subjects with the same number of tokens give trees of the same shape, so the cache stays small.
    """
    sees = torch.eye(len(parents), dtype=torch.bool)
    for node, parent in enumerate(parents):
        if parent >= 0:
            sees[node] |= sees[parent]
    return sees, sees.sum(1) - 1


def pack_trees(
    trees: Sequence[PromptTree], pad_id: int, dtype: torch.dtype, device: torch.device
) -> dict[str, Tensor]:
    """Pad trees on the right to one length and build the mask that separates their branches.

    Returns:
        Arguments of the LM's forward: ``input_ids``, ``(n_trees, length)``; ``position_ids``, the
        depth of each node; and ``attention_mask``, 0 at ancestors and at the node itself, else the
        lowest number of the dtype, ``(n_trees, 1, length, length)``.
    """
    length = max(len(tree.token_ids) for tree in trees)
    if device.type != "cpu":
        length += -length % _ALIGNED  # attention kernels copy masks that are not aligned
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
    if len(kinds) == 1:  # trees of the same shape share one mask
        mask = mask.expand(len(trees), -1, -1, -1)
    else:
        mask = mask[to_device(which, device)]
    return {
        "input_ids": to_device(torch.tensor(ids), device),
        "position_ids": to_device(depths[which], device),
        "attention_mask": mask,
    }
