"""Hit@1 of W by ridge and number of subjects.

    python -m benchmarks.real_lms.ridge_precision --lm FOLDER --n_subjects 10000 --output FILE.json

For every relation with a reference: Hit@N of W, in both directions, at every ridge strength, for
maps fitted on half of 1,000 to n_subjects subjects; r on the other half; the same for targets that
are permuted. Intervals are the 2.5 and 97.5 percentiles over bootstrap samples of the subjects that
the map is fitted on. ``auto`` does not see the reference.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from jsonargparse import auto_cli
from safetensors.torch import load_file, save_file
from torch import Tensor
from tqdm import tqdm

from benchmarks.common import read_numbers, two, write_numbers, write_text
from lincorr_lightning import Catalogue, LanguageModel
from lincorr_lightning.functional import (
    HALF_DECADES,
    LeastSquares,
    hit_rates,
    labelwise_pearson,
    strongest_within,
)
from lincorr_lightning.knowledge import TokenizedRelation, build_domain
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
_PART = 500


def read_logits(
    model: LanguageModel, names: Sequence[str], n_subjects: int, folder: Path, seed: int
) -> Mapping[str, Tensor]:
    """Read domain logits, or what is missing of them in the folder's files.

    Args:
        model: The LM.
        names: Kinds of knowledge; those with fewer than three labels are left out.
        n_subjects: Number of subjects.
        folder: Folder of the files, one for each 500 subjects.
        seed: Seed of the sample of subjects.

    Returns:
        Logits after each prompt at its own domain's tokens, ``(n_subjects, n_labels)``, by name.
    """
    catalogue = Catalogue.load()
    built = {name: build_domain(catalogue[name], model.tokenizer).token_ids for name in names}
    tokens = {name: ids for name, ids in built.items() if len(ids) >= 3}
    subjects = sample_subjects(model.tokenizer, n_subjects, seed=seed)
    templates = [catalogue[name].template for name in tokens]
    key = {
        "fingerprint": model.fingerprint, "seed": seed, "n_subjects": n_subjects,
        "tokens": list(tokens.values()), "templates": templates,
    }  # fmt: skip
    folder.mkdir(parents=True, exist_ok=True)
    made_for = folder / "made_for.json"
    if made_for.exists() and read_numbers(made_for) != json.loads(json.dumps(key)):
        raise SystemExit(f"{folder} holds logits of another LM or of other prompts: delete it.")
    write_text(made_for, json.dumps(key))
    parts = []
    for start in tqdm(range(0, n_subjects, _PART), desc="reading"):
        file = folder / f"{start:05d}.safetensors"
        if not file.exists():
            chosen = subjects[start : start + _PART]
            prompts = [[t.replace("{}", s, 1) for s in chosen] for t in templates]
            batches = [
                model.joint_logits([p[i : i + 64] for p in prompts], list(tokens.values())).float()
                for i in range(0, len(chosen), 64)
            ]
            part = file.with_suffix(".part")
            save_file({"rows": torch.cat(batches)}, part)
            part.replace(file)
        parts.append(load_file(file)["rows"])
    split = torch.cat(parts).split([len(ids) for ids in tokens.values()], dim=1)
    return dict(zip(tokens, split, strict=True))


def solve(x: Tensor, y: Tensor) -> list[Tensor]:
    """Return W, ``(n_target, n_source)``, for each of `HALF_DECADES`.

    Args:
        x: Source logits of the subjects to fit on, ``(n, n_source)``.
        y: Target logits, ``(n, n_target)``.
    """
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


def relation_results(
    logits: Mapping[str, Tensor],
    relation: TokenizedRelation,
    sizes: Sequence[int],
    n_bootstrap: int,
) -> dict[str, Any]:
    """Return the numbers of one relation."""
    x, y = (logits[name] for name in relation.name.split("->"))
    reference = torch.from_numpy(relation.reference_mask)
    return {
        "relation": relation.name,
        "n_labels": {"source": x.shape[1], "target": y.shape[1]},
        "sizes": {str(size): measure(x, y, reference, size) for size in sizes},
        "intervals": intervals(x[: sizes[-1] : 2], y[: sizes[-1] : 2], reference, n_bootstrap),
    }


def main(
    lm: str = "tiny-world",
    n_subjects: int = 2000,
    relations: tuple[str, ...] = RELATIONS,
    logits: str | None = None,
    output: str | None = None,
    n_bootstrap: int = 100,
    seed: int = 0,
) -> None:
    """Measure each relation, and print Hit@1 of all subjects by ridge.

    Args:
        lm: A folder, a .gguf file, a hub id or tiny-world.
        n_subjects: Number of subjects; half of them fit.
        relations: Relations; those that this LM's vocabulary has no labels for are left out.
        logits: Folder that keeps the logits; null keeps none.
        output: File of the numbers, JSON; null writes none.
        n_bootstrap: Number of samples for the intervals.
        seed: Seed of the sample of subjects.
    """
    names = dict.fromkeys(name for relation in relations for name in relation.split("->"))
    model = LanguageModel.from_pretrained(lm, dtype="float32")
    with tempfile.TemporaryDirectory() as scratch:
        read = read_logits(model, list(names), n_subjects, Path(logits or scratch), seed)
    sizes = [*(size for size in SIZES if size < n_subjects), n_subjects]
    results = []
    for name in relations:
        relation = TokenizedRelation.of(name, Catalogue.load(), model.tokenizer)
        if relation.reference_mask.any() and set(name.split("->")) <= set(read):
            results.append(relation_results(read, relation, sizes, n_bootstrap))
            path = results[-1]["sizes"][str(n_subjects)]["path"]
            print(f"{name}: Hit@1 by ridge", *(two(one["influenced"]["1"]) for one in path))
    if output is not None:
        content = {"lm": Path(lm).name, "fingerprint": model.fingerprint, "relations": results}
        write_numbers(output, content)


if __name__ == "__main__":
    auto_cli(main)
