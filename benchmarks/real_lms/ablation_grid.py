"""The readings of the vocabulary ablation (paper, section 6) as a grid, on the vocabularies of LMs.

    python -m benchmarks.real_lms.ablation_grid --lms "[FOLDER, FOLDER]"

trains what ``benchmarks/results/real_lms/ablation_grid.csv`` lacks, and makes of it
``ablation_cells.csv``, the figure and the table of docs/vocabulary_ablation.md; without folders,
of the file as it is. Settings are those of configs/vocabulary_ablation_paper.yaml, but for the
epochs and 256 texts per step in the first phase.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import get_args

import pandas as pd
import torch
from jsonargparse import auto_cli
from matplotlib.figure import Figure
from safetensors.torch import save_file

from benchmarks import common
from lincorr_lightning.ablation.datamodule import Trained
from lincorr_lightning.ablation.networks import NetworkKind
from lincorr_lightning.ablation.token_embedding import read_token_embedding
from lincorr_lightning.lm.config import LMConfig
from lincorr_lightning.results import plots

FILE = common.RESULTS / "real_lms" / "ablation_grid.csv"
TRAINED = get_args(Trained)
MAPPINGS = ("reference", "permuted", "letters")
BASELINES = ["random", "majority", "nearest", "macro_nearest", "upper_bound"]
REFERENCE = ["macro_generalized", "unrestricted", "says_source", "source_learned", *BASELINES[1:4]]


@dataclass(frozen=True)
class Cell:
    """A setting of the grid."""

    lm: str
    """Name of the LM's folder."""
    width: int = 0
    """Number of principal components that the embedding is cut to; 0 leaves it whole."""
    per_target: int = 1
    """Number of source labels with the same target; 0 takes all."""
    kind: NetworkKind = "plain"
    center: bool = False
    """Whether inputs are centered."""


def grid(lms: Sequence[str]) -> Iterator[Cell]:
    """Yield the cells, those of few cities and of narrow embeddings first."""
    for width, per_target in ((256, 1), (0, 1), (0, 0)):
        for lm, kind, center in product(lms, get_args(NetworkKind), (False, True)):
            yield Cell(lm, width, per_target, kind, center)


def cut(folder: Path, width: int, into: Path) -> None:
    """Write a checkpoint of an LM's embedding on its first principal components alone."""
    for file in folder.glob("*.json"):
        if "index" not in file.name:
            shutil.copy(file, into)
    weight = read_token_embedding(LMConfig(str(folder))).weight.float()
    _, components = torch.linalg.eigh(torch.cov(weight.T))
    cut_weight = weight @ components[:, -width:]
    save_file({"embed_tokens.weight": cut_weight}, into / "model.safetensors", {"format": "pt"})


def measure(cell: Cell, folder: Path, seeds: list[int], epochs: tuple[int, int]) -> pd.DataFrame:
    """Return a row for each way to learn, mapping and seed."""
    mappings = [*MAPPINGS]
    if not cell.per_target:  # with one city of each country, both permutations agree
        mappings.append("permuted_targets")
    parts = []
    with tempfile.TemporaryDirectory() as scratch:
        if cell.width:
            cut(folder, cell.width, Path(scratch))
            folder = Path(scratch)
        for trained in TRAINED:
            results = common.results_of(
                "fit",
                "--config=configs/vocabulary_ablation_paper.yaml",
                f"--model.lm.name_or_path={folder}",
                f"--model.mapping={mappings}",
                f"--model.seeds={seeds}",
                f"--model.network.kind={cell.kind}",
                f"--model.network.center={cell.center}",
                f"--model.compose.epochs={epochs[0]}",
                "--model.compose.batch_size=256",
                f"--model.learn.epochs={epochs[1]}",
                f"--model.learn.train={trained}",
                f"--data.max_sources_per_target={cell.per_target or 'null'}",
                "--trainer.accelerator=auto",
                f"--trainer.default_root_dir={scratch}/runs",
            )
            baselines = pd.DataFrame(results["mappings"])[["mapping", *BASELINES]]
            setting = asdict(cell) | {
                "epochs_factor": 1,
                "dimensions": results["embedding"]["shape"][1],
                "labels": f"{results['n_source_labels']} / {results['n_target_labels']}",
                "train": trained,
            }
            runs = pd.DataFrame(results["runs"]).drop(columns="composed")
            parts.append(runs.merge(baselines, on="mapping").assign(**setting))
    return pd.concat(parts)


def with_network(rows: pd.DataFrame) -> pd.DataFrame:
    """Name networks in one column, and sort by cell."""
    network = rows["kind"] + rows["center"].map({True: ", centered", False: ""})
    keys = ["lm", "width", "per_target", "kind", "center", "epochs_factor"]
    return rows.assign(network=network).sort_values(keys, kind="stable")


def summary(rows: pd.DataFrame) -> pd.DataFrame:
    """Return a row for each cell and way to learn: means over seeds, and half of 95 % intervals.

    The lead is that of reference over permuted pairs, seed by seed, alone and minus that of the
    plain network.
    """
    keys = ["lm", "dimensions", "labels", "network", "epochs_factor", "train"]
    shares = rows.pivot_table("generalized", [*keys, "seed"], "mapping", sort=False)
    shares["lead"] = shares["reference"] - shares["permuted"]
    leads = shares["lead"].unstack("network")
    over_plain = leads.sub(leads["plain"], axis=0).stack()
    shares["lead_over_plain"] = over_plain.reorder_levels(shares.index.names)
    grouped = shares.groupby(keys, sort=False)
    means = grouped.mean().join(grouped.agg(common.half_interval).add_suffix("_half"))
    means.insert(0, "seeds", grouped.size())
    reference = rows[rows["mapping"] == "reference"].groupby(keys, sort=False)
    letters = rows[rows["mapping"] == "letters"].groupby(keys, sort=False)
    means = means.join(reference[REFERENCE].mean())
    means["macro_generalized_half"] = reference["macro_generalized"].agg(common.half_interval)
    means["letters_at_most"] = letters["upper_bound"].mean()
    return means.reset_index()


def readings_table(rows: pd.DataFrame) -> str:
    """Return the cells of whole embeddings and one city of each country, as reference / permuted.

    Gated networks on centered inputs, which fail, are left out.
    """
    rows = rows.query("width == 0 and per_target == 1 and network != 'gated, centered'")
    keys = ["lm", "dimensions", "network"]
    shares = rows.groupby([*keys, "train", "mapping"], sort=False)["generalized"]
    shown = shares.agg(common.mean_interval).unstack("mapping")
    pairs = (shown["reference"] + " / " + shown["permuted"]).unstack("train")[[*TRAINED]]
    pairs = pairs.add_prefix("trained: ")
    nearest = rows[rows["mapping"] == "reference"].groupby(keys, sort=False)["nearest"].mean()
    pairs["nearest country"] = nearest.map("{:.0%}".format)
    return common.markdown_frame(pairs, "vocabulary", "width", "network")


def figure(rows: pd.DataFrame) -> Figure:
    """Draw what plain networks on centered inputs compose, by what the second phase trains."""
    rows = rows.query("width == 0 and per_target == 1 and network == 'plain, centered'")
    nearest = rows[rows["mapping"] == "reference"].assign(mapping="nearest country")
    rows = pd.concat([rows, nearest.assign(generalized=nearest["nearest"])])
    shares = rows.groupby(["lm", "train", "mapping"], sort=False)["generalized"]
    frame = shares.agg(["mean", common.half_interval]).reset_index()
    low, high = (frame["mean"] + sign * frame["half_interval"] for sign in (-1, 1))
    return plots.curves(
        frame.assign(low=low, high=high),
        "train",
        "mean",
        "mapping",
        "lm",
        band=("low", "high"),
        title="What makes cities compose makes permuted pairs compose, too",
        subtitle="share of new subjects with the right country, one city of each country; plain "
        "networks, centered inputs; bands: 95 % intervals over seeds",
        labels=("trained in the second phase", "right country"),
        percent=True,
        share_y=True,
        per_row=4,
        size=(2.6, 2.5),
    )


def main(
    lms: tuple[Path, ...] = (),
    output: Path = FILE,
    n_seeds: int = 5,
    epochs: tuple[int, int] = (60, 100),
) -> None:
    """Train the networks of the cells that the file lacks, and write its tables.

    Args:
        lms: Folders of LMs; none trains nothing.
        output: CSV file of a row for each network and way to learn.
        n_seeds: Number of networks of each mapping.
        epochs: Epochs of the two phases.
    """
    rows = common.read_csv(output) if output.exists() else pd.DataFrame()
    folders = {lm.name: lm for lm in lms}
    for cell in grid(list(folders)) if lms else ():
        if common.has_row(rows, **asdict(cell)):
            continue
        measured = measure(cell, folders[cell.lm], list(range(n_seeds)), epochs)
        rows = pd.concat([rows, measured])
        common.write_csv(output, rows)
    rows = with_network(rows)
    common.write_csv(output.with_name("ablation_cells.csv"), summary(rows))
    if output == FILE:
        common.place_tables({"ablation_readings": readings_table(rows)})
        FILE.with_suffix(".png").write_bytes(plots.to_png(figure(rows)))


if __name__ == "__main__":
    auto_cli(main)
