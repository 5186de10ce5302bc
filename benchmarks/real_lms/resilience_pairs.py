"""Maps of all pairs on post-trained LMs (paper, section 4.2: figures 8, 9, 19, 21, 24, table 9).

    python -m benchmarks.real_lms.resilience_pairs --before LM --after "[LM, LM]"

runs configs/resilience.yaml for the kinds of knowledge of the probe and the paper's similes. LMs of
after are those that ``post_training`` keeps, such as FOLDER/smollm2-135m/abstracts/128; what
``benchmarks/results/real_lms/resilience_pairs.csv`` has is not measured again. Its groups of pairs
are in ``resilience_groups.csv`` and in docs/resilience.md.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import numpy as np
import pandas as pd
from jsonargparse import auto_cli

from benchmarks import common
from benchmarks.real_lms.run import KNOWLEDGE, PAPER_PAIRS

FILE = common.RESULTS / "real_lms" / "resilience_pairs.csv"
SIMILES = [pair for pair in PAPER_PAIRS if "simile" in pair or "name_country" in pair]
STUDIES = {
    "all": [f"--model.knowledge={json.dumps(KNOWLEDGE)}"],
    "similes": [
        f"--model.knowledge={json.dumps([*dict.fromkeys('->'.join(SIMILES).split('->'))])}",
        f"--model.pairs={json.dumps(SIMILES)}",
    ],
}
SCORES = ["before", "after", "refitted", "kept", "random_label_mean", "random_refitted"]
SCORES += ["random_kept", "same_prompt_label_mean", "after_std", "influenced_1"]
SCORES += ["refitted_influenced_1", "n_labels"]


def measure(before: Path, after: Path) -> pd.DataFrame:
    """Return the rows of both studies."""
    parts = []
    for study, options in STUDIES.items():
        with tempfile.TemporaryDirectory() as scratch:
            results = common.results_of(
                "test",
                "--config=configs/resilience.yaml",
                "--model.ridge=100",
                *options,
                f"--model.before.name_or_path={before}",
                f"--model.lm.name_or_path={after}",
                "--data.n_subjects=1000",
                "--data.batch_size=128",
                f"--trainer.default_root_dir={scratch}",
            )
        rows = pd.DataFrame(results["pairs"])[["source", "target", *SCORES]]
        parts.append(rows.assign(study=study))
    return pd.concat(parts)


def groups(rows: pd.DataFrame) -> pd.DataFrame:
    """Return means over the pairs of each group, and in how many W keeps more than random words."""
    kinds = {
        "similes (table 9)": rows["study"] == "similes",
        "numbers (figure 9)": rows["source"].str[0].eq("X") & rows["target"].str[0].eq("X"),
        "relations": rows["influenced_1"].notna(),
    }
    lead = rows["kept"] - rows["random_kept"]
    group = np.select([*kinds.values()], [*kinds], "other pairs")
    rows = rows.assign(group=group, lead=lead, leads=lead > 0)
    grouped = rows.groupby(["lm", "text", "steps", "group"], sort=False)
    table = grouped[SCORES].mean().assign(pairs=grouped.size(), leads=grouped["leads"].sum())
    both = grouped[["after", "random_label_mean"]].corr()["random_label_mean"]
    table["r_over_pairs"] = both.xs("after", level=-1)
    spread = grouped["lead"].describe(percentiles=[0.1, 0.9])[["count", "mean", "10%", "90%"]]
    return table.join(spread.rename(columns={"count": "of", "mean": "lead"})).reset_index()


def table(found: pd.DataFrame) -> str:
    """Return the document's table: a row for each group, a column for each LM and text."""
    cells = []
    for row in found.to_dict("records"):
        ends = (100 * row[key] for key in ("lead", "10%", "90%"))
        lead = "{:z.0f} ({:z.0f} to {:z.0f})".format(*ends).replace("-", "−")
        cells.append(f"{lead}; {row['leads']} of {row['of']:.0f}")
    found = found.assign(cell=cells, column=found["lm"] + ", " + found["text"])
    shown = found.pivot(index="group", columns="column", values="cell")
    shown = shown.loc[found["group"].unique(), found["column"].unique()]
    return common.markdown_frame(shown, "pairs")


def main(before: Path | None = None, after: tuple[Path, ...] = (), output: Path = FILE) -> None:
    """Measure what the file lacks, and write its groups.

    Args:
        before: LM before post-training.
        after: LMs after it.
        output: CSV file of all pairs.
    """
    rows = common.read_csv(output) if output.exists() else pd.DataFrame()
    for lm in after:
        text, _, _ = lm.parent.name.partition("_")
        about = {"lm": before.name, "text": text, "steps": int(lm.name)}
        about["training"] = lm.parent.name
        if not common.has_row(rows, **about):
            rows = pd.concat([rows, measure(before, lm).assign(**about)])
            common.write_csv(output, rows)
    found = groups(rows)
    common.write_csv(output.with_name("resilience_groups.csv"), found)
    if output == FILE:
        common.place_tables({"resilience_pairs": table(found)})


if __name__ == "__main__":
    auto_cli(main)
