"""The two figures of README.md: what W is, and what was found, each beside its strongest baseline.

    python -m benchmarks.real_lms.readme_figures
    python -m benchmarks.real_lms.readme_figures --lm FOLDER

draws the findings from the files of ``run.py``; with the folder of an LM, such as Gemma 3 270M,
also its W between cities and countries that are widely known, beside their likeness in the
vocabulary, which needs no prompt: the cosine of the labels' rows of the head, centered by domain.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
import torch
from jsonargparse import auto_cli

from benchmarks.common import new_figure, plain_axes, results_of
from benchmarks.real_lms import findings
from benchmarks.real_lms.nearest_word import COUNT, NEAREST, WEIGHT, mean_areas
from benchmarks.real_lms.tables import REAL_LMS
from lincorr_lightning.knowledge import Catalogue
from lincorr_lightning.linear_map.artifact import LinearMap
from lincorr_lightning.lm.language_model import LanguageModel

RELATION = "city->country"
CITIES = (
    "Paris",
    "Tokyo",
    "Berlin",
    "Rome",
    "Madrid",
    "Moscow",
    "Cairo",
    "London",
    "Delhi",
    "Toronto",
    "Sydney",
    "Chicago",
)
Point = tuple[float, float]
"""A number of an LM, and that of its strongest baseline."""


def r_of_words(runs: Mapping[str, Any]) -> Point:
    """Return r of city->country, and that of as many random words at the same prompts."""
    found = findings.pair(runs, RELATION)
    return found["label_mean"], found["baselines"]["random_source_labels"]["mean"]


def pairing(runs: Mapping[str, Any]) -> Point:
    """Return Hit@1 of W by country, and the best of the vocabulary alone."""
    precision = findings.pair(runs, RELATION)["precision"]
    return precision["macro"]["1"], max(one["macro_1"] for one in precision["baselines"].values())


def generalized(runs: Mapping[str, Any]) -> Point:
    """Return the share of edits that generalize by country, and that of the better baseline."""
    found = findings.beside_baselines(runs, RELATION)["references"]
    return found.generalized, max(found.constant, found.vocabulary)


def forecast(runs: Mapping[str, Any]) -> Point:
    """Return the AUROC of the nearest word, and the better one of W and of the count."""
    judged = [run for run in runs["lora_edits"] if run.is_judged()]
    nearest, *others = (mean_areas(judged, one)[0] for one in (NEAREST, WEIGHT, COUNT))
    return nearest, max(others)


def composed(runs: Mapping[str, Any]) -> Point:
    """Return the share of new cities that compose to their country, and the best baseline's."""
    own, _, others = findings.composed_shares(runs, "ablation_grid")
    return mean(own), mean(others)


ROWS: tuple[tuple[str, str, Callable[[Mapping[str, Any]], Point]], ...] = (
    (
        "Logits of countries follow from those of cities (r)",
        "random words, same prompts",
        r_of_words,
    ),
    ("W pairs cities with their country (Hit@1)", "the best baseline", pairing),
    ("The nearest word forecasts edits (AUROC)", "W of the reference, or its count", forecast),
    ("Edits of a city carry over to the country", "the vocabulary alone", generalized),
    ("Token embeddings alone: new cities compose", "the nearest country", composed),
)
"""Each claim of `SUMMARY`: what is measured, its strongest baseline, and both numbers of an LM."""


def findings_figure(results: Path) -> Any:
    """Draw each finding of `SUMMARY` on each LM beside its baseline, in color where it holds."""
    lms = findings.read_lms(results)
    checks = [findings.FINDINGS[claim] for claim in findings.SUMMARY]
    figure = new_figure(
        8.6,
        4.0,
        "What was found: city → country, four LMs from 135M to 1.5B parameters",
        "A dot is an LM's number, a bar that of the strongest baseline; from above: SmolLM2, Gemma "
        "3, Qwen2.5-Coder 0.5B and 1.5B, if run; shares are means by country. Blue: the finding "
        "holds beyond the error, by its rule in docs/real_lms.md, which may be about all relations "
        "(r, Hit@1, forecasts). Orange: it does not.",
    )
    axes = figure.subplots()
    for row, ((claim, baseline, points), check) in enumerate(zip(ROWS, checks, strict=True)):
        held = 0
        known = []
        for runs in lms.values():
            with suppress(KeyError):  # not run
                known.append((points(runs), check(runs)[0]))
        for i, ((own, other), holds) in enumerate(known):
            held += holds
            y, color = -row + 0.24 - 0.16 * i, "C0" if holds else "C1"
            axes.plot([own, other], [y, y], color=color, linewidth=1)
            axes.plot(other, y, "|", color="#444444", markersize=8, markeredgewidth=1.6)
            axes.plot(own, y, "o", color=color, markersize=4.5)
        axes.text(1.03, -row, f"{held} of {len(known)} LMs", va="center", fontsize=8)
        axes.text(-0.03, -row + 0.1, claim, ha="right", va="center", fontsize=8)
        axes.text(
            -0.03,
            -row - 0.17,
            f"beside {baseline}",
            ha="right",
            va="center",
            fontsize=7,
            color="#666666",
        )
    plain_axes(axes, "", "r, share or AUROC", "")
    axes.spines["left"].set_visible(False)
    axes.set(xlim=(0, 1), yticks=[])
    return figure


def weights_figure(folder: str, name: str) -> Any:
    """Draw W of some cities beside their likeness to the countries in the vocabulary."""
    with tempfile.TemporaryDirectory() as runs:
        found = results_of(
            "fit",
            "--config",
            "configs/linear_probe.yaml",
            "--model.ridge=auto",
            "--model.knowledge=[city, country]",
            "--data.n_subjects=2000",
            f"--model.lm.name_or_path={folder}",
            f"--trainer.default_root_dir={runs}",
        )
        (path,) = Path(runs).rglob("linear_map")
        fitted = LinearMap.from_pretrained(path)
    (scored,) = (one for one in found["pairs"] if one["source"] == "city")
    hits = scored["precision"]
    lm = LanguageModel.from_pretrained(folder)
    rows = lm.model.get_output_embeddings().weight.detach().double()
    sides = [rows[fitted.token_ids(one)] for one in ("city", "country")]
    cities, countries = (unit - unit.mean(0) for unit in sides)
    likeness = torch.cosine_similarity(countries[:, None], cities[None], dim=-1).numpy()
    reference = Catalogue.load().relation(RELATION).reference
    labels = fitted.labels("city"), fitted.labels("country")
    columns, right = [], []
    for city in CITIES:
        known = [i for i, text in enumerate(labels[1]) if text in reference[city]]
        if city in labels[0] and known and known[0] not in right:
            columns.append(labels[0].index(city))
            right.append(known[0])
    figure = new_figure(
        8.6,
        4.3,
        f"What W is: city → country on {name}",
        "Left: W, fitted on the logits of 1,000 subjects, with ridge auto. Right: no prompt, "
        "the cosine between the labels' rows of the LM's head. Each column is scaled to its "
        "largest weight; the diagonal is the right country. Hit@1 is of all "
        f"{len(labels[0])} cities, as a mean over countries; the strongest map of the vocabulary "
        f"has {max(one['macro_1'] for one in hits['baselines'].values()):.2f}.",
    )
    parts = (
        (fitted.weight(RELATION).numpy(), "W", hits["macro"]["1"]),
        (likeness, "the vocabulary alone", hits["baselines"]["unembedding"]["macro_1"]),
    )
    for axes, (weight, title, hit) in zip(figure.subplots(1, 2), parts, strict=True):
        shown = weight[np.ix_(right, columns)] / weight[:, columns].max(0)
        axes.imshow(shown, cmap="RdBu_r", vmin=-1, vmax=1)
        axes.set_xticks(range(len(columns)), [labels[0][i] for i in columns], rotation=90)
        axes.set_yticks(range(len(right)), [labels[1][i] for i in right])
        axes.set_title(f"{title}: Hit@1 {hit:.2f}", fontsize=9)
        axes.tick_params(labelsize=8, length=0)
    return figure


def main(lm: str | None = None) -> None:
    """Draw the figures."""
    findings_figure(REAL_LMS).savefig(REAL_LMS / "findings.png")
    if lm is not None:
        weights_figure(lm, Path(lm).name).savefig(REAL_LMS / "known_weights.png")


if __name__ == "__main__":
    auto_cli(main)
