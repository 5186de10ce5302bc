"""Read and replace the activations of any Hugging Face causal LM at its hook points.

The hook point of an attention or an MLP is what it adds to the residual stream: in Gemma 2, where
a norm lies between the module and the stream, the norm's output. In any architecture those two
modules of a layer are taken that add up on a probe (stream after the layer = stream before it +
both outputs); the one with attention in its name is that.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from itertools import combinations
from typing import Any

import torch
from torch import Tensor, nn

from lincorr_lightning.errors import SparseAutoencoderError
from lincorr_lightning.lm.finder import layers_of, number_in_config
from lincorr_lightning.lm.modes import lock_of, reading
from lincorr_lightning.sae.hook_points import KINDS, HookKind, HookPoint

_N_PROBE_TOKENS = 4
_TOLERANCE = 0.02  # relative to what a layer adds
_ROUNDINGS = 4.0  # tolerance in units of the stream's rounding
# Attribute of a model: names of the modules of MLP and attention output in each layer.
_OUTPUTS = "_sae_outputs"


def width_of(model: nn.Module) -> int:
    """Return the width of a Hugging Face LM's residual stream."""
    return number_in_config(model, "hidden_size")


def find_hook_points(
    model: nn.Module, kinds: Sequence[HookKind] = KINDS, layers: Iterable[int] | None = None
) -> list[HookPoint]:
    """Return the hook points of an LM, sorted by layer; None takes all `layers`, from 0."""
    numbers = range(len(layers_of(model))) if layers is None else layers
    hook_points = sorted({HookPoint(layer, kind) for layer in numbers for kind in kinds})
    for hook_point in hook_points:
        module_at(model, hook_point)
    return hook_points


@contextmanager
def captured(
    model: nn.Module, hook_points: Iterable[HookPoint]
) -> Iterator[dict[HookPoint, Tensor]]:
    """Capture the activations of a Hugging Face causal LM at hook points.

    Those of the last forward pass inside the context, ``(batch, sequence, width)`` each, in the
    LM's precision, without gradient; inside `edited`, the replaced ones.
    """
    activations: dict[HookPoint, Tensor] = {}

    def read(hook_point: HookPoint, activation: Tensor) -> None:
        # Cloned, because Falcon adds to its MLP's output in place.
        activations[hook_point] = activation.detach().clone()

    with edited(model, {hook_point: partial(read, hook_point) for hook_point in hook_points}):
        yield activations


@contextmanager
def edited(
    model: nn.Module, interventions: Mapping[HookPoint, Callable[[Tensor], Tensor | None]]
) -> Iterator[None]:
    """Replace the activations of a Hugging Face causal LM at hook points while it runs.

    `interventions` has a function per hook point from the activations there, ``(batch, sequence,
    width)``, to their replacement, or to None, which only reads them. In each forward pass inside
    the context each sees the effect of those in earlier layers. Gradients pass through them. Other
    threads wait until its end with all but their own calls of the model.
    """
    shape = [-1, -1, width_of(model)]

    def count_rows(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Note the number of rows: OPT passes all tokens to its MLP in one row."""
        shape[0] = len(_stream_into(args, kwargs))

    def replace(hook_point: HookPoint, module: nn.Module, args: Any, output: Any) -> Any:
        tensor = _tensor_in(output)
        activations = tensor if tensor.dim() == 3 else tensor.view(shape)
        new = interventions[hook_point](activations)
        if new is None:
            return None
        if new.shape != activations.shape:
            raise SparseAutoencoderError(
                f"the intervention at {hook_point} turned activations of shape "
                f"{tuple(activations.shape)} into {tuple(new.shape)}. Return the same shape."
            )
        new = new.to(tensor).view(tensor.shape)
        return new if isinstance(output, Tensor) else (new, *output[1:])

    with lock_of(model), ExitStack() as stack:
        for at in interventions:
            layer = layer_of(model, at)
            stack.enter_context(layer.register_forward_pre_hook(count_rows, with_kwargs=True))
            hook = partial(replace, at)
            stack.enter_context(module_at(model, at).register_forward_hook(hook))
        yield


class _StoppedError(Exception):
    """Ends a forward pass."""


@contextmanager
def stopping_after(model: nn.Module, hook_points: Iterable[HookPoint]) -> Iterator[None]:
    """End a forward pass inside the context after the layer of the last of some hook points.

    The statement that calls the LM does not return, and the program goes on after the context.
    """

    def stop(module: nn.Module, args: Any, output: Any) -> None:
        raise _StoppedError

    layer = layer_of(model, max(hook_points))
    with layer.register_forward_hook(stop), suppress(_StoppedError):
        yield


def stop_before(
    model: nn.Module, layer: int, run: Callable[[], object]
) -> Callable[[Callable[[Tensor], Tensor] | None], Tensor]:
    """Run an LM up to a layer, and return a function that runs this layer as often as wanted.

    `run` calls the LM. The function takes an intervention in the residual stream before the layer,
    or None, and returns the stream after it, as `edited` around its call changes it.
    """
    module = layers_of(model)[layer]
    calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

    def stop(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        calls.append((args, kwargs))
        raise _StoppedError

    with module.register_forward_pre_hook(stop, with_kwargs=True), suppress(_StoppedError):
        run()
    ((args, kwargs),) = calls

    def call(change: Callable[[Tensor], Tensor] | None) -> Tensor:
        # Cloned, because a layer may add to its input in place.
        stream = _stream_into(args, kwargs).clone()
        stream = stream if change is None else change(stream)
        if args:
            return _tensor_in(module(stream, *args[1:], **kwargs))
        return _tensor_in(module(**{**kwargs, "hidden_states": stream}))

    return call


def _tensor_in(output: Any) -> Tensor:
    return output if isinstance(output, Tensor) else output[0]


def _stream_into(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor:
    return args[0] if args else kwargs["hidden_states"]


def layer_of(model: nn.Module, hook_point: HookPoint) -> nn.Module:
    """Return the layer of a hook point."""
    layers = layers_of(model)
    if hook_point.layer >= len(layers):
        raise SparseAutoencoderError(
            f"{type(model).__name__} has no {hook_point}: its {len(layers)} layers are counted "
            f"from 0 to {len(layers) - 1}."
        )
    return layers[hook_point.layer]


def module_at(model: nn.Module, hook_point: HookPoint) -> nn.Module:
    """Return the module whose output is the activation at a hook point."""
    layer = layer_of(model, hook_point)
    if hook_point.kind == "residual":
        return layer
    with lock_of(model):
        if not hasattr(model, _OUTPUTS):
            setattr(model, _OUTPUTS, _find_outputs(model))
    name = getattr(model, _OUTPUTS)[hook_point.layer].get(hook_point.kind)
    if name is None:
        inside = ", ".join(name for name, _ in layer.named_children())
        raise SparseAutoencoderError(
            f"the {hook_point} of {type(model).__name__} is not found: no attention and MLP among "
            f"the modules of its {type(layer).__name__} ({inside}) add up to what the layer adds "
            "to the residual stream. Take only the residual kind for this LM."
        )
    return layer.get_submodule(name)


@torch.no_grad()
def _run_probe(model: nn.Module, modules: Iterable[nn.Module]) -> list[tuple[nn.Module, Tensor]]:
    """Run an LM over a few tokens, and return what some modules give, in the order of the calls."""
    calls: list[tuple[nn.Module, Tensor]] = []

    def record(module: nn.Module, args: Any, output: Any) -> None:
        tensor = _tensor_in(output)
        if isinstance(tensor, Tensor):
            calls.append((module, tensor.clone()))

    embedding: Any = model.get_input_embeddings()  # type: ignore[operator]
    ids = torch.arange(_N_PROBE_TOKENS, device=embedding.weight.device)[None]
    with ExitStack() as stack:
        for module in modules:
            stack.enter_context(module.register_forward_hook(record))
        with reading(model, ids.device.type):
            model(input_ids=ids, use_cache=False)
    return calls


def modules_giving(model: nn.Module, hook_point: HookPoint) -> dict[str, nn.Module]:
    """Return the modules that give the activations of a hook point, by their path in the layer."""
    names = {module: name for name, module in layer_of(model, hook_point).named_modules()}
    with captured(model, [hook_point]) as activations:
        calls = _run_probe(model, names)
    added = activations[hook_point].flatten()
    return {names[module]: module for module, x in calls if torch.equal(x.flatten(), added)}


def _find_outputs(model: nn.Module) -> list[dict[HookKind, str]]:
    layers = layers_of(model)
    before: dict[nn.Module, Tensor] = {}

    def enter(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        before[layer] = _stream_into(args, kwargs).clone()

    with ExitStack() as stack:
        for layer in layers:
            stack.enter_context(layer.register_forward_pre_hook(enter, with_kwargs=True))
        calls = _run_probe(model, [part for layer in layers for part in (layer, *layer.children())])
    # A layer may never be called.
    return [_outputs_of(each, before[each], calls) if each in before else {} for each in layers]


def _outputs_of(
    layer: nn.Module, before: Tensor, calls: Sequence[tuple[nn.Module, Tensor]]
) -> dict[HookKind, str]:
    """Return the two modules whose outputs the layer adds, or none if no two add up."""
    output = next(x for module, x in calls if module is layer)
    rounding = torch.finfo(output.dtype).eps * _ROUNDINGS
    after = output.float()
    children = {child: name for name, child in layer.named_children()}
    names = [children[module] for module, _ in calls if module in children]
    titles = {name: f"{name} {type(layer.get_submodule(name)).__name__}" for name in names}
    attentions = {name for name in names if re.search("attn|attention", titles[name].lower())}
    if not attentions:
        return {}
    outputs = [
        (children[module], x.float().view_as(after))
        for module, x in calls
        # Phi has one dropout for attention and MLP, which is the output of neither.
        if names.count(children.get(module, "")) == 1 and x.numel() == after.numel()
    ]
    least_error = float("inf")
    kinds: dict[HookKind, str] = {}
    for (first, x), (second, y) in combinations(outputs, 2):
        error = float((before.float() + x + y - after).norm())
        tolerance = _TOLERANCE * float(x.norm() + y.norm()) + rounding * float(after.norm())
        # Take the last of equals: dropout, for example, is the identity in eval mode only.
        if error <= min(least_error, tolerance):
            least_error = error
            # If neither has the name, as norms after both, the attention comes first.
            is_swapped = second in attentions and first not in attentions
            mlp, attention = (first, second) if is_swapped else (second, first)
            kinds = {"attention_out": attention, "mlp_out": mlp}
    return kinds


@torch.no_grad()
def find_projection(model: nn.Module, hook_point: HookPoint) -> tuple[Tensor, Tensor] | None:
    """Find W and b of the map ``y = W z + b`` from the heads of a layer's attention to its output.

    W is ``(width, n_heads * head_size)``, b is ``(width,)``, both float64; None if no linear module
    gives the output, as where a norm follows it, an adapter is added or the weights are quantized.
    """
    from transformers.pytorch_utils import Conv1D

    for module in modules_giving(model, hook_point).values():
        if isinstance(module, (nn.Linear, Conv1D)) and module.weight.is_floating_point():
            weight = module.weight.T if isinstance(module, Conv1D) else module.weight
            bias = weight.new_zeros(len(weight)) if module.bias is None else module.bias
            return weight.double().cpu(), bias.double().cpu()
    return None
