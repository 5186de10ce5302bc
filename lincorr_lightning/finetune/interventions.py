"""Moves of the states that edits lead to: what an edit's target answer goes through.

Beyond the paper, whose correlations do not say what causes an edit's target answer.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import normalize

from lincorr_lightning.finetune.verdict import interventions_verdict
from lincorr_lightning.functional.significance import named_interval
from lincorr_lightning.results.results import Figure, Results
from lincorr_lightning.results.table import Table, column

STRENGTHS = (0.0, 0.25, 0.5, 0.75, 1.0, 1.5, 2.0)
N_DRAWS = 8  # of what is random
PARTS = ("own", "change", "state", "only")  #: What is moved, see `EditStates.moved`.
W = "W"


@dataclass(frozen=True)
class ArmRow:
    """What it costs to take a direction out, a row of the table ``intervention``."""

    arm: str = column("direction")
    mean: float = column("generalized", ".0%")
    effect: float = column("change", "+.0%")
    effect_low: float | None = column("low", "+.0%")
    effect_high: float | None = column("high", "+.0%")
    share: float = column("share", ".0%")


class TargetSpace:
    """The part of hidden states that the target labels' rows of the LM's head read.

    Up to their mean over labels, target logits are U h, where h is the state after the last norm
    and U has the labels' rows minus their mean. Coordinates are in an orthonormal basis of the row
    space of U: lengths and angles are those of states, known from logits.

    With matrices ``(n_target, rank)``, states are ``logits @ to_states``, and their logits, minus
    the mean, ``states @ to_logits.T``. `head_rows` of the labels are ``(n_target, hidden_size)``.
    """

    def __init__(self, head_rows: Tensor) -> None:
        rows = head_rows.double()
        left, sizes, _ = torch.linalg.svd(rows - rows.mean(0), full_matrices=False)
        kept = sizes > 1e-9 * sizes[0]  # less is rounding
        self.to_logits = left[:, kept] * sizes[kept]
        self.to_states = left[:, kept] / sizes[kept]

    def directions(self, weights: Tensor) -> Tensor:
        """Return unit vectors along ``Uᵀ w`` for weights w of the labels, ``(..., n_target)``.

        To take a state's component along ``Uᵀ w`` out is the smallest change after which its target
        logits have no component along w. (Along ``U⁺ w`` logits would move by w itself, but
        directions in which the rows hardly differ would count most.) One-hot weights give a row.
        """
        return normalize(weights.double() @ self.to_logits, dim=-1)


def weights_of_arms(
    space: TargetSpace, reference_mask: Tensor, seed: int, *, w: Tensor, plain: Tensor, w0: Tensor
) -> dict[str, Tensor]:
    """Return the weights of each arm, see `EditStates`.

    The labels of each edit's reference, bool, and the columns of its answer in W, in W with ridge 0
    and in W₀ are ``(n, n_target)``; `seed` is that of the arms with several draws.
    """
    generator = torch.Generator().manual_seed(seed)
    rank = space.to_states.shape[1]
    # Answers of the run's other edits, as frequent as in W's own arm.
    others = ((reference_mask.double() @ reference_mask.double().T) == 0).double()
    others[others.sum(1) == 0] = 1.0
    chosen = others.multinomial(N_DRAWS, replacement=True, generator=generator).T
    drawn = torch.randn(N_DRAWS, len(w), rank, generator=generator).double()
    centred = w - w.mean(1, keepdim=True)
    # Positions of the other labels, in order and at random; those of the reference come last.
    positions = reference_mask.byte().argsort(dim=-1, stable=True).expand(N_DRAWS, *w.shape)
    keys = torch.rand(positions.shape, generator=generator).masked_fill(reference_mask, 2.0)
    shuffled = w.expand(positions.shape).gather(-1, keys.argsort(dim=-1, stable=True))
    return {
        W: w[None],
        "W, plain": plain[None],
        "W0": w0[None],
        "W - W0": (w - w0)[None],
        "W, other labels": centred.masked_fill(reference_mask, 0.0)[None],
        "W, shuffled": torch.empty_like(shuffled).scatter(-1, positions, shuffled),
        "reference's row": reference_mask.double()[None],
        "other answer": w[chosen],
        "random": drawn @ space.to_states.T,  # uniform in direction
    }


@dataclass(frozen=True)
class EditStates:
    """Edits whose source was learned, and the states at their target prompts.

    Target logits before and after the edits, and the right labels (bool), are ``(n, n_target)``;
    `weights`, ``(n_draws, n, n_target)`` by arm, give what states move along, ``W`` among them.
    `references` are what edits are grouped by.
    """

    space: TargetSpace
    before: Tensor
    after: Tensor
    reference_mask: Tensor
    references: Sequence[str]
    weights: Mapping[str, Tensor]

    def moved(self, part: str, arm: str) -> tuple[Tensor, Tensor]:
        """Return target logits after moves, ``(n_strengths, n_draws, n, n_target)``, and the share.

        Of a vector v, the component along the arm's direction is taken out of the state after the
        edit, where v is that state (``state``) or its change by the edit (``change``); or it alone
        is added to the state before the edit, where v is the change (``only``). At strength 1 the
        move is as long, in any direction, as the component of v along that of W; of the change also
        as its ``own``. The share is that of v's squared length along the direction, ``(n,)``.
        """
        before = self.before @ self.space.to_states
        after = self.after @ self.space.to_states
        v = after if part == "state" else after - before
        base, sign = (before, 1.0) if part == "only" else (after, -1.0)
        along = self.space.directions(self.weights[arm])
        along_w = self.space.directions(self.weights[W])[0]
        component = (v * along).sum(-1)
        length = component.abs() if part == "own" else (v * along_w).sum(-1).abs()
        moves = torch.where(component < 0, -sign, sign)[..., None] * length[..., None] * along
        states = torch.stack([base + strength * moves for strength in STRENGTHS])
        share = (component.square() / v.square().sum(-1)).nan_to_num().mean(0)
        return states @ self.space.to_logits.T, share

    def generalized(self, logits: Tensor) -> Tensor:
        """Return which edits generalize by target logits ``(..., n, n_target)``, ``(..., n)``."""
        was_right = self.reference_mask.gather(1, self.before.argmax(1, keepdim=True))[:, 0]
        winners = logits.argmax(-1, keepdim=True)
        is_right = self.reference_mask.expand(logits.shape).gather(-1, winners)[..., 0]
        return (is_right & ~was_right).double()

    def by_reference(self, values: Tensor) -> Tensor:
        """Return the means over the edits of each reference, ``(..., n_references)``."""
        names = list(dict.fromkeys(self.references))
        members = torch.tensor([[name == other for other in self.references] for name in names])
        return values @ (members.double() / members.sum(1, keepdim=True)).T


def dose_rows(edits: EditStates) -> list[dict[str, Any]]:
    """Return a row per part, arm and strength, with 95 % intervals over references.

    `mean` is the share of generalized edits, `effect` is what the move adds to it, and `w_minus`
    that of W's arm minus it.
    """
    rows: list[dict[str, Any]] = []
    for part in PARTS:
        by_arm = {}
        shares = {}
        for arm in edits.weights:
            logits, shares[arm] = edits.moved(part, arm)
            by_arm[arm] = edits.by_reference(edits.generalized(logits).mean(1))
        rows += [
            {
                "part": part,
                "arm": arm,
                "strength": strength,
                "mean": float(moved.mean()),
                **named_interval("effect", moved - values[0]),
                **named_interval("w_minus", moved_by_w - moved),
                **named_interval("share", edits.by_reference(shares[arm])),
            }
            for arm, values in by_arm.items()
            for strength, moved, moved_by_w in zip(STRENGTHS, values, by_arm[W], strict=True)
        ]
    return rows


def intervention_results(name: str, relation: str, edits: EditStates) -> Results:
    """Return dose and response as means over references, and what strength 1 does."""
    # matplotlib takes long to import, and not every run draws.
    from lincorr_lightning.finetune.figures import interventions_figure

    rows = dose_rows(edits)
    at_one = [row for row in rows if row["strength"] == 1]
    shown = [row for row in at_one if row["part"] == "own"]
    n = len(edits.before)
    values = {
        "relation": relation,
        "n_learned": n,
        "effects": at_one,
        "n_references": len(set(edits.references)),
        "rank": edits.space.to_logits.shape[1],
    }
    formats = {key: ".3f" for key, value in rows[0].items() if not isinstance(value, str)}
    caption = f"Moves of {n} learned edits of {relation}"
    doses = Table.of("intervention_doses", rows, caption=caption, formats=formats)
    headline = Table.of(
        "intervention",
        shown,
        ArmRow,
        f"Edits of {relation} that generalize where a direction is taken out of what they changed",
        f"{n} learned edits, means by right answer. change: what it adds, with its 95 % interval; "
        "share: of the change's squared length. W0: the vocabulary's map; others: docs/causal.md.",
        headline=True,
    )
    caption = f"Edits of {relation} that generalize after moves of the state, by direction."
    options = {"relation": relation, "n": n}
    figures = [Figure("intervention", caption, interventions_figure, [doses], options)]
    verdict = interventions_verdict(relation, {row["arm"]: row for row in shown})
    return Results(name, values, tables=[headline, doses], figures=figures, verdict=verdict)
