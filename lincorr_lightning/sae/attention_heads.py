"""SAEs of the attention's concatenated heads, moved to what the attention adds to the stream."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lincorr_lightning.sae.hook_points import HookPoint
from lincorr_lightning.sae.hooks import captured, layer_of, module_at, run_probe
from lincorr_lightning.sae.reading import raise_unsupported
from lincorr_lightning.sae.sparse_autoencoder import SparseAutoencoder

# Of what the projection gives, whatever the LM's precision; and in units of its rounding.
_TOLERANCE = 1e-4
_ROUNDINGS = 4.0
# A matrix whose smallest singular value is but the rounding of its numbers has no inverse.
_LEAST_SINGULAR_VALUE = 10 * torch.finfo(torch.float32).eps


class OutputProjection(NamedTuple):
    """What an attention adds to the stream, ``W z + b``, from its concatenated heads z.

    Attributes:
        weight: W, ``(width, n_heads * head_size)``, float64.
        bias: b, ``(width,)``, float64; zeros where the LM has none.
    """

    weight: Tensor
    bias: Tensor


class _Call(NamedTuple):
    """A module with a matrix, in one forward."""

    read: Tensor
    weight: Tensor
    bias: Tensor | None


@torch.no_grad()
def find_projection(model: nn.Module, hook_point: HookPoint, path: Path) -> OutputProjection:
    """Find the linear map that gives what a layer's attention adds to the residual stream.

    No architecture is named: each matrix of the layer is tried on what goes through it.

    Args:
        model: A Hugging Face causal LM.
        hook_point: An attention's output.
        path: Of the SAE that asks for it, for messages.

    Raises:
        SparseAutoencoderError: The LM has no such place, or no linear map gives what stands there:
            in Gemma 2 and 3 a norm follows the projection.
    """
    calls: list[_Call] = []

    def record(module: nn.Module, args: Any, output: Any) -> None:
        del output
        weight: Any = module.weight
        bias: Any = getattr(module, "bias", None)
        if args and isinstance(args[0], Tensor):
            # Copied within the forward, when a sharded LM has them whole.
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
    # GPT-2 has its matrices the other way round.
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
            f"stream of {type(model).__name__}, {hook_point}, is no linear map of these: it comes out "
            f"of {type(added).__name__}, as where a norm of every token by itself follows the "
            "projection",
            "Take an SAE of what the attention adds (hook_attn_out), or leave the attention out.",
        )
    return found


def _projection(call: _Call, weight: Tensor, added: Tensor) -> OutputProjection | None:
    """The map that a matrix makes, if it gives what is added to the stream."""
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
    """Move an SAE of the attention's concatenated heads z to what the attention adds, ``W z + b``.

    With W of full column rank ``z = W⁺ (y - b)``: its features are those of z, and its
    reconstruction is what W and b make of that of z. Nothing is lost but rounding: that of y grows
    up to W's condition number in z, for which an LM in float32 is better than one in bfloat16.

    Args:
        sae: Reads and writes z.
        projection: W and b.
        path: Of the SAE, for messages.

    Raises:
        SparseAutoencoderError: The LM's heads are of another width than the SAE, or W is not of
            full column rank, so that several z give one output.
    """
    weight, bias = projection
    if weight.shape[1] != sae.width:
        raise_unsupported(
            path,
            f"it reads {sae.width} numbers of the attention's heads, but those of {sae.hook_point} in "
            f"the LM are {weight.shape[1]}",
            "Take an SAE of this very LM.",
        )
    left, values, right = torch.linalg.svd(weight, full_matrices=False)
    if weight.shape[0] < sae.width or values[-1] <= _LEAST_SINGULAR_VALUE * values[0]:
        raise_unsupported(
            path,
            f"it reads {sae.width} numbers of the attention's heads, which cannot be told from the "
            f"attention's output of width {len(weight)}",
            "Take an SAE of the output itself (hook_attn_out).",
        )
    encoder = sae.encoder.double() @ ((right.T / values) @ left.T)
    encoder_bias = sae.encoder_bias.double()
    decoder_bias = weight @ sae.decoder_bias.double() + sae.input_scale * bias
    if not sae.subtract_decoder_bias:  # else b is in the decoder's bias, which goes off before
        encoder_bias = encoder_bias - sae.input_scale * (encoder @ bias)
    return SparseAutoencoder(
        hook_point=sae.hook_point,
        encoder=encoder.float(),
        decoder=(sae.decoder.double() @ weight.T).float(),
        encoder_bias=encoder_bias.float(),
        decoder_bias=decoder_bias.float(),
        activation=sae.activation,
        threshold=sae.threshold,
        k=sae.k,
        score_scale=sae.score_scale,
        input_scale=sae.input_scale,
        subtract_decoder_bias=sae.subtract_decoder_bias,
        lm=sae.lm,
    )
