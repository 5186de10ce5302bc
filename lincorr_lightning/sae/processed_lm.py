"""SAEs of an LM whose weights TransformerLens processed, changed to read the original LM.

SAELens keeps in ``model_from_pretrained_kwargs`` which processing steps were chosen. Folded norms
and a centered head leave all hook points as they are. `uncentered` undoes centered writing weights;
SAEs of processed heads are refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lincorr_lightning.lm.language_model import LanguageModel
from lincorr_lightning.sae.files import raise_unsupported
from lincorr_lightning.sae.sparse_autoencoder import SparseAutoencoder

# They shift or rotate the heads; what the heads add to the stream stays as it is.
_HEAD_STEPS = ("fold_value_biases", "refactor_factored_attn_matrices")


def processing_steps(config: Mapping[str, Any]) -> set[str]:
    """Return the processing steps that an SAE's ``cfg.json`` names."""
    chosen = config.get("model_from_pretrained_kwargs") or {}
    return {name for name, value in chosen.items() if value is True}


def check_heads(steps: set[str], path: Path) -> None:
    """Refuse an SAE of heads that differ from those of the original LM.

    Raises:
        SparseAutoencoderError: A step changed the heads.
    """
    found = [name for name in _HEAD_STEPS if name in steps]
    if found:
        raise_unsupported(
            path,
            f"it reads the attention's heads of an LM that was changed ({' and '.join(found)} in "
            "model_from_pretrained_kwargs)",
            "Take one of what the attention adds (hook_attn_out), or one trained on the LM itself.",
        )


@torch.no_grad()
def uncentered(sae: SparseAutoencoder, lm: LanguageModel | None, path: Path) -> SparseAutoencoder:
    """Change an SAE of a centered LM so that it reads the activations of the original LM.

    Where the weights that write to the stream are centered (``center_writing_weights``),
    everything written lacks its mean over the width. A LayerNorm subtracts that mean anyway, so
    the logits are the same; an LM without LayerNorm is never centered. Subtracting the mean is
    linear and is merged into the encoder.

    Args:
        sae: SAE of the residual stream or of what is added to it; changed in place.
        lm: The LM; its weights are loaded if they are not yet.
        path: File of the SAE, for messages.

    Raises:
        SparseAutoencoderError: There is no LM, so that it is unknown whether it has a LayerNorm.
    """
    if lm is None:
        raise_unsupported(
            path,
            "it was trained on an LM whose writing weights were centered, if a LayerNorm reads "
            "them (center_writing_weights in model_from_pretrained_kwargs)",
            "Pass lm to load_sae, which shows whether the LM has one.",
        )
    if not any(isinstance(module, nn.LayerNorm) for module in lm.load().model.modules()):
        return sae
    mean = sae.encoder.double().mean(1, keepdim=True)
    if sae.subtract_decoder_bias:  # the bias is subtracted without its mean
        sae.encoder_bias.sub_(mean[:, 0] * sae.decoder_bias.double().sum())
    sae.encoder.sub_(mean)
    return sae
