"""Steering along a flow graph, and what it does, against forwards of the test's own."""

import math

import numpy as np
import pytest
import torch

from lincorr_lightning.errors import ConfigError
from lincorr_lightning.flow.activity import FeatureActivity
from lincorr_lightning.flow.graph import Edge, Feature, FlowGraph
from lincorr_lightning.flow.steering import (
    amounts,
    answer_probability,
    distances,
    score,
    steering_weights,
    text_loss,
)
from lincorr_lightning.lm.language_model import LanguageModel
from lincorr_lightning.sae.hook_points import HookPoint


def _feature(layer: int, index: int, kind: str = "residual") -> Feature:
    return Feature(HookPoint(layer, kind), index)  # type: ignore[arg-type]


START, BELOW, BESIDE, FAR, ABOVE = (
    _feature(2, 0), _feature(1, 5), _feature(2, 3, "mlp_out"), _feature(0, 1), _feature(3, 9)
)  # fmt: skip
GRAPH = FlowGraph(
    START,
    (Edge(BELOW, START, 0.9), Edge(BESIDE, START, 0.5), Edge(FAR, BELOW, 0.6),
     Edge(START, ABOVE, 0.7)),
    {}, {}, {},
)  # fmt: skip


def test_weights_fall_with_the_steps_from_the_start() -> None:
    assert distances(GRAPH) == {START: 0, BELOW: 1, BESIDE: 1, ABOVE: 1, FAR: 2}
    assert steering_weights(GRAPH, "single") == {START: 1.0}
    assert set(steering_weights(GRAPH, "constant").values()) == {1.0}
    assert len(steering_weights(GRAPH, "constant")) == 5
    linear = steering_weights(GRAPH, "linear")
    assert [linear[f] for f in (START, BELOW, FAR)] == pytest.approx([1, 2 / 3, 1 / 3])
    falling = steering_weights(GRAPH, "exponential", decay=0.3)
    assert [falling[f] for f in (START, ABOVE, FAR)] == pytest.approx([1, 0.3, 0.09])
    with pytest.raises(ConfigError, match="no steering strategy 'quadratic'; there are single"):
        steering_weights(GRAPH, "quadratic")  # type: ignore[arg-type]


def test_amounts_are_in_typical_activations() -> None:
    given = amounts({START: 1.0, BELOW: 0.5, FAR: 0.5}, 3.0, {START: 2.0, BELOW: 4.0})
    assert given == {START: 6.0, BELOW: 6.0, FAR: 0.0}


def test_probability_and_loss_are_those_of_single_forwards(small_lm: str) -> None:
    lm = LanguageModel.from_pretrained(small_lm)
    texts = ["name1 lives in the city of Paris", "red blue", "name2 speaks", "Rome"]
    rows = lm.rows(texts)
    hook_point, vector = HookPoint(0, "residual"), torch.linspace(-1, 1, 16)

    def hook(module, args, output):
        x = output[0] if isinstance(output, tuple) else output
        return (x + vector, *output[1:]) if isinstance(output, tuple) else x + vector

    for edits in (None, {hook_point: lambda x: x + vector}):
        handle = lm.model.model.layers[0].register_forward_hook(hook if edits else lambda *_: None)
        probabilities, losses = [], []
        with torch.no_grad():
            for row in rows:
                ids = torch.tensor([row])
                logits = lm.model(input_ids=ids).logits[0].double()
                probabilities.append(float(logits[-1].softmax(0)[7]))
                losses += [
                    -float(logits[i].log_softmax(0)[row[i + 1]]) for i in range(len(row) - 1)
                ]
        handle.remove()
        found = answer_probability(lm, rows, 7, edits)
        assert found == pytest.approx(np.mean(probabilities), rel=1e-4)
        assert text_loss(lm, rows, edits) == pytest.approx(np.mean(losses), rel=1e-5)


def test_score_is_behaviour_times_coherence() -> None:
    assert score(0.8, 3.0, 2.0) == pytest.approx((0.8, math.exp(-1), 0.8 * math.exp(-1)))
    # A perplexity that falls is no more than coherent.
    assert score(0.5, 1.0, 2.0) == (0.5, 1.0, 0.5)


def test_activity_is_counted_as_by_loops() -> None:
    random = np.random.default_rng(0)
    activity = FeatureActivity(6, n_context=3)
    values, peaks = [], {}
    for _ in range(3):
        lengths = [4, 2, 5]
        mask = np.arange(5) < np.array(lengths)[:, None]
        ids = np.where(mask, random.integers(1, 50, (3, 5)), 0)
        predicted = random.integers(1, 50, (3, 5))
        features = np.maximum(random.normal(size=(3, 5, 6)) - 0.3, 0)
        features[..., 5] = 0
        flat = torch.from_numpy(features)[torch.from_numpy(mask)].float()
        activity.update(flat, *(torch.from_numpy(part) for part in (ids, mask, predicted)))
        for text in range(3):
            for position in range(lengths[text]):
                values.append(features[text, position])
                for f in range(5):
                    value = features[text, position, f]
                    if value > peaks.get(f, (0,))[0]:
                        context = ids[text, max(0, position - 2) : position + 1].tolist()
                        peaks[f] = (value, context, predicted[text, position])
    table = np.array(values)
    assert activity.n_tokens == len(table) == 33
    assert activity.n_active.tolist() == (table > 0).sum(0).tolist()
    np.testing.assert_allclose(
        activity.mean[:5], [table[table[:, f] > 0, f].mean() for f in range(5)], rtol=1e-5
    )
    assert activity.mean[5] == 0 and activity.peak(5) is None
    for f, (value, context, predicted) in peaks.items():
        peak = activity.peak(f)
        assert peak is not None
        assert peak.activation == pytest.approx(value, rel=1e-6)
        assert (peak.context, peak.predicted) == (context, predicted)
