"""The linear maps of one relation that the callbacks of a run share."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from torch import Tensor, nn

from lincorr_lightning.errors import LinearMapError
from lincorr_lightning.knowledge import TokenizedRelation
from lincorr_lightning.linear_map.artifact import LinearMap, warn_of_fit_subjects
from lincorr_lightning.linear_map.fitting import (
    maps_of_rows,
    relation_layout,
    sample_fitted_subjects,
)
from lincorr_lightning.linear_map.layout import RowReader
from lincorr_lightning.lm.language_model import LanguageModel
from lincorr_lightning.lm.query_cache import QueryCache

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class RelationMaps:
    """W and b of a relation, by the name of the map; the first is the main one.

    Attributes:
        weights: W, ``(n_target, n_source)``: ``given``, or ``plain`` and ``auto``.
        biases: b, ``(n_target,)``.
    """

    weights: dict[str, Tensor]
    biases: dict[str, Tensor]

    @property
    def weight(self) -> Tensor:
        """W of the main map."""
        return next(iter(self.weights.values()))

    def predict(self, source_logits: Tensor) -> Tensor:
        """Return the main map's target logits, ``(n, n_target)``, of ``(n, n_source)`` ones."""
        return source_logits @ self.weight.T + next(iter(self.biases.values()))


@dataclass(frozen=True)
class LMReaders:
    """What the callbacks of a run share to read one LM.

    Attributes:
        cache: Reads the LM in training.
        rows: Reads the LM before training, to fit maps.
        maps: Maps that have been fitted, by what they were fitted for.
    """

    cache: QueryCache
    rows: RowReader
    maps: dict[Hashable, RelationMaps] = field(default_factory=dict)

    @classmethod
    def of(cls, module: nn.Module, model: PreTrainedModel, tokenizer: str | None) -> LMReaders:
        """Return readers of an LM, with the ``row_reader`` of its module if it has one."""
        cache = QueryCache.of(module, model, tokenizer)
        rows = getattr(module, "row_reader", None)
        if not (isinstance(rows, RowReader) and rows.lm is cache.lm):
            rows = RowReader(cache.lm)
        return cls(cache, rows)

    def announce_maps(
        self, relation: TokenizedRelation, n_subjects: int, held_out: frozenset[str]
    ) -> None:
        """Announce what `fit_maps` will read."""
        self.rows.announce(relation_layout(relation), self._fit_on(n_subjects, held_out))

    def fit_maps(
        self, relation: TokenizedRelation, ridge: float, n_subjects: int, held_out: frozenset[str]
    ) -> RelationMaps:
        """Fit two maps on the LM as it is now, or return those that were fitted for the same.

        The LM reads the prompts of all announced relations in one pass. The first map has the
        `ridge`, the second chooses its own (``auto``). Neither is fitted on subjects that are
        `held_out`: those that the run measures.
        """
        key = relation.name, ridge, n_subjects, held_out
        if key not in self.maps:
            layout = relation_layout(relation)
            rows = self.rows.read(layout, self._fit_on(n_subjects, held_out))
            fitted = maps_of_rows(self.cache.lm, layout, rows, [ridge, "auto"])
            maps = dict(zip(("plain", "auto"), fitted, strict=True))
            self.maps[key] = _relation_maps(relation, maps)
        return self.maps[key]

    def _fit_on(self, n_subjects: int, held_out: frozenset[str]) -> list[str]:
        return sample_fitted_subjects(self.cache.lm.tokenizer, n_subjects, held_out)


def _relation_maps(relation: TokenizedRelation, maps: dict[str, LinearMap]) -> RelationMaps:
    return RelationMaps(
        {name: each.weight(relation.name) for name, each in maps.items()},
        {name: each.bias(relation.name) for name, each in maps.items()},
    )


def load_maps(
    lm: LanguageModel, relation: TokenizedRelation, folder: str, held_out: frozenset[str]
) -> RelationMaps:
    """Read the map of a folder; warn if it was fitted on subjects that are `held_out`."""
    linear_map = LinearMap.from_pretrained(folder, lm)
    for domain in (relation.source, relation.target):
        name = domain.knowledge.name
        if linear_map.token_ids(name) != domain.token_ids:
            raise LinearMapError(
                f"the linear map {folder} has other labels of {name} than this run: "
                f"{len(linear_map.token_ids(name))} against {len(domain.token_ids)}. "
                "Fit it with the same knowledge files, or leave linear_map null."
            )
    warn_of_fit_subjects(folder, held_out)
    return _relation_maps(relation, {"given": linear_map})
