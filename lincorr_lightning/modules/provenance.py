"""What a run's numbers were made with."""

from __future__ import annotations

from importlib.metadata import version

_LIBRARIES = ("lincorr-lightning", "torch", "lightning", "transformers")


def versions() -> dict[str, str]:
    """Versions of this package and of the libraries that move its numbers, by name."""
    return {name: version(name) for name in _LIBRARIES}
