"""Running a script of `benchmarks/` and reading what it printed."""

import importlib.util
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], ModuleType]:
    """A script, imported by its name; scripts import others of their folder."""
    monkeypatch.syspath_prepend(BENCHMARKS)

    def load(name: str) -> ModuleType:
        spec = importlib.util.spec_from_file_location(
            f"benchmark_{name}", BENCHMARKS / f"{name}.py"
        )
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module  # where dataclasses look for it
        spec.loader.exec_module(module)
        return module

    return load


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
