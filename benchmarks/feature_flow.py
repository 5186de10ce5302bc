"""The numbers in docs/feature_flow.md of the feature flow in the tiny world, from a run of it.

lincorr test --config configs/feature_flow.yaml
python benchmarks/feature_flow.py runs/feature_flow/version_0
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from lincorr_lightning.results.table import markdown_table

CUTS = {
    "none": "nothing",
    "carriers": "features that carry both answers",
    "flow": "where both flows meet",
}


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path, help="Folder of the run.")
    arguments = parser.parse_args()
    results = json.loads((arguments.run / "results.json").read_text(encoding="utf-8"))
    groups = results["groups"][-1]
    print(", ".join(f"{name} {share:.0%}" for name, share in groups["shares"].items() if share))
    print("AUROC", {k: round(v, 2) for k, v in groups["auroc"].items() if v is not None}, "\n")
    print(
        markdown_table(
            ["predecessors removed", "features switched off", "random control", "times"],
            [
                (name, row["matched_success"], row["random_success"], row["times_random"])
                for name, row in results["deactivation"].items()
            ],
        )
    )
    relation = results["relation"]
    print("\nsame carrier", relation["same_carrier"], relation["same_carrier_permuted"])
    print("flows meet", relation["shared_flow"], relation["shared_flow_permuted"], "\n")
    print(
        markdown_table(
            ["cut", "features", "r", "r, cut in the target alone", "r, refitted", "recall"],
            [
                (
                    CUTS[row["cut"]] + (", control" if row["control"] else ""),
                    *(row[k] for k in ("n_features", "fixed", "target_only", "refitted", "recall")),
                )
                for row in relation["cuts"]
            ],
        )
    )
    print()
    print(
        markdown_table(
            ["steering", "best strength", "probability", "coherence", "score"],
            [
                (name, *(row[k] for k in ("strength", "behaviour", "coherence", "score")))
                for name, row in results["steering"].items()
            ],
        )
    )


if __name__ == "__main__":
    main()
