"""Hidden states of all layers of a causal LM of any architecture."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from lincorr_lightning.errors import LanguageModelError, NonFiniteError
from lincorr_lightning.lm.head import call_model
from lincorr_lightning.lm.language_model import LanguageModel
from lincorr_lightning.lm.modes import evaluating


class LayerStates(NamedTuple):
    """Hidden states and logits of some prompts of one length.

    Attributes:
        hidden: ``(n_prompts, n_layers, n_tokens, d)``, in the LM's dtype, on its device. Those of
            the last layer are the input of the head, after the final norm if there is one.
        logits: ``(n_prompts, n_tokens, n_vocabulary)``, likewise; None without logits.
    """

    hidden: Tensor
    logits: Tensor | None


@torch.no_grad()
def read_layers(
    lm: LanguageModel,
    tokens: Tensor,
    prompts: Sequence[str],
    embedding_layer: bool = False,
    logits: bool = True,
) -> LayerStates:
    """Return the hidden states of all tokens in all layers, from one forward pass.

    The LM runs in eval mode and in its own precision; modes and autocast are restored. The
    tokenizer's special tokens at the beginning of a text, such as BOS, are added here and left out
    of the result.

    Args:
        lm: The LM.
        tokens: Token ids, all of one length, ``(n_prompts, n_tokens)``.
        prompts: Names of the prompts, for messages.
        embedding_layer: Whether the token embedding comes first, as layer 0; the other layers are
            counted from 1.
        logits: Whether to return logits.

    Raises:
        NonFiniteError: A layer, which is named, has NaN or infinite hidden states.
        LanguageModelError: The LM does not return its layers' hidden states.
    """
    device = lm.model.device
    prefix = torch.tensor(lm.prefix, dtype=torch.long, device=device)
    rows = torch.cat([prefix.expand(len(tokens), -1), tokens.to(device)], dim=1)
    options = {"output_hidden_states": True} | ({} if logits else {"logits_to_keep": 1})
    with evaluating(lm.model), torch.autocast(device.type, enabled=False):
        output = call_model(lm.model, rows, options, attention_mask=torch.ones_like(rows))
    states = getattr(output, "hidden_states", None)
    if not states or any(layer.shape[:2] != rows.shape for layer in states):
        raise LanguageModelError(
            f"{type(lm.model).__name__} does not return the hidden state of each token after "
            "each layer (`output_hidden_states`), so they cannot be observed."
        )
    first = 0 if embedding_layer else 1
    # The layers of a large LM may be on several devices.
    hidden = torch.stack([layer[:, len(prefix) :].to(device) for layer in states[first:]], dim=1)
    _check_finite(hidden, lm, prompts, first)
    return LayerStates(hidden, output.logits[:, len(prefix) :].to(device) if logits else None)


@torch.no_grad()
def read_last_states(lm: LanguageModel, prompts: Sequence[str]) -> Tensor:
    """Return the hidden state of each prompt's last token after each layer.

    Returns:
        ``(n_prompts, n_layers, d)``, in the LM's dtype, on its device.
    """
    rows = lm.rows(prompts)
    found: dict[int, Tensor] = {}
    n_prefix = len(lm.prefix)

    def read(batch: list[int]) -> None:
        tokens = torch.tensor([rows[i][n_prefix:] for i in batch])
        names = [repr(prompts[i]) for i in batch]
        states = read_layers(lm, tokens, names, logits=False)
        found.update(zip(batch, states.hidden[:, :, -1].clone(), strict=True))

    # Batches of one length need no padding, whatever the architecture.
    lm.in_batches([len(row) for row in rows], read, equal_lengths=True)
    return torch.stack([found[i] for i in range(len(prompts))])


def _check_finite(hidden: Tensor, lm: LanguageModel, prompts: Sequence[str], first: int) -> None:
    finite = hidden.isfinite().all(-1).all(-1)
    for prompt, layer in (~finite).nonzero()[:1].tolist():
        name = f"layer {layer + first}" if layer + first else "the embedding layer"
        raise NonFiniteError(
            f"the hidden states of {name} of the LM {lm.config.name_or_path} are NaN or infinite "
            f"for prompt {prompts[prompt]} in {lm.model.dtype}. If they come from float16, set "
            "lm.dtype to bfloat16 or float32; otherwise its weights are broken."
        )
