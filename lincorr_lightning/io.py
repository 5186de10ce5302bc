"""Files and folders: written completely or not at all, and read without blocking."""

from __future__ import annotations

import csv
import errno
import json
import math
import os
import platform
import re
import shutil
import stat
import uuid
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
from safetensors import SafetensorError

from lincorr_lightning.errors import LincorrError, OutputError

_WAY_OUT = "Choose another folder, with --trainer.default_root_dir or the path you passed."
_REASONS = {
    errno.ENOSPC: "the disk is full. Free some space, or choose another folder",
    errno.EDQUOT: "your quota on this disk is used up. Free some space, or choose another folder",
    errno.EROFS: "it is on a read-only file system",
    errno.EACCES: "you may not write there",
    errno.EPERM: "you may not write there",
    errno.EISDIR: "a folder of that name is in the way",
}

# -- folders ----------------------------------------------------------------------------------


def new_version(parent: Path) -> Path:
    """Make the next free folder ``version_N``.

    Raises:
        OutputError: The folder cannot be made.
    """
    with as_output_error(parent):
        parent.mkdir(parents=True, exist_ok=True)
        taken = [int(p.name[8:]) for p in parent.glob("version_*") if p.name[8:].isdecimal()]
        version = max(taken, default=-1) + 1
        while True:
            folder = parent / f"version_{version}"
            try:
                folder.mkdir()
            except FileExistsError:  # another run was quicker
                version += 1
            else:
                return folder


def check_writable(folder: str | Path) -> None:
    """Make a folder and write a small file in it, to find out before hours of work are spent.

    Raises:
        OutputError: The folder cannot be made or written; the message says why.
    """
    trial = Path(folder) / f".trial-{uuid.uuid4().hex[:8]}"
    try:
        with as_output_error(Path(folder)):
            trial.parent.mkdir(parents=True, exist_ok=True)
            with trial.open("xb") as file:
                file.write(b"lincorr")
                file.flush()
                os.fsync(file.fileno())
    finally:
        with suppress(OSError):
            trial.unlink()


def remove(path: Path) -> None:
    """Remove a file, if there is one.

    Raises:
        OutputError: The file cannot be removed.
    """
    with as_output_error(path):
        path.unlink(missing_ok=True)


# -- whole files -----------------------------------------------------------------------------

_PART = re.compile(
    r"\.part-(?P<machine>[0-9a-f]{8})-(?P<pid>\d+)-[0-9a-f]{8}(-old-(?P<replaced>.+)|\..*)?"
)


def _new_part(parent: Path, suffix: str = "") -> Path:
    """Return a temporary path in a folder, and remove those that killed processes left there."""
    for part in parent.glob(".part-*"):
        name = _PART.fullmatch(part.name)
        if name is None or _may_be_running(name["machine"], int(name["pid"])):
            continue
        replaced = part.with_name(name["replaced"] or part.name)
        with suppress(OSError):
            if not replaced.exists():  # killed before the new folder took its place
                part.rename(replaced)
            elif part.is_dir():
                shutil.rmtree(part)
            else:
                part.unlink()
    return parent / f".part-{_machine()}-{os.getpid()}-{uuid.uuid4().hex[:8]}{suffix}"


@cache
def _machine() -> str:
    """Return a hash of the host name and the PID namespace, which containers have of their own."""
    try:
        namespace = Path("/proc/self/ns/pid").stat().st_ino
    except OSError:
        namespace = 0
    return f"{zlib.crc32(f'{platform.node()} {namespace}'.encode()):08x}"


def _may_be_running(machine: str, pid: int) -> bool:
    # On Windows, signal 0 would end the process.
    if machine != _machine() or os.name != "posix":
        return True
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except OSError:  # a process of another user
        pass
    return True


@contextmanager
def atomic_write(path: str | Path) -> Iterator[Path]:
    """Write a file completely or not at all.

    Missing folders are made. The file at `path` stays until the new one is complete on the disk.
    Temporary files that killed processes left in the folder are removed.

    Yields:
        A file in the same folder, with the same suffix, to write to in the ``with`` block.

    Raises:
        OutputError: The file cannot be written; the message says why, and nothing is left behind.
    """
    path = Path(path)
    part: Path | None = None
    try:
        with as_output_error(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            part = _new_part(path.parent, path.suffix)
            part.touch(exist_ok=False)
            mode = part.stat().st_mode
            yield part
            part.chmod(mode)  # safetensors would keep its files from everybody else
            with part.open("rb+") as file:
                os.fsync(file.fileno())
            part.replace(path)
    finally:
        if part is not None:
            with suppress(OSError):
                part.unlink(missing_ok=True)


@contextmanager
def atomic_folder(folder: str | Path, names: Collection[str]) -> Iterator[Path]:
    """Write a folder completely or not at all.

    Args:
        folder: The folder to write. An existing one is replaced once the new one is complete.
        names: Files that an existing folder may hold. With any other file it is not replaced.

    Yields:
        A folder beside it to write to in the ``with`` block.

    Raises:
        OutputError: The folder cannot be written, or holds other files; the old one, if any, is
            still there.
    """
    folder = Path(folder)
    new = _new_part(folder.parent)
    old = folder.with_name(f"{new.name}-old-{folder.name}")
    try:
        with as_output_error(folder):
            others = (
                sorted({p.name for p in folder.iterdir()} - set(names)) if folder.exists() else []
            )
            if others:
                raise OutputError(
                    f"cannot replace {folder}: it holds {others[0]}, which would be lost. "
                    "Choose another folder."
                )
            new.mkdir(parents=True)
            mode = _mode_of_new_files(new)
            yield new
            for file in new.rglob("*"):
                if file.is_file():
                    file.chmod(mode)  # safetensors would keep its files from everybody else
            if folder.exists():
                folder.rename(old)
            new.rename(folder)
    except OutputError as error:  # it names a file in the temporary folder
        raise OutputError(str(error).replace(str(new), str(folder))) from error.__cause__
    finally:
        if old.exists() and not folder.exists():
            old.rename(folder)
        shutil.rmtree(new, ignore_errors=True)
        if folder.exists():
            shutil.rmtree(old, ignore_errors=True)


def _mode_of_new_files(folder: Path) -> int:
    """Return the permissions that files written to a folder get."""
    trial = folder / "trial"
    trial.touch()
    mode = trial.stat().st_mode
    trial.unlink()
    return mode


@contextmanager
def as_output_error(path: Path) -> Iterator[None]:
    """Turn an error of the operating system into an `OutputError` that says what to do.

    Raises:
        OutputError: Writing failed in the ``with`` block; the message names `path`.
    """
    try:
        yield
    except OSError as error:
        raise OutputError(f"cannot write {path}: {_reason(path, error)}") from error
    except Exception as error:
        # Safetensors and tokenizers hide the operating system's error in their own.
        code = re.search(r"\(os error (\d+)\)", str(error))
        if code is None and not isinstance(error, SafetensorError):
            raise
        cause = OSError(int(code[1]), os.strerror(int(code[1]))) if code else OSError(str(error))
        raise OutputError(f"cannot write {path}: {_reason(path, cause)}") from error


def _reason(path: Path, error: OSError) -> str:
    if error.errno in (errno.ENOTDIR, errno.EEXIST):
        for part in (path, *path.parents):
            if part.exists() and not part.is_dir():
                return f"{part} is a file where a folder is needed. {_WAY_OUT}"
    reason = _REASONS.get(error.errno or 0, error.strerror or str(error))
    return f"{reason}." if "another folder" in reason else f"{reason}. {_WAY_OUT}"


# -- reading ---------------------------------------------------------------------------------


def regular_file(path: str | Path) -> Path:
    """Return the path of a file, unless reading it could block or never end.

    Every file that a user names, or that a folder of theirs holds, is checked here before it is
    opened.

    Raises:
        OSError: There is no such file, or it is a FIFO, a device or a socket.
    """
    path = Path(path)
    mode = path.stat().st_mode
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):  # opening a folder fails on its own
        raise OSError(errno.EINVAL, "it is a FIFO, a device or a socket, not a file", str(path))
    return path


def parse_json(text: str, *, finite: bool = False, allow_surrogates: bool = True) -> Any:
    r"""Parse JSON; refuse a key that is given twice, whose first value would be lost.

    Args:
        text: The JSON.
        finite: Whether NaN, Infinity and numbers beyond the range of a float are refused.
        allow_surrogates: Whether strings may have unpaired surrogates such as ``\ud83d``, which are
            not characters and have no tokens.

    Raises:
        ValueError: The text is not JSON, is nested too deeply, or has a value that is refused.
    """

    def refuse(literal: str) -> NoReturn:
        raise ValueError(f"{literal} is not JSON")

    def within_range(kind: type) -> Callable[[str], float]:
        def parse(literal: str) -> float:
            if math.isinf(float(literal)):
                raise ValueError(f"{literal[:20]} is beyond the range of numbers")
            return kind(literal)

        return parse

    def unique(items: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(items)
        if len(found) < len(items):
            keys = [key for key, _ in items]
            twice = next(key for key in keys if keys.count(key) > 1)
            raise ValueError(f"the key {twice!r} is given twice")
        return found

    try:
        strict: dict[str, Any] = {
            "parse_constant": refuse,
            "parse_int": within_range(int),
            "parse_float": within_range(float),
        }
        content = json.loads(text, object_pairs_hook=unique, **(strict if finite else {}))
        if not allow_surrogates and "\\u" in text:
            json.dumps(content, ensure_ascii=False).encode("utf-8")
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    except UnicodeEncodeError as error:
        half = error.object[error.start]
        raise ValueError(f"{half!r} is an unpaired surrogate, not a character") from error
    return content


def read_json(path: str | Path, error: type[LincorrError], way_out: str) -> dict[str, Any]:
    """Read a file that holds a JSON object, without NaN and Infinity.

    Args:
        path: The file.
        error: Class of the error.
        way_out: What the user can do about it: the last sentence of the message.

    Raises:
        LincorrError: The file is missing, damaged or not a JSON object; the message says which.
    """
    try:
        content = parse_json(regular_file(path).read_text(encoding="utf-8"), finite=True)
    except OSError as cause:
        reason = cause.strerror or str(cause)
        reason = reason[:1].lower() + reason[1:]
        raise error(f"cannot read {path}: {reason}. {way_out}") from cause
    except ValueError as cause:
        raise error(f"cannot read {path}: it is not valid JSON ({cause}). {way_out}") from cause
    if not isinstance(content, dict):
        raise error(f"cannot read {path}: it is not a JSON object. {way_out}")
    return content


def write_json(path: str | Path, obj: Any) -> None:
    """Write data as standard JSON, without NaN and Infinity.

    Args:
        path: The file to write.
        obj: Mappings, sequences, strings, numbers, booleans, None, numpy's numbers and arrays, and
            paths.

    Raises:
        ValueError: A number is NaN or infinite; the message names its key. Pass None for it.
        TypeError: JSON has no form for a value; the message names its key.
        OutputError: The file cannot be written.
    """
    text = json.dumps(_plain(obj, ""), indent=2, ensure_ascii=False, allow_nan=False) + "\n"
    with atomic_write(path) as part:
        # A path that is not UTF-8 holds surrogates, which JSON escapes in the same way.
        part.write_bytes(text.encode("utf-8", "backslashreplace"))


def _plain(value: Any, key: str) -> Any:
    """Return the data in Python's own types."""
    if isinstance(value, (np.generic, np.ndarray)):
        value = value.tolist()
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        if not math.isfinite(value):
            raise ValueError(f"{key or 'the value'} is {value}, which JSON does not have: use None")
        return value
    if isinstance(value, Mapping):
        return {str(k): _plain(v, f"{key}.{k}" if key else str(k)) for k, v in value.items()}
    if isinstance(value, Sequence):
        return [_plain(member, f"{key}[{i}]") for i, member in enumerate(value)]
    if isinstance(value, Path):
        return str(value)
    raise TypeError(f"{key or 'the value'} is a {type(value).__name__}, which JSON has no form for")


def write_csv(path: str | Path, columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    """Write a table; None is an empty cell.

    Raises:
        ValueError: A row has more or fewer cells than there are columns, or a number that is NaN
            or infinite; the message names it.
        OutputError: The file cannot be written.
    """
    with (
        atomic_write(path) as part,
        part.open("w", newline="", encoding="utf-8", errors="backslashreplace") as file,
    ):
        writer = csv.writer(file)
        writer.writerow(columns)
        for i, row in enumerate(rows):
            if len(row) != len(columns):
                raise ValueError(
                    f"{path}: row {i} has {len(row)} cells for {len(columns)} columns: {row}"
                )
            for column, cell in zip(columns, row, strict=True):
                if isinstance(cell, (float, np.floating)) and not math.isfinite(cell):
                    raise ValueError(f"{path}: {column} of row {i} is {cell}: use None")
            writer.writerow(row)


# -- names -----------------------------------------------------------------------------------

_SPELLED = {"->": "-", "+": "plus", "*": "times", "/": "over"}


def safe_names(names: Iterable[str]) -> dict[str, str]:
    """Return names that file systems and TensorBoard accept, each different from the others.

    Example:
        >>> safe_names(["city->country", "X+2->X/2", "a b", "a_b"])
        {'city->country': 'city-country', 'X+2->X/2': 'Xplus2-Xover2', 'a b': 'a_b', 'a_b': 'a_b_2'}
    """
    found: dict[str, str] = {}
    taken: set[str] = set()
    for name in dict.fromkeys(names):
        safe = name
        for sign, word in _SPELLED.items():
            safe = safe.replace(sign, word)
        safe = stem = re.sub(r"[^\w.-]", "_", safe) or "_"
        count = 1
        while safe.lower() in taken:  # some file systems ignore case
            count += 1
            safe = f"{stem}_{count}"
        taken.add(safe.lower())
        found[name] = safe
    return found
