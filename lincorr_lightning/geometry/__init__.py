"""Token geometry of hidden states."""

from lincorr_lightning.geometry.token_geometry import TokenGeometry

__all__ = ["TokenGeometry"]
