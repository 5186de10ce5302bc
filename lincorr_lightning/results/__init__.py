"""Results of a run and their writers: JSON, CSV, PNG, console, loggers, report pages."""

from lincorr_lightning.results.results import Figure, Results
from lincorr_lightning.results.saved_run import SavedRun
from lincorr_lightning.results.table import Table

__all__ = ["Figure", "Results", "SavedRun", "Table"]
