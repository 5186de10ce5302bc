"""Results of the feature-flow study as values and tables.

Imported at the end of a run only, since it takes pandas and matplotlib.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from pandas import DataFrame

from lincorr_lightning.flow import figures
from lincorr_lightning.flow.deactivation import CutEffect
from lincorr_lightning.flow.effects import SCORES, best_steering, summarize_cuts
from lincorr_lightning.flow.graph import GROUP_NAMES, FlowGraph
from lincorr_lightning.flow.relation import RelationCut, RelationFlow
from lincorr_lightning.flow.steering import SteeringPoint
from lincorr_lightning.flow.text_statistics import (
    CosineTest,
    GroupPair,
    TextStatistics,
    compare_cosines,
)
from lincorr_lightning.io import safe_names
from lincorr_lightning.results.results import Figure, Results
from lincorr_lightning.results.table import Table, number, percent, show
from lincorr_lightning.sae.hook_points import KINDS

_SUMMARY = {
    "r": ("r", ".2f"),
    "n": ("cases", ","),
    "matched_success": ("switched off", ".1%"),
    "random_success": ("random control", ".1%"),
    "times_random": ("times random", ".1f"),
    "matched_loss_change": ("change of the loss", ".1%"),
}


def feature_flow_results(
    statistics: TextStatistics,
    cuts: Sequence[CutEffect],
    steering: Sequence[SteeringPoint],
    relation: RelationFlow | None,
    flows: Mapping[str, Sequence[FlowGraph]],
) -> Results:
    """Build the results of the study from all that it measured.

    `flows` are by the id of a feature, or by a pair of answers, as ``Rome->Italy``.
    """
    groups = [layer.summarize() for layer in statistics.groups.values()]
    pairs = [pair for layer in statistics.groups.values() for pair in layer.pairs()]
    tests = compare_cosines(statistics.groups.values())
    effects = Table.of(
        "deactivation",
        cuts,
        CutEffect,
        "Effect of rescaling the predecessors of features, by layer, method and group.",
    )
    points = Table.of("steering", steering, SteeringPoint, "Effect of steering towards an answer.")
    by_method = summarize_cuts(effects.frame, "method")
    by_layer = summarize_cuts(effects.frame, "layer", "method")
    best = best_steering(points.frame)
    edges = Table.of(
        "flow_edges",
        [
            (name, graph.start.id, edge.source.id, edge.target.id, edge.cosine)
            for name, graphs in flows.items()
            for graph in graphs
            for edge in graph.edges
        ],
        ["flow", "start", "source", "target", "cosine"],
        "Flows that are drawn: features, where they come from, and the cosine of both.",
        formats={"cosine": ".2f"},
    )
    tables = [
        _groups_table(groups),
        _summary_table(by_method),
        effects,
        *(() if relation is None else _relation_tables(relation)),
        _steering_table(best, points),
        points,
        edges,
        Table.of("group_pairs", pairs, GroupPair, "Features of a group that are in another, too."),
        Table.of(
            "cosine_tests", tests, CosineTest, "Cosines to predecessors, of two groups' features."
        ),
    ]
    lm = statistics.lm.config.name_or_path
    drawn = []
    if len(effects):
        caption = "Features switched off with their predecessors."
        draw = figures.deactivation_figure
        drawn.append(Figure("deactivation", caption, draw, [effects], {"lm": lm}))
    values = {
        "n_texts": statistics.n_texts,
        "n_tokens": statistics.n_tokens,
        "groups": groups,
        "cosine_tests": [asdict(test) for test in tests],
        "deactivation": _by_key(by_method, "method"),
        "deactivation_layers": _records(by_layer),
        "steering": _by_key(best, "strategy"),
        "relation": None if relation is None else _relation_values(relation),
        "saes": [hook_point.id for hook_point in statistics.activity],
    }
    return Results(
        "feature_flow",
        values,
        _scalars(values),
        tables=[table for table in tables if len(table)],
        figures=[*drawn, *_flow_figures(flows, edges, statistics, lm)],
        verdict=list(_verdict(values)),
    )


def _verdict(values: Mapping[str, Any]) -> Iterator[str]:
    for method, effect in values["deactivation"].items():
        off, control = effect["matched_success"], effect["random_success"]
        if off is not None and control is not None:
            yield (
                f"Features go out with their predecessors by {method} in {percent(off)} of cases, "
                f"with as many other active features in {percent(control)}."
            )
    for strategy, best in values["steering"].items():
        score, other = best["score"], best["control_score"]
        if score is not None and other is not None:
            yield (
                f"Steering by {strategy} scores {show(score, '.2f')} at its best strength, other "
                f"features {show(other, '.2f')}."
            )


def _records(frame: DataFrame) -> list[dict[str, Any]]:
    return frame.astype(object).where(frame.notna(), None).to_dict("records")


def _by_key(frame: DataFrame, key: str) -> dict[str, dict[str, Any]]:
    return {row.pop(key): row for row in _records(frame)}


def _scalars(values: Mapping[str, Any]) -> dict[str, float]:
    scalars = {
        f"auroc/{kind}/layer_{layer['layer']}": auroc
        for layer in values["groups"]
        for kind, auroc in layer["auroc"].items()
    }
    for method, effect in values["deactivation"].items():
        scalars[f"deactivation/{method}/matched"] = effect["matched_success"]
        scalars[f"deactivation/{method}/random"] = effect["random_success"]
    for strategy, best in values["steering"].items():
        for name in ("strength", *SCORES):
            scalars[f"steering/{strategy}/{name}"] = best[name]
    keys = {"r": "fixed", "r_target_only": "target_only", "r_refitted": "refitted"}
    if values["relation"]:
        cuts = DataFrame(values["relation"]["cuts"])
        for (cut, control), draws in cuts.groupby(["cut", "control"], sort=False):
            name = f"{cut}_control" if control else cut
            for key, field in {**keys, "recall": "recall"}.items():
                scalars[f"relation/{key}/{name}"] = number(draws[field].astype(float).mean())
    return {key: value for key, value in scalars.items() if value is not None}


def _groups_table(groups: Sequence[Mapping[str, Any]]) -> Table:
    aurocs = {f"auroc_{kind}": f"AUROC {kind}" for kind in KINDS}
    headings = {"n_activations": "activations", **GROUP_NAMES, **aurocs}
    formats = {**dict.fromkeys(GROUP_NAMES, ".1%"), **dict.fromkeys(aurocs, ".2f")}
    rows = [
        {**layer, **layer["shares"], **{f"auroc_{k}": auroc for k, auroc in layer["auroc"].items()}}
        for layer in groups
    ]
    return Table.of(
        "groups",
        rows,
        ["layer", *headings],
        "Share of activations by the matched predecessors that are active too.",
        "AUROC: how well the cosine to a predecessor predicts that it is active.",
        True,
        headings,
        {"n_activations": ",", **formats},
    )


def _summary_table(effects: DataFrame) -> Table:
    return Table(
        "deactivation_summary",
        effects[["method", *_SUMMARY]],
        "Features switched off when their predecessors are rescaled by r.",
        headline=True,
        headings={key: heading for key, (heading, _) in _SUMMARY.items()},
        formats={key: form for key, (_, form) in _SUMMARY.items()},
    )


def _steering_table(best: DataFrame, points: Table) -> Table:
    return Table(
        "steering_summary",
        best,
        "Best strength of each strategy, by the mean score.",
        "Behaviour: probability of the answer; coherence: perplexity of other texts without "
        "steering by that with steering; score: their product; texts: what the LM writes, "
        "perplexity for the unsteered LM; control: other features.",
        headline=True,
        headings={"n_answers": "answers", **points.headings},
        formats={f"{a}{b}": points.formats[b] for a in ("", "control_") for b in SCORES},
    )


def _relation_values(flow: RelationFlow) -> dict[str, Any]:
    reference = [pair for pair in flow.pairs if pair.is_reference]
    others = [pair for pair in flow.pairs if not pair.is_reference]
    values: dict[str, Any] = {
        "relation": flow.relation.name,
        "n_fit": flow.n_fit,
        "n_test": len(flow.subjects) - flow.n_fit,
        "n_reference_pairs": len(reference),
        "n_other_pairs": len(others),
        "cuts": [asdict(cut) for cut in flow.cuts],
    }
    for suffix, pairs in (("", reference), ("_permuted", others)):
        n = len(pairs)
        carried = Counter(feature.hook_point for pair in pairs for feature in pair.carriers)
        values[f"same_carrier{suffix}"] = {
            at.id: carried[at] / max(n, 1) for at in flow.features["source"] if at != flow.last
        }
        values[f"shared_flow{suffix}"] = sum(bool(p.shared) for p in pairs) / n if n else None
    return values


def _relation_tables(flow: RelationFlow) -> Iterable[Table]:
    texts = {"source": flow.relation.source.texts, "target": flow.relation.target.texts}
    yield Table.of(
        "relation_cuts",
        flow.cuts,
        RelationCut,
        f"Correlation of {flow.relation.name} with features of its answers removed.",
        "Control: other features of the same hook points, as many and about as often "
        "active, a row for each draw.",
        headline=True,
    )
    features = [
        (side, texts[side][label], at.id, best.feature.id, best.auroc)
        for side, by_hook_point in flow.features.items()
        for at, answers in by_hook_point.items()
        for label, best in answers.items()
    ]
    yield Table.of(
        "answer_features",
        features,
        ["side", "label", "hook_point", "feature", "auroc"],
        "Feature of each hook point that best predicts an answer, judged on other subjects.",
        headings={"auroc": "AUROC"},
        formats={"auroc": ".3f"},
    )
    pairs = [
        {
            "source": texts["source"][pair.source],
            "target": texts["target"][pair.target],
            "same_carrier": " ".join(feature.id for feature in pair.carriers),
            "shared_flow": " ".join(feature.id for feature in pair.shared),
        }
        for pair in flow.pairs
        if pair.is_reference
    ]
    yield Table.of(
        "answer_pairs",
        pairs,
        caption="Features that carry both answers of a pair, and features in the flow of both.",
    )


def _flow_figures(
    flows: Mapping[str, Sequence[FlowGraph]], edges: Table, statistics: TextStatistics, lm: str
) -> Iterable[Figure]:
    files = safe_names(flows)
    for name, graphs in flows.items():
        options = {
            "flow": name,
            "starts": [graph.start.id for graph in graphs],
            "names": statistics.names(feature for graph in graphs for feature in graph.features),
            "lm": lm,
        }
        title = figures.flow_title(name)
        yield Figure(f"flow_{files[name]}", f"{title}.", figures.flow_figure, [edges], options)
