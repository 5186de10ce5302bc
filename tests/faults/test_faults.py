"""The fault suite in the nightly lane: every try of every kind holds.

``python -m tests.faults`` prints the table of what was tried and what held.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.faults.suite import KINDS, Suite, table

pytestmark = pytest.mark.nightly


@pytest.fixture(scope="session")
def suite(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Suite]:
    """The suite with two tries at a time."""
    with Suite(seed=0, jobs=2, work=None, failures=Path("fault_failures")) as suite:
        yield suite


@pytest.mark.parametrize("kind", KINDS)
def test_every_try_holds(suite: Suite, kind: str) -> None:
    outcomes = suite.run({kind: range(KINDS[kind].count)})
    assert not any(outcome.faults for outcome in outcomes), "\n" + table(outcomes)
