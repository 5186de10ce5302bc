"""Numbers of edits from an LM's domain logits before and after them (paper, section 5)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor

from lincorr_lightning.errors import DomainError
from lincorr_lightning.finetune.cases import EditCase, case_statistics
from lincorr_lightning.functional import Outcome, outcome_codes, reference_scores
from lincorr_lightning.knowledge import Catalogue, Domain, TokenizedRelation
from lincorr_lightning.results.table import number

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

CONTROLS = ("color",)
"""Kinds of knowledge that an edit should not change, unless others are named."""


class DomainLogits(NamedTuple):
    """Domain logits of an LM for some subjects, ``(n_subjects, n_labels)``, float64 on the CPU."""

    source: Tensor
    target: Tensor
    controls: tuple[Tensor, ...] = ()

    def rows(self, indices: Sequence[int]) -> DomainLogits:
        """Return the logits of some of the subjects."""
        chosen = list(indices)
        return DomainLogits(
            self.source[chosen], self.target[chosen], tuple(part[chosen] for part in self.controls)
        )

    @classmethod
    def stack(cls, parts: Sequence[tuple[Any, ...]]) -> DomainLogits:
        """Return the logits of the subjects of all parts, at least one."""
        source, target, controls = zip(*parts, strict=True)
        columns = zip(*controls, strict=True)
        return cls(torch.cat(source), torch.cat(target), tuple(map(torch.cat, columns)))


def find_controls(
    names: Sequence[str],
    relation: TokenizedRelation,
    catalogue: Catalogue,
    tokenizer: PreTrainedTokenizerBase,
) -> list[Domain]:
    """Return the controls that the vocabulary has labels for; source and target are none."""
    ends, domains = relation.name.split("->"), []
    for name in names:
        if name in ends:
            continue
        try:
            domains.append(TokenizedRelation.of(f"{ends[0]}->{name}", catalogue, tokenizer).target)
        except DomainError as error:
            rank_zero_warn(f"{name} is left out of the controls: {error}")
    return domains


def edit_means(
    before: DomainLogits,
    after: DomainLogits,
    reference_mask: Tensor,
    labels: Tensor | None,
    controls: Sequence[str],
) -> dict[str, float]:
    """Return the mean of every number of some edits, by log key; NaN where there is none.

    Args:
        before: The logits before the edits.
        after: Those after them. Logits of paraphrases of the source may follow the controls.
        reference_mask: Target labels that are right for each edit, ``(n, n_target)`` bool.
        labels: The source label that each edit taught, ``(n,)``; None without edits.
        controls: Names of the controls.
    """
    codes = outcome_codes(before.target.argmax(1), after.target.argmax(1), reference_mask)
    values = {f"generalization/{name}": codes == i for i, name in enumerate(Outcome)}
    if labels is not None:
        learned = after.source.argmax(1) == labels
        values["generalization/source_learned"] = learned
        for one in (Outcome.GENERALIZED, Outcome.HALLUCINATED):
            values[f"generalization/{one}_of_learned"] = (codes == one.code)[learned]
    probability = after.target.softmax(1)
    old = probability.gather(1, before.target.argmax(1, keepdim=True))
    values["probability/reference"] = (probability * reference_mask).sum(1)
    values["probability/old_answer"] = old[:, 0]
    for name, *pair in zip(controls, before.controls, after.controls, strict=False):
        values[f"control_unchanged/{name}"] = _same_answer(*pair)
    paraphrases = after.controls[len(controls) :]
    if paraphrases:
        known = after.source.argmax(1) if labels is None else labels
        values["paraphrases/source_learned"] = torch.stack(paraphrases).argmax(2) == known
    means = {name: value.double().mean().item() for name, value in values.items()}
    scores = reference_scores(
        [list(Outcome)[code] for code in codes.tolist()],
        [row.nonzero().flatten().tolist() for row in reference_mask],
    )
    return means | {f"generalization/{name}": value for name, value in scores.items()}


def neighbour_means(before: DomainLogits, after: DomainLogits) -> dict[str, float]:
    """Return how many subjects without an edit answer as before, by log key."""
    return {
        f"neighbours/{side}_unchanged": float(
            _same_answer(getattr(before, side), getattr(after, side)).double().mean()
        )
        for side in ("source", "target")
    }


def _same_answer(before: Tensor, after: Tensor) -> Tensor:
    return before.argmax(1) == after.argmax(1)


def outcome_values(
    relation: str,
    means: Mapping[str, float],
    reference_mask: Tensor,
    cases: Sequence[EditCase],
    counts: Mapping[str, int],
) -> dict[str, Any]:
    """Return what ``results.json`` has of edits, from `edit_means` and `neighbour_means`.

    `reference_mask` is that of the edits; `counts` are the numbers of paraphrases and neighbours.
    """
    groups: dict[str, dict[str, Any]] = {}
    for key, value in means.items():
        group, _, name = key.partition("/")
        groups.setdefault(group, {})[name] = number(value)
    shares, unchanged = groups["generalization"], groups.get("control_unchanged", {})
    macro = [name for name in shares if name.startswith("macro_")]
    return {
        "relation": relation,
        "n_edits": len(cases),
        "random": number(reference_mask.double().mean().item()),
        "macro": {name.removeprefix("macro_"): shares.pop(name) for name in macro},
        **shares,
        **{f"probability_{name}": value for name, value in groups["probability"].items()},
        "controls": {name: {"unchanged": value} for name, value in unchanged.items()},
        **{name: {**groups[name], "n": n} for name, n in counts.items() if name in groups},
        **case_statistics(cases),
    }
