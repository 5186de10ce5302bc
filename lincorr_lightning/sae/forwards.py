"""Run an LM over many texts while capturing or replacing activations."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from lincorr_lightning.data.texts import TokenRows
from lincorr_lightning.lm.batching import MicroBatches
from lincorr_lightning.lm.language_model import LanguageModel
from lincorr_lightning.lm.modes import evaluating
from lincorr_lightning.sae.hook_points import HookPoint
from lincorr_lightning.sae.hooks import captured, edited, stop_before, stopping_after
from lincorr_lightning.sae.interventions import Intervention

Interventions = Mapping[HookPoint, Intervention]
Rows = Sequence[Sequence[int]]


class Forward(NamedTuple):
    """One forward pass of the LM over some of the texts, `cases`, padded on the right."""

    cases: list[int]
    ids: Tensor
    mask: Tensor
    """Whether a position is a token rather than padding, ``(n_cases, longest)``, bool."""
    at: Mapping[HookPoint, Tensor]
    """Activations at each captured hook point, ``(n_cases, longest, width)``."""
    logits: Tensor
    """``(n_cases, longest, vocab_size)``; empty if not computed."""

    @property
    def last(self) -> Tensor:
        """Last position of each text, ``(n_cases,)``."""
        return self.mask.sum(1) - 1

    def counted(self, n_skipped: int) -> Tensor:
        """Return the mask without the first tokens of each text."""
        return self.mask & (torch.arange(self.mask.shape[1], device=self.mask.device) >= n_skipped)

    def at_positions(self, hook_point: HookPoint, positions: Tensor) -> Tensor:
        """Return the activations at one position of each text, ``(n_cases, width)``."""
        x = self.at[hook_point]
        rows = torch.arange(len(x), device=x.device)
        return x[rows, positions.to(x.device)]

    def losses(self) -> tuple[Tensor, Tensor]:
        """Return the cross-entropy of the next token, and whether there is one.

        Both are ``(n_cases, longest - 1)``; the losses are float64, and 0 where there is none.
        """
        has_next = self.mask[:, 1:]
        logits = self.logits[:, :-1]
        logits = logits if logits.dtype == torch.float64 else logits.float()
        targets = torch.where(has_next, self.ids[:, 1:], 0)
        loss = cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")
        return loss.double().reshape(has_next.shape) * has_next, has_next


def rows_of(texts: TokenRows) -> list[list[int]]:
    """Return the token ids of each text."""
    pairs = zip(texts.input_ids.cpu(), texts.attention_mask.cpu().bool(), strict=True)
    return [ids[mask].tolist() for ids, mask in pairs]


def run_with_hooks(
    lm: LanguageModel,
    rows: Rows,
    callback: Callable[[Forward], None],
    *,
    hook_points: Sequence[HookPoint] = (),
    interventions: Interventions | Callable[[list[int]], Interventions] | None = None,
    logits: bool = True,
    context: Callable[[list[int]], AbstractContextManager[object]] | None = None,
    batches: MicroBatches | None = None,
) -> None:
    """Run the LM over texts, in batches of similar length that fit the memory.

    The LM runs in eval mode and its own precision; its mode is restored afterwards.

    Args:
        lm: The LM, loaded.
        rows: Token ids of each text, as `LanguageModel.rows` returns them.
        callback: Function called with each forward pass.
        hook_points: Hook points to capture, after the interventions.
        interventions: Replacements at hook points, or a function that makes them from the indices
            of a forward pass's texts.
        logits: Whether to compute logits. Without them the LM runs up to the layer of the last hook
            point only.
        context: Function from the indices of a forward pass's texts to a context to run it in, as
            for `LanguageModel.logits_of_rows`.
        batches: Batches that keep the size that fits the memory from one call to the next.
    """

    def run(cases: list[int], ids: Tensor, mask: Tensor) -> None:
        changes = interventions(cases) if callable(interventions) else (interventions or {})
        with ExitStack() as stack:
            stack.enter_context(context(cases) if context is not None else nullcontext())
            stack.enter_context(edited(lm.model, changes))
            # Hooks run in the order of registration, so that replaced activations are captured.
            at = stack.enter_context(captured(lm.model, hook_points))
            if logits:
                output = lm.model(input_ids=ids, attention_mask=mask, use_cache=False).logits
            else:
                with stopping_after(lm.model, hook_points):
                    lm.model.base_model(input_ids=ids, attention_mask=mask, use_cache=False)
                output = torch.empty(0, device=ids.device)
        callback(Forward(cases, ids, mask.bool(), at, output))

    _run_batches(lm, rows, run, batches)


def run_layer(
    lm: LanguageModel,
    rows: Rows,
    layer: int,
    callback: Callable[[list[int], Callable[[Intervention | None], Tensor]], None],
) -> None:
    """Run the LM over texts up to a layer, which `callback` can then run as often as it wants.

    `callback` takes the indices of the texts of each forward pass, and the function that
    `stop_before` returns; texts are padded on the right.
    """

    def run(cases: list[int], ids: Tensor, mask: Tensor) -> None:
        inputs = {"input_ids": ids, "attention_mask": mask, "use_cache": False}
        callback(cases, stop_before(lm.model, layer, lambda: lm.model.base_model(**inputs)))

    _run_batches(lm, rows, run)


@torch.no_grad()
def _run_batches(
    lm: LanguageModel,
    rows: Rows,
    run: Callable[[list[int], Tensor, Tensor], None],
    batches: MicroBatches | None = None,
) -> None:
    device = lm.model.device.type
    batches = batches or MicroBatches(lm.config.tokens_per_forward)
    with evaluating(lm.model), torch.autocast(device, enabled=False):
        batches.run(
            [len(row) for row in rows],
            device,
            lambda cases: run(cases, *lm.pad([rows[case] for case in cases])),
        )


def last_activations(
    lm: LanguageModel,
    rows: Rows,
    hook_points: Sequence[HookPoint],
    context: Callable[[list[int]], AbstractContextManager[object]] | None = None,
) -> dict[HookPoint, Tensor]:
    """Return the activations at each text's last position, ``(n_texts, width)`` on the CPU."""
    found: dict[HookPoint, Tensor] = {}

    def record(forward: Forward) -> None:
        for at in hook_points:
            x = forward.at_positions(at, forward.last).cpu()
            found.setdefault(at, x.new_empty(len(rows), x.shape[1]))[forward.cases] = x

    run_with_hooks(lm, rows, record, hook_points=hook_points, logits=False, context=context)
    return found
