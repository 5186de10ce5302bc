"""Pages about finished runs: what ``lincorr report`` writes."""

from lincorr_lightning.pages.command import report, write_report

__all__ = ["report", "write_report"]
