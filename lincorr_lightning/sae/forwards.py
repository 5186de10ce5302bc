"""Running an LM over many texts, some of its activations seen or changed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from lincorr_lightning.lm.batching import MicroBatches
from lincorr_lightning.lm.language_model import LanguageModel
from lincorr_lightning.lm.modes import evaluating
from lincorr_lightning.sae.hook_points import HookPoint
from lincorr_lightning.sae.hooks import captured, edited
from lincorr_lightning.sae.interventions import Intervention

Interventions = Mapping[HookPoint, Intervention]


class Forward(NamedTuple):
    """One forward of the LM over some of the texts.

    Attributes:
        cases: Which ones: indices into the texts that are read.
        ids: Their tokens, ``(n_cases, longest)``, padded on the right.
        mask: Which tokens are true ones, bool, likewise.
        at: Activations of each place that was asked for, ``(n_cases, longest, width)``.
        logits: ``(n_cases, longest, vocab_size)``; empty if not asked for.
    """

    cases: list[int]
    ids: Tensor
    mask: Tensor
    at: Mapping[HookPoint, Tensor]
    logits: Tensor

    @property
    def last(self) -> Tensor:
        """Each text's last position, ``(n_cases,)``."""
        return self.mask.sum(1) - 1

    def counted(self, n_skipped: int) -> Tensor:
        """True tokens but some at the beginning of each text, bool like `mask`."""
        return self.mask & (torch.arange(self.mask.shape[1], device=self.mask.device) >= n_skipped)

    def at_positions(self, hook_point: HookPoint, positions: Tensor) -> Tensor:
        """Activations of a place at one position of each text, ``(n_cases, width)``."""
        x = self.at[hook_point]
        rows = torch.arange(len(x), device=x.device)
        return x[rows, positions.to(x.device)]

    def losses(self) -> tuple[Tensor, Tensor]:
        """How unlikely the LM finds each token after the one at a position.

        Returns:
            Negative log likelihoods, ``(n_cases, longest - 1)`` float64, 0 where there is no next
            token; and where there is one, bool likewise.
        """
        there = self.mask[:, 1:]
        said = self.logits[:, :-1]
        said = said if said.dtype == torch.float64 else said.float()
        wanted = torch.where(there, self.ids[:, 1:], 0)
        loss = cross_entropy(said.flatten(0, 1), wanted.flatten(), reduction="none")
        return loss.double().reshape(there.shape) * there, there


@torch.no_grad()
def run_with_hooks(
    lm: LanguageModel,
    rows: Sequence[Sequence[int]],
    callback: Callable[[Forward], None],
    *,
    hook_points: Sequence[HookPoint] = (),
    interventions: Interventions | Callable[[list[int]], Interventions] | None = None,
    logits: bool = True,
    context: Callable[[list[int]], AbstractContextManager[object]] | None = None,
) -> None:
    """Run the LM over texts, in batches of like length that fit its memory.

    It is asked in eval mode and its own precision, and is as before afterwards.

    Args:
        lm: The LM, loaded.
        rows: Token ids of each text, as `LanguageModel.rows` gives them.
        callback: Called with each forward.
        hook_points: Whose activations it sees; as they are after the interventions.
        interventions: What is changed on the way: in all texts, or by the indices of a forward's texts.
        logits: Whether it sees logits, which are most of the work of a small LM.
        context: Makes a context to run a forward in from the indices of its texts, as for
            `LanguageModel.logits_of_rows`.

    Raises:
        LanguageModelError: Too little memory.
    """
    device = lm.model.device.type

    def ask(cases: list[int]) -> None:
        ids, mask = lm.pad([rows[case] for case in cases])
        changes = interventions(cases) if callable(interventions) else (interventions or {})
        with ExitStack() as stack:
            stack.enter_context(context(cases) if context is not None else nullcontext())
            stack.enter_context(edited(lm.model, changes))
            # Hooks run in the order they were put on: what is seen is what was made of it.
            at = stack.enter_context(captured(lm.model, hook_points))
            if logits:
                said = lm.model(input_ids=ids, attention_mask=mask, use_cache=False).logits
            else:
                lm.model.base_model(input_ids=ids, attention_mask=mask, use_cache=False)
                said = torch.empty(0, device=ids.device)
        callback(Forward(cases, ids, mask.bool(), at, said))

    with evaluating(lm.model), torch.autocast(device, enabled=False):
        batches = MicroBatches(lm.config.tokens_per_forward)
        batches.run([len(row) for row in rows], device, ask)
