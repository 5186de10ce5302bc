"""Results of a run and their writers: JSON, CSV, PNG, console, loggers, report pages."""
