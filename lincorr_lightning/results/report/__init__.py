"""Report pages made from the folders of finished runs."""

from lincorr_lightning.results.report.page import report, write_report

__all__ = ["report", "write_report"]
