"""SAEs of the attention's concatenated heads, moved to the attention's output."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lincorr_lightning.sae.files import raise_unsupported
from lincorr_lightning.sae.hook_points import HookPoint
from lincorr_lightning.sae.hooks import captured, layer_of, module_at, run_probe
from lincorr_lightning.sae.sparse_autoencoder import SparseAutoencoder

# Relative error of the projection's output, at any precision, and in units of its rounding.
_TOLERANCE = 1e-4
_ROUNDINGS = 4.0
# Below this ratio the smallest singular value is rounding error.
_MIN_SINGULAR_RATIO = 10 * torch.finfo(torch.float32).eps


class OutputProjection(NamedTuple):
    """The map ``W z + b`` from the concatenated heads z to what the attention adds to the stream.

    Attributes:
        weight: W, ``(width, n_heads * head_size)``, float64.
        bias: b, ``(width,)``, float64; zeros if the LM has none.
    """

    weight: Tensor
    bias: Tensor


class _Call(NamedTuple):
    """A module with a matrix during one forward pass."""

    read: Tensor
    weight: Tensor
    bias: Tensor | None


@torch.no_grad()
def find_projection(model: nn.Module, hook_point: HookPoint, path: Path) -> OutputProjection:
    """Find the linear map from the heads of a layer's attention to its output.

    It works for any architecture: each matrix of the layer is tried on its own input.

    Raises:
        SparseAutoencoderError: The LM has no such hook point, or no linear map gives the output: in
            Gemma 2 and 3 a norm follows the projection.
    """
    calls: list[_Call] = []

    def record(module: nn.Module, args: Any, output: Any) -> None:
        del output
        weight: Any = module.weight
        bias: Any = getattr(module, "bias", None)
        if args and isinstance(args[0], Tensor):
            # Copied during the forward pass, when a sharded LM has gathered them.
            copied = None if bias is None else bias.detach().clone()
            calls.append(_Call(args[0], weight.detach().clone(), copied))

    layer = layer_of(model, hook_point)
    added = module_at(model, hook_point)
    with ExitStack() as stack:
        for module in layer.modules():
            weight = getattr(module, "weight", None)
            if isinstance(weight, Tensor) and weight.dim() == 2:
                stack.callback(module.register_forward_hook(record).remove)
        at = stack.enter_context(captured(model, [hook_point]))
        run_probe(model)
    # GPT-2 stores its matrices transposed.
    tried = (
        _projection(call, weight, at[hook_point])
        for call in calls
        for weight in (call.weight, call.weight.T)
    )
    found = next((projection for projection in tried if projection is not None), None)
    if found is None:
        raise_unsupported(
            path,
            "it reads the attention's concatenated heads, but what the attention adds to the "
            f"stream of {type(model).__name__}, {hook_point}, is no linear map of these: it is the "
            f"output of {type(added).__name__}, such as a norm of each token after the projection",
            "Take an SAE of what the attention adds (hook_attn_out), or leave the attention out.",
        )
    return found


def _projection(call: _Call, weight: Tensor, added: Tensor) -> OutputProjection | None:
    """Return the map of a matrix if it gives what is added to the stream."""
    if weight.shape != (added.shape[-1], call.read.shape[-1]):
        return None
    weight = weight.double().cpu()
    bias = weight.new_zeros(len(weight)) if call.bias is None else call.bias.double().cpu()
    expected = added.double().cpu().flatten(0, -2)
    error = call.read.double().cpu().flatten(0, -2) @ weight.T + bias - expected
    rounding = _ROUNDINGS * torch.finfo(added.dtype).eps
    if error.norm() > max(_TOLERANCE, rounding) * expected.norm():
        return None
    return OutputProjection(weight, bias)


@torch.no_grad()
def at_output(
    sae: SparseAutoencoder, projection: OutputProjection, path: Path
) -> SparseAutoencoder:
    """Move an SAE of the attention's concatenated heads z to the output ``y = W z + b``.

    With W of full column rank, ``z = W⁺ (y - b)``: the features are those of z, and the
    reconstruction is W and b applied to that of z. The map is exact up to rounding, which grows by
    up to W's condition number from y to z: an LM in float32 is better than one in bfloat16.

    Raises:
        SparseAutoencoderError: The LM's heads and the SAE differ in width, or W does not have full
            column rank, so that several z give the same output.
    """
    weight, bias = projection
    if weight.shape[1] != sae.width:
        raise_unsupported(
            path,
            f"it reads {sae.width} numbers of the attention's heads, but {sae.hook_point} of the "
            f"LM has {weight.shape[1]}",
            "Take an SAE of this LM.",
        )
    left, values, right = torch.linalg.svd(weight, full_matrices=False)
    if weight.shape[0] < sae.width or values[-1] <= _MIN_SINGULAR_RATIO * values[0]:
        raise_unsupported(
            path,
            f"it reads {sae.width} numbers of the attention's heads, which the attention's output "
            f"of width {len(weight)} does not determine",
            "Take an SAE of the output itself (hook_attn_out).",
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
