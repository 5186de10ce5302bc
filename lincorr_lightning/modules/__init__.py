"""The studies: one LightningModule each."""

from lincorr_lightning.modules.linear_probe import LinearProbe

__all__ = ["LinearProbe"]
