"""What may explain the changes by edits, from the LM before them: the gradient, contexts, nulls.

    python -m benchmarks.real_lms.edit_explanations FOLDER

FOLDER holds a folder for each LM. Beside each file of ``ripples.py`` it leaves one that ends in
``_explained.npz``; of ``n`` edits, ``t`` target labels, ``k`` kept steps and ``d`` draws it has

- ``gradient``, ``others_gradient`` ``(n, t)``: the change of the target's logits, at the edit's own
  prompt and the mean of other people's, by an infinitely small step of gradient descent on the
  edit, in all weights; each row in units of its largest entry;
- ``gradsim`` ``(n,)``: the cosine of the gradients of the edit and of a right label's log
  probability at the target prompt (GradSim, arXiv 2407.12828);
- ``context_of_other`` ``(n, t)``: target logits where the taught statement is about another person;
- ``rotated_r``, ``shuffled_r`` ``(n, 3, k)``, means over draws, and ``rotated_margin``,
  ``shuffled_margin`` ``(n, d)``: what the nearest word gives where the head's covariance is turned
  by a random rotation, or where target labels are shuffled among labels with rows of similar
  length; r with the own, other people's, and the specific change.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from jsonargparse import auto_cli
from torch import Tensor, nn

from benchmarks.common import lms_in, read_numbers
from benchmarks.real_lms.edit_recorder import read_arrays, write_arrays
from benchmarks.real_lms.nearest_words import turned
from benchmarks.real_lms.ripples import PLAN, plan
from benchmarks.real_lms.run import REAL_LMS
from lincorr_lightning.finetune.batches import answer_losses, edit_batch
from lincorr_lightning.finetune.edits import Edit
from lincorr_lightning.functional.precision import neighbor_weights
from lincorr_lightning.knowledge import Catalogue, TokenizedRelation
from lincorr_lightning.lm import LanguageModel, LMConfig
from lincorr_lightning.lm.nearest_words import NearestWords

FLOATS = npt.NDArray[np.float64]
N_DRAWS = 20
N_BINS = 8
STEP = 1e-6
"""Length of the step of gradient descent, in units of the weights' norm."""


def margins(weights: FLOATS, is_right: npt.NDArray[np.bool_]) -> FLOATS:
    """Return the highest weight of a right label minus the highest of a wrong one, ``(n,)``."""
    best = np.where(is_right, weights, -np.inf).max(1)
    return np.asarray(best - np.where(is_right, -np.inf, weights).max(1))


def centred(values: FLOATS) -> FLOATS:
    """Return a matrix without the means of its columns, and then of its rows."""
    values = values - values.mean(0)
    return np.asarray(values - values.mean(1, keepdims=True))


def row_r(first: FLOATS, second: FLOATS, *given: FLOATS) -> FLOATS:
    """Return Pearson's r of each row of two matrices, from which columns' means are taken out.

    It is partial where other matrices are given, row by row.
    """
    first, second, *given = map(centred, (first, second, *given))
    if given:
        known = np.stack(given, 2)
        first, second = (x - project(known, x) for x in (first, second))
    products = (first * second).sum(1)
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.asarray(products / np.sqrt((first**2).sum(1) * (second**2).sum(1)))


def project(known: FLOATS, values: FLOATS) -> FLOATS:
    """Return what a linear function of ``(n, t, k)`` known numbers fits of ``(n, t)`` values."""
    inverse = np.linalg.pinv(known)
    return np.asarray(np.einsum("ntk,nks,ns->nt", known, inverse, values))


def changes(arrays: dict[str, Any]) -> list[FLOATS]:
    """Return the own, other people's, and the specific change of target logits, ``(k, n, t)``."""
    own, others = arrays["change"], arrays["others_change"]
    return [own, others, own - others]


def nulls(
    words: NearestWords, relation: TokenizedRelation, arrays: dict[str, Any]
) -> Iterator[tuple[str, FLOATS]]:
    """Yield what nulls of the nearest word give, by name."""
    rng = np.random.default_rng(0)
    source, target = (
        words.head.rows(side.token_ids).double() for side in (relation.source, relation.target)
    )
    labels = arrays["labels"]
    matrix = words.whitening.matrix
    bins = np.array_split(target.norm(dim=1).argsort().numpy(), max(len(target) // N_BINS, 1))
    near = neighbor_weights(source, target, matrix).numpy().T[labels]
    drawn: dict[str, list[FLOATS]] = {"rotated": [], "shuffled": []}
    for _ in range(N_DRAWS):
        weights = neighbor_weights(source, target, turned(matrix, rng))
        drawn["rotated"].append(weights.numpy().T[labels])
        order = np.arange(len(target))
        for one in bins:
            order[one] = rng.permutation(one)
        drawn["shuffled"].append(near[:, order])
    reference = arrays["reference"]
    for name, draws in drawn.items():
        yield f"{name}_margin", np.stack([margins(x, reference) for x in draws], 1)
        r = [[[row_r(x, one) for one in part] for part in changes(arrays)] for x in draws]
        yield f"{name}_r", np.moveaxis(np.array(r).mean(0), 2, 0)


def moved(parameters: Sequence[nn.Parameter], gradients: Sequence[Tensor], length: float) -> None:
    """Add a multiple of the gradients to the weights."""
    with torch.no_grad():
        torch._foreach_add_([*parameters], [*gradients], alpha=length)


def gradients_of(lm: LanguageModel, edit: Edit, prompt: str) -> tuple[list[Tensor], Tensor]:
    """Return the gradient of the loss of an answer after a prompt, and its norm."""
    model = lm.model
    model.zero_grad(set_to_none=True)
    answer_losses(model, edit_batch([edit], [0], lm.rows([prompt]))).sum().backward()
    found = [p.grad for p in model.parameters() if p.grad is not None]
    model.zero_grad(set_to_none=True)
    return found, torch.stack(torch._foreach_norm(found)).norm()


def first_order(
    lm: LanguageModel, relation: TokenizedRelation, edits: Sequence[Edit], others: Sequence[str]
) -> dict[str, FLOATS]:
    """Return what the gradient says of the target's logits, see the module."""
    model = lm.model.requires_grad_(True)
    parameters = [*model.parameters()]
    size = torch.stack(torch._foreach_norm([p.data for p in parameters])).norm()
    tokens = relation.target.token_ids
    target, source = relation.target.knowledge, relation.source.knowledge
    rows = []
    for edit in edits:
        found, norm = gradients_of(lm, edit, source.prompt(edit.subject))
        prompts = [target.prompt(one) for one in (edit.subject, *others)]
        length = float(STEP * size / norm)
        read = []
        for sign in (-1.0, 1.0):
            moved(parameters, found, sign * length)
            read.append(lm.domain_logits(prompts, tokens))
            moved(parameters, found, -sign * length)
        change = (read[0] - read[1]).double()
        right = edit._replace(tokens=(tokens[edit.reference[0]],))
        of_right, norm_of_right = gradients_of(lm, right, prompts[0])
        products = [(a * b).sum() for a, b in zip(found, of_right, strict=True)]
        cosine = torch.stack(products).sum() / (norm * norm_of_right)
        rows.append((change[0], change[1:].mean(0), cosine.double()))
    names = ("gradient", "others_gradient", "gradsim")
    parts = (torch.stack(part).detach().numpy() for part in zip(*rows, strict=True))
    return dict(zip(names, parts, strict=True))


def explain(lm: LanguageModel, path: Path) -> dict[str, Any]:
    """Return the arrays of a run's edits."""
    about = read_numbers(path.with_suffix(".json"))
    arrays = read_arrays(path)
    relation = TokenizedRelation.of(about["relation"], Catalogue.load(), lm.tokenizer)
    source, target = relation.source.knowledge, relation.target.knowledge
    edits = []
    listed = zip(
        about["subjects"], about["answers"], arrays["labels"], arrays["reference"], strict=True
    )
    for subject, answer, label, right in listed:
        prompt, statement = lm.rows([source.prompt(subject), source.statement(subject, answer)])
        tokens = tuple(statement[len(prompt) :])
        assert tokens[0] == relation.source.token_ids[label], answer
        reference = tuple(np.flatnonzero(right).tolist())
        edits.append(Edit(subject, answer, tokens, int(label), reference, None, None))
    words = lm.nearest_words()
    assert words is not None
    other = about["others"][0]
    contexts = [
        f"{source.statement(other, edit.answer)}. {target.prompt(edit.subject)}" for edit in edits
    ]
    found = dict(nulls(words, relation, arrays))
    found["context_of_other"] = lm.domain_logits(contexts, relation.target.token_ids).numpy()
    found |= first_order(lm, relation, edits, about["others"])
    for key in ("gradient", "others_gradient"):
        found[key] /= np.abs(found[key]).max(1, keepdims=True)
    return found


def explanations(file: Path) -> dict[str, Any]:
    """Return the arrays that explain a run's edits; none if it has not been explained."""
    explained = explained_by(file)
    if not explained.exists():
        return {}
    return read_arrays(explained)


def explained_by(file: Path) -> Path:
    """Return the file that explains the edits of a run."""
    return file.with_name(f"{file.stem}_explained.npz")


def main(folder: str, relations: tuple[str, ...] = (), output: str = str(REAL_LMS)) -> None:
    """Explain the edits of all runs that are not explained, but controls.

    Args:
        folder: Folder that holds a folder for each LM.
        relations: Relations; empty takes all.
        output: Folder of the results.
    """
    for path in lms_in(folder):
        lm = None
        for run in plan():
            file = Path(output) / run.path
            explained = explained_by(file)
            is_chosen = run.lm == path.name and (not relations or run.relation in relations)
            is_due = is_chosen and file.exists() and not explained.exists()
            if is_due and run.name in PLAN["explained"]:
                lm = lm or LanguageModel(LMConfig(str(path), dtype="float32")).load()
                write_arrays(explained, explain(lm, file))
                print(explained.stem, flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    auto_cli(main)
