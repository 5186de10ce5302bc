"""Sharding of an LM over ranks, all of which must take part in each forward pass."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import distributed

from lincorr_lightning.errors import LanguageModelError
from lincorr_lightning.lm.tensor_parallel import split_matrices

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from transformers import PreTrainedModel


class RankSync:
    """Collective decisions of the ranks that share an LM; all must call them equally often."""

    def __init__(self, device_type: str) -> None:
        self._device = torch.device(device_type)

    def any(self, own: bool) -> bool:
        """Return whether `own` is true on any rank."""
        return bool(self.max(own))

    def max(self, own: int) -> int:
        """Return the maximum of `own` over all ranks."""
        number = torch.tensor(int(own), device=self._device)
        distributed.all_reduce(number, distributed.ReduceOp.MAX)
        return int(number)


def shard(model: PreTrainedModel, mesh: DeviceMesh) -> RankSync:
    """Shard an LM over all ranks of a run; return the synchronization of its forward passes.

    The mesh dimension ``tensor_parallel`` splits matrices (`split_matrices`); ``data_parallel``, or
    the only dimension of a mesh, shards the layers' weights.
    """
    data = mesh
    if "tensor_parallel" in (mesh.mesh_dim_names or ()):
        data, tensor = mesh["data_parallel"], mesh["tensor_parallel"]
        if tensor.size() > 1:
            split_matrices(model, tensor, data.size())
            if data.size() == 1:
                return RankSync(mesh.device_type)
    _shard_weights(model, data)
    return RankSync(mesh.device_type)


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
            "are layers (_no_split_modules). Add --config configs/trainer/ddp.yaml, which gives "
            "each rank the whole LM."
        )
    for layer in layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
