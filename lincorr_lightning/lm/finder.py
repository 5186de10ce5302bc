"""Search for the causal LM inside any LightningModule, and for layers inside an LM."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from lincorr_lightning.errors import LanguageModelError
from lincorr_lightning.lm.head import call_model, head_of
from lincorr_lightning.lm.modes import reading

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_N_ROWS = 3  # of a forward pass that shows what a layer gets
_N_TOKENS = 5
_N_COLUMNS = 16  # of its output that are compared
_ROUNDING = 0.02  # of half precision, relative
_UNUSED = "a forward pass does not use it"


def causal_lm_of(module: nn.Module, name: str | None = None) -> PreTrainedModel:
    """Return the one Hugging Face causal LM in a module.

    The LM may be at any depth, also inside a `LanguageModel` or a peft wrapper, whose adapters are
    layers of the LM. If there are several, `name` is that of one in ``module.named_modules()``.
    """
    from transformers import PreTrainedModel

    searched = module
    if name is not None:
        searched = dict(module.named_modules()).get(name, nn.Module())
    lms: dict[str, PreTrainedModel] = {}
    for path, part in searched.named_modules():
        peft_config = getattr(part, "active_peft_config", None)
        if getattr(peft_config, "is_prompt_learning", False):
            raise LanguageModelError(
                f"{type(module).__name__} holds a peft model that prepends a learned prompt "
                f"({type(peft_config).__name__}), which the LM alone does not see. Use an adapter "
                "that changes layers, such as LoRA."
            )
        is_inside = any(path.startswith(f"{outer}.") or outer == "" for outer in lms)
        if not isinstance(part, PreTrainedModel) or is_inside or not part.can_generate():
            continue
        if not getattr(part.config, "is_encoder_decoder", False) and head_of(part) is not None:
            lms[path] = part
    if len(lms) == 1:
        return next(iter(lms.values()))
    where = type(module).__name__ if name is None else f"{name!r} of {type(module).__name__}"
    if not lms:
        raise LanguageModelError(
            f"there is no Hugging Face causal LM in {where}. Pass a decoder such as Llama, or a "
            "module that has one (or a LanguageModel) as an attribute."
        )
    listed = ", ".join(f"{path} ({type(part).__name__})" for path, part in lms.items())
    raise LanguageModelError(f"there are several LMs in {where}: {listed}. Pass the name of one.")


def number_in_config(model: nn.Module, name: str) -> int:
    """Return a number of an LM's configuration, such as ``hidden_size``."""
    config: Any = getattr(model, "config", None)
    text = config.get_text_config() if hasattr(config, "get_text_config") else None
    number = getattr(text, name, None)
    if not isinstance(number, int):
        raise LanguageModelError(
            f"{type(model).__name__} has no configuration with {name}. Pass a transformers LM."
        )
    return number


def layers_of(model: nn.Module) -> nn.ModuleList:
    """Return an LM's layers, from the bottom up."""
    n_layers = number_in_config(model, "num_hidden_layers")
    get_decoder = getattr(model, "get_decoder", None)
    decoder = get_decoder() if callable(get_decoder) else None
    # The outermost list: a mixture of experts inside a layer may have as many members.
    for module in (decoder if isinstance(decoder, nn.Module) else model).modules():
        if isinstance(module, nn.ModuleList) and len(module) == n_layers:
            return module
    raise LanguageModelError(
        f"{type(model).__name__} has no list of its {n_layers} layers, so that its activations "
        "cannot be captured. Take an LM whose layers lie in one torch.nn.ModuleList."
    )


def adapter_layers(model: nn.Module) -> dict[str, Any]:
    """Return the layers of an LM that have adapters of peft, by name."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    return {n: part for n, part in model.named_modules() if isinstance(part, BaseTunerLayer)}


def target_layers(
    model: PreTrainedModel, target_modules: Sequence[str] | None
) -> dict[str, nn.Module]:
    """Return the linear layers that get adapters, by full name, in the LM's order.

    `target_modules` are full names or last parts of names, as in peft; None takes all linear layers
    but the output layer, like peft's ``all-linear``, and those that an adapter does not fit. A
    `LanguageModelError` if there is no such layer, or an adapter does not fit it.
    """
    from transformers.pytorch_utils import Conv1D

    if adapter_layers(model):
        raise LanguageModelError(
            f"{type(model).__name__} has peft adapters already. Merge them first: merge_and_unload."
        )
    head = head_of(model)
    linear: dict[str, nn.Module] = {
        name: part
        for name, part in model.named_modules()
        if isinstance(part, nn.Linear | Conv1D) and part is not head
    }
    chosen: set[str] = set()
    for target in [target_modules] if isinstance(target_modules, str) else target_modules or ():
        named = {name for name in linear if name == target or name.endswith(f".{target}")}
        if not named:
            layers = ", ".join(dict.fromkeys(name.rpartition(".")[2] for name in linear))
            raise LanguageModelError(
                f"{type(model).__name__} has no linear layer {target!r} before its output layer. "
                f"Its linear layers are: {layers}."
            )
        chosen |= named
    misfits = _misfits(model, linear)
    for name, why in misfits.items():
        if name in chosen:
            raise LanguageModelError(
                f"the layer {name} of {type(model).__name__} cannot have an adapter: {why}. Leave "
                "it out of the target modules (null takes all that can)."
            )
    chosen = chosen or linear.keys() - misfits.keys()
    if not chosen:
        why = next(iter(misfits.values()), "it has none before its output layer")
        raise LanguageModelError(
            f"LoRA is not possible: no linear layer of {type(model).__name__} can have an adapter "
            f"({why}). Full fine-tuning (method full) and the other studies are."
        )
    return {name: part for name, part in linear.items() if name in chosen}


def _misfits(model: PreTrainedModel, layers: Mapping[str, nn.Module]) -> dict[str, str]:
    ids = torch.arange(_N_ROWS * _N_TOKENS, device=model.device).view(_N_ROWS, _N_TOKENS)
    owners = Counter(id(p) for part in model.modules() for p in part.parameters(recurse=False))
    why = dict.fromkeys(layers, _UNUSED)

    def note(name: str, layer: Any, args: Any, kwargs: Any, output: Any) -> None:
        x: Tensor = args[0] if args else next(iter(kwargs.values()))
        if owners[id(layer.weight)] > 1:  # merged, each adapter would change all of them
            why[name] = "other layers have the same weight"
        elif not has_rows(x, _N_ROWS, _N_TOKENS):
            why[name] = "its input does not have the rows of the LM's, as in a mixture of experts"
        elif not _is_product(layer, x, output):
            why[name] = "its output is not a matrix product"
        elif why.get(name) == _UNUSED:
            del why[name]

    with ExitStack() as hooks, torch.no_grad(), reading(model, model.device.type):
        for name, layer in layers.items():
            hooks.enter_context(layer.register_forward_hook(partial(note, name), with_kwargs=True))
        call_model(model, ids % number_in_config(model, "vocab_size"))
    return why


def has_rows(x: Tensor, n_rows: int, n_tokens: int | None) -> bool:
    """Return whether a layer's input has the rows of the LM's, also if their tokens are in one."""
    is_flat = x.dim() == 2 and n_tokens is not None and len(x) == n_rows * n_tokens
    return is_flat or (x.dim() > 2 and len(x) == n_rows)


def _is_product(layer: Any, x: Tensor, output: Any) -> bool:
    n_in, n_out = features_of(layer)
    if not isinstance(output, Tensor) or (x.shape[-1], output.shape[-1]) != (n_in, n_out):
        return False
    if not layer.weight.is_floating_point():  # quantized: its class knows how to multiply
        return True
    weight = layer.weight if isinstance(layer, nn.Linear) else layer.weight.mT
    bias = 0 if layer.bias is None else layer.bias[:_N_COLUMNS].double()
    expected = x.double() @ weight[:_N_COLUMNS].double().mT + bias
    return bool((output[..., :_N_COLUMNS] - expected).norm() <= _ROUNDING * expected.norm())


def features_of(layer: Any) -> tuple[int, int]:
    """Return the numbers of input and output features of a linear layer."""
    if isinstance(layer, nn.Linear):
        return layer.in_features, layer.out_features
    n_in, n_out = layer.weight.shape  # the weight of Conv1D is transposed
    return n_in, n_out
