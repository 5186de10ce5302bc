"""How correlations form, depending on the training text (configs/formation.yaml).

    python benchmarks/formation.py

trains four small LMs from random weights. Of 0, 25, 50 and 100 % of the people the text states
both city and country, of the others one of the two. Then it fine-tunes each LM on 100 edits of
cities, one at a time, and measures how many countries follow. It prints the table that
docs/formation.md shows, and with `--figure FILE` draws r, Hit@1 and the recall of withheld facts
over the steps.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

from jsonargparse import auto_cli

from lincorr_lightning.cli import main as lincorr
from lincorr_lightning.results.style import to_picture
from lincorr_lightning.results.table import markdown_table
from lincorr_lightning.results.training_curves import training_curves

PAIR = "city->country"
COLUMNS = ("both stated", "r", "control", "Hit@1 influenced", "Hit@1 influencing",
           "country inferred", "city inferred", "edits generalized", "random")  # fmt: skip


def run(*arguments: str) -> dict[str, Any]:
    """Run the program and return the results."""
    cli = lincorr(["fit", *arguments, "--trainer.enable_progress_bar=false"])
    found: dict[str, Any] = json.loads((Path(cli.trainer.log_dir) / "results.json").read_text())
    return found


def share(value: float | None) -> str:
    """Return a percentage; empty where there is no number."""
    return "" if value is None else f"{value:.0%}"


def row(cooccurrence: float, formed: dict[str, Any], taught: dict[str, Any]) -> list[str]:
    """Return a row of the table: the LM at the end of its training."""
    points = formed["formation"]["correlations"]
    last = [point for point in points if point["pair"] == PAIR][-1]
    recall = {point["knowledge"]: point for point in formed["formation"]["recall"]}
    return [
        share(cooccurrence),
        *(f"{last[key]:.2f}" for key in ("label_mean", "control_label_mean")),
        *(share(last[key]) for key in ("influenced", "influencing")),
        *(share(recall[name]["withheld"]) for name in ("country", "city")),
        *(share(taught[key]) for key in ("generalized", "random")),
    ]


def curves(cooccurrence: float, formed: dict[str, Any]) -> dict[str, list[tuple[int, float]]]:
    """Return the curves of one LM."""
    name = f"{cooccurrence:.0%}"
    points = [one for one in formed["formation"]["correlations"] if one["pair"] == PAIR]
    country = [p for p in formed["formation"]["recall"] if p["knowledge"] == "country"]
    found = {
        f"label-wise r/{name}": [(p["step"], p["label_mean"]) for p in points],
        f"Hit@1 influenced/{name}": [(p["step"], p["influenced"]) for p in points],
    }
    inferred = [(p["step"], p["withheld"]) for p in country if p["withheld"] is not None]
    return found | ({f"country inferred/{name}": inferred} if inferred else {})


def main(
    shares: list[float] = [0.0, 0.25, 0.5, 1.0],  # noqa: B006
    n_edits: int = 100,
    epochs: int | None = None,
    figure: Path | None = None,
) -> None:
    """Print the table.

    Args:
        shares: Shares of the people of whom city and country are both stated.
        n_edits: Number of edits of each LM.
        epochs: Epochs of each training; null takes those of the config.
        figure: PNG file of the figure.
    """
    rows = []
    history: dict[str, list[tuple[int, float]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        shorter = [] if epochs is None else [
            f"--trainer.max_epochs={epochs}", f"--trainer.check_val_every_n_epoch={epochs}"
        ]  # fmt: skip
        for cooccurrence in shares:
            formed = run(
                "--config=configs/formation.yaml", f"--data.cooccurrence={cooccurrence}",
                f"--trainer.default_root_dir={folder}", *shorter,
            )  # fmt: skip
            taught = run(
                "--config=configs/source_finetune.yaml", f"--data.n_edits={n_edits}",
                f"--model.lm.name_or_path={formed['model']}", "--model.lm.dtype=float32",
                f"--trainer.default_root_dir={folder}",
            )  # fmt: skip
            rows.append(row(cooccurrence, formed, taught))
            history |= curves(cooccurrence, formed)
    print(markdown_table(COLUMNS, rows))
    if figure is not None:
        title = "How the correlation of city and country forms"
        subtitle = "by the share of people of whom the text states both"
        figure.write_bytes(to_picture(training_curves(history, title, subtitle)).png)


if __name__ == "__main__":
    auto_cli(main, as_positional=False)
