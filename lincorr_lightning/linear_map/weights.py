"""The weights of a label in W, and the command ``lincorr weights``; torch is not imported."""

import argparse
import difflib
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np
import numpy.typing as npt

from lincorr_lightning.errors import ConfigError, LinearMapError
from lincorr_lightning.io import read_json, regular_file
from lincorr_lightning.terminal import write_out
from lincorr_lightning.version import __version__

FORMAT_VERSION = 1
CONFIG_FILE, TENSORS_FILE = "config.json", "linear_map.safetensors"
WAY_OUT = "Pass the linear_map/ folder of a probe's run, or fit the map again with `lincorr fit`."
_HELP = """Show the highest weights of a label in W of a probe's run, and the rank of another one:
are Rome and Italy paired? Quote the pair, in which the shell would see a redirection.

  lincorr weights runs/linear_probe/version_0 "city->country" Rome Italy
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
        return cls(name, template, texts, entry["token_ids"], entry.get("answers", ()))

    def to_json(self) -> dict[str, Any]:
        """Return the entry of the kind of knowledge in ``config.json``."""
        return {
            "template": self.template,
            "labels": self.texts,
            "token_ids": self.token_ids,
            "answers": self.answers,
        }

    def place(self, text: str) -> int:
        """Return the place of a label, named as it is or by an answer; or raise LinearMapError."""
        places = {answer: i for i, answers in enumerate(self.answers) for answer in answers}
        places |= {label: i for i, label in enumerate(self.texts)}
        if (place := places.get(text.removesuffix("…"))) is None:
            similar = difflib.get_close_matches(text, places, 3) or list(places)[:3]
            raise LinearMapError(
                f"{text!r} is no label of {self.name}; labels are such as {', '.join(similar)}. "
                "`lincorr audit` shows all labels of an LM."
            )
        return place


def shown_labels(texts: Sequence[str], answers: Sequence[Sequence[str]]) -> list[str]:
    """Return label texts; one that only begins its answers ends in an ellipsis, as ``South…``."""
    known = answers or [[text] for text in texts]
    return [t if t in members else f"{t}…" for t, members in zip(texts, known, strict=True)]


class LabelWeight(NamedTuple):
    """A target label's weight in the column of a source label."""

    label: str
    weight: float
    rank: int  #: 1 for the highest weight; equal weights share a rank.
    reference: bool | None  #: Whether that pairs the two; None if the source label has none.


def weights_of(
    weight: npt.NDArray[Any],
    source: LabelSet,
    target: LabelSet,
    label: str,
    reference: Sequence[Collection[int]] = (),
) -> list[LabelWeight]:
    """Return the weights of a source label in W, ``(n_target_labels, n_source_labels)``, in rows.

    The reference has the places of the right target labels for each source label.
    """
    column = weight[:, source.place(label)]
    ranks = 1 + np.searchsorted(np.sort(-column), -column)
    right = reference[source.place(label)] if reference else ()
    return [
        LabelWeight(text, float(column[i]), int(ranks[i]), i in right if right else None)
        for i, text in enumerate(shown_labels(target.texts, target.answers))
    ]


def read_config(folder: Path) -> dict[str, Any]:
    """Return the config of a linear map; raise LinearMapError for one of another format."""
    config = read_json(folder / CONFIG_FILE, LinearMapError, WAY_OUT)
    if config.get("format_version") != FORMAT_VERSION:
        raise LinearMapError(
            f"cannot read {folder / CONFIG_FILE}: it is not the config of a linear map in format "
            f"version {FORMAT_VERSION}, which lincorr-lightning {__version__} reads. {WAY_OUT}"
        )
    return config


def weights(args: Sequence[str]) -> list[LabelWeight]:
    """Print the weights of a label, as the command line behind ``lincorr weights`` says."""
    parser = argparse.ArgumentParser(prog="lincorr weights", description=_HELP)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("run", metavar="RUN", help="folder of a probe's run, or its linear_map/")
    parser.add_argument("pair", metavar="PAIR", help='a pair in quotes, such as "city->country"')
    parser.add_argument("label", metavar="LABEL", help="a label of the source, such as Rome")
    parser.add_argument("other", metavar="TARGET", nargs="?", help="a label of the target")
    parser.add_argument("-n", type=int, default=10, help="number of labels to show (default: 10)")
    options = parser.parse_args(args)
    if "->" not in options.pair:
        raise ConfigError(
            f'{options.pair!r} is no pair. Put it in quotes, as in "city->country": without them '
            "the shell takes > for the name of a file."
        )
    run = Path(options.run)
    folder = run if (run / CONFIG_FILE).is_file() else run / "linear_map"
    try:
        return _show(folder, options)
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise LinearMapError(f"{folder}: it was changed ({error}). {WAY_OUT}") from error


def _show(folder: Path, options: argparse.Namespace) -> list[LabelWeight]:
    config = read_config(folder)
    source, target = _label_sets(folder, config, options.pair)
    reference = config["pairs"][options.pair].get("reference", ())
    weight, nearest = _read_weights(folder, options.pair)
    for matrix in (weight, weight if nearest is None else nearest):
        if matrix.shape != (len(target.texts), len(source.texts)) or not np.isfinite(matrix).all():
            raise ValueError("its numbers of labels and weights differ, or a weight is NaN")
    rows = weights_of(weight, source, target, options.label, reference)
    ridge, lm = config["pairs"][options.pair]["ridge"], config["lm"]["name_or_path"]
    lines = [f"W of {options.pair} in {lm}, ridge {ridge:g}: highest weights of {options.label}"]
    lines.append("rank  weight  " + target.name)
    ordered = sorted(rows, key=lambda row: row.rank)
    for row in ordered[: max(options.n, 1)]:
        mark = "  (reference)" if row.reference else ""
        lines.append(f"{row.rank:4}  {row.weight:6.2f}  {row.label}{mark}")
    if options.other is not None:
        place = target.place(options.other)
        row = rows[place]
        known = {True: ", the reference", False: ", not the reference", None: ""}[row.reference]
        lines.append(f"{row.label}{known}: rank {row.rank} of {len(rows)}, weight {row.weight:.2f}")
        if nearest is not None:
            by_word = weights_of(nearest, source, target, options.label)[place]
            lines.append(f"By the nearest word: rank {by_word.rank}")
        if reference:
            n_right = Counter(label for labels in reference for label in labels)
            n_before = sum(n > n_right[place] for n in n_right.values())
            lines[-1] += f"; as a constant answer: rank {1 + n_before}"
    lines += _precision(folder.parent, options.pair)
    write_out("\n".join(lines) + "\n")
    return ordered


def _label_sets(folder: Path, config: dict[str, Any], pair: str) -> tuple[LabelSet, LabelSet]:
    if pair not in config["pairs"]:
        known = ", ".join(list(config["pairs"])[:8])
        raise LinearMapError(f"{folder} has no pair {pair!r}, but {known}. Name one of these.")
    source, target = (LabelSet.from_json(n, config["knowledge"][n]) for n in pair.split("->"))
    return source, target


def _read_weights(folder: Path, pair: str) -> tuple[npt.NDArray[Any], npt.NDArray[Any] | None]:
    """Return W and the weights of the nearest word, where known."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(regular_file(folder / TENSORS_FILE), "numpy") as tensors:
            key = f"{pair}/nearest"
            nearest = tensors.get_tensor(key) if key in tensors.keys() else None  # noqa: SIM118
            return tensors.get_tensor(f"{pair}/weight"), nearest
    except (SafetensorError, OSError) as error:
        raise LinearMapError(f"cannot read {folder}: {error}. {WAY_OUT}") from error


def _precision(run: Path, pair: str) -> list[str]:
    """Return how often W leads from a label to its reference, if the run says so."""
    path = run / "results.json"
    values = read_json(path, LinearMapError, WAY_OUT) if path.is_file() else {}
    for one in values.get("pairs", ()):
        if f"{one['source']}->{one['target']}" == pair and one.get("precision"):
            hit, best = one["precision"]["influenced"]["1"], one.get("best_baseline_1")
            beside = "" if best is None else f"; the strongest baseline does for {best:.0%}"
            return [f"W leads from {hit:.0%} of {one['source']} labels to their reference{beside}."]
    return []
