"""Flow graphs, which `DecoderMatcher` finds, and their JSON and GraphML files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from lincorr_lightning.io import atomic_write
from lincorr_lightning.sae.hook_points import KINDS, Feature, HookKind, HookPoint

SHORT: dict[HookKind, str] = {"residual": "RES", "mlp_out": "MLP", "attention_out": "ATT"}
"""Names of the kinds of hook points in the names of groups, as in the paper."""


def _group_name(code: int) -> str:
    names = [SHORT[kind] for i, kind in enumerate(KINDS) if code >> i & 1]
    return "From " + (" & ".join(names) or "nowhere")


GROUPS: tuple[str, ...] = tuple(_group_name(code) for code in range(2 ** len(KINDS)))
"""Names of the groups by their code, the sum of 1 for RES, 2 for MLP and 4 for ATT."""


@dataclass(frozen=True, order=True)
class Edge:
    """A feature and its matched predecessor.

    Attributes:
        source: The predecessor.
        target: The feature that it becomes, or becomes part of.
        cosine: Cosine of their decoders.
    """

    source: Feature
    target: Feature
    cosine: float


@dataclass(frozen=True)
class FlowGraph:
    """Features that a feature comes from and goes to.

    Attributes:
        start: The feature that was followed.
        edges: Matches above the thresholds, sorted.
        groups: Group, such as *From RES & MLP*, of each residual feature whose predecessors were
            searched. Features of MLP and attention have none, nor have those of the lowest hook
            point that has an SAE.
        thresholds: Minimum cosine of an edge by the kind of its source.
        zero_norm: Number of decoder rows left out at each hook point because their norm is zero.
    """

    start: Feature
    edges: tuple[Edge, ...]
    groups: Mapping[Feature, str]
    thresholds: Mapping[HookKind, float]
    zero_norm: Mapping[HookPoint, int]

    @property
    def features(self) -> list[Feature]:
        """All features of the graph, by layer."""
        ends = {end for edge in self.edges for end in (edge.source, edge.target)}
        return sorted(ends | {self.start})

    def change(self, feature: Feature) -> str | None:
        """Return what happens to a feature at its layer.

        Returns:
            *persistence* if it comes from the residual stream alone, *transformation* if it comes
            from there and from MLP or attention, *birth* if it does not come from the residual
            stream; None if its predecessors were not searched.
        """
        group = self.groups.get(feature)
        if group is None:
            return None
        code = GROUPS.index(group)
        if not code & 1:
            return "birth"
        return "persistence" if code == 1 else "transformation"

    def as_dict(self) -> dict[str, Any]:
        """Return the graph as plain data for JSON."""
        return {
            "start": self.start.id,
            "thresholds": dict(self.thresholds),
            "zero_norm": [
                {"layer": hook_point.layer, "kind": hook_point.kind, "features": count}
                for hook_point, count in sorted(self.zero_norm.items())
            ],
            "nodes": [
                {
                    "id": feature.id,
                    "layer": feature.hook_point.layer,
                    "kind": feature.hook_point.kind,
                    "index": feature.index,
                    "group": self.groups.get(feature),
                    "change": self.change(feature),
                }
                for feature in self.features
            ],
            "edges": [
                {"source": edge.source.id, "target": edge.target.id, "cosine": edge.cosine}
                for edge in self.edges
            ],
        }

    def write_graphml(self, path: str | Path) -> None:
        """Write the graph as GraphML, for Gephi, Cytoscape, yEd or networkx.

        Raises:
            OutputError: The file cannot be written.
        """
        root = ElementTree.Element("graphml", xmlns="http://graphml.graphdrawing.org/xmlns")
        for name, (end, kind) in _GRAPHML_KEYS.items():
            ElementTree.SubElement(
                root, "key", {"id": name, "for": end, "attr.name": name, "attr.type": kind}
            )
        graph = ElementTree.SubElement(root, "graph", id=self.start.id, edgedefault="directed")
        content = self.as_dict()
        for node in content["nodes"]:
            _add_data(ElementTree.SubElement(graph, "node", id=node["id"]), "node", node)
        for edge in content["edges"]:
            ends = {"source": edge["source"], "target": edge["target"]}
            _add_data(ElementTree.SubElement(graph, "edge", ends), "edge", edge)
        ElementTree.indent(root)
        with atomic_write(path) as part:
            ElementTree.ElementTree(root).write(part, encoding="utf-8", xml_declaration=True)


_GRAPHML_KEYS = {
    "layer": ("node", "int"),
    "kind": ("node", "string"),
    "index": ("node", "int"),
    "group": ("node", "string"),
    "change": ("node", "string"),
    "cosine": ("edge", "double"),
}


def _add_data(element: ElementTree.Element, end: str, values: Mapping[str, Any]) -> None:
    for name, (owner, _) in _GRAPHML_KEYS.items():
        if owner == end and values[name] is not None:
            ElementTree.SubElement(element, "data", key=name).text = str(values[name])
