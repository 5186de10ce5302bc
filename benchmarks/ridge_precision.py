"""Hit@1 of W by ridge and number of subjects: plain, auto and the best of the path.

    python benchmarks/ridge_precision.py --lm FOLDER --n_subjects 10000 --output FOLDER

For every relation with a reference: Hit@N of W, in both directions, at every ridge strength, for
maps fitted on half of 1,000 to n_subjects subjects; r on the other half; the same for targets that
are permuted. Intervals are the 2.5 and 97.5 percentiles over bootstrap samples of the subjects that
the map is fitted on. ``auto`` does not see the reference; ``best`` is the strength of the highest
Hit@1, which only somebody who has the answers can choose.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from domain_logits import DomainLogits, read_domain_logits
from jsonargparse import auto_cli
from matplotlib.figure import Figure
from numbers_file import write_numbers
from torch import Tensor

from lincorr_lightning import Catalogue
from lincorr_lightning.functional import (
    HALF_DECADES,
    hit_rates,
    labelwise_pearson,
    moments_of,
    strongest_within,
)
from lincorr_lightning.io import atomic_write
from lincorr_lightning.knowledge import TokenizedRelation
from lincorr_lightning.linear_map.solver import RidgeSolver, Solution, tuning_rows
from lincorr_lightning.results.style import (
    BLUE,
    GREY,
    ORANGE,
    finish,
    new_figure,
    panels_of,
    plain_axes,
)
from lincorr_lightning.results.table import markdown_table

RELATIONS = (
    "city->country", "birthplace->country", "landmark->country", "company->country",
    "country->continent", "country->language", "language->continent", "ceo->company",
    "city->city_es", "country->country_es", "X+1->X+2", "X+1->X*2",
)  # fmt: skip
TOLERANCE = 0.02
SIZES = (1000, 2000, 4000)
WAYS = ("influenced", "influencing")
_N_PANELS = 9
_ZERO = 0.03  # where a logarithmic axis has the ridge of 0
BOUNDS = torch.tensor([0.025, 0.975], dtype=torch.float64)


def solve(x: Tensor, y: Tensor) -> list[Solution]:
    """Return the map from one source to one target for each of `HALF_DECADES`.

    Args:
        x: Source logits of the subjects to fit on, ``(n, n_source)``.
        y: Target logits, ``(n, n_target)``.
    """
    columns = torch.arange(x.shape[1] + y.shape[1])
    solver = RidgeSolver(moments_of(torch.cat([x, y], 1)), *columns.split([x.shape[1], y.shape[1]]))
    return [solver.solve(ridge) for ridge in HALF_DECADES]


def mean_r(solution: Solution, x: Tensor, y: Tensor) -> float:
    """Return the mean label-wise r of a map on some subjects."""
    return float(labelwise_pearson(solution(x.double()), y.double()).nanmean())


def chosen_ridge(x: Tensor, y: Tensor) -> float:
    """Return the strength that ``ridge: auto`` takes, which every fifth subject judges."""
    judge = tuning_rows(len(x))
    r = [mean_r(solution, x[judge], y[judge]) for solution in solve(x[~judge], y[~judge])]
    return HALF_DECADES[strongest_within(r, TOLERANCE)]


def precision(solution: Solution, reference: Tensor) -> dict[str, dict[str, float]]:
    """Return Hit@N of influenced targets and of influencing sources."""
    return dict(
        zip(WAYS, (h.by_rank() for h in hit_rates(solution.weight, reference)), strict=True)
    )


def measure(x: Tensor, y: Tensor, reference: Tensor, size: int) -> dict[str, Any]:
    """Return what half of the first `size` subjects make of a relation, tested on the others."""
    x, y = x[:size], y[:size]
    fit = torch.arange(size) % 2 == 0
    pairs = zip(HALF_DECADES, solve(x[fit], y[fit]), solve(x[fit], y[fit].roll(1, 0)), strict=True)
    return {
        "auto": chosen_ridge(x[fit], y[fit]),
        "path": [
            {
                "ridge": ridge,
                "r": mean_r(solution, x[~fit], y[~fit]),
                **precision(solution, reference),
                "permuted": precision(permuted, reference),
            }
            for ridge, solution, permuted in pairs
        ],
    }


def intervals(x: Tensor, y: Tensor, reference: Tensor, n: int) -> list[dict[str, list[float]]]:
    """Return the 95 % intervals of Hit@1 at each strength, over samples of the subjects."""
    generator = torch.Generator().manual_seed(0)
    hits = []
    for _ in range(n):
        rows = torch.randint(len(x), (len(x),), generator=generator)
        rates = [precision(solution, reference) for solution in solve(x[rows], y[rows])]
        hits.append([[rate[way]["1"] for way in WAYS] for rate in rates])
    bounds = torch.tensor(hits, dtype=torch.float64).quantile(BOUNDS, dim=0)
    return [dict(zip(WAYS, strength.T.tolist(), strict=True)) for strength in bounds.unbind(1)]


def relation_results(
    logits: DomainLogits, relation: TokenizedRelation, sizes: Sequence[int], n_bootstrap: int
) -> dict[str, Any]:
    """Return the numbers of one relation."""
    x, y = (logits.logits[domain.knowledge.name] for domain in (relation.source, relation.target))
    reference = torch.from_numpy(relation.reference_mask)
    return {
        "relation": relation.name,
        "n_labels": {"source": x.shape[1], "target": y.shape[1]},
        "sizes": {str(size): measure(x, y, reference, size) for size in sizes},
        "intervals": intervals(x[: sizes[-1] : 2], y[: sizes[-1] : 2], reference, n_bootstrap),
    }


def table(results: Sequence[dict[str, Any]], way: str) -> str:
    """Return the table of one direction: r and Hit@1 of the plain map, of auto and of the best."""
    rows = []
    for found in results:
        for size, at in found["sizes"].items():
            path = at["path"]
            auto = HALF_DECADES.index(at["auto"])
            best = max(range(len(path)), key=lambda i: path[i][way]["1"])
            row = [found["relation"].replace("->", "→"), f"{int(size):,}"]
            for i in (0, auto, best):
                text = f"{path[i][way]['1']:.2f}"
                if size == list(found["sizes"])[-1]:
                    low, high = found["intervals"][i][way]
                    text += f" ({low:.2f}–{high:.2f})"
                row += [f"{path[i]['ridge']:.3g}", f"{path[i]['r']:.3f}", text]
            del row[2]  # the plain map's strength is 0
            rows.append([*row, f"{path[auto]['permuted'][way]['1']:.2f}"])
    columns = (
        "relation", "subjects", "r, plain", "Hit@1, plain", "auto", "r, auto", "Hit@1, auto",
        "best", "r, best", "Hit@1, best", "permuted, auto",
    )  # fmt: skip
    return markdown_table(columns, rows)


def draw(lm: str, results: Sequence[dict[str, Any]]) -> Figure:
    """Draw r and Hit@1 along the ridge, a line for each number of subjects."""
    shown = results[:_N_PANELS]
    figure = new_figure(
        9.6,
        2.7 * -(-len(shown) // 3),
        f"Hit@1 rises with the ridge, not with more subjects: {lm}",
        "Solid: Hit@1 of influenced targets. Dashed: r of other subjects. Darker: more subjects. "
        "Band: 95 % over bootstrap samples of the most subjects. Dotted: what auto takes.",
    )
    for axes, found in zip(panels_of(figure, len(shown), 3), shown, strict=True):
        strengths = [max(ridge, _ZERO) for ridge in HALF_DECADES]
        for step, (size, at) in enumerate(found["sizes"].items(), start=1):
            strength = step / len(found["sizes"])
            hits = [point["influenced"]["1"] for point in at["path"]]
            axes.plot(strengths, hits, color=BLUE, alpha=strength, linewidth=1.4,
                      label=f"{int(size):,}")  # fmt: skip
            axes.plot(strengths, [point["r"] for point in at["path"]], color=ORANGE,
                      alpha=strength, linewidth=1, linestyle="--")  # fmt: skip
        bounds = [interval["influenced"] for interval in found["intervals"]]
        axes.fill_between(strengths, *zip(*bounds, strict=True), color=BLUE, alpha=0.15, lw=0)
        axes.axvline(at["auto"], color=GREY, linestyle=":", linewidth=1)
        plain_axes(axes, found["relation"].replace("->", " → "), "ridge", "")
        axes.set_xscale("log")
        axes.set_xticks([_ZERO, 1, 100, 1e4, 1e6], ["0", "1", "100", "10⁴", "10⁶"])
        axes.minorticks_off()
        axes.set_ylim(0, 1)
    return finish(figure)


def main(
    lm: str = "tiny-world",
    n_subjects: int = 2000,
    relations: tuple[str, ...] = RELATIONS,
    logits: str | None = None,
    output: str | None = None,
    n_bootstrap: int = 100,
    seed: int = 0,
) -> None:
    """Print the tables of both directions.

    Args:
        lm: A folder, a .gguf file, a hub id or tiny-world.
        n_subjects: Number of subjects; half of them fit.
        relations: Relations; those that this LM's vocabulary has no labels for are left out.
        logits: Folder that keeps the logits; null keeps none.
        output: File of the numbers, JSON; a figure is beside it. Null writes none.
        n_bootstrap: Number of samples for the intervals.
        seed: Seed of the sample of subjects.
    """
    names = dict.fromkeys(name for relation in relations for name in relation.split("->"))
    with tempfile.TemporaryDirectory() as scratch:
        read = read_domain_logits(lm, list(names), n_subjects, Path(logits or scratch), seed)
    sizes = [*(size for size in SIZES if size < n_subjects), n_subjects]
    results = []
    for name in relations:
        relation = TokenizedRelation.of(name, Catalogue.load(), read.tokenizer)
        if relation.reference_mask.any() and set(name.split("->")) <= set(read.domains):
            results.append(relation_results(read, relation, sizes, n_bootstrap))
    for way in WAYS:
        print(f"\n{Path(lm).name}, {way}\n\n{table(results, way)}")
    if output is not None:
        content = {"lm": Path(lm).name, "fingerprint": read.lm, "relations": results}
        write_numbers(output, content)
        with atomic_write(Path(output).with_suffix(".png")) as path:
            draw(Path(lm).name, results).savefig(path)


if __name__ == "__main__":
    auto_cli(main)
