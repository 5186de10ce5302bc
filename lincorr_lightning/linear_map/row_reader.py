"""Reads the joint rows of several relations of a run in one pass over their subjects."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lincorr_lightning.knowledge import Domain
from lincorr_lightning.linear_map.layout import JointLayout, read_rows

if TYPE_CHECKING:
    from lincorr_lightning.lm.language_model import LanguageModel

_Key = tuple[str, tuple[int, ...]]


class RowReader:
    """Reads joint rows, each prompt once: make a new reader when the LM's weights have changed.

    Whatever has been announced for the same subjects is read together: their prompts share their
    beginnings, which the LM then reads once.

    Args:
        lm: The LM.
    """

    def __init__(self, lm: LanguageModel) -> None:
        self.lm = lm
        self._announced: dict[tuple[str, ...], dict[_Key, Domain]] = {}
        self._logits: dict[tuple[str, ...], dict[_Key, Tensor]] = {}

    def announce(self, layout: JointLayout, subjects: Sequence[str]) -> None:
        """Note domains that will be read for some subjects."""
        domains = {_key(domain): domain for domain in layout.domains.values()}
        self._announced.setdefault(tuple(subjects), {}).update(domains)

    def read(self, layout: JointLayout, subjects: Sequence[str]) -> Tensor:
        """Return the joint rows of some subjects, without a control prompt.

        Returns:
            ``(n_subjects, layout.n_labels)``, float64.

        Raises:
            NonFiniteError: The LM answers a subject with NaN or infinite logits.
        """
        self.announce(layout, subjects)
        announced = self._announced[tuple(subjects)]
        known = self._logits.setdefault(tuple(subjects), {})
        missing = {str(i): d for i, (key, d) in enumerate(announced.items()) if key not in known}
        if missing:
            together = JointLayout(missing, ())
            rows = read_rows(self.lm, together, subjects)
            for name, domain in missing.items():
                known[_key(domain)] = rows[:, together.columns(name)]
        return torch.cat([known[_key(domain)] for domain in layout.domains.values()], dim=1)


def _key(domain: Domain) -> _Key:
    return domain.knowledge.template, tuple(domain.token_ids)
