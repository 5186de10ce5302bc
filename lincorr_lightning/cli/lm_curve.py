"""Checkpoints of one training as a curve: how linear a pair is, and how precise W, at each step."""

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from lincorr_lightning.api import correlate
from lincorr_lightning.errors import CheckpointError, ConfigError, one_line
from lincorr_lightning.io import regular_file
from lincorr_lightning.lm import LanguageModel
from lincorr_lightning.results.figures import points_figure
from lincorr_lightning.results.results import Figure, Results
from lincorr_lightning.results.runs_table import flatten
from lincorr_lightning.results.table import Table

_LOW = "excess_over_random_labels.low"
_RIGHT, _NEAREST = "precision.influenced.1", "precision.baselines.causal_inner_product.1"
# Keys of a pair in results.json, with heading, format, and panel and line of the figure.
_NUMBERS = {
    "label_mean": ("r", ".2f", "r", "W"),
    "baselines.random_source_labels.mean": ("r, random words", ".2f", "r", "random words"),
    "excess_over_random_labels.mean": ("r above random words", "+.2f", "", ""),
    _LOW: ("at least, 95 %", "+.2f", "", ""),
    _RIGHT: ("W right first", ".0%", "right first", "W"),
    _NEAREST: ("nearest word right first", ".0%", "right first", "nearest word"),
}


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
    headings = {key: heading for key, (heading, *_) in _NUMBERS.items()}
    formats = {"step": "d"} | {key: form for key, (_, form, *_) in _NUMBERS.items()}
    columns = ["step", *_NUMBERS, "checkpoint"]
    title = f"{pair} by step"
    table = Table.of("comparison", rows, columns, title, "", True, headings, formats)
    points = [
        (row["step"], line, panel, *[row.get(key)] * 3)
        for key, (_, _, panel, line) in _NUMBERS.items()
        for row in rows
        if panel
    ]
    drawn = Table.of("points", points, ("x", "line", "number", "value", "low", "high"), "Points")
    options = {"title": title, "x": "step"}
    figure = Figure("comparison", f"{title}, beside baselines", points_figure, [drawn], options)
    verdict = list(_verdict(table, pair))
    return Results("comparison", tables=[table, drawn], figures=[figure], verdict=verdict)


def _verdict(table: Table, pair: str) -> Iterator[str]:
    """Yield from which step on r is above that of random words, and W above the nearest word."""
    frame = table.frame
    for number, is_above in (
        (f"r of {pair} is above that of random words (95 %)", frame[_LOW] > 0),
        (
            f"W of {pair} is right first more often than the nearest word",
            frame[_RIGHT] > frame[_NEAREST],
        ),
    ):
        steps = frame["step"][is_above[::-1].cummin()]  # up to the last one
        when = "not at the last step, though before" if is_above.any() else "at no step"
        if len(steps):
            when = f"from step {steps.iloc[0]} on"
        yield f"{number}: {when}."


def _load(path: Path, base: str | None, prefix: str) -> LanguageModel:
    """Return the LM `base` with the weights of a Lightning checkpoint."""
    if base is None:
        raise ConfigError(f"{path} holds weights alone. Name its LM, as --lm path/to/base.")
    try:
        state = torch.load(regular_file(path), map_location="cpu", weights_only=True)["state_dict"]
        shapes = {key: tensor.shape for key, tensor in state.items()}
    except Exception as error:  # of pickle and torch, of any kind
        raise CheckpointError(
            f"{path} is not read as a checkpoint of Lightning: {one_line(error)}. Pass one that "
            "torch.load reads with weights_only=True."
        ) from error
    lm = LanguageModel.from_pretrained(base)
    own = {key: tensor.shape for key, tensor in lm.model.state_dict().items()}

    def misfit(prefix: str) -> str:
        """Return the first key below a prefix that is not the LM's, or of another shape."""
        known = ((key, own.get(key[len(prefix) :])) for key in shapes if key.startswith(prefix))
        return next((key for key, shape in known if shape != shapes[key]), "")

    has_any = any(key.startswith(prefix) for key in shapes)
    if wrong := misfit(prefix) if has_any else next(iter(shapes), "of no name"):
        ends = Counter(
            key.removesuffix(name) for key in shapes for name in own if key.endswith(name)
        )
        fits = next((each for each, _ in ends.most_common() if not misfit(each)), None)
        way_out = f"Pass --key_prefix {fits}" if fits is not None else "Name the LM that it is of"
        raise CheckpointError(
            f"{path}: its key {wrong} {[*shapes.get(wrong, ())]} is none of {base}, below the "
            f"prefix {prefix!r}. {way_out}."
        )
    weights = {key[len(prefix) :]: value for key, value in state.items() if key.startswith(prefix)}
    # What a checkpoint leaves out, such as frozen weights, is the LM's own.
    lm.model.load_state_dict(weights, strict=False)
    return lm
