"""Reading the folder of a finished run."""

from __future__ import annotations

import io
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import NoneType
from typing import TYPE_CHECKING, Any

import yaml

from lincorr_lightning.config import load_yaml
from lincorr_lightning.errors import ReportError
from lincorr_lightning.io import read_json, regular_file
from lincorr_lightning.results.results import RESULTS_FILE, SCHEMA, find_by_name
from lincorr_lightning.results.table import Table

if TYPE_CHECKING:
    from pandas import DataFrame

    from lincorr_lightning.results.style import Picture

CONFIG_FILE = "config.yaml"
PACKAGE = "lincorr-lightning"

# Keys of all studies, and their types.
_KEYS: dict[str, Any] = {
    "study": str, "lm": (dict, NoneType), "versions": dict, "settings": dict, "tables": list,
    "figures": list,
}  # fmt: skip
_FORMAT = re.compile(r"\+?,?(\.\d{1,2}[efg%]|d)?")
_NULLABLE = {"int64": "Int64", "bool": "boolean"}
_MAX_NAME = 100  # characters of a study's, table's or figure's name
_MAX_NAMED_FOLDERS = 5
_RUN_AGAIN = "Run the study again"
_WAY_OUT = f"{_RUN_AGAIN}, or delete the file to have the page without it."


@dataclass(frozen=True)
class SavedFigure:
    """A figure of a run: the PNG file, and what it shows."""

    path: Path
    caption: str

    @property
    def name(self) -> str:
        """Name of the file without its ending."""
        return self.path.stem

    def _repr_png_(self) -> bytes:
        """Return the picture that a notebook shows."""
        return self.picture.png

    @property
    def picture(self) -> Picture:
        """The PNG.

        Raises:
            ReportError: The file is not a PNG, or is cut short.
        """
        from PIL import Image

        from lincorr_lightning.results.style import Picture

        try:
            png = regular_file(self.path).read_bytes()
            with Image.open(io.BytesIO(png), formats=["PNG"]) as image:
                image.verify()
                return Picture(png, *image.size)
        except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
            raise ReportError(f"{self.path} is no PNG, or was cut short. {_WAY_OUT}") from error


@dataclass(frozen=True)
class SavedRun:
    """A finished run.

    Attributes:
        folder: The run's folder, as the user named it.
        values: Content of ``results.json``.
        config: Content of ``config.yaml``; empty if there is none.
        config_text: Text of ``config.yaml``.
    """

    folder: Path
    values: Mapping[str, Any]
    config: Mapping[str, Any]
    config_text: str

    @classmethod
    def read(cls, folder: str | Path) -> SavedRun:
        """Read the folder of a run.

        Args:
            folder: The folder, or its ``results.json``.

        Raises:
            ReportError: The folder is missing or not a run's, the run did not finish, another
                version of this package wrote it, or its files are damaged.
        """
        folder = Path(folder)
        if folder.name == RESULTS_FILE and folder.is_file():
            folder = folder.parent
        if not folder.is_dir():
            problem = "is a file" if folder.exists() else "does not exist"
            raise ReportError(
                f"{folder} {problem}. Name the folder of a run, which holds {RESULTS_FILE}."
            )
        path, config = folder / RESULTS_FILE, folder / CONFIG_FILE
        if not path.is_file():
            raise ReportError(_why_no_results(folder))
        values = read_json(path, ReportError, f"It was cut short or changed; {_RUN_AGAIN.lower()}.")
        _check(values, path)
        text = _read_config(config) if config.is_file() else ""
        run = cls(folder, values, _parse_config(text, config), text)
        try:
            _ = (run.fingerprint, run.tables, run.figures)
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise _changed(path, str(error)) from error
        return run

    @property
    def study(self) -> str:
        """Name of the study, as ``linear_probe``."""
        return str(self.values["study"])

    @property
    def lm(self) -> Mapping[str, Any]:
        """Name, dtype, fingerprint and size of the LM; empty if the study has none."""
        return dict(self.values["lm"] or {})

    @property
    def lm_name(self) -> str:
        """Hub id or path of the LM; the run's folder if the study has no LM of its own."""
        return str(self.lm.get("name_or_path") or self.folder)

    @property
    def fingerprint(self) -> Mapping[str, str]:
        """Hashes of the LM's tokenizer, config and weights, as far as they are known."""
        return dict(self.lm.get("fingerprint") or {})

    @property
    def n_parameters(self) -> int | None:
        """Number of the LM's parameters, if it is known."""
        n = self.lm.get("n_parameters")
        return n if isinstance(n, int) and not isinstance(n, bool) else None

    @property
    def settings(self) -> Mapping[str, Any]:
        """Hyper-parameters of the study, and under ``data`` those of its data."""
        return dict(self.values["settings"])

    @property
    def versions(self) -> Mapping[str, str]:
        """Versions of this package and of the libraries that its numbers depend on."""
        return {str(key): str(value) for key, value in self.values["versions"].items()}

    @property
    def seeds(self) -> dict[str, Any]:
        """Every seed of the run, by its key."""
        config, settings = (
            {
                key.replace(".init_args", ""): value
                for key, value in flatten(values)
                if re.fullmatch(r"(.*\.)?seed(s|_everything)?", key)
            }
            for values in (self.config, self.settings)
        )
        return config or settings

    @property
    def command(self) -> str | None:
        """Command that repeats the run; None if the run left no config."""
        if not self.config:
            return None
        path = shlex.quote(str(self.folder / CONFIG_FILE))
        return f"lincorr {config_verb(self.config_text)} --config {path}"

    @cached_property
    def tables(self) -> list[Table]:
        """Tables that ``results.json`` lists and whose CSV file is there."""
        found = []
        for entry in self.values["tables"]:
            path, columns = self.table_path(_file_name(entry["name"])), entry["columns"]
            if path.is_file():
                found.append(
                    Table(
                        entry["name"], _read_csv(path, columns), str(entry["caption"]),
                        str(entry["note"]), bool(entry["headline"]),
                        {column["key"]: str(column["heading"]) for column in columns},
                        {column["key"]: _format(column["format"]) for column in columns},
                    )
                )  # fmt: skip
        return found

    @cached_property
    def figures(self) -> list[SavedFigure]:
        """Figures that ``results.json`` lists and whose PNG file is there."""
        found = []
        for entry in self.values["figures"]:
            path = self.folder / "figures" / f"{_file_name(entry['name'])}.png"
            if path.is_file():
                found.append(SavedFigure(path, str(entry["caption"])))
        return found

    def table(self, name: str) -> Table:
        """Return the table of this name; raise ReportError with all names if there is none."""
        return find_by_name(name, self.tables)

    def figure(self, name: str) -> SavedFigure:
        """Return the figure of this name; raise ReportError with all names if there is none."""
        return find_by_name(name, self.figures)

    def table_path(self, name: str) -> Path:
        """Return the CSV file of a table."""
        return self.folder / "tables" / f"{name}.csv"


def flatten(values: Mapping[str, Any], without: str = "") -> Iterator[tuple[str, Any]]:
    """Yield nested values by their keys, joined by dots.

    Args:
        values: Mappings in mappings.
        without: A key of `values` to leave out.

    Example:
        >>> dict(flatten({"a": 1, "b": {"c": [2]}, "lm": {}}, without="lm"))
        {'a': 1, 'b.c': [2]}
    """
    for key, value in values.items():
        if isinstance(value, Mapping) and key != without:
            yield from ((f"{key}.{name}", one) for name, one in flatten(value))
        elif key != without:
            yield str(key), value


def config_verb(text: str) -> str:
    r"""Return the `lincorr` command in the head comment of a config.

    Example:
        >>> config_verb("# Resilience.\n#   lincorr test --config configs/resilience.yaml\n")
        'test'
        >>> config_verb("seed_everything: 0")
        'fit'
    """
    verbs = "fit|validate|test|predict|reproduce"
    command = re.search(rf"^#\s*lincorr ({verbs}) --config", text, re.MULTILINE)
    return command[1] if command else "fit"


def _check(values: Mapping[str, Any], path: Path) -> None:
    """Refuse a ``results.json`` without the keys that all studies share."""
    if values.get("schema") != SCHEMA:
        raise ReportError(
            f"{path} is not of schema {SCHEMA}: another version of {PACKAGE} wrote it. "
            f"{_RUN_AGAIN} with this version, or make the report with that one."
        )
    for key, kind in _KEYS.items():
        if key not in values:
            raise _changed(path, f"key {key!r} is missing")
        if not isinstance(values[key], kind):
            raise _changed(path, f"key {key!r} holds something else")
    if len(values["study"]) > _MAX_NAME:
        raise _changed(path, "the study's name is too long")


def _changed(path: Path, what: str) -> ReportError:
    return ReportError(f"{path} was changed: {what[:_MAX_NAME]}. {_RUN_AGAIN}.")


def _why_no_results(folder: Path) -> str:
    below = sorted(path.parent for path in folder.glob(f"**/{RESULTS_FILE}"))
    if below:
        some = " ".join(shlex.quote(str(path)) for path in below[:_MAX_NAMED_FOLDERS])
        n_more = len(below) - _MAX_NAMED_FOLDERS
        more = f" and {n_more} more" if n_more > 0 else ""
        return f"{folder} is not the folder of a run, but holds some. Name them: {some}{more}"
    config, command = folder / CONFIG_FILE, ""
    if config.is_file():
        verb = config_verb(_read_config(config))
        command = f" (lincorr {verb} --config {shlex.quote(str(config))})"
    return (
        f"{folder} has no {RESULTS_FILE}: it is not the folder of a run, or the run did not "
        f"finish. Run it again{command}, or leave it out."
    )


def _file_name(name: Any) -> str:
    """Return a name that leads to no other folder."""
    if not isinstance(name, str) or len(name) > _MAX_NAME or re.search(r"[/\\\0]", name):
        raise ValueError(f"{str(name)[:_MAX_NAME]!r} is not the name of a table or figure")
    return name


def _format(text: Any) -> str:
    """Return a format that takes neither long nor fails."""
    if not isinstance(text, str) or not _FORMAT.fullmatch(text):
        raise ValueError(f"{str(text)[:_MAX_NAME]!r} is not a format of numbers")
    return text


def _read_csv(path: Path, columns: Sequence[Mapping[str, Any]]) -> DataFrame:
    """Return a table with the dtypes that ``results.json`` has for its columns."""
    from pandas import read_csv

    # A column without missing values may have got some in a file that was changed by hand.
    kinds = {one["key"]: _NULLABLE.get(one["dtype"], one["dtype"]) for one in columns}
    try:
        frame = read_csv(
            regular_file(path), dtype=kinds, keep_default_na=False, na_values=[""], index_col=False
        )
    except (OSError, ValueError, TypeError) as error:
        raise ReportError(f"{path} cannot be read as a table: {error}. {_WAY_OUT}") from error
    if list(frame.columns) != list(kinds):
        raise ReportError(
            f"{path} has the columns {', '.join(frame.columns)}; {RESULTS_FILE} says "
            f"{', '.join(kinds)}. {_WAY_OUT}"
        )
    return frame


def _read_config(path: Path) -> str:
    try:
        return regular_file(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ReportError(f"{path} cannot be read: {error}. {_RUN_AGAIN}.") from error


def _parse_config(text: str, path: Path) -> dict[str, Any]:
    try:
        config = load_yaml(text) if text else {}
    except (yaml.YAMLError, ValueError) as error:
        raise ReportError(f"{path} cannot be read: {' '.join(str(error).split())}") from error
    if not isinstance(config, dict):
        raise ReportError(f"{path} holds no settings.")
    return config
