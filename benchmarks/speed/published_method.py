"""The published notebook's way against ours: same LM, same subjects, one process.

The published way, written from its description: one prompt at a time through the LM, logits of the
whole vocabulary kept, then one scikit-learn regression per target label on half of the subjects.
Ours: batches, only the domain's rows of the head, second moments, one solve.

    python -m benchmarks.speed.published_method --n_subjects 2000

prints a table of both parts and of the total, and how far the two maps' predictions differ. Our
logits part includes adding up the moments. A fit takes milliseconds: the best of ten is shown.
"""

from __future__ import annotations

import numpy as np
import torch
from jsonargparse import auto_cli
from sklearn.linear_model import LinearRegression

from benchmarks.common import least_time, markdown_table
from lincorr_lightning import Catalogue, LanguageModel
from lincorr_lightning.functional import LeastSquares, Moments
from lincorr_lightning.knowledge import build_domain
from lincorr_lightning.lm import sample_subjects
from lincorr_lightning.metrics import JointMoments


@torch.no_grad()
def published_logits(lm: LanguageModel, prompts: list[str]) -> np.ndarray:
    """Next-token logits of the whole vocabulary, one prompt at a time."""
    rows = []
    for prompt in prompts:
        ids = lm.encode([prompt])["input_ids"]
        rows.append(lm.model(input_ids=ids).logits[0, -1].float().numpy())
    return np.stack(rows)


def published_fit(x: np.ndarray, y: np.ndarray) -> list[LinearRegression]:
    """One regression per target label."""
    return [LinearRegression().fit(x, y[:, label]) for label in range(y.shape[1])]


def our_moments(
    lm: LanguageModel, prompts: list[list[str]], ids: list[list[int]], batch: int
) -> Moments:
    """Second moments of the domain logits of source and target over the subjects."""
    moments = JointMoments(sum(map(len, ids)))
    for start in range(0, len(prompts[0]), batch):
        part = slice(start, start + batch)
        moments.update(
            torch.cat([lm.domain_logits(p[part], i) for p, i in zip(prompts, ids, strict=True)], 1)
        )
    return moments.gather()


def our_fit(moments: Moments, n_source: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(W, b) in closed form."""
    scatter, mean = moments.scatter, moments.mean
    squares = LeastSquares(scatter[:n_source, :n_source], scatter[:n_source, n_source:])
    weight = squares.weight(0.0)
    return weight, mean[n_source:] - weight @ mean[:n_source]


def main(
    lm: str = "tiny-world",
    n_subjects: int = 2000,
    source: str = "city",
    target: str = "country",
    batch: int = 256,
) -> None:
    """Time both ways.

    Args:
        lm: The LM, a folder, hub id or tiny-world.
        n_subjects: Number of subjects; half of them fit.
        source: Source knowledge.
        target: Target knowledge.
        batch: Subjects per batch of our way.
    """
    model = LanguageModel.from_pretrained(lm)
    catalogue = Catalogue.load()
    pair = [catalogue[source], catalogue[target]]
    ids = [list(build_domain(knowledge, model.tokenizer).token_ids) for knowledge in pair]
    subjects = sample_subjects(model.tokenizer, n_subjects)
    prompts = [[knowledge.prompt(x) for x in subjects] for knowledge in pair]
    half = n_subjects // 2
    published_logits(model, prompts[0][:20])  # warm up
    model.domain_logits(prompts[0][:20], ids[0])

    full, their_logits = least_time(lambda: [published_logits(model, p) for p in prompts])
    x, y = (logits[:, columns] for logits, columns in zip(full, ids, strict=True))
    regressions, their_fit = least_time(lambda: published_fit(x[:half], y[:half]), repeats=10)
    fit_half = [p[:half] for p in prompts]
    test_half = [p[half:] for p in prompts]
    moments, first_half = least_time(lambda: our_moments(model, fit_half, ids, batch))
    _, second_half = least_time(lambda: our_moments(model, test_half, ids, batch))
    our_logits = first_half + second_half
    (weight, bias), our_seconds = least_time(lambda: our_fit(moments, len(ids[0])), repeats=10)

    theirs = np.stack([r.predict(x[half:]) for r in regressions], 1)
    ours = x[half:].astype(np.float64) @ weight.numpy().T + bias.numpy()
    difference = np.abs(ours - theirs).max() / np.abs(theirs).max()
    print(
        f"{lm}, {source}->{target}, {n_subjects} subjects, {torch.get_num_threads()} thread(s), "
        f"torch {torch.__version__}\n"
        f"labels: {len(ids[0])} -> {len(ids[1])}; predictions differ by {difference:.1e}\n"
    )
    parts = {
        "logits": (their_logits, our_logits),
        "fit": (their_fit, our_seconds),
        "total": (their_logits + their_fit, our_logits + our_seconds),
    }
    rows = [
        [part, f"{slow:.3f} s", f"{fast:.4f} s", f"{slow / fast:.0f}x"]
        for part, (slow, fast) in parts.items()
    ]
    print(markdown_table(("part", "published way", "ours", "faster"), rows))


if __name__ == "__main__":
    auto_cli(main)
