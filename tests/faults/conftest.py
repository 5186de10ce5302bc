"""What all tries share: inputs, and each study's uninterrupted run."""

import os
import random
import shutil
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from tests.faults.runs import Run, finished, start, start_two
from tests.faults.studies import STUDIES, Work, make_inputs


@pytest.fixture(scope="session")
def work(tmp_path_factory: pytest.TempPathFactory) -> Work:
    """Inputs and uninterrupted runs."""
    folder = tmp_path_factory.mktemp("faults")
    make_inputs(folder / "inputs")

    @cache
    def reference(study: str, two: bool = False) -> tuple[Path, float]:
        root, began = folder / f"{study}{'_two' * two}", time.monotonic()
        root.mkdir()
        command = STUDIES[study].command(folder / "inputs", root, two)
        output = root / "stderr"
        for run in start_two(command, output) if two else [start(command, output)]:
            assert run.ends() == 0, run.text[-2000:]
        return finished(root), time.monotonic() - began

    run, _ = reference("sparse_autoencoders")
    shutil.copytree(run / "sparse_autoencoders", folder / "inputs" / "saes")
    return Work(folder / "inputs", reference)


@pytest.fixture
def draw(request: pytest.FixtureRequest) -> random.Random:
    """Random numbers of a try; other ones with another LINCORR_FAULTS_SEED."""
    return random.Random(f"{os.environ.get('LINCORR_FAULTS_SEED', '0')} {request.node.name}")


@pytest.fixture
def run_study(work: Work, tmp_path: Path) -> Callable[..., Run]:
    """Start a study below the try's folder; the name is that of the file with its stderr."""

    def run(study: str, name: str, *more: str, max_bytes: int | None = None) -> Run:
        command = STUDIES[study].command(work.inputs, tmp_path / "runs")
        return start([*command, *more], tmp_path / f"{name}.stderr", max_bytes)

    return run


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Count the tries; a test without a count is one."""
    tries = held = 0
    for report in (one for key in ("passed", "failed") for one in terminalreporter.getreports(key)):
        if "tests/faults/" in report.nodeid and report.when == "call":
            counts = dict(report.user_properties)
            tries += counts.get("tries", 1)
            held += counts.get("held", int(report.passed))
    if tries:
        terminalreporter.write_line(f"{held:,} of {tries:,} tries of faults held")
