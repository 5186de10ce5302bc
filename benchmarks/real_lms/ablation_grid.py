"""The readings of the vocabulary ablation (paper, section 6) as a grid, on the vocabularies of LMs.

    python -m benchmarks.real_lms.ablation_grid --lms "[FOLDER, FOLDER]" --output FILE.csv

composes the networks of each cell once, all seeds and mappings in one batch, and lets them learn in
each of the three ways from there, by default in bfloat16. What is in the file is not measured
again. Its tables are printed and put into the documents, without folders nothing else. Settings are
those of configs/vocabulary_ablation_paper.yaml, but for epochs and steps of 256 texts in the first
phase.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, astuple, dataclass
from itertools import product
from operator import sub
from pathlib import Path
from typing import Any, get_args

import lightning as L
import pandas as pd
import torch
from jsonargparse import auto_cli
from safetensors.torch import save_file
from torch import Tensor
from torch.utils.data import DataLoader

from benchmarks import common
from lincorr_lightning.ablation import PairedTextsDataModule, VocabularyAblation, datamodule
from lincorr_lightning.ablation.networks import NetworkKind, NetworkSettings
from lincorr_lightning.ablation.token_embedding import read_token_embedding
from lincorr_lightning.lm.config import LMConfig

FILE = common.RESULTS / "real_lms" / "ablation_grid.csv"
WAYS = get_args(datamodule.Trained)
NULLS = ("random", "majority", "nearest", "upper_bound", "macro_nearest")
BOTH = ("reference", "permuted")
MAPPINGS = (*BOTH, "permuted_targets", "letters")
PAPER = {"reference": 0.9766, "permuted": 0.2266, "letters": 0.3672}  # table 7
SMALL_WIDTH = 256  # of which a cell takes minutes
CUTS = ((128, 1), (256, 1), (64, 4), (64, 16), (128, 4))  # widths, and factors of the epochs


@dataclass(frozen=True)
class Cell:
    """A setting of the grid, whose networks are composed in one batch."""

    lm: str
    """Name of the LM's folder."""
    width: int = 0
    """Number of principal components that the embedding is cut to; 0 leaves it whole."""
    per_target: int = 1
    """Number of source labels with the same target; 0 takes all."""
    kind: NetworkKind = "plain"
    center: bool = False
    epochs_factor: int = 1
    """Factor of both phases' epochs."""


KEYS = list(Cell.__dataclass_fields__)


def grid(lms: Sequence[str]) -> Iterator[tuple[Cell, tuple[str, ...]]]:
    """Yield cells and their mappings, the most important ones first."""
    mappings = tuple(PAPER)
    first, *others = lms
    networks: tuple[tuple[NetworkKind, bool], ...]
    networks = ("gated", False), ("plain", True), ("gated", True)
    yield Cell(first), mappings
    yield Cell(first, per_target=0), MAPPINGS
    for width, epochs_factor in CUTS:
        yield Cell(first, width, epochs_factor=epochs_factor), mappings
    for lm in others:
        yield Cell(lm, SMALL_WIDTH), mappings
    for lm, network in product(lms, networks):
        yield Cell(lm, SMALL_WIDTH, 1, *network), mappings
    # With one city of each country, both permutations agree.
    mappings_of = {1: mappings, 0: MAPPINGS}
    for lm, per_target in product(others, mappings_of):
        yield Cell(lm, 0, per_target), mappings_of[per_target]
    for per_target, lm, network in product(mappings_of, lms, networks):
        yield Cell(lm, 0, per_target, *network), mappings_of[per_target]


class ComposedOnce(VocabularyAblation):
    """Keeps the composed networks, and begins with given ones where it composes nothing."""

    composed: dict[str, Tensor] | None = None

    def on_train_batch_start(self, batch: datamodule.TextBatch, batch_idx: int) -> None:
        """Keep what has been composed before anything is learned."""
        super().on_train_batch_start(batch, batch_idx)
        if batch.begins and batch.phase == "learn" and self.composed is None:
            self.composed = {k: v.clone() for k, v in self.networks.state_dict().items()}

    def reset_networks(self) -> None:
        """Begin with the composed networks."""
        super().reset_networks()
        if self.composed is not None:
            self.networks.load_state_dict(self.composed, strict=False)


def cut(folder: Path, width: int, into: Path) -> None:
    """Write a checkpoint of an LM's embedding on its first principal components alone."""
    for file in folder.glob("*.json"):
        if "index" not in file.name:
            shutil.copy(file, into)
    weight = read_token_embedding(LMConfig(str(folder))).weight.float()
    _, components = torch.linalg.eigh(torch.cov(weight.T))
    cut_weight = weight @ components[:, -width:]
    save_file({"embed_tokens.weight": cut_weight}, into / "model.safetensors", {"format": "pt"})


def measure(
    cell: Cell,
    folder: Path,
    mappings: Sequence[str],
    seeds: list[int],
    epochs: tuple[int, int],
    precision: Any,
) -> list[dict[str, Any]]:
    """Return a row for each way to learn, mapping and seed."""
    rows: list[dict[str, Any]] = []
    corpus: datamodule.PairedCorpus | None = None
    n_compose, n_learn = (n * cell.epochs_factor for n in epochs)
    composed = None
    with tempfile.TemporaryDirectory() as temporary:
        if cell.width:
            cut(folder, cell.width, Path(temporary))
            folder = Path(temporary)
        for way in WAYS:
            module = ComposedOnce(
                LMConfig(str(folder)),
                mapping=list(mappings),
                seeds=seeds,
                skip_compose_baseline=False,
                score_every=10_000,
                network=NetworkSettings(residual=False, center=cell.center, kind=cell.kind),
                compose=datamodule.PhaseSettings(0 if corpus else n_compose, 256, 1e-3, 0.01),
                learn=datamodule.LearnSettings(n_learn, 128, 1e-3, 0.01, way),
            )
            if corpus is None:
                data = PairedTextsDataModule(
                    module.plan, max_sources_per_target=cell.per_target or None
                )
                data.setup()
                corpus = data.corpus
            assert corpus is not None
            module.composed = composed
            corpus = datamodule.PairedCorpus(
                corpus.labels, corpus.texts, module.plan, module.embedding.tokenizer
            )
            trainer = L.Trainer(
                accelerator="auto",
                devices=1,
                max_epochs=1,
                precision=precision,
                logger=False,
                enable_checkpointing=False,
                enable_progress_bar=False,
                enable_model_summary=False,
                default_root_dir=temporary,
            )
            trainer.fit(module, DataLoader(datamodule.PhaseDataset(corpus), batch_size=None))
            composed = module.composed
            assert module.results is not None
            values = module.results.values
            beside = {m["mapping"]: m for m in values["mappings"]}
            size = {
                "dimensions": values["embedding"]["shape"][1],
                "labels": f"{values['n_source_labels']} / {values['n_target_labels']}",
                "precision": precision,
            }
            for run in values["runs"]:
                found = beside[run["mapping"]]
                nulls = {k: found[k] for k in NULLS}
                del run["composed"]
                rows.append({**asdict(cell), **size, "train": way, **run, **nulls})
    return rows


def tables(rows: pd.DataFrame) -> dict[str, str]:
    """Return the documents' tables of the grid."""
    readings, others, nulls = [], [], []
    ways = [f"trained: {way}" for way in WAYS]
    rows = rows.sort_values(KEYS, ascending=[key != "kind" for key in KEYS], kind="stable")
    for key, cell in rows.groupby(KEYS, sort=False):
        lm, width, per_target, kind, center, epochs_factor = key
        of = dict(iter(cell.groupby(["train", "mapping"])))
        shares = {key: common.mean_interval(one["generalized"]) for key, one in of.items()}
        first = of["network", "reference"]
        network = kind + ", centered" * center
        setting = [lm, *first.iloc[0][["dimensions", "labels"]], network, f"{epochs_factor}x"]
        pairs = [" / ".join(shares[way, mapping] for mapping in BOTH) for way in WAYS]
        learned = common.percent(min(of[way, "reference"]["source_learned"].mean() for way in WAYS))
        chosen = readings if (width, per_target) == (0, 1) else others
        said = (of[way, "reference"]["unrestricted"].mean() for way in WAYS)
        beside = first[["nearest", "macro_nearest"]].mean().map(common.percent)
        chosen.append(
            [
                *setting,
                len(first),
                *pairs,
                " / ".join(map(common.percent, said)),
                " / ".join(beside),
                learned,
            ]
        )
        for way in WAYS if ("network", "letters") in of else ():
            own = [shares.get((way, mapping), "–") for mapping in MAPPINGS]
            all_of = of[way, "reference"]
            if (way, "permuted_targets") in of:
                by_seed = (
                    x.set_index("seed")["generalized"]
                    for x in (all_of, of[way, "permuted_targets"])
                )
                own[2] += f" ({common.mean_interval(sub(*by_seed))})"
            more = map(
                common.mean_interval,
                (all_of[k] for k in ("macro_generalized", "unrestricted", "says_source")),
            )
            bounds = (of[way, "letters"]["upper_bound"], all_of["majority"])
            limits = (common.percent(share.mean()) for share in bounds)
            nulls.append([*setting, way, own[0], *more, *own[1:], *limits, *beside])
    settings = ("vocabulary", "width", "cities / countries", "network", "epochs")
    columns = [
        *settings,
        "seeds",
        *ways,
        "of all candidates: " + " / ".join(WAYS),
        "nearest / by country",
        "learned, at least",
    ]
    return {
        "ablation_closest": closest(rows),
        "ablation_leads": leads(rows),
        "ablation_readings": common.markdown_table(columns, readings),
        "ablation_others": common.markdown_table(columns, others),
        "ablation_nulls": common.markdown_table(
            [
                *settings,
                "trained",
                "reference",
                "macro",
                "of all candidates",
                "says the city",
                "permuted",
                "permuted as countries (lead over it)",
                "letters",
                "letters, at most",
                "most frequent",
                "nearest",
                "nearest, macro",
            ],
            nulls,
        ),
    }


def closest(rows: pd.DataFrame) -> str:
    """Return the readings whose reference and permuted shares are closest to the paper's."""
    keys = [*KEYS, "dimensions", "labels", "train"]
    shares = rows.pivot_table("generalized", keys, "mapping").reset_index()
    shares["off"] = sum((shares[name] - one).abs() for name, one in PAPER.items() if name in BOTH)
    found: list[list[str]] = []
    for _, one in shares.sort_values("off").head(4).iterrows():
        own = rows[(rows[keys] == one[keys]).all(axis=1)]
        by_mapping = own.groupby("mapping")["generalized"].agg(common.mean_interval)
        network = one["kind"] + ", centered" * one["center"]
        how = f"{network}; trains {one['train']}, {one['epochs_factor']}x"
        reading = [one["lm"], one["dimensions"], one["labels"], how, own["seed"].nunique()]
        found.append([*reading, *by_mapping.reindex(list(PAPER), fill_value="–")])
    paper = ["Llama-3-8B, as published", 4096, "", "", 1, *(round(100 * p) for p in PAPER.values())]
    sizes = ("vocabulary", "width", "cities / countries", "reading", "seeds")
    return common.markdown_table([*sizes, *PAPER], [*found, paper])


def leads(rows: pd.DataFrame) -> str:
    """Return reference less permuted pairs of plain networks, and others' beyond it by seed."""
    whole = rows.query("width == 0 and per_target == 1 and epochs_factor == 1")
    lead = whole.pivot_table("generalized", ["lm", "train", "seed"], ["mapping", "kind", "center"])
    lead = (lead["reference"] - lead["permuted"]).dropna(axis=1, how="all")
    plain = lead.pop(("plain", False))
    beyond = lead.sub(plain, axis=0).groupby(["lm", "train"]).agg(common.mean_interval)
    own = plain.groupby(["lm", "train"]).agg(common.mean_interval)
    names = [kind + ", centered" * center + ": more" for kind, center in beyond]
    found = [[*key, own[key], *beyond.loc[key]] for key in own.index]
    return common.markdown_table(["vocabulary", "trained", "plain: lead", *names], found)


def main(
    lms: tuple[str, ...] = (),
    output: str = str(FILE),
    n_seeds: int = 5,
    batch: int = 5,
    epochs: tuple[int, int] = (60, 100),
    precision: str = "32-true",
) -> None:
    """Train the networks that the file lacks, and print its tables.

    Args:
        lms: Folders of LMs; none trains nothing.
        output: CSV file of a row for each network and way to learn.
        n_seeds: Number of networks of each mapping.
        batch: Number of seeds that are trained side by side, and saved together.
        epochs: Epochs of the two phases.
        precision: Of Lightning's Trainer.
    """
    rows = common.read_csv(output).to_dict("records") if Path(output).exists() else []
    keys = [*KEYS, "mapping", "seed"]
    done = {tuple(row[key] for key in keys) for row in rows}
    folders = {Path(lm).name: Path(lm) for lm in lms}
    cells = grid(list(folders)) if lms else ()
    for (cell, mappings), first in product(cells, range(0, n_seeds, batch)):
        seeds = [*range(first, min(first + batch, n_seeds))]
        wanted = {m: {(*astuple(cell), m, seed) for seed in seeds} for m in mappings}
        if lacking := [mapping for mapping, own in wanted.items() if not own <= done]:
            # The softmax is over the tokens of all texts: with letters, the same for each mapping.
            trained = tuple(dict.fromkeys(("letters", *lacking)))
            found = measure(cell, folders[cell.lm], trained, seeds, epochs, precision)
            rows += [row for row in found if tuple(row[key] for key in keys) not in done]
            done |= set().union(*wanted.values())
            common.write_text(output, pd.DataFrame(rows).to_csv(index=False, float_format="%.4g"))
            print(cell, flush=True)
    made = tables(pd.DataFrame(rows))
    print("\n\n".join(made.values()))
    common.place_tables(made if output == str(FILE) else {})


if __name__ == "__main__":
    auto_cli(main)
