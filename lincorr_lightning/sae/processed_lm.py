"""SAEs of an LM whose weights TransformerLens changed as it read them, made to read the LM's own.

SAELens keeps in ``model_from_pretrained_kwargs`` which changes were asked for. Folded norms and a
centred head leave all places as they are. `centred` undoes centred writing weights; SAEs of heads
that were changed are refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lincorr_lightning.lm.language_model import LanguageModel
from lincorr_lightning.sae.reading import raise_unsupported
from lincorr_lightning.sae.sparse_autoencoder import SparseAutoencoder

# They move, or turn, the heads; what the heads add to the stream stays as it is.
_OF_HEADS = ("fold_value_biases", "refactor_factored_attn_matrices")


def changes_of(config: Mapping[str, Any]) -> set[str]:
    """Which changes an SAE's ``cfg.json`` tells of."""
    asked = config.get("model_from_pretrained_kwargs") or {}
    return {name for name, value in asked.items() if value is True}


def check_heads(changes: set[str], path: Path) -> None:
    """Refuse an SAE of heads that are not those of the LM.

    Args:
        changes: What was changed.
        path: Of the SAE, for messages.

    Raises:
        SparseAutoencoderError: The heads were changed.
    """
    found = [name for name in _OF_HEADS if name in changes]
    if found:
        raise_unsupported(
            path,
            f"it reads the attention's heads of an LM that was changed ({' and '.join(found)} in "
            "model_from_pretrained_kwargs)",
            "Take one of what the attention adds (hook_attn_out), or one trained on the LM itself.",
        )


@torch.no_grad()
def centred(sae: SparseAutoencoder, lm: LanguageModel | None, path: Path) -> SparseAutoencoder:
    """Let an SAE that knows activations of zero mean over their width read those of the LM.

    Where weights that write to the stream are centred (``center_writing_weights``), all that is
    written lacks its mean over the width. A LayerNorm takes that off anyway, so that the LM's
    logits are the same; an LM without one is never centred. Subtracting the mean is linear, and is
    taken into the encoder.

    Args:
        sae: Reads and writes the stream, or what is added to it; it is changed.
        lm: The LM; its weights are loaded if they are not yet.
        path: Of the SAE, for messages.

    Raises:
        SparseAutoencoderError: There is no LM, which has to tell whether it has a LayerNorm.
    """
    if lm is None:
        raise_unsupported(
            path,
            "it was trained on an LM whose writing weights were centred, if a LayerNorm reads them "
            "(center_writing_weights in model_from_pretrained_kwargs)",
            "Pass the LM to load_sae as lm, which tells whether it has one.",
        )
    if not any(isinstance(module, nn.LayerNorm) for module in lm.load().model.modules()):
        return sae
    mean = sae.encoder.double().mean(1, keepdim=True)
    if sae.subtract_decoder_bias:  # which is to go off as it is
        sae.encoder_bias.sub_(mean[:, 0] * sae.decoder_bias.double().sum())
    sae.encoder.sub_(mean)
    return sae
