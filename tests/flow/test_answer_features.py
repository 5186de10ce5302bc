"""Features that carry answers, what two have in common and ablations, planted and naive."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from sklearn.metrics import roc_auc_score

from lincorr_lightning.flow.graph import DecoderMatcher
from lincorr_lightning.flow.relation import (
    AnswerFeature,
    answer_members,
    compare_answers,
    find_answer_features,
    score_relation,
)
from lincorr_lightning.flow.text_statistics import control_features
from lincorr_lightning.linear_map.layout import RelationLogits
from lincorr_lightning.sae.hook_points import Feature, HookPoint
from tests.toys import toy_sae

LOW, MLP, TOP = HookPoint(0, "residual"), HookPoint(1, "mlp_out"), HookPoint(1, "residual")


def test_planted_features_are_found_and_judged_on_other_subjects() -> None:
    """Feature 3 + label says the answer, with noise; the last label is nobody's answer."""
    random = np.random.default_rng(0)
    n, n_labels, width = 400, 5, 12
    answers = random.integers(0, n_labels - 1, n)
    x = random.normal(size=(n, width)) * 0.5
    x[np.arange(n), 3 + answers] += 1.2
    features = torch.from_numpy(np.maximum(x, 0)).float()
    members = torch.from_numpy(answers[:, None] == np.arange(n_labels))
    found = find_answer_features(TOP, features, members, n_fit=200)
    assert {label: one.feature for label, one in found.items()} == {
        label: Feature(TOP, 3 + label) for label in range(4)
    }
    for label in range(4):
        value = np.maximum(x[200:, 3 + label], 0)
        expected = roc_auc_score(answers[200:] == label, value)
        assert found[label].auroc == pytest.approx(expected, abs=1e-6)
        assert 0.8 < expected < 1


def test_members_are_those_with_the_highest_logit_of_a_label() -> None:
    """The last label is nobody's most likely answer, but some subjects are nearer to it."""
    logits = torch.tensor([[3.0, 0, 1], [2, 1, 0], [0, 5, 4], [9, 3, 3], [7, 8, 6], [5, 1, 4]])
    likely = answer_members(logits, n_fit=3, share=None)
    assert likely.tolist() == [[a == label for label in range(3)] for a in (0, 0, 1, 0, 1, 0)]
    # Relative to the mean of each subject, by hand; a third of three subjects is one.
    share = answer_members(logits, n_fit=3, share=0.34)
    assert share.nonzero().tolist() == [[0, 0], [2, 1], [2, 2], [3, 0], [4, 1], [5, 2]]


def _answers(**indices: list[int]) -> dict[HookPoint, dict[int, AnswerFeature]]:
    """Features of labels by hook point; -1 is none."""
    points = {"low": LOW, "mlp": MLP, "top": TOP}
    return {
        points[name]: {
            label: AnswerFeature(Feature(points[name], index), 1.0)
            for label, index in enumerate(own)
            if index >= 0
        }
        for name, own in indices.items()
    }


def test_pairs_share_the_planted_features() -> None:
    """Sources 0 and 1 come from what target 0 comes from, source 2 from nothing of target 1."""
    eye = torch.eye(8)
    low = eye[:4]
    top = torch.stack([eye[0], eye[0] + 0.1 * eye[5], eye[6], 0.9 * eye[0] + 0.2 * eye[7], eye[1]])
    mlp = torch.stack([eye[6], eye[7]])
    decoders = {LOW: low, MLP: mlp, TOP: top}
    matcher = DecoderMatcher({at: toy_sae(at, d) for at, d in decoders.items()}, threshold=0.5)
    source = _answers(low=[0, 2, 3], mlp=[0, -1, 0], top=[0, 1, 2])
    target = _answers(low=[0, 1, 1], mlp=[1, -1, 1], top=[3, 4, -1])
    reference = torch.tensor([[True, True, False], [False, False, True], [True, True, True]])
    compared = compare_answers(matcher, source, target, reference)
    pairs = {(pair.source, pair.target): pair for pair in compared}
    # Target 2 has no feature.
    assert set(pairs) == {(s, t) for s in range(3) for t in range(2)}
    assert pairs[0, 0].shared == pairs[1, 0].shared == (Feature(LOW, 0),)
    assert pairs[2, 0].shared == pairs[2, 1].shared == pairs[0, 1].shared == ()
    assert pairs[0, 0].carriers == (Feature(LOW, 0),)
    # Neither the hook point above nor a missing feature of both counts.
    assert pairs[1, 0].carriers == pairs[1, 1].carriers == ()
    in_reference = {pair for pair, found in pairs.items() if found.is_reference}
    assert in_reference == {(0, 0), (1, 0), (2, 1)}


def test_controls_are_other_features_that_are_as_often_active() -> None:
    activations = {LOW: torch.arange(100) * 10, TOP: torch.zeros(3)}
    cut = [Feature(LOW, 50), Feature(LOW, 51), Feature(TOP, 0), Feature(TOP, 1)]
    drawn = control_features(cut, activations, torch.Generator().manual_seed(0))
    again = control_features(reversed(cut), activations, torch.Generator().manual_seed(0))
    assert drawn == again
    # The third feature of the top is the only other one, and is taken once.
    assert list(drawn) == cut[:3]
    assert [f.hook_point for f in drawn.values()] == [LOW, LOW, TOP]
    assert len({*drawn.values(), *cut}) == 7
    assert all(abs(drawn[f].index - 50) <= 12 for f in cut[:2])


def test_scores_are_numpys() -> None:
    random = np.random.default_rng(3)
    n, fit = 90, 50
    source = random.normal(size=(n, 4))
    target = source @ random.normal(size=(4, 3)) + random.normal(size=(n, 3))
    source_cut = source + 0.3 * random.normal(size=(n, 4))
    target_cut = target + random.normal(size=(n, 3))
    right = random.random((3, 4)) < 0.5
    right[0, 0] = True
    relation = SimpleNamespace(reference_mask=right, has_reference=True)

    def with_ones(x: np.ndarray) -> np.ndarray:
        return np.column_stack([x, np.ones(len(x))])

    def r(fitted_x: np.ndarray, fitted_y: np.ndarray, x: np.ndarray) -> float:
        solution = np.linalg.lstsq(with_ones(fitted_x[:fit]), fitted_y[:fit], rcond=None)[0]
        predicted = with_ones(x[fit:]) @ solution
        columns = zip(predicted.T, target_cut[fit:].T, strict=True)
        return np.mean([np.corrcoef(p, t)[0, 1] for p, t in columns])

    found = score_relation(
        relation,  # type: ignore[arg-type]
        RelationLogits(torch.from_numpy(source), torch.from_numpy(target)),
        RelationLogits(torch.from_numpy(source_cut), torch.from_numpy(target_cut)),
        n_fit=fit,
    )
    now, answer = target_cut[fit:].argmax(1), source[fit:].argmax(1)
    expected = {
        "fixed": r(source, target, source_cut),
        "target_only": r(source, target, source),
        "refitted": r(source_cut, target_cut, source_cut),
        "recall": right[now, answer].mean(),
        "kept": (now == target[fit:].argmax(1)).mean(),
    }
    assert found == pytest.approx(expected)
