"""Convert SAEs that read something else than a hook point of the LM.

These are SAEs of the attention's concatenated heads, and SAEs of an LM whose weights
TransformerLens processed: SAELens keeps in ``model_from_pretrained_kwargs`` which steps were
chosen. Folded norms and a centered head leave all hook points as they are.
"""

from __future__ import annotations

from collections.abc import Collection
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from lincorr_lightning.errors import SparseAutoencoderError
from lincorr_lightning.lm.language_model import LanguageModel
from lincorr_lightning.sae.hook_points import HookPoint
from lincorr_lightning.sae.hooks import captured, layer_of, run_probe
from lincorr_lightning.sae.sparse_autoencoder import SparseAutoencoder

# Relative error of the projection's output, at any precision, and in units of its rounding.
_TOLERANCE = 1e-4
_ROUNDINGS = 4.0
# Below this ratio the smallest singular value is rounding error.
_MIN_SINGULAR_RATIO = 10 * torch.finfo(torch.float32).eps
# They shift or rotate the heads; what the heads add to the stream stays as it is.
_HEAD_STEPS = ("fold_value_biases", "refactor_factored_attn_matrices")
_TAKE_OUTPUT = "Take an SAE of what the attention adds (hook_attn_out)."


def raise_unsupported(path: Path, reason: str, way_out: str) -> NoReturn:
    """Raise the error of an SAE that is undamaged but cannot be used."""
    raise SparseAutoencoderError(f"cannot use the SAE of {path}: {reason}. {way_out}")


@torch.no_grad()
def uncentered(
    sae: SparseAutoencoder, lm: LanguageModel | None, path: Path, steps: Collection[str]
) -> SparseAutoencoder:
    """Change an SAE of a centered LM, in place, to read the activations of the original LM.

    Where the weights that write to the stream are centered (``center_writing_weights``),
    everything written lacks its mean over the width. A LayerNorm subtracts that mean anyway, so
    the logits are the same; an LM without LayerNorm is never centered. Subtracting the mean is
    linear and is merged into the encoder.
    """
    if "center_writing_weights" not in steps:
        return sae
    if lm is None:
        raise_unsupported(
            path,
            "it was trained on an LM whose writing weights were centered, if a LayerNorm reads "
            "them (center_writing_weights in model_from_pretrained_kwargs)",
            "Pass lm to load_sae, which shows whether the LM has one.",
        )
    if any(isinstance(module, nn.LayerNorm) for module in lm.load().model.modules()):
        mean = sae.encoder.double().mean(1, keepdim=True)
        if sae.subtract_decoder_bias:  # the bias is subtracted without its mean
            sae.encoder_bias.sub_(mean[:, 0] * sae.decoder_bias.double().sum())
        sae.encoder.sub_(mean)
    return sae


def from_heads(
    sae: SparseAutoencoder, lm: LanguageModel | None, path: Path, steps: Collection[str] = ()
) -> SparseAutoencoder:
    """Move an SAE of the attention's concatenated heads to the attention's output."""
    changes = [name for name in _HEAD_STEPS if name in steps]
    if changes:
        raise_unsupported(
            path,
            f"it reads the attention's heads of an LM that was changed ({' and '.join(changes)} in "
            "model_from_pretrained_kwargs)",
            _TAKE_OUTPUT,
        )
    if lm is None:
        raise_unsupported(
            path,
            "it reads the attention's concatenated heads, before their output projection",
            "Pass lm to load_sae; its output projection is then merged into the SAE.",
        )
    return at_output(sae, *find_projection(lm.load().model, sae.hook_point, path), path)


@torch.no_grad()
def find_projection(model: nn.Module, hook_point: HookPoint, path: Path) -> tuple[Tensor, Tensor]:
    """Find the map ``y = W z + b`` from the heads z of a layer's attention to its output y.

    It works for any architecture: each matrix of the layer is tried on its own input.

    Returns:
        W, ``(width, n_heads * head_size)``, and b, ``(width,)``; float64.
    """
    calls: list[tuple[Tensor, Tensor, Tensor]] = []

    def record(module: Any, args: Any, output: Any) -> None:
        del output
        if args and isinstance(args[0], Tensor):
            bias = getattr(module, "bias", None)
            bias = module.weight.new_zeros(()) if bias is None else bias
            # Copied during the forward pass, when a sharded LM has gathered them.
            calls.append((args[0], module.weight.detach().clone(), bias.detach().clone()))

    with ExitStack() as stack:
        for module in layer_of(model, hook_point).modules():
            weight = getattr(module, "weight", None)
            if isinstance(weight, Tensor) and weight.dim() == 2:
                stack.enter_context(module.register_forward_hook(record))
        at = stack.enter_context(captured(model, [hook_point]))
        run_probe(model)
    added = at[hook_point]
    output = added.double().cpu().flatten(0, -2)
    tolerance = max(_TOLERANCE, _ROUNDINGS * torch.finfo(added.dtype).eps)
    for read, weight, bias in calls:
        for matrix in (weight, weight.T):  # GPT-2 stores its matrices transposed
            if matrix.shape != (output.shape[1], read.shape[-1]):
                continue
            w, b = matrix.double().cpu(), bias.double().cpu().expand(len(matrix))
            error = read.double().cpu().flatten(0, -2) @ w.T + b - output
            if error.norm() <= tolerance * output.norm():
                return w, b
    raise_unsupported(
        path,
        "it reads the attention's concatenated heads, but what the attention adds to the stream of "
        f"{type(model).__name__}, {hook_point}, is no linear map of these: there is something in "
        "between, such as a norm of each token after the projection",
        _TAKE_OUTPUT,
    )


@torch.no_grad()
def at_output(
    sae: SparseAutoencoder, weight: Tensor, bias: Tensor, path: Path
) -> SparseAutoencoder:
    """Move an SAE of the attention's concatenated heads z to the output ``y = W z + b``.

    With W of full column rank, ``z = W⁺ (y - b)``: the features are those of z, and the
    reconstruction is W and b applied to that of z. The map is exact up to rounding, which grows by
    up to W's condition number from y to z: an LM in float32 is better than one in bfloat16.
    """
    width, n_read = weight.shape
    left, values, right = torch.linalg.svd(weight, full_matrices=False)
    if n_read != sae.width or width < n_read or values[-1] <= _MIN_SINGULAR_RATIO * values[0]:
        raise_unsupported(
            path,
            f"it reads {sae.width} numbers of the attention's heads, which the LM's attention, "
            f"{width} wide from {n_read} numbers, does not determine",
            _TAKE_OUTPUT,
        )
    encoder = sae.encoder.double() @ ((right.T / values) @ left.T)
    encoder_bias = sae.encoder_bias.double()
    decoder_bias = weight @ sae.decoder_bias.double() + sae.input_scale * bias
    if not sae.subtract_decoder_bias:  # otherwise the decoder bias, with b, is subtracted already
        encoder_bias = encoder_bias - sae.input_scale * (encoder @ bias)
    return sae.replaced(
        encoder=encoder.float(),
        decoder=(sae.decoder.double() @ weight.T).float(),
        encoder_bias=encoder_bias.float(),
        decoder_bias=decoder_bias.float(),
    )
