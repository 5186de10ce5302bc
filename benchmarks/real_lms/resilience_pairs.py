"""Maps of all pairs on post-trained LMs (paper, section 4.2: figures 8, 9, 19, 21, 24, table 9).

    python -m benchmarks.real_lms.resilience_pairs --before LM --after "[LM, LM]"

runs configs/resilience.yaml for the kinds of knowledge of the probe and the paper's similes, and
puts the table into docs/resilience.md. LMs of after are those that ``post_training`` keeps, such as
FOLDER/smollm2-135m/abstracts/128; what the file has is not measured again, and without LMs the
table is of the file alone.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pandas as pd
from jsonargparse import auto_cli
from matplotlib.figure import Figure

from benchmarks import common
from benchmarks.real_lms.run import KNOWLEDGE, PAPER_PAIRS, REAL_LMS
from lincorr_lightning.results import plots

FILE = REAL_LMS / "resilience_pairs.csv"
SIMILES = [pair for pair in PAPER_PAIRS if "simile" in pair or "name_country" in pair]
STUDIES = {
    "all": [f"--model.knowledge={json.dumps(KNOWLEDGE)}"],
    "similes": [
        f"--model.knowledge={json.dumps([*dict.fromkeys('->'.join(SIMILES).split('->'))])}",
        f"--model.pairs={json.dumps(SIMILES)}",
    ],
}
KEPT = [
    "source",
    "target",
    "before",
    "after",
    "refitted",
    "kept",
    "random_label_mean",
    "random_refitted",
    "random_kept",
    "same_prompt_label_mean",
    "after_std",
    "influenced_1",
    "refitted_influenced_1",
    "n_labels",
]


def measure(before: Path, after: Path) -> Iterator[pd.DataFrame]:
    """Yield the rows of each study."""
    for study, options in STUDIES.items():
        with tempfile.TemporaryDirectory() as scratch:
            results = common.results_of(
                "test",
                "--config",
                "configs/resilience.yaml",
                "--model.ridge=100",
                *options,
                f"--model.before.name_or_path={before}",
                f"--model.lm.name_or_path={after}",
                "--data.n_subjects=1000",
                "--data.batch_size=128",
                f"--trainer.default_root_dir={scratch}",
            )
        yield pd.DataFrame(results["pairs"])[KEPT].assign(study=study)


def group_of(pair: Any) -> str:
    """Return what kind of pair a row is of, for the table."""
    if pair.study == "similes":
        return "similes (table 9)"
    if pair.source.startswith("X") and pair.target.startswith("X"):
        return "numbers (figure 9)"
    return "with references" if pd.notna(pair.influenced_1) else "other"


def table(found: pd.DataFrame) -> str:
    """Return the table: means over the pairs of a group, and in how many W keeps more."""
    found = found.assign(group=[group_of(row) for row in found.itertuples()])
    lines = []
    keys = ["lm", "text", "steps", "training", "group"]
    for (*about, _, group), own in found.groupby(keys, sort=False):
        more = 100 * (own.kept - own.random_kept).dropna()
        r = own[["before", "after", "refitted", "random_label_mean", "random_refitted"]].mean()
        r_w0, std = own.same_prompt_label_mean.mean(), own.after_std.mean()
        ends = "{:z.0f} ({:z.0f} to {:z.0f})".format(more.mean(), *more.quantile([0.1, 0.9]))
        over_pairs = own.after.corr(own.random_label_mean)
        lines.append(
            [
                *about,
                group,
                len(own),
                " / ".join(map(common.two, r.iloc[:3])),
                common.two(std),
                " / ".join(map(common.two, r.iloc[3:])),
                common.two(r_w0),
                ends.replace("-", "−"),
                f"{(more > 0).sum()} of {len(more)}",
                common.two(over_pairs),
            ]
        )
    columns = [
        "LM",
        "text",
        "steps",
        "pairs",
        "n",
        "r: before / after / refitted",
        "std of after",
        "random words: after / refitted",
        "W₀ after",
        "kept: W − random words, points (10th to 90th percentile)",
        "W keeps more",
        "r of both, over pairs",
    ]
    return common.markdown_table(columns, lines)


def figure(found: pd.DataFrame) -> Figure:
    """Draw r of all pairs on the first LM of the file."""
    (lm, text, steps), own = next(iter(found.groupby(["lm", "text", "steps"], sort=False)))
    matrix = own[own.study == "all"].pivot_table("after", "source", "target", sort=False)
    return plots.correlation_heatmap(
        matrix[[*matrix.index]],
        f"Maps of {lm} after {steps} steps on {text}",
        "r on 500 subjects that no map was fitted on",
        limits=(-0.95, 0.95),
    )


def main(before: Path | None = None, after: tuple[Path, ...] = (), output: Path = FILE) -> None:
    """Measure what the file lacks, and put the table into the document."""
    if after and before is None:
        raise SystemExit("--after needs --before, the LM before post-training")
    parts = [common.read_csv(output)] if output.exists() else []
    for lm in after:
        text = lm.parent.name.split("_")[0]
        about = {"lm": before.name, "text": text, "steps": int(lm.name)}
        about["training"] = lm.parent.name
        if any((part[[*about]] == pd.Series(about)).all(axis=1).any() for part in parts):
            continue
        parts += [rows.assign(**about) for rows in measure(before, lm)]
        common.write_text(output, pd.concat(parts).to_csv(index=False, float_format="%.3g"))
    if output == FILE:
        found = common.read_csv(output)
        common.place_tables({"resilience_pairs": table(found)})
        figure(found).savefig(FILE.with_suffix(".png"))


if __name__ == "__main__":
    auto_cli(main)
