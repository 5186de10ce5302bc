"""The numbers in docs/feature_flow.md of the feature flow in the tiny world, from a run of it.

lincorr test --config configs/feature_flow.yaml
python -m benchmarks.docs_tables.feature_flow runs/feature_flow/version_0
"""

from __future__ import annotations

from pathlib import Path

from jsonargparse import auto_cli

from benchmarks.common import markdown_table, read_numbers

CUTS = {
    "none": "nothing",
    "carriers": "features that carry both answers",
    "flow": "where both flows meet",
}


def main(run: Path) -> None:
    """Print the tables.

    Args:
        run: Folder of the run.
    """
    results = read_numbers(run / "results.json")
    groups, relation = results["groups"][-1], results["relation"]
    print(", ".join(f"{name} {share:.0%}" for name, share in groups["shares"].items() if share))
    print("AUROC", {k: round(v, 2) for k, v in groups["auroc"].items() if v is not None}, "\n")
    rows = [
        (name, row["matched_success"], row["random_success"], row["times_random"])
        for name, row in results["deactivation"].items()
    ]
    columns = ["predecessors removed", "features switched off", "random control", "times"]
    print(markdown_table(columns, rows))
    print("\nsame carrier", relation["same_carrier"], relation["same_carrier_permuted"])
    print("flows meet", relation["shared_flow"], relation["shared_flow_permuted"], "\n")
    keys = ("n_features", "fixed", "target_only", "refitted", "recall")
    rows = [
        (CUTS[row["cut"]] + (", control" if row["control"] else ""), *(row[key] for key in keys))
        for row in relation["cuts"]
    ]
    columns = ["cut", "features", "r", "r, cut in the target alone", "r, refitted", "recall"]
    print(markdown_table(columns, rows), "\n")
    keys = ("strength", "behaviour", "coherence", "score")
    rows = [(name, *(row[key] for key in keys)) for name, row in results["steering"].items()]
    columns = ["steering", "best strength", "probability", "coherence", "score"]
    print(markdown_table(columns, rows))


if __name__ == "__main__":
    auto_cli(main)
