"""Steering along a flow graph, and what it does, against forwards of the test's own."""

import dataclasses
import math
from itertools import chain
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


START, BELOW, FAR, ABOVE = _feature(2, 0), _feature(1, 5), _feature(0, 1), _feature(3, 9)
OUTPUT = _feature(2, 3, "mlp_out")
ENDS = ((BELOW, START), (OUTPUT, START), (FAR, BELOW), (START, ABOVE))
GRAPH = FlowGraph(START, tuple(Edge(source, target, 0.5) for source, target in ENDS))


def test_weights_fall_with_the_steps_from_the_start() -> None:
    assert steering_weights(GRAPH, "single") == {START: 1.0}
    assert set(steering_weights(GRAPH, "constant").values()) == {1.0}
    assert len(steering_weights(GRAPH, "constant")) == 5
    linear = steering_weights(GRAPH, "linear")
    near = dict.fromkeys((BELOW, OUTPUT, ABOVE), pytest.approx(2 / 3))
    assert linear == {START: 1, **near, FAR: pytest.approx(1 / 3)}
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
    saes = {f.hook_point: toy_sae(f.hook_point, torch.eye(16)) for f in (start, below)}
    # Of each hook point, one other feature is as often active.
    n_active = torch.tensor([5, 5, 5, *[0] * 13])
    statistics = SimpleNamespace(
        lm=lm,
        matcher=SimpleNamespace(saes=saes),
        kept_rows=texts,
        activity={
            at: SimpleNamespace(mean=torch.full((16,), 3.0 + at.layer), n_active=n_active)
            for at in saes
        },
    )
    settings = SteeringSettings(
        strengths=(0.0, 2.0), strategies=("exponential",), n_prompts=3, n_new_tokens=6
    )
    answer = SteeredAnswer("Paris", 7, FlowGraph(start, (Edge(below, start, 0.9),)), prompts)
    answers = [answer, answer._replace(prompts=[])]
    generator = torch.Generator().manual_seed(0)
    none, point, same, control = measure_steering(statistics, answers, settings, generator)  # type: ignore[arg-type]
    before = mean_loss(lm, texts)
    with edited(lm.model, add_features(saes, {start: 2.0 * 4.0, below: 2.0 * 0.5 * 3.0})):
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
    draws = np.random.default_rng(0).random((3, 8))
    vector = 2 * torch.linspace(-1, 1, 16)

    def log_likelihoods(row: list[int], text: list[int]) -> list[float]:
        with torch.no_grad():
            p = lm.model(input_ids=torch.tensor([[*row, *text]])).logits[0].double().log_softmax(1)
        return [float(p[len(row) + i - 1, token]) for i, token in enumerate(text)]

    expected: list[list[int]] = []
    with torch.no_grad(), replaced_output(lm.model, HookPoint(0, "residual"), lambda x: x + vector):
        for row, numbers in zip(rows, draws, strict=True):
            text: list[int] = []
            for number in numbers:
                logits = lm.model(input_ids=torch.tensor([[*row, *text]])).logits[0, -1].double()
                bounds = np.cumsum((logits - logits.max()).exp().numpy())
                text.append(int(np.searchsorted(bounds / bounds[-1], number, side="right")))
                if text[-1] == lm.tokenizer.eos_token_id:
                    break
            expected.append(text)
    with edited(lm.model, {HookPoint(0, "residual"): lambda x: x + vector}):
        written = continue_rows(lm, rows, torch.from_numpy(draws))
    assert written == expected

    words = [lm.tokenizer.decode(text).split() for text in written]
    label = next(word for word in words[0] if word not in words[1])
    named = sum(label in text for text in words) / 3
    likelihoods = list(chain.from_iterable(map(log_likelihoods, rows, written)))
    absent = next(i for i in range(lm.tokenizer.vocab_size) if not any(i in t for t in written))
    judged = SteeredAnswer(label, absent, GRAPH, rows).judge(lm, written)
    assert judged == pytest.approx((named, math.exp(-np.mean(likelihoods))), rel=1e-5)
    assert 0 < named < 1
    # What first says the answer does not count, but what says it again.
    likelihoods = log_likelihoods(rows[1], [7, 3, 7])[1:]
    judged = SteeredAnswer(label, 7, GRAPH, rows[1:2]).judge(lm, [[7, 3, 7]])
    assert judged[1] == pytest.approx(math.exp(-np.mean(likelihoods)), rel=1e-5)
