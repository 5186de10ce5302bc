"""Shuffles, losses and observables, against numpy, scipy and torch's own."""

import numpy as np
import pytest
import torch
from scipy.stats import entropy as scipy_entropy

from lincorr_lightning.geometry.distances import nearest_tokens
from lincorr_lightning.geometry.observables import (
    next_tokens,
    shuffle_blocks,
    token_observables,
)


@pytest.mark.parametrize("level", [0, 1, 2, 3])
def test_blocks_change_places_and_stay_whole(level):
    order = shuffle_blocks(64, level, [3, 1]).numpy()
    blocks = order.reshape(4**level, -1)
    assert sorted(order) == list(range(64))
    assert (np.diff(blocks, axis=1) == 1).all()
    assert (blocks[:, 0] % (64 // 4**level) == 0).all()
    assert (order == np.arange(64)).all() == (level == 0)


def test_each_prompt_has_an_order_of_its_own_everywhere():
    orders = {tuple(shuffle_blocks(64, 3, [0, n, 3]).tolist()) for n in range(50)}
    orders |= {tuple(shuffle_blocks(64, 3, [1, n, 3]).tolist()) for n in range(50)}
    assert len(orders) == 100
    before = torch.get_rng_state()
    again = shuffle_blocks(64, 3, [0, 7, 3])
    torch.manual_seed(1)
    assert torch.equal(again, shuffle_blocks(64, 3, [0, 7, 3]))
    torch.set_rng_state(before)


def test_all_orders_come_equally_often():
    n = 4800
    firsts = np.array([shuffle_blocks(4, 1, [n_th]).tolist() for n_th in range(n)])
    for position in range(4):
        counts = np.bincount(firsts[:, position], minlength=4)
        assert (abs(counts - n / 4) < 5 * np.sqrt(n * 3 / 16)).all()


@pytest.mark.parametrize(("n_tokens", "level"), [(6, 1), (64, 4), (8, -1)])
def test_a_length_that_cannot_be_cut(n_tokens, level):
    with pytest.raises(ValueError, match=rf"{n_tokens} tokens cannot be cut into 4\^{level}"):
        shuffle_blocks(n_tokens, level, [0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_loss_and_entropy(dtype):
    torch.manual_seed(0)
    logits = (torch.randn(3, 10, 20) * 4).to(dtype)
    logits[0, 0, 5] = -torch.inf
    tokens = torch.randint(20, (3, 10))
    tokens[0, 1] = 4
    loss, entropy = next_tokens(logits, tokens)
    expected = torch.nn.functional.cross_entropy(
        logits[:, :-1].double().flatten(0, 1), tokens[:, 1:].flatten(), reduction="none"
    )
    assert torch.allclose(loss.flatten(), expected, atol=1e-5)
    p = logits.double().softmax(-1).numpy()
    assert entropy.numpy() == pytest.approx(scipy_entropy(p, axis=-1), abs=1e-5)
    assert loss.dtype == entropy.dtype == torch.float64


def test_observables_are_means_over_tokens():
    torch.manual_seed(0)
    hidden = torch.randn(2, 3, 20, 5)
    found = token_observables(hidden, nearest_tokens(hidden, 8, k=3), (2, 8), (1, 3))
    cloud = hidden.double().numpy()
    distances = np.linalg.norm(cloud[:, :, :, None] - cloud[:, :, None], axis=-1)
    order = distances.argsort(-1)[..., 1:]
    ratio = np.sort(distances, -1)[..., 2] / np.sort(distances, -1)[..., 1]
    assert found.dimension[..., 0].numpy() == pytest.approx(19 / np.log(ratio).sum(-1), rel=1e-6)
    for p in range(2):
        for layer in range(3):
            vectors = cloud[p, layer]
            u = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
            cosines = (u @ u.T)[~np.eye(20, dtype=bool)]
            assert found.cosine_mean[p, layer] == pytest.approx(cosines.mean(), abs=1e-6)
            assert found.cosine_std[p, layer] == pytest.approx(cosines.std(), abs=1e-6)
            angles = []
            for i in range(20):
                one, two = (vectors[order[p, layer, i, j]] - vectors[i] for j in (0, 1))
                cosine = one @ two / np.linalg.norm(one) / np.linalg.norm(two)
                angles.append(np.degrees(np.arccos(cosine)))
            assert found.angle_mean[p, layer] == pytest.approx(np.mean(angles), abs=1e-4)
            assert found.angle_std[p, layer] == pytest.approx(np.std(angles), abs=1e-4)
        for layer in range(2):
            for i, k in enumerate((1, 3)):
                pairs = zip(order[p, layer, :, :k], order[p, layer + 1, :, :k], strict=True)
                shared = [len(set(a) & set(b)) / k for a, b in pairs]
                assert float(found.overlap[p, layer, i]) == pytest.approx(np.mean(shared))
