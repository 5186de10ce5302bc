"""Match features by the cosine of their decoders, and follow them through the layers of an LM.

"Analyze Feature Flow to Enhance Interpretation and Steering in Language Models" (Laptev et al.,
2025, arXiv 2502.03032). A feature of the residual stream after layer L has its predecessors in the
stream after layer L-1 and in the outputs of layer L's MLP and attention, whose features have none.
A feature is a row of a decoder ``(n_features, width)``; the paper writes it as a column.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import scipy
import torch
from torch import Tensor
from torch.nn.functional import normalize

from lincorr_lightning.errors import SparseAutoencoderError
from lincorr_lightning.sae.hook_points import KIND_NAMES, KINDS, Feature, HookKind, HookPoint
from lincorr_lightning.sae.sparse_autoencoder import SAEs, sae_of

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

    Both are ``(n_targets, k)``, k at most the number of sources; -1 and NaN where a norm is 0.
    """

    indices: Tensor
    cosines: Tensor


@torch.no_grad()
def match_features(targets: Tensor, sources: Tensor, k: int = 1) -> Matches:
    """Find the k sources with the highest cosine to each target; k is 1 and 5 in the paper.

    Both are decoders, ``(n_features, width)``. Cosines are computed in float32 for a tile of
    targets at a time: the whole matrix is a gibibyte for 16k features against 16k.
    """
    targets = targets.float()
    sources = sources.float()
    source_norm = sources.norm(dim=1)
    is_zero = source_norm == 0
    inverse = torch.where(is_zero, 0.0, 1 / source_norm)
    best = [
        (tile @ sources.T * inverse)
        .masked_fill_(is_zero, -torch.inf)
        .topk(min(k, len(sources)), dim=1)
        for tile in torch.split(targets, max(1, _TILE_SIZE // len(sources)))
    ]
    values, indices = (torch.cat(parts) for parts in zip(*best, strict=True))
    # The target's norm does not change the order: only the kept cosines are divided by it.
    target_norm = targets.norm(dim=1, keepdim=True)
    is_match = (target_norm > 0) & values.isfinite()
    cosines = torch.where(is_match, values / target_norm, torch.nan).clamp_(-1, 1)
    return Matches(torch.where(is_match, indices, -1), cosines)


@torch.no_grad()
def assign_features(targets: Tensor, sources: Tensor) -> Tensor:
    """Match features one to one with the highest sum of cosines ("SAE Match", arXiv 2410.07656).

    Both are decoders, ``(n_features, width)``. Returns the source of each target, ``(n_targets,
    1)``; -1 is none. All cosines are held in float64: 2 GiB for 16k features against 16k.
    """
    target_kept = targets.float().norm(dim=1).nonzero()[:, 0]
    source_kept = sources.float().norm(dim=1).nonzero()[:, 0]
    cosines = normalize(targets[target_kept].float()) @ normalize(sources[source_kept].float()).T
    both = cosines.double().cpu().numpy()
    rows, columns = scipy.optimize.linear_sum_assignment(both, maximize=True)
    indices = targets.new_full((len(targets), 1), -1, dtype=torch.int64)
    indices[target_kept[rows], 0] = source_kept[columns]
    return indices


@dataclass(frozen=True, order=True)
class Edge:
    """A feature (`target`), its matched predecessor (`source`) and the cosine of their decoders."""

    source: Feature
    target: Feature
    cosine: float


@dataclass(frozen=True)
class FlowGraph:
    """Features that a feature, `start`, comes from and goes to, at most one of a hook point.

    `edges` are the matches, sorted.
    """

    start: Feature
    edges: tuple[Edge, ...]

    @property
    def features(self) -> list[Feature]:
        """All features of the graph, by layer."""
        ends = {end for edge in self.edges for end in (edge.source, edge.target)}
        return sorted(ends | {self.start})


class DecoderMatcher:
    """Matches features of neighboring hook points by the cosine of their rows in the decoders.

    Args:
        saes: SAEs of an LM, of consecutive layers for each kind of hook point.
        threshold: Minimum cosine at which a flow continues.

    Raises:
        SparseAutoencoderError: A layer between others has no SAE.
    """

    def __init__(self, saes: SAEs, threshold: float = DEFAULT_THRESHOLD) -> None:
        self.saes = {at: saes[at] for at in sorted(saes)}
        """SAE of each hook point that has one, by layer."""
        self.threshold = threshold
        for kind in KINDS:
            layers = [at.layer for at in self.saes if at.kind == kind]
            for layer in {*range(min(layers, default=0), max(layers, default=0))} - {*layers}:
                raise SparseAutoencoderError(
                    f"there is no SAE for the {HookPoint(layer, kind)}, between layers that have "
                    "one: features that pass through it would seem to come from nowhere. Pass one, "
                    "or only the layers on one side of it."
                )

    def decoder(self, hook_point: HookPoint) -> Tensor:
        """Return the decoder of a hook point's SAE, ``(n_features, width)``."""
        return self.saes[hook_point].decoder.detach()

    @property
    def last(self) -> HookPoint:
        """The last residual stream that has an SAE."""
        return max(at for at in self.saes if at.kind == "residual")

    def predecessors(self, hook_point: HookPoint) -> list[HookPoint]:
        """Return the hook points with an SAE from which features come; outputs have none."""
        if hook_point.kind != "residual":
            return []
        layer = hook_point.layer
        below = [HookPoint(layer - 1, "residual")] if layer else []
        candidates = [*below, HookPoint(layer, "mlp_out"), HookPoint(layer, "attention_out")]
        return [at for at in candidates if at in self.saes]

    def successors(self, hook_point: HookPoint) -> list[HookPoint]:
        """Return the hook points with an SAE of which a hook point is a predecessor."""
        return [at for at in self.saes if hook_point in self.predecessors(at)]

    def match(self, hook_point: HookPoint, k: int = 1) -> dict[HookPoint, Matches]:
        """Match all features of a hook point with k of each predecessor."""
        return {
            source: match_features(self.decoder(hook_point), self.decoder(source), k)
            for source in self.predecessors(hook_point)
        }

    def follow(self, start: Feature, forward: bool = True) -> FlowGraph:
        """Follow a feature back to its sources and, where `forward`, to where it goes.

        At each hook point the flow continues to the most similar feature if its cosine is at least
        the `threshold`.
        """
        self.check_start(start)
        walks = self._walk(start, self.predecessors)
        edges = {Edge(other, feature, cosine) for feature, other, cosine in walks}
        if forward:
            walks = self._walk(start, self.successors)
            edges |= {Edge(feature, other, cosine) for feature, other, cosine in walks}
        return FlowGraph(start, tuple(sorted(edges)))

    def _walk(
        self, start: Feature, neighbors: Callable[[HookPoint], list[HookPoint]]
    ) -> Iterator[tuple[Feature, Feature, float]]:
        reached = [start]
        for feature in reached:  # which grows
            row = self.decoder(feature.hook_point)[[feature.index]]
            for at in neighbors(feature.hook_point):
                match = match_features(row, self.decoder(at))
                similar = Feature(at, int(match.indices))
                if float(match.cosines) >= self.threshold:
                    yield feature, similar, float(match.cosines)
                    if similar not in reached:
                        reached.append(similar)

    def check_start(self, start: Feature) -> None:
        """Refuse a feature that cannot be followed."""
        if not sae_of(start, self.saes).decoder[start.index].any():
            raise SparseAutoencoderError(
                f"feature {start.index} of the SAE at {start.hook_point} cannot be followed: its "
                "decoder row is zero, so that it has no direction."
            )
