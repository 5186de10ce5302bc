"""Undoing what a benchmark sets for its process."""

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def _precision_of_products() -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    yield
    torch.set_float32_matmul_precision(before)
