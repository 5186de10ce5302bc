"""The figure of the vocabulary ablation."""

from matplotlib.figure import Figure
from pandas import DataFrame, concat

from lincorr_lightning.results.plots import BLUE, bars


def mappings_figure(mappings: DataFrame, relation: str, lm: str, n_new: int) -> Figure:
    """Draw what is generalized under each mapping, from the table ``mappings`` (paper, table 7)."""
    nulls = {"causal_inner_product": "nearest word", "majority": "constant answer"}
    n_seeds = mappings["n_seeds"].iloc[0]
    spread = f"mean and std of {n_seeds} seeds" if n_seeds > 1 else "one seed"
    composed = mappings.assign(share=mappings["generalized"], phase="after paired texts")
    without = mappings.assign(share=mappings["uncomposed"], phase="without paired texts")
    without = without.assign(**dict.fromkeys(("std", "paper", *nulls), float("nan")))
    frame = concat([composed, without.dropna(subset=["share"])])
    return bars(
        frame.astype({"std": float, "paper": float}),
        "mapping",
        "share",
        "phase",
        title=f"{relation}: generalized",
        subtitle=f"vocabulary of {lm}; {n_new} new subjects; right answer within the domain; "
        f"{spread}",
        error="std",
        marks=nulls | {"paper": "paper (Llama-3)"},
        colours={"after paired texts": BLUE, "without paired texts": "#9DC3E6"},
        label="new subjects",
    )
