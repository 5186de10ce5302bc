"""Linear probes: their pairs, W's highest weights, and several LMs side by side."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from lincorr_lightning.results.report.document import Column, Paragraph, Part, Table, arrow
from lincorr_lightning.results.report.runs import Run

MOST_PAIRS = 30
_HITS = ("1", "3", "5")
_WAYS = ("influenced", "influencing")
_MOST_LABELS = 12
_MOST_CLOSELY = 3

Pair = Mapping[str, Any]

# Adjusted p-value up to which a pair counts as a finding.
FINDING = 0.01


def pair_name(pair: Pair) -> str:
    """As ``city->country``."""
    return f"{pair['source']}->{pair['target']}"


def hit(pair: Pair, way: str, n: str) -> float | None:
    """Hit@N of a pair; None where there is none.

    Args:
        pair: Its entry in ``results.json``.
        way: ``influenced`` or ``influencing``.
        n: As ``1``.
    """
    rates = (pair.get("precision") or {}).get(way)
    return None if rates is None else rates.get(n)


def ranked(pairs: Sequence[Pair]) -> list[Pair]:
    """Pairs with a reference first, then by how far r lies above its control."""

    def order(pair: Pair) -> tuple[bool, float]:
        height = pair.get("excess")
        if height is None:
            height = pair.get("label_mean")
        return pair.get("precision") is None, -(-2.0 if height is None else height)

    return sorted(pairs, key=order)


def numbers(run: Run) -> Iterator[tuple[str, str, float | None]]:
    """Relation, quantity and value of all that the paper may have too."""
    for pair in run.results["pairs"]:
        name = pair_name(pair)
        for key in ("label_mean", "label_std"):
            yield name, key, pair.get(key)
        for way in _WAYS:
            for n in _HITS:
                yield name, f"{way}_{n}", hit(pair, way, n)


def facts(run: Run) -> list[tuple[str, str]]:
    """What was measured, and how."""
    results, settings = run.results, run.settings
    data = settings.get("data") or {}
    found = [
        ("Pairs", f"{len(results['pairs']):,}"),
        ("X's", f"maps fitted on {results['n_fit']:,}, scored on {results['n_test']:,} others"),
    ]
    if data.get("words_per_subject"):
        found.append(("Vocabulary strings per X", str(data["words_per_subject"])))
    if data.get("subjects_file"):
        found.append(("X's from", str(data["subjects_file"])))
    if settings.get("ridge") is not None:
        found.append(("Ridge", str(settings["ridge"])))
    if results.get("left_out"):
        names = list(results["left_out"])
        found.append(("Left out: no labels or words for", ", ".join(names)))
    if results.get("control"):
        found.append(("Control prompt", str(results["control"])))
    return found


def details(run: Run) -> list[Part]:
    """Tables of one run."""
    pairs = run.results["pairs"]
    return [
        _pairs_table(run, pairs),
        *_ties(run, pairs),
        *_transitivity(run),
        *_completeness(pairs),
        *_ridge_path(run),
        *_label_wise(run, pairs),
        *_influences(run),
    ]


def _pairs_table(run: Run, pairs: Sequence[Pair]) -> Table:
    columns = [Column("pair"), Column("r", "r"), Column("std", "r")]
    keys = ["label_mean", "label_std"]
    for name, key in (
        ("permuted", "permuted_label_mean"),
        ("control", "control_label_mean"),
        ("r above control", "excess"),
    ):
        if any(pair.get(key) is not None for pair in pairs):
            columns.append(Column(name, "r"))
            keys.append(key)
    asked = any(pair.get("precision") for pair in pairs)
    hits = [(way, n) for way in _WAYS for n in _HITS] if asked else []
    columns += [Column(f"Hit@{n} {way}", "r") for way, n in hits]
    best = ranked(pairs)[:MOST_PAIRS]
    rows = [
        [
            pair_name(pair),
            *(pair.get(key) for key in keys),
            *(hit(pair, way, n) for way, n in hits),
        ]
        for pair in best
    ]
    note = "r: label-wise Pearson correlation on held-out X's, mean over the target's labels."
    if len(best) < len(pairs):
        note += (
            f" {len(best)} of {len(pairs):,} pairs: those with a reference, then those furthest "
            f"above their control; all: {run.folder / 'tables' / 'pairs.csv'}."
        )
    return Table(f"Pairs in {run.lm.label}", columns, rows, note)


def _ties(run: Run, pairs: Sequence[Pair]) -> list[Part]:
    """Which pairs are above their control, of all that were asked."""
    tested = [pair for pair in pairs if pair.get("q") is not None]
    if not tested:
        return []
    found = [pair for pair in tested if pair["q"] <= FINDING]
    keys = ["excess", "excess_error", "q"]
    columns = [Column("pair"), Column("r above control", "r"), Column("standard error", "number"),
               Column("adjusted p", "number")]  # fmt: skip
    if tested[0].get("excess") is None:
        keys[0], columns[1] = "label_mean", Column("r", "r")
    given = ", ".join(run.settings.get("given") or ())
    if any(pair.get("partial_label_mean") is not None for pair in tested):
        keys += ["partial_label_mean", "through_given"]
        columns += [Column(f"r given {given}", "r"), Column(f"share through {given}", "number")]
    best = sorted(found, key=lambda pair: -pair[keys[0]])[:MOST_PAIRS]
    note = (
        f"{len(found):,} of {len(tested):,} pairs, at an adjusted p of at most {FINDING:g} "
        "(Benjamini and Yekutieli)."
    )
    if len(best) < len(found):
        note += f" The first {len(best)}; all: {run.folder / 'tables' / 'ties.csv'}."
    rows = [[pair_name(pair), *(pair.get(key) for key in keys)] for pair in best]
    return [Table(f"Pairs that are tied in {run.lm.label}", columns, rows, note, folded=True)]


def _transitivity(run: Run) -> list[Part]:
    found = run.results.get("transitivity")
    if not found:
        return []
    rows = [
        [f"{one['source']}->{one['via']}->{one['target']}",
         *(one.get(key) for key in ("direct", "composed", "kept", "elsewhere", "weight_cosine"))]
        for one in found[:MOST_PAIRS]
    ]  # fmt: skip
    return [
        Table(
            f"Maps end to end in {run.lm.label}",
            [Column("source->via->target"), Column("r of the pair’s own map", "r"),
             Column("of two maps", "r"), Column("kept", "number"),
             Column("through others, median", "r"), Column("cosine of the matrices", "r")],
            rows,
            folded=True,
        )
    ]  # fmt: skip


def _completeness(pairs: Sequence[Pair]) -> list[Part]:
    """Paper, table 18."""
    rows = [
        [pair_name(pair), kind, one["n_labels"], one["label_mean"],
         *((one.get("influenced") or {}).get(n) for n in _HITS)]
        for pair in ranked(pairs)[:MOST_PAIRS]
        for kind, one in (pair.get("completeness") or {}).items()
    ]  # fmt: skip
    if not rows:
        return []
    return [
        Table(
            "By completeness of the target’s labels",
            [Column("pair"), Column("completeness"), Column("labels", "number"), Column("r", "r"),
             *(Column(f"Hit@{n} influenced", "r") for n in _HITS)],
            rows,
            "whole: the token is all of an answer; phrase: a whole word of a longer one; "
            "subword: the beginning of a word (paper, table 18).",
            folded=True,
        )
    ]  # fmt: skip


def _ridge_path(run: Run) -> list[Part]:
    known = [
        entry
        for entry in run.results.get("ridge_path") or ()
        if any(point.get("influenced") for point in entry["path"])
    ]
    if not known:
        return []
    rows = [
        [
            pair_name(entry),
            point.get("ridge"),
            point.get("label_mean"),
            *((point.get(way) or {}).get("1") for way in _WAYS),
        ]
        for entry in known[:_MOST_CLOSELY]
        for point in entry["path"]
    ]
    return [
        Table(
            f"Ridge path in {run.lm.label}",
            [Column("pair"), Column("ridge", "number"), Column("r", "r"),
             *(Column(f"Hit@1 {way}", "r") for way in _WAYS)],
            rows,
            exported=False,
            folded=True,
        )
    ]  # fmt: skip


def _label_wise(run: Run, pairs: Sequence[Pair]) -> list[Part]:
    by_pair: dict[str, list[tuple[float, str]]] = {}
    for row in run.table("label_wise"):
        if row.get("r"):
            by_pair.setdefault(row.get("pair", ""), []).append((float(row["r"]), row["label"]))
    rows = []
    for pair in ranked(pairs)[:MOST_PAIRS]:
        ordered = sorted(by_pair.get(pair_name(pair), ()), reverse=True)
        if len(ordered) >= 2 * _MOST_CLOSELY:
            best, worst = ordered[:_MOST_CLOSELY], ordered[-_MOST_CLOSELY:]
            rows.append([pair_name(pair), *(_labels(some) for some in (best, worst))])
    if not rows:
        return []
    return [
        Table(
            "Labels whose logits follow best and worst, with their r",
            [Column("pair"), Column("highest"), Column("lowest")],
            rows[:_MOST_LABELS],
            exported=False,
            folded=True,
        )
    ]


def _labels(some: Sequence[tuple[float, str]]) -> str:
    return ", ".join(f"{label} {r:.2f}" for r, label in some)


def _influences(run: Run) -> list[Part]:
    """The highest weights of the pairs somebody has said the truth of (paper, tables 3, 15-17)."""
    found: dict[tuple[str, str], dict[str, list[dict[str, str]]]] = {}
    for row in run.table("influences"):
        if row.get("right"):
            lines = found.setdefault((row["pair"], row["direction"]), {})
            lines.setdefault(row["label"], []).append(row)
    asked = list(run.settings.get("precision") or ())
    # What was asked about first.
    order = sorted(found, key=lambda key: asked.index(key[0]) if key[0] in asked else len(asked))
    parts: list[Part] = []
    for pair, direction in order:
        lines = found[pair, direction]
        if len(parts) >= 2 * _MOST_CLOSELY:
            break
        best = sorted(lines.items(), key=lambda line: -float(line[1][0]["weight"]))
        influenced = direction == "influenced"
        parts.append(
            Table(
                f"Highest weights of {arrow(pair)}: "
                + ("targets that a source moves" if influenced else "sources that move a target"),
                [
                    Column("source label" if influenced else "target label"),
                    Column("moves most, with W" if influenced else "is moved most by, with W"),
                ],
                [[label, _weights(rows)] for label, rows in best[:_MOST_LABELS]],
                "✓ is right in the world."
                + (
                    f" {_MOST_LABELS} of {len(best)} labels, those with the highest weights."
                    if len(best) > _MOST_LABELS
                    else ""
                ),
                exported=False,
                folded=True,
            )
        )
    return parts


def _weights(rows: Sequence[dict[str, str]]) -> str:
    return ", ".join(
        f"{row['token']} {float(row['weight']):.2f}" + (" ✓" if row["right"] == "True" else "")
        for row in rows
    )


def overview(runs: Sequence[Run]) -> list[Part]:
    """Several runs side by side."""
    if len(runs) < 2:
        return []
    from lincorr_lightning.results.report.comparison import compare

    return compare(runs) or [
        Paragraph("These runs have no pair in common, so nothing stands side by side.")
    ]
