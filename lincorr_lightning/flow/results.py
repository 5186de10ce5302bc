"""Numbers and tables of the feature flow; its figures are in `feature_flow_figures`."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lincorr_lightning.io import safe_names, write_csv
from lincorr_lightning.results.base import Drawings, Pictured
from lincorr_lightning.results.loggers import tensorboard_writers
from lincorr_lightning.results.style import short_name
from lincorr_lightning.results.tables import markdown_table

if TYPE_CHECKING:
    import lightning as L
    from matplotlib.figure import Figure

    from lincorr_lightning.flow.graph import FlowGraph


@dataclass(frozen=True)
class LayerGroups:
    """Where the features of one residual stream come from, on texts.

    Attributes:
        layer: Counted from 0.
        n_activations: Of features, at all tokens.
        shares: Group -> its share of them.
        auroc: HookKind of predecessor -> how well the cosine tells whether it is active too.
        histograms: HookKind -> group -> activations by cosine, bins of equal width from 0 to 1.
        joint: HookKind -> share of activations at which the predecessor is active too, by cosine; None
            for an empty bin.
        zero_norm: HookPoint, this one and the predecessors' -> features left out because their decoder
            is zero.
    """

    layer: int
    n_activations: int
    shares: Mapping[str, float]
    auroc: Mapping[str, float | None]
    histograms: Mapping[str, Mapping[str, Sequence[int]]]
    joint: Mapping[str, Sequence[float | None]]
    zero_norm: Mapping[str, int]


@dataclass(frozen=True)
class Transition:
    """How much of a place's activations one SAE's features explain when carried to another's.

    Attributes:
        source: HookPoint of the features.
        target: HookPoint they are carried to.
        kind: HookKind of the source.
        compared: ``decoder`` or ``encoder``: the weights whose cosines match features.
        k: Sources of each target.
        explained_variance: Of the target's activations; None where they never change.
        own: What the target's SAE itself explains.
    """

    source: str
    target: str
    kind: str
    compared: str
    k: int
    explained_variance: float | None
    own: float | None


@dataclass(frozen=True)
class CutEffect:
    """What rescaling predecessors does to features, on some cases.

    Attributes:
        layer: Of the features' residual stream.
        method: How predecessors are chosen.
        cut: ``matched``, or ``random``: as many other active features of the same places.
        sources: Kinds of the predecessors that are rescaled, or ``all``.
        r: What is left of them.
        group: Group of the cases, or ``all``.
        n: Cases.
        success: Share that is switched off.
        activation_change: Mean relative change.
        loss_change: Relative change of the loss after the token; None where nothing follows.
    """

    layer: int
    method: str
    cut: str
    sources: str
    r: float
    group: str
    n: int
    success: float
    activation_change: float
    loss_change: float | None


@dataclass(frozen=True)
class SteeringPoint:
    """What steering towards one answer at one strength does.

    Attributes:
        label: The answer.
        feature: The feature that is steered with.
        strategy: How strength falls along the flow.
        strength: 1 adds a typical activation.
        n_features: How many take part.
        behaviour: Probability of the answer.
        coherence: Perplexity of other texts before by after, at most 1.
        score: Their product.
    """

    label: str
    feature: str
    strategy: str
    strength: float
    n_features: int
    behaviour: float
    coherence: float
    score: float


@dataclass(frozen=True)
class RelationFlow:
    """What the features of a relation's answers have to do with each other.

    Attributes:
        relation: As ``city->country``.
        n_fit: Subjects that features and maps are chosen on.
        n_test: Subjects that judge them.
        answers: A row for each label and place: ``side``, ``label``, ``place``, ``feature``,
            ``auroc``.
        ties: A row for each pair of labels that belongs together: what they share.
        same_carrier: HookPoint -> share of right pairs with one feature for both.
        same_carrier_permuted: The same of pairs that do not belong together.
        shared_flow: Share of right pairs whose flows meet.
        shared_flow_permuted: The same of the others.
        n_right: Pairs of labels that belong together.
        n_wrong: The others.
        cuts: A row for each cut: ``cut``, ``control``, ``n_features``, ``fixed``, ``target_only``,
            ``refitted``, ``recall``, ``kept``.
    """

    relation: str
    n_fit: int
    n_test: int
    answers: Sequence[Mapping[str, Any]]
    ties: Sequence[Mapping[str, Any]]
    same_carrier: Mapping[str, float]
    same_carrier_permuted: Mapping[str, float]
    shared_flow: float | None
    shared_flow_permuted: float | None
    n_right: int
    n_wrong: int
    cuts: Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class DrawnFlow:
    """A flow to be drawn: the graphs of one feature, or of two that are tied.

    Attributes:
        name: Of the files.
        title: Of the figure.
        graphs: Each from its own start.
    """

    name: str
    title: str
    graphs: Sequence[FlowGraph]


@dataclass(frozen=True)
class FeatureFlowReport(Pictured):
    """Everything a run of the feature flow found.

    Attributes:
        lm: Name of the LM.
        n_texts: Texts that groups were counted on.
        n_tokens: Their tokens.
        groups: By layer.
        transitions: Of each pair of places, k and weights.
        cuts: Effects of deactivation and rescaling.
        steering: Points of each answer, strategy and strength.
        relation: Of the relation, if there is one.
        flows: Graphs.
        names: Feature -> what to call it, for those of the graphs.
    """

    lm: str
    n_texts: int
    n_tokens: int
    groups: Sequence[LayerGroups]
    transitions: Sequence[Transition] = ()
    cuts: Sequence[CutEffect] = ()
    steering: Sequence[SteeringPoint] = ()
    relation: RelationFlow | None = None
    flows: Sequence[DrawnFlow] = ()
    names: Mapping[str, str] = field(default_factory=dict)

    def results(self) -> dict[str, Any]:
        """For ``results.json``."""
        return {
            "study": "feature_flow",
            "lm": self.lm,
            "n_texts": self.n_texts,
            "n_tokens": self.n_tokens,
            "groups": [
                {
                    "layer": each.layer,
                    "n_activations": each.n_activations,
                    "shares": dict(each.shares),
                    "auroc": dict(each.auroc),
                    "zero_norm": dict(each.zero_norm),
                }
                for each in self.groups
            ],
            "transitions": [asdict(each) for each in self.transitions],
            "deactivation": self.deactivation(),
            "steering": self.best_steering(),
            "relation": self._relation(),
        }

    def _relation(self) -> dict[str, Any] | None:
        if self.relation is None:
            return None
        content = asdict(self.relation)
        del content["answers"], content["ties"]
        return content

    def deactivation(self) -> dict[str, Any]:
        """Success of each method beside its control, all layers and groups together.

        Where least is left of the predecessors: at r = 0 if that was tried.
        """
        found = {}
        r = self.least_r
        for method in dict.fromkeys(cut.method for cut in self.cuts):
            rows = {
                cut: [
                    row
                    for row in self.cuts
                    if (row.method, row.cut, row.sources, row.group, row.r)
                    == (method, cut, "all", "all", r)
                ]
                for cut in ("matched", "random")
            }
            if not rows["matched"]:
                continue
            entry: dict[str, Any] = {"r": r, "n": sum(row.n for row in rows["matched"])}
            for cut, own in rows.items():
                for name in ("success", "activation_change", "loss_change"):
                    entry[f"{cut}_{name}"] = _mean(own, name)
            matched, random = entry["matched_success"], entry["random_success"]
            entry["times_random"] = matched / random if random else None
            found[method] = entry
        return found

    @property
    def least_r(self) -> float:
        """The least that was left of all predecessors; 0 removes them."""
        return min((cut.r for cut in self.cuts if cut.sources == "all"), default=0.0)

    def mean_steering(self) -> list[dict[str, Any]]:
        """Means over the answers, of each strategy and strength."""
        keys = dict.fromkeys((p.strategy, p.strength) for p in self.steering)
        rows = []
        for strategy, strength in keys:
            own = [p for p in self.steering if (p.strategy, p.strength) == (strategy, strength)]
            rows.append(
                {"strategy": strategy, "strength": strength, "n_answers": len(own)}
                | {
                    name: sum(getattr(p, name) for p in own) / len(own)
                    for name in ("behaviour", "coherence", "score")
                }
            )
        return rows

    def best_steering(self) -> dict[str, Any]:
        """Strength with the highest mean score of each strategy."""
        best: dict[str, Any] = {}
        for row in self.mean_steering():
            known = best.get(row["strategy"])
            if known is None or row["score"] > known["score"]:
                best[row["strategy"]] = {k: v for k, v in row.items() if k != "strategy"}
        return best

    # -- files -----------------------------------------------------------------------------------

    def write(self, folder: Path) -> None:
        """Write tables, graphs and figures.

        Args:
            folder: The run's.

        Raises:
            OutputError: It cannot be written.
        """
        tables: dict[str, Sequence[Mapping[str, Any]]] = {
            "groups": [
                {"layer": each.layer, "n_activations": each.n_activations}
                | dict(each.shares)
                | {f"auroc_{kind}": each.auroc.get(kind) for kind in _kinds(self.groups)}
                for each in self.groups
            ],
            "transitions": [asdict(each) for each in self.transitions],
            "deactivation": [asdict(each) for each in self.cuts],
            "steering": [asdict(each) for each in self.steering],
        }
        if self.relation is not None:
            tables["answer_features"] = self.relation.answers
            tables["ties"] = self.relation.ties
            tables["relation_cuts"] = self.relation.cuts
        for name, rows in tables.items():
            if rows:
                path = folder / "tables" / f"{name}.csv"
                write_csv(path, list(rows[0]), (list(row.values()) for row in rows))
        graphs = {graph.start.id: graph for flow in self.flows for graph in flow.graphs}
        for name, graph in graphs.items():
            graph.write_json(folder / "graphs" / f"{name}.json")
            graph.write_graphml(folder / "graphs" / f"{name}.graphml")
        self.write_pictures(folder)

    def drawings(self) -> Drawings:
        """Every figure there are numbers for, by its file name without suffix."""
        from lincorr_lightning.flow import figures as draw
        from lincorr_lightning.flow.graph_figure import flow_graph_figure

        drawings: dict[str, Callable[[], Figure]] = {
            "groups": partial(draw.groups_figure, self),
            "cosines": partial(draw.cosines_figure, self),
            "joint_activation": partial(draw.joint_activation_figure, self),
        }
        if self.transitions:
            drawings["transitions"] = partial(draw.transitions_figure, self)
        if self.cuts:
            drawings["deactivation"] = partial(draw.deactivation_figure, self)
            drawings["rescaling"] = partial(draw.rescaling_figure, self)
        if self.steering:
            drawings["steering"] = partial(draw.steering_figure, self)
        if self.relation is not None and self.relation.cuts:
            drawings["relation"] = partial(draw.relation_figure, self.relation, self.lm)
        names = safe_names(flow.name for flow in self.flows)
        features = f"features of {short_name(self.lm)}"
        for flow in self.flows:
            drawings[f"flow_{names[flow.name]}"] = partial(
                flow_graph_figure, flow.graphs, flow.title, self.names, features
            )
        return drawings

    def show(self, trainer: L.Trainer) -> None:
        """Add scalars, tables and figures to TensorBoard.

        Args:
            trainer: The run's trainer.
        """
        for writer in tensorboard_writers(trainer):
            for tag, value in self.scalars().items():
                writer.add_scalar(tag, value, 0)  # type: ignore[no-untyped-call]
            writer.add_text("groups", self.markdown(), 0)  # type: ignore[no-untyped-call]
        self.show_pictures(trainer)

    def scalars(self) -> dict[str, float]:
        """What TensorBoard can set beside another run, by tag; what is not known is left out."""
        found: dict[str, float | None] = {}
        for each in self.groups:
            for kind, value in each.auroc.items():
                found[f"auroc/{kind}/layer_{each.layer}"] = value
        for method, entry in self.deactivation().items():
            for cut in ("matched", "random"):
                found[f"deactivation/{method}/{cut}"] = entry[f"{cut}_success"]
        for strategy, best in self.best_steering().items():
            for name in ("strength", "behaviour", "coherence", "score"):
                found[f"steering/{strategy}/{name}"] = best[name]
        for row in self.relation.cuts if self.relation is not None else ():
            cut = row["cut"] + ("_control" if row["control"] else "")
            found[f"relation/r/{cut}"] = row["fixed"]
            found[f"relation/r_target_only/{cut}"] = row["target_only"]
            found[f"relation/r_refitted/{cut}"] = row["refitted"]
            found[f"relation/recall/{cut}"] = row["recall"]
        return {tag: value for tag, value in found.items() if value is not None}

    def markdown(self) -> str:
        """Shares of the groups by layer."""
        groups = [g for g in self.groups[0].shares if any(e.shares.get(g) for e in self.groups)]
        return markdown_table(
            ("layer", *groups),
            [(each.layer, *(each.shares.get(group) for group in groups)) for each in self.groups],
        )


def _kinds(groups: Sequence[LayerGroups]) -> list[str]:
    return list(dict.fromkeys(kind for each in groups for kind in each.auroc))


def _mean(rows: Sequence[CutEffect], name: str) -> float | None:
    """Over the cases of all layers."""
    known = [(row.n, getattr(row, name)) for row in rows if getattr(row, name) is not None]
    total = sum(n for n, _ in known)
    value = sum(n * v for n, v in known) / total if total else math.nan
    return value if math.isfinite(value) else None
