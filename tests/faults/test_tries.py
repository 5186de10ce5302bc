"""Runs with wrong inputs and settings end by one line, or are right: many tries in one process.

In the nightly lane; LINCORR_FAULTS_SEED=N makes others, and ``-k callbacks`` tries one kind.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.faults.inputs import INPUTS
from tests.faults.runs import run_cases
from tests.faults.settings import SETTINGS
from tests.faults.studies import Work

pytestmark = pytest.mark.nightly

KINDS = INPUTS | SETTINGS
N_TRIES = 20
"""Tries of a test."""
_MORE = {"callbacks": 8, "flags": 8, "resume": 8, "urls": 5}


@pytest.mark.parametrize(
    ("kind", "number"), [(kind, i) for kind in KINDS for i in range(_MORE.get(kind, 3))]
)
def test_tries(
    kind: str, number: int, work: Work, tmp_path: Path, record_property: Callable[..., None]
) -> None:
    seed, cases = os.environ.get("LINCORR_FAULTS_SEED", "0"), []
    for i in range(N_TRIES):
        folder = tmp_path / str(i)
        folder.mkdir()
        draw = random.Random(f"{seed} {kind} {number * N_TRIES + i}")
        cases.append(KINDS[kind](draw, work, folder))
    failures = run_cases(cases, tmp_path)
    record_property("tries", N_TRIES)
    record_property("held", N_TRIES - len(failures))
    assert not failures, "\n".join(f"{kind}: {failure}" for failure in failures)
