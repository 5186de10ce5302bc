"""Token geometry over prompts, shuffling levels and layers, as data frames."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lincorr_lightning.geometry.token_clouds import CloudSettings, PromptGeometry

if TYPE_CHECKING:
    from pandas import DataFrame

_PAPER_K = 2  # size of the neighborhood in the paper's figures
_MIN_CORPORA = 4  # for a correlation over them


ObservedPrompt = tuple[int, int, str, str, PromptGeometry]
"""A prompt's number, shuffling level, name, corpus and geometry."""


@dataclass(frozen=True)
class TokenProfiles:
    """Observables of all prompts at all shuffling levels.

    Columns of a range scaling or of a size of neighborhoods are named as ``dimension n2=2`` and
    ``overlap k=10``; what is not finite is NaN.
    """

    n_tokens: int
    n_skipped: int
    """Number of texts that were too short."""
    settings: CloudSettings
    prompts: DataFrame
    """A row per prompt and level: ``prompt``, ``corpus``, ``shuffle``, mean ``loss`` and
    ``entropy`` in nats, and ``logits_dimension`` at each scaling."""
    layers: DataFrame
    """A row per prompt, level and layer: ``prompt``, ``shuffle``, ``layer``, and the
    `token_observables`."""
    corpora: DataFrame
    """A row per corpus and layer: ``corpus``, ``layer``, mean ``loss`` of its unshuffled prompts,
    and ``dimension`` of the cloud of their last tokens; empty if there are too few corpora."""

    @property
    def n_prompts(self) -> int:
        """Number of prompts."""
        return len(self.prompts) // self.prompts["shuffle"].nunique()

    @property
    def paper_k(self) -> int:
        """The paper's k, or the first one."""
        return _PAPER_K if _PAPER_K in self.settings.ks else self.settings.ks[0]

    @property
    def shown(self) -> list[str]:
        """The observables of the paper's figure."""
        n2 = self.settings.range_scalings[0]
        return [f"dimension n2={n2}", f"overlap k={self.paper_k}", "cosine_mean", "angle_mean"]


def tabulate_prompts(
    observed: Sequence[ObservedPrompt],
    settings: CloudSettings,
    n_tokens: int,
    n_skipped: int,
    device: torch.device,
) -> TokenProfiles:
    """Make tables of the observed prompts at each level, in the prompts' order."""
    from pandas import DataFrame

    observed = sorted(observed, key=lambda prompt: prompt[:2])
    prompts, layers = [], []
    for _, level, name, corpus, (columns, numbers, _) in observed:
        prompts.append({"prompt": name, "corpus": corpus, "shuffle": level, **numbers})
        values = {key: by_layer.tolist() for key, by_layer in columns.items()}
        for i, layer in enumerate(settings.layers(len(columns["cosine_mean"]))):
            # The last layer has no next one to overlap with.
            cells = {key: row[i] if i < len(row) else math.nan for key, row in values.items()}
            layers.append({"prompt": name, "shuffle": level, "layer": layer, **cells})
    tables = (prompts, layers, _corpora(observed, settings, device))
    frames = (DataFrame(rows).replace([math.inf, -math.inf], math.nan) for rows in tables)
    return TokenProfiles(n_tokens, n_skipped, settings, *frames)


def _corpora(
    observed: Sequence[ObservedPrompt], settings: CloudSettings, device: torch.device
) -> list[dict[str, object]]:
    """Return the rows of `TokenProfiles.corpora`."""
    members: dict[str, list[PromptGeometry]] = {}
    for _, level, _, corpus, geometry in observed:
        if level == 0:
            members.setdefault(corpus, []).append(geometry)
    rows: list[dict[str, object]] = []
    for corpus, prompts in sorted(members.items()) if len(members) >= _MIN_CORPORA else ():
        last: list[Tensor] = [prompt.last for prompt in prompts if prompt.last is not None]
        dimension = settings.dimension(torch.stack(last, 1).to(device))
        loss = sum(prompt.numbers["loss"] for prompt in prompts) / len(prompts)
        for layer, values in zip(settings.layers(len(dimension)), dimension.tolist(), strict=True):
            named = zip(settings.range_scalings, values, strict=True)
            cells = {f"dimension n2={n2}": value for n2, value in named}
            rows.append({"corpus": corpus, "layer": layer, "loss": loss, **cells})
    return rows
