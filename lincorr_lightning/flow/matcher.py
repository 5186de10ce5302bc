"""Following features from place to place through the layers.

"Analyze Feature Flow to Enhance Interpretation and Steering in Language Models" (Laptev et al.,
2025, arXiv 2502.03032). A feature of the residual stream after layer L has its predecessors in the
residual stream after layer L-1 and in the outputs of layer L's MLP and attention; these outputs are
where features are born, so nothing comes before them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from torch import Tensor

from lincorr_lightning.errors import SparseAutoencoderError
from lincorr_lightning.flow.graph import GROUPS, Edge, Feature, FlowGraph
from lincorr_lightning.flow.matching import Matches, match_features
from lincorr_lightning.sae.hook_points import KINDS, HookKind, HookPoint, check_index
from lincorr_lightning.sae.sparse_autoencoder import SparseAutoencoder

# The paper's example for MLPs. Random directions of width 2,304 stay below 0.1 among 16k features.
DEFAULT_THRESHOLD = 0.25


class DecoderMatcher:
    """Decoders at the places of one LM, to be followed from any feature.

    Args:
        decoders: Of each place, ``(n_features, width)``; a feature is a row. They are not copied.

    Raises:
        SparseAutoencoderError: There are none, they differ in width, or a kind of place has none
            for a layer between two for which it has one.

    Example:
        >>> import torch
        >>> eye = torch.eye(3)
        >>> flow = DecoderMatcher({HookPoint(0, "residual"): eye, HookPoint(1, "residual"): eye.flip(0)})
        >>> graph = flow.follow(Feature(HookPoint(1, "residual"), 0), direction="backward")
        >>> [edge.source.id for edge in graph.edges]
        ['residual.0.2']
    """

    def __init__(self, decoders: Mapping[HookPoint, Tensor]) -> None:
        if not decoders:
            raise SparseAutoencoderError("there is no SAE to follow features through. Pass some.")
        self._decoders = {
            hook_point: decoder.detach() for hook_point, decoder in sorted(decoders.items())
        }
        first, *others = self._decoders
        width = self._decoders[first].shape[1]
        for hook_point in others:
            if self._decoders[hook_point].shape[1] != width:
                raise SparseAutoencoderError(
                    f"the SAE at {hook_point} is {self._decoders[hook_point].shape[1]} wide, that at {first} "
                    f"{width}. Pass SAEs of one LM."
                )
        for kind in KINDS:
            layers = [hook_point.layer for hook_point in self._decoders if hook_point.kind == kind]
            for layer in range(min(layers, default=0), max(layers, default=0)):
                if layer not in layers:
                    raise SparseAutoencoderError(
                        f"there is no SAE for the {HookPoint(layer, kind)}, between layers that have "
                        "one: what flows through it would seem to come from nowhere. Pass one, or "
                        "only the layers on one side of it."
                    )

    @classmethod
    def of(cls, saes: Iterable[SparseAutoencoder]) -> DecoderMatcher:
        """Take the decoders of SAEs.

        Args:
            saes: At most one for each place.

        Raises:
            SparseAutoencoderError: Two belong to one place, or they do not belong together.
        """
        decoders: dict[HookPoint, Tensor] = {}
        for sae in saes:
            if sae.hook_point in decoders:
                raise SparseAutoencoderError(
                    f"there are two SAEs for the {sae.hook_point}. Pass one."
                )
            decoders[sae.hook_point] = sae.decoder
        return cls(decoders)

    @property
    def hook_points(self) -> list[HookPoint]:
        """Places that have an SAE, by layer."""
        return list(self._decoders)

    def predecessors(self, hook_point: HookPoint) -> list[HookPoint]:
        """Places with an SAE from which features of a place can come.

        Args:
            hook_point: For MLP and attention there are none.
        """
        if hook_point.kind != "residual":
            return []
        layer = hook_point.layer
        below = [HookPoint(layer - 1, "residual")] if layer else []
        candidates = [*below, HookPoint(layer, "mlp_out"), HookPoint(layer, "attention_out")]
        return [candidate for candidate in candidates if candidate in self._decoders]

    def successors(self, hook_point: HookPoint) -> list[HookPoint]:
        """Places with an SAE to which features of a place can go."""
        after = HookPoint(hook_point.layer + (hook_point.kind == "residual"), "residual")
        return [after] if after in self._decoders else []

    def match(
        self, hook_point: HookPoint, k: int = 1, return_full: bool = False
    ) -> dict[HookPoint, Matches]:
        """Match all features of a place with each of its predecessors.

        Args:
            hook_point: The place of the features to match.
            k: How many predecessors in each place.
            return_full: Whether to return all cosines too.

        Raises:
            SparseAutoencoderError: The place has no SAE.
        """
        targets = self.decoder(hook_point)
        return {
            source: match_features(targets, self._decoders[source], k, return_full)
            for source in self.predecessors(hook_point)
        }

    def follow(
        self,
        start: Feature,
        *,
        direction: str = "both",
        thresholds: Mapping[HookKind, float] | float = DEFAULT_THRESHOLD,
        k: int = 1,
        max_steps: int | None = None,
    ) -> FlowGraph:
        """Follow a feature through the layers.

        Args:
            start: Any feature.
            direction: ``backward`` to where it comes from, ``forward`` to where it goes, or
                ``both``, each from the start on.
            thresholds: Least cosine of an edge, by the kind of its source, or one for all.
            k: How many features are looked at in each place, the most similar first.
            max_steps: How many places to go in each direction; None goes on to the end.

        Raises:
            SparseAutoencoderError: The start's place has no SAE, its index is out of range, its
                decoder is zero, or an argument is not one of those above.
        """
        limits = check_thresholds(thresholds)
        if direction not in ("backward", "forward", "both"):
            raise SparseAutoencoderError(
                f"direction is {direction!r}; it must be backward, forward or both."
            )
        if k < 1:
            raise SparseAutoencoderError(f"k is {k}; it must be at least 1.")
        self.check_start(start)
        edges: dict[tuple[Feature, Feature], Edge] = {}
        groups: dict[Feature, str] = {}
        zero_norm: dict[HookPoint, int] = {}
        for backward in (True, False):
            if direction not in ("both", "backward" if backward else "forward"):
                continue
            step, frontier, seen = 0, {start}, {start}
            while frontier and (max_steps is None or step < max_steps):
                found = self._step(frontier, backward, limits, k, zero_norm)
                if backward:
                    groups.update(self._groups_of(frontier, found))
                edges.update({(edge.source, edge.target): edge for edge in found})
                reached = {edge.source if backward else edge.target for edge in found}
                frontier = reached - seen
                seen |= reached
                step += 1
        return FlowGraph(start, tuple(sorted(edges.values())), groups, limits, zero_norm)

    def _step(
        self,
        frontier: set[Feature],
        backward: bool,
        limits: Mapping[HookKind, float],
        k: int,
        zero_norm: dict[HookPoint, int],
    ) -> list[Edge]:
        """Edges from the frontier to the places before or after it."""
        edges = []
        for hook_point in sorted({feature.hook_point for feature in frontier}):
            indices = sorted(
                feature.index for feature in frontier if feature.hook_point == hook_point
            )
            decoder = self._decoders[hook_point][indices]
            for other in self.predecessors(hook_point) if backward else self.successors(hook_point):
                matches = match_features(decoder, self._decoders[other], k)
                zero_norm[other] = matches.n_zero_sources
                limit = limits[(other if backward else hook_point).kind]
                rows, ranks = (matches.cosines >= limit).nonzero(as_tuple=True)
                for row, index, cosine in zip(
                    rows.tolist(),
                    matches.indices[rows, ranks].tolist(),
                    matches.cosines[rows, ranks].tolist(),
                    strict=True,
                ):
                    here, there = Feature(hook_point, indices[row]), Feature(other, index)
                    source, target = (there, here) if backward else (here, there)
                    edges.append(Edge(source, target, cosine))
        return edges

    def _groups_of(self, frontier: set[Feature], edges: list[Edge]) -> dict[Feature, str]:
        kinds: dict[Feature, set[HookKind]] = {
            feature: set() for feature in frontier if self.predecessors(feature.hook_point)
        }
        for edge in edges:
            kinds[edge.target].add(edge.source.hook_point.kind)
        return {
            feature: GROUPS[sum(1 << KINDS.index(kind) for kind in found)]
            for feature, found in kinds.items()
        }

    def decoder(self, hook_point: HookPoint) -> Tensor:
        """Decoder of a place, ``(n_features, width)``.

        Raises:
            SparseAutoencoderError: The place has no SAE.
        """
        if hook_point not in self._decoders:
            raise SparseAutoencoderError(
                f"there is no SAE for the {hook_point}; there are for "
                f"{', '.join(map(str, self._decoders))}. Load one, or take one of these places."
            )
        return self._decoders[hook_point]

    def check_start(self, start: Feature) -> None:
        """Refuse a feature that cannot be followed.

        Args:
            start: Any feature.

        Raises:
            SparseAutoencoderError: Its place has no SAE, its index is out of range, or its decoder
                is zero.
        """
        decoder = self.decoder(start.hook_point)
        check_index(start.index, len(decoder), start.hook_point)
        if not decoder[start.index].any():
            raise SparseAutoencoderError(
                f"feature {start.index} of the SAE at {start.hook_point} cannot be followed: its "
                "decoder column is zero, so that it has no direction."
            )


def check_thresholds(thresholds: Mapping[HookKind, float] | float) -> dict[HookKind, float]:
    """Thresholds of all kinds of places.

    Args:
        thresholds: Least cosine of an edge, by the kind of its source, or one for all; a kind that
            is not named has `DEFAULT_THRESHOLD`.

    Raises:
        SparseAutoencoderError: There is no such kind, or a threshold is no cosine.
    """
    if not isinstance(thresholds, Mapping):
        found = dict.fromkeys(KINDS, float(thresholds))
    else:
        unknown = set(thresholds) - set(KINDS)
        if unknown:
            raise SparseAutoencoderError(
                f"there is no kind of place {sorted(unknown)[0]!r} to give a threshold; "
                f"there are {', '.join(KINDS)}."
            )
        found = {kind: float(thresholds.get(kind, DEFAULT_THRESHOLD)) for kind in KINDS}
    for kind, value in found.items():
        if not -1 <= value <= 1:
            raise SparseAutoencoderError(
                f"the threshold of {kind} is {value:g}; it is the least cosine of an edge, between "
                "-1 and 1."
            )
    return found
