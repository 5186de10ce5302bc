"""Version of the package, the only definition."""

__version__ = "0.3.0"
