"""Files and folders: written completely or not at all, and read without blocking.

All that writes raises `OutputError`, which names the path, the cause and a way out.
"""

import csv
import errno
import json
import math
import os
import re
import shutil
import stat
import uuid
from collections import Counter, UserDict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any, NoReturn

import numpy as np
import yaml
from safetensors import SafetensorError

from lincorr_lightning.errors import LincorrError, OutputError

_YAML_LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # in C where there is libyaml
_MAX_YAML_DEPTH = 64  # C code that builds deeper values overflows its stack


def output_error(path: str | Path, reason: object) -> OutputError:
    """Return the error of a file or folder that cannot be written."""
    return OutputError(
        f"cannot write {path}: {reason}. Make room, or name another folder: "
        "--trainer.default_root_dir, or the option or path that named this one."
    )


@contextmanager
def as_output_error(path: Path) -> Iterator[None]:
    """Turn an error of the system, in whose errors libraries may hide it, into an `OutputError`."""
    if re.match(r"[A-Za-z][\w+.:-]+:/", str(path)):  # `Path` shortens a URL to ``s3:/bucket``
        raise OutputError(
            f"the path {path} is a URL, to which nothing is written. Name a local folder, and copy "
            "it there after the run."
        )
    try:
        yield
    except LincorrError:
        raise
    except Exception as error:
        cause: BaseException | None = error
        while cause is not None and not isinstance(cause, OSError):
            cause = cause.__cause__ or cause.__context__
        if cause is not None:
            raise output_error(path, cause.strerror or cause) from error
        if not isinstance(error, SafetensorError) and "(os error " not in str(error):  # of Rust
            raise
        raise output_error(path, error) from error


def new_version(parent: Path) -> Path:
    """Make the next free folder ``version_N``."""
    with as_output_error(parent):
        parent.mkdir(parents=True, exist_ok=True)
        taken = [int(p.name[8:]) for p in parent.glob("version_*") if p.name[8:].isdecimal()]
        version = max(taken, default=-1) + 1
        while True:
            folder = parent / f"version_{version}"
            with suppress(FileExistsError):  # another run was quicker
                folder.mkdir()
                return folder
            version += 1


def check_writable(folder: str | Path) -> None:
    """Make a folder and write a small file in it, to find out before hours of work are spent."""
    with as_output_error(Path(folder)):
        Path(folder).mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=folder) as file:
            file.write(b"lincorr")
            file.flush()
            os.fsync(file.fileno())


@contextmanager
def atomic_write(path: str | Path) -> Iterator[Path]:
    """Write a file completely or not at all: yields one of the same folder and suffix to write to.

    Missing folders are made. The file at `path` stays until the new one is complete on the disk.
    """
    path = Path(path)
    part = path.with_name(f".part-{uuid.uuid4().hex[:8]}{path.suffix}")
    try:
        with as_output_error(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            part.touch(exist_ok=False)
            mode = part.stat().st_mode
            yield part
            part.chmod(mode)  # safetensors would keep its files from everybody else
            with part.open("rb+") as file:
                os.fsync(file.fileno())
            part.replace(path)
    finally:
        with suppress(OSError):
            part.unlink(missing_ok=True)


@contextmanager
def atomic_folder(folder: str | Path, names: Collection[str]) -> Iterator[Path]:
    """Write a folder completely or not at all: yields one beside it to write to.

    An existing folder is replaced by the complete one, unless it holds other files than `names`.
    """
    folder = Path(folder)
    new = folder.with_name(f".part-{uuid.uuid4().hex[:8]}")
    old = new.with_suffix(".old")
    try:
        with as_output_error(folder):
            others = {p.name for p in folder.iterdir()} - set(names) if folder.exists() else ()
            if others:
                raise OutputError(
                    f"cannot replace {folder}: it holds {min(others)}, which would be lost. "
                    "Choose another folder."
                )
            new.mkdir(parents=True)
            mode = new.stat().st_mode & 0o666
            yield new
            for file in filter(Path.is_file, new.rglob("*")):
                file.chmod(mode)  # safetensors would keep its files from everybody else
            if folder.exists():
                folder.rename(old)
            new.rename(folder)
    finally:
        if old.exists() and not folder.exists():
            old.rename(folder)
        for rest in (new, old):
            shutil.rmtree(rest, ignore_errors=True)


def regular_file(path: str | Path) -> Path:
    """Return the path of a file; raise OSError if reading it could block or never end.

    Every file that a user names, or in a folder of theirs, is checked here before it is opened.
    """
    path = Path(path)
    mode = path.stat().st_mode
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):  # opening a folder fails on its own
        raise OSError(errno.EINVAL, "it is a FIFO, a device or a socket, not a file", str(path))
    return path


_PACKED = {b"\x1f\x8b": "gzip", b"PK\x03\x04": "zip", b"BZh": "bzip2", b"\xfd7zXZ": "xz"}


def packed_by(start: bytes) -> str | None:
    """Return what a file is packed by, from its first bytes."""
    return next((name for magic, name in _PACKED.items() if start.startswith(magic)), None)


def text_file(path: str | Path) -> Path:
    """Return the path of a `regular_file`; raise OSError if it is packed, by its first bytes."""
    path = regular_file(path)
    with path.open("rb") as file:
        name = packed_by(file.read(6))
    if name is not None:
        raise OSError(errno.EINVAL, f"it is packed by {name}; unpack it", str(path))
    return path


def read_json(path: str | Path, error: type[LincorrError], way_out: str) -> dict[str, Any]:
    """Read a file that holds a JSON object, without NaN and Infinity."""

    def refuse(literal: str) -> NoReturn:
        raise ValueError(f"{literal} is not JSON")

    try:
        text = regular_file(path).read_text(encoding="utf-8")
        # Infinite as a float, as which it may be shown.
        parse_int = lambda n: refuse(n[:9]) if math.isinf(float(n)) else int(n)  # noqa: E731
        content = parse_json(text, parse_constant=refuse, parse_int=parse_int)
    except OSError as cause:
        raise error(f"cannot read {path}: {cause.strerror or cause}. {way_out}") from cause
    except (ValueError, RecursionError) as cause:
        raise error(f"cannot read {path}: it is not valid JSON ({cause}). {way_out}") from cause
    if not isinstance(content, dict):
        raise error(f"cannot read {path}: it is not a JSON object. {way_out}")
    return content


class ReadKeys(UserDict[str, Any]):
    """A dict that knows which of its keys were read, also in the dicts inside."""

    def __init__(self, content: Mapping[str, Any]) -> None:
        self._read: set[str] = set()
        super().__init__({k: ReadKeys(v) if isinstance(v, dict) else v for k, v in content.items()})

    def __getitem__(self, key: str) -> Any:
        self._read.add(key)
        return super().__getitem__(key)

    def unread(self, before: str = "") -> Iterator[tuple[str, Any]]:
        """Yield the values that were not read, by their path, as ``trainer.norm_factor``."""
        for key, value in self.data.items():
            if isinstance(value, ReadKeys):
                yield from value.unread(f"{before}{key}.")
            elif key not in self._read:
                yield before + key, value


def parse_json(text: str, **options: Any) -> Any:
    """Parse JSON; a key twice in an object, of which json keeps the last, is a ValueError."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        content = dict(pairs)
        if len(content) < len(pairs):
            key, _ = Counter(key for key, _ in pairs).most_common(1)[0]
            raise ValueError(f"the key {key!r} is given twice in one object")
        return content

    return json.loads(text, object_pairs_hook=unique, **options)


def compose_yaml(text: str) -> Any:
    """Return the root node of YAML or JSON, with line numbers; None if there is no value.

    Repeated keys, of which PyYAML silently keeps the last, deep nesting, which crashes the process,
    and aliases inside of what has an anchor, which multiply, are YAMLErrors, too.
    """
    anchors: list[str | None] = []  # of the collections around an event
    for event in yaml.parse(text, Loader=_YAML_LOADER):
        if isinstance(event, yaml.CollectionStartEvent):
            anchors.append(event.anchor)
        elif isinstance(event, yaml.CollectionEndEvent):
            anchors.pop()
        elif isinstance(event, yaml.AliasEvent) and any(anchors):
            _refuse_yaml("an alias stands in a value that has an anchor", event)
        if len(anchors) > _MAX_YAML_DEPTH:
            _refuse_yaml(f"values are nested more than {_MAX_YAML_DEPTH} deep", event)
    root = yaml.compose(text, Loader=_YAML_LOADER)
    nodes = [root]
    while nodes:
        node = nodes.pop()
        if isinstance(node, yaml.SequenceNode):
            nodes += node.value
        elif isinstance(node, yaml.MappingNode):
            keys: set[str] = set()
            for key, value in node.value:
                if str(key.value) in keys:
                    _refuse_yaml(f"the key {key.value!r} is given twice", key)
                keys.add(str(key.value))
                nodes.append(value)
    return root


def load_yaml(text: str) -> Any:
    """Load YAML or JSON that `compose_yaml` does not refuse."""
    root = compose_yaml(text)
    loader = _YAML_LOADER("")
    try:
        return None if root is None else loader.construct_document(root)
    finally:
        loader.dispose()


def _refuse_yaml(problem: str, where: Any) -> NoReturn:
    raise yaml.MarkedYAMLError(problem=problem, problem_mark=where.start_mark)


def number(value: float | None) -> float | None:
    """Return a finite number as it is, and None, as JSON needs it, for any other."""
    return float(value) if value is not None and math.isfinite(value) else None


def write_json(path: str | Path, obj: Any) -> None:
    """Write data, also numpy's, as standard JSON, without NaN and infinity: pass None for them."""
    with (
        atomic_write(path) as part,
        # A path that is not UTF-8 holds surrogates, which JSON escapes in the same way.
        part.open("w", encoding="utf-8", errors="backslashreplace", newline="\n") as file,
    ):
        json.dump(obj, file, indent=2, ensure_ascii=False, allow_nan=False, default=_plain)
        file.write("\n")


def _plain(value: Any) -> Any:
    if isinstance(value, (np.generic, np.ndarray)):
        return value.tolist()
    if isinstance(value, Mapping):
        return {str(key): member for key, member in value.items()}
    if isinstance(value, Path):
        return str(value)
    raise TypeError(f"JSON has no form for a {type(value).__name__}")


def write_csv(path: str | Path, columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    """Write a table; None is an empty cell."""
    with (
        atomic_write(path) as part,
        part.open("w", newline="", encoding="utf-8", errors="backslashreplace") as file,
    ):
        csv.writer(file).writerows([columns, *rows])


_SPELLED = {"->": "-", "+": "plus", "*": "times", "/": "over"}


def safe_names(names: Iterable[str]) -> dict[str, str]:
    """Return names that file systems and TensorBoard accept, each different from the others."""
    safe_of: dict[str, str] = {}
    taken: set[str] = set()
    for name in dict.fromkeys(names):
        stem = name
        for sign, word in _SPELLED.items():
            stem = stem.replace(sign, word)
        stem = re.sub(r"[^\w.-]", "_", stem) or "_"
        numbered = (stem if n == 1 else f"{stem}_{n}" for n in count(1))
        # Some file systems ignore case.
        safe_of[name] = next(safe for safe in numbered if safe.lower() not in taken)
        taken.add(safe_of[name].lower())
    return safe_of
