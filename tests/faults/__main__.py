"""Print the table of what was tried and what held: ``python -m tests.faults``."""

from __future__ import annotations

import argparse
import signal
import sys
from pathlib import Path

from tests.faults.suite import KINDS, Suite, table


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description=__doc__)
    add = parser.add_argument
    add("--seed", type=int, default=0, help="seed of all tries (default: 0)")
    add("--jobs", type=int, default=2, help="tries at a time (default: 2)")
    add("--work", type=Path, help="folder of inputs and uninterrupted runs, kept for the next time")
    add("--failures", type=Path, default=Path("fault_failures"), help="folder of failures")
    add("--only", choices=KINDS, nargs="+", default=list(KINDS), help="kinds of try")
    add("--count", type=int, help="number of tries of each kind")
    add("--number", type=int, help="one try of the kind, by its number")
    options = parser.parse_args()
    counts = {name: KINDS[name].count if options.count is None else options.count
              for name in options.only}  # fmt: skip
    numbers = {
        name: range(count) if options.number is None else [options.number]
        for name, count in counts.items()
    }
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    with Suite(options.seed, options.jobs, options.work, options.failures) as suite:
        outcomes = suite.run(numbers, progress=True)
    sys.stdout.write(table(outcomes))
    sys.exit(any(outcome.faults for outcome in outcomes))


if __name__ == "__main__":
    main()
