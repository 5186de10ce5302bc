"""The linear maps of one relation that the callbacks of a run share."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from lincorr_lightning.errors import LinearMapError
from lincorr_lightning.knowledge import TokenizedRelation
from lincorr_lightning.linear_map.artifact import LinearMap, warn_of_fit_subjects
from lincorr_lightning.linear_map.fitting import (
    maps_of_rows,
    relation_layout,
    sample_fitted_subjects,
)
from lincorr_lightning.linear_map.layout import JointLayout
from lincorr_lightning.linear_map.row_reader import shared_row_reader
from lincorr_lightning.lm.query_cache import QueryCache


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


def announce_maps(
    cache: QueryCache, relation: TokenizedRelation, n_subjects: int, held_out: frozenset[str]
) -> None:
    """Announce what `load_or_fit_maps` will read to fit maps.

    Raises:
        SubjectsError: The vocabulary has too few other subjects.
    """
    shared_row_reader(cache).announce(*_fit_on(cache, relation, n_subjects, held_out))


def _fit_on(
    cache: QueryCache, relation: TokenizedRelation, n_subjects: int, held_out: frozenset[str]
) -> tuple[JointLayout, list[str]]:
    """Return the layout and the subjects that the maps of a relation are fitted on."""
    subjects = sample_fitted_subjects(cache.lm.tokenizer, n_subjects, held_out)
    return relation_layout(relation), subjects


def load_or_fit_maps(
    cache: QueryCache,
    relation: TokenizedRelation,
    folder: str | None,
    ridge: float,
    n_subjects: int,
    held_out: frozenset[str],
) -> RelationMaps:
    """Read the map of a folder, or fit two on the LM as it is now; once per run.

    The LM reads the prompts of all announced relations in one pass. The first fitted map has the
    `ridge`, the second chooses its own (``auto``). Neither is fitted on subjects that are
    `held_out`: those that the run measures.

    Raises:
        LinearMapError: The folder's map has other labels, or not this pair.
        SubjectsError: The vocabulary has too few other subjects.
    """
    key = ("maps", relation.name, folder, ridge, n_subjects, held_out)
    if key not in cache.shared:
        if folder is None:
            layout, subjects = _fit_on(cache, relation, n_subjects, held_out)
            rows = shared_row_reader(cache).read(layout, subjects)
            fitted = maps_of_rows(cache.lm, layout, rows, [ridge, "auto"])
            maps = dict(zip(("plain", "auto"), fitted, strict=True))
        else:
            maps = {"given": _load(cache, relation, folder)}
            warn_of_fit_subjects(folder, held_out)
        cache.shared[key] = RelationMaps(
            {name: each.weight(relation.name) for name, each in maps.items()},
            {name: each.bias(relation.name) for name, each in maps.items()},
        )
    found: RelationMaps = cache.shared[key]
    return found


def _load(cache: QueryCache, relation: TokenizedRelation, folder: str) -> LinearMap:
    linear_map = LinearMap.from_pretrained(folder, cache.lm)
    for domain in (relation.source, relation.target):
        name = domain.knowledge.name
        if linear_map.token_ids(name) != domain.token_ids:
            raise LinearMapError(
                f"the linear map {folder} has other labels of {name} than this run: "
                f"{len(linear_map.token_ids(name))} against {len(domain.token_ids)}. "
                "Fit it with the same knowledge files, or leave linear_map null."
            )
    return linear_map
