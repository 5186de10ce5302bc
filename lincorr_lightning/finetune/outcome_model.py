"""Probabilities of an edit's outcomes, from where a step of its optimizer leads.

A multinomial logistic regression, fitted on edits of several pretrained LMs
(`benchmarks.real_lms.forecast --fit true`, which writes ``outcome_model.json``). Its inputs are
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
        coefficients: A row for each outcome, in the order of `Outcome`, ``(3, 2)`` float64.
        intercepts: One for each outcome, ``(3,)`` float64.
        n_edits: Number of edits that it was fitted on.
        lms: Names of their LMs.
        relations: Names of their relations, as ``city->country``.
        training: How they were trained, see `EditTraining.summary`.
    """

    coefficients: Tensor
    intercepts: Tensor
    n_edits: int
    lms: tuple[str, ...]
    relations: tuple[str, ...]
    training: str

    def probabilities(self, features: Tensor) -> Tensor:
        """Return the probability of each outcome, ``(n, 3)``, from `outcome_features`."""
        return (features @ self.coefficients.T + self.intercepts).softmax(1)

    def describe(self, relation: str, training: str) -> str:
        """Say what the model was fitted on, and how other edits differ from that."""
        relations, lms = ", ".join(self.relations), ", ".join(self.lms)
        text = f"fitted on {self.n_edits} edits of {relations} on {lms}, trained by {self.training}"
        if relation not in self.relations:
            text += f"; {relation} is not among them"
        if training != self.training:
            text += f"; these are trained by {training}"
        return text


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
        stored["n_edits"],
        tuple(stored["lms"]),
        tuple(stored["relations"]),
        stored["training"],
    )


def outcome_features(before: Tensor, by_step: Tensor, reference_mask: Tensor) -> Tensor:
    """Return the inputs of an `OutcomeModel`, in log-odds.

    Args:
        before: Target logits before the edits, ``(n, n_target)``.
        by_step: The forecaster ``optimizer_step``'s, same shape.
        reference_mask: Target labels in each edit's reference, same shape, bool.

    Returns:
        ``(n, 2)``: after the step, of the reference, and of the answer before the edit.
    """
    old = before.argmax(1, keepdim=True)
    p = by_step.softmax(1)
    return torch.stack(
        [_log_odds((p * reference_mask).sum(1)), _log_odds(p.gather(1, old)[:, 0])], 1
    )


def _log_odds(p: Tensor) -> Tensor:
    # Extreme log-odds would dominate the regression.
    return p.double().clamp(1e-6, 1 - 1e-6).logit()
