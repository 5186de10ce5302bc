"""Results of the feature-flow study as values, tables and figures."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from itertools import product
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from lincorr_lightning.flow import figures
from lincorr_lightning.flow.deactivation import CutEffect, compare_cuts
from lincorr_lightning.flow.graph import GROUP_NAMES, FlowGraph
from lincorr_lightning.flow.relation import RelationFlow
from lincorr_lightning.flow.steering import SteeringPoint, mean_steering
from lincorr_lightning.flow.text_statistics import Transition
from lincorr_lightning.io import safe_names, write_json
from lincorr_lightning.results.results import Figure, Results
from lincorr_lightning.results.table import Table, short_name
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
    groups: Sequence[Mapping[str, Any]],
    transitions: Sequence[Transition] = (),
    cuts: Sequence[CutEffect] = (),
    steering: Sequence[SteeringPoint] = (),
    relation: RelationFlow | None = None,
    flows: Flows = MappingProxyType({}),
    names: Mapping[str, str] = MappingProxyType({}),
) -> Results:
    """Build the results of the study from all that it measured.

    `groups` are those of `FeatureGroups`; `names` are those of features.
    """
    effects = Table.of(
        "deactivation", cuts, CutEffect,
        "Effect of rescaling the predecessors of features, by layer, method and group.",
    )  # fmt: skip
    points = Table.of(
        "steering", steering, SteeringPoint,
        "Effect of steering towards each answer, by strategy and strength.",
    )  # fmt: skip
    by_method = summarize_cuts(effects.frame, "method")
    by_layer = summarize_cuts(effects.frame, "layer", "method")
    best = best_steering(points.frame)
    explained = "Variance of a residual stream explained by the features of a predecessor."
    tables = [
        _groups_table(groups),
        _summary_table("summary", ["method"], "Features", by_method),
        _summary_table("layers", ["layer", "method"], "Features of each layer", by_layer),
        effects,
        *(() if relation is None else _relation_tables(relation)),
        _steering_table(best),
        points,
        Table.of("transitions", transitions, Transition, explained),
    ]
    lm = short_name(lm_name)
    frames = {table.name: table.frame for table in tables}
    return Results(
        "feature_flow",
        {
            "n_texts": n_texts,
            "n_tokens": n_tokens,
            "groups": groups,
            "transitions": [asdict(each) for each in transitions],
            "deactivation": _plain(by_method).set_index("method").to_dict("index"),
            "deactivation_layers": _plain(by_layer).to_dict("records"),
            "steering": best.set_index("strategy").to_dict("index"),
            "relation": None if relation is None else _relation_values(relation),
            "saes": [hook_point.id for hook_point in saes],
        },
        _scalars(groups, by_method, best, relation),
        tables=[table for table in tables if len(table)],
        figures=[
            *_figures(frames, n_tokens, relation, lm),
            *_flow_figures(flows, names, lm),
        ],
    )


def write_graphs(flows: Flows, folder: Path) -> None:
    """Write the graph of each start as JSON and GraphML."""
    for graph in {graph.start: graph for graphs in flows.values() for graph in graphs}.values():
        write_json(folder / f"{graph.start.id}.json", graph.as_dict())
        graph.write_graphml(folder / f"{graph.start.id}.graphml")


# -- summaries -----------------------------------------------------------------------------------


def summarize_cuts(cuts: DataFrame, *by: str) -> DataFrame:
    """Return the effect of each method beside its random control, over all groups.

    It is that at the lowest r: predecessors are removed if r = 0 was measured. `by` are the columns
    of `CutEffect` that have a row per value.
    """
    effects = compare_cuts(cuts[cuts["group"] == "all"], *by)
    random = effects["random_success"].astype(float)
    return effects.assign(times_random=effects["matched_success"] / random.where(random > 0))


def best_steering(points: DataFrame) -> DataFrame:
    """Return the strength with the highest mean score over the answers, a row per strategy."""
    means = mean_steering(points)
    return means.loc[means.groupby("strategy", sort=False)["score"].idxmax(), _STEERING_COLUMNS]


def _plain(frame: DataFrame) -> DataFrame:
    """Return a table for JSON, which has no NaN."""
    return frame.astype(object).where(frame.notna(), None)


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
    groups: Sequence[Mapping[str, Any]],
    by_method: DataFrame,
    best: DataFrame,
    relation: RelationFlow | None,
) -> dict[str, float]:
    scalars: dict[str, float | None] = {
        f"auroc/{kind}/layer_{each['layer']}": value
        for each in groups for kind, value in each["auroc"].items()
    }  # fmt: skip
    for row, kind in product(_plain(by_method).to_dict("records"), ("matched", "random")):
        scalars[f"deactivation/{row['method']}/{kind}"] = row[f"{kind}_success"]
    for row, name in product(
        best.to_dict("records"), ("strength", "behaviour", "coherence", "score")
    ):
        scalars[f"steering/{row['strategy']}/{name}"] = row[name]
    keys = {"r": "fixed", "r_target_only": "target_only", "r_refitted": "refitted",
            "recall": "recall"}  # fmt: skip
    for cut in () if relation is None else relation.cuts:
        name = cut.cut + ("_control" if cut.control else "")
        scalars |= {f"relation/{key}/{name}": getattr(cut, field) for key, field in keys.items()}
    return {key: value for key, value in scalars.items() if value is not None}


# -- tables --------------------------------------------------------------------------------------

_STEERING_COLUMNS = ["strategy", "strength", "n_answers", "behaviour", "coherence", "score"]
_SUMMARY = {
    "r": ("r", ".2f"), "n": ("cases", ","), "matched_success": ("switched off", ".1%"),
    "random_success": ("random control", ".1%"), "times_random": ("times random", ".1f"),
    "matched_loss_change": ("change of the loss", ".1%"),
}  # fmt: skip


def _groups_table(groups: Sequence[Mapping[str, Any]]) -> Table:
    aurocs = {kind: f"auroc_{kind}" for kind in KINDS if any(kind in g["auroc"] for g in groups)}
    headings = {"n_activations": "activations", **GROUP_NAMES}
    headings |= {name: f"AUROC {kind}" for kind, name in aurocs.items()}
    formats = {"n_activations": ","} | dict.fromkeys(GROUP_NAMES, ".1%")
    rows = [
        {**each, **each["shares"], **{aurocs[kind]: value for kind, value in each["auroc"].items()}}
        for each in groups
    ]
    return Table.of(
        "groups", rows, ["layer", *headings],
        "Share of activations by the matched predecessors that are active too.",
        "AUROC: how well the cosine to a predecessor predicts that it is active.", headline=True,
        headings=headings, formats=formats | dict.fromkeys(aurocs.values(), ".2f"),
    )  # fmt: skip


def _summary_table(name: str, by: Sequence[str], features: str, effects: DataFrame) -> Table:
    return Table(
        f"deactivation_{name}", effects[[*by, *_SUMMARY]],
        f"{features} switched off when their predecessors are rescaled by r.",
        headline=len(by) == 1, headings={key: head for key, (head, _) in _SUMMARY.items()},
        formats={key: form for key, (_, form) in _SUMMARY.items()},
    )  # fmt: skip


def _steering_table(best: DataFrame) -> Table:
    return Table(
        "steering_summary", best,
        "Strength with the highest mean score of each steering strategy.",
        "Behaviour: probability of the answer; coherence: perplexity of other texts without "
        "steering by that with steering; score: their product.",
        headline=True, headings={"n_answers": "answers"},
        formats=dict.fromkeys(("behaviour", "coherence", "score"), ".2f"),
    )  # fmt: skip


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
            (side, texts[label], at.id, best.feature.id, best.auroc)
            for side, texts in (("source", source), ("target", target))
            for at, answers in flow.features[side].items()
            for label, best in answers.items()
        ],
        ["side", "label", "hook_point", "feature", "auroc"],
        "Feature of each hook point that best predicts an answer, judged on other subjects.",
        headings={"auroc": "AUROC"}, formats={"auroc": ".3f"},
    )  # fmt: skip
    yield Table.of(
        "answer_pairs",
        [
            (source[pair.source], target[pair.target],
             *(" ".join(f.id for f in features) for features in (pair.carriers, pair.shared)))
            for pair in flow.pairs
            if pair.is_reference
        ],
        ["source", "target", "same_carrier", "shared_flow"],
        "Features that carry both answers of a pair, and features in the flow of both.",
    )  # fmt: skip


# -- figures -------------------------------------------------------------------------------------


def _figures(
    frames: Mapping[str, DataFrame],
    n_tokens: int,
    relation: RelationFlow | None,
    lm: str,
) -> Iterable[Figure]:
    drawn: dict[str, tuple[str, str, Any]] = {
        "groups": ("groups", "Share of activations by the matched predecessors that are active "
                   "too.", partial(figures.groups_figure, n_tokens=n_tokens)),
        "transitions": ("transitions", "Variance that the features of a predecessor explain.",
                        figures.transitions_figure),
        "deactivation": ("deactivation", "Features switched off with their predecessors.",
                         figures.deactivation_figure),
        "rescaling": ("deactivation", "Activations and losses as predecessors are rescaled.",
                      figures.rescaling_figure),
        "steering": ("steering", "Behaviour, coherence and their product by steering strength.",
                     figures.steering_figure),
    }  # fmt: skip
    if relation is not None:
        name, n_subjects = relation.relation.name, len(relation.subjects) - relation.n_fit
        draw = partial(figures.relation_figure, name=name, n_subjects=n_subjects)
        caption = f"{name} with features of its answers removed."
        drawn["relation"] = "relation_cuts", caption, draw
    for name, (table, caption, draw) in drawn.items():
        if len(frames[table]):
            yield Figure(name, caption, partial(draw, frames[table], lm))


def _flow_figures(flows: Flows, names: Mapping[str, str], lm: str) -> Iterable[Figure]:
    files = safe_names(flows)
    for name, graphs in flows.items():
        title = f"Flow of {name.replace('->', ' and ') if '->' in name else f'feature {name}'}"
        draw = partial(figures.flow_figure, graphs, title, names, lm)
        yield Figure(f"flow_{files[name]}", f"{title}.", draw)
