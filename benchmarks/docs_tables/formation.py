"""How correlations form, depending on the training text (configs/formation.yaml).

    python -m benchmarks.docs_tables.formation

trains four small LMs from random weights. Of 0, 25, 50 and 100 % of the people the text states
both city and country, of the others one of the two. Then it fine-tunes each LM on 100 edits of
cities, one at a time, and measures how many countries follow. It prints the table that
docs/formation.md shows.
"""

import tempfile
from typing import Any

from jsonargparse import auto_cli

from benchmarks.common import markdown_table, percent, results_of

PAIR = "city->country"
COLUMNS = ("both stated", "r", "random words", "control", "Hit@1 influenced", "vocabulary",
           "Hit@1 influencing", "country inferred", "city inferred", "edits generalized",
           "random")  # fmt: skip


def row(cooccurrence: float, formed: dict[str, Any], taught: dict[str, Any]) -> list[str]:
    """Return a row of the table: the LM at the end of its training."""
    last = [point for point in formed["formation"]["correlations"] if point["pair"] == PAIR][-1]
    recall = {point["knowledge"]: point for point in formed["formation"]["recall"]}
    return [
        percent(cooccurrence),
        *(f"{last[key]:.2f}" for key in ("label_mean", "random_label_mean", "control_label_mean")),
        *(percent(last[key]) for key in ("influenced", "best_baseline_1", "influencing")),
        *(percent(recall[name]["withheld"]) for name in ("country", "city")),
        *(percent(taught[key]) for key in ("generalized", "random")),
    ]


def main(
    shares: list[float] = [0.0, 0.25, 0.5, 1.0],  # noqa: B006
    n_edits: int = 100,
    epochs: int | None = None,
) -> None:
    """Print the table.

    Args:
        shares: Shares of the people of whom city and country are both stated.
        n_edits: Number of edits of each LM.
        epochs: Epochs of each training; null takes those of the config.
    """
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        shorter = [] if epochs is None else [
            f"--trainer.max_epochs={epochs}", f"--trainer.check_val_every_n_epoch={epochs}"
        ]  # fmt: skip
        for cooccurrence in shares:
            formed = results_of(
                "fit", "--config=configs/formation.yaml", f"--data.cooccurrence={cooccurrence}",
                f"--trainer.default_root_dir={folder}", *shorter,
            )  # fmt: skip
            taught = results_of(
                "fit", "--config=configs/source_finetune.yaml", f"--data.n_edits={n_edits}",
                f"--model.lm.name_or_path={formed['model']}", "--model.lm.dtype=float32",
                f"--trainer.default_root_dir={folder}",
            )  # fmt: skip
            rows.append(row(cooccurrence, formed, taught))
    print(markdown_table(COLUMNS, rows))


if __name__ == "__main__":
    auto_cli(main, as_positional=False)
