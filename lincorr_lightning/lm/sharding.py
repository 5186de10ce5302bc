"""An LM in pieces, one a process: every process must take part in each of its forwards."""

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
    """What the processes that hold an LM's pieces must agree on; each must call it as often.

    Args:
        device_type: Where they run, such as ``cuda``.
    """

    def __init__(self, device_type: str) -> None:
        self._device = torch.device(device_type)

    def any(self, own: bool) -> bool:
        """Whether it is so on any process."""
        return bool(self.most(own))

    def most(self, own: int) -> int:
        """The largest of all processes' numbers."""
        told = torch.tensor(int(own), device=self._device)
        distributed.all_reduce(told, distributed.ReduceOp.MAX)
        return int(told)


def shard(model: PreTrainedModel, mesh: DeviceMesh) -> RankSync:
    """Split an LM's weights over all processes of a run.

    Over the processes of a mesh's ``tensor_parallel``, matrices are split (`split_matrices`); over
    those of its ``data_parallel``, or of a mesh of one dimension, weights are (`shard_weights`).

    Args:
        model: The whole LM, with the same weights on each process.
        mesh: The processes, in one dimension, or in these two.

    Raises:
        LanguageModelError: The LM does not say what its layers are, or how its matrices are split.
    """
    data = mesh
    if "tensor_parallel" in (mesh.mesh_dim_names or ()):
        data, tensor = mesh["data_parallel"], mesh["tensor_parallel"]
        if tensor.size() > 1:
            split_matrices(model, tensor, data.size())
            if data.size() == 1:
                return RankSync(mesh.device_type)
    shard_weights(model, data)
    return RankSync(mesh.device_type)


def shard_weights(model: PreTrainedModel, mesh: DeviceMesh) -> None:
    """Split an LM's weights by torch's ``fully_shard``.

    A layer's weights are together only while it runs; embedding, last norm and head, tied or not,
    while the LM does. So the head's rows can be read in a forward as if it were whole.

    Args:
        model: The whole LM, with the same weights on each process.
        mesh: The processes, in one dimension.

    Raises:
        LanguageModelError: The LM does not say what its layers are.
    """
    from torch.distributed.fsdp import fully_shard

    names = set(getattr(model, "_no_split_modules", None) or ())
    layers = [module for module in model.modules() if type(module).__name__ in names]
    if not layers:
        raise LanguageModelError(
            f"{type(model).__name__} cannot be split over processes: it does not say which of its "
            "modules are layers (_no_split_modules). Lay configs/trainer/ddp.yaml over the study, "
            "which gives each process the whole LM."
        )
    for layer in layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
