"""Steer an LM along the flow of a feature, and measure what that costs on other texts.

In the paper (arXiv 2502.03032, figures 9 to 11, 16 and 17) a judge LM rates behaviour and
coherence; here both are probabilities of the steered LM itself.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Literal, NamedTuple, get_args

import torch

from lincorr_lightning.errors import ConfigError, require, require_one_of
from lincorr_lightning.flow.deactivation import text_losses
from lincorr_lightning.flow.graph import FlowGraph
from lincorr_lightning.flow.text_statistics import FeatureActivity
from lincorr_lightning.lm.language_model import LanguageModel
from lincorr_lightning.progress import progress
from lincorr_lightning.results.table import column
from lincorr_lightning.sae.forwards import Forward, Rows, add_features, run_with_hooks
from lincorr_lightning.sae.hook_points import Feature, HookPoint
from lincorr_lightning.sae.hooks import edited
from lincorr_lightning.sae.sparse_autoencoder import SAEs

Strategy = Literal["single", "constant", "linear", "exponential"]
STRATEGIES: tuple[Strategy, ...] = get_args(Strategy)


@dataclass(frozen=True)
class SteeringSettings:
    """Settings of the steering test."""

    n_answers: int = 4
    """Number of answers to steer towards; 0 skips the test."""
    strengths: tuple[float, ...] = (0.0, 0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
    """Strengths, in mean activations of each feature where it is active."""
    strategies: tuple[Strategy, ...] = STRATEGIES
    """How the strength falls along the flow; single is the feature alone."""
    decay: float = 0.5
    """Factor of exponential per step."""
    n_prompts: int = 64
    """Number of prompts with another answer."""
    n_texts: int = 128
    """Number of texts whose perplexity measures coherence."""

    def __post_init__(self) -> None:
        for name in ("strategies", "strengths"):
            if not getattr(self, name):
                raise ConfigError(f"model.steering.{name} is empty; give some.")
        for strategy in self.strategies:
            require_one_of("model.steering.strategies", strategy, STRATEGIES)
        for strength in self.strengths:
            require("model.steering.strengths", strength)
        require("model.steering.decay", self.decay, above=0, at_most=1)
        for name, least in (("n_answers", 0), ("n_prompts", 1), ("n_texts", 1)):
            require(f"model.steering.{name}", getattr(self, name), at_least=least)


def steering_weights(
    graph: FlowGraph, strategy: Strategy, decay: float = 0.5
) -> dict[Feature, float]:
    """Return the relative strength of each feature of a flow graph: 1 for its start.

    ``single`` uses the start alone; ``constant`` has equal weights, ``linear`` those that fall to 0
    one step beyond the farthest feature, and ``exponential`` a factor of `decay` per step.
    """
    if strategy == "single":
        return {graph.start: 1.0}
    import networkx

    network = networkx.Graph([(edge.source, edge.target) for edge in graph.edges])
    network.add_node(graph.start)
    steps = networkx.single_source_shortest_path_length(network, graph.start)
    beyond, weights = max(steps.values()) + 1, dict[Feature, float]()
    for feature in sorted(steps, key=lambda f: (steps[f], f)):
        step = steps[feature]
        falling = 1 - step / beyond if strategy == "linear" else decay**step
        weights[feature] = 1.0 if strategy == "constant" else falling
    return weights


def answer_probability(lm: LanguageModel, rows: Rows, token_id: int) -> float:
    """Return the mean probability of a token after some prompts, over the whole vocabulary."""
    probabilities = torch.empty(len(rows), dtype=torch.float64)

    def record(forward: Forward) -> None:
        which = torch.arange(len(forward.cases), device=forward.ids.device)
        logits = forward.logits[which, forward.last].double()
        probabilities[forward.cases] = logits.softmax(1)[:, token_id].cpu()

    run_with_hooks(lm, rows, record)
    return float(probabilities.mean())


def mean_loss(lm: LanguageModel, rows: Rows) -> float:
    """Return the mean negative log likelihood of the tokens of some texts, in nats."""
    losses = torch.cat(text_losses(lm, rows))
    return float(losses.sum()) / max(1, len(losses))


class SteeredAnswer(NamedTuple):
    """An answer to steer towards."""

    label: str
    token_id: int
    graph: FlowGraph
    prompts: Rows


@dataclass(frozen=True)
class SteeringPoint:
    """Effect of steering towards one answer, `label`, by the flow of the feature that carries it.

    `behaviour` is the mean probability of the answer, `coherence` the perplexity of other texts
    without steering by that with steering, at most 1, and `score` their product.
    """

    label: str
    feature: str
    strategy: str
    strength: float
    n_features: int
    behaviour: float = column(format=".3f")
    coherence: float = column(format=".3f")
    score: float = column(format=".3f")


def measure_steering(
    lm: LanguageModel, saes: SAEs, activity: Mapping[HookPoint, FeatureActivity],
    answers: Sequence[SteeredAnswer], texts: Rows, settings: SteeringSettings,
) -> list[SteeringPoint]:  # fmt: skip
    """Steer towards each answer at every strength by every strategy."""
    plan = list(product(answers, settings.strategies, settings.strengths))
    loss_before = mean_loss(lm, texts) if plan else 0.0
    points = []
    for answer, strategy, strength in progress(plan, "steering", unit="strength"):
        weights = steering_weights(answer.graph, strategy, settings.decay)
        typical = {f: float(activity[f.hook_point].mean[f.index]) for f in weights}
        edits = add_features(saes, {f: strength * weights[f] * typical[f] for f in weights})
        with edited(lm.model, edits):
            behaviour = answer_probability(lm, answer.prompts, answer.token_id)
            # Coherence is 1 at most, also where the perplexity falls.
            coherence = math.exp(min(0.0, loss_before - mean_loss(lm, texts)))
        points.append(
            SteeringPoint(
                answer.label, answer.graph.start.id, strategy, strength, len(weights),
                behaviour, coherence, behaviour * coherence,
            )
        )  # fmt: skip
    return points
