"""Steering along a flow graph, and what it does, against forwards of the test's own."""

import dataclasses
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from lincorr_lightning.flow.graph import Edge, Feature, FlowGraph
from lincorr_lightning.flow.steering import (
    SteeredAnswer,
    SteeringSettings,
    answer_probability,
    continue_rows,
    mean_loss,
    measure_steering,
    steering_weights,
)
from lincorr_lightning.lm.language_model import LanguageModel
from lincorr_lightning.sae.forwards import add_features
from lincorr_lightning.sae.hook_points import HookPoint
from lincorr_lightning.sae.hooks import edited
from tests.toys import replaced_output, toy_sae


def _feature(layer: int, index: int, kind: str = "residual") -> Feature:
    return Feature(HookPoint(layer, kind), index)  # type: ignore[arg-type]


START, BELOW, BESIDE, FAR, ABOVE = (
    _feature(2, 0),
    _feature(1, 5),
    _feature(2, 3, "mlp_out"),
    _feature(0, 1),
    _feature(3, 9),
)
GRAPH = FlowGraph(
    START,
    (
        Edge(BELOW, START, 0.9),
        Edge(BESIDE, START, 0.5),
        Edge(FAR, BELOW, 0.6),
        Edge(START, ABOVE, 0.7),
    ),
    {},
    {},
)


def test_weights_fall_with_the_steps_from_the_start() -> None:
    assert steering_weights(GRAPH, "single") == {START: 1.0}
    assert set(steering_weights(GRAPH, "constant").values()) == {1.0}
    assert len(steering_weights(GRAPH, "constant")) == 5
    linear = steering_weights(GRAPH, "linear")
    assert list(linear) == [START, BELOW, BESIDE, ABOVE, FAR]
    assert list(linear.values()) == pytest.approx([1, 2 / 3, 2 / 3, 2 / 3, 1 / 3])
    falling = steering_weights(GRAPH, "exponential", decay=0.3)
    assert [falling[f] for f in (START, ABOVE, FAR)] == pytest.approx([1, 0.3, 0.09])


def test_probability_and_loss_are_those_of_single_forwards(small_lm: str) -> None:
    lm = LanguageModel.from_pretrained(small_lm)
    texts = ["name1 lives in the city of Paris", "red blue", "name2 speaks", "Rome"]
    rows = lm.rows(texts)
    hook_point, vector = HookPoint(0, "residual"), torch.linspace(-1, 1, 16)

    for change in (lambda x: x, lambda x: x + vector):
        probabilities, losses = [], []
        with torch.no_grad(), replaced_output(lm.model, hook_point, change):
            for row in rows:
                logits = lm.model(input_ids=torch.tensor([row])).logits[0].double()
                probabilities.append(float(logits[-1].softmax(0)[7]))
                losses += [
                    -float(logits[i].log_softmax(0)[row[i + 1]]) for i in range(len(row) - 1)
                ]
        with edited(lm.model, {hook_point: change}):
            found = answer_probability(lm, rows, 7)
            assert found == pytest.approx(np.mean(probabilities), rel=1e-4)
            assert mean_loss(lm, rows) == pytest.approx(np.mean(losses), rel=1e-5)


def test_points_add_weighted_typical_activations_and_score_them(small_lm: str) -> None:
    lm = LanguageModel.from_pretrained(small_lm)
    prompts, texts = lm.rows(["name1 lives in the city of"]), lm.rows(["name2 speaks", "red blue"])
    start, below = _feature(1, 0), _feature(0, 2)
    graph = FlowGraph(start, (Edge(below, start, 0.9),), {}, {})
    saes = {f.hook_point: toy_sae(f.hook_point, torch.eye(16)) for f in (start, below)}
    # Of each hook point, one other feature is as often active.
    n_active = torch.tensor([5, 5, 5, *[0] * 13])
    activity = {
        at: SimpleNamespace(mean=torch.full((16,), 3.0 + at.layer), n_active=n_active)
        for at in saes
    }
    settings = SteeringSettings(
        strengths=(0.0, 2.0), strategies=("exponential",), decay=0.5, n_prompts=3, n_new_tokens=6
    )
    answer = SteeredAnswer("Paris", 7, graph, prompts)

    def measure() -> list:
        generator = torch.Generator().manual_seed(0)
        every = [answer, answer._replace(prompts=[])]
        return measure_steering(lm, saes, activity, every, texts, settings, generator)  # type: ignore[arg-type]

    none, point, same, control = measure()
    edits = add_features(saes, {start: 2.0 * 4.0, below: 2.0 * 0.5 * 3.0})
    before = mean_loss(lm, texts)
    with edited(lm.model, edits):
        assert point.behaviour == pytest.approx(answer_probability(lm, prompts, 7))
        after = mean_loss(lm, texts)
    assert point.coherence == pytest.approx(min(1.0, math.exp(before - after)))
    assert point.score == pytest.approx(point.behaviour * point.coherence)
    assert none.behaviour == pytest.approx(answer_probability(lm, prompts, 7))
    assert (none.coherence, point.n_features) == (1.0, 2)
    assert same == dataclasses.replace(none, control=True)
    assert control.n_features == 2 and control.behaviour not in (point.behaviour, none.behaviour)


def test_texts_are_those_of_whole_forwards_and_judged_by_the_unsteered_lm(small_lm: str) -> None:
    lm = LanguageModel.from_pretrained(small_lm)
    rows = lm.rows(["name1 lives in the city of", "red blue", "name2 lives in the city of"])
    random = np.random.default_rng(0)
    draws = random.random((3, 8))
    change = lambda x: x + 2 * torch.linspace(-1, 1, 16)  # noqa: E731
    expected = []
    with torch.no_grad(), replaced_output(lm.model, HookPoint(0, "residual"), change):
        for row, numbers in zip(rows, draws, strict=True):
            text: list[int] = []
            for number in numbers:
                logits = lm.model(input_ids=torch.tensor([[*row, *text]])).logits[0, -1].double()
                bounds = np.cumsum((logits - logits.max()).exp().numpy())
                text.append(int(np.searchsorted(bounds / bounds[-1], number, side="right")))
            expected.append(text)
    with edited(lm.model, {HookPoint(0, "residual"): change}):
        written = continue_rows(lm, rows, torch.from_numpy(draws))
    ended = [
        1 + text.index(lm.tokenizer.eos_token_id) if lm.tokenizer.eos_token_id in text else 8
        for text in expected
    ]
    assert written == [text[:n] for text, n in zip(expected, ended, strict=True)]

    words = [lm.tokenizer.decode(text).split() for text in written]
    label = next(word for word in words[0] if word not in words[1])
    named = sum(label in text for text in words) / 3
    losses = []
    for row, text in zip(rows, written, strict=True):
        with torch.no_grad():
            p = lm.model(input_ids=torch.tensor([[*row, *text]])).logits[0].double().log_softmax(1)
        losses += [-float(p[len(row) + i - 1, token]) for i, token in enumerate(text)]
    absent = next(i for i in range(lm.tokenizer.vocab_size) if not any(i in t for t in written))
    found = SteeredAnswer(label, absent, GRAPH, rows).judge(lm, written)
    assert found == pytest.approx((named, math.exp(np.mean(losses))), rel=1e-5)
    assert 0 < named < 1
    # What first says the answer does not count, but what says it again.
    with torch.no_grad():
        ids = torch.tensor([[*rows[1], 7, 3, 7]])
        p = lm.model(input_ids=ids).logits[0].double().log_softmax(1)
    again = -float(p[len(rows[1]), 3] + p[len(rows[1]) + 1, 7]) / 2
    found = SteeredAnswer(label, 7, GRAPH, rows[1:2]).judge(lm, [[7, 3, 7]])
    assert found[1] == pytest.approx(math.exp(again), rel=1e-5)
