"""Results of the feature-flow study as values, tables and figures.

Imported at the end of a run only, since it takes pandas and matplotlib.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from itertools import product
from pathlib import Path
from types import MappingProxyType
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure as MatplotlibFigure
from pandas import DataFrame, concat

from lincorr_lightning.errors import listed
from lincorr_lightning.flow.deactivation import EFFECTS, CutEffect
from lincorr_lightning.flow.graph import GROUP_NAMES, GROUPS, SHORT, Edge, FlowGraph
from lincorr_lightning.flow.relation import N_CONTROLS, RelationCut, RelationFlow
from lincorr_lightning.flow.steering import SteeringPoint
from lincorr_lightning.flow.text_statistics import TextStatistics, Transition, compare_cosines
from lincorr_lightning.io import safe_names, write_json
from lincorr_lightning.results import plots
from lincorr_lightning.results.plots import BLUE, GREEN, GREY, INK, ORANGE, PALE
from lincorr_lightning.results.results import Figure, Results
from lincorr_lightning.results.table import Table, columns_of, short_name
from lincorr_lightning.sae.hook_points import KINDS, Feature, HookKind, HookPoint

Flows = Mapping[str, Sequence[FlowGraph]]
"""The flow graphs of a feature by its id, or of the features of two answers, as ``Rome->Italy``."""


def feature_flow_results(
    lm_name: str,
    saes: Iterable[HookPoint],
    statistics: TextStatistics,
    transitions: Sequence[Transition] = (),
    cuts: Sequence[CutEffect] = (),
    steering: Sequence[SteeringPoint] = (),
    relation: RelationFlow | None = None,
    flows: Flows = MappingProxyType({}),
) -> Results:
    """Build the results of the study from all that it measured."""
    groups = [each.summarize() for each in statistics.groups.values()]
    pairs = [{"layer": one["layer"], **pair} for one in groups for pair in one["pairs"]]
    tests = compare_cosines(statistics.groups.values())
    drawn = {f for graphs in flows.values() for graph in graphs for f in graph.features}
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
    tables = [
        _groups_table(groups),
        _summary_table("summary", ["method"], "Features", by_method),
        _summary_table("layers", ["layer", "method"], "Features of each layer", by_layer),
        effects,
        *(() if relation is None else _relation_tables(relation)),
        Table(
            "steering_summary",
            best,
            "Best strength of each strategy, by the mean score.",
            "Behaviour: probability of the answer; coherence: perplexity of other texts without "
            "steering by that with steering; score: their product; texts: what the LM writes, "
            "perplexity for the unsteered LM; control: other features.",
            headline=True,
            headings={"n_answers": "answers", **points.headings},
            formats={f"{a}{b}": form for a in ("", "control_") for b, form in _MEANS.items()},
        ),
        points,
        Table.of(
            "group_pairs",
            pairs,
            caption="Features of a group that are in another, too.",
            formats={"n": ",", "share": ".1%", "expected": ".1%"},
        ),
        Table.of(
            "cosine_tests",
            tests,
            caption="Cosines to predecessors, of two groups' features.",
            formats={"n": ",", "n_other": ",", "auroc": ".2f", "p": ".2g", "q": ".2g"},
        ),
        Table.of(
            "transitions",
            transitions,
            Transition,
            "Variance of a residual stream explained by the features of a predecessor.",
        ),
    ]
    lm = short_name(lm_name)
    frames = {table.name: table.frame for table in tables}
    return Results(
        "feature_flow",
        {
            "n_texts": statistics.n_texts,
            "n_tokens": statistics.n_tokens,
            "groups": groups,
            "cosine_tests": tests,
            "transitions": [asdict(each) for each in transitions],
            "deactivation": _plain(by_method).set_index("method").to_dict("index"),
            "deactivation_layers": _plain(by_layer).to_dict("records"),
            "steering": _plain(best).set_index("strategy").to_dict("index"),
            "relation": None if relation is None else _relation_values(relation),
            "saes": [hook_point.id for hook_point in saes],
        },
        _scalars(groups, by_method, best, frames.get("relation_cuts")),
        tables=[table for table in tables if len(table)],
        figures=[
            *_figures(frames, statistics.n_tokens, relation, lm),
            *_flow_figures(flows, statistics.names(drawn), lm),
        ],
    )


def write_graphs(flows: Flows, folder: Path) -> None:
    """Write the graph of each start as JSON and GraphML."""
    for graph in {graph.start: graph for graphs in flows.values() for graph in graphs}.values():
        write_json(folder / f"{graph.start.id}.json", graph.as_dict())
        graph.write_graphml(folder / f"{graph.start.id}.graphml")


def summarize_cuts(cuts: DataFrame, *by: str) -> DataFrame:
    """Return the effect of each method at the lowest r beside its random control, over all groups.

    `by` are the columns of `CutEffect` that have a row per value.
    """
    effects = compare_cuts(cuts[cuts["group"] == "all"], *by)
    random = effects["random_success"].astype(float)
    return effects.assign(times_random=effects["matched_success"] / random.where(random > 0))


def compare_cuts(cuts: DataFrame, *by: str) -> DataFrame:
    """Return the mean effects at the lowest r, where 0 removes, beside those of random controls.

    A row per combination of values in the columns `by` has r, the number n of cases,
    ``matched_success``, ``random_success`` and so on.
    """
    every = cuts[cuts["sources"] == "all"]
    lowest = every[every["r"] == every["r"].min()]
    means = case_means(lowest, [*by, "cut"]).set_index([*by])
    matched, random = (
        means[means["cut"] == cut].rename(columns={name: f"{cut}_{name}" for name in EFFECTS})
        for cut in ("matched", "random")
    )
    both = matched.join(random.filter(like="random_")).drop(columns="cut")
    return both.assign(r=lowest["r"].min()).reset_index()


def case_means(cuts: DataFrame, by: Sequence[str]) -> DataFrame:
    """Return the means of the effects over the cases of rows that are equal in some columns."""
    effects = cuts[list(EFFECTS)].astype(float)
    weights = effects.notna().mul(cuts["n"], axis=0)
    keys = [cuts[name] for name in by]
    sums, totals, n = (
        frame.groupby(keys, sort=False).sum() for frame in (effects * weights, weights, cuts["n"])
    )
    return (sums / totals).assign(n=n).reset_index()


_MEANS = dict.fromkeys(("behaviour", "coherence", "score", "named"), ".2f") | {"perplexity": ".1f"}


def mean_steering(points: DataFrame) -> DataFrame:
    """Return the means over the answers, by strategy, control and strength."""
    groups = points.groupby(["strategy", "control", "strength"], sort=False)
    return groups[[*_MEANS]].mean().assign(n_answers=groups.size()).reset_index()


def best_steering(points: DataFrame) -> DataFrame:
    """Return the means at each strategy's best strength, its control's, and those of strength 0.

    The best has the highest mean score over the answers; ``none`` is the strategy of strength 0.
    """
    means, at = mean_steering(points), ["strategy", "strength"]
    control = means[means["control"].eq(True)].set_index(at)[[*_MEANS]].add_prefix("control_")
    means = means[means["control"].eq(False)]
    best = means.loc[means.groupby("strategy", sort=False)["score"].idxmax()].join(control, on=at)
    none = means[means["strength"] == 0].head(1).assign(strategy="none")
    return concat([none, best])[[*at, "n_answers", *_MEANS, *control]]


def _plain(frame: DataFrame) -> DataFrame:
    return frame.astype(object).where(frame.notna(), None)


def mean_cuts(cuts: DataFrame) -> DataFrame:
    """Return cuts of a relation with the means of all draws of a control."""
    at = ["cut", "control", "n_features"]
    return cuts.set_index(at).astype(float).groupby(at, sort=False).mean().reset_index()


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


def _scalars(
    groups: Sequence[Mapping[str, Any]],
    by_method: DataFrame,
    best: DataFrame,
    cuts: DataFrame | None,
) -> dict[str, float]:
    scalars: dict[str, float | None] = {
        f"auroc/{kind}/layer_{each['layer']}": value
        for each in groups
        for kind, value in each["auroc"].items()
    }
    for row, kind in product(_plain(by_method).to_dict("records"), ("matched", "random")):
        scalars[f"deactivation/{row['method']}/{kind}"] = row[f"{kind}_success"]
    for row, name in product(_plain(best).to_dict("records"), ("strength", *_MEANS)):
        scalars[f"steering/{row['strategy']}/{name}"] = row[name]
    for cut in [] if cuts is None else _plain(mean_cuts(cuts)).to_dict("records"):
        for key in ("r", "r_target_only", "r_refitted", "recall"):
            field = "fixed" if key == "r" else key.removeprefix("r_")
            scalars[f"relation/{key}/{cut['cut']}{'_control' * cut['control']}"] = cut[field]
    return {key: value for key, value in scalars.items() if value is not None}


_SUMMARY = {
    "r": ("r", ".2f"),
    "n": ("cases", ","),
    "matched_success": ("switched off", ".1%"),
    "random_success": ("random control", ".1%"),
    "times_random": ("times random", ".1f"),
    "matched_loss_change": ("change of the loss", ".1%"),
}


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
        "groups",
        rows,
        ["layer", *headings],
        "Share of activations by the matched predecessors that are active too.",
        "AUROC: how well the cosine to a predecessor predicts that it is active.",
        True,
        headings,
        formats | dict.fromkeys(aurocs.values(), ".2f"),
    )


def _summary_table(name: str, by: Sequence[str], features: str, effects: DataFrame) -> Table:
    return Table(
        f"deactivation_{name}",
        effects[[*by, *_SUMMARY]],
        f"{features} switched off when their predecessors are rescaled by r.",
        headline=len(by) == 1,
        headings={key: head for key, (head, _) in _SUMMARY.items()},
        formats={key: form for key, (_, form) in _SUMMARY.items()},
    )


def _relation_tables(flow: RelationFlow) -> Iterable[Table]:
    source, target = flow.relation.source.texts, flow.relation.target.texts
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
        (side, texts[label], at.id, best.feature.id, best.auroc)
        for side, texts in (("source", source), ("target", target))
        for at, answers in flow.features[side].items()
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
        (
            source[pair.source],
            target[pair.target],
            *(" ".join(f.id for f in features) for features in (pair.carriers, pair.shared)),
        )
        for pair in flow.pairs
        if pair.is_reference
    ]
    yield Table.of(
        "answer_pairs",
        pairs,
        ["source", "target", "same_carrier", "shared_flow"],
        "Features that carry both answers of a pair, and features in the flow of both.",
    )


# -- figures, after those of Laptev et al., 2025 (arXiv 2502.03032) ------------------------------

_KIND_COLOURS: dict[HookKind, str] = {"residual": BLUE, "mlp_out": ORANGE, "attention_out": GREEN}
_GROUP_COLOURS = ("#BBBBBB", BLUE, ORANGE, "#CC79A7", GREEN, "#56B4E9", "#E69F00", "#444444")
_CUT_COLOURS: dict[Any, Any] = {
    ("none", False): INK,
    ("carriers", False): BLUE,
    ("carriers", True): "#9CCBE6",
    ("flow", False): ORANGE,
    ("flow", True): "#F0BC96",
}


def _figures(
    frames: Mapping[str, DataFrame], n_tokens: int, relation: RelationFlow | None, lm: str
) -> Iterable[Figure]:
    drawn: dict[str, tuple[str, str, Any]] = {
        "groups": (
            "groups",
            "Share of activations by the predecessors that are active, too.",
            partial(groups_figure, n_tokens=n_tokens),
        ),
        "deactivation": (
            "deactivation",
            "Features switched off with their predecessors.",
            deactivation_figure,
        ),
        "rescaling": (
            "deactivation",
            "Activations and losses as predecessors are rescaled.",
            rescaling_figure,
        ),
        "steering": (
            "steering",
            "Behaviour, coherence and their product by steering strength.",
            steering_figure,
        ),
    }
    if relation is not None:
        name, n_subjects = relation.relation.name, len(relation.subjects) - relation.n_fit
        draw = partial(relation_figure, name=name, n_subjects=n_subjects)
        drawn["relation"] = "relation_cuts", f"{name} with features of its answers removed.", draw
    for name, (table, caption, draw) in drawn.items():
        if len(frames[table]):
            yield Figure(name, caption, partial(draw, frames[table], lm))


def _flow_figures(flows: Flows, names: Mapping[str, str], lm: str) -> Iterable[Figure]:
    files = safe_names(flows)
    for name, graphs in flows.items():
        title = f"Flow of {name.replace('->', ' and ') if '->' in name else f'feature {name}'}"
        draw = partial(flow_figure, graphs, title, names, lm)
        yield Figure(f"flow_{files[name]}", f"{title}.", draw)


def groups_figure(groups: DataFrame, lm: str, n_tokens: int) -> MatplotlibFigure:
    """Draw the share of each group by layer (figures 5, 12, 18)."""
    shares = groups.rename(columns=GROUP_NAMES).melt("layer", list(GROUP_NAMES.values()), "group")
    return plots.curves(
        shares[shares.groupby("group")["value"].transform("any")],
        "layer",
        "value",
        "group",
        title=f"Where features of {short_name(lm)} come from",
        subtitle=f"share of all activations on {n_tokens:,} tokens, by the hook points at which "
        "the most similar feature is active at the same token",
        colours=dict(zip(GROUP_NAMES.values(), _GROUP_COLOURS, strict=True)),
        percent=True,
        labels=("layer of the residual stream", "share of activations"),
        size=(7.0, 3.2),
    )


def deactivation_figure(cuts: DataFrame, lm: str) -> MatplotlibFigure:
    """Draw the share of features switched off with their predecessors, and controls (figure 6)."""
    order = ["all", *GROUPS]
    rows = compare_cuts(cuts, "group", "method").sort_values(
        "group", key=lambda names: names.map(order.index), kind="stable"
    )
    n = rows.groupby("group", sort=False)["n"].first()
    names = [GROUP_NAMES.get(group, "all").replace(", ", ",\n") for group in n.index]
    r = rows["r"].min()
    cut = f"predecessors {'rescaled' if r else 'removed'} (r = {r:g}) at one token"
    figure = plots.bars(
        rows,
        "group",
        "matched_success",
        "method",
        title=f"Features switched off: {short_name(lm)}",
        subtitle=f"{cut}; all layers, by the hook points at which predecessors are active; "
        "random: as many other features active there",
        marks={"random_success": "random control"},
        label="switched off",
    )
    labels = [f"{name}\n{count:,} cases" for name, count in zip(names, n, strict=True)]
    figure.axes[0].set_xticks(range(len(n)), labels)
    return figure


def rescaling_figure(cuts: DataFrame, lm: str) -> MatplotlibFigure:
    """Draw activations and losses as predecessors are rescaled (figures 7, 8)."""
    rows = cuts[(cuts["group"] == "all") & (cuts["sources"] == "all")]
    titles = ("switched off", "change of activation", "change of the loss")
    effects = dict(zip(EFFECTS, titles, strict=True))
    means = case_means(rows, ["r", "method", "cut"]).rename(columns=effects)
    means = means.assign(random=means["cut"] == "random")
    points = means.melt(["r", "method", "random"], list(effects.values()), "effect", "share")
    return plots.curves(
        points,
        "r",
        "share",
        "method",
        "effect",
        "random",
        title=f"Rescaled predecessors: {short_name(lm)}",
        subtitle="mean over all cases; solid: matched predecessors, dotted: as many random active "
        "features of the same hook points",
        labels=("r: factor of their activations", ""),
        percent=True,
        each=lambda axes, *_: axes.axhline(0, color=PALE, linewidth=0.8, zorder=0),
    )


def steering_figure(points: DataFrame, lm: str) -> MatplotlibFigure:
    """Draw behaviour, coherence and their product by strength (figures 9 to 11, 16, 17)."""
    titles = {
        "behaviour": "probability of the answer",
        "coherence": "perplexity of other texts, before / after",
        "score": "their product",
        "named": "share of written texts that name the answer",
    }
    labels = list(dict.fromkeys(points["label"]))
    means = mean_steering(points).rename(columns=titles)
    rows = means.melt(["strategy", "control", "strength"], [*titles.values()], "measure", "value")

    def unsteered(axes: Axes, measure: Any, panel: DataFrame) -> None:
        del measure
        for value in panel[panel["strength"] == 0]["value"].head(1):
            axes.axhline(value, color=GREY, linewidth=0.9, linestyle="--", zorder=0)
        axes.set_ylim(-0.02, 1.04)

    return plots.curves(
        rows,
        "strength",
        "value",
        "strategy",
        "measure",
        "control",
        title=f"Steering {short_name(lm)} along the flow",
        subtitle=f"towards {listed(labels, most=6)}; mean over {len(labels)} answers; dashed "
        "line: without steering; dotted: as much of other features",
        colours={"single": GREY},
        labels=("strength (in typical activations)", ""),
        each=unsteered,
        per_row=2,
    )


def relation_figure(cuts: DataFrame, lm: str, name: str, n_subjects: int) -> MatplotlibFigure:
    """Draw the scores of a relation with and without the features that its answers share."""
    _, headings, _ = columns_of(RelationCut)
    scores = {name: headings[name] for name in ("fixed", "target_only", "refitted", "recall")}
    titles = {
        "none": "nothing removed",
        "carriers": "carriers of both answers",
        "flow": "where both flows meet",
    }
    title = (cuts := mean_cuts(cuts))["cut"].map(titles)
    number = cuts["n_features"].map(lambda n: f" ({n})" if n else "")
    removed = (title + number).where(~cuts["control"], "control of " + title)
    keys = zip(cuts["cut"], cuts["control"], strict=True)
    colours = dict(zip(removed, map(_CUT_COLOURS.get, keys), strict=True))
    rows = cuts.assign(removed=removed).rename(columns=scores)
    points = rows.melt(["removed"], list(scores.values()), "score", "value").dropna()
    return plots.bars(
        points,
        "score",
        "value",
        "removed",
        title=f"{name} with features removed: {short_name(lm)}",
        subtitle=f"{n_subjects:,} held-out subjects; control: other features of the same hook "
        f"points, as many and about as often active, means of {N_CONTROLS} draws",
        colours=colours,
        percent=False,
        label="r, or share of answers",
    )


_MAX_PER_HOOK_POINT = 3
_STEP, _ROW = 1.7, 0.95  # distance of boxes and height of a row, in inches


def flow_figure(
    graphs: Sequence[FlowGraph], title: str, names: Mapping[str, str], lm: str
) -> MatplotlibFigure:
    """Draw where one feature, or those of two answers, come from and go to.

    There is a row of boxes for each residual stream, the last one on top, and below each a row for
    the outputs of the layer's attention and MLP.
    """
    starts = {graph.start for graph in graphs}
    edges = {(edge.source, edge.target): edge for graph in graphs for edge in graph.edges}
    kept = _strongest(graphs)
    n_left_out = len({feature for graph in graphs for feature in graph.features} - kept)
    shared = {f for f in kept if sum(f in graph.features for graph in graphs) > 1}
    drawn = [edge for edge in edges.values() if {edge.source, edge.target} <= kept]
    positions = _positions(kept, drawn)
    notes = [f"features of {short_name(lm)}", "numbers: cosines of the decoders"]
    notes += ["thick frame: start", *(["shaded: in both flows"] if shared else [])]
    if n_left_out:
        most = f"the {_MAX_PER_HOOK_POINT} most similar features of each hook point"
        notes.append(f"{most}, {n_left_out:,} more left out")
    right = max(x for x, _ in positions.values()) + _STEP / 2
    left = min(min(x for x, _ in positions.values()) - _STEP / 2 - 0.9, right - 6)
    top = max(y for _, y in positions.values()) + _ROW / 2
    figure = plots.new_figure(right - left, top, title, "; ".join(notes))
    axes = figure.add_subplot()
    axes.set_axis_off()
    axes.set_xlim(left, right)
    axes.set_ylim(0, top)
    for y, (layer, is_stream) in {positions[f][1]: _height(f.hook_point) for f in kept}.items():
        row = f"layer {layer}\n{'residual' if is_stream else 'outputs'}"
        axes.text(left + 0.05, y, row, va="center", color=GREY, fontsize=8.5)
    for edge in drawn:
        colour = _KIND_COLOURS[edge.source.hook_point.kind]
        (x, y), (far_x, far_y) = positions[edge.source], positions[edge.target]
        axes.plot(
            (x, far_x),
            (y, far_y),
            color=colour,
            alpha=0.7,
            zorder=1,
            linewidth=0.6 + 3 * max(edge.cosine, 0) ** 2,
        )
        # Near its source, where lines are apart.
        axes.text(
            x + 0.45 * (far_x - x),
            y + 0.45 * (far_y - y),
            f"{edge.cosine:.2f}",
            fontsize=6.5,
            color=colour,
            ha="center",
            va="center",
            zorder=2,
            bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.5},
        )
    for feature, (x, y) in positions.items():
        text = f"{SHORT[feature.hook_point.kind]} {feature.index}"
        if feature.id in names:
            text += "\n" + " → ".join(plots.legible(names[feature.id].split(" → "), 11))
        box = {
            "boxstyle": "round,pad=0.35",
            "linewidth": 2.6 if feature in starts else 1.0,
            "facecolor": "#F3EBC8" if feature in shared else "white",
            "edgecolor": _KIND_COLOURS[feature.hook_point.kind],
        }
        axes.text(x, y, text, ha="center", va="center", fontsize=7, color=INK, bbox=box, zorder=3)
    return figure


def _positions(
    features: Collection[Feature], edges: Sequence[Edge]
) -> dict[Feature, tuple[float, float]]:
    """Centre of each box: attention to the left of the streams, MLP to the right of them."""
    hook_points = {feature.hook_point for feature in features}
    heights = sorted({_height(at) for at in hook_points})
    n_streams = max(
        Counter(f.hook_point for f in features if _height(f.hook_point)[1]).values(), default=1
    )
    positions: dict[Feature, tuple[float, float]] = {}

    def order(feature: Feature) -> tuple[float, Feature]:
        targets = [positions[edge.target][0] for edge in edges if edge.source == feature]
        return (sum(targets) / len(targets) if targets else 0.0, feature)

    for at in sorted(hook_points, key=_height, reverse=True):
        row = sorted((f for f in features if f.hook_point == at), key=order)
        # Lines from stream to stream pass between attention and MLP.
        first = {
            "residual": (1 - len(row)) / 2,
            "mlp_out": (n_streams + 1) / 2,
            "attention_out": (1 - n_streams) / 2 - len(row),
        }[at.kind]
        y = (heights.index(_height(at)) + 0.5) * _ROW
        positions |= {feature: ((first + i) * _STEP, y) for i, feature in enumerate(row)}
    return positions


def _height(hook_point: HookPoint) -> tuple[int, bool]:
    return hook_point.layer, hook_point.kind == "residual"


def _strongest(graphs: Sequence[FlowGraph]) -> set[Feature]:
    """The starts and, outward, the features most similar to those kept, some of a hook point."""
    kept = {graph.start for graph in graphs}
    outward: dict[tuple[Feature, Feature], float] = {}
    for graph in graphs:
        for edge in graph.edges:
            ends = edge.source, edge.target
            is_forward = _height(graph.start.hook_point) <= _height(edge.source.hook_point)
            outward[ends if is_forward else ends[::-1]] = edge.cosine
    order = sorted(outward, key=lambda ends: (-outward[ends], ends[::-1]))
    while True:
        n_kept = Counter(feature.hook_point for feature in kept)
        new = next(
            (
                far
                for near, far in order
                if near in kept and far not in kept and n_kept[far.hook_point] < _MAX_PER_HOOK_POINT
            ),
            None,
        )
        if new is None:
            return kept
        kept.add(new)
