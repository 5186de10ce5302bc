"""Print the table of what was tried and what held: ``python -m tests.faults``."""

from __future__ import annotations

import argparse
import signal
import sys
from pathlib import Path

from tests.faults.suite import KINDS, Suite, table


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description=__doc__)
    parser.add_argument("--seed", type=int, default=0, help="seed of all tries (default: 0)")
    parser.add_argument("--jobs", type=int, default=2, help="tries at a time (default: 2)")
    parser.add_argument(
        "--work", type=Path,
        help="folder of inputs and uninterrupted runs, kept for the next time (default: temporary)",
    )  # fmt: skip
    parser.add_argument(
        "--failures", type=Path, default=Path("fault_failures"),
        help="folder for the tries that did not hold (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument("--only", choices=KINDS, help="one kind of try")
    parser.add_argument("--number", type=int, help="one try of the kind, by its number")
    for name, kind in KINDS.items():
        parser.add_argument(f"--{name}", type=int, default=kind.count, metavar="N",
                            help=f"number of tries (default: {kind.count})")  # fmt: skip
    options = parser.parse_args()
    if options.number is not None and options.only is None:
        parser.error("--number needs --only")
    kinds = [options.only] if options.only else list(KINDS)
    numbers = {
        name: [options.number] if options.number is not None else range(getattr(options, name))
        for name in kinds
    }
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    with Suite(options.seed, options.jobs, options.work, options.failures) as suite:
        outcomes = suite.run(numbers, progress=True)
    sys.stdout.write(table(outcomes))
    sys.exit(any(outcome.faults for outcome in outcomes))


if __name__ == "__main__":
    main()
