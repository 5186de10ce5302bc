"""Shared by all tests. The environment is set before anything imports torch or transformers."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ.setdefault("OMP_NUM_THREADS", "1")

import lightning  # noqa: F401  (its log handler keeps the stderr of its first import)
import pytest
import torch

from tests.toys import NO_FILES, quiet_trainer, save_toy_lm, white_figures


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest files first, so that no worker has one left when the others are done."""
    for item in items:
        if item.get_closest_marker("nightly"):  # so that -m "not slow" leaves it out, too
            item.add_marker("slow")
    long = ("tests/readme", "tests/processes", "tests/reproduce", "tests/test_studies")
    items.sort(key=lambda item: not any(part in item.nodeid for part in long))


@pytest.fixture(autouse=True)
def _seed_torch() -> None:
    """What a test draws does not depend on the tests that its worker ran before."""
    torch.manual_seed(0)


@pytest.fixture(scope="session", autouse=True)
def _white_figures() -> Iterator[None]:
    """Drawing takes a third of the time of a small run; `drawn_figures` does it."""
    with white_figures():
        yield


@pytest.fixture
def make_trainer(tmp_path: Path) -> Callable[..., Any]:
    """Make a quiet Trainer that writes into the test's folder."""
    return lambda *callbacks, **options: quiet_trainer(
        tmp_path, **NO_FILES | {"callbacks": list(callbacks)} | options
    )


@pytest.fixture(scope="session")
def make_lm() -> Callable[..., Path]:
    """`save_toy_lm`, for tests that need another LM than the shared one."""
    return save_toy_lm


@pytest.fixture(scope="session")
def small_lm(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Folder of a random LM whose logits mean nothing but obey the same algebra."""
    return str(save_toy_lm(tmp_path_factory.mktemp("small_lm")))


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of what the options of `small_runs` name."""
    from tests.small_runs import make_inputs  # here: most tests run no study

    folder = tmp_path_factory.mktemp("inputs")
    make_inputs(folder)
    return folder
