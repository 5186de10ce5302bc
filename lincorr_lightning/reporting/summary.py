"""What a run tells at its end: its numbers at a glance, and where the rest lies."""

from __future__ import annotations

import io
import json
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
        table = _pairs_table(json.loads(results.read_text(encoding="utf-8")))
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
    if results.get("study") != "linear_probe" or not pairs:
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
