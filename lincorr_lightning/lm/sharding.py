"""Sharding of an LM over ranks: its layers' weights (FSDP) or its matrix products."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from torch import Tensor, distributed, nn
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor, parallel

from lincorr_lightning.errors import LanguageModelError
from lincorr_lightning.lm.head import head_of

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from transformers import PreTrainedModel

# Transformers' names of parallel styles, and torch's equivalents.
_BY_OUTPUTS: dict[str, Callable[[], parallel.ParallelStyle]] = {
    "colwise": parallel.ColwiseParallel,
    "colwise_gather_output": lambda: parallel.ColwiseParallel(output_layouts=Replicate()),
}
_BY_INPUTS: dict[str, Callable[[], parallel.ParallelStyle]] = {
    "rowwise": parallel.RowwiseParallel,
    "rowwise_split_input": lambda: parallel.RowwiseParallel(input_layouts=Replicate()),
}
# Replicated on each rank, which uses it for its own heads: the gradient is the sum over ranks.
_SUMMED = "replicated_with_grad_allreduce"
_SPLIT = _BY_OUTPUTS | _BY_INPUTS
_KNOWN = {*_SPLIT, _SUMMED, "replicate"}


def shard(model: PreTrainedModel, mesh: DeviceMesh) -> None:
    """Shard an LM over all ranks of a run.

    The mesh dimension ``tensor_parallel`` splits matrices (`split_matrices`); ``data_parallel``, or
    the only dimension of a mesh, shards the layers' weights.
    """
    data = mesh["data_parallel"] if "data_parallel" in (mesh.mesh_dim_names or ()) else mesh
    if splits_matrices(mesh):
        split_matrices(model, mesh["tensor_parallel"], data.size())
    if not splits_matrices(mesh) or data.size() > 1:
        _shard_weights(model, data)


def splits_matrices(mesh: DeviceMesh) -> bool:
    """Return whether a mesh has tensor parallelism."""
    return "tensor_parallel" in (mesh.mesh_dim_names or ()) and mesh["tensor_parallel"].size() > 1


def _shard_weights(model: PreTrainedModel, mesh: DeviceMesh) -> None:
    """Shard an LM's weights by torch's ``fully_shard``.

    The weights of a layer are gathered while the layer runs; embedding, last norm and head, tied or
    not, while the LM runs. So the head's rows can be read during a forward pass.
    """
    from torch.distributed.fsdp import fully_shard

    names = set(getattr(model, "_no_split_modules", None) or ())
    layers = [module for module in model.modules() if type(module).__name__ in names]
    if not layers:
        raise LanguageModelError(
            f"{type(model).__name__} cannot be sharded: it does not declare which of its modules "
            "are layers (_no_split_modules). Add --config configs/trainer/ddp.yaml."
        )
    for layer in layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)


def split_matrices(model: PreTrainedModel, mesh: DeviceMesh, n_groups: int = 1) -> None:
    """Split an LM's linear layers over ranks, by transformers' tensor-parallel plan.

    Query, key, value and the first feed-forward matrices are split by output features, the matrices
    that follow them by input features, so that each layer needs two reductions. Adapters are split
    like their layers. Embedding, norms and head, tied or not, are replicated, so that the head's
    rows can be read. `n_groups` data shards share the split matrices again; torch requires even
    sizes. Weights and adapters must be the same on each rank.
    """
    plan = _plan(model)
    _check_sizes(model, plan, mesh.size(), n_groups)
    for _, layer, style in _split_layers(model, plan):
        parallel.parallelize_module(layer, mesh, _SPLIT[style](), src_data_rank=None)
    summed = {m for name, m in model.named_modules() if plan.get(_generic(name)) == _SUMMED}
    whole: dict[nn.Parameter, nn.Parameter] = {}  # tied weights stay one parameter
    for module in list(model.modules()):
        plain = dict(module.named_parameters(recurse=False, remove_duplicate=False))
        plain = {name: p for name, p in plain.items() if not isinstance(p, DTensor)}
        for name, parameter in plain.items():
            if parameter not in whole:
                copies = distribute_tensor(parameter, mesh, [Replicate()], src_data_rank=None)
                whole[parameter] = nn.Parameter(copies, parameter.requires_grad)
            module.register_parameter(name, whole[parameter])
        if plain:
            _compute_locally(module, list(plain), mesh, module in summed)


def _plan(model: PreTrainedModel) -> dict[str, str]:
    """Return the style of each module of the plan, by its name with ``*`` for each number."""
    kept = [model.get_input_embeddings(), head_of(model) or model]  # type: ignore[no-untyped-call]
    names = {_generic(name): module for name, module in model.named_modules()}
    names |= {_generic(name): None for name, _ in model.named_parameters()}  # type: ignore[misc]
    # The plan of a model family may name layers that this LM lacks.
    present = {name: style for name, style in (model.tp_plan or {}).items() if name in names}
    plan = {name: style for name, style in present.items() if names[name] not in kept}
    unknown = sorted({style for style in plan.values() if style not in _KNOWN})
    unknown += [name for name in plan if names[name] is None]
    if not plan or unknown:
        why = f"{', '.join(unknown)} is not supported"
        raise _refusal(model, why if unknown else "transformers has no plan for it")
    return plan


def _check_sizes(model: PreTrainedModel, plan: dict[str, str], n: int, n_groups: int) -> None:
    config = model.config.get_text_config()
    # Ranks have whole heads, unless the attention gathers its outputs over all ranks.
    if any(style == "colwise" and "att" in name for name, style in plan.items()):
        for key in ("num_attention_heads", "num_key_value_heads"):
            heads = getattr(config, key, None)
            for number in heads if isinstance(heads, list) else [heads]:
                if number and number % n:
                    raise _refusal(model, f"its {key}, {number}, is not divisible by {n}")
    for name, layer, style in _split_layers(model, plan):
        if not isinstance(layer, nn.Linear) or not layer.weight.is_floating_point():
            raise _refusal(model, f"{name} is a {type(layer).__name__}, not a plain linear layer")
        by_outputs = style in _BY_OUTPUTS
        width = layer.out_features if by_outputs else layer.in_features
        n_parts = n * n_groups if by_outputs else n
        if width % n_parts:
            raise _refusal(model, f"the width of {name}, {width}, is not divisible by {n_parts}")


def _refusal(model: PreTrainedModel, why: str) -> LanguageModelError:
    return LanguageModelError(
        f"{model.name_or_path} ({type(model).__name__}) does not support tensor parallelism: "
        f"{why}. Use configs/trainer/fsdp.yaml, which shards each layer's weights, or "
        "configs/trainer/ddp.yaml, which gives each rank the whole LM."
    )


def _generic(name: str) -> str:
    return ".".join("*" if part.isdigit() else part for part in name.split("."))


def _split_layers(model: nn.Module, plan: dict[str, str]) -> Iterator[tuple[str, Any, str]]:
    for name, module in list(model.named_modules()):
        style = plan.get(_generic(name))
        if style not in _SPLIT:
            continue
        layers = [module]
        if hasattr(module, "base_layer"):
            # The other adapter matrix would be split along its rank, and is replicated.
            adapters: Any = module.lora_B if style in _BY_OUTPUTS else module.lora_A
            layers = [module.base_layer, *adapters.values()]
        for layer in layers:
            yield _generic(name), layer, style


def _compute_locally(module: nn.Module, names: list[str], mesh: DeviceMesh, summed: bool) -> None:
    """Let a module compute with local tensors where its parameters are replicated.

    Its parameters are DTensors like the split ones, so that gradient norms, optimizers and
    checkpoints treat all of them the same way; the activations are plain tensors.
    """
    kept: dict[str, nn.Parameter] = {}

    def add_up(gradient: Tensor) -> Tensor:
        total = gradient.clone()
        distributed.all_reduce(total, group=mesh.get_group())
        return total

    def enter(module: nn.Module, args: Any) -> None:
        for name in names:
            parameter = module._parameters[name]
            if isinstance(parameter, DTensor):
                local = parameter.to_local()
                if summed and local.requires_grad:
                    local.register_hook(add_up)
                kept[name] = parameter  # type: ignore[assignment]
                module._parameters[name] = local  # type: ignore[assignment]

    def leave(module: nn.Module, args: Any, output: Any) -> None:
        module._parameters.update(kept)
        kept.clear()

    module.register_forward_pre_hook(enter)
    # Also after a forward pass that ran out of memory.
    module.register_forward_hook(leave, always_call=True)
