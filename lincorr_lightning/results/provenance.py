"""Versions of the libraries that results depend on."""

from __future__ import annotations

from importlib.metadata import version

from lincorr_lightning.version import __version__

_LIBRARIES = ("torch", "lightning", "transformers")


def versions() -> dict[str, str]:
    """Return the versions of this package and of the libraries that its numbers depend on."""
    return {"lincorr-lightning": __version__, **{name: version(name) for name in _LIBRARIES}}
