"""Checkpoints of one training as a curve: how linear a pair is, and how precise W, at each step."""

import re
from collections.abc import Sequence
from pathlib import Path

import torch
from pandas import Series

from lincorr_lightning.api import correlate
from lincorr_lightning.errors import CheckpointError, ConfigError, one_line
from lincorr_lightning.io import regular_file
from lincorr_lightning.lm import LanguageModel
from lincorr_lightning.results.compare import flatten
from lincorr_lightning.results.figures import points_figure
from lincorr_lightning.results.results import Figure, Results
from lincorr_lightning.results.table import Table

_LOW = "excess_over_random_labels.low"
_RIGHT, _NEAREST = "precision.influenced.1", "precision.baselines.causal_inner_product.1"
# Keys of a pair in results.json, with heading and format.
_NUMBERS = {
    "label_mean": ("r", ".2f"),
    "baselines.random_source_labels.mean": ("r, random words", ".2f"),
    "excess_over_random_labels.mean": ("r above random words", "+.2f"),
    _LOW: ("at least, 95 %", "+.2f"),
    _RIGHT: ("W right first", ".0%"),
    _NEAREST: ("nearest word right first", ".0%"),
}
# Those of the figure, with panel and line.
_DRAWN = (
    ("label_mean", "r", "W"),
    ("baselines.random_source_labels.mean", "r", "random words"),
    (_RIGHT, "right first", "W"),
    (_NEAREST, "right first", "nearest word"),
)


def curve(
    paths: Sequence[Path], pair: str, n_subjects: int, base: str | None, prefix: str
) -> Results:
    """Probe a pair in each LM, a folder or a Lightning checkpoint of the LM `base`.

    The step is the number in a path's name. Raises ConfigError where there is none, or twice the
    same, and CheckpointError if a checkpoint does not fit the LM.
    """
    steps: dict[int, Path] = {}
    for path in paths:
        found = re.search(r"step\D?(\d+)", path.name) or re.search(r"(\d+)\D*$", path.name)
        if found is None:
            raise ConfigError(f"{path} has no step in its name. Rename it as in checkpoint-500.")
        if other := steps.get(int(found[1])):
            raise ConfigError(f"{path} and {other} are of the same step. Leave out one of them.")
        steps[int(found[1])] = path
    rows = []
    for step, path in sorted(steps.items()):
        lm = str(path) if path.is_dir() else _load(path, base, prefix)
        (scores,) = correlate(lm, pair, n_subjects=n_subjects).values["pairs"]
        rows.append({"step": step, **flatten(scores), "checkpoint": path.name})
    headings = {key: heading for key, (heading, _) in _NUMBERS.items()}
    formats = {"step": "d"} | {key: form for key, (_, form) in _NUMBERS.items()}
    columns = ["step", *_NUMBERS, "checkpoint"]
    title = f"{pair} by step"
    table = Table.of("comparison", rows, columns, title, "", True, headings, formats)
    options = {"title": title, "x": "step", "label": "step", "lines": {}, "numbers": _DRAWN}
    figure = Figure("comparison", f"{title}, beside baselines", points_figure, [table], options)
    frame = table.frame
    verdict = [
        _since(frame[_LOW] > 0, frame["step"], f"r of {pair} is above that of random words (95 %)"),
        _since(
            frame[_RIGHT] > frame[_NEAREST],
            frame["step"],
            f"W of {pair} is right first more often than the nearest word",
        ),
    ]
    return Results("comparison", tables=[table], figures=[figure], verdict=verdict)


def _since(is_true: "Series[bool]", steps: "Series[int]", sentence: str) -> str:
    """Return from which step on something is true up to the last one."""
    since = steps[is_true[::-1].cummin()]
    if len(since):
        return f"{sentence}: from step {since.iloc[0]} on."
    return (
        f"{sentence}: {'not at the last step, though before' if is_true.any() else 'at no step'}."
    )


def _load(path: Path, base: str | None, prefix: str) -> LanguageModel:
    """Return the LM `base` with the weights of a Lightning checkpoint."""
    if base is None:
        raise ConfigError(f"{path} holds weights alone. Name its LM, as --lm path/to/base.")
    try:
        state = torch.load(regular_file(path), map_location="cpu", weights_only=True)["state_dict"]
    except Exception as error:  # of pickle and torch, of any kind
        raise CheckpointError(
            f"{path} is not read as a checkpoint of Lightning: {one_line(error)}. Pass one that "
            "torch.load reads with weights_only=True."
        ) from error
    lm = LanguageModel.from_pretrained(base)
    weights = {key[len(prefix) :]: value for key, value in state.items() if key.startswith(prefix)}
    try:
        # What a checkpoint leaves out, such as frozen weights, is the LM's own.
        wrong = lm.model.load_state_dict(weights, strict=False).unexpected_keys
    except RuntimeError as error:
        raise CheckpointError(
            f"{path} is none of {base}: {one_line(error)}. Name its LM."
        ) from error
    if wrong or not weights:
        key = prefix + wrong[0] if wrong else next(iter(state), "of no name")
        raise CheckpointError(
            f"{path}: its key {key} is none of {base}, below the prefix {prefix!r}. Pass what its "
            "keys have before the LM's own names as --key_prefix, or name the LM that it is of."
        )
    return lm
