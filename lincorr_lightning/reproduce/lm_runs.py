"""The finished runs of an LM, as the tables and figures of a reproduction read them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch

from lincorr_lightning.errors import LinearMapError
from lincorr_lightning.functional import random_hit_rates
from lincorr_lightning.knowledge import Catalogue, TokenizedRelation
from lincorr_lightning.linear_map import LinearMap
from lincorr_lightning.reproduce.items import PLACES, edit_run
from lincorr_lightning.reproduce.plan import LINEAR_MAP, LMPlan, relation_probe
from lincorr_lightning.results.paper import PaperNumber, Quantity
from lincorr_lightning.results.saved_run import SavedRun

NOT_MEASURED = "not measured"


@dataclass(frozen=True)
class LMRuns:
    """The finished runs of an LM.

    Attributes:
        plan: Its plan.
        runs: Its runs by name.
        errors: Why runs are missing, by name.
        seconds: How long runs took, by name.
    """

    plan: LMPlan
    runs: Mapping[str, SavedRun]
    errors: Mapping[str, str]
    seconds: Mapping[str, float] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """Name of the LM."""
        return self.plan.name

    @cached_property
    def linear_maps(self) -> dict[str, LinearMap]:
        """Maps of the probes by run, read once; those that cannot be read are left out."""
        found = {}
        for name, run in self.runs.items():
            with suppress(LinearMapError):
                if run.study == "linear_probe":
                    found[name] = LinearMap.from_pretrained(run.folder / LINEAR_MAP)
        return found

    def missing_reason(self, relation: str, runs: Sequence[str]) -> str:
        """Return why there are no numbers of a relation.

        Args:
            relation: The relation, as ``city->country``.
            runs: Names of the runs that measure it.
        """
        ends = relation.split("->")
        reasons = [(f"{end}: " if end in ends else "") + reasons[end]
                   for reasons in (self.errors, self.plan.left_out)
                   for end in (*runs, *ends) if end in reasons]  # fmt: skip
        return reasons[0].rstrip(".") if reasons else NOT_MEASURED

    def find(self, quantity: Quantity, number: PaperNumber) -> float | None:
        """Return a number of the paper as measured here; None if it was not."""
        for name, run in self.runs.items():
            serves = number.place in PLACES.values()
            if run.study != quantity.study or (PLACES.get(name) == number.place) != serves:
                continue
            value = quantity.of(run, number.relation, number.answer)
            if value is not None:
                return value
        return None

    def probed_pair(self, relation: str) -> Mapping[str, Any]:
        """Return a relation's entry in the results of its probe; empty if there is none."""
        run = self.runs.get(probe_of(relation))
        pairs = run.values["pairs"] if run is not None else ()
        return next((one for one in pairs if f"{one['source']}->{one['target']}" == relation), {})

    def gradients(self, relation: str) -> Mapping[str, Any]:
        """Return what the gradients of a relation's edits are correlated with; empty without."""
        run = self.runs.get(edit_run(relation))
        found = run.values.get("gradients") if run is not None else None
        return (found or {}).get(relation) or {}

    def random_hits(self, relation: str) -> dict[str, list[float]]:
        """Return Hit@1, 3 and 5 of weights in random order by direction; empty without a reference.

        The directions are ``influenced`` and ``influencing``.
        """
        if not (self.probed_pair(relation).get("precision") and self.plan.tokenizer):
            return {}
        tokenized = TokenizedRelation.of(relation, Catalogue.load(), self.plan.tokenizer)
        rates = random_hit_rates(torch.from_numpy(tokenized.reference_mask))
        ways = ("influenced", "influencing")
        return {way: one.rates.tolist() for way, one in zip(ways, rates, strict=True)}


def probe_of(relation: str) -> str:
    """Return the name of the probe that has a relation's map; empty if there is none."""
    return relation_probe(relation, Catalogue.load()) or ""
