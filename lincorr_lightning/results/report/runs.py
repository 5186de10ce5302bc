"""Reading the folders of runs."""

from __future__ import annotations

import csv
import json
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml

from lincorr_lightning.errors import ReportError
from lincorr_lightning.results.report.lms import LM, find_lm

RESULTS, CONFIG = "results.json", "config.yaml"
# Any of these tells that a run has begun here.
_TRACES = (CONFIG, "hparams.yaml", "checkpoints", "linear_map", "tables")
_SHOWN = 5


@dataclass(frozen=True)
class Run:
    """A finished run.

    Attributes:
        folder: As the user named it.
        results: What ``results.json`` says.
        config: What ``config.yaml`` says; empty where there is none.
        lm: The LM that it ran on.
    """

    folder: Path
    results: Mapping[str, Any]
    config: Mapping[str, Any]
    lm: LM

    @property
    def study(self) -> str:
        """As ``linear_probe``."""
        return str(self.results["study"])

    @property
    def relation(self) -> str | None:
        """As ``city->country``, where the study has one."""
        relation = self.results.get("relation")
        return None if relation is None else str(relation)

    @property
    def settings(self) -> Mapping[str, Any]:
        """The study's own, as ``results.json`` has them."""
        settings = self.results.get("settings")
        return settings if isinstance(settings, Mapping) else {}

    @cached_property
    def versions(self) -> dict[str, str]:
        """Of this package and its libraries, as far as they were written down."""
        found: dict[str, str] = {}
        for told in (
            self.linear_map.get("versions"),
            self.settings.get("versions"),
            self.results.get("versions"),
        ):
            if isinstance(told, Mapping):
                found |= {str(k).replace("-", "_"): str(v) for k, v in told.items()}
        return found

    @cached_property
    def linear_map(self) -> Mapping[str, Any]:
        """What the run's linear map says of itself; empty where there is none."""
        return _linear_map(self.folder)

    @cached_property
    def seeds(self) -> dict[str, Any]:
        """Every seed of the run, by its key."""
        found = dict(_seeds(self.config)) or dict(_seeds(self.settings))
        return {key.replace(".init_args", ""): value for key, value in found.items()}

    @property
    def command(self) -> str | None:
        """What gives the run again; None where it left no config."""
        if not self.config:
            return None
        return f"lincorr {self._subcommand} --config {shlex.quote(str(self.folder / CONFIG))}"

    @property
    def _subcommand(self) -> str:
        # Each of Lightning's subcommands saves the arguments of its own method.
        if "return_predictions" in self.config:
            return "predict"
        return "test" if "verbose" in self.config else "fit"

    def config_text(self) -> str:
        """The text of ``config.yaml``; empty where there is none."""
        path = self.folder / CONFIG
        return path.read_text(encoding="utf-8") if self.config else ""

    def table(self, name: str) -> list[dict[str, str]]:
        """Rows of one of the run's tables, by column; empty where there is no such table.

        Args:
            name: As ``cases``.

        Raises:
            ReportError: The table is damaged.
        """
        path = self.folder / "tables" / f"{name}.csv"
        if not path.is_file():
            return []
        try:
            with path.open(newline="", encoding="utf-8") as file:
                rows = list(csv.DictReader(file, restkey="", strict=True))
        except (UnicodeDecodeError, csv.Error, OSError) as error:
            raise ReportError(f"{path} cannot be read as a table: {error}.") from error
        for i, row in enumerate(rows, start=2):
            if "" in row or None in row.values():
                raise ReportError(
                    f"{path}, line {i} has another number of cells than the table has columns. "
                    "Run the study again, or delete the file to have the page without it."
                )
        return rows


def read_runs(folders: Sequence[str | Path]) -> list[Run]:
    """Read the folders of some runs.

    Args:
        folders: Their folders; one that is named twice is read once.

    Raises:
        ReportError: One of them is missing, is no run's folder, did not finish or is damaged; or
            none is named.
    """
    if not folders:
        raise ReportError("name the folder of a run, as in: lincorr report runs/linear_probe/*")
    runs = [read_run(Path(folder)) for folder in folders]
    return list({run.folder.resolve(): run for run in reversed(runs)}.values())[::-1]


def read_run(folder: Path) -> Run:
    """Read a run's folder.

    Args:
        folder: It.

    Raises:
        ReportError: It is missing, is no run's folder, did not finish or is damaged.
    """
    if folder.name == RESULTS and folder.is_file():
        folder = folder.parent
    if not folder.is_dir():
        what = "is a file" if folder.exists() else "does not exist"
        raise ReportError(f"{folder} {what}. Name the folder of a run, which holds {RESULTS}.")
    if not (folder / RESULTS).is_file():
        raise ReportError(_why_no_results(folder))
    results = _read_json(folder / RESULTS)
    if not isinstance(results.get("study"), str):
        raise ReportError(
            f"{folder / RESULTS} does not say of which study it is (key 'study'): it was not "
            "written by this package."
        )
    config = _read_config(folder / CONFIG)
    lm = find_lm(results, config, _linear_map(folder), folder)
    return Run(folder, results, config, lm)


def _why_no_results(folder: Path) -> str:
    below = sorted(path.parent for path in folder.glob(f"**/{RESULTS}"))
    if below:
        some = " ".join(shlex.quote(str(path)) for path in below[:_SHOWN])
        more = f" and {len(below) - _SHOWN} more" if len(below) > _SHOWN else ""
        return f"{folder} is no run's folder, but holds some. Name them: {some}{more}"
    if any((folder / name).exists() for name in _TRACES) or list(folder.glob("events.out.*")):
        again = (
            f"Run it again (lincorr fit --config {shlex.quote(str(folder / CONFIG))})"
            if (folder / CONFIG).is_file()
            else "Run it again"
        )
        return (
            f"the run in {folder} did not finish: there is no {RESULTS} in it. {again}, or leave "
            "it out."
        )
    return f"{folder} is no run's folder: there is no {RESULTS} in it."


def _no_literal(name: str) -> float:
    raise ValueError(f"{name} is no JSON")


def _read_json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"), parse_constant=_no_literal)
    except (ValueError, OSError, RecursionError) as error:
        raise ReportError(
            f"{path} cannot be read: {error}. It was cut short or changed; run the study again."
        ) from error
    if not isinstance(found, dict):
        raise ReportError(f"{path} holds no JSON object, but a {type(found).__name__}.")
    return found


def _linear_map(folder: Path) -> Mapping[str, Any]:
    path = folder / "linear_map" / CONFIG.replace(".yaml", ".json")
    return _read_json(path) if path.is_file() else {}


def _read_config(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        found = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError, OSError) as error:
        raise ReportError(f"{path} cannot be read: {' '.join(str(error).split())}") from error
    if not isinstance(found, dict):
        raise ReportError(f"{path} holds no settings.")
    return found


def _seeds(settings: Any, place: str = "") -> list[tuple[str, Any]]:
    if not isinstance(settings, Mapping):
        return []
    found = []
    for key, value in settings.items():
        here = f"{place}.{key}" if place else str(key)
        if re.fullmatch(r"seed(s|_everything)?", str(key)):
            found.append((here, value))
        else:
            found += _seeds(value, here)
    return found
