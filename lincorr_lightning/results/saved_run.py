"""Reading the folder of a finished run."""

from __future__ import annotations

import csv
import re
import shlex
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from lincorr_lightning.config import load_yaml
from lincorr_lightning.errors import ReportError
from lincorr_lightning.io import read_json, regular_file
from lincorr_lightning.results.results import EARLIER_FILE, RESULTS_FILE, SCHEMA, find_by_name
from lincorr_lightning.results.table import Table

if TYPE_CHECKING:
    from pandas import DataFrame

CONFIG_FILE = "config.yaml"
PACKAGE = "lincorr-lightning"

_FORMAT = re.compile(r"\+?,?(\.\d{1,2}[efg%]|d)?")
_DTYPES = ("object", "float64", "float32", "int64", "Int64", "bool", "boolean")
_MAX_NAME = 100  # characters of a study's, table's or figure's name

# A folder with one of these holds a run that has begun.
_TRACES = (CONFIG_FILE, "hparams.yaml", "checkpoints", "linear_map", "tables")
_RUN_AGAIN = "Run the study again"
_MAX_NAMED_FOLDERS = 5


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
        return self.read()[0]

    def read(self) -> tuple[bytes, int, int]:
        """Return the file's bytes, and its width and height in pixels.

        Raises:
            ReportError: The file is not a PNG, or is cut short.
        """
        png = _read(self.path)
        if png[:8] != b"\x89PNG\r\n\x1a\n" or png[12:16] != b"IHDR" or b"IEND" not in png[-12:]:
            raise ReportError(
                f"{self.path} is no PNG, or was cut short. {_RUN_AGAIN}, or delete the file to "
                "have the page without it."
            )
        width, height = struct.unpack(">II", png[16:24])
        return png, width, height


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
        path = folder / RESULTS_FILE
        if not path.is_file():
            raise ReportError(_why_no_results(folder))
        values = read_json(path, ReportError, f"It was cut short or changed; {_RUN_AGAIN.lower()}.")
        text = ""
        if (folder / CONFIG_FILE).is_file():
            text = _read_text(folder / CONFIG_FILE)
        _check_schema(values, path)
        run = cls(folder, values, _parse_config(text, folder / CONFIG_FILE), text)
        try:
            _ = (run.fingerprint, run.settings, run.versions, run.tables, run.figures)
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            what = f"key {error} is missing" if isinstance(error, KeyError) else str(error)
            raise ReportError(
                f"{path} is not what {run.study} of this version writes: {what}. The file was "
                f"changed: {_RUN_AGAIN.lower()}."
            ) from error
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
        return {str(key): str(value) for key, value in dict(self.values["versions"]).items()}

    @property
    def seeds(self) -> dict[str, Any]:
        """Every seed of the run, by its key."""
        found = dict(_find_seeds(self.config)) or dict(_find_seeds(self.settings))
        return {key.replace(".init_args", ""): value for key, value in found.items()}

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
        """Return the table of this name.

        Raises:
            ReportError: There is no such table; the message names similar ones.
        """
        return find_by_name("table", name, self.tables)

    def figure(self, name: str) -> SavedFigure:
        """Return the figure of this name.

        Raises:
            ReportError: There is no such figure; the message names similar ones.
        """
        return find_by_name("figure", name, self.figures)

    def table_path(self, name: str) -> Path:
        """Return the CSV file of a table."""
        return self.folder / "tables" / f"{name}.csv"


def _file_name(name: Any) -> str:
    if not isinstance(name, str) or len(name) > _MAX_NAME or "/" in name or "\\" in name:
        raise ValueError(f"{str(name)[:_MAX_NAME]!r} is not the name of a table or figure")
    return name


def _format(text: Any) -> str:
    if not isinstance(text, str) or not _FORMAT.fullmatch(text):
        raise ValueError(f"{str(text)[:_MAX_NAME]!r} is not a format of numbers")
    return text


def _read_csv(path: Path, columns: Sequence[Mapping[str, Any]]) -> DataFrame:
    """Return a table with the dtypes that ``results.json`` has for its columns."""
    from pandas import read_csv

    way_out = f"{_RUN_AGAIN}, or delete the file to have the page without it."
    kinds = {str(one["key"]): _dtype(one) for one in columns}
    try:
        with regular_file(path).open(newline="", encoding="utf-8") as file:
            head, *rows = list(csv.reader(file, strict=True)) or [[]]
        if head != list(kinds):
            raise ReportError(
                f"{path} has the columns {', '.join(head)}; {RESULTS_FILE} says "
                f"{', '.join(kinds)}. {way_out}"
            )
        for number, row in enumerate(rows, start=2):
            if len(row) != len(kinds):  # pandas would fill it up
                raise ReportError(
                    f"{path}, line {number} has {len(row)} cells for {len(kinds)} columns. "
                    f"{way_out}"
                )
        return read_csv(path, dtype=kinds, keep_default_na=False, na_values=[""])
    except (UnicodeDecodeError, csv.Error, OSError, ValueError, TypeError) as error:
        raise ReportError(f"{path} cannot be read as a table: {error}. {way_out}") from error


def _dtype(column: Mapping[str, Any]) -> str:
    kind = str(column.get("dtype") or ("float64" if column["format"] else "object"))
    if kind not in _DTYPES:
        raise ValueError(f"{kind[:_MAX_NAME]!r} is not a type of cells")
    # A column without missing values may have got some in a file that was changed by hand.
    return {"int64": "Int64", "bool": "boolean"}.get(kind, kind)


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


def _check_schema(values: Mapping[str, Any], path: Path) -> None:
    study = values.get("study")
    if not isinstance(study, str) or len(study) > _MAX_NAME:
        raise ReportError(
            f"{path} does not name its study (key 'study'): this package did not write it."
        )
    schema = values.get("schema")
    if schema == SCHEMA:
        return
    if isinstance(schema, int) and schema > SCHEMA:
        raise ReportError(
            f"{path} has schema {schema}, and this version reads {SCHEMA}: a newer version of "
            f"{PACKAGE} wrote it. Update {PACKAGE}."
        )
    raise ReportError(
        f"{path} has no schema {SCHEMA}: a version of {PACKAGE} before 0.2 wrote it, with other "
        f"keys. {_RUN_AGAIN} with this version."
    )


def _why_no_results(folder: Path) -> str:
    below = sorted(path.parent for path in folder.glob(f"**/{RESULTS_FILE}"))
    if below:
        some = " ".join(shlex.quote(str(path)) for path in below[:_MAX_NAMED_FOLDERS])
        n_more = len(below) - _MAX_NAMED_FOLDERS
        more = f" and {n_more} more" if n_more > 0 else ""
        return f"{folder} is not the folder of a run, but holds some. Name them: {some}{more}"
    if any((folder / name).exists() for name in _TRACES) or list(folder.glob("events.out.*")):
        config, again = folder / CONFIG_FILE, "Run it again"
        if config.is_file():
            verb = config_verb(_read_text(config))
            again += f" (lincorr {verb} --config {shlex.quote(str(config))})"
        earlier = (
            f" {EARLIER_FILE} is of an earlier run, whose other files were partly replaced."
            if (folder / EARLIER_FILE).is_file()
            else ""
        )
        return (
            f"the run in {folder} did not finish: it has no {RESULTS_FILE}.{earlier} {again}, or "
            "leave it out."
        )
    return f"{folder} is not the folder of a run: it has no {RESULTS_FILE}."


def _read(path: Path) -> bytes:
    try:
        return regular_file(path).read_bytes()
    except OSError as error:
        raise ReportError(f"cannot read {path}: {error.strerror}.") from error


def _read_text(path: Path) -> str:
    try:
        return _read(path).decode("utf-8")
    except UnicodeDecodeError as error:
        raise ReportError(f"{path} cannot be read: {error}. {_RUN_AGAIN}.") from error


def _parse_config(text: str, path: Path) -> dict[str, Any]:
    try:
        found = load_yaml(text) if text else {}
    except (yaml.YAMLError, ValueError) as error:
        raise ReportError(f"{path} cannot be read: {' '.join(str(error).split())}") from error
    if not isinstance(found, dict):
        raise ReportError(f"{path} holds no settings.")
    return found


def _find_seeds(settings: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the settings that are named seed, seeds or seed_everything, if they are integers."""
    if not isinstance(settings, Mapping):
        return
    for name, value in settings.items():
        full = f"{key}.{name}" if key else str(name)
        if not re.fullmatch(r"seed(s|_everything)?", str(name)):
            yield from _find_seeds(value, full)
        elif all(
            isinstance(one, (int, type(None)))
            for one in (value if isinstance(value, list) else [value])
        ):
            yield full, value
