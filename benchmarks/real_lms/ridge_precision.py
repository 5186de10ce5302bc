"""Hit@1 of W by ridge and number of subjects.

    python -m benchmarks.real_lms.ridge_precision --lm FOLDER --n_subjects 10000 --output FILE.json

For every relation with a reference: Hit@N of W, in both directions, at every ridge strength, for
maps fitted on half of 1,000 to n_subjects subjects; r on the other half; the same for targets that
are permuted. Intervals are the 2.5 and 97.5 percentiles over bootstrap samples of the subjects that
the map is fitted on. ``auto`` does not see the reference.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from jsonargparse import auto_cli
from torch import Tensor

from benchmarks.common import two, write_numbers
from lincorr_lightning import Catalogue, LanguageModel
from lincorr_lightning.functional import (
    HALF_DECADES,
    LeastSquares,
    hit_rates,
    labelwise_pearson,
    strongest_within,
)
from lincorr_lightning.knowledge import TokenizedRelation
from lincorr_lightning.linear_map.layout import RowReader, build_layout
from lincorr_lightning.lm import sample_subjects

RELATIONS = (
    "city->country", "birthplace->country", "landmark->country", "company->country",
    "country->continent", "country->language", "language->continent", "ceo->company",
    "city->city_es", "country->country_es", "X+1->X+2", "X+1->X*2",
)  # fmt: skip
TOLERANCE = 0.02
SIZES = (1000, 2000, 4000)
WAYS = ("influenced", "influencing")
BOUNDS = torch.tensor([0.025, 0.975], dtype=torch.float64)
N_BOOTSTRAP = 100  # samples for the intervals
MIN_LABELS = 3


def read_logits(
    model: LanguageModel, n_subjects: int
) -> tuple[list[TokenizedRelation], Mapping[str, Tensor]]:
    """Return the relations that this LM has labels for, and the domain logits of their kinds.

    The logits are ``(n_subjects, n_labels)`` by the name of the kind of knowledge.
    """
    catalogue = Catalogue.load()
    relations = [TokenizedRelation.of(name, catalogue, model.tokenizer) for name in RELATIONS]
    usable = [
        one for one in relations
        if one.has_reference and min(one.reference_mask.shape) >= MIN_LABELS
    ]  # fmt: skip
    layout = build_layout(model.tokenizer, catalogue, (), [one.name for one in usable])
    rows = RowReader(model).read(layout, sample_subjects(model.tokenizer, n_subjects))
    return usable, {name: rows[:, layout.columns(name)] for name in layout.domains}


def solve(x: Tensor, y: Tensor) -> list[Tensor]:
    """Return W, ``(n_target, n_source)``, for each of `HALF_DECADES`, of logits ``(n, n_...)``."""
    x, y = (each.double() - each.double().mean(0) for each in (x, y))
    squares = LeastSquares(x.T @ x, x.T @ y)
    return [squares.weight(ridge) for ridge in HALF_DECADES]


def mean_r(weight: Tensor, x: Tensor, y: Tensor) -> float:
    """Return the mean label-wise r of a map on some subjects; the intercept does not matter."""
    x = x.double()
    return float(labelwise_pearson((x - x.mean(0)) @ weight.T, y.double()).nanmean())


def chosen_ridge(x: Tensor, y: Tensor) -> float:
    """Return the strength that ``ridge: auto`` takes, which every fifth subject judges."""
    judge = torch.arange(len(x)) % 5 == 4
    r = [mean_r(weight, x[judge], y[judge]) for weight in solve(x[~judge], y[~judge])]
    return HALF_DECADES[strongest_within(r, TOLERANCE)]


def precision(weight: Tensor, reference: Tensor) -> dict[str, dict[str, float]]:
    """Return Hit@N of influenced targets and of influencing sources."""
    return dict(zip(WAYS, (h.by_rank() for h in hit_rates(weight, reference)), strict=True))


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
                "r": mean_r(weight, x[~fit], y[~fit]),
                **precision(weight, reference),
                "permuted": precision(permuted, reference),
            }
            for ridge, weight, permuted in pairs
        ],
    }


def intervals(x: Tensor, y: Tensor, reference: Tensor, n: int) -> list[dict[str, list[float]]]:
    """Return the 95 % intervals of Hit@1 at each strength, over samples of the subjects."""
    generator = torch.Generator().manual_seed(0)
    hits = []
    for _ in range(n):
        rows = torch.randint(len(x), (len(x),), generator=generator)
        rates = [precision(weight, reference) for weight in solve(x[rows], y[rows])]
        hits.append([[rate[way]["1"] for way in WAYS] for rate in rates])
    bounds = torch.tensor(hits, dtype=torch.float64).quantile(BOUNDS, dim=0)
    return [dict(zip(WAYS, strength.T.tolist(), strict=True)) for strength in bounds.unbind(1)]


def main(lm: str = "tiny-world", n_subjects: int = 2000, output: str | None = None) -> None:
    """Measure each relation, and print Hit@1 of all subjects by ridge.

    Args:
        lm: A folder, a .gguf file, a hub id or tiny-world.
        n_subjects: Number of subjects; half of them fit.
        output: File of the numbers, JSON; null writes none.
    """
    model = LanguageModel.from_pretrained(lm, dtype="float32")
    relations, logits = read_logits(model, n_subjects)
    sizes = [*(size for size in SIZES if size < n_subjects), n_subjects]
    results = []
    for relation in relations:
        x, y = (logits[name] for name in relation.name.split("->"))
        reference = torch.from_numpy(relation.reference_mask)
        by_size = {str(size): measure(x, y, reference, size) for size in sizes}
        results.append({
            "relation": relation.name,
            "n_labels": {"source": x.shape[1], "target": y.shape[1]},
            "sizes": by_size,
            "intervals": intervals(x[::2], y[::2], reference, N_BOOTSTRAP),
        })  # fmt: skip
        hits = (one["influenced"]["1"] for one in by_size[str(n_subjects)]["path"])
        print(f"{relation.name}: Hit@1 by ridge", *map(two, hits))
    if output is not None:
        content = {"lm": Path(lm).name, "fingerprint": model.fingerprint, "relations": results}
        write_numbers(output, content)


if __name__ == "__main__":
    auto_cli(main)
