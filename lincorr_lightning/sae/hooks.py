"""Reading and changing the activations of any Hugging Face causal LM at the places of SAEs.

What an attention or an MLP adds to the residual stream is what counts at its place: in Gemma 2,
where a norm stands between the module and the stream, that is the norm's output. No architecture is
named here. Modules are found by what they are called, followed to the last module that passes their
output on, and tried on a probe: stream after the layer = stream before it + both.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NoReturn
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from lincorr_lightning.errors import SparseAutoencoderError
from lincorr_lightning.lm.modes import evaluating
from lincorr_lightning.sae.hook_points import KINDS, HookKind, HookPoint

_ATTENTION = ("attn", "attention")
_MLP = ("mlp", "ffn", "feed_forward", "feedforward", "moe")
_N_PROBE_TOKENS = 4
# Of what a layer adds; and of the stream, in units of its precision's rounding.
_TOLERANCE = 0.02
_ROUNDINGS = 4.0


def width_of(model: nn.Module) -> int:
    """Width of an LM's residual stream.

    Args:
        model: A Hugging Face causal LM.

    Raises:
        SparseAutoencoderError: Its configuration does not say.
    """
    return _from_config(model, "hidden_size")


def find_hook_points(
    model: nn.Module, kinds: Sequence[HookKind] = KINDS, layers: Iterable[int] | None = None
) -> list[HookPoint]:
    """Places of an LM, by layer.

    Args:
        model: A Hugging Face causal LM.
        kinds: Of which kinds.
        layers: Of which layers, counted from 0; None takes all.

    Raises:
        SparseAutoencoderError: The LM has no such place, or none that can be hooked.
    """
    numbers = range(len(layers_of(model))) if layers is None else layers
    hook_points = sorted({HookPoint(layer, kind) for layer in numbers for kind in kinds})
    for hook_point in hook_points:
        module_at(model, hook_point)
    return hook_points


@contextmanager
def captured(
    model: nn.Module, hook_points: Iterable[HookPoint]
) -> Iterator[dict[HookPoint, Tensor]]:
    """Read an LM's activations at some places.

    Args:
        model: A Hugging Face causal LM. Its mode, its weights and its gradients stay as they are.
        hook_points: Where to read.

    Yields:
        Filled by each forward inside the context, the last one's activations staying:
        ``(batch, sequence, width)`` each, in the LM's precision, without gradient. What `edited`
        puts at a place is read there if `captured` is entered inside it.

    Raises:
        SparseAutoencoderError: The LM has no such place, or none that can be hooked.
    """
    found: dict[HookPoint, Tensor] = {}

    def reader(hook_point: HookPoint) -> Callable[[Tensor], None]:
        def read(activation: Tensor) -> None:
            found[hook_point] = (
                activation.detach().clone()
            )  # Falcon adds to its MLP's output in place

        return read

    with _hooked(model, {hook_point: reader(hook_point) for hook_point in hook_points}):
        yield found


@contextmanager
def edited(
    model: nn.Module, edits: Mapping[HookPoint, Callable[[Tensor], Tensor]]
) -> Iterator[None]:
    """Replace an LM's activations at some places while it runs.

    Args:
        model: A Hugging Face causal LM.
        edits: Of each place, a function from the activation there, ``(batch, sequence, width)``,
            to what stands in for it, of the same shape. It is called in each forward inside the
            context, layer after layer, so that it sees what the edits before it have changed; the
            stream goes on from its value, and gradients pass through it.

    Raises:
        SparseAutoencoderError: The LM has no such place or none that can be hooked, or a function
            returns another shape.
    """
    with _hooked(model, edits):
        yield


# -- hooks ---------------------------------------------------------------------------------------


@contextmanager
def _hooked(
    model: nn.Module, hooks: Mapping[HookPoint, Callable[[Tensor], Tensor | None]]
) -> Iterator[None]:
    with ExitStack() as stack:
        for hook_point, function in hooks.items():
            module = module_at(model, hook_point)
            width = width_of(model)
            rows: list[int] = []
            if hook_point.kind != "residual":
                # Only to know the shape where the module is handed the tokens in one row (OPT).
                layer = layers_of(model)[hook_point.layer]
                handle = layer.register_forward_pre_hook(_row_counter(rows), with_kwargs=True)
                stack.callback(handle.remove)
            hook = _hook(hook_point, function, width, rows)
            stack.callback(module.register_forward_hook(hook).remove)
        yield


def _row_counter(rows: list[int]) -> Callable[..., None]:
    def count(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        del module
        rows[:] = [_stream_into(args, kwargs).shape[0]]

    return count


def _hook(
    hook_point: HookPoint, function: Callable[[Tensor], Tensor | None], width: int, rows: list[int]
) -> Callable[..., Any]:
    def hook(module: nn.Module, args: Any, output: Any) -> Any:
        del module, args
        tensor = _tensor_in(output)
        whole = tensor if tensor.dim() == 3 else tensor.view(rows[0], -1, width)
        new = function(whole)
        if new is None:
            return None
        if new.shape != whole.shape:
            raise SparseAutoencoderError(
                f"the edit at {hook_point} turned activations of the shape {tuple(whole.shape)} into "
                f"{tuple(new.shape)}. Return as many, of the same width."
            )
        new = new.to(tensor).view(tensor.shape)
        return new if isinstance(output, Tensor) else (new, *output[1:])

    return hook


def _tensor_in(output: Any) -> Tensor:
    return output if isinstance(output, Tensor) else output[0]


def _stream_into(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor:
    return args[0] if args else kwargs["hidden_states"]


# -- finding -------------------------------------------------------------------------------------


def _from_config(model: nn.Module, name: str) -> int:
    config: Any = getattr(model, "config", None)
    text = config.get_text_config() if hasattr(config, "get_text_config") else None
    value = getattr(text, name, None)
    if not isinstance(value, int):
        raise SparseAutoencoderError(
            f"{type(model).__name__} does not say its {name} in a configuration. Pass a Hugging "
            "Face causal LM."
        )
    return value


def layers_of(model: nn.Module) -> nn.ModuleList:
    """An LM's layers, from the bottom up.

    Raises:
        SparseAutoencoderError: They are not found.
    """
    n_layers = _from_config(model, "num_hidden_layers")
    get_decoder = getattr(model, "get_decoder", None)
    decoder = get_decoder() if callable(get_decoder) else None
    # From outside in: a mixture of as many experts lies inside a layer.
    for module in (decoder if isinstance(decoder, nn.Module) else model).modules():
        if isinstance(module, nn.ModuleList) and len(module) == n_layers:
            return module
    raise SparseAutoencoderError(
        f"{type(model).__name__} has no list of its {n_layers} layers, so that its activations "
        "cannot be reached. Take an LM whose layers lie in one torch.nn.ModuleList."
    )


# Names of the modules of each layer rather than the modules: adapters may come to wrap them.
_known: WeakKeyDictionary[nn.Module, list[dict[HookKind, str]]] = WeakKeyDictionary()


def layer_of(model: nn.Module, hook_point: HookPoint) -> nn.Module:
    """The layer that a place is in.

    Raises:
        SparseAutoencoderError: The LM has no such layer, or none that can be hooked.
    """
    layers = layers_of(model)
    if hook_point.layer >= len(layers):
        raise SparseAutoencoderError(
            f"{type(model).__name__} has no {hook_point}: its {len(layers)} layers are counted from 0 "
            f"to {len(layers) - 1}."
        )
    return layers[hook_point.layer]


def module_at(model: nn.Module, hook_point: HookPoint) -> nn.Module:
    """The module whose output stands at a place.

    Raises:
        SparseAutoencoderError: The LM has no such place, or none that can be hooked.
    """
    layer = layer_of(model, hook_point)
    if hook_point.kind == "residual":
        return layer
    if model not in _known:
        _known[model] = _find_parts(model, layers_of(model))
    name = _known[model][hook_point.layer].get(hook_point.kind)
    if name is None:
        _refuse(model, hook_point, layer)
    return layer.get_submodule(name)


def _refuse(model: nn.Module, hook_point: HookPoint, layer: nn.Module) -> NoReturn:
    inside = ", ".join(name for name, _ in layer.named_children())
    raise SparseAutoencoderError(
        f"the {hook_point} of {type(model).__name__} cannot be told apart: no two modules of its "
        f"{type(layer).__name__} ({inside}) were found, an attention and an MLP, that add up to "
        "what the layer adds to the residual stream. Take the residual alone of this LM."
    )


class _Trace:
    """What went through one layer during the probe."""

    def __init__(self) -> None:
        self.before = self.after = torch.empty(0)
        self.calls: list[tuple[str, Tensor | None, Tensor, Tensor]] = []

    def chain(self, name: str) -> list[tuple[str, Tensor]]:
        """A module, and those after it that each take the output of the one before."""
        names = [called for called, *_ in self.calls]
        found: list[tuple[str, Tensor]] = []
        last: Tensor | None = None
        for called, read, wrote, value in self.calls:
            if called == name if last is None else read is last:
                last = wrote
                # Phi's one dropout serves both, so that it is the place of neither.
                if names.count(called) == 1:
                    found.append((called, value))
        return found


@torch.no_grad()
def run_probe(model: nn.Module) -> None:
    """Run an LM over a few tokens, in eval mode and its own precision, for hooks on it to see."""
    embedding: Any = model.get_input_embeddings()  # type: ignore[operator]
    ids = torch.arange(_N_PROBE_TOKENS, device=embedding.weight.device)[None]
    with evaluating(model), torch.autocast(ids.device.type, enabled=False):
        model(input_ids=ids, use_cache=False)


@torch.no_grad()
def _find_parts(model: nn.Module, layers: nn.ModuleList) -> list[dict[HookKind, str]]:
    traces = [_Trace() for _ in layers]
    with ExitStack() as stack:
        for layer, trace in zip(layers, traces, strict=True):
            _watch(layer, trace, stack)
        run_probe(model)
    width = width_of(model)
    return [_parts_of(layer, trace, width) for layer, trace in zip(layers, traces, strict=True)]


def _watch(layer: nn.Module, trace: _Trace, stack: ExitStack) -> None:
    def enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        del module
        trace.before = _stream_into(args, kwargs).clone()

    def leave(module: nn.Module, args: Any, output: Any) -> None:
        del module, args
        trace.after = _tensor_in(output)

    def record(name: str) -> Callable[..., None]:
        def call(module: nn.Module, args: Any, kwargs: Mapping[str, Any], output: Any) -> None:
            del module
            tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
            wrote = _tensor_in(output)
            if isinstance(wrote, Tensor):
                # Its value now, and itself to be known by where it goes on to.
                read = tensors[0] if tensors else None
                trace.calls.append((name, read, wrote, wrote.clone()))

        return call

    stack.callback(layer.register_forward_pre_hook(enter, with_kwargs=True).remove)
    stack.callback(layer.register_forward_hook(leave).remove)
    for name, child in layer.named_children():
        handle = child.register_forward_hook(record(name), with_kwargs=True)
        stack.callback(handle.remove)


def _parts_of(layer: nn.Module, trace: _Trace, width: int) -> dict[HookKind, str]:
    """Names of the modules whose outputs a layer adds; none where they do not add up."""
    attention, mlp = _child(layer, _ATTENTION), _child(layer, _MLP) or _last_linear(layer, width)
    if attention is None or mlp is None or not trace.before.numel():
        return {}
    before, after = trace.before.float(), trace.after.float()
    rounding = torch.finfo(trace.after.dtype).eps * _ROUNDINGS
    best: tuple[float, dict[HookKind, str]] = (float("inf"), {})
    for attention_name, attention_out in trace.chain(attention):
        for mlp_name, mlp_out in trace.chain(mlp):
            if attention_out.numel() != after.numel() or mlp_out.numel() != after.numel():
                continue
            parts = attention_out.float().view_as(after), mlp_out.float().view_as(after)
            error = float((before + parts[0] + parts[1] - after).norm())
            size = float(parts[0].norm() + parts[1].norm())
            # Of equals the last: dropout, say, does nothing in eval mode only.
            if error <= min(best[0], _TOLERANCE * size + rounding * float(after.norm())):
                best = error, {"attention_out": attention_name, "mlp_out": mlp_name}
    return best[1]


def _child(layer: nn.Module, words: tuple[str, ...]) -> str | None:
    for name, child in layer.named_children():
        called = f"{name} {type(child).__name__}".lower()
        is_leaf = next(child.children(), None) is None
        if not is_leaf and "cross" not in called and any(word in called for word in words):
            return name
    return None


def _last_linear(layer: nn.Module, width: int) -> str | None:
    """The way out of an MLP whose parts lie in the layer itself, as in OPT."""
    found = None
    for name, child in layer.named_children():
        weight = getattr(child, "weight", None)
        if isinstance(weight, Tensor) and weight.dim() == 2 and width in weight.shape:
            found = name
    return found
