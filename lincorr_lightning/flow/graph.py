"""Flow graphs as they are found, named and written; `DecoderMatcher` finds them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from torch import Tensor

from lincorr_lightning.io import atomic_write, write_json
from lincorr_lightning.sae.hook_points import KINDS, Feature, HookKind, HookPoint

_SHORT: dict[HookKind, str] = {"residual": "RES", "mlp_out": "MLP", "attention_out": "ATT"}


def _group_name(code: int) -> str:
    names = [_SHORT[kind] for i, kind in enumerate(KINDS) if code >> i & 1]
    return "From " + (" & ".join(names) or "nowhere")


GROUPS: tuple[str, ...] = tuple(_group_name(code) for code in range(2 ** len(KINDS)))
"""Names of the groups by their code: 1 for RES, 2 for MLP, 4 for ATT, added up."""


def group_codes(residual: Tensor, mlp_out: Tensor, attention_out: Tensor) -> Tensor:
    """Groups of a feature by which of its matched predecessors take part.

    Args:
        residual: Whether the residual stream's predecessor does (on data: is active), bool of any
            shape.
        mlp_out: Whether the MLP's does, likewise.
        attention_out: Whether the attention's does, likewise.

    Returns:
        Codes of `GROUPS`, int64 of the same shape.

    Example:
        >>> import torch
        >>> yes, no = torch.tensor([True]), torch.tensor([False])
        >>> GROUPS[group_codes(no, yes, yes)]
        'From MLP & ATT'
    """
    return residual.long() + 2 * mlp_out.long() + 4 * attention_out.long()


@dataclass(frozen=True, order=True)
class Edge:
    """A feature and its matched predecessor.

    Attributes:
        source: The predecessor.
        target: What it becomes or becomes part of.
        cosine: Of their decoders.
    """

    source: Feature
    target: Feature
    cosine: float


@dataclass(frozen=True)
class FlowGraph:
    """What was found from one feature on.

    Attributes:
        start: The feature that was followed.
        edges: Matches above the thresholds, sorted.
        groups: Group of each residual feature whose predecessors were looked for, such as *From RES
            & MLP*. Features at the lowest place there is an SAE for have none, nor have those of
            MLP and attention.
        thresholds: Least cosine of an edge by the kind of its source.
        zero_norm: Decoder columns left out at each place because their norm is zero.
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
        """What happens to a residual feature at its layer.

        Args:
            feature: One of the graph.

        Returns:
            *persistence*: it comes from the residual stream alone; *transformation*: from there and
            from MLP or attention; *birth*: not from the residual stream. None where its
            predecessors were not looked for.
        """
        group = self.groups.get(feature)
        if group is None:
            return None
        code = GROUPS.index(group)
        if not code & 1:
            return "birth"
        return "persistence" if code == 1 else "transformation"

    def as_dict(self) -> dict[str, Any]:
        """The graph as plain data, as `write_json` writes it."""
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

    def write_json(self, path: str | Path) -> None:
        """Write the graph as JSON.

        Raises:
            OutputError: The file cannot be written.
        """
        write_json(path, self.as_dict())

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
            _write_data(ElementTree.SubElement(graph, "node", id=node["id"]), "node", node)
        for edge in content["edges"]:
            ends = {"source": edge["source"], "target": edge["target"]}
            _write_data(ElementTree.SubElement(graph, "edge", ends), "edge", edge)
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


def _write_data(element: ElementTree.Element, end: str, values: Mapping[str, Any]) -> None:
    for name, (of, _) in _GRAPHML_KEYS.items():
        if of == end and values[name] is not None:
            ElementTree.SubElement(element, "data", key=name).text = str(values[name])
