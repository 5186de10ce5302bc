"""YAML files that the package includes; importable, so that an installed package finds them."""
