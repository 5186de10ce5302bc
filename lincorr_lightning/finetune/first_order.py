"""How an LM's logits change at the first step of an edit, to first order."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.func import functional_call, jvp
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import cross_entropy
from torch.nn.utils.rnn import pad_sequence

from lincorr_lightning.errors import NonFiniteError
from lincorr_lightning.lm.language_model import LanguageModel
from lincorr_lightning.lm.modes import evaluating

LEAD = 12.0
"""Default lead of the answer after a virtual step, in logits: where training leaves it when it
continues until the loss is next to nothing. Chosen on the tiny world, on edits of another seed than
the config's (``benchmarks/forecast_lead.py``); on real LMs it forecasts little."""
# Virtual steps, relative to the norm of all weights: from 1e-3, each 1.5 times the last, to 0.3.
_FIRST_STEP, _STEP_GROWTH, _MAX_STEPS = 1e-3, 1.5, 15

_Weights = dict[str, Tensor]


class VirtualEdits(NamedTuple):
    """What a gradient step of each edit's own fine-tune does to the LM's logits.

    Attributes:
        d_source: Derivative of the source logits along the update, ``(n, n_source)``.
        d_target: Derivative of the target logits along the update, ``(n, n_target)``.
        target: Target logits after the shortest virtual step along the update at which the answer
            leads the source, ``(n, n_target)``; after the longest one tried, 0.3 of the weights'
            own norm, if it never leads.
    """

    d_source: Tensor
    d_target: Tensor
    target: Tensor


def virtual_edits(
    lm: LanguageModel,
    source_rows: Sequence[Sequence[int]],
    answers: Sequence[Sequence[int]],
    target_rows: Sequence[Sequence[int]],
    source_tokens: Sequence[int],
    target_tokens: Sequence[int],
    labels: Sequence[int],
    lead: float = LEAD,
) -> VirtualEdits:
    """Forecast a gradient step of each edit's own fine-tune, without making it.

    One backward pass of the loss on the answer's tokens gives the direction, a forward-mode product
    the derivative along it (a central difference for an LM without forward mode). Then forward
    passes after steps along the direction find how long a step makes the answer lead. They use
    other weights in place of the LM's: weights, gradients, random streams and modes do not change.

    Args:
        lm: The LM before the edits.
        source_rows: Token ids of each edit's source prompt.
        answers: Token ids of each edit's answer.
        target_rows: Token ids of each edit's target prompt.
        source_tokens: Token ids of the source labels.
        target_tokens: Token ids of the target labels.
        labels: Index of the source label that each edit teaches.
        lead: By how many logits the answer is to lead after the virtual step.

    Raises:
        NonFiniteError: The loss, the gradient or a logit of an edit is NaN or infinite; the message
            names the edit.
    """
    n_source = len(source_tokens)
    device = lm.model.device
    tokens = torch.tensor([*source_tokens, *target_tokens], device=device)
    found: list[VirtualEdits] = []
    # Lightning predicts in inference mode, in which there are no gradients.
    with (
        torch.inference_mode(False),
        evaluating(lm),
        torch.autocast(device.type, enabled=False),
    ):
        base = {n: p.detach() for n, p in lm.named_parameters() if p.is_floating_point()}
        slope_at = _forward_mode
        for index, (source, answer, target, label) in enumerate(
            zip(source_rows, answers, target_rows, labels, strict=True)
        ):
            name = f"edit {index} ({lm.tokenizer.decode(list(source))!r})"
            ids = pad_sequence([torch.tensor([*r]) for r in (source, target)], batch_first=True)
            lengths = torch.tensor([[len(source)], [len(target)]])
            mask = (torch.arange(ids.shape[1]) < lengths).long()
            inputs = (ids.to(device), mask.to(device), tokens)

            def logits(weights: _Weights, inputs: tuple[Tensor, ...] = inputs) -> Tensor:
                output: Tensor = functional_call(lm, weights, inputs)
                return output

            direction = _direction(lm, base, source, answer, name)
            with torch.no_grad():
                try:
                    slope = slope_at(logits, base, direction)
                except RuntimeError:  # an operation of this LM has no forward mode
                    if slope_at is _central_difference:
                        raise
                    slope_at = _central_difference
                    slope = slope_at(logits, base, direction)
                after = _step_until_leading(logits, base, direction, label, n_source, lead)
            _require_finite(name, "a logit along its update", slope, after)
            found.append(VirtualEdits(slope[0, :n_source], slope[1, n_source:], after))
    if not found:
        empty = torch.zeros(0, len(target_tokens), dtype=torch.float64)
        return VirtualEdits(torch.zeros(0, n_source, dtype=torch.float64), empty, empty)
    return VirtualEdits(*(torch.stack(part).cpu() for part in zip(*found, strict=True)))


def _direction(
    lm: LanguageModel,
    base: _Weights,
    prompt: Sequence[int],
    answer: Sequence[int],
    name: str,
) -> _Weights:
    """Return the step of gradient descent at a learning rate of 1, for every weight."""
    # New leaves that share the weights' memory, so that a frozen LM stays frozen.
    leaves = {n: weight.detach().requires_grad_() for n, weight in base.items()}
    ids = torch.tensor([[*prompt, *answer]], device=lm.model.device)
    inner = {n.removeprefix("model."): leaf for n, leaf in leaves.items()}
    with torch.enable_grad():
        logits = functional_call(
            lm.model,
            inner,
            kwargs={"input_ids": ids, "attention_mask": torch.ones_like(ids), "use_cache": False},
        ).logits
        predicting = logits[0, len(prompt) - 1 : -1]
        expected = ids[0, len(prompt) :].to(predicting.device)
        dtype = torch.promote_types(predicting.dtype, torch.float32)
        loss = cross_entropy(predicting.to(dtype), expected)
        gradient = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)
    found = {
        n: torch.zeros_like(weight) if g is None else g
        for (n, weight), g in zip(base.items(), gradient, strict=True)
    }
    _require_finite(name, f"its loss ({loss.item()}) or its gradient", loss, *found.values())
    return {n: -g for n, g in found.items()}


def _forward_mode(
    logits: Callable[[_Weights], Tensor], base: _Weights, direction: _Weights
) -> Tensor:
    # The only attention kernel that has a forward mode.
    with sdpa_kernel(SDPBackend.MATH):
        slope: Tensor = jvp(logits, (base,), (direction,))[1]
    return slope


def _central_difference(
    logits: Callable[[_Weights], Tensor], base: _Weights, direction: _Weights
) -> Tensor:
    # Short, because logits bend soon along an update; long enough for the digits of the weights,
    # and for those of norms and attention, which no LM computes in more than float32.
    coarsest = [torch.finfo(weight.dtype).eps for weight in base.values()]
    precision = max(*coarsest, torch.finfo(torch.float32).eps)
    step = 0.02 * precision ** (1 / 3) * _unit(base, direction)
    ahead, behind = (logits(_moved(base, direction, s)) for s in (step, -step))
    slope: Tensor = (ahead - behind) / (2 * step)
    return slope


def _step_until_leading(
    logits: Callable[[_Weights], Tensor],
    base: _Weights,
    direction: _Weights,
    label: int,
    n_source: int,
    lead: float,
) -> Tensor:
    """Return the target logits after the shortest step with the answer ahead, ``(n_target,)``."""
    unit = _unit(base, direction)
    after: dict[int, Tensor] = {}

    def leads(power: int) -> bool:
        step = _FIRST_STEP * _STEP_GROWTH**power * unit
        after[power] = logits(_moved(base, direction, step))
        own, others = after[power][0, label], after[power][0, :n_source].clone()
        others[label] = -torch.inf
        return bool(own >= others.max() + lead)

    # An answer that leads nearly always keeps leading: a bisection needs 4 passes instead of 15.
    power = bisect_left(range(_MAX_STEPS), True, key=leads)
    return after[min(power, _MAX_STEPS - 1)][1, n_source:]


def _moved(base: _Weights, direction: _Weights, step: float) -> _Weights:
    return {n: weight.add(direction[n], alpha=step) for n, weight in base.items()}


def _unit(base: _Weights, direction: _Weights) -> float:
    """Return the step whose norm is that of all weights together."""
    return _norm(base) / max(_norm(direction), 1e-30)


def _norm(weights: _Weights) -> float:
    norms = [weight.float().norm() for weight in weights.values()]
    # An LM may be spread over several devices.
    return float(torch.stack([norm.to(norms[0].device) for norm in norms]).norm())


def _require_finite(name: str, what: str, *values: Tensor) -> None:
    # Extremes propagate NaN, at a fifth of the cost of checking every number.
    if not all(bool(torch.stack(value.aminmax()).isfinite().all()) for value in values):
        raise NonFiniteError(
            f"{name}: {what} is not finite, so it cannot be forecast. Set lm.dtype to float32, or "
            "disable the first-order forecast."
        )
