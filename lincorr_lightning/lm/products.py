"""Matrix products in float32 by oneDNN, where it is more than twice as fast as MKL.

On a CPU, torch computes these products by MKL, which leaves the AVX-512 of AMD's processors unused.
oneDNN, which torch contains too, uses it. Both round to float32, in another order. With the
environment variable ``LINCORR_PRODUCTS=mkl``, torch stays as it is.
"""

from __future__ import annotations

import os
import warnings
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

_LEAST = 2**20  # multiplications, below which the call takes longer than it saves
_MAX_MATRICES = 16  # of a batch of products, whose matrices are multiplied one by one


def name() -> str:
    """Return by what large products in float32 are computed on this CPU: ``mkl`` or ``onednn``."""
    return "onednn" if _is_faster() else "mkl"


@cache
def use_fastest() -> None:
    """Let torch compute large products in float32 by what is fastest, in this process.

    It holds for ``mm``, ``addmm``, ``bmm`` and ``baddbmm`` on the CPU, also of gradients, while
    ``torch.get_float32_matmul_precision()`` is ``highest``. Nothing changes but on AMD's processors
    with AVX-512, and only the order in which products are summed.
    """
    if not _is_faster():
        return
    library: Any = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*[Oo]verrid", category=UserWarning)
        for product in (mm, addmm, bmm, baddbmm):
            library.impl(product.__name__, product, "CPU")
    _libraries.append(library)  # which holds as long as the object lives


_libraries: list[Any] = []


def _is_faster() -> bool:
    backends: Any = torch.backends
    if os.environ.get("LINCORR_PRODUCTS") == "mkl" or not (
        backends.mkl.is_available()
        and backends.mkldnn.is_available()
        and backends.cpu.get_cpu_capability() == "AVX512"
    ):
        return False
    try:
        return "AuthenticAMD" in Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:  # another system than Linux
        return False


def _is_large(a: Tensor, b: Tensor) -> bool:
    """Return whether a product of matrices is computed by oneDNN."""
    return (
        a.dtype == b.dtype == torch.float32
        and a.shape[-2] * a.shape[-1] * b.shape[-1] >= _LEAST
        and torch.get_float32_matmul_precision() == "highest"
    )


def _product(a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
    product: Tensor = torch.ops.mkldnn._linear_pointwise(a, b.mT, bias, "none", [], "")
    return product


def mm(a: Tensor, b: Tensor) -> Tensor:
    """Return ``a b``, as torch does."""
    # With `out`, it is another operator, which stays torch's own.
    return _product(a, b) if _is_large(a, b) else torch.mm(a, b, out=a.new_empty(0))


def addmm(bias: Tensor, a: Tensor, b: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    """Return ``beta bias + alpha a b``, as torch does."""
    if beta == alpha == 1 and bias.shape == b.shape[1:] and _is_large(a, b):
        return _product(a, b, bias)
    return torch.addmm(bias, a, b, beta=beta, alpha=alpha, out=a.new_empty(0))


def bmm(a: Tensor, b: Tensor) -> Tensor:
    """Return ``a b`` of each pair of matrices, as torch does."""
    if 0 < len(a) <= _MAX_MATRICES and _is_large(a, b):
        return torch.stack([_product(*pair) for pair in zip(a, b, strict=True)])
    return torch.bmm(a, b, out=a.new_empty(0))


def baddbmm(bias: Tensor, a: Tensor, b: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    """Return ``beta bias + alpha a b`` of each pair of matrices, as torch does."""
    rows = len(a), 1, b.shape[-1]
    if beta == alpha == 1 and bias.shape == rows and len(a) <= _MAX_MATRICES and _is_large(a, b):
        parts = zip(a, b, bias[:, 0], strict=True)
        return torch.stack([_product(*part) for part in parts])
    return torch.baddbmm(bias, a, b, beta=beta, alpha=alpha, out=a.new_empty(0))
