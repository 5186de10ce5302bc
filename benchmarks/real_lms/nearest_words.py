"""How often the nearest word is right, over draws of one source answer per right answer.

    python -m benchmarks.real_lms.nearest_words FOLDER

FOLDER holds a folder for each LM, of which the head alone is read. The vocabulary ablation takes
one city of each country (docs/vocabulary_ablation.md), which decides much of what is right:
``benchmarks/results/real_lms/tables/nearest_words.csv`` has the nearest word's share over 200
draws, in the causal inner product of the head, by cosine, and with its covariance turned at random.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from jsonargparse import auto_cli
from torch import Tensor

from benchmarks.common import Estimate, lms_in, write_table
from benchmarks.real_lms.run import REAL_LMS
from lincorr_lightning.functional.precision import neighbor_weights
from lincorr_lightning.knowledge import Catalogue, TokenizedRelation
from lincorr_lightning.lm import LanguageModel, LMConfig
from lincorr_lightning.results.table import Table, column

RELATIONS = ("city->country", "country->language", "ceo->company", "landmark->country")
N_DRAWS = 200
Mask = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class NearestDraws:
    """Share of right answers that the nearest word gives, one source answer of each, over draws."""

    lm: str = column("LM")
    relation: str = column()
    metric: str = column()
    sources: int = column("source answers", "d")
    answers: int = column("right answers", "d")
    share: Estimate = column("nearest word right", ".0%")


def draws(rows: Sequence[Tensor], mask: Mask, whitening: Tensor | None) -> Estimate:
    """Return the mean and the 95 % range of the share of right answers.

    Rows of the head are those of source and target labels; the mask, ``(n_target, n_source)``, has
    the right ones. Each draw has one source of each set of right labels, and these labels, as the
    ablation has them.
    """
    rng = np.random.default_rng(0)
    _, group = np.unique(mask, axis=1, return_inverse=True)
    groups = [np.flatnonzero(group.ravel() == number) for number in range(int(group.max()) + 1)]
    source, target = rows
    shares = []
    for _ in range(N_DRAWS):
        chosen = np.array([rng.choice(one) for one in groups])
        labels = np.flatnonzero(mask[:, chosen].any(1))
        weights = neighbor_weights(source[chosen], target[labels], whitening)
        best = labels[weights.argmax(0).numpy()]
        shares.append(mask[best, chosen].mean())
    low, high = np.quantile(shares, [0.025, 0.975])
    return Estimate(float(np.mean(shares)), float(low), float(high))


def turned(matrix: Tensor, rng: np.random.Generator) -> Tensor:
    """Return a whitening of the covariance turned by a random rotation."""
    rotation, _ = torch.linalg.qr(torch.from_numpy(rng.standard_normal([len(matrix)] * 2)))
    return rotation @ matrix


def measure(path: Path) -> Iterator[NearestDraws]:
    """Yield the rows of an LM."""
    lm = LanguageModel(LMConfig(str(path)))
    words = lm.nearest_words()
    assert words is not None
    matrix = words.whitening.matrix
    metrics: dict[str, Tensor | None] = {
        "causal inner product": matrix,
        "cosine": None,
        "turned at random": turned(matrix, np.random.default_rng(0)),
    }
    for name in RELATIONS:
        relation = TokenizedRelation.of(name, Catalogue.load(), lm.tokenizer)
        mask = relation.reference_mask  # (n_target, n_source)
        known = np.flatnonzero(mask.any(0))
        source, target = (
            words.head.rows(side.token_ids) for side in (relation.source, relation.target)
        )
        n_answers = np.unique(mask[:, known], axis=1).shape[1]
        for metric, whitening in metrics.items():
            share = draws((source[known], target), mask[:, known], whitening)
            yield NearestDraws(path.name, name, metric, len(known), n_answers, share)


def main(folder: str, output: Path = REAL_LMS / "tables") -> None:
    """Measure all LMs of a folder.

    Args:
        folder: Folder that holds a folder for each LM.
        output: Folder of the table.
    """
    rows = [row for path in lms_in(folder) for row in measure(path)]
    write_table(Table.of("nearest_words", rows, NearestDraws), output)


if __name__ == "__main__":
    auto_cli(main)
