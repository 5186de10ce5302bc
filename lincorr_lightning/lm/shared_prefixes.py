"""Asking an LM about one X in several prompts at once, where it gives the same logits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
from torch import Tensor

from lincorr_lightning.errors import LanguageModelError
from lincorr_lightning.lm.batching import MicroBatches
from lincorr_lightning.lm.head import (
    LogitMethod,
    UnusableHeadError,
    read_logits,
    read_positions,
    takes_argument,
    to_device,
)
from lincorr_lightning.lm.memory import oom_reason
from lincorr_lightning.lm.prompt_trees import (
    MOST_NODES,
    PromptTree,
    TreeBatch,
    grow_trees,
    pack_trees,
)

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_N_PROBE_TOKENS = 16
# Of how much the logits differ between prompts. A wrong position or a look aside changes them by
# about as much as another prompt does; half precision rounds them by a few hundredths of that.
_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4}
_HALF_TOLERANCE = 0.1
# Kernels of these take any mask; those of flash attention and their like know causal ones only.
_ATTENTION = ("sdpa", "eager")
_WINDOWS = ("window", "window_size", "attention_chunk_size")
# A tree's tokens cost a little more than a batch's: their mask is made, and attention is theirs.
_WORTHWHILE = 0.9


class Plan(NamedTuple):
    """How the prompts about some X's are read.

    Attributes:
        trees: Prompts by their number, X by X; empty if each is read by itself.
        why: In a few words.
    """

    trees: list[PromptTree]
    why: str


def plan_reading(
    model: PreTrainedModel,
    rows: Sequence[Sequence[Sequence[int]]],
    wanted: bool | Literal["auto"],
    most: int | None,
    why_not: Callable[[], str | None],
) -> Plan:
    """Decide whether prompts about one X share what they begin with.

    Args:
        model: The LM.
        rows: Token ids of each domain's prompts, one about each X.
        wanted: `LMConfig.share_prefixes`.
        most: Most tokens of a forward, if that is set.
        why_not: Why this LM cannot, None if it can.

    Raises:
        LanguageModelError: It is wanted, and the LM cannot.
    """
    n_domains = len(rows)
    n_tokens = sum(len(row) for domain in rows for row in domain)
    if wanted is False or n_tokens == 0 or (wanted == "auto" and n_domains == 1):
        return Plan([], "one by one")
    trees = [
        tree
        for x, about in enumerate(zip(*rows, strict=True))
        for tree in grow_trees(
            {x * n_domains + domain: row for domain, row in enumerate(about)},
            min(most or MOST_NODES, MOST_NODES),
        )
    ]
    n_nodes = sum(len(tree.token_ids) for tree in trees)
    if wanted == "auto" and n_nodes > _WORTHWHILE * n_tokens:
        return Plan([], "one by one: they have little in common")
    window, longest = narrowest_window(model), max(len(tree.token_ids) for tree in trees)
    if window is not None and longest > window:
        reason: str | None = f"its attention sees {window} tokens back, and they have {longest}"
    else:
        reason = why_not()
    if reason is None:
        saved = f"{n_tokens / n_nodes:.1f} times fewer tokens"
        return Plan(trees, f"together, what they begin with once ({saved})")
    if wanted is True:
        raise LanguageModelError(
            f"lm.share_prefixes is true, but {type(model).__name__} cannot read what prompts "
            f"begin with once: {reason}. Set it to auto."
        )
    return Plan([], f"one by one: {reason}")


def logits_of_trees(
    model: PreTrainedModel,
    trees: Sequence[PromptTree],
    n_subjects: int,
    tokens: Sequence[Tensor],
    batches: MicroBatches,
    pad_id: int,
) -> Tensor:
    """Logits of each domain after its prompts, side by side.

    Args:
        model: The LM, in eval mode.
        trees: Of all prompts.
        n_subjects: Number of X's.
        tokens: Token ids of each domain, on the LM's device.
        batches: Cuts the trees into forwards.
        pad_id: Any token id.

    Returns:
        ``(n_subjects, n_labels of all domains)``, float64.
    """
    device, n, sizes = model.device, len(tokens), [len(ids) for ids in tokens]
    logits = torch.empty(n_subjects, sum(sizes), dtype=torch.float64, device=device)
    columns = torch.split(logits, sizes, dim=1)

    def ask(chosen: list[int]) -> None:
        batch = pack_trees([trees[i] for i in chosen], pad_id, model.dtype, device)
        length = batch.input_ids.shape[1]
        ends: list[list[tuple[int, int]]] = [[] for _ in range(n)]
        for row, i in enumerate(chosen):
            for prompt, node in trees[i].ends:
                ends[prompt % n].append((prompt // n, row * length + node))
        asked = [domain for domain in range(n) if ends[domain]]
        # One copy to the device for all: which X, and which node of the batch.
        places = to_device(torch.tensor(list(chain.from_iterable(ends))).T.contiguous(), device)
        parts = torch.split(places, [len(ends[domain]) for domain in asked], dim=1)
        blocks = [(part[1], tokens[domain]) for domain, part in zip(asked, parts, strict=True)]
        read = read_trees(model, batch, blocks)
        for domain, part, values in zip(asked, parts, read, strict=True):
            columns[domain][part[0]] = values.to(device)

    batches.run([len(tree.token_ids) for tree in trees], device.type, ask)
    return logits


def read_trees(
    model: PreTrainedModel, batch: TreeBatch, blocks: Sequence[tuple[Tensor, Tensor]]
) -> list[Tensor]:
    """Logits of some tokens at some nodes, and of others at others.

    Args:
        model: The LM.
        batch: Trees.
        blocks: Nodes, counted through the rows of the batch, ``(n_nodes,)``; with the tokens to
            read at these, ``(n_tokens,)``.

    Returns:
        ``(n_nodes, n_tokens)`` of each block, float64.
    """
    return read_positions(
        model, batch.input_ids, blocks,
        attention_mask=batch.attention_mask, position_ids=batch.position_ids,
    )  # fmt: skip


def prefix_sharing_error(
    model: PreTrainedModel, reading: LogitMethod, probe: Sequence[int], vocab_size: int
) -> str | None:
    """Say why an LM cannot be asked by trees, None if it can.

    Args:
        model: The LM.
        reading: How its logits are read off single prompts.
        probe: Token ids of a short text, at least three.
        vocab_size: Number of tokens of the head.
    """
    if reading is not LogitMethod.ROWS:
        return "its head is no plain linear layer"
    attention = getattr(model.config.get_text_config(), "_attn_implementation", None)
    if attention not in _ATTENTION:
        return f"its attention, {attention}, takes no mask of ours"
    if not takes_argument(model, "position_ids"):
        return "it takes no positions of ours"
    # As the prompts of one X: a beginning, its ends, one within another, and other beginnings.
    ids = list(probe)
    rows = [ids, ids[:-1], [*ids[:2], ids[0]], [*ids[:2], ids[0], *ids[2:]][: len(ids)], ids[1:]]
    tokens = torch.linspace(0, vocab_size - 1, min(_N_PROBE_TOKENS, vocab_size)).long()
    device = model.device
    plain = torch.cat([_alone(model, row, tokens, reading) for row in rows])
    (tree,) = grow_trees(dict(enumerate(rows)))
    # A second tree of another shape, so that padding and a mask for each row are tried too.
    (other,) = grow_trees({0: [*ids[:1], *ids[2:]]})
    batch = pack_trees([other, tree], 0, model.dtype, device)
    length = batch.input_ids.shape[1]
    nodes = torch.tensor([node for _, node in sorted(tree.ends)]) + length
    try:
        (shared,) = read_trees(model, batch, [(nodes.to(device), tokens.to(device))])
    except (UnusableHeadError, RuntimeError, TypeError, ValueError, IndexError) as error:
        if oom_reason(error):
            raise
        return f"it takes no mask of ours ({type(error).__name__})"
    spread = (plain - plain.mean(0)).norm()
    tolerance = _TOLERANCE.get(model.dtype, _HALF_TOLERANCE)
    if not (shared - plain).norm() <= tolerance * spread:
        return "its logits would not be the same"
    return None


def narrowest_window(model: PreTrainedModel) -> int | None:
    """Fewest tokens that some layer sees back, as far as the config tells.

    A tree's mask is one for all layers, and in its row a token's ancestors stand farther off than
    in its prompt: only trees that are no longer than any window are read as their prompts are.
    """
    config: dict[str, Any] = model.config.get_text_config().to_dict()
    windows = [
        value
        for key, value in config.items()
        if key.endswith(_WINDOWS) and type(value) is int and value > 0
    ]
    return min(windows, default=None)


def _alone(
    model: PreTrainedModel, row: Sequence[int], tokens: Tensor, reading: LogitMethod
) -> Tensor:
    ids = torch.tensor([list(row)], device=model.device)
    last = torch.tensor([len(row) - 1], device=model.device)
    return read_logits(model, ids, torch.ones_like(ids), last, tokens, reading)
