"""Products of float32 matrices by oneDNN, where it is more than twice as fast as MKL.

On a CPU, torch computes these products by MKL, which leaves the AVX-512 of AMD's processors unused.
oneDNN, which torch contains too, uses it. Both round to float32, in another order. torch takes
oneDNN where rounding to bfloat16 is allowed, which oneDNN does on processors with AMX alone.
"""

import os
import platform
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

_HIGHEST = "highest"
_ALLOWED = "medium"
_LARGEST_ERROR = 1e-6  # of a product; that of bfloat16 is 2e-3, that of float32 4e-7
_is_fast = False


def name() -> str:
    """Return by what products of float32 matrices are computed: ``onednn``, or torch's own way."""
    return "onednn" if _is_fast else "torch"


def precision() -> str:
    """Return ``torch.get_float32_matmul_precision()`` as it was set, whatever `fastest` does."""
    return _HIGHEST if _is_fast else torch.get_float32_matmul_precision()


def set_precision(wanted: str) -> None:
    """Set torch's precision of products, which `fastest` then leaves alone."""
    global _is_fast
    _is_fast = False
    torch.set_float32_matmul_precision(wanted)


def conditions(device: torch.device) -> list[str]:
    """Return what decides the bits of a product on a device: processor, threads and settings."""
    backends: Any = torch.backends.mkldnn, torch.backends.cuda
    # "none", as nothing was set, is ieee.
    rounding = [backend.matmul.fp32_precision.replace("none", "ieee") for backend in backends]
    if device.type == "cuda":
        return [torch.cuda.get_device_name(device), *rounding]
    capability = torch.backends.cpu.get_cpu_capability()
    threads = f"{torch.get_num_threads()} threads"  # which divide sums
    model = next(iter(re.findall("model name.*", _cpus())), platform.processor())
    return [device.type, model, capability, threads, name(), *rounding]


def _cpus() -> str:
    path = Path("/proc/cpuinfo")
    return path.read_text(encoding="utf-8") if path.is_file() else ""


@contextmanager
def fastest() -> Iterator[None]:
    """Let torch take what is fastest at the same precision inside a ``with`` block.

    Nothing changes but on AMD's processors with AVX-512, and where a product shows that it is one
    of float32; also not beside a GPU, to which torch's setting would apply too, with
    ``LINCORR_PRODUCTS=mkl`` in the environment, or where another precision is set.
    """
    global _is_fast
    before = torch.get_float32_matmul_precision()
    was_fast = _is_fast
    try:
        if before == _HIGHEST and _may_be_faster():
            torch.set_float32_matmul_precision(_ALLOWED)
            _is_fast = _error() < _LARGEST_ERROR
            if not _is_fast:
                torch.set_float32_matmul_precision(before)
        yield
    finally:
        _is_fast = was_fast
        torch.set_float32_matmul_precision(before)


def _may_be_faster() -> bool:
    return (
        os.environ.get("LINCORR_PRODUCTS") != "mkl"
        and not torch.cuda.is_available()
        and torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
        and torch.backends.cpu.get_cpu_capability() == "AVX512"
        and "AuthenticAMD" in _cpus()
    )


def _error() -> float:
    rng = torch.Generator().manual_seed(0)
    a, b = (torch.randn(size, generator=rng) for size in ((128, 576), (576, 1536)))
    exact = a.double() @ b.double()
    return float((a @ b - exact).norm() / exact.norm())
