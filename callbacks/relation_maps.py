"""The linear maps of one relation that a run's watchers share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from lincorr_lightning.errors import LinearMapError
from lincorr_lightning.fitting import fit_linear_maps
from lincorr_lightning.knowledge import AskedRelation
from lincorr_lightning.linear_map import LinearMap
from lincorr_lightning.lm.vocabulary import sample_inputs, usable_strings

if TYPE_CHECKING:
    from lincorr_lightning.lm.watching import WatchDesk


@dataclass(frozen=True)
class RelationMaps:
    """W and b of a relation; the first is the one that was asked for.

    Attributes:
        weights: Name -> W, ``(n_target, n_source)``: ``given``, or ``plain`` and ``auto``.
        biases: Name -> b, ``(n_target,)``.
    """

    weights: dict[str, Tensor]
    biases: dict[str, Tensor]

    @classmethod
    def of(
        cls,
        desk: WatchDesk,
        asked: AskedRelation,
        folder: str | None = None,
        ridge: float = 0.0,
        n_inputs: int = 2000,
    ) -> RelationMaps:
        """Read the map of a folder, or fit two on the LM as it is now; once a run.

        Args:
            desk: Where the LM is.
            asked: The relation.
            folder: A linear map's, such as ``linear_map/`` of a probe's run.
            ridge: Of the first map that is fitted; the second one's is ``auto``.
            n_inputs: Subjects to fit on, as far as the vocabulary has so many.

        Raises:
            LinearMapError: The folder's map is of other labels, or has no such pair.
        """
        key = (asked.name, folder, ridge, n_inputs)
        maps: dict[object, RelationMaps] = desk.shared.setdefault("maps", {})
        if key not in maps:
            maps[key] = (
                cls._fitted(desk, asked, ridge, n_inputs)
                if folder is None
                else cls._read(desk, asked, folder)
            )
        return maps[key]

    @classmethod
    def _fitted(
        cls, desk: WatchDesk, asked: AskedRelation, ridge: float, n_inputs: int
    ) -> RelationMaps:
        tokenizer = desk.lm.tokenizer
        n = min(n_inputs, len(usable_strings(tokenizer)))
        fitted = fit_linear_maps(desk.lm, asked, sample_inputs(tokenizer, n), [ridge, "auto"])
        named = dict(zip(("plain", "auto"), fitted, strict=True))
        return cls(
            {name: each.weight(asked.name) for name, each in named.items()},
            {name: each.bias(asked.name) for name, each in named.items()},
        )

    @classmethod
    def _read(cls, desk: WatchDesk, asked: AskedRelation, folder: str) -> RelationMaps:
        linear_map = LinearMap.from_pretrained(folder, desk.lm)
        for domain in (asked.source, asked.target):
            name = domain.knowledge.name
            if linear_map.token_ids(name) != domain.token_ids:
                raise LinearMapError(
                    f"the linear map {folder} has other labels of {name} than this run: "
                    f"{len(linear_map.token_ids(name))} against {len(domain.token_ids)}. "
                    "Fit it with the same knowledge files, or leave linear_map null."
                )
        return cls({"given": linear_map.weight(asked.name)}, {"given": linear_map.bias(asked.name)})

    @property
    def weight(self) -> Tensor:
        """W of the first map."""
        return next(iter(self.weights.values()))

    def predict(self, source_logits: Tensor) -> Tensor:
        """Target logits by the first map, ``(n, n_target)``."""
        return source_logits @ self.weight.T + next(iter(self.biases.values()))
