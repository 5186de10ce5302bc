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

from collections.abc import Sequence

import numpy as np
import torch
from jsonargparse import auto_cli
from torch import Tensor

from benchmarks.common import markdown_table
from lincorr_lightning import Catalogue, LanguageModel
from lincorr_lightning.functional import LeastSquares, labelwise_pearson
from lincorr_lightning.knowledge import WHOLE_WORDS, Completeness, build_domain, reference_matrix
from lincorr_lightning.lm import sample_subjects
from lincorr_lightning.metrics import JointMoments

PRECISIONS = ("float32", "bfloat16", "float16")


def fit(x: Tensor, y: Tensor, ridge: float) -> tuple[Tensor, Tensor]:
    """(W, b) in closed form."""
    moments = JointMoments(x.shape[1] + y.shape[1])
    moments.update(torch.cat([x, y], 1))
    scatter, mean = moments.gather().scatter, moments.gather().mean
    n = x.shape[1]
    weight = LeastSquares(scatter[:n, :n], scatter[:n, n:]).weight(ridge)
    return weight, mean[n:] - weight @ mean[:n]


def hits(weight: Tensor, right: np.ndarray) -> float:
    """Share of source labels with a reference whose largest weight is on a right target."""
    known = right.any(0)
    best = weight.numpy().argmax(0)
    return float(right[best, np.arange(len(best))][known].mean())


def main(
    lm: str = "tiny-world",
    pairs: Sequence[str] = ("city->country", "country->language", "ceo->company", "city->pet"),
    ridges: Sequence[float] = (0.0, 100.0),
    n_subjects: int = 2000,
    words_per_subject: int = 1,
    subwords: bool = False,
) -> None:
    """Compare.

    Args:
        lm: The LM, a folder, hub id or tiny-world.
        pairs: Pairs, as city->country.
        ridges: Ridge strengths.
        n_subjects: Number of subjects; half of them fit.
        words_per_subject: Vocabulary strings joined to one subject.
        subwords: Whether labels may be the first tokens of longer words.
    """
    catalogue = Catalogue.load()
    relations = [catalogue.relation(pair) for pair in pairs]
    chosen = list({k.name: k for r in relations for k in (r.source, r.target)}.values())
    keep = tuple(Completeness) if subwords else WHOLE_WORDS
    logits: dict[str, dict[str, Tensor]] = {}
    for precision in PRECISIONS:
        model = LanguageModel.from_pretrained(lm, dtype=precision)
        xs = sample_subjects(model.tokenizer, n_subjects, words_per_subject)
        domains = {
            knowledge.name: build_domain(knowledge, model.tokenizer, keep) for knowledge in chosen
        }
        tokens = [domains[knowledge.name].token_ids for knowledge in chosen]
        joint = model.joint_logits([[k.prompt(x) for x in xs] for k in chosen], tokens)
        parts = torch.split(joint, [len(ids) for ids in tokens], dim=1)
        logits[precision] = dict(zip(domains, parts, strict=True))

    half = n_subjects // 2
    print(f"{lm}, {n_subjects} subjects, torch {torch.__version__}\n")
    rows = []
    for relation in relations:
        source, target = relation.source.name, relation.target.name
        right = None
        if relation.reference is not None:
            right = reference_matrix(relation, domains[source], domains[target])
        exact: dict[float, Tensor] = {}
        for precision, read in logits.items():
            x, y = read[source], read[target]
            truth = logits["float32"][target]
            far = ((y - truth).square().mean(0).sqrt() / truth.std(0)).mean()
            for ridge in ridges:
                weight, bias = fit(x[:half], y[:half], ridge)
                r = labelwise_pearson(x[half:] @ weight.T + bias, y[half:]).nanmean()
                exact.setdefault(ridge, weight)
                moved = (weight - exact[ridge]).norm() / exact[ridge].norm()
                hit = "" if right is None else f"{hits(weight, right):.3f}"
                rows.append(
                    [relation.name, precision, f"{far:.4f}", f"{ridge:g}", f"{r:.4f}",
                     f"{moved:.4f}", hit]
                )  # fmt: skip
    columns = ("pair", "precision", "target logits", "ridge", "mean r", "W", "Hit@1")
    print(markdown_table(columns, rows))


if __name__ == "__main__":
    auto_cli(main)
