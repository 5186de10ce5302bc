"""Linear probe: W and b between the logits of two prompts, their scores and nulls."""

from lincorr_lightning.probe.module import LinearProbe
from lincorr_lightning.probe.resilience import MapResilience

__all__ = ["LinearProbe", "MapResilience"]
