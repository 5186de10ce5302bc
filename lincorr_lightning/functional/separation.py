"""Former home of `lincorr_lightning.functional.auroc`."""

from lincorr_lightning.functional.auroc import class_auroc, counted_auroc

__all__ = ["class_auroc", "counted_auroc"]
