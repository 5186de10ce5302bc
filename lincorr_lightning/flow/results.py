"""Results of the feature-flow study as values, tables and figures."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from functools import partial
from pathlib import Path
from typing import Any

from lincorr_lightning.flow import figures
from lincorr_lightning.flow.deactivation import CutEffect, lowest_r, mean_over_cases
from lincorr_lightning.flow.graph import GROUPS, FlowGraph
from lincorr_lightning.flow.groups import LayerGroups
from lincorr_lightning.flow.relation_flow import RelationFlow
from lincorr_lightning.flow.steering import SteeringPoint, mean_steering
from lincorr_lightning.flow.transitions import Transition
from lincorr_lightning.io import safe_names, write_json
from lincorr_lightning.results.results import Figure, Results
from lincorr_lightning.results.table import Column, Table
from lincorr_lightning.sae.hook_points import KINDS, HookPoint


@dataclass(frozen=True)
class DrawnFlow:
    """A flow to draw: the graphs of one feature, or of the features of two answers."""

    name: str
    title: str
    graphs: Sequence[FlowGraph]


@dataclass(frozen=True)
class Measurements:
    """Everything that the study measured."""

    n_texts: int
    n_tokens: int
    groups: Sequence[LayerGroups]
    transitions: Sequence[Transition] = ()
    cuts: Sequence[CutEffect] = ()
    steering: Sequence[SteeringPoint] = ()
    relation: RelationFlow | None = None
    flows: Sequence[DrawnFlow] = ()
    names: Mapping[str, str] = field(default_factory=dict)


def feature_flow_results(
    found: Measurements,
    lm: Mapping[str, Any],
    saes: Iterable[HookPoint],
    settings: Mapping[str, Any],
) -> Results:
    """Build the results of the study."""
    deactivation = summarize_cuts(found.cuts)
    steering = best_steering(found.steering)
    values = {
        "n_texts": found.n_texts,
        "n_tokens": found.n_tokens,
        "groups": [
            {key: value for key, value in asdict(each).items() if key != "histograms"}
            for each in found.groups
        ],
        "transitions": [asdict(each) for each in found.transitions],
        "deactivation": deactivation,
        "deactivation_layers": cuts_by_layer(found.cuts),
        "steering": steering,
        "relation": None if found.relation is None else _relation_values(found.relation),
        "saes": [hook_point.id for hook_point in saes],
    }
    return Results(
        "feature_flow",
        values,
        scalars=_scalars(found, deactivation, steering),
        tables=[table for table in _tables(found, deactivation, steering) if table.rows],
        figures=_figures(found, str(lm["name_or_path"])),
        lm=lm,
        settings=settings,
    )


def write_graphs(flows: Iterable[DrawnFlow], folder: Path) -> None:
    """Write the graph of each start as JSON and GraphML."""
    for graph in {graph.start: graph for flow in flows for graph in flow.graphs}.values():
        write_json(folder / f"{graph.start.id}.json", graph.as_dict())
        graph.write_graphml(folder / f"{graph.start.id}.graphml")


# -- summaries -----------------------------------------------------------------------------------


def summarize_cuts(cuts: Sequence[CutEffect]) -> dict[str, dict[str, Any]]:
    """Return the effect of each method beside its random control, over all layers and groups.

    It is that at the lowest r: predecessors are removed if r = 0 was measured.
    """
    r = lowest_r(cuts)
    at_r = [cut for cut in cuts if (cut.sources, cut.group, cut.r) == ("all", "all", r)]
    found = {}
    for method in dict.fromkeys(cut.method for cut in at_r):
        entry: dict[str, Any] = {"r": r, "n": 0}
        for kind in ("matched", "random"):
            own = [cut for cut in at_r if (cut.method, cut.cut) == (method, kind)]
            entry["n"] = entry["n"] or sum(cut.n for cut in own)
            for name in ("success", "activation_change", "loss_change"):
                entry[f"{kind}_{name}"] = mean_over_cases(own, name)
        random = entry["random_success"]
        entry["times_random"] = entry["matched_success"] / random if random else None
        found[method] = entry
    return found


def cuts_by_layer(cuts: Sequence[CutEffect]) -> list[dict[str, Any]]:
    """Return the effect of each method in each layer, see `summarize_cuts`."""
    return [
        {"layer": layer, "method": method} | entry
        for layer in sorted({cut.layer for cut in cuts})
        for method, entry in summarize_cuts([c for c in cuts if c.layer == layer]).items()
    ]


def best_steering(points: Sequence[SteeringPoint]) -> dict[str, dict[str, Any]]:
    """Return the strength with the highest mean score over the answers, by strategy."""
    best: dict[str, dict[str, Any]] = {}
    for row in mean_steering(points):
        strategy = row.pop("strategy")
        if strategy not in best or row["score"] > best[strategy]["score"]:
            best[strategy] = row
    return best


def _relation_values(found: RelationFlow) -> dict[str, Any]:
    reference = found.reference_pairs
    others = [pair for pair in found.pairs if not pair.is_reference]
    below = [at for at in found.features["source"] if at != found.last]
    values: dict[str, Any] = {
        "relation": found.relation.name,
        "n_fit": found.n_fit,
        "n_test": len(found.subjects) - found.n_fit,
    }
    for suffix, pairs in (("", reference), ("_permuted", others)):
        values[f"same_carrier{suffix}"] = {
            at.id: _share(any(f.hook_point == at for f in pair.carriers) for pair in pairs) or 0.0
            for at in below
        }
        values[f"shared_flow{suffix}"] = _share(bool(pair.shared) for pair in pairs)
    return values | {
        "n_reference_pairs": len(reference),
        "n_other_pairs": len(others),
        "cuts": _cut_rows(found),
    }


def _cut_rows(found: RelationFlow) -> list[dict[str, Any]]:
    return [asdict(cut) for cut in found.cuts]


def _share(values: Iterable[bool]) -> float | None:
    known = list(values)
    return sum(known) / len(known) if known else None


def _scalars(
    found: Measurements,
    deactivation: Mapping[str, Mapping[str, Any]],
    steering: Mapping[str, Mapping[str, Any]],
) -> dict[str, float]:
    scalars: dict[str, float | None] = {}
    for each in found.groups:
        for kind, value in each.auroc.items():
            scalars[f"auroc/{kind}/layer_{each.layer}"] = value
    for method, entry in deactivation.items():
        for kind in ("matched", "random"):
            scalars[f"deactivation/{method}/{kind}"] = entry[f"{kind}_success"]
    for strategy, best in steering.items():
        for name in ("strength", "behaviour", "coherence", "score"):
            scalars[f"steering/{strategy}/{name}"] = best[name]
    for cut in found.relation.cuts if found.relation is not None else ():
        name = cut.cut + ("_control" if cut.control else "")
        scalars[f"relation/r/{name}"] = cut.fixed
        scalars[f"relation/r_target_only/{name}"] = cut.target_only
        scalars[f"relation/r_refitted/{name}"] = cut.refitted
        scalars[f"relation/recall/{name}"] = cut.recall
    return {key: value for key, value in scalars.items() if value is not None}


# -- tables --------------------------------------------------------------------------------------


def _tables(
    found: Measurements,
    deactivation: Mapping[str, Mapping[str, Any]],
    steering: Mapping[str, Mapping[str, Any]],
) -> Iterable[Table]:
    kinds = [kind for kind in KINDS if any(kind in each.auroc for each in found.groups)]
    yield Table.from_dicts(
        "groups",
        (
            {"layer": each.layer, "n_activations": each.n_activations}
            | dict(each.shares)
            | {f"auroc_{kind}": value for kind, value in each.auroc.items()}
            for each in found.groups
        ),
        [
            "layer",
            Column("n_activations", "activations", ","),
            *(Column(group, group, ".1%") for group in GROUPS),
            *(Column(f"auroc_{kind}", f"AUROC {kind}", ".2f") for kind in kinds),
        ],
        caption="Share of activations by the matched predecessors that are active too.",
        note="AUROC: how well the cosine to a predecessor predicts that it is active.",
        headline=True,
    )
    effects = [
        Column("r", "r", ".2f"),
        Column("n", "cases", ","),
        Column("matched_success", "switched off", ".1%"),
        Column("random_success", "random control", ".1%"),
        Column("times_random", "times random", ".1f"),
        Column("matched_loss_change", "change of the loss", ".1%"),
    ]
    yield Table.from_dicts(
        "deactivation_summary",
        ({"method": method} | dict(entry) for method, entry in deactivation.items()),
        ["method", *effects],
        caption="Features switched off when their predecessors are rescaled by r.",
        headline=True,
    )
    yield Table.from_dicts(
        "deactivation_layers",
        cuts_by_layer(found.cuts),
        ["layer", "method", *effects],
        caption="Features of each layer switched off when their predecessors are rescaled by r.",
    )
    yield _table_of(
        "deactivation", CutEffect, found.cuts,
        "Effect of rescaling the predecessors of features, by layer, method and group.",
        {"success": ".1%", "activation_change": ".1%", "loss_change": ".1%"},
    )  # fmt: skip
    if found.relation is not None:
        yield from _relation_tables(found.relation)
    yield Table.from_dicts(
        "steering_summary",
        ({"strategy": strategy} | dict(best) for strategy, best in steering.items()),
        ["strategy", "strength", Column("n_answers", "answers"),
         *(Column(key, "", ".2f") for key in ("behaviour", "coherence", "score"))],
        caption="Strength with the highest mean score of each steering strategy.",
        note="Behaviour: probability of the answer; coherence: perplexity of other texts without "
        "steering by that with steering; score: their product.",
        headline=True,
    )  # fmt: skip
    yield _table_of(
        "steering", SteeringPoint, found.steering,
        "Effect of steering towards each answer, by strategy and strength.",
        dict.fromkeys(("behaviour", "coherence", "score"), ".3f"),
    )  # fmt: skip
    yield _table_of(
        "transitions", Transition, found.transitions,
        "Variance of a residual stream explained by the features of a predecessor.",
        {"explained_variance": ".3f", "own": ".3f"},
    )  # fmt: skip


def _table_of(
    name: str, row_type: type, rows: Sequence[Any], caption: str, formats: Mapping[str, str]
) -> Table:
    keys = [field.name for field in fields(row_type)]
    columns = [Column(key, format=formats.get(key, "")) for key in keys]
    return Table.from_rows(
        name, columns, [[getattr(row, key) for key in keys] for row in rows], caption
    )


def _relation_tables(found: RelationFlow) -> Iterable[Table]:
    source, target = found.relation.source.texts, found.relation.target.texts
    yield Table.from_dicts(
        "relation_cuts",
        _cut_rows(found),
        [
            "cut", "control", Column("n_features", "features"),
            Column("fixed", "r, unchanged map", ".3f"),
            Column("target_only", "r, removed in the target's prompt", ".3f"),
            Column("refitted", "r, refitted map", ".3f"),
            Column("recall", "recall", ".3f"), Column("kept", "answers kept", ".3f"),
        ],
        caption=f"Correlation of {found.relation.name} with features of its answers removed.",
        note="Control: other features of the same hook points, as many and about as often active.",
        headline=True,
    )  # fmt: skip
    yield Table.from_rows(
        "answer_features",
        ["side", "label", "hook_point", "feature", Column("auroc", "AUROC", ".3f")],
        [
            (side, texts[label], at.id, feature.id, float(own.auroc[label]))
            for side, texts in (("source", source), ("target", target))
            for at, own in found.features[side].items()
            for label, feature in own.features.items()
        ],
        "Feature of each hook point that best predicts an answer, judged on other subjects.",
    )
    yield Table.from_rows(
        "answer_pairs",
        ["source", "target", "same_carrier", "shared_flow"],
        [
            (source[pair.source], target[pair.target],
             " ".join(f.id for f in pair.carriers), " ".join(f.id for f in pair.shared))
            for pair in found.reference_pairs
        ],
        "Features that carry both answers of a pair, and features in the flow of both.",
    )  # fmt: skip


# -- figures -------------------------------------------------------------------------------------


def _figures(found: Measurements, lm: str) -> list[Figure]:
    relation = "" if found.relation is None else found.relation.relation.name
    drawn: list[tuple[str, str, Callable[..., Any], Any]] = [
        ("groups", "Share of activations by the matched predecessors that are active too.",
         partial(figures.groups_figure, n_tokens=found.n_tokens), found.groups),
        ("cosines", "Activations of each group by the cosine of their predecessors.",
         figures.cosines_figure, found.groups),
        ("transitions", "Variance that the features of a predecessor explain.",
         figures.transitions_figure, found.transitions),
        ("deactivation", "Features switched off with their predecessors.",
         figures.deactivation_figure, found.cuts),
        ("deactivation_layers", "Features of each layer switched off with their predecessors.",
         figures.layers_figure, found.cuts),
        ("rescaling", "Activations and losses as predecessors are rescaled.",
         figures.rescaling_figure, found.cuts),
        ("steering", "Behaviour, coherence and their product by steering strength.",
         figures.steering_figure, found.steering),
        ("relation", f"{relation} with features of its answers removed.",
         figures.relation_figure, found.relation),
    ]  # fmt: skip
    names = safe_names(flow.name for flow in found.flows)
    flows = [
        Figure(
            f"flow_{names[flow.name]}", f"{flow.title}.",
            partial(figures.flow_figure, flow.graphs, flow.title, found.names, lm),
        )
        for flow in found.flows
    ]  # fmt: skip
    own = [Figure(name, caption, partial(f, data, lm)) for name, caption, f, data in drawn if data]
    return own + flows
