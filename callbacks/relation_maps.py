"""The linear maps of one relation that a run's watchers share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from lincorr_lightning.errors import LinearMapError
from lincorr_lightning.knowledge import TokenizedRelation
from lincorr_lightning.linear_map.artifact import LinearMap
from lincorr_lightning.linear_map.fitting import fit_linear_maps
from lincorr_lightning.lm.vocabulary import sample_subjects, usable_strings

if TYPE_CHECKING:
    from lincorr_lightning.lm.query_cache import QueryCache


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
        cache: QueryCache,
        asked: TokenizedRelation,
        folder: str | None = None,
        ridge: float = 0.0,
        n_subjects: int = 2000,
    ) -> RelationMaps:
        """Read the map of a folder, or fit two on the LM as it is now; once a run.

        Args:
            cache: Where the LM is.
            asked: The relation.
            folder: A linear map's, such as ``linear_map/`` of a probe's run.
            ridge: Of the first map that is fitted; the second one's is ``auto``.
            n_subjects: Subjects to fit on, as far as the vocabulary has so many.

        Raises:
            LinearMapError: The folder's map is of other labels, or has no such pair.
        """
        key = (asked.name, folder, ridge, n_subjects)
        maps: dict[object, RelationMaps] = cache.shared.setdefault("maps", {})
        if key not in maps:
            maps[key] = (
                cls._fitted(cache, asked, ridge, n_subjects)
                if folder is None
                else cls._read(cache, asked, folder)
            )
        return maps[key]

    @classmethod
    def _fitted(
        cls, cache: QueryCache, asked: TokenizedRelation, ridge: float, n_subjects: int
    ) -> RelationMaps:
        tokenizer = cache.lm.tokenizer
        n = min(n_subjects, len(usable_strings(tokenizer)))
        fitted = fit_linear_maps(cache.lm, asked, sample_subjects(tokenizer, n), [ridge, "auto"])
        named = dict(zip(("plain", "auto"), fitted, strict=True))
        return cls(
            {name: each.weight(asked.name) for name, each in named.items()},
            {name: each.bias(asked.name) for name, each in named.items()},
        )

    @classmethod
    def _read(cls, cache: QueryCache, asked: TokenizedRelation, folder: str) -> RelationMaps:
        linear_map = LinearMap.from_pretrained(folder, cache.lm)
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
