"""Reading what a benchmark printed, and undoing what it sets for its process."""

import re
from collections.abc import Callable, Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def _precision_of_products() -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    yield
    torch.set_float32_matmul_precision(before)


@pytest.fixture
def rows() -> Callable[[str], list[list[str]]]:
    """Cells of the rows of all tables in a text, without the tables' heads."""

    def read(text: str) -> list[list[str]]:
        lines = [*text.splitlines(), ""]
        is_rule = [re.fullmatch(r"\|[\s:|-]+\|", line) is not None for line in lines]
        return [
            [cell.strip() for cell in line.strip("|").split("|")]
            for i, line in enumerate(lines)
            if line.startswith("| ") and not is_rule[i] and not is_rule[i + 1]
        ]

    return read
