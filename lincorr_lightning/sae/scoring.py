"""SAEs on texts: what they rebuild, and what the LM loses when it goes on with that."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from lincorr_lightning.sae.hook_points import HookPoint
from lincorr_lightning.sae.hooks import captured, edited
from lincorr_lightning.sae.sparse_autoencoder import SparseAutoencoder

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Seen = Callable[[int, Tensor, Tensor, Tensor], None]


@torch.no_grad()
def score_texts(
    model: PreTrainedModel,
    saes: Mapping[HookPoint, SparseAutoencoder],
    input_ids: Tensor,
    attention_mask: Tensor,
    counted: Tensor,
    seen: Seen,
) -> tuple[Tensor, int]:
    """Run one batch of texts as it is, and twice for each SAE.

    Args:
        model: A Hugging Face causal LM, in eval mode.
        saes: One for each place.
        input_ids: Token ids, padded on the right, ``(n_texts, longest)``.
        attention_mask: 1 at true tokens, same shape.
        counted: Where activations are read and replaced, bool, same shape.
        seen: Is given each place's number, its activations, their reconstruction, ``(n, width)``
            each, and features, ``(n, n_features)``.

    Returns:
        The sum of the cross-entropies of all tokens after the first, clean, then with each place
        spliced, then with each ablated, ``(1 + 2 n_places,)``, float64; and the number of tokens
        they are sums over.
    """

    def loss() -> Tensor:
        logits = model(input_ids, attention_mask=attention_mask, use_cache=False).logits
        targets = torch.where(attention_mask.bool(), input_ids, -100)[:, 1:]
        of_token = cross_entropy(
            logits[:, :-1].flatten(0, 1).float(), targets.flatten(), reduction="none"
        )
        return of_token.double().sum()

    def instead(new: Tensor) -> Callable[[Tensor], Tensor]:
        def put(activation: Tensor) -> Tensor:
            changed = activation.clone()
            changed[counted] = new.to(activation)
            return changed

        return put

    with captured(model, saes) as read:
        clean = loss()
    spliced: list[Tensor] = []
    ablated: list[Tensor] = []
    for i, (hook_point, sae) in enumerate(saes.items()):
        activations = read[hook_point][counted]
        features = sae.encode(activations)
        rebuilt = sae.decode(features)
        seen(i, activations, rebuilt, features)
        for losses, new in ((spliced, rebuilt), (ablated, torch.zeros_like(rebuilt))):
            with edited(model, {hook_point: instead(new)}):
                losses.append(loss())
    n_targets = int(attention_mask[:, 1:].sum())
    return torch.stack([clean, *spliced, *ablated]), n_targets


@torch.no_grad()
def read_activations(
    model: PreTrainedModel,
    hook_points: Sequence[HookPoint],
    rows: Sequence[Sequence[int]],
    out: Tensor,
    n_skipped: int,
    batches: Callable[[Sequence[int], str, Callable[[list[int]], None]], None],
) -> None:
    """Read the activations of many tokens.

    Args:
        model: A Hugging Face causal LM, in eval mode.
        hook_points: Where.
        rows: Token ids of each text.
        out: Filled in the order of texts and tokens, ``(n_places, n, width)``; tokens beyond n are
            left out.
        n_skipped: Tokens at the beginning of each text that are not read.
        batches: Cuts texts by their lengths into forwards, as `MicroBatches.run`.
    """
    lengths = torch.tensor([len(row) for row in rows])
    counts = lengths - n_skipped
    first = counts.cumsum(0) - counts
    n = out.shape[1]

    def read(batch: list[int]) -> None:
        longest = int(lengths[batch].max())
        ids = torch.tensor([[*rows[i], *[0] * (longest - len(rows[i]))] for i in batch])
        positions = torch.arange(longest)
        mask = positions < lengths[batch][:, None]
        slots = first[batch][:, None] + positions - n_skipped
        wanted = mask & (positions >= n_skipped) & (slots < n)
        ids, mask, wanted, slots = (t.to(out.device) for t in (ids, mask, wanted, slots))
        with captured(model, hook_points) as found:
            # Not the head, which would be most of the work of a small LM.
            model.base_model(input_ids=ids, attention_mask=mask.long(), use_cache=False)
        for i, hook_point in enumerate(hook_points):
            out[i, slots[wanted]] = found[hook_point][wanted].to(out)

    batches(lengths.tolist(), out.device.type, read)
