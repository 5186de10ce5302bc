"""Figures of the feature-flow study, after those of Laptev et al., 2025 (arXiv 2502.03032)."""

from collections.abc import Mapping, Sequence

from matplotlib.figure import Figure
from pandas import DataFrame

from lincorr_lightning.flow.effects import compare_cuts
from lincorr_lightning.flow.graph import GROUP_NAMES, GROUPS, SHORT
from lincorr_lightning.results import plots
from lincorr_lightning.results.plots import BLUE, GREEN, GREY, INK, ORANGE
from lincorr_lightning.results.table import short_name
from lincorr_lightning.sae.hook_points import Feature, HookKind, HookPoint

_KIND_COLOURS: dict[HookKind, str] = {"residual": BLUE, "mlp_out": ORANGE, "attention_out": GREEN}
_STEP = 1.7  # distance of boxes, in inches
_ROW = 0.95  # height of a row of boxes, in inches


def deactivation_figure(cuts: DataFrame, lm: str) -> Figure:
    """Draw the share of features switched off with their predecessors, and controls (figure 6)."""
    order = ["all", *GROUPS]
    rows = compare_cuts(cuts, "group", "method").sort_values(
        "group", key=lambda names: names.map(order.index), kind="stable"
    )
    names = rows["group"].replace(GROUP_NAMES).str.replace(", ", ",\n")
    n_cases = rows.groupby("group")["n"].transform("first").map("\n{:,} cases".format)
    r = rows["r"].min()
    removed = f"predecessors {'rescaled' if r else 'removed'} (r = {r:g}) at one token"
    return plots.bars(
        rows.assign(group=names + n_cases),
        "group",
        "matched_success",
        "method",
        title=f"Features switched off: {short_name(lm)}",
        subtitle=f"{removed}; all layers, by the hook points at which predecessors are active; "
        "random: as many other features active there",
        marks={"random_success": "random control"},
        label="switched off",
    )


def flow_figure(
    edges: DataFrame, flow: str, starts: Sequence[str], names: Mapping[str, str], lm: str
) -> Figure:
    """Draw where one feature, or those of two answers, come from and go to.

    There is a row of boxes for each residual stream, the last one on top, and below each a row for
    the outputs of the layer's attention and MLP. `edges` is the table ``flow_edges``, `starts` are
    the features of the flow, and `names` those of features, by their ids.
    """
    rows = edges[edges["flow"] == flow]
    cosines = rows.set_index(["source", "target"])["cosine"].to_dict()
    flows = []
    for start in starts:
        own = rows[rows["start"] == start]
        flows.append({Feature.named(text) for text in (start, *own["source"], *own["target"])})
    positions = _positions(flows)
    shared = {f for f in positions if sum(f in features for features in flows) > 1}
    notes = [f"features of {short_name(lm)}", "numbers: cosines of the decoders"]
    notes += ["thick frame: start", *(["shaded: in both flows"] if shared else [])]
    columns = [x for x, _ in positions.values()]
    right = max(columns) + _STEP / 2
    left = min(min(columns) - _STEP / 2 - 0.9, right - 6)
    top = max(y for _, y in positions.values()) + _ROW / 2
    figure = plots.new_figure(right - left, top, flow_title(flow), "; ".join(notes))
    axes = figure.add_subplot()
    axes.set_axis_off()
    axes.set_xlim(left, right)
    axes.set_ylim(0, top)
    for y, at in {y: feature.hook_point for feature, (_, y) in positions.items()}.items():
        row = f"layer {at.layer}\n{'residual' if at.kind == 'residual' else 'outputs'}"
        axes.text(left + 0.05, y, row, va="center", color=GREY, fontsize=8.5)
    for ends, cosine in cosines.items():
        source, target = map(Feature.named, ends)
        colour = _KIND_COLOURS[source.hook_point.kind]
        (x, y), (far_x, far_y) = positions[source], positions[target]
        width = 0.6 + 3 * max(cosine, 0) ** 2
        axes.plot((x, far_x), (y, far_y), color=colour, alpha=0.7, zorder=1, linewidth=width)
        # Near its source, where lines are apart.
        axes.text(
            x + 0.45 * (far_x - x),
            y + 0.45 * (far_y - y),
            f"{cosine:.2f}",
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
            "linewidth": 2.6 if feature.id in starts else 1.0,
            "facecolor": "#F3EBC8" if feature in shared else "white",
            "edgecolor": _KIND_COLOURS[feature.hook_point.kind],
        }
        axes.text(x, y, text, ha="center", va="center", fontsize=7, color=INK, bbox=box, zorder=3)
    return figure


def flow_title(flow: str) -> str:
    """Return the title of the flow of a feature's id, or of two answers, as ``Rome->Italy``."""
    return f"Flow of {flow.replace('->', ' and ') if '->' in flow else f'feature {flow}'}"


def _positions(flows: Sequence[set[Feature]]) -> dict[Feature, tuple[float, float]]:
    """Centre of each box: attention to the left of the streams, MLP to the right of them."""
    rows: dict[HookPoint, list[Feature]] = {}
    for feature in dict.fromkeys(feature for features in flows for feature in sorted(features)):
        rows.setdefault(feature.hook_point, []).append(feature)
    heights = sorted({(at.layer, at.kind == "residual") for at in rows})
    outside = (len(flows) + 1) / 2  # lines from stream to stream pass between attention and MLP
    positions: dict[Feature, tuple[float, float]] = {}
    for at, features in rows.items():
        first = {
            "residual": (1 - len(features)) / 2,
            "mlp_out": outside,
            "attention_out": 1 - outside - len(features),
        }[at.kind]
        y = (heights.index((at.layer, at.kind == "residual")) + 0.5) * _ROW
        positions |= {feature: ((first + i) * _STEP, y) for i, feature in enumerate(features)}
    return positions
