"""The weights of an answer in W, and the command ``lincorr weights``; torch is not imported."""

import argparse
import csv
import difflib
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError, safe_open

from lincorr_lightning.errors import ConfigError, LinearMapError
from lincorr_lightning.io import atomic_write, read_json, regular_file
from lincorr_lightning.terminal import write_out
from lincorr_lightning.version import __version__

FORMAT_VERSION = 1
CONFIG_FILE, TENSORS_FILE = "config.json", "linear_map.safetensors"
WAY_OUT = "Pass the linear_map/ folder of a probe's run, or fit the map again with `lincorr fit`."
_N_SHOWN = 10  # rows on the screen
_HELP = """Show the highest weights of an answer in W of a probe's run, and the rank of another one,
beside those of the nearest word: are Rome and Italy paired, and is it more than the vocabulary?
Without an answer, show those that W alone gets right. Quote the pair, in which the shell would see
a redirection.

  lincorr weights runs/linear_probe/version_0 "city->country" Rome Italy
  lincorr weights runs/linear_probe/version_0 "city->country" --csv answers.csv
"""


@dataclass(frozen=True)
class LabelSet:
    """The labels of a kind of knowledge, in the order of the rows and columns of W.

    Attributes:
        name: Name of the kind of knowledge.
        template: Its prompt, with ``{}`` for the subject, after its lead-in.
        texts: Texts of the labels.
        token_ids: Their tokens.
        answers: Answers that each label stands for, where known.
    """

    name: str
    template: str
    texts: Sequence[str]
    token_ids: Sequence[int]
    answers: Sequence[Sequence[str]] = ()

    @classmethod
    def from_json(cls, name: str, entry: Mapping[str, Any]) -> Self:
        """Read what `to_json` returns; raise LookupError or TypeError if it is not so."""
        template, texts = entry["template"], entry["labels"]
        "".join([*texts, template])  # a TypeError if one is no text
        answers = [list(members) for members in entry.get("answers", ())]
        return cls(name, template, texts, entry["token_ids"], answers)

    def to_json(self) -> dict[str, Any]:
        """Return the entry of the kind of knowledge in ``config.json``."""
        return {
            "template": self.template,
            "labels": self.texts,
            "token_ids": self.token_ids,
            "answers": self.answers,
        }

    @property
    def names(self) -> list[str]:
        """The labels as `shown_labels`."""
        return shown_labels(self.texts, self.answers)

    def place(self, text: str) -> int:
        """Return the place of a label, named as it is or by an answer; or raise LinearMapError."""
        places = {answer: i for i, answers in enumerate(self.answers) for answer in answers}
        places |= {name: i for texts in (self.names, self.texts) for i, name in enumerate(texts)}
        if (place := places.get(text)) is None:
            similar = difflib.get_close_matches(text, places, 3) or list(places)[:3]
            raise LinearMapError(
                f"{text!r} is no label of {self.name}; labels are such as {', '.join(similar)}. "
                "`lincorr audit` shows all labels of an LM."
            )
        return place


def shown_labels(texts: Sequence[str], answers: Sequence[Sequence[str]]) -> list[str]:
    """Return label texts; one that only begins its answers says which.

    Example:
        >>> shown_labels(["Rome", " South"], [["Rome"], ["South Korea", "South Africa"]])
        ['Rome', 'South (South Korea, South Africa)']
    """
    known = answers or [[text] for text in texts]
    return [
        text if text in members else f"{text.strip()} ({', '.join(members)})"
        for text, members in zip(texts, known, strict=True)
    ]


class LabelWeight(NamedTuple):
    """A target label's weight in the column of a source label."""

    label: str
    weight: float
    rank: int  #: 1 for the highest weight; equal weights share a rank.
    reference: bool | None  #: Whether that pairs the two; None if the source label has none.
    rank_nearest: int | None = None  #: The rank by the nearest word.
    rank_constant: int | None = None
    """The rank by how many source labels the target is right for, a constant answer."""


class AnswerRank(NamedTuple):
    """The rank of the best right target label of a source label."""

    answer: str
    reference: str  #: Right target labels, joined by ``|``.
    rank: int
    rank_nearest: int | None  #: The rank by the nearest word.
    rank_constant: int

    @property
    def only_w(self) -> bool:
        """Whether W is right, and the nearest word is not."""
        return self.rank_nearest is not None and self.rank == 1 < self.rank_nearest


@dataclass(frozen=True)
class PairWeights:
    """W of a pair and what stands beside it: matrices are ``(n_target, n_source)``.

    The reference has the places of the right target labels of each source label; `nearest` are the
    weights of the nearest word, where known.
    """

    source: LabelSet
    target: LabelSet
    weight: npt.NDArray[Any]
    nearest: npt.NDArray[Any] | None = None
    reference: Sequence[Collection[int]] = ()

    def of(self, label: str) -> list[LabelWeight]:
        """Return the weights of a source label, a row for each target label."""
        place = self.source.place(label)
        right = self.reference[place] if self.reference else ()
        ranks: list[Sequence[Any]] = []
        for matrix in (self.weight, self.nearest, self._constant()):
            if matrix is None:
                ranks.append([None] * len(self.target.texts))
            else:
                column = -matrix[:, place]
                ranks.append((1 + np.searchsorted(np.sort(column), column)).tolist())
        is_right = [i in right if right else None for i in range(len(self.target.texts))]
        weights = self.weight[:, place].tolist()
        rows = zip(self.target.names, weights, ranks[0], is_right, *ranks[1:], strict=True)
        return [LabelWeight(*row) for row in rows]

    def answers(self) -> list[AnswerRank]:
        """Return the rank of the best right target of each source label that has one."""
        sources, targets = self.source.names, self.target.names
        matrices = self.weight, self.nearest, self._constant()
        rows = []
        for i, right in enumerate(self.reference):
            if right:
                ranks: list[Any] = [m if m is None else _rank(m[:, i], right) for m in matrices]
                rows.append(AnswerRank(sources[i], "|".join(targets[j] for j in right), *ranks))
        return rows

    def _constant(self) -> npt.NDArray[Any] | None:
        if not self.reference:
            return None
        counts = Counter(label for labels in self.reference for label in labels)
        order = sorted(range(len(self.target.texts)), key=lambda i: -counts[i])  # as a baseline's
        column = -np.argsort(order)
        return np.repeat(column[:, None], len(self.source.texts), 1)


def _rank(column: npt.NDArray[Any], right: Collection[int]) -> int:
    places = list(right)
    # A wrong label equal to the best right one counts as ahead.
    return 1 + int((np.delete(column, places) >= column[places].max()).sum())


def read_config(folder: Path) -> dict[str, Any]:
    """Return the config of a linear map; raise LinearMapError for one of another format."""
    config = read_json(folder / CONFIG_FILE, LinearMapError, WAY_OUT)
    if config.get("format_version") != FORMAT_VERSION:
        raise LinearMapError(
            f"cannot read {folder / CONFIG_FILE}: it is not the config of a linear map in format "
            f"version {FORMAT_VERSION}, which lincorr-lightning {__version__} reads. {WAY_OUT}"
        )
    return config


@contextmanager
def reading(folder: Path) -> Iterator[None]:
    """Turn what reading files raises that are not as `LinearMap.save` wrote them into one error."""
    try:
        yield
    except (
        *(LinearMapError, SafetensorError, OSError, LookupError),
        *(TypeError, ValueError, AttributeError),
    ) as error:
        reason = f"there is no {error}" if isinstance(error, KeyError) else str(error)
        raise LinearMapError(
            f"cannot read {folder}: {TENSORS_FILE} or {CONFIG_FILE} is damaged or missing "
            f"({reason}). {WAY_OUT}"
        ) from error


def check_pair(
    pair: str,
    source: LabelSet,
    target: LabelSet,
    weight: Any,
    nearest: Any = None,
    bias: Any = None,
) -> None:
    """Refuse tensors or arrays of other shapes than the labels need, or with NaN."""
    n = len(target.texts)
    shapes = {"weight": (n, len(source.texts)), "nearest": (n, len(source.texts)), "bias": (n,)}
    for (name, shape), part in zip(shapes.items(), (weight, nearest, bias), strict=True):
        if part is not None and tuple(part.shape) != shape:
            reason = f"has the shape {tuple(part.shape)}; the labels need {shape}"
            raise LinearMapError(f"{pair}/{name} {reason}.")
        if part is not None and not np.isfinite(np.asarray(part)).all():
            raise LinearMapError(f"{pair}/{name} holds NaN or infinite numbers.")


def weights(args: Sequence[str]) -> Sequence[LabelWeight | AnswerRank]:
    """Print the weights of an answer, as the command line behind ``lincorr weights`` says."""
    parser = argparse.ArgumentParser(prog="lincorr weights", description=_HELP)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("run", metavar="RUN", help="folder of a probe's run, or its linear_map/")
    parser.add_argument("pair", metavar="PAIR", help='a pair in quotes, such as "city->country"')
    answer = "an answer of the source, such as Rome"
    parser.add_argument("label", metavar="ANSWER", nargs="?", help=answer)
    parser.add_argument("other", metavar="TARGET", nargs="?", help="an answer of the target")
    parser.add_argument("--csv", metavar="FILE", help="file to write all rows to")
    options = parser.parse_args(args)
    if "->" not in options.pair:
        raise ConfigError(
            f'{options.pair!r} is no pair. Put it in quotes, as in "city->country": without them '
            "the shell takes > for the name of a file."
        )
    run = Path(options.run)
    folder = run if (run / CONFIG_FILE).is_file() else run / "linear_map"
    if not folder.is_dir() and (maps := sorted(run.glob("*/linear_map"))):
        names = ", ".join(str(path.parent) for path in maps)
        raise LinearMapError(f"{run} is the folder of several runs. Name one of them: {names}.")
    title, read = _read(folder, options.pair)
    rows, lines = _of_answer(read, options) if options.label else _of_pair(read)
    lines += _precision(folder.parent, options.pair)
    write_out("\n".join([title, *lines]) + "\n")
    if options.csv:
        with atomic_write(Path(options.csv)) as part, part.open("w", newline="") as file:
            table = csv.writer(file)
            table.writerow(rows[0]._fields if rows else AnswerRank._fields)
            table.writerows(rows)
        write_out(f"Rows: {options.csv}\n")
    return rows


def _read(folder: Path, pair: str) -> tuple[str, PairWeights]:
    """Return a title and what stands in the files of a pair."""
    config = read_config(folder)
    pairs = config.get("pairs")
    if isinstance(pairs, dict) and pair not in pairs:
        known = ", ".join(list(pairs)[:8])
        raise LinearMapError(f"{folder} has no pair {pair!r}, but {known}. Name one of these.")
    with reading(folder), safe_open(regular_file(folder / TENSORS_FILE), "numpy") as tensors:
        entry = config["pairs"][pair]
        source, target = (LabelSet.from_json(n, config["knowledge"][n]) for n in pair.split("->"))
        parts = {"weight": tensors.get_tensor(f"{pair}/weight")}
        if f"{pair}/nearest" in tensors.keys():  # noqa: SIM118
            parts["nearest"] = tensors.get_tensor(f"{pair}/nearest")
        check_pair(pair, source, target, **parts)
        title = f"W of {pair} in {config['lm']['name_or_path']}, ridge {entry['ridge']:g}"
        reference = [list(right) for right in entry.get("reference", ())]
        return title, PairWeights(source, target, **parts, reference=reference)


def _of_answer(
    read: PairWeights, options: argparse.Namespace
) -> tuple[list[LabelWeight], list[str]]:
    rows = read.of(options.label)
    ordered = sorted(rows, key=lambda row: row.rank)
    lines = [f"Highest weights of {options.label}:", "rank  weight  " + read.target.name]
    for row in ordered[:_N_SHOWN]:
        mark = "  (right)" if row.reference else ""
        lines.append(f"{row.rank:4}  {row.weight:6.2f}  {row.label}{mark}")
    if options.other is not None:
        row = rows[read.target.place(options.other)]
        known = {True: ", right", False: ", not right", None: ""}[row.reference]
        others = {"the nearest word": row.rank_nearest, "a constant answer": row.rank_constant}
        ranks = [f"rank {row.rank} of {len(rows)} by W"]
        ranks += [f"{rank} by {name}" for name, rank in others.items() if rank is not None]
        lines.append(f"{row.label}{known}: {', '.join(ranks)}.")
        if row.reference and row.rank_nearest is not None:
            lines.append(_beyond(row.rank, row.rank_nearest))
    return ordered, lines


def _beyond(rank: int, nearest: int) -> str:
    if rank == nearest == 1:
        return "W is right, and so is the nearest word: no more than the vocabulary."
    if rank == 1:
        return "W is right, and the nearest word is not; tables/answers.csv has other baselines."
    return f"W is wrong{', and the nearest word is right' if nearest == 1 else ''}."


def _of_pair(read: PairWeights) -> tuple[list[AnswerRank], list[str]]:
    rows = read.answers()
    alone = [row for row in rows if row.only_w]
    right = sum(row.rank == 1 for row in rows)
    near = sum(row.rank_nearest == 1 for row in rows)
    lines = [
        f"W is right first for {right} of {len(rows)} answers, the nearest word for {near}.",
        f"W alone is right for {len(alone)}{':' if alone else '.'}",
        *(f"  {row.answer}: {row.reference}" for row in alone[:_N_SHOWN]),
    ]
    if len(alone) > _N_SHOWN:
        lines.append(f"  and {len(alone) - _N_SHOWN} more; all, and all ranks: --csv FILE")
    return rows, lines


def _precision(run: Path, pair: str) -> list[str]:
    """Return what the run's verdict says of the pair, if there is one."""
    path = run / "results.json"
    values = read_json(path, LinearMapError, WAY_OUT) if path.is_file() else {}
    start = f"{pair.replace('->', '→')}: W gives"
    return [text for text in values.get("verdict", ()) if text.startswith(start)]
