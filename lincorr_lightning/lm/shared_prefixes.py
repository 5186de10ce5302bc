"""Prefix sharing: prompts as one row of a forward pass, which computes each prefix once.

The prompts of one subject start with BOS and the subject and continue in a few ways (" lives in the
city of", " lives in the country of"): their token ids are paths in a tree. The nodes of the tree,
depth first, are one row; each node attends to its ancestors only and its position is its depth, so
that it sees what it would see in its own prompt. Prompts without a common prefix are a tree with
several roots. `prefix_sharing_error` tests whether an LM respects such masks and positions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from functools import lru_cache
from os.path import commonprefix
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
from torch import Tensor

from lincorr_lightning.errors import LanguageModelError
from lincorr_lightning.lm import head as heads
from lincorr_lightning.lm.batching import MicroBatches, RowsContext
from lincorr_lightning.lm.encoding import PAD_ID

if TYPE_CHECKING:
    from transformers import PreTrainedModel

MAX_NODES = 256  #: Of a tree: attention within a row grows quadratically.
_ALIGNED = 8
# These implementations take any mask; flash attention and the like take causal masks only.
_ATTENTION = ("sdpa", "eager")
_WINDOWS = ("window", "window_size", "attention_chunk_size")
_ROPE = "rope_parameters", "rope_scaling"
_FIXED_ROPE = {"default", "linear", "yarn", "llama3", "proportional", "mrope", "axial"}
_LENGTHS = "original_max_position_embeddings", "max_position_embeddings"
# A tree's tokens cost slightly more than a batch's, for the mask and its attention.
_WORTHWHILE = 0.9


class PromptTree(NamedTuple):
    """Prompts as paths from a root."""

    token_ids: list[int]  #: Token of each node, depth first.
    parents: list[int]  #: Parent of each node, -1 for a root; a parent precedes its children.
    ends: list[tuple[int, int]]  #: Pairs of a prompt's index and the node at which it ends.


def grow_trees(
    rows: Mapping[int, Sequence[int]], max_nodes: int = MAX_NODES
) -> Iterator[PromptTree]:
    """Yield trees that together contain each prompt once.

    `rows` has the token ids of each prompt, not empty, by its index; a prompt that is longer than
    `max_nodes` is a tree of its own.
    """
    tree = PromptTree([], [], [])
    path: list[int] = []  # nodes of the previous prompt
    for row, index in sorted((list(row), index) for index, row in rows.items()):
        shared = len(commonprefix([[tree.token_ids[node] for node in path], row]))
        if tree.ends and len(tree.token_ids) + len(row) - shared > max_nodes:
            yield tree
            tree = PromptTree([], [], [])
            shared = 0
        del path[shared:]
        for token in row[shared:]:
            tree.parents.append(path[-1] if path else -1)
            path.append(len(tree.token_ids))
            tree.token_ids.append(token)
        tree.ends.append((index, path[-1]))
    if tree.ends:
        yield tree


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
    trees: Sequence[PromptTree], dtype: torch.dtype, device: torch.device
) -> dict[str, Tensor]:
    """Pad trees on the right to one length and build the mask that separates their branches.

    Returns arguments of the LM's forward: ``input_ids``, ``(n_trees, length)``; ``position_ids``,
    the depth of each node; and ``attention_mask``, 0 at ancestors and at the node itself, else the
    lowest number of the dtype, ``(n_trees, 1, length, length)``.
    """
    length = max(len(tree.token_ids) for tree in trees)
    if device.type != "cpu":
        length += -length % _ALIGNED  # attention kernels copy masks that are not aligned
    ids = [tree.token_ids + [PAD_ID] * (length - len(tree.token_ids)) for tree in trees]
    sees = torch.eye(length, dtype=torch.bool).repeat(len(trees), 1, 1)
    depths = torch.zeros(len(trees), length, dtype=torch.long)
    for row, tree in enumerate(trees):
        n = len(tree.parents)
        sees[row, :n, :n], depths[row, :n] = _shape(tuple(tree.parents))
    hidden = heads.to_device(~sees, device)
    mask = torch.zeros(hidden.shape, dtype=dtype, device=device)
    return {
        "input_ids": heads.to_device(torch.tensor(ids), device),
        "position_ids": heads.to_device(depths, device),
        "attention_mask": mask.masked_fill_(hidden, torch.finfo(dtype).min).unsqueeze(1),
    }


def plan_reading(
    model: PreTrainedModel,
    groups: Sequence[Mapping[int, Sequence[int]]],
    wanted: bool | Literal["auto"],
    max_tokens: int | None,
    sharing_error: str | None,
) -> tuple[list[PromptTree], str]:
    """Return trees of prompts, none if each prompt is read separately; and the reason, for the log.

    `groups` are prompts that may share a tree, such as those of a subject: token ids by the
    prompt's index. `wanted` is `LMConfig.share_prefixes`.
    """
    n_tokens = sum(len(row) for group in groups for row in group.values())
    alone = all(len(group) == 1 for group in groups)
    if wanted is False or n_tokens == 0 or (wanted == "auto" and alone):
        return [], "one by one"
    max_nodes = min(max_tokens or MAX_NODES, MAX_NODES)
    trees = [tree for group in groups for tree in grow_trees(group, max_nodes)]
    n_nodes = sum(len(tree.token_ids) for tree in trees)
    if wanted == "auto" and n_nodes > _WORTHWHILE * n_tokens:
        return [], "one by one: their common prefixes are short"
    window = narrowest_window(model)
    longest = max(len(tree.token_ids) for tree in trees)
    reason = sharing_error
    if window is not None and longest > window:
        reason = f"its attention window is {window} tokens, and they have {longest}"
    if reason is None:
        return trees, f"with shared prefixes ({n_tokens / n_nodes:.1f} times fewer tokens)"
    if wanted is True:
        raise LanguageModelError(
            f"lm.share_prefixes is true, but not for {type(model).__name__}: {reason}. Set auto."
        )
    return [], f"one by one: {reason}"


def read_trees(
    model: PreTrainedModel,
    trees: Sequence[PromptTree],
    batches: MicroBatches,
    keep: Callable[[Sequence[int], Tensor], None],
    context: RowsContext | None = None,
    dtype: torch.dtype | None = None,
) -> None:
    """Call `keep` with indices of prompts and the states after them, ``(n_prompts, hidden_size)``.

    The forward pass of some trees is in the `context` of their first prompts; `dtype` is that of
    its states, None for the LM's own.
    """

    def forward(chosen: list[int]) -> None:
        some = [trees[i] for i in chosen]
        batch = pack_trees(some, dtype or model.dtype, model.device)
        length = batch["input_ids"].shape[1]
        prompts = [prompt for tree in some for prompt, _ in tree.ends]
        nodes = [row * length + node for row, tree in enumerate(some) for _, node in tree.ends]
        ends = heads.to_device(torch.tensor(nodes), model.device)
        rows = [tree.ends[0][0] for tree in some]  # all prompts of a tree have one context
        with context(rows) if context is not None else nullcontext():
            keep(prompts, heads.read_states(model, ends=ends, **batch))

    batches.run([len(tree.token_ids) for tree in trees], model.device.type, forward)


def prefix_sharing_error(
    model: PreTrainedModel,
    reads_rows: bool,
    probe: Sequence[int],
    vocab_size: int,
    dtype: torch.dtype,
) -> str | None:
    """Return why an LM does not support prefix sharing, or None if it does.

    `dtype` is that of the states in its forward pass.
    """
    if not reads_rows:
        return "its head is not a plain linear layer"
    attention = getattr(model.config.get_text_config(), "_attn_implementation", None)
    if attention not in _ATTENTION:
        return f"its attention implementation, {attention}, does not take custom masks"
    if not heads.takes_argument(model, "position_ids"):
        return "its forward does not take position ids"
    # Like the prompts of one subject: several ends, one prompt within another, other beginnings.
    ids = list(probe)
    rows = [ids, ids[:-1], [*ids[:2], ids[0]], [*ids[:2], ids[0], *ids[2:]][: len(ids)], ids[1:]]
    trees = list(grow_trees(dict(enumerate(rows))))
    # A second tree of another shape, so that padding and separate masks are tested too.
    rows.append([*ids[:1], *ids[2:]])
    trees += grow_trees({len(rows) - 1: rows[-1]})
    tokens = heads.probe_tokens(vocab_size)
    plain = heads.read_alone(model, rows, tokens, by_rows=True)
    try:
        states = heads.States(len(rows), model.device)
        read_trees(model, trees, MicroBatches(), states.keep, dtype=dtype)
        shared = heads.logits_of_states(model, [(states.all, tokens)], is_product=False)
    except (heads.UnusableHeadError, *heads.FAILURES) as error:
        return f"its forward does not take custom masks ({type(error).__name__})"
    if not heads.are_same(shared, plain, dtype):
        return "its logits would change"
    return None


def length_of_other_positions(config: Any) -> int | None:
    """Return the length from which rotary positions may depend on that of the longest row, or None.

    As with LongRoPE and dynamic NTK scaling; types of scaling that are not known count as such.
    """
    types = {part.get("rope_type", part.get("type", "default")) for part in _rope_parts(config)}
    return None if types <= _FIXED_ROPE else min(lengths_in(config), default=1)


def lengths_in(config: Any) -> list[int]:
    """Return the lengths at which an LM's positions may change, as its configuration names them."""
    parts = (*_rope_parts(config), vars(config))
    lengths = {part.get(name) for part in parts for name in _LENGTHS}
    return sorted(n for n in lengths if type(n) is int and n > 0)


def _rope_parts(config: Any) -> list[dict[str, Any]]:
    rope = next((r for n in _ROPE if isinstance(r := getattr(config, n, None), dict) and r), {})
    return [part for part in (rope, *rope.values()) if isinstance(part, dict)]


def narrowest_window(model: PreTrainedModel) -> int | None:
    """Return the smallest attention window of any layer by the configuration, or None.

    A tree has one mask for all layers, and a node's ancestors are farther away in the row than in
    the prompt: only trees no longer than the window give the logits of their prompts.
    """
    config: dict[str, Any] = model.config.get_text_config().to_dict()
    windows = [
        value
        for key, value in config.items()
        if key.endswith(_WINDOWS) and type(value) is int and value > 0
    ]
    return min(windows, default=None)
