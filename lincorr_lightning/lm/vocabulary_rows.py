"""The rows of a matrix that has one for each token: the head of a loaded LM, or of a checkpoint."""

from collections.abc import Iterator, Sequence
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from lincorr_lightning.distributed import gather

BLOCK = 4096  # rows that are held at once


class VocabularyRows(Protocol):
    """A matrix with a row for each token, which need not be in memory.

    All ranks that share an LM must call a method together.
    """

    def blocks(self) -> Iterator[Tensor]:
        """Yield all rows in blocks, ``(n_rows, hidden_size)`` each, in any floating type."""

    def rows(self, token_ids: Sequence[int]) -> Tensor:
        """Return the rows of some tokens, ``(n_tokens, hidden_size)``, float64 on the CPU."""


class HeldRows(VocabularyRows):
    """The rows of a layer's matrix in memory, ``(n_tokens, hidden_size)``, whole or sharded."""

    def __init__(self, layer: nn.Linear) -> None:
        self._layer = layer  # whose matrix sharding replaces

    def blocks(self) -> Iterator[Tensor]:
        # Those of a sharded matrix are gathered one at a time.
        rows, is_whole = self._local()
        if is_whole:
            # mps has no float64
            yield from torch.split(rows.cpu() if rows.device.type == "mps" else rows, BLOCK)
            return
        for start in range(0, max(gather(len(rows))), BLOCK):
            yield torch.cat(gather(rows[start : start + BLOCK].cpu()))

    def rows(self, token_ids: Sequence[int]) -> Tensor:
        rows, is_whole = self._local()
        if is_whole:
            return rows[torch.as_tensor(token_ids, device=rows.device)].cpu().double()
        first = sum(gather(len(rows))[: torch.distributed.get_rank()])
        held = {i: rows[i - first].cpu() for i in token_ids if 0 <= i - first < len(rows)}
        row_of = {i: row for of_rank in gather(held) for i, row in of_rank.items()}
        return torch.stack([row_of[i] for i in token_ids]).double()

    def _local(self) -> tuple[Tensor, bool]:
        """Return the rows of this rank, such that each row is on one, or the whole matrix."""
        weight = self._layer.weight.detach()
        if not isinstance(weight, DTensor):
            return weight, True
        coordinate = weight.device_mesh.get_coordinate()
        assert coordinate is not None
        placed = zip(weight.placements, coordinate, strict=True)
        is_copy = any(place != Shard(0) and index > 0 for place, index in placed)
        return weight.to_local()[: 0 if is_copy else None], False
