"""Causal tests of the flow: features whose matched predecessors are removed.

A case is a feature at a token: its predecessors are rescaled at that token alone, and of some cases
the LM reads the rest of the text with that (arXiv 2502.03032, figures 6 to 8).
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import product

import torch
from torch import Tensor

from lincorr_lightning.errors import ConfigError, require
from lincorr_lightning.flow.graph import GROUPS, DecoderMatcher, assign_features
from lincorr_lightning.flow.text_statistics import FeatureGroups, TextStatistics
from lincorr_lightning.lm.language_model import LanguageModel
from lincorr_lightning.progress import progress
from lincorr_lightning.results.table import column
from lincorr_lightning.sae import forwards
from lincorr_lightning.sae.forwards import Forward, Intervention, Rows
from lincorr_lightning.sae.hook_points import HookPoint
from lincorr_lightning.sae.hooks import edited
from lincorr_lightning.sae.sparse_autoencoder import SAEs

METHODS = ("top-1", "top-5", "one-to-one")
_TOP = 5

Chosen = Mapping[HookPoint, Tensor]  #: Features chosen in each case, ``(n_cases, k)``; -1 is none.
Cut = tuple[Chosen, float]  #: Features to rescale in each case, and the factor of activations.


@dataclass(frozen=True)
class DeactivationSettings:
    """Settings of the deactivation test."""

    n_cases: int = 2000
    """Number of cases (a feature at a token) in each layer; 0 skips the test."""
    n_losses: int = 200
    """Number of these cases whose text is read to its end, for the change of the LM's loss."""
    strengths: tuple[float, ...] = (0.0, 0.25, 0.5, 0.75)
    """Factors r of the predecessors' activations; 0 removes them, 1 changes nothing."""

    def __post_init__(self) -> None:
        require("model.deactivation.n_cases", self.n_cases, at_least=0)
        require("model.deactivation.n_losses", self.n_losses, at_least=0)
        if not self.strengths or len(set(self.strengths)) < len(self.strengths):
            raise ConfigError(
                f"model.deactivation.strengths is {list(self.strengths)}; it must be at least one "
                "number, each once, such as [0.0, 0.5]."
            )
        require("model.deactivation.strengths", min(self.strengths), at_least=0)


def predecessors_by_method(
    matcher: DecoderMatcher, hook_point: HookPoint
) -> dict[str, dict[HookPoint, Tensor]]:
    """Return the predecessors of every feature by method, ``(n_features, k)``; -1 is none."""
    best = {at: match.indices for at, match in matcher.match(hook_point, k=_TOP).items()}
    targets = matcher.decoder(hook_point)
    return {
        "top-1": {at: indices[:, :1] for at, indices in best.items()},
        "top-5": best,
        "one-to-one": {at: assign_features(targets, matcher.decoder(at)) for at in best},
    }


@dataclass(frozen=True)
class Cases:
    """Features of `hook_point` at tokens at which a matched predecessor of theirs is active.

    Each case has a text, the position of its token, its feature, and the code of the feature's
    group there, all ``(n,)``; `active` says which features of each predecessor's hook point are
    active at the token, ``(n, n_features)`` bool.
    """

    hook_point: HookPoint
    texts: Rows
    positions: Tensor
    features: Tensor
    groups: Tensor
    active: Mapping[HookPoint, Tensor]

    def __len__(self) -> int:
        return len(self.texts)

    def interventions(
        self, saes: SAEs, cut: Cut, which: Sequence[int] | Tensor
    ) -> dict[HookPoint, Intervention]:
        """Return what a cut changes in some of the cases."""
        chosen, r = cut
        return {
            at: forwards.rescale_at(saes[at], self.positions[which], index[which], r)
            for at, index in chosen.items()
        }

    def control(self, chosen: Chosen, generator: torch.Generator) -> dict[HookPoint, Tensor]:
        """Draw as many other features that are active at the same token."""
        drawn = {}
        for hook_point in (at for at in self.active if at in chosen):
            index = chosen[hook_point]
            others = self.active[hook_point].clone()
            is_feature = index >= 0
            n = (others.gather(1, index.clamp(min=0)) & is_feature).sum(1)
            rows, ranks = is_feature.nonzero(as_tuple=True)
            others[rows, index[rows, ranks]] = False
            drawn[hook_point] = draw_active(others, n, generator)
        return drawn


def draw_active(active: Tensor, n: Tensor, generator: torch.Generator) -> Tensor:
    """Draw n active features of each row at random, without replacement; fewer if fewer are active.

    From ``(n_rows, n_features)`` bool, the same on every device, since the generator is on the CPU,
    it draws indices of features, ``(n_rows, max(n))``; -1 for none.
    """
    draws = torch.rand(int(active.sum()), generator=generator, dtype=torch.float64)
    order = torch.full(active.shape, torch.inf, dtype=torch.float64)
    order[active.cpu()] = draws  # one random number per active feature
    lowest, drawn = order.topk(min(int(n.max()), active.shape[1]), largest=False)
    is_drawn = lowest.isfinite() & (torch.arange(drawn.shape[1]) < n.cpu()[:, None])
    return torch.where(is_drawn, drawn, -1).to(active.device)


def _beginnings(texts: Rows, positions: Tensor) -> Rows:
    # The LM is causal, so that the rest of a text has no effect.
    return [text[: end + 1] for text, end in zip(texts, positions.tolist(), strict=True)]


def find_cases(
    statistics: TextStatistics, groups: FeatureGroups, n: int, generator: torch.Generator
) -> Cases:
    """Draw n cases in the texts kept, each as likely as any other; fewer if there are not so many.

    Tokens that the statistics skip do not count.
    """
    lm = statistics.lm
    saes = statistics.matcher.saes
    sources = list(groups.matches)
    hook_points = [groups.hook_point, *sources]
    candidates: list[list[Tensor]] = []

    def find(forward: Forward) -> None:
        counted = forward.counted(statistics.n_skipped)
        text, position = counted.nonzero(as_tuple=True)
        features = {at: saes[at].encode(forward.at[at][counted]) for at in hook_points}
        codes = groups.codes(features)
        token, feature = ((features[groups.hook_point] > 0) & (codes > 0)).nonzero(as_tuple=True)
        texts = torch.tensor(forward.cases, device=text.device)[text[token]]
        columns = (texts, position[token], feature, codes[token, feature])
        candidates.append([column.cpu() for column in columns])

    rows = statistics.kept_rows
    forwards.run_with_hooks(lm, rows, find, hook_points=hook_points, logits=False)
    columns = [torch.cat(parts) for parts in zip(*candidates, strict=True)]
    # In the order of the texts, so that batching does not change which cases are drawn.
    order = torch.argsort(columns[0], stable=True)
    drawn = torch.randperm(len(order), generator=generator)[:n].sort().values
    numbers, positions, features, codes = (column[order[drawn]] for column in columns)
    texts = [rows[number] for number in numbers.tolist()]
    activations = forwards.last_activations(lm, _beginnings(texts, positions), sources)
    active = {at: (saes[at].encode(x) > 0).cpu() for at, x in activations.items()}
    return Cases(groups.hook_point, texts, positions, features, codes, active)


def run_cuts(
    lm: LanguageModel, saes: SAEs, cases: Cases, cuts: Sequence[Cut], n_losses: int
) -> tuple[Tensor, Tensor]:
    """Read the text of every case with features rescaled at its token, once per cut.

    All predecessors lie in the layer of the features or enter it, so that the cuts of a case differ
    in this layer alone; only the losses of `n_losses` cases, evenly spaced, need the whole LM.

    Returns:
        The activations of the cases' features at their tokens, and losses, both ``(n_cuts,
        n_cases)``. A loss is the mean negative log likelihood of the text after the token; NaN if
        the token is the last one, or the text was not read to its end.
    """
    layer = cases.hook_point.layer
    sae = saes[cases.hook_point]
    activations = torch.full((len(cuts), len(cases)), torch.nan, dtype=torch.float64)
    losses = activations.clone()

    def run_cuts_of_layer(which: list[int], run: Callable[[Intervention | None], Tensor]) -> None:
        for i, cut in enumerate(cuts):
            changes = cases.interventions(saes, cut, which)
            before = next((at for at in changes if at.layer < layer), None)
            change = None if before is None else changes.pop(before)
            with edited(lm.model, changes):
                stream = run(change)
            positions = cases.positions[which].to(stream.device)
            features = sae.encode(stream[torch.arange(len(stream)), positions]).cpu()
            activations[i, which] = features.gather(1, cases.features[which, None])[:, 0].double()

    forwards.run_layer(lm, _beginnings(cases.texts, cases.positions), layer, run_cuts_of_layer)
    followed = torch.arange(n_losses) * len(cases) // max(1, n_losses)
    texts = [cases.texts[case] for case in followed.tolist()]
    for i, cut in enumerate(progress(cuts, f"cutting predecessors of layer {layer}", unit="cut")):

        def changed(which: list[int], cut: Cut = cut) -> AbstractContextManager[None]:
            return edited(lm.model, cases.interventions(saes, cut, followed[which]))

        read = forwards.text_losses(lm, texts, changed)
        for case, of_text in zip(followed.tolist(), read, strict=True):
            losses[i, case] = of_text[cases.positions[case] :].mean()
    return activations, losses


@dataclass(frozen=True)
class CutEffect:
    """Effect of rescaling predecessors by r on some cases of a layer: of a `group`, or ``all``.

    The predecessors are chosen by one of `METHODS`; a `cut` is ``matched``, or ``random`` for as
    many other active features of the same hook points.
    `success` is the share of features no longer active, `activation_change` the mean of ``(f_new -
    f_old) / f_old``, `loss_change` that of the mean loss after the token; None if all are last.
    """

    layer: int
    method: str
    cut: str
    r: float
    group: str
    n: int
    success: float = column(format=".1%")
    activation_change: float = column(format=".1%")
    loss_change: float | None = column(format=".1%")


def summarize_outcomes(
    activations: Tensor, losses: Tensor, which: Tensor
) -> tuple[int, float, float, float | None]:
    """Return ``n`` and the effects of `CutEffect`, of some of the cases, ``(n_cases,)`` bool.

    Activations and losses are those without and with a cut, ``(2, n_cases)``.
    """
    old, new = activations[:, which]
    losses = losses[:, which]
    loss, loss_after = losses[:, losses.isfinite().all(0)].sum(1).tolist()
    success = float((new <= 0).double().mean())
    change = float((new / old - 1).mean())
    return int(which.sum()), success, change, (loss_after - loss) / loss if loss > 0 else None


def measure_deactivation(
    statistics: TextStatistics,
    groups: FeatureGroups,
    settings: DeactivationSettings,
    generator: torch.Generator,
) -> list[CutEffect]:
    """Rescale the predecessors of one layer's features by every method, and random controls."""
    matcher = statistics.matcher
    cases = find_cases(statistics, groups, settings.n_cases, generator)
    if not len(cases):
        return []
    cuts: dict[tuple[str, str, float], Cut] = {}  # by method, cut and r
    for method, predecessors in predecessors_by_method(matcher, groups.hook_point).items():
        chosen = {at: index.cpu()[cases.features] for at, index in predecessors.items()}
        variants = (("matched", chosen), ("random", cases.control(chosen, generator)))
        for r, (cut, features) in product(settings.strengths, variants):
            cuts[method, cut, r] = features, r
    n_losses = min(settings.n_losses, len(cases))
    every = [({}, 1.0), *cuts.values()]
    activations, losses = run_cuts(statistics.lm, matcher.saes, cases, every, n_losses)
    masks = {"all": torch.ones(len(cases), dtype=torch.bool)}
    masks |= {GROUPS[code]: cases.groups == code for code in sorted(set(cases.groups.tolist()))}
    return [
        CutEffect(
            groups.hook_point.layer,
            method,
            cut,
            r,
            group,
            *summarize_outcomes(activations[[0, i]], losses[[0, i]], mask),
        )
        for i, (method, cut, r) in enumerate(cuts, 1)
        for group, mask in masks.items()
    ]
