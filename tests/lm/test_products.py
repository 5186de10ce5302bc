"""Products of float32 matrices by oneDNN: only where it is faster, exact, and inside the block."""

import pytest
import torch

from lincorr_lightning.lm import products


@pytest.fixture(autouse=True)
def an_amd_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU on which oneDNN is faster, whatever this one is."""
    monkeypatch.delenv("LINCORR_PRODUCTS", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: True)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX512")
    monkeypatch.setattr(products.Path, "is_file", lambda path: True)
    monkeypatch.setattr(products.Path, "read_text", lambda *_, **__: "vendor_id : AuthenticAMD")


def has_amx() -> bool:
    return bool(getattr(torch.cpu, "_is_amx_tile_supported", lambda: False)())


@pytest.mark.skipif(
    has_amx() or not torch.backends.mkldnn.is_available(), reason="products are rounded here"
)
def test_products_and_gradients_are_those_of_float64() -> None:
    rng = torch.Generator().manual_seed(0)
    x, w, b = (torch.randn(size, generator=rng) for size in ((256, 160), (192, 160), (192,)))
    found = []
    with products.fastest():
        assert products.name() == "onednn" and torch.get_float32_matmul_precision() == "medium"
        for dtype in (torch.float32, torch.float64):
            leaves = [one.to(dtype).requires_grad_() for one in (x, w, b)]
            outputs = torch.nn.functional.linear(*leaves)
            found.append([outputs, *torch.autograd.grad(outputs.square().sum(), leaves)])
    for one, exact in zip(*found, strict=True):
        assert (one - exact).norm() < 1e-6 * exact.norm()


def test_it_holds_inside_the_block_and_is_recorded_as_the_highest_precision() -> None:
    with pytest.raises(ZeroDivisionError), products.fastest(), products.fastest():
        assert products.precision() == "highest"
        raise ZeroDivisionError
    assert (products.name(), products.precision()) == ("torch", "highest")
    assert torch.get_float32_matmul_precision() == "highest"


@pytest.mark.parametrize("case", ["intel", "avx2", "gpu", "variable", "rounds"])
def test_elsewhere_nothing_changes(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if case == "intel":
        monkeypatch.setattr(products.Path, "read_text", lambda *_, **__: "GenuineIntel")
    elif case == "avx2":
        monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX2")
    elif case == "gpu":  # whose products the setting would round
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    elif case == "rounds":  # as with AMX
        monkeypatch.setattr(products, "_error", lambda: 2e-3)
    else:
        monkeypatch.setenv("LINCORR_PRODUCTS", "mkl")
    with products.fastest():
        assert (products.name(), torch.get_float32_matmul_precision()) == ("torch", "highest")


@pytest.mark.parametrize("wanted", ["highest", "medium"])
def test_a_precision_that_the_user_sets_is_kept(wanted: str) -> None:
    with products.fastest():
        products.set_precision(wanted)
        assert (products.name(), products.precision()) == ("torch", wanted)
    assert torch.get_float32_matmul_precision() == "highest"
