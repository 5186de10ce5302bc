"""The settings of a probe, checked before anything is loaded."""

from __future__ import annotations

from collections.abc import Sequence

from lincorr_lightning.errors import ConfigError


def check_settings(
    ridge: float | str, ridge_grid: Sequence[float] | None, control: str | None, solver: str
) -> None:
    """Refuse settings of `LinearProbe` that cannot be.

    Raises:
        ConfigError: It names the key and what it may be.
    """
    if ridge == "auto":
        if solver == "sgd":
            raise ConfigError("model.ridge auto needs model.solver closed_form; give sgd a number.")
    elif not 0 <= float(ridge) < float("inf"):
        raise ConfigError(f"model.ridge is {ridge}; it must be auto or a number of at least 0.")
    grid = None if ridge_grid is None else list(ridge_grid)
    if grid is not None and (not grid or sorted(set(grid)) != grid or grid[0] < 0):
        raise ConfigError("model.ridge_grid must be increasing numbers of at least 0.")
    if control is not None and control.count("{}") != 1:
        raise ConfigError(f"model.control {control!r} must hold {{}} once, where X goes.")
