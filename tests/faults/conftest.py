"""What all tries share: inputs, and each study's uninterrupted run with its checkpoints."""

import os
import random
import shutil
from functools import cache
from pathlib import Path

import pytest

from tests.faults.runs import Work, start
from tests.small_runs import RESUMED, SMALL_RUNS, keeping, make_inputs


@pytest.fixture(scope="session")
def work(tmp_path_factory: pytest.TempPathFactory) -> Work:
    """Inputs and uninterrupted runs."""
    folder = tmp_path_factory.mktemp("faults")
    inputs = folder / "inputs"
    inputs.mkdir()
    make_inputs(inputs)

    @cache
    def reference(study: str) -> Path:
        root = folder / study.replace(" ", "_")
        root.mkdir()
        more = keeping(root / "kept") if study in RESUMED else []
        run = start(SMALL_RUNS[study].command(inputs, root, *more), root / "stderr")
        assert run.ends() == 0, run.text[-2000:]
        (results,) = root.rglob("results.json")
        return results.parent

    shutil.copytree(reference("SAEs") / "sparse_autoencoders", inputs / "saes")
    return Work(inputs, reference)


@pytest.fixture
def draw(request: pytest.FixtureRequest) -> random.Random:
    """Random numbers of a test; other ones with another LINCORR_FAULTS_SEED."""
    return random.Random(f"{os.environ.get('LINCORR_FAULTS_SEED', '0')} {request.node.name}")
