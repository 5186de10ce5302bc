"""What a run tells at its end: its numbers at a glance, and where the rest lies."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

MAX_ROWS = 20


def describe_run(folder: Path) -> str:
    """Text for the end of a run.

    Args:
        folder: The run's folder.
    """
    out = io.StringIO()
    results = folder / "results.json"
    if results.is_file():
        found = json.loads(results.read_text(encoding="utf-8"))
        make = _TABLES.get(found.get("study"))
        table = None if make is None else make(found)
        if table is not None:
            Console(file=out, width=110).print(table)
    figures = sorted((folder / "figures").glob("*.png"))
    out.write(f"Run folder:  {folder}\n")
    if figures:
        out.write(f"Pictures:    {folder / 'figures'} ({', '.join(f.name for f in figures[:4])}")
        out.write(", ...)\n" if len(figures) > 4 else ")\n")
    if list(folder.glob("events.out.tfevents.*")):
        out.write(f"TensorBoard: tensorboard --logdir {folder}\n")
    return out.getvalue()


def _pairs_table(results: dict[str, Any]) -> Table | None:
    """The pairs with the highest r, beside their nulls and precision."""
    pairs = results.get("pairs")
    if not pairs:
        return None
    # By what counts: r above its control, where there is one.
    ranked = sorted(pairs, key=lambda p: -(p.get("excess") or p["label_mean"] or -1))
    title = f"Label-wise r on {results['n_test']} held-out X's"
    if len(ranked) > MAX_ROWS:
        title += f"; {MAX_ROWS} of {len(ranked)} pairs, those furthest above their control"
    table = Table(title=title)
    table.add_column("pair", no_wrap=True)
    for column in (
        "r",
        "std",
        "permuted",
        "control",
        "excess",
        "Hit@1 influenced",
        "Hit@1 influencing",
    ):
        table.add_column(column, justify="right")
    for pair in ranked[:MAX_ROWS]:
        precision = pair["precision"] or {"influenced": {}, "influencing": {}}
        table.add_row(
            f"{pair['source']}->{pair['target']}",
            *(
                "" if value is None else f"{value:.2f}"
                for value in (
                    pair["label_mean"],
                    pair["label_std"],
                    pair["permuted_label_mean"],
                    pair.get("control_label_mean"),
                    pair.get("excess"),
                    precision["influenced"].get("1"),
                    precision["influencing"].get("1"),
                )
            ),
        )
    return table


def _edits_table(results: dict[str, Any]) -> Table | None:
    """What the edits did, and what must not have moved."""
    if results.get("generalized") is None:
        return None
    table = Table(title=f"{results['relation']}: {results['n_edits']} edits")
    columns = ["source_learned", "generalized", "random", "hallucinated", "unchanged"]
    values = [f"{results[name]:.0%}" for name in columns]
    for control, outcome in (results.get("controls") or {}).items():
        columns.append(f"{control} unchanged")
        values.append(_share(outcome.get("unchanged")))
    for name, numbers in (results.get("gradients") or {}).items():
        columns.append(f"gradient r, {name}")
        values.append(_number(numbers.get("gradient_correlation")))
    for column in columns:
        table.add_column(column.replace("_", " "), justify="right")
    table.add_row(*values)
    return table


def _ablation_table(results: dict[str, Any]) -> Table:
    """What each mapping generalizes, beside what it would without having composed."""
    table = Table(
        title=f"{results['relation']}: generalized, of {results['n']} new subjects and "
        f"{len(results['settings']['model']['seeds'])} seed(s)"
    )
    table.add_column("mapping", no_wrap=True)
    columns = {
        "source_learned": "source learned", "generalized": "generalized", "std": "std",
        "uncomposed": "compose skipped", "gain": "gain", "unrestricted": "of all candidates",
        "random": "chance", "majority": "majority", "paper": "paper",
    }  # fmt: skip
    for heading in columns.values():
        table.add_column(heading, justify="right")
    for row in results["mappings"]:
        table.add_row(row["mapping"], *(_share(row[column]) for column in columns))
    return table


def _resilience_table(results: dict[str, Any]) -> Table:
    """The pairs of which the old map keeps least."""
    table = Table(
        title=f"Maps of {results['lm_before']} on {results['lm']}: label-wise r on "
        f"{results['n_test']} held-out X's"
    )
    table.add_column("pair", no_wrap=True)
    columns = ("before", "after", "difference", "refitted", "kept")
    for column in columns:
        table.add_column(column, justify="right")
    known = [pair for pair in results["pairs"] if pair["kept"] is not None]
    for pair in sorted(known, key=lambda p: float(p["kept"]))[:MAX_ROWS]:
        table.add_row(
            f"{pair['source']}->{pair['target']}", *(_number(pair[column]) for column in columns)
        )
    return table


def _geometry_table(results: dict[str, Any]) -> Table:
    """Each shuffling level: what the LM says, and the tokens of its last layers."""
    n2, k = str(results["range_scalings"][0]), 2 if 2 in results["ks"] else results["ks"][0]
    table = Table(
        title=f"{results['n_prompts']} prompts of {results['n_tokens']} tokens "
        f"({results['n_skipped']} too short); last layers"
    )
    columns = ("S", "loss", "entropy", f"dimension (n2={n2})", f"overlap (k={k})", "cosine")
    for column in columns:
        table.add_column(column, justify="right")
    for level in results["shuffles"]:
        curves = (level["dimension"][n2], level["overlap"][str(k)], level["cosine_mean"])
        last = (curve[-1] if curve else None for curve in curves)
        numbers = (level["loss"], level["entropy"], *last)
        table.add_row(str(level["shuffle"]), *map(_number, numbers))
    return table


def _closeness_table(results: dict[str, Any]) -> Table | None:
    """Closeness of knowledges against their ties, over the mean of all layers."""
    table = Table(
        title=f"Closeness of {len(results['dimension'])} knowledges against their ties, "
        f"{results['n_subjects']} X's: Spearman (p of permuted knowledges)"
    )
    table.add_column("closeness", no_wrap=True)
    rows: dict[str, dict[str, str]] = {}
    for test in results["tests"]:
        if test["layer"] == "all":
            name = {"dimension_difference": "difference of dimension"}.get(
                test["closeness"], test["closeness"]
            )
            rho, p = test["spearman"], test["p"]
            cell = "" if rho is None else f"{rho:.2f} ({p:.4f})"
            column = test["against"] + (f" given {test['given']}" if test["given"] else "")
            rows.setdefault(f"{name} {test['setting']}".strip(), {})[column] = cell
    rows = {name: row for name, row in rows.items() if any(row.values())}
    if not rows:  # too few knowledges for a test
        return None
    against = list(dict.fromkeys(c for row in rows.values() for c in row if "hit1 given" not in c))
    for name in against:
        table.add_column(name, justify="right")
    for row_name, row in rows.items():
        table.add_row(row_name, *(row.get(name, "") for name in against))
    return table


def _share(value: float | None) -> str:
    return "" if value is None else f"{value:.0%}"


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


_TABLES: dict[str | None, Callable[[dict[str, Any]], Table | None]] = {
    "linear_probe": _pairs_table,
    "source_finetune": _edits_table,
    "vocabulary_ablation": _ablation_table,
    "resilience": _resilience_table,
    "token_geometry": _geometry_table,
    "knowledge_geometry": _closeness_table,
}
