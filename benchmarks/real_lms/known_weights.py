"""The first figure of README.md: W of known cities beside their likeness in the vocabulary.

    python -m benchmarks.real_lms.known_weights FOLDER

fits W on the LM of a folder, Gemma 3 270M in README.md. The likeness, which needs no prompt, is the
cosine of the answers' rows of the head, centered by kind of knowledge.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jsonargparse import auto_cli

from benchmarks.common import new_figure, results_of
from benchmarks.real_lms.run import REAL_LMS
from lincorr_lightning.knowledge import Catalogue
from lincorr_lightning.linear_map.artifact import LinearMap
from lincorr_lightning.lm.language_model import LanguageModel

RELATION = "city->country"
CITIES = "Paris Tokyo Berlin Rome Madrid Moscow Cairo London Delhi Toronto Sydney Chicago"


def fit(lm: str) -> tuple[LinearMap, dict[str, Any]]:
    """Return maps between cities and countries, and the precision of that of `RELATION`."""
    with tempfile.TemporaryDirectory() as runs:
        results = results_of(
            "fit",
            "--config",
            "configs/linear_probe.yaml",
            "--model.ridge=auto",
            "--model.knowledge=[city, country]",
            "--data.n_subjects=2000",
            f"--model.lm.name_or_path={lm}",
            f"--trainer.default_root_dir={runs}",
        )
        (path,) = Path(runs).rglob("linear_map")
        maps = LinearMap.from_pretrained(path)
    (pair,) = (pair for pair in results["pairs"] if pair["source"] == "city")
    return maps, pair["precision"]


def likeness_of(lm: str, maps: LinearMap) -> np.ndarray:
    """Return the cosines of the answers' rows of the head, ``(n_countries, n_cities)``."""
    head = LanguageModel.from_pretrained(lm).model.get_output_embeddings()
    rows = head.weight.detach().double()
    sides = [rows[maps.token_ids(name)] for name in ("city", "country")]
    cities, countries = (side - side.mean(0) for side in sides)
    return torch.cosine_similarity(countries[:, None], cities[None], dim=-1).numpy()


def main(lm: str, output: Path = REAL_LMS / "known_weights.png") -> None:
    """Draw the figure.

    Args:
        lm: Folder of the LM.
        output: File to write.
    """
    maps, precision = fit(lm)
    reference = Catalogue.load().relation(RELATION).reference
    cities = maps.labels("city")
    countries = maps.labels("country")
    columns, right = [], []
    for city in CITIES.split():
        known = [i for i, text in enumerate(countries) if text in reference[city]]
        if city in cities and known and known[0] not in right:
            columns.append(cities.index(city))
            right.append(known[0])
    best = max(baseline["macro_1"] for baseline in precision["baselines"].values())
    figure = new_figure(
        8.6,
        4.3,
        f"What W is: city → country on {Path(lm).name}",
        "Left: W, fitted on the logits of 1,000 subjects, with ridge auto. Right: no prompt, "
        "the cosine between the answers' rows of the LM's head. Each column is scaled to its "
        "largest weight; the diagonal is the right country. Right first: share of all "
        f"{len(cities)} cities, as a mean over countries; the strongest map of the vocabulary "
        f"has {best:.2f}.",
    )
    nearest = precision["baselines"]["unembedding"]["macro_1"]
    parts = (
        (maps.weight(RELATION).numpy(), f"W: right first {precision['macro']['1']:.2f}"),
        (likeness_of(lm, maps), f"the vocabulary alone: right first {nearest:.2f}"),
    )
    for axes, (weight, title) in zip(figure.subplots(1, 2), parts, strict=True):
        axes.imshow(
            weight[np.ix_(right, columns)] / weight[:, columns].max(0),
            cmap="RdBu_r",
            vmin=-1,
            vmax=1,
        )
        axes.set_xticks(range(len(columns)), [cities[i] for i in columns], rotation=90)
        axes.set_yticks(range(len(right)), [countries[i] for i in right])
        axes.set_title(title, fontsize=9)
        axes.tick_params(labelsize=8, length=0)
    figure.savefig(output)


if __name__ == "__main__":
    auto_cli(main)
