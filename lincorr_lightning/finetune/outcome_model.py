"""Probabilities of an edit's outcomes, from what forecasters predict for it.

A multinomial logistic regression, fitted on edits of several pretrained LMs
(``benchmarks/forecast.py --fit true``, which writes ``outcome_model.json``). Its inputs are
probabilities, which mean the same on every LM and for every relation, where logits do not.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

import torch
from torch import Tensor


@dataclass(frozen=True)
class OutcomeModel:
    """A fitted model of outcomes.

    Attributes:
        coefficients: A row for each outcome, in the order of `Outcome`, ``(3, 4)`` float64.
        intercepts: One for each outcome, ``(3,)`` float64.
        fitted_on: The LMs and relations that it was fitted on.
        training: How their edits were trained, such as ``LoRA, 10 steps at 0.002``.
    """

    coefficients: Tensor
    intercepts: Tensor
    fitted_on: str
    training: str

    def probabilities(self, features: Tensor) -> Tensor:
        """Return the probability of each outcome, ``(n, 3)``, from `outcome_features`."""
        return (features @ self.coefficients.T + self.intercepts).softmax(1)


@cache
def outcome_model(method: str) -> OutcomeModel:
    """Return the model of edits that were trained by ``full`` or ``lora``.

    If none was fitted on edits of that method, it is the other one's: ``training`` says which.
    """
    file = files("lincorr_lightning.finetune") / "outcome_model.json"
    models = json.loads(file.read_text(encoding="utf-8"))
    stored = models.get(method, next(iter(models.values())))
    return OutcomeModel(
        torch.tensor(stored["coefficients"], dtype=torch.float64),
        torch.tensor(stored["intercepts"], dtype=torch.float64),
        stored["fitted_on"],
        stored["training"],
    )


def outcome_features(
    before: Tensor, in_context: Tensor, by_step: Tensor, reference_mask: Tensor
) -> Tensor:
    """Return the inputs of an `OutcomeModel`, in log-odds.

    Args:
        before: Target logits before the edits, ``(n, n_target)``.
        in_context: The forecaster ``in_context``'s, same shape.
        by_step: The forecaster ``optimizer_step``'s, same shape.
        reference_mask: Target labels in each edit's reference, same shape, bool.

    Returns:
        ``(n, 4)``: of the reference, and of the answer before the edit, in context; and the same
        two after the step.
    """
    old = before.argmax(1, keepdim=True)
    columns = []
    for logits in (in_context, by_step):
        p = logits.softmax(1)
        columns += [_log_odds((p * reference_mask).sum(1)), _log_odds(p.gather(1, old)[:, 0])]
    return torch.stack(columns, 1)


def _log_odds(p: Tensor) -> Tensor:
    # Extreme log-odds would dominate the regression.
    return p.double().clamp(1e-6, 1 - 1e-6).logit()
