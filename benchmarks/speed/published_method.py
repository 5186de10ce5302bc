"""The published notebook's way against ours: same LM, same subjects, one process.

The published way, written from its description: one prompt at a time through the LM, logits of the
whole vocabulary kept, then one scikit-learn regression per target label on half of the subjects.
Ours: batches, only the domain's rows of the head, second moments, one solve.

    python -m benchmarks.speed.published_method

prints a table of both parts and of the total, and how far the two maps' predictions differ. Our
logits part includes adding up the moments. A fit takes milliseconds: the best of ten is shown.
"""

from __future__ import annotations

import numpy as np
import torch
from jsonargparse import auto_cli
from sklearn.linear_model import LinearRegression

from benchmarks.common import least_time, markdown_table
from benchmarks.speed.reading import published
from lincorr_lightning import Catalogue, LanguageModel
from lincorr_lightning.functional import Moments
from lincorr_lightning.knowledge import TokenizedRelation
from lincorr_lightning.linear_map.solver import RidgeSolver, Solution
from lincorr_lightning.lm import sample_subjects
from lincorr_lightning.metrics import JointMoments

BATCH = 256


@torch.no_grad()
def main(lm: str = "tiny-world", n_subjects: int = 2000, pair: str = "city->country") -> None:
    """Time both ways.

    Args:
        lm: The LM, a folder, hub id or tiny-world.
        n_subjects: Number of subjects; half of them fit.
        pair: Source and target.
    """
    model = LanguageModel.from_pretrained(lm)
    relation = TokenizedRelation.of(pair, Catalogue.load(), model.tokenizer)
    ids = [relation.source.token_ids, relation.target.token_ids]
    subjects = sample_subjects(model.tokenizer, n_subjects)
    prompts = [relation.source_prompts(subjects), relation.target_prompts(subjects)]
    half = n_subjects // 2
    columns = torch.arange(sum(map(len, ids))).split([len(labels) for labels in ids])

    def moments(subjects: range) -> Moments:
        found = JointMoments(sum(map(len, ids)))
        for start in subjects[::BATCH]:
            part = slice(start, min(start + BATCH, subjects.stop))
            pairs = zip(prompts, ids, strict=True)
            found.update(
                torch.cat([model.domain_logits(p[part], labels) for p, labels in pairs], 1)
            )
        return found.gather()

    def solve() -> Solution:
        return RidgeSolver(of_fit, columns[0], y=columns[1]).solve(0.0)

    published(model, prompts[0][:20])  # warm up
    model.domain_logits(prompts[0][:20], ids[0])
    whole, their_logits = least_time(lambda: [published(model, p).numpy() for p in prompts])
    x, y = (logits[:, labels] for logits, labels in zip(whole, ids, strict=True))
    regressions, their_fit = least_time(
        lambda: [LinearRegression().fit(x[:half], label) for label in y[:half].T], repeats=10
    )
    of_fit, first_half = least_time(lambda: moments(range(half)))
    _, second_half = least_time(lambda: moments(range(half, n_subjects)))
    our_logits = first_half + second_half
    solution, our_fit = least_time(solve, repeats=10)

    theirs = np.stack([regression.predict(x[half:]) for regression in regressions], 1)
    ours = solution(torch.from_numpy(x[half:]).double()).numpy()
    print(
        f"{lm}, {pair}, {n_subjects} subjects, {torch.get_num_threads()} thread(s), torch "
        f"{torch.__version__}\nlabels: {len(ids[0])} -> {len(ids[1])}; predictions differ by "
        f"{np.abs(ours - theirs).max() / np.abs(theirs).max():.1e}\n"
    )
    parts = {
        "logits": (their_logits, our_logits), "fit": (their_fit, our_fit),
        "total": (their_logits + their_fit, our_logits + our_fit),
    }  # fmt: skip
    rows = [[part, f"{slow:.3f} s", f"{fast:.4f} s", f"{slow / fast:.0f}x"]
            for part, (slow, fast) in parts.items()]  # fmt: skip
    print(markdown_table(("part", "published way", "ours", "faster"), rows))


if __name__ == "__main__":
    auto_cli(main)
