"""The effect of half precision on logits, r and W, against float32.

    python -m benchmarks.speed.half_precision

fits linear maps of some pairs on half of the subjects, in each precision, and prints for each pair:
the difference of the logits (root mean square, relative to their standard deviation over subjects),
and for each ridge the mean label-wise r on the held-out half, the difference of W from float32's
(Frobenius norm, relative to W), and Hit@1 of W against the reference, where there is one. Weights,
forward and hidden states are in half precision; the head's product, the moments and the fit are in
float64.
"""

from __future__ import annotations

from itertools import product

import torch
from jsonargparse import auto_cli

from benchmarks.common import markdown_table
from lincorr_lightning import Catalogue, LanguageModel
from lincorr_lightning.functional import hit_rates, labelwise_pearson, moments_of
from lincorr_lightning.linear_map.layout import RowReader, build_layout
from lincorr_lightning.linear_map.solver import RidgeSolver
from lincorr_lightning.lm import sample_subjects

PRECISIONS = ("float32", "bfloat16", "float16")
RIDGES = (0.0, 100.0)


def main(
    lm: str = "tiny-world",
    pairs: tuple[str, ...] = ("city->country", "country->language", "ceo->company", "city->pet"),
    n_subjects: int = 2000, words_per_subject: int = 1, subwords: bool = False,
) -> None:  # fmt: skip
    """Compare.

    Args:
        lm: The LM, a folder, hub id or tiny-world.
        pairs: Pairs, as city->country.
        n_subjects: Number of subjects; half of them fit.
        words_per_subject: Vocabulary strings joined to one subject.
        subwords: Whether labels may be the first tokens of longer words.
    """
    logits = {}
    for precision in PRECISIONS:
        model = LanguageModel.from_pretrained(lm, dtype=precision)
        layout = build_layout(model.tokenizer, Catalogue.load(), (), pairs, subwords=subwords)
        subjects = sample_subjects(model.tokenizer, n_subjects, words_per_subject)
        logits[precision] = RowReader(model).read(layout, subjects)
    half, exact, rows = n_subjects // 2, logits["float32"], []
    for (source, target), precision in product(layout.pairs, PRECISIONS):
        x, y = layout.columns(source), layout.columns(target)
        right, read = layout.references[source, target], logits[precision]
        far = (read - exact)[:, y].square().mean(0).sqrt() / exact[:, y].std(0)
        solvers = [RidgeSolver(moments_of(each[:half]), x, y=y) for each in (read, exact)]
        for ridge in RIDGES:
            solution, truth = (solver.solve(ridge) for solver in solvers)
            r = labelwise_pearson(solution(read[half:, x]), read[half:, y]).nanmean()
            moved = (solution.weight - truth.weight).norm() / truth.weight.norm()
            hits = None if right is None else hit_rates(solution.weight, torch.from_numpy(right))[0]
            rows.append(
                [f"{source}->{target}", precision, f"{far.mean():.4f}", f"{ridge:g}", f"{r:.4f}",
                 f"{moved:.4f}", hits and f"{hits.rates[0]:.3f}"]
            )  # fmt: skip
    print(f"{lm}, {n_subjects} subjects, torch {torch.__version__}\n")
    columns = ("pair", "precision", "target logits", "ridge", "mean r", "W", "Hit@1")
    print(markdown_table(columns, rows))


if __name__ == "__main__":
    auto_cli(main)
