"""What the field predicts effects of edits with, written from the papers' descriptions.

Each takes an LM and its edits and returns a risk for each edit: the higher, the less likely it is
to generalize. Similarities are high where an edit should carry over, so their risk is the negative.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor
from torch.nn.utils import get_total_norm

from lincorr_lightning.finetune.batches import answer_losses, edit_batch
from lincorr_lightning.finetune.edits import Edit
from lincorr_lightning.knowledge import TokenizedRelation
from lincorr_lightning.lm import LanguageModel

Baseline = Callable[[LanguageModel, Sequence[Edit], TokenizedRelation], Tensor]


def gradient_similarity(
    lm: LanguageModel, edits: Sequence[Edit], relation: TokenizedRelation
) -> Tensor:
    """Cosine of the gradients of the source's answer and of the target's reference.

    GradSim (Qin et al. 2024, arXiv 2407.12828), over all weights.
    """
    subjects = [edit.subject for edit in edits]
    sources, targets = (
        lm.rows(prompts)
        for prompts in (relation.source_prompts(subjects), relation.target_prompts(subjects))
    )
    tokens = relation.target.token_ids
    weights = [p for p in lm.model.parameters() if p.is_floating_point()]
    required = [p.requires_grad for p in weights]
    lm.model.requires_grad_(True)
    found = []
    for edit, source, target in zip(edits, sources, targets, strict=True):
        loss = answer_losses(lm.model, edit_batch([edit], [0], [source])).sum()
        ours = dict(zip(weights, torch.autograd.grad(loss, weights), strict=True))
        target_edit = edit._replace(tokens=(tokens[edit.reference[0]],))
        loss = answer_losses(lm.model, edit_batch([target_edit], [0], [target])).sum()
        dot, square = _products(loss, ours)
        found.append(-dot / max(float(get_total_norm(ours.values())) * square**0.5, 1e-30))
        del ours  # else it stays in memory while the next edit's is computed
    for weight, was in zip(weights, required, strict=True):
        weight.requires_grad_(was)
    return torch.tensor(found)


def _products(loss: Tensor, others: Mapping[Tensor, Tensor]) -> tuple[float, float]:
    """Return the products of a loss's gradient with another one, and with itself.

    Each weight's gradient is freed at once: all of a second gradient would not fit into memory.
    """
    dots, squares = [], []

    def add(weight: Tensor) -> None:
        assert weight.grad is not None
        dots.append(float(weight.grad.flatten().dot(others[weight].flatten())))
        squares.append(float(weight.grad.square().sum()))
        weight.grad = None

    hooks = [weight.register_post_accumulate_grad_hook(add) for weight in others]
    loss.backward()
    for hook in hooks:
        hook.remove()
    return sum(dots), sum(squares)


def popularity(lm: LanguageModel, edits: Sequence[Edit], relation: TokenizedRelation) -> Tensor:
    """How often the LM gives the reference as its answer, over all subjects of the edits.

    The mean probability among the target labels.
    """
    prompts = relation.target_prompts([edit.subject for edit in edits])
    mean = lm.domain_logits(prompts, relation.target.token_ids).softmax(1).mean(0)
    return torch.stack([-mean[list(edit.reference)].sum() for edit in edits])


BASELINES: dict[str, Baseline] = {one.__name__: one for one in (gradient_similarity, popularity)}
