"""Read activations for training, and score SAEs by the LM's loss with their reconstructions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from lincorr_lightning.data.texts import TokenRows
from lincorr_lightning.lm.batching import MicroBatches
from lincorr_lightning.sae.hook_points import HookPoint
from lincorr_lightning.sae.hooks import captured, edited, width_of
from lincorr_lightning.sae.sparse_autoencoder import SparseAutoencoder

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Update = Callable[[int, Tensor, Tensor, Tensor], None]


@torch.no_grad()
def read_activations(
    model: PreTrainedModel,
    hook_points: Sequence[HookPoint],
    texts: TokenRows,
    batches: MicroBatches,
    device: torch.device,
) -> Tensor:
    """Return the activations of all counted tokens.

    Args:
        model: A Hugging Face causal LM, in eval mode.
        hook_points: Hook points to read.
        texts: The texts.
        batches: Cuts the texts into forward passes that fit the memory.
        device: Device of the LM.

    Returns:
        Activations, ``(n_hook_points, n_counted, width)``, in the order of `texts`, in the LM's
        precision.
    """
    mask = texts.attention_mask.bool()
    lengths = mask.sum(1).tolist()
    slots = texts.counted.flatten().cumsum(0).view_as(texts.counted) - 1
    n = int(texts.counted.sum())
    out = torch.empty(len(hook_points), n, width_of(model), dtype=model.dtype, device=device)

    def read(batch: list[int]) -> None:
        longest = max(lengths[i] for i in batch)
        ids, attention, counted, slot = (
            tensor[batch, :longest].to(device)
            for tensor in (texts.input_ids, mask, texts.counted, slots)
        )
        with captured(model, hook_points) as found:
            # Without the head, which would be most of the work of a small LM.
            model.base_model(input_ids=ids, attention_mask=attention.long(), use_cache=False)
        for i, hook_point in enumerate(hook_points):
            out[i, slot[counted]] = found[hook_point][counted].to(out)

    batches.run(lengths, device.type, read)
    return out


@torch.no_grad()
def score_texts(
    model: PreTrainedModel,
    saes: Mapping[HookPoint, SparseAutoencoder],
    texts: TokenRows,
    update: Update,
) -> tuple[Tensor, int]:
    """Run one batch of texts unchanged, and twice for each SAE.

    Args:
        model: A Hugging Face causal LM, in eval mode.
        saes: SAE of each hook point.
        texts: The texts; activations are read and replaced at their counted tokens.
        update: Function called for each SAE with its number, the activations, their reconstruction,
            ``(n, width)`` each, and the features, ``(n, n_features)``.

    Returns:
        The summed cross-entropies of all tokens after the first: unchanged, then with each hook
        point's activations reconstructed, then with each set to zero, ``(1 + 2 n_hook_points,)``,
        float64; and the number of tokens in each sum.
    """
    ids, mask, counted = texts.input_ids, texts.attention_mask, texts.counted

    def loss() -> Tensor:
        logits = model(input_ids=ids, attention_mask=mask, use_cache=False).logits
        targets = torch.where(mask.bool(), ids, -100)[:, 1:]
        losses = cross_entropy(
            logits[:, :-1].flatten(0, 1).float(), targets.flatten(), reduction="none"
        )
        return losses.double().sum()

    def replace_by(new: Tensor) -> Callable[[Tensor], Tensor]:
        def replace(activation: Tensor) -> Tensor:
            changed = activation.clone()
            changed[counted] = new.to(activation)
            return changed

        return replace

    with captured(model, saes) as read:
        clean = loss()
    spliced: list[Tensor] = []
    ablated: list[Tensor] = []
    for i, (hook_point, sae) in enumerate(saes.items()):
        activations = read[hook_point][counted]
        features = sae.encode(activations)
        rebuilt = sae.decode(features)
        update(i, activations, rebuilt, features)
        for losses, new in ((spliced, rebuilt), (ablated, torch.zeros_like(rebuilt))):
            with edited(model, {hook_point: replace_by(new)}):
                losses.append(loss())
    return torch.stack([clean, *spliced, *ablated]), int(mask[:, 1:].sum())
