"""Results of the feature-flow study as values, tables and figures."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from lincorr_lightning.flow import figures
from lincorr_lightning.flow.deactivation import EFFECTS, CutEffect, at_lowest_r, case_means
from lincorr_lightning.flow.graph import GROUP_NAMES, FlowGraph
from lincorr_lightning.flow.relation import RelationFlow
from lincorr_lightning.flow.steering import SteeringPoint, mean_steering
from lincorr_lightning.flow.text_statistics import LayerGroups
from lincorr_lightning.flow.transitions import Transition
from lincorr_lightning.io import safe_names, write_json
from lincorr_lightning.results.results import Figure, Results
from lincorr_lightning.results.style import short_name
from lincorr_lightning.results.table import Table, number
from lincorr_lightning.sae.hook_points import KINDS, HookPoint

if TYPE_CHECKING:
    from pandas import DataFrame


Flows = Mapping[str, Sequence[FlowGraph]]
"""The flow graphs of a feature by its id, or of the features of two answers, as ``Rome->Italy``."""


def feature_flow_results(
    *,
    lm_name: str,
    saes: Iterable[HookPoint],
    n_texts: int,
    n_tokens: int,
    groups: Sequence[LayerGroups],
    transitions: Sequence[Transition] = (),
    cuts: Sequence[CutEffect] = (),
    steering: Sequence[SteeringPoint] = (),
    relation: RelationFlow | None = None,
    flows: Flows = MappingProxyType({}),
    names: Mapping[str, str] = MappingProxyType({}),
) -> Results:
    """Build the results of the study from all that it measured; `names` are those of features."""
    tables = [
        _groups_table(groups),
        *_deactivation_tables(cuts),
        *(() if relation is None else _relation_tables(relation)),
        *_steering_tables(steering),
        Table.of(
            "transitions", transitions, Transition,
            "Variance of a residual stream explained by the features of a predecessor.",
        ),
    ]  # fmt: skip
    frames = {table.name: table.frame for table in tables}
    by_method = _by(summarize_cuts(frames["deactivation"], "method"), "method")
    by_strategy = _by(best_steering(frames["steering"]), "strategy")
    values = {
        "n_texts": n_texts,
        "n_tokens": n_tokens,
        "groups": [
            {key: value for key, value in asdict(each).items() if key != "histograms"}
            for each in groups
        ],
        "transitions": [asdict(each) for each in transitions],
        "deactivation": by_method,
        "deactivation_layers": summarize_cuts(frames["deactivation"], "layer", "method"),
        "steering": by_strategy,
        "relation": None if relation is None else _relation_values(relation),
        "saes": [hook_point.id for hook_point in saes],
    }
    lm = short_name(lm_name)
    drawn = _figures(frames, groups, n_tokens, relation, lm)
    files = safe_names(flows)
    for name, graphs in flows.items():
        title = f"Flow of {name.replace('->', ' and ') if '->' in name else f'feature {name}'}"
        draw = partial(figures.flow_figure, graphs, title, names, lm)
        drawn.append(Figure(f"flow_{files[name]}", f"{title}.", draw))
    return Results(
        "feature_flow",
        values,
        scalars=_scalars(groups, relation, by_method, by_strategy),
        tables=[table for table in tables if len(table)],
        figures=drawn,
    )


def write_graphs(flows: Flows, folder: Path) -> None:
    """Write the graph of each start as JSON and GraphML."""
    for graph in {graph.start: graph for graphs in flows.values() for graph in graphs}.values():
        write_json(folder / f"{graph.start.id}.json", graph.as_dict())
        graph.write_graphml(folder / f"{graph.start.id}.graphml")


# -- summaries -----------------------------------------------------------------------------------


def summarize_cuts(cuts: DataFrame, *by: str) -> list[dict[str, Any]]:
    """Return the effect of each method beside its random control, over all groups.

    It is that at the lowest r: predecessors are removed if r = 0 was measured. `by` are the columns
    of `CutEffect` that have a row per value.
    """
    lowest = at_lowest_r(cuts)
    means = case_means(lowest[lowest["group"] == "all"], [*by, "cut"])
    rows = []
    for key, own in means.groupby(list(by), sort=False):
        row: dict[str, Any] = dict(zip(by, key, strict=True))
        row |= {"r": lowest["r"].min(), "n": int(own["n"].iloc[0])}
        for cut in ("matched", "random"):
            effects = own[own["cut"] == cut]
            row |= {f"{cut}_{name}": number(next(iter(effects[name]), None)) for name in EFFECTS}
        random = row["random_success"]
        rows.append(row | {"times_random": row["matched_success"] / random if random else None})
    return rows


def best_steering(points: DataFrame) -> list[dict[str, Any]]:
    """Return the strength with the highest mean score over the answers, a row per strategy."""
    means = mean_steering(points)
    best = means.loc[means.groupby("strategy", sort=False)["score"].idxmax()]
    rows: list[Any] = best[_STEERING_COLUMNS].to_dict("records")
    return rows


def _by(rows: Iterable[Mapping[str, Any]], key: str) -> dict[str, dict[str, Any]]:
    return {row[key]: {name: row[name] for name in row if name != key} for row in rows}


def _relation_values(flow: RelationFlow) -> dict[str, Any]:
    reference = [pair for pair in flow.pairs if pair.is_reference]
    others = [pair for pair in flow.pairs if not pair.is_reference]
    values: dict[str, Any] = {
        "relation": flow.relation.name, "n_fit": flow.n_fit,
        "n_test": len(flow.subjects) - flow.n_fit,
    }  # fmt: skip
    for suffix, pairs in (("", reference), ("_permuted", others)):
        n = len(pairs)
        carried = Counter(feature.hook_point for pair in pairs for feature in pair.carriers)
        values[f"same_carrier{suffix}"] = {
            at.id: carried[at] / max(n, 1) for at in flow.features["source"] if at != flow.last
        }
        values[f"shared_flow{suffix}"] = sum(bool(p.shared) for p in pairs) / n if n else None
    return values | {
        "n_reference_pairs": len(reference),
        "n_other_pairs": len(others),
        "cuts": [asdict(cut) for cut in flow.cuts],
    }


def _scalars(
    groups: Sequence[LayerGroups],
    relation: RelationFlow | None,
    by_method: Mapping[str, Mapping[str, Any]],
    by_strategy: Mapping[str, Mapping[str, Any]],
) -> dict[str, float]:
    scalars: dict[str, float | None] = {}
    for each in groups:
        for kind, value in each.auroc.items():
            scalars[f"auroc/{kind}/layer_{each.layer}"] = value
    for method, entry in by_method.items():
        for cut in ("matched", "random"):
            scalars[f"deactivation/{method}/{cut}"] = entry[f"{cut}_success"]
    for strategy, best in by_strategy.items():
        for name in ("strength", "behaviour", "coherence", "score"):
            scalars[f"steering/{strategy}/{name}"] = best[name]
    keys = {"r": "fixed", "r_target_only": "target_only", "r_refitted": "refitted",
            "recall": "recall"}  # fmt: skip
    for row in () if relation is None else relation.cuts:
        name = row.cut + ("_control" if row.control else "")
        scalars |= {f"relation/{key}/{name}": getattr(row, one) for key, one in keys.items()}
    return {key: value for key, value in scalars.items() if value is not None}


# -- tables --------------------------------------------------------------------------------------

_STEERING_COLUMNS = ["strategy", "strength", "n_answers", "behaviour", "coherence", "score"]
_SUMMARY = {
    "r": ("r", ".2f"), "n": ("cases", ","), "matched_success": ("switched off", ".1%"),
    "random_success": ("random control", ".1%"), "times_random": ("times random", ".1f"),
    "matched_loss_change": ("change of the loss", ".1%"),
}  # fmt: skip


def _groups_table(groups: Sequence[LayerGroups]) -> Table:
    aurocs = [kind for kind in KINDS if any(kind in each.auroc for each in groups)]
    headings = {"n_activations": "activations", **GROUP_NAMES}
    headings |= {f"auroc_{kind}": f"AUROC {kind}" for kind in aurocs}
    formats = {"n_activations": ","} | dict.fromkeys(GROUP_NAMES, ".1%")
    rows: list[dict[str, Any]] = [
        {"layer": each.layer, "n_activations": each.n_activations, **each.shares} for each in groups
    ]
    for row, each in zip(rows, groups, strict=True):
        row |= {f"auroc_{kind}": value for kind, value in each.auroc.items()}
    return Table.of(
        "groups", rows, ["layer", *headings],
        "Share of activations by the matched predecessors that are active too.",
        "AUROC: how well the cosine to a predecessor predicts that it is active.", headline=True,
        headings=headings, formats=formats | {f"auroc_{kind}": ".2f" for kind in aurocs},
    )  # fmt: skip


def _deactivation_tables(cuts: Sequence[CutEffect]) -> list[Table]:
    every = Table.of(
        "deactivation", cuts, CutEffect,
        "Effect of rescaling the predecessors of features, by layer, method and group.",
    )  # fmt: skip
    parts = {
        "deactivation_summary": (["method"], "Features"),
        "deactivation_layers": (["layer", "method"], "Features of each layer"),
    }
    summaries = [
        Table.of(
            name, summarize_cuts(every.frame, *by), [*by, *_SUMMARY],
            f"{what} switched off when their predecessors are rescaled by r.",
            headline=len(by) == 1, headings={key: head for key, (head, _) in _SUMMARY.items()},
            formats={key: form for key, (_, form) in _SUMMARY.items()},
        )
        for name, (by, what) in parts.items()
    ]  # fmt: skip
    return [*summaries, every]


def _steering_tables(points: Sequence[SteeringPoint]) -> list[Table]:
    every = Table.of(
        "steering", points, SteeringPoint,
        "Effect of steering towards each answer, by strategy and strength.",
    )  # fmt: skip
    summary = Table.of(
        "steering_summary", best_steering(every.frame), _STEERING_COLUMNS,
        "Strength with the highest mean score of each steering strategy.",
        "Behaviour: probability of the answer; coherence: perplexity of other texts without "
        "steering by that with steering; score: their product.",
        headline=True, headings={"n_answers": "answers"},
        formats=dict.fromkeys(("behaviour", "coherence", "score"), ".2f"),
    )  # fmt: skip
    return [summary, every]


def _relation_tables(flow: RelationFlow) -> Iterable[Table]:
    source, target = flow.relation.source.texts, flow.relation.target.texts
    yield Table.of(
        "relation_cuts", flow.cuts,
        caption=f"Correlation of {flow.relation.name} with features of its answers removed.",
        note="Control: other features of the same hook points, as many and about as often active.",
        headline=True,
    )  # fmt: skip
    yield Table.of(
        "answer_features",
        [
            (side, texts[label], at.id, one.feature.id, one.auroc)
            for side, texts in (("source", source), ("target", target))
            for at, answers in flow.features[side].items()
            for label, one in answers.items()
        ],
        ["side", "label", "hook_point", "feature", "auroc"],
        "Feature of each hook point that best predicts an answer, judged on other subjects.",
        headings={"auroc": "AUROC"}, formats={"auroc": ".3f"},
    )  # fmt: skip
    yield Table.of(
        "answer_pairs",
        [
            (source[pair.source], target[pair.target],
             " ".join(f.id for f in pair.carriers), " ".join(f.id for f in pair.shared))
            for pair in flow.pairs
            if pair.is_reference
        ],
        ["source", "target", "same_carrier", "shared_flow"],
        "Features that carry both answers of a pair, and features in the flow of both.",
    )  # fmt: skip


# -- figures -------------------------------------------------------------------------------------


def _figures(
    frames: Mapping[str, DataFrame],
    groups: Sequence[LayerGroups],
    n_tokens: int,
    relation: RelationFlow | None,
    lm: str,
) -> list[Figure]:
    cuts = frames["deactivation"]
    drawn: list[tuple[str, str, Any, Any]] = [
        ("groups", "Share of activations by the matched predecessors that are active too.",
         partial(figures.groups_figure, n_tokens=n_tokens), groups),
        ("cosines", "Activations of each group by the cosine of their predecessors.",
         figures.cosines_figure, groups),
        ("transitions", "Variance that the features of a predecessor explain.",
         figures.transitions_figure, frames["transitions"]),
        ("deactivation", "Features switched off with their predecessors.",
         figures.deactivation_figure, cuts),
        ("deactivation_layers", "Features of each layer switched off with their predecessors.",
         figures.layers_figure, cuts),
        ("rescaling", "Activations and losses as predecessors are rescaled.",
         figures.rescaling_figure, cuts),
        ("steering", "Behaviour, coherence and their product by steering strength.",
         figures.steering_figure, frames["steering"]),
    ]  # fmt: skip
    if relation is not None:
        name, n_subjects = relation.relation.name, len(relation.subjects) - relation.n_fit
        draw = partial(figures.relation_figure, name=name, n_subjects=n_subjects)
        caption = f"{name} with features of its answers removed."
        drawn.append(("relation", caption, draw, frames["relation_cuts"]))
    return [Figure(name, caption, partial(f, d, lm)) for name, caption, f, d in drawn if len(d)]
