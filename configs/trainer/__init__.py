"""YAML files that the package carries, so that they are found wherever it is installed."""
