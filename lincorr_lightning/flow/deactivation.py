"""Does a feature die with its matched predecessors? Causal tests of the flow.

"Analyze Feature Flow to Enhance Interpretation and Steering in Language Models" (Laptev et al.,
2025, arXiv 2502.03032), figures 6 to 8. One test is of one feature at one token: its predecessors
are rescaled at that token alone, and the rest of the text is read with that.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from lincorr_lightning.flow.groups import FeatureGroups
from lincorr_lightning.flow.matcher import DecoderMatcher
from lincorr_lightning.flow.matching import assign_features
from lincorr_lightning.flow.suffix_rerun import rerun_suffixes
from lincorr_lightning.lm.language_model import LanguageModel
from lincorr_lightning.sae.forwards import Forward, run_with_hooks
from lincorr_lightning.sae.hook_points import HookPoint
from lincorr_lightning.sae.interventions import Intervention, draw_active, rescale_at
from lincorr_lightning.sae.sparse_autoencoder import SparseAutoencoder

METHODS = ("top-1", "top-5", "one-to-one")
_TOP = 5

Chosen = Mapping[HookPoint, Tensor]
"""Features of some places, ``(n, k)`` each; -1 is none."""


def predecessors_by_method(
    flow: DecoderMatcher, hook_point: HookPoint
) -> dict[str, dict[HookPoint, Tensor]]:
    """Predecessors of every feature of a place, by how they are chosen.

    Args:
        flow: The decoders.
        hook_point: Of the features.

    Returns:
        Of each of `METHODS` and each predecessor's place, ``(n_features, k)``; -1 is none.
    """
    matches = flow.match(hook_point, k=_TOP)
    return {
        "top-1": {source: found.indices[:, :1] for source, found in matches.items()},
        "top-5": {source: found.indices for source, found in matches.items()},
        "one-to-one": {
            source: assign_features(flow.decoder(hook_point), flow.decoder(source)).indices[:, None]
            for source in matches
        },
    }


@dataclass(frozen=True)
class Cases:
    """Features that are active at a token, with predecessors to be cut.

    Attributes:
        hook_point: HookPoint of the features.
        texts: Which text each case is in, ``(n,)``.
        positions: At which token, ``(n,)``.
        features: Which feature, ``(n,)``.
        groups: Code of its group there, ``(n,)``.
        active: Features of each predecessor's place that are active there, ``(n, n_features)``
            bool.
    """

    hook_point: HookPoint
    texts: Tensor
    positions: Tensor
    features: Tensor
    groups: Tensor
    active: Mapping[HookPoint, Tensor]

    def __len__(self) -> int:
        return len(self.texts)

    def control(self, chosen: Chosen, generator: torch.Generator) -> dict[HookPoint, Tensor]:
        """As many other features that are active at the same token, drawn at random.

        Args:
            chosen: What is cut in each case.
            generator: On the CPU.
        """
        drawn = {}
        for hook_point, active in self.active.items():
            index = chosen.get(hook_point)
            if index is None:
                continue
            known = index >= 0
            n = (active.gather(1, index.clamp(min=0)) & known).sum(1)
            others = active.clone()
            rows, ranks = known.nonzero(as_tuple=True)
            others[rows, index[rows, ranks]] = False
            drawn[hook_point] = draw_active(others, n, generator)
        return drawn


class Outcomes(NamedTuple):
    """What became of the features and of the text.

    Attributes:
        activation: Of each case's feature at its token, ``(n,)``, float64.
        loss: Mean negative log likelihood of the text after the token, ``(n,)``, float64; NaN at
            a text's last token.
    """

    activation: Tensor
    loss: Tensor


@torch.no_grad()
def find_cases(
    lm: LanguageModel,
    saes: Mapping[HookPoint, SparseAutoencoder],
    rows: Sequence[Sequence[int]],
    groups: FeatureGroups,
    n: int,
    generator: torch.Generator,
    n_skipped: int = 0,
) -> Cases:
    """Draw features at tokens, at least one of whose matched predecessors is active there.

    Args:
        lm: The LM, loaded.
        saes: At its places.
        rows: Token ids of the texts.
        groups: Of the place, with its best matches.
        n: How many; fewer if there are fewer.
        generator: On the CPU.
        n_skipped: Tokens at the beginning of each text that do not count.

    Returns:
        Each case as likely as any other.
    """
    sources = list(groups.sources.values())
    hook_points = [groups.hook_point, *sources]
    found: list[list[Tensor]] = []

    def look(forward: Forward) -> None:
        counted = forward.counted(n_skipped)
        text, position = counted.nonzero(as_tuple=True)
        features = {
            hook_point: saes[hook_point].encode(forward.at[hook_point][counted])
            for hook_point in hook_points
        }
        codes = groups.codes(features)
        token, feature = ((features[groups.hook_point] > 0) & (codes > 0)).nonzero(as_tuple=True)
        texts = torch.tensor(forward.cases, device=text.device)[text[token]]
        columns = (texts, position[token], feature, codes[token, feature])
        found.append([column.cpu() for column in columns])

    run_with_hooks(lm, rows, look, hook_points=hook_points, logits=False)
    columns = [torch.cat(parts) for parts in zip(*found, strict=True)]
    # In the order of the texts, in whatever forwards they were read.
    order = torch.argsort(columns[0], stable=True)
    drawn = torch.randperm(len(order), generator=generator)[:n].sort().values
    texts, positions, features, codes = (column[order[drawn]] for column in columns)

    active = {
        hook_point: torch.zeros(len(texts), saes[hook_point].n_features, dtype=torch.bool)
        for hook_point in sources
    }

    def mark(forward: Forward) -> None:
        for hook_point in sources:
            x = forward.at_positions(hook_point, positions[forward.cases])
            active[hook_point][forward.cases] = (saes[hook_point].encode(x) > 0).cpu()

    # Nothing after the position changes what is there.
    ends = zip(texts.tolist(), positions.tolist(), strict=True)
    upto = [rows[text][: position + 1] for text, position in ends]
    run_with_hooks(lm, upto, mark, hook_points=sources, logits=False)
    return Cases(groups.hook_point, texts, positions, features, codes, active)


Cut = tuple[Chosen, float]
"""What is rescaled in each case, and what is left of it: 0 removes, 1 changes nothing."""


@torch.no_grad()
def run_cuts(
    lm: LanguageModel,
    saes: Mapping[HookPoint, SparseAutoencoder],
    rows: Sequence[Sequence[int]],
    cases: Cases,
    cuts: Sequence[Cut],
    done: Callable[[int], object] | None = None,
) -> list[Outcomes]:
    """Read every case's text with some features rescaled at its token, in each of several ways.

    All cuts of a case are read together, and its text only from the token on and from the first
    changed layer on, where the LM can be entered there (`rerun_suffixes`).

    Args:
        lm: The LM, loaded.
        saes: At its places.
        rows: Token ids of the texts.
        cases: From `find_cases`.
        cuts: Each of all cases; one that chooses nothing leaves the LM as it is.
        done: Told how many cuts of cases have been read, after each forward.

    Returns:
        Of each cut.
    """
    n = len(cuts)
    activation = torch.full((len(cases), n), torch.nan, dtype=torch.float64)
    loss = activation.clone()
    left = torch.tensor([r for _, r in cuts])
    chosen = _side_by_side(cases, [features for features, _ in cuts])

    def edits(numbers: list[int], begin: int) -> dict[HookPoint, Intervention]:
        case, cut = torch.tensor(numbers) // n, torch.tensor(numbers) % n
        return {
            hook_point: rescale_at(
                saes[hook_point], cases.positions[case] - begin, index[cut, case], left[cut]
            )
            for hook_point, index in chosen.items()
        }

    def look(forward: Forward, begin: int) -> None:
        case, cut = torch.tensor(forward.cases) // n, torch.tensor(forward.cases) % n
        positions = cases.positions[case] - begin
        features = (
            saes[cases.hook_point].encode(forward.at_positions(cases.hook_point, positions)).cpu()
        )
        activation[case, cut] = features.gather(1, cases.features[case][:, None])[:, 0].double()
        losses, there = (part.cpu() for part in forward.losses())
        after = there & (torch.arange(there.shape[1]) >= positions[:, None])
        loss[case, cut] = (losses * after).sum(1) / after.sum(1)  # 0 / 0 at the last token

    rerun_suffixes(
        lm, [rows[text] for text in cases.texts.tolist()], cases.positions.tolist(), n,
        min(hook_point.layer + (hook_point.kind == "residual") for hook_point in (cases.hook_point, *chosen)), look,
        hook_points=[cases.hook_point], edits=edits, done=done,
    )  # fmt: skip
    return [Outcomes(activation[:, cut], loss[:, cut]) for cut in range(n)]


def _side_by_side(cases: Cases, cuts: Sequence[Chosen]) -> dict[HookPoint, Tensor]:
    """Features of each cut and case at each place, ``(n_cuts, n_cases, k)``; -1 is none."""
    found: dict[HookPoint, Tensor] = {}
    for hook_point in sorted({hook_point for cut in cuts for hook_point in cut}):
        most = max(cut[hook_point].shape[1] for cut in cuts if hook_point in cut)
        index = torch.full((len(cuts), len(cases), most), -1)
        for i, cut in enumerate(cuts):
            if hook_point in cut:
                index[i, :, : cut[hook_point].shape[1]] = cut[hook_point]
        if most:
            found[hook_point] = index
    return found


def run_cases(
    lm: LanguageModel,
    saes: Mapping[HookPoint, SparseAutoencoder],
    rows: Sequence[Sequence[int]],
    cases: Cases,
    chosen: Chosen | None = None,
    r: float = 0.0,
) -> Outcomes:
    """Do what `run_cuts` does, of one cut.

    Args:
        lm: The LM, loaded.
        saes: At its places.
        rows: Token ids of the texts.
        cases: From `find_cases`.
        chosen: What is rescaled in each case; None leaves the LM as it is.
        r: What is left of it: 0 removes, 1 changes nothing.
    """
    return run_cuts(lm, saes, rows, cases, [(chosen or {}, r)])[0]


class Effect(NamedTuple):
    """What rescaling does to some cases.

    Attributes:
        n: How many.
        success: Share of them whose feature is no longer active.
        activation_change: Mean of ``(f_new - f_old) / f_old``.
        loss_change: ``(L_new - L_old) / L_old`` of the mean losses after the token; None where
            every token is its text's last.
    """

    n: int
    success: float
    activation_change: float
    loss_change: float | None


def summarize_outcomes(
    before: Outcomes, after: Outcomes, which: Tensor | None = None
) -> Effect | None:
    """Compare what some cases became with what they were.

    Args:
        before: As the LM is.
        after: With features rescaled.
        which: Of which cases, ``(n,)`` bool; None takes all.

    Returns:
        None if there are none.
    """
    which = torch.ones(len(before.loss), dtype=torch.bool) if which is None else which
    n = int(which.sum())
    if not n:
        return None
    old, new = before.activation[which], after.activation[which]
    followed = which & before.loss.isfinite() & after.loss.isfinite()
    loss = float(before.loss[followed].sum())
    change = float(after.loss[followed].sum()) - loss
    return Effect(
        n,
        float((new <= 0).double().mean()),
        float((new / old - 1).mean()),
        change / loss if loss > 0 else None,
    )
