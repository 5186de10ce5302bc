"""Temporary modes of torch and of an LM: eval mode, and forward passes in float32."""

import os
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from threading import RLock, get_ident
from types import MethodType
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from lincorr_lightning.lm.head import head_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# Not in the modules, which are copied and pickled; a child has none that its parent's threads hold.
_locks: WeakKeyDictionary[nn.Module, RLock] = WeakKeyDictionary()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_locks.clear)
HALF_PRECISIONS = (torch.bfloat16, torch.float16)


def lock_of(module: nn.Module) -> RLock:
    """Return the lock for threads that read, change or hook a module, one after the other."""
    return _locks.setdefault(module, RLock())


def dtype_name(dtype: torch.dtype | str) -> Any:
    """Return the name of a dtype as in `LMConfig`, such as ``bfloat16``."""
    return str(dtype).removeprefix("torch.")


@contextmanager
def own_torch_settings() -> Iterator[None]:
    """Run a ``with`` block in the settings that torch starts with, whatever is in force around."""
    with ExitStack() as stack:
        for device in ("cpu", "cuda", "mps"):
            if torch.is_autocast_enabled(device):
                stack.enter_context(torch.autocast(device, enabled=False))
        if torch.get_default_device().type != "cpu":
            stack.enter_context(torch.device("cpu"))
        stack.callback(torch.set_default_dtype, torch.get_default_dtype())
        torch.set_default_dtype(torch.float32)
        # Lightning leaves gradients on or off as its last loop had them.
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        yield


@contextmanager
def reading(module: nn.Module, device_type: str, compiled: bool = False) -> Iterator[None]:
    """Run a module in eval mode and its own dtype inside a ``with`` block.

    The forward is that of the module's class, without what has been put around it on the object: a
    trainer's mixed precision would round there, inside of the autocast that is off here. What
    others have compiled, such as an LM in training, runs as it was written unless `compiled`: other
    shapes and a patched head would compile it anew. Other threads wait, also with their own calls
    of the module. One that runs by then sees eval mode, and with `float32_forward` may fail.
    """
    lock, thread = lock_of(module), get_ident()

    def wait(*_: Any) -> None:
        if get_ident() != thread:
            with lock:
                pass

    stance: AbstractContextManager[object] = nullcontext()
    if not compiled and "torch._dynamo" in sys.modules:  # else nothing is; importing it takes long
        stance = torch.compiler.set_stance("force_eager")
    no_autocast = torch.autocast(device_type, enabled=False)
    with lock, stance, no_autocast, _as_written(module):
        training = [part for part in module.modules() if part.training]
        module.eval()
        try:
            with module.register_forward_pre_hook(wait):
                yield
        finally:
            # Submodules that were in eval mode, such as a frozen LM in a LightningModule, stay so.
            for part in training:
                part.training = True


@contextmanager
def _as_written(module: nn.Module) -> Iterator[None]:
    """Take off what was put around the forward of a module, and autocast around those of parts."""
    replaced: dict[nn.Module, Any] = {}
    for part in module.modules():
        forward = vars(part).get("forward")
        inner = None if forward is None else _below_autocast(forward)
        # accelerate's hooks move the inputs of layers on several devices.
        if forward is not None and part is module and not hasattr(part, "_hf_hook"):
            inner = None
        if inner is not forward:
            replaced[part] = vars(part).pop("forward")
            vars(part).update({} if inner is None else {"forward": inner})
    try:
        yield
    finally:
        for part, forward in replaced.items():
            vars(part)["forward"] = forward


def _below_autocast(forward: Any) -> Any:
    """Return what the innermost ``torch.autocast`` decorates in a forward; itself without any."""
    below = forward
    layer = forward
    while layer is not None:
        inner = getattr(layer, "__wrapped__", None)
        if hasattr(layer, "__script_unsupported"):  # the mark of torch.autocast's decorator
            below = inner
        layer = inner
    # A method of a wrapper has the module as its first argument, and so has what it wraps.
    takes_module = below is not forward and hasattr(forward, "__self__")
    takes_module = takes_module and not hasattr(below, "__self__")
    return MethodType(below, forward.__self__) if takes_module else below


def trained_in_half_precision(model: nn.Module) -> list[nn.Parameter]:
    """Return the parameters that are trained in half precision."""
    return [p for p in model.parameters() if p.requires_grad and p.dtype in HALF_PRECISIONS]


@contextmanager
def float32_forward(model: "PreTrainedModel", skip: nn.Module | None = None) -> Iterator[None]:
    """Run forward passes of a half-precision model in float32 inside a ``with`` block.

    The weights of a block are float32 copies while its forward runs, one block at a time. Half
    precision can round away the change of logits by one optimizer step. The model is neither
    sharded nor compiled; half-precision weights must not be in training: exchanging their data
    would detach the gradient hooks of DistributedDataParallel. The submodule `skip`, such as a
    head that is read otherwise, is left as it is.
    """
    originals: dict[nn.Parameter, Tensor] = {}

    def widen(parameters: list[nn.Parameter], widened: list[nn.Parameter], *_: Any) -> None:
        for parameter in parameters:
            if parameter not in originals:  # tied weights are in several units
                originals[parameter] = parameter.data
                parameter.data = parameter.data.float()
                widened.append(parameter)

    def restore(widened: list[nn.Parameter], *_: Any) -> None:
        while widened:
            parameter = widened.pop()
            parameter.data = originals.pop(parameter)

    head = head_of(model)
    with ExitStack() as stack:
        stack.callback(lambda: restore(list(originals)))
        for module in _units(model, skip):
            half = [p for p in module.parameters() if p.dtype in HALF_PRECISIONS]
            # Some LMs round states to the dtype of their head before they call it.
            module = model if module is head else module
            if type(module) is nn.Embedding and half:  # a lookup is exact; the matrix is large
                hook = module.register_forward_hook(lambda _, args, output: output.float())
                stack.enter_context(hook)
            elif half:
                widened: list[nn.Parameter] = []
                before, after = partial(widen, half, widened), partial(restore, widened)
                stack.enter_context(module.register_forward_pre_hook(before))
                stack.enter_context(module.register_forward_hook(after, always_call=True))
        yield


def _units(module: nn.Module, skip: nn.Module | None) -> Iterator[nn.Module]:
    if module is skip:
        return
    if isinstance(module, nn.ModuleList):
        yield from module
    elif hasattr(module, "base_layer") or any(True for _ in module.parameters(recurse=False)):
        yield module  # a layer of peft uses the weights of its parts in its own forward
    else:
        for child in module.children():
            yield from _units(child, skip)
