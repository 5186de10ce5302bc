"""Networks side by side."""

import torch

from lincorr_lightning.ablation.networks import NetworkSettings, StackedNetworks


def test_each_network_is_clipped_by_its_own_norm():
    networks = StackedNetworks(3, 5, NetworkSettings())
    networks.reset([0, 1, 2])
    x = torch.randn(3, 7, 5)
    (networks(x) * torch.tensor([1.0, 1e-4, 100.0])[:, None, None]).sum().backward()
    before = [p.grad.clone() for p in networks.parameters()]
    norms = [torch.cat([g[i].flatten() for g in before]).norm() for i in range(3)]
    networks.clip_gradients(0.5)
    for i, norm in enumerate(norms):
        scale = min(1.0, 0.5 / float(norm))
        for parameter, gradient in zip(networks.parameters(), before, strict=True):
            torch.testing.assert_close(parameter.grad[i], gradient[i] * scale, rtol=1e-4, atol=0)
