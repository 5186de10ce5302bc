"""Checkpoints of one training as runs that differ by their step: the probe of a pair in each."""

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from lincorr_lightning.api import correlate
from lincorr_lightning.errors import CheckpointError, ConfigError, one_line
from lincorr_lightning.io import regular_file
from lincorr_lightning.lm import LanguageModel
from lincorr_lightning.results.compare import runs_table
from lincorr_lightning.results.results import Results
from lincorr_lightning.results.saved_run import SavedRun


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
    runs = []
    for step, path in sorted(steps.items()):
        lm = str(path) if path.is_dir() else _load(path, base, prefix)
        probe = correlate(lm, pair, n_subjects=n_subjects)
        run = SavedRun(probe.study, probe.to_json(), tables=probe.tables, folder=path)
        runs.append(replace(run, settings={"step": step}))
    return runs_table(runs, f"{pair} by step")


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
