"""Steering an LM along the flow of a feature, and what it costs the rest of the text.

"Analyze Feature Flow to Enhance Interpretation and Steering in Language Models" (Laptev et al.,
2025, arXiv 2502.03032), figures 9 to 11, 16 and 17. There a judge LM rates behaviour and
coherence; here both are probabilities of the steered LM itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

from lincorr_lightning.errors import ConfigError
from lincorr_lightning.flow.graph import Feature, FlowGraph
from lincorr_lightning.lm.language_model import LanguageModel
from lincorr_lightning.sae.forwards import Forward, Interventions, run_with_hooks

Strategy = Literal["single", "constant", "linear", "exponential"]
STRATEGIES: tuple[Strategy, ...] = get_args(Strategy)


class SteeringScore(NamedTuple):
    """What steering at one strength does.

    Attributes:
        behaviour: Mean probability of the steered answer after the prompts, over the whole
            vocabulary.
        coherence: The LM's perplexity on other texts by the steered LM's, at most 1: the factor by
            which a token's probability falls, on the geometric mean.
        score: Their product.
    """

    behaviour: float
    coherence: float
    score: float


def distances(graph: FlowGraph) -> dict[Feature, int]:
    """Steps from the start to each feature of its flow graph."""
    beside: dict[Feature, set[Feature]] = {feature: set() for feature in graph.features}
    for edge in graph.edges:
        beside[edge.source].add(edge.target)
        beside[edge.target].add(edge.source)
    found = {graph.start: 0}
    frontier = [graph.start]
    while frontier:
        reached = sorted({n for feature in frontier for n in beside[feature]} - set(found))
        found |= dict.fromkeys(reached, found[frontier[0]] + 1)
        frontier = reached
    return found


def steering_weights(
    graph: FlowGraph, strategy: Strategy, decay: float = 0.5
) -> dict[Feature, float]:
    """How strongly each feature of a flow graph takes part.

    Args:
        graph: Of the feature that is steered with.
        strategy: ``single`` takes the start alone; of the others each feature of the graph takes
            part: ``constant`` all alike, ``linear`` falling to nothing one step beyond the
            farthest, ``exponential`` by `decay` with each step.
        decay: Of exponential.

    Returns:
        1 for the start, at most 1 for the others.

    Raises:
        ConfigError: There is no such strategy.
    """
    if strategy not in STRATEGIES:
        raise ConfigError(
            f"there is no steering strategy {strategy!r}; there are {', '.join(STRATEGIES)}."
        )
    steps = distances(graph)
    if strategy == "single":
        return {graph.start: 1.0}
    beyond = max(steps.values()) + 1

    def weight(step: int) -> float:
        if strategy == "linear":
            return 1 - step / beyond
        return decay**step if strategy == "exponential" else 1.0

    return {feature: weight(step) for feature, step in steps.items()}


def amounts(
    weights: Mapping[Feature, float], strength: float, typical: Mapping[Feature, float]
) -> dict[Feature, float]:
    """How much of each feature is added: ``strength * weight * typical activation``.

    Args:
        weights: From `steering_weights`.
        strength: 1 adds as much of the start as there is where it is active.
        typical: Mean activation of each feature where it is active; one that never is adds nothing.
    """
    return {feature: strength * w * typical.get(feature, 0.0) for feature, w in weights.items()}


def answer_probability(
    lm: LanguageModel,
    rows: Sequence[Sequence[int]],
    token_id: int,
    edits: Interventions | None = None,
) -> float:
    """Mean probability of a token after some prompts, over the whole vocabulary.

    Args:
        lm: The LM, loaded.
        rows: Token ids of the prompts.
        token_id: Of the answer.
        edits: What is changed on the way.
    """
    found = torch.empty(len(rows), dtype=torch.float64)

    def look(forward: Forward) -> None:
        which = torch.arange(len(forward.cases), device=forward.ids.device)
        logits = forward.logits[which, forward.last].double()
        found[forward.cases] = logits.softmax(1)[:, token_id].cpu()

    run_with_hooks(lm, rows, look, interventions=edits)
    return float(found.mean())


def text_loss(
    lm: LanguageModel, rows: Sequence[Sequence[int]], edits: Interventions | None = None
) -> float:
    """Mean negative log likelihood of a token of some texts, in nats.

    Args:
        lm: The LM, loaded.
        rows: Token ids of the texts; one of a single token says nothing.
        edits: What is changed on the way.
    """
    sums: list[Tensor] = []
    counts: list[int] = []

    def look(forward: Forward) -> None:
        losses, there = forward.losses()
        sums.append(losses.sum().cpu())
        counts.append(int(there.sum()))

    run_with_hooks(lm, rows, look, interventions=edits)
    return float(torch.stack(sums).sum()) / max(1, sum(counts))


def score(behaviour: float, loss: float, loss_before: float) -> SteeringScore:
    """Put together what steering gives and what it costs.

    Args:
        behaviour: From `answer_probability`.
        loss: From `text_loss`, steered.
        loss_before: Likewise, as the LM is.
    """
    coherence = min(1.0, float(torch.tensor(loss_before - loss, dtype=torch.float64).exp()))
    return SteeringScore(behaviour, coherence, behaviour * coherence)
