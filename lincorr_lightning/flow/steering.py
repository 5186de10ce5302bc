"""Steer an LM along the flow of a feature, and measure what that costs on other texts.

In the paper (arXiv 2502.03032, figures 9 to 11, 16 and 17) a judge LM rates behaviour and
coherence. Here both are probabilities of the steered LM; the unsteered one reads what it writes.
"""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from inspect import signature
from itertools import product
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

from lincorr_lightning.errors import ConfigError, require, require_one_of
from lincorr_lightning.flow.graph import FlowGraph
from lincorr_lightning.flow.text_statistics import TextStatistics, control_features
from lincorr_lightning.lm.language_model import LanguageModel
from lincorr_lightning.lm.modes import reading
from lincorr_lightning.progress import progress
from lincorr_lightning.results.table import column
from lincorr_lightning.sae.forwards import Forward, Rows, add_features, run_with_hooks, text_losses
from lincorr_lightning.sae.hook_points import Feature
from lincorr_lightning.sae.hooks import edited

Strategy = Literal["single", "constant", "linear", "exponential"]
STRATEGIES: tuple[Strategy, ...] = get_args(Strategy)


@dataclass(frozen=True)
class SteeringSettings:
    """Settings of the steering test."""

    n_answers: int = 4
    """Number of answers to steer towards; 0 skips the test."""
    min_auroc: float = 0.9
    """Minimum AUROC of the feature that carries an answer, on subjects that did not choose it."""
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
    n_new_tokens: int = 20
    """Number of tokens that the LM writes after each prompt, at most."""

    def __post_init__(self) -> None:
        if not self.strengths or not self.strategies:
            raise ConfigError("model.steering.strengths and strategies must not be empty.")
        for strategy in self.strategies:
            require_one_of("model.steering.strategies", strategy, STRATEGIES)
        require("model.steering.decay", self.decay, above=0, at_most=1)
        require("model.steering.min_auroc", self.min_auroc, at_least=0, at_most=1)
        require("model.steering.n_answers", self.n_answers, at_least=0)
        for name in ("n_prompts", "n_texts", "n_new_tokens"):
            require(f"model.steering.{name}", getattr(self, name), at_least=1)


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
    if strategy == "linear":
        beyond = max(steps.values()) + 1
        return {feature: 1 - step / beyond for feature, step in steps.items()}
    factor = 1.0 if strategy == "constant" else decay
    return {feature: factor**step for feature, step in steps.items()}


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


@torch.no_grad()
def continue_rows(lm: LanguageModel, rows: Rows, draws: Tensor) -> list[list[int]]:
    """Return what the LM writes after each row, up to and with a token that ends it.

    Tokens are sampled by uniform draws, ``(n_rows, n_tokens)``: a little change changes few.
    """
    written = torch.empty(draws.shape, dtype=torch.int64)
    past = "cache" if "cache" in signature(lm.model.forward).parameters else "past_key_values"

    def write(cases: list[int]) -> None:
        ids = torch.tensor([rows[case] for case in cases])
        cache = None
        for step in range(draws.shape[1]):
            output = lm.model(ids.to(lm.model.device), use_cache=True, **{past: cache})
            below = output.logits[:, -1].double().softmax(-1).cumsum(-1).cpu()
            written[cases, step] = (below <= draws[cases, step, None] * below[:, -1:]).sum(-1)
            ids = written[cases, step, None]
            cache = output[past]

    with reading(lm.model, lm.model.device.type):
        lm.in_batches([len(row) for row in rows], write, equal_lengths=True)
    end = lm.tokenizer.eos_token_id
    return [row[: row.index(end) + 1] if end in row else row for row in written.tolist()]


class SteeredAnswer(NamedTuple):
    """An answer to steer towards."""

    label: str
    token_id: int
    graph: FlowGraph
    prompts: Rows

    def judge(self, lm: LanguageModel, texts: list[list[int]]) -> tuple[float, float]:
        """Return the share of texts that name the answer, and the perplexity of their rest."""
        name = re.compile(rf"(?<!\w){re.escape(self.label)}(?!\w)")
        named = [bool(name.search(text)) for text in lm.tokenizer.batch_decode(texts)]
        whole = [[*prompt, *text] for prompt, text in zip(self.prompts, texts, strict=True)]
        losses = list[Tensor]()
        for of_whole, text in zip(text_losses(lm, whole), texts, strict=True):
            of_text = of_whole[-len(text) :]
            first = [*text, self.token_id].index(self.token_id)
            losses += [of_text[:first], of_text[first + 1 :]]
        return sum(named) / len(named), float(torch.cat(losses).mean().exp())


@dataclass(frozen=True)
class SteeringPoint:
    """Effect of steering towards one answer, `label`, by the flow of the feature that carries it.

    `behaviour` is the mean probability of the answer, `coherence` the perplexity of other texts
    without steering by that with steering, at most 1, and `score` their product. Of texts that the
    LM writes after the prompts, a share has `named` it; `perplexity` is theirs for the unsteered
    LM, without the answer. For a `control`, `control_features` are added by as much.
    """

    label: str
    feature: str
    strategy: str
    control: bool
    strength: float
    n_features: int
    behaviour: float = column(format=".3f")
    coherence: float = column(format=".3f")
    score: float = column(format=".3f")
    named: float = column("texts that name it", ".3f")
    perplexity: float = column("their perplexity", ".1f")


def measure_steering(
    statistics: TextStatistics,
    answers: Sequence[SteeredAnswer],
    settings: SteeringSettings,
    generator: torch.Generator,
) -> list[SteeringPoint]:
    """Steer towards each answer that has prompts, at every strength by every strategy."""
    lm = statistics.lm
    activity = statistics.activity
    # Evenly spaced, because they may come in the order of their length.
    rows = statistics.kept_rows
    texts = rows[:: max(1, len(rows) // settings.n_texts)][: settings.n_texts]
    answers = [answer for answer in answers if answer.prompts]
    n_active = {at: each.n_active for at, each in activity.items()}
    others = {a.label: control_features(a.graph.features, n_active, generator) for a in answers}
    draws = torch.rand(settings.n_prompts, settings.n_new_tokens, generator=generator)
    plan = list(product(answers, settings.strategies, (False, True), settings.strengths))
    loss_before = mean_loss(lm, texts) if plan else 0.0
    points = []
    for answer, strategy, control, strength in progress(plan, "steering", unit="strength"):
        weights = steering_weights(answer.graph, strategy, settings.decay)
        amounts = {
            feature: strength * weight * float(activity[feature.hook_point].mean[feature.index])
            for feature, weight in weights.items()
        }
        if control:
            other = others[answer.label]
            amounts = {other[f]: amount for f, amount in amounts.items() if f in other}
        with edited(lm.model, add_features(statistics.matcher.saes, amounts)):
            behaviour = answer_probability(lm, answer.prompts, answer.token_id)
            # Coherence is 1 at most, also where the perplexity falls.
            coherence = math.exp(min(0.0, loss_before - mean_loss(lm, texts)))
            written = continue_rows(lm, answer.prompts, draws[: len(answer.prompts)])
        named, perplexity = answer.judge(lm, written)
        points.append(
            SteeringPoint(
                label=answer.label,
                feature=answer.graph.start.id,
                strategy=strategy,
                control=control,
                strength=strength,
                n_features=len(amounts),
                behaviour=behaviour,
                coherence=coherence,
                score=behaviour * coherence,
                named=named,
                perplexity=perplexity,
            )
        )
    return points
