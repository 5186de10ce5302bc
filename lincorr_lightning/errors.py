"""Errors of this package: a class per cause, all below `LincorrError`.

The program `lincorr` shows their messages without a traceback. A message names the file, key,
prompt or label, and the way out.
"""

import math
import operator
from collections.abc import Sequence

_MAX_LENGTH = 400  # characters of an error of another library


class LincorrError(Exception):
    """Base class of all errors that this package raises on purpose."""

    exit_status = 1  #: Exit status of the program; 2 for errors of command line and configs.


class KnowledgeError(LincorrError):
    """A kind of knowledge, a relation or a knowledge file is unknown or not valid."""


class DomainError(LincorrError):
    """A kind of knowledge has no usable labels in a tokenizer."""


class LanguageModelError(LincorrError):
    """A language model cannot be found, read or used as a causal LM."""


class RoundedAdapterError(LanguageModelError):
    """An adapter is lost in the rounding of an LM's half precision."""


class LinearMapError(LincorrError):
    """A saved linear map is damaged, or belongs to other labels or another LM."""


class SubjectsError(LincorrError):
    """Subjects cannot be sampled, split or batched as the settings say."""


class NonFiniteError(LincorrError):
    """The LM's logits are NaN or infinite."""


class ConfigError(LincorrError):
    """Settings contradict each other, or the study cannot run with them."""

    exit_status = 2


class SparseAutoencoderError(LincorrError):
    """A sparse autoencoder cannot be read, or does not fit the LM, hook point or feature."""


class ReportError(LincorrError):
    """Results, a run's folder or a reproduction has not what is to be shown."""


class CheckpointError(LincorrError):
    """A checkpoint of a run cannot be read, or does not fit the study."""


class OutputError(LincorrError):
    """A file or folder cannot be written."""


def require(
    name: str,
    value: float | None,
    *,
    at_least: float | None = None,
    above: float | None = None,
    at_most: float | None = None,
    below: float | None = None,
) -> None:
    """Check that a setting, named as the user writes it, is a finite number within its range.

    Null is refused, too: jsonargparse passes it even for numbers.
    """
    bounds = [
        ("at least", at_least, operator.ge),
        ("above", above, operator.gt),
        ("at most", at_most, operator.le),
        ("below", below, operator.lt),
    ]
    number = math.nan if value is None else value
    given = [(words, bound, holds) for words, bound, holds in bounds if bound is not None]
    if math.isfinite(number) and all(holds(number, bound) for _, bound, holds in given):
        return
    allowed = " and ".join(f"{words} {bound}" for words, bound, _ in given) or "finite"
    raise ConfigError(f"{name} is {'null' if value is None else value}; it must be {allowed}.")


def listed(names: Sequence[str], most: int = 5, separator: str = ", ") -> str:
    """Return the first names for a message, and how many more there are; ``nothing`` for none."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return separator.join(names[:most]) + more or "nothing"


def one_line(error: BaseException) -> str:
    """Return an error of a library in one line, its type first, without a final period."""
    text = " ".join(f"{type(error).__name__}: {error}".split())
    return text[:_MAX_LENGTH].rstrip(".: ")


def require_one_of(name: str, value: str, options: Sequence[str]) -> None:
    """Check that a setting, named as the user writes it, is one of some texts."""
    if value not in options:
        *others, last = options
        raise ConfigError(f"{name} is {value!r}; it must be {', '.join(others)} or {last}.")
