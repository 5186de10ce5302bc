"""Products in float32 by oneDNN: torch's numbers and gradients, by NumPy in float64."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from lincorr_lightning.lm import products

LARGE, SMALL = (128, 160, 256), (3, 5, 7)
needs_onednn = pytest.mark.skipif(
    not torch.backends.mkldnn.is_available(), reason="torch was built without oneDNN"
)


def matrices(sizes: tuple[int, int, int], *batch: int, dtype: torch.dtype) -> list[Tensor]:
    """Bias, left and right, the last two transposed in memory."""
    n, k, m = sizes
    rng = torch.Generator().manual_seed(0)
    shapes = ((m,) if not batch else (*batch, 1, m), (*batch, k, n), (*batch, m, k))
    bias, a, b = (torch.randn(shape, generator=rng, dtype=dtype) for shape in shapes)
    return [bias, a.mT, b.mT]


@needs_onednn
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("sizes", [LARGE, SMALL])
def test_products_are_those_of_numpy(sizes: tuple[int, int, int], dtype: torch.dtype) -> None:
    bias, a, b = matrices(sizes, dtype=dtype)
    c, x, y = matrices(sizes, 2, dtype=dtype)
    one, many = (left.double().numpy() @ right.double().numpy() for left, right in ((a, b), (x, y)))
    expected = [
        (products.mm(a, b), one),
        (products.addmm(bias, a, b), bias.double().numpy() + one),
        (products.addmm(bias, a, b, beta=0.5, alpha=-2), 0.5 * bias.double().numpy() - 2 * one),
        (products.addmm(one_like(a, b), a, b), 1 + one),
        (products.bmm(x, y), many),
        (products.baddbmm(c, x, y), c.double().numpy() + many),
        (products.baddbmm(c, x, y, beta=2), 2 * c.double().numpy() + many),
    ]
    for found, wanted in expected:
        assert found.dtype == dtype and found.shape == wanted.shape
        tolerance = 1e-5 if dtype == torch.float32 else 1e-13
        scale = np.abs(wanted).max()
        np.testing.assert_allclose(found.double().numpy() / scale, wanted / scale, atol=tolerance)


def one_like(a: Tensor, b: Tensor) -> Tensor:
    return torch.ones(len(a), b.shape[1], dtype=a.dtype)


@needs_onednn
def test_only_large_products_of_float32_at_the_highest_precision(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found: list[Tensor] = []
    own: Callable[..., Tensor] = products._product
    monkeypatch.setattr(products, "_product", lambda *args: found.append(own(*args)) or found[-1])
    _, a, b = matrices(LARGE, dtype=torch.float32)
    products.mm(a, b)
    assert len(found) == 1
    products.mm(*matrices(SMALL, dtype=torch.float32)[1:])
    products.mm(a.double(), b.double())
    products.bmm(a.expand(17, -1, -1), b.expand(17, -1, -1))  # many small ones, as in attention
    assert len(found) == 1
    torch.set_float32_matmul_precision("medium")
    try:
        products.mm(a, b)
    finally:
        torch.set_float32_matmul_precision("highest")
    assert len(found) == 1


_SCRIPT = """
import warnings
warnings.simplefilter("error")
import torch
from lincorr_lightning.lm import products
products._is_faster = lambda: True
rng = torch.Generator().manual_seed(0)
x, w = (torch.randn(size, generator=rng) for size in ((128, 160), (256, 160)))
def run():
    layer = torch.nn.Linear(160, 256)
    layer.weight.data, layer.bias.data = w.clone(), torch.ones(256)
    inputs = x.clone().requires_grad_()
    layer(inputs).square().sum().backward()
    return inputs.grad, layer.weight.grad, layer.bias.grad
before = run()
products.use_fastest()
products.use_fastest()
calls = []
own = products._product
products._product = lambda *args: calls.append(1) or own(*args)
for one, other in zip(before, run(), strict=True):
    assert (one - other).abs().max() < 1e-5 * one.abs().max()
assert len(calls) == 3, calls
"""


@needs_onednn
def test_layers_and_their_gradients_use_it_without_a_warning() -> None:
    subprocess.run([sys.executable, "-c", _SCRIPT], check=True)


def test_the_variable_leaves_torch_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX512")
    monkeypatch.setattr(products.Path, "read_text", lambda *_, **__: "vendor_id : AuthenticAMD")
    available = torch.backends.mkl.is_available() and torch.backends.mkldnn.is_available()
    assert products.name() == ("onednn" if available else "mkl")
    monkeypatch.setattr(products.Path, "read_text", lambda *_, **__: "vendor_id : GenuineIntel")
    assert products.name() == "mkl"
    monkeypatch.undo()
    monkeypatch.setenv("LINCORR_PRODUCTS", "mkl")
    assert products.name() == "mkl"
