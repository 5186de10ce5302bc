"""Results of a run and their writers: JSON, CSV, PNG, console, loggers, report pages."""

from lincorr_lightning.results.results import Column, Figure, Results, Table
from lincorr_lightning.results.saved_run import SavedFigure, SavedRun

__all__ = ["Column", "Figure", "Results", "SavedFigure", "SavedRun", "Table"]
