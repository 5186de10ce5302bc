"""Checks of a run's folder."""

from pathlib import Path


def assert_is_last(path: Path) -> None:
    """Assert that a run's results.json was written after all its other files."""
    others = [p for p in path.parent.rglob("*") if p.is_file() and "events.out" not in p.name]
    assert max(others, key=lambda p: p.stat().st_mtime_ns) == path
