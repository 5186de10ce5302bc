"""Linear maps between domain logits: the artifact, and fitting it."""

from lincorr_lightning.linear_map.artifact import LinearMap, fit_linear_maps

__all__ = ["LinearMap", "fit_linear_maps"]
