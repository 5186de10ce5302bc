"""Vocabulary ablation, resilience, pre-training, and studies that are not known."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from lincorr_lightning.results.report.document import Column, Part, Table
from lincorr_lightning.results.report.probe import MOST_PAIRS, pair_name
from lincorr_lightning.results.report.runs import Run

_MOST_CASES = 12
_MOST_KEYS = 200


# -- vocabulary ablation -------------------------------------------------------------------------


def ablation_numbers(run: Run) -> Iterator[tuple[str, str, float | None]]:
    """Relation, quantity and value of all that the paper may have too."""
    for row in run.results["mappings"]:
        yield (
            str(run.results["relation"]),
            f"mapping_{row['mapping']}",
            row.get("generalized"),
        )


def ablation_facts(run: Run) -> list[tuple[str, str]]:
    """What was told, and how often."""
    results = run.results
    found = [("Relation", str(results["relation"]))]
    for key, name in (
        ("n_paired", "Paired texts"),
        ("n", "New subjects"),
        ("n_source_labels", "Source labels"),
        ("n_target_labels", "Target labels"),
    ):
        if results.get(key) is not None:
            found.append((name, f"{results[key]:,}"))
    shape = (results.get("embedding") or {}).get("shape")
    if shape:
        found.append(("Embedding", " × ".join(f"{n:,}" for n in shape)))
    return found


def ablation_overview(runs: Sequence[Run]) -> list[Part]:
    """A row for each mapping of each run (paper, table 7)."""
    keys = {
        "source_learned": "learned",
        "generalized": "generalized",
        "std": "std over seeds",
        "uncomposed": "compose skipped",
        "gain": "gain",
        "unrestricted": "of all candidates",
        "random": "chance",
        "majority": "majority",
    }
    columns = [
        Column("relation"),
        Column("vocabulary"),
        Column("mapping"),
        Column("seeds", "count"),
    ]
    columns += [Column(name, "points" if key == "gain" else "share") for key, name in keys.items()]
    rows = [
        [run.relation, run.lm.label, row["mapping"], row.get("n_seeds"), *map(row.get, keys)]
        for run in runs
        for row in run.results["mappings"]
    ]
    return [
        Table(
            "Generalized from the vocabulary alone",
            columns,
            rows,
            "Compose skipped: without the paired texts. Majority: the most frequent right answer.",
        )
    ]


def ablation_details(run: Run) -> list[Part]:
    """Some cases."""
    cases = run.table("cases")
    if not cases:
        return []
    # Some of each mapping, in turn.
    by_mapping: dict[str, list[dict[str, str]]] = {}
    for case in cases:
        by_mapping.setdefault(case.get("mapping", ""), []).append(case)
    most = max(1, _MOST_CASES // len(by_mapping))
    keys = {
        "mapping": "mapping",
        "subject": "subject",
        "source_answer": "taught",
        "reference": "reference",
        "target_in_domain": "said, in the domain",
        "target_said": "said, of all",
        "generalized": "right",
    }
    marks = {"True": "✓", "False": "✗"}
    rows = [
        [marks.get(case.get(key, ""), case.get(key)) for key in keys]
        for some in by_mapping.values()
        for case in some[:most]
    ]
    where = run.folder / "tables" / "cases.csv"
    return [
        Table(
            "Cases",
            [Column(name) for name in keys.values()],
            rows,
            f"{len(rows)} of {len(cases):,} cases; all: {where}.",
            exported=False,
            folded=True,
        )
    ]


# -- resilience ----------------------------------------------------------------------------------

_RESILIENCE = ("before", "after", "difference", "refitted", "kept")


def resilience_numbers(run: Run) -> Iterator[tuple[str, str, float | None]]:
    """Relation, quantity and value of all that the paper may have too."""
    for pair in run.results["pairs"]:
        yield pair_name(pair), "after", pair.get("after")


def resilience_facts(run: Run) -> list[tuple[str, str]]:
    """Which maps met which LM."""
    results = run.results
    return [
        ("Maps fitted on", str(results.get("lm_before", "not known"))),
        ("Pairs", f"{len(results['pairs']):,}"),
        ("X's", f"refitted on {results['n_fit']:,}, scored on {results['n_test']:,} others"),
    ]


def resilience_details(run: Run) -> list[Part]:
    """The pairs that kept least first."""
    pairs = run.results["pairs"]

    def order(pair: Mapping[str, Any]) -> float:
        kept = pair.get("kept")
        return float("inf") if kept is None else float(kept)

    least = sorted(pairs, key=order)[:MOST_PAIRS]
    rows = [[pair_name(pair), *(pair.get(key) for key in _RESILIENCE)] for pair in least]
    mean = run.results.get("mean")
    if isinstance(mean, Mapping):
        rows.append(["mean of all pairs", *(mean.get(key) for key in _RESILIENCE)])
    columns = [Column(key, "share" if key == "kept" else "r") for key in _RESILIENCE]
    note = (
        "Kept: the old map's r as a share of that of a map fitted on the new LM. The pairs that "
        "kept least come first"
    )
    cut = f"; {len(least)} of {len(pairs):,} pairs" if len(least) < len(pairs) else ""
    title = f"Maps of {run.results.get('lm_before', 'another LM')} on {run.lm.label}"
    return [Table(title, [Column("pair"), *columns], rows, f"{note}{cut}.")]


# -- pre-training --------------------------------------------------------------------------------


def pretraining_facts(run: Run) -> list[tuple[str, str]]:
    """How large the world and the LM are."""
    names = {
        "n_people": "People",
        "n_tokens": "Tokens of the vocabulary",
        "n_steps": "Optimizer steps",
    }
    found = [(name, f"{run.results[k]:,}") for k, name in names.items() if k in run.results]
    if run.results.get("loss") is not None:
        found.append(("Loss", f"{run.results['loss']:.4g}"))
    return found


def pretraining_overview(runs: Sequence[Run]) -> list[Part]:
    """Recall by knowledge, runs side by side."""
    names = list(dict.fromkeys(name for run in runs for name in run.results["recall"]))
    rows = [[name, *(run.results["recall"].get(name) for run in runs)] for name in names]
    heads = [run.lm.label for run in runs] if len(runs) > 1 else ["recall"]
    return [
        Table(
            "Recall by knowledge",
            [Column("knowledge"), *(Column(head, "share") for head in heads)],
            rows,
            "Recall: share of the people whose answer the LM says first.",
        ),
        *_formed(runs),
    ]


def _formed(runs: Sequence[Run]) -> list[Part]:
    """What `Formation` found at the end of each run, side by side."""
    keys = ("label_mean", "control_label_mean", "influenced", "influencing")
    ties, recall = [], []
    for run in runs:
        found = run.results.get("formation") or {}
        said = (run.settings.get("data") or {}).get("together")
        last = max((point["step"] for point in found.get("ties", ())), default=None)
        head = [run.lm.label, said]
        ties += [
            [*head, point["pair"], *(point[key] for key in keys)]
            for point in found.get("ties", ())
            if point["step"] == last
        ]
        recall += [
            [*head, point["knowledge"], point["said"], point["unsaid"]]
            for point in found.get("recall", ())
            if point["step"] == last
        ]
    heads = [Column("LM"), Column("both stated", "share")]
    parts: list[Part] = []
    if ties:
        parts.append(
            Table(
                "Ties at the end of training",
                [*heads, Column("pair"), Column("r", "r"), Column("control", "r"),
                 Column("Hit@1 influenced", "r"), Column("Hit@1 influencing", "r")],
                ties,
                "Both stated: share of the people of whom the text says both knowledges of a pair. "
                "All steps: tables/formation.csv of each run.",
            )
        )  # fmt: skip
    if recall:
        parts.append(
            Table(
                "What the LM says of facts, and of those that the text never states",
                [*heads, Column("knowledge"), Column("stated", "share"),
                 Column("never stated", "share")],
                recall,
            )
        )  # fmt: skip
    return parts


# -- studies that are not known ------------------------------------------------------------------


def plain_details(run: Run) -> list[Part]:
    """All keys and values."""
    rows = list(_flat(run.results))
    note = f"{_MOST_KEYS} of {len(rows):,}; all: {run.folder / 'results.json'}."
    return [
        Table(
            f"Results of {run.study} in {run.lm.label}",
            [Column("key"), Column("value", "number")],
            rows[:_MOST_KEYS],
            note if len(rows) > _MOST_KEYS else "",
        )
    ]


def _flat(value: Any, place: str = "") -> Iterator[list[Any]]:
    if isinstance(value, Mapping) and value:
        for key, below in value.items():
            # Told beside the run already.
            if place or key not in ("study", "settings", "versions"):
                yield from _flat(below, f"{place}.{key}" if place else str(key))
    elif isinstance(value, list) and any(isinstance(v, (Mapping, list)) for v in value):
        for i, below in enumerate(value):
            yield from _flat(below, f"{place}[{i}]")
    elif isinstance(value, (Mapping, list)):
        yield [place, ", ".join(map(str, value))]
    else:
        yield [place, value]
