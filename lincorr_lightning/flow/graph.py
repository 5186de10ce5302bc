"""Match features by the cosine of their decoders, and follow them through the layers of an LM.

"Analyze Feature Flow to Enhance Interpretation and Steering in Language Models" (Laptev et al.,
2025, arXiv 2502.03032). A feature of the residual stream after layer L has its predecessors in the
stream after layer L-1 and in the outputs of layer L's MLP and attention, whose features have none.
A feature is a row of a decoder ``(n_features, width)``; the paper writes it as a column.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import scipy
import torch
from torch import Tensor
from torch.nn.functional import normalize, pad

from lincorr_lightning.errors import ConfigError, SparseAutoencoderError, require, require_one_of
from lincorr_lightning.io import atomic_write
from lincorr_lightning.sae import hook_points
from lincorr_lightning.sae.hook_points import KIND_NAMES, KINDS, Feature, HookKind, HookPoint

# The paper's example for MLPs. Random directions of width 2,304 stay below 0.1 among 16k features.
DEFAULT_THRESHOLD = 0.25
_TILE_SIZE = 2**24  # cosines held in memory at a time: 16 million float32 numbers are 64 MiB

SHORT: dict[HookKind, str] = {"residual": "RES", "mlp_out": "MLP", "attention_out": "ATT"}
"""Names of the kinds of hook points in the names of groups, as in the paper."""


_ACTIVE = [[kind for i, kind in enumerate(KINDS) if code >> i & 1] for code in range(8)]
GROUPS = tuple(f"From {' & '.join(SHORT[k] for k in kinds) or 'nowhere'}" for kinds in _ACTIVE)
"""Names of the groups by their code, the sum of 1 for RES, 2 for MLP and 4 for ATT."""
_NAMES = (", ".join(KIND_NAMES[k] for k in kinds) or "no predecessor" for kinds in _ACTIVE)
GROUP_NAMES = dict(zip(GROUPS, _NAMES, strict=True))  #: Names of the groups on figures and screens.


class Matches(NamedTuple):
    """The sources most similar to each target, the most similar first, and their cosines.

    Both are ``(n_targets, k)``; -1 and NaN where a norm is 0 or there are fewer than k sources.
    """

    indices: Tensor
    cosines: Tensor


@torch.no_grad()
def match_features(targets: Tensor, sources: Tensor, k: int = 1) -> Matches:
    """Find the k sources with the highest cosine to each target; k is 1 and 5 in the paper.

    Both are decoders, ``(n_features, width)``. Cosines are computed in float32 for a tile of
    targets at a time: the whole matrix is a gibibyte for 16k features against 16k.
    """
    if targets.ndim != 2 or sources.ndim != 2 or targets.shape[1] != sources.shape[1]:
        raise ValueError(
            f"decoders {tuple(targets.shape)} and {tuple(sources.shape)} cannot be compared: "
            "they must be (n_features, width) of one width"
        )
    require("k", k, at_least=1)
    targets, sources = targets.float(), sources.float()
    target_norm, source_norm = targets.norm(dim=1, keepdim=True), sources.norm(dim=1)
    is_zero = source_norm == 0
    inverse = torch.where(is_zero, 0.0, 1 / source_norm)
    n_best = min(k, len(sources))
    best = [
        (tile @ sources.T * inverse).masked_fill_(is_zero, -torch.inf).topk(n_best, dim=1)
        for tile in torch.split(targets, max(1, _TILE_SIZE // max(1, len(sources))))
    ]
    values, indices = (torch.cat(parts) for parts in zip(*best, strict=True))
    is_match = (target_norm > 0) & values.isfinite()
    # The target's norm does not change the order: only the kept cosines are divided by it.
    cosines = torch.where(is_match, values / target_norm, torch.nan).clamp_(-1, 1)
    padding = (0, k - n_best)
    indices = pad(torch.where(is_match, indices, -1), padding, value=-1)
    return Matches(indices, pad(cosines, padding, value=torch.nan))


@torch.no_grad()
def assign_features(targets: Tensor, sources: Tensor) -> Matches:
    """Match features one to one with the highest sum of cosines ("SAE Match", arXiv 2410.07656).

    Both are decoders, ``(n_features, width)``. A target has at most one source, and a source at
    most one target. All cosines are held in float64: 2 GiB for 16k features against 16k.
    """
    target_kept = targets.float().norm(dim=1).nonzero()[:, 0]
    source_kept = sources.float().norm(dim=1).nonzero()[:, 0]
    cosines = normalize(targets[target_kept].float()) @ normalize(sources[source_kept].float()).T
    both = cosines.double().cpu().numpy()
    rows, columns = scipy.optimize.linear_sum_assignment(both, maximize=True)
    matches = Matches(
        targets.new_full((len(targets), 1), -1, dtype=torch.int64),
        targets.new_full((len(targets), 1), torch.nan, dtype=torch.float32),
    )
    matches.indices[target_kept[rows], 0] = source_kept[columns]
    matches.cosines[target_kept[rows], 0] = cosines[rows, columns].clamp(-1, 1)
    return matches


@dataclass(frozen=True, order=True)
class Edge:
    """A feature (`target`), its matched predecessor (`source`) and the cosine of their decoders."""

    source: Feature
    target: Feature
    cosine: float


@dataclass(frozen=True)
class FlowGraph:
    """Features that a feature, `start`, comes from and goes to.

    `edges` are the matches above the `thresholds`, sorted. `groups` has one of `GROUPS` for each
    residual feature whose predecessors were searched.
    """

    start: Feature
    edges: tuple[Edge, ...]
    groups: Mapping[Feature, str]
    thresholds: Mapping[HookKind, float]

    @property
    def features(self) -> list[Feature]:
        """All features of the graph, by layer."""
        ends = {end for edge in self.edges for end in (edge.source, edge.target)}
        return sorted(ends | {self.start})

    def as_dict(self) -> dict[str, Any]:
        """Return the graph as plain data for JSON."""
        return {
            "start": self.start.id,
            "thresholds": dict(self.thresholds),
            "nodes": [
                {"id": f.id, **asdict(f.hook_point), "index": f.index, "group": self.groups.get(f)}
                for f in self.features
            ],
            "edges": [
                {"source": e.source.id, "target": e.target.id, "cosine": e.cosine}
                for e in self.edges
            ],
        }

    def write_graphml(self, path: str | Path) -> None:
        """Write the graph as GraphML, for Gephi, Cytoscape, yEd or networkx."""
        import networkx

        content, graph = self.as_dict(), networkx.DiGraph(id=self.start.id)
        for node in content["nodes"]:
            known = {key: value for key, value in node.items() if value is not None}
            graph.add_node(known.pop("id"), **known)
        for edge in content["edges"]:
            graph.add_edge(edge["source"], edge["target"], cosine=edge["cosine"])
        with atomic_write(path) as part:
            networkx.write_graphml_xml(graph, part, named_key_ids=True)


class DecoderMatcher:
    """Matches features of neighboring hook points by the cosine of their rows in the decoders."""

    def __init__(self, decoders: Mapping[HookPoint, Tensor]) -> None:
        if not decoders:
            raise SparseAutoencoderError("there is no SAE to follow features through. Pass some.")
        self.decoders = {at: decoders[at] for at in sorted(decoders)}
        """Decoder of each hook point that has an SAE, by layer."""
        widths = sorted({decoder.shape[1] for decoder in self.decoders.values()})
        if len(widths) > 1:
            raise SparseAutoencoderError(
                f"some SAEs are {widths[0]} wide, some {widths[-1]} wide. Pass SAEs of one LM."
            )
        for kind in KINDS:
            layers = [at.layer for at in self.decoders if at.kind == kind]
            for layer in {*range(min(layers, default=0), max(layers, default=0))} - {*layers}:
                raise SparseAutoencoderError(
                    f"there is no SAE for the {HookPoint(layer, kind)}, between layers that have "
                    "one: features that pass through it would seem to come from nowhere. Pass one, "
                    "or only the layers on one side of it."
                )

    @property
    def last(self) -> HookPoint:
        """The last residual stream that has an SAE."""
        if not (streams := [at for at in self.decoders if at.kind == "residual"]):
            raise SparseAutoencoderError("there is no SAE for a residual stream. Pass one.")
        return max(streams)

    def predecessors(self, hook_point: HookPoint) -> list[HookPoint]:
        """Return the hook points with an SAE from which features come; outputs have none."""
        if hook_point.kind != "residual":
            return []
        layer = hook_point.layer
        below = [HookPoint(layer - 1, "residual")] if layer else []
        candidates = [*below, HookPoint(layer, "mlp_out"), HookPoint(layer, "attention_out")]
        return [at for at in candidates if at in self.decoders]

    def match(self, hook_point: HookPoint, k: int = 1) -> dict[HookPoint, Matches]:
        """Match all features of a hook point with k of each predecessor."""
        targets = hook_points.at_hook_point(self.decoders, hook_point)
        return {
            source: match_features(targets, self.decoders[source], k)
            for source in self.predecessors(hook_point)
        }

    def follow(
        self,
        start: Feature,
        *,
        direction: str = "both",
        thresholds: Mapping[HookKind, float] | float = DEFAULT_THRESHOLD,
        k: int = 1,
    ) -> FlowGraph:
        """Follow a feature ``backward`` to its sources, ``forward`` to where it goes, or ``both``.

        `thresholds` are those of `thresholds_by_kind`; k of the most similar are considered.
        """
        limits = thresholds_by_kind(thresholds)
        require_one_of("direction", direction, ("backward", "forward", "both"))
        require("k", k, at_least=1)
        self.check_start(start)
        edges: list[Edge] = []
        codes: dict[Feature, int] = {}
        for backward in (True, False):
            if direction not in ("both", "backward" if backward else "forward"):
                continue
            reached = {start}
            # An edge leads to a hook point that comes later in this order.
            for at in sorted(self.decoders, reverse=backward):
                features = sorted(feature for feature in reached if feature.hook_point == at)
                others = self.predecessors(at)
                if not backward:
                    others = [after for after in self.decoders if at in self.predecessors(after)]
                for other in others if features else ():
                    limit = limits[(other if backward else at).kind]
                    new_edges = self._edges(features, other, backward, limit, k)
                    edges += new_edges
                    reached |= {edge.source if backward else edge.target for edge in new_edges}
                    if backward:
                        codes = dict.fromkeys(features, 0) | codes
                        for target in {edge.target for edge in new_edges}:
                            codes[target] += 1 << KINDS.index(other.kind)
        groups = {feature: GROUPS[code] for feature, code in codes.items()}
        return FlowGraph(start, tuple(sorted(edges)), groups, limits)

    def _edges(
        self, features: Sequence[Feature], other: HookPoint, backward: bool, limit: float, k: int
    ) -> list[Edge]:
        decoder = self.decoders[features[0].hook_point][[feature.index for feature in features]]
        matches = match_features(decoder, self.decoders[other], k)
        rows, ranks = (matches.cosines >= limit).nonzero(as_tuple=True)
        columns = rows, matches.indices[rows, ranks], matches.cosines[rows, ranks]
        found = zip(*(column.tolist() for column in columns), strict=True)
        ends = ((features[row], Feature(other, index), cosine) for row, index, cosine in found)
        return [Edge(b, a, cosine) if backward else Edge(a, b, cosine) for a, b, cosine in ends]

    def check_start(self, start: Feature) -> None:
        """Refuse a feature that cannot be followed."""
        decoder = hook_points.at_hook_point(self.decoders, start.hook_point)
        hook_points.check_feature(start, len(decoder))
        if not decoder[start.index].any():
            raise SparseAutoencoderError(
                f"feature {start.index} of the SAE at {start.hook_point} cannot be followed: its "
                "decoder row is zero, so that it has no direction."
            )


def thresholds_by_kind(thresholds: Mapping[HookKind, float] | float) -> dict[HookKind, float]:
    """Return the minimum cosine of an edge for every kind of hook point of its source.

    `thresholds` is one number for all, or has some by kind; the others have `DEFAULT_THRESHOLD`.
    """
    if not isinstance(thresholds, Mapping):
        thresholds = dict.fromkeys(KINDS, float(thresholds))
    if unknown := set(thresholds) - set(KINDS):
        raise ConfigError(
            f"model.thresholds has {sorted(unknown)[0]!r}, which is no kind of hook point; the "
            f"kinds are {', '.join(KINDS)}."
        )
    by_kind = {kind: float(thresholds.get(kind, DEFAULT_THRESHOLD)) for kind in KINDS}
    for kind, value in by_kind.items():
        require(f"model.thresholds of {kind}", value, at_least=-1, at_most=1)
    return by_kind
