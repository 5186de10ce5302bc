"""Transition matrices against the naive way in numpy."""

import numpy as np
import pytest
import torch

from lincorr_lightning.flow.matching import assign_features, match_features
from lincorr_lightning.flow.transitions import (
    carry_features,
    explained_variance,
    transition_matrix,
)


@pytest.mark.parametrize("k", [1, 3])
def test_transition_is_the_indicator_of_the_top_k(k: int) -> None:
    random = np.random.default_rng(0)
    targets, sources = (random.normal(size=(n, 11)).astype(np.float32) for n in (37, 53))
    cosines = (targets / np.linalg.norm(targets, axis=1)[:, None]) @ (
        sources / np.linalg.norm(sources, axis=1)[:, None]
    ).T
    indicator = np.zeros((53, 37), np.float32)
    for target in range(37):
        for source in np.argsort(-cosines[target])[:k]:
            indicator[source, target] = 1
    matches = match_features(torch.from_numpy(targets), torch.from_numpy(sources), k)
    transition = transition_matrix(matches.indices, 53)
    np.testing.assert_array_equal(transition.to_dense(), indicator)
    features = torch.rand(8, 53)
    carried = features @ torch.from_numpy(indicator)
    torch.testing.assert_close(carry_features(features, transition), carried)
    torch.testing.assert_close(carry_features(features, transition.to_dense()), carried)


def test_transition_leaves_out_what_has_no_match() -> None:
    transition = transition_matrix(torch.tensor([[-1], [2]]), 3)
    assert transition.to_dense().tolist() == [[0.0, 0.0], [0.0, 0.0], [0.0, 1.0]]
    with pytest.raises(ValueError, match="source 3 is out of range: there are 3"):
        transition_matrix(torch.tensor([[3]]), 3)


def test_a_permuted_decoder_is_a_perfect_transcoder() -> None:
    """Features of one hook point written with another's order come out as its activations."""
    generator = torch.Generator().manual_seed(0)
    target = torch.nn.functional.normalize(torch.randn(40, 64, generator=generator), dim=1)
    order = torch.randperm(40, generator=generator)
    source = target[order]
    features = torch.rand(200, 40, generator=generator) * (
        torch.rand(200, 40, generator=generator) < 0.1
    )
    true = features @ source
    for found in (match_features(target, source), assign_features(target, source)):
        carried = carry_features(features, transition_matrix(found.indices, 40))
        assert explained_variance(true, carried @ target) == pytest.approx(1)
    wrong = carry_features(features, transition_matrix(torch.arange(40)[:, None], 40)) @ target
    x, y = true.numpy().astype(float), wrong.numpy().astype(float)
    by_hand = 1 - np.square(x - y).sum() / (x.var(axis=0) * len(x)).sum()
    assert explained_variance(true, wrong) == pytest.approx(by_hand)
    assert np.isnan(explained_variance(torch.ones(3, 2), torch.ones(3, 2)))
