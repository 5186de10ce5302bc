"""Run an LM over texts while reading its activations, and replace them by those of SAEs.

A feature is rescaled by ``x - (1 - r) f_i d_i``, where ``f_i`` is its activation in the same
forward pass and ``d_i`` its decoder row on the LM's scale: what the SAE does not explain is kept,
and ``r = 1`` changes nothing (Laptev et al., 2025, arXiv 2502.03032).
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from lincorr_lightning.data.texts import TokenRows, TokenStep
from lincorr_lightning.lm.batching import RowsContext
from lincorr_lightning.lm.language_model import LanguageModel
from lincorr_lightning.lm.modes import reading
from lincorr_lightning.metrics import ReconstructionQuality
from lincorr_lightning.sae.hook_points import Feature, HookPoint
from lincorr_lightning.sae.hooks import captured, edited, stop_before, stopping_after, width_of
from lincorr_lightning.sae.sparse_autoencoder import SAEs, SparseAutoencoder, sae_of

Intervention = Callable[[Tensor], Tensor]  #: Replaces ``(batch, sequence, width)``.
Rows = Sequence[Sequence[int]]


class Forward(NamedTuple):
    """One forward pass of the LM over some of the texts, `cases`, padded on the right."""

    cases: list[int]
    ids: Tensor
    mask: Tensor  #: Whether a position is a token, not padding, ``(n_cases, longest)``, bool.
    at: Mapping[HookPoint, Tensor]  #: By captured hook point, ``(n_cases, longest, width)``.
    logits: Tensor  #: ``(n_cases, longest, vocab_size)``; empty if not computed.

    @property
    def last(self) -> Tensor:
        """Last position of each text, ``(n_cases,)``."""
        return self.mask.sum(1) - 1

    def counted(self, n_skipped: int) -> Tensor:
        """Return the mask without the first tokens of each text."""
        return self.mask & (torch.arange(self.mask.shape[1], device=self.mask.device) >= n_skipped)


def next_token_losses(logits: Tensor, ids: Tensor, mask: Tensor) -> Tensor:
    """Return the cross-entropy of the next token, ``(n, longest - 1)`` float64; 0 for padding."""
    logits = logits[:, :-1]
    logits = logits if logits.dtype == torch.float64 else logits.float()
    targets = torch.where(mask.bool(), ids, -100)[:, 1:]  # the index that is ignored
    losses = cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")
    return losses.double().view(targets.shape)


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
    logits: bool = True,
    context: RowsContext | None = None,
) -> None:
    """Run the LM over texts, in batches of similar length that fit the memory.

    The LM, loaded, runs in eval mode and its own precision, for logits to its end; its mode is
    restored afterwards. `callback` is called with each forward pass. Activations are captured as
    interventions of `edited` leave them; `context` makes a context, such as that, to run the texts
    of some indices in.
    """

    def run(cases: list[int], ids: Tensor, mask: Tensor) -> None:
        with (
            nullcontext() if context is None else context(cases),
            # Hooks run in the order of registration, so that replaced activations are captured.
            captured(lm.model, hook_points) as activations,
        ):
            if logits:
                output = lm.model(input_ids=ids, attention_mask=mask, use_cache=False).logits
            else:
                with stopping_after(lm.model, hook_points):
                    lm.model.base_model(input_ids=ids, attention_mask=mask, use_cache=False)
                output = torch.empty(0, device=ids.device)
        callback(Forward(cases, ids, mask.bool(), activations, output))

    _run_batches(lm, rows, run)


def run_layer(
    lm: LanguageModel,
    rows: Rows,
    layer: int,
    callback: Callable[[list[int], Callable[[Intervention | None], Tensor]], None],
) -> None:
    """Run the LM over texts up to a layer, which `callback` can then run as often as it wants.

    It takes the indices of the texts of each forward pass, and what `stop_before` returns.
    """

    def run(cases: list[int], ids: Tensor, mask: Tensor) -> None:
        inputs = {"input_ids": ids, "attention_mask": mask, "use_cache": False}
        callback(cases, stop_before(lm.model, layer, lambda: lm.model.base_model(**inputs)))

    _run_batches(lm, rows, run)


@torch.no_grad()
def _run_batches(
    lm: LanguageModel, rows: Rows, run: Callable[[list[int], Tensor, Tensor], None]
) -> None:
    with reading(lm.model, lm.model.device.type, compiled=lm.config.compile):
        lm.in_batches(
            [len(row) for row in rows],
            lambda cases: run(cases, *lm.pad([rows[case] for case in cases])),
        )


def last_activations(
    lm: LanguageModel,
    rows: Rows,
    hook_points: Sequence[HookPoint],
    context: RowsContext | None = None,
) -> dict[HookPoint, Tensor]:
    """Return the activations at each text's last position, ``(n_texts, width)`` on the CPU."""
    activations: dict[HookPoint, Tensor] = {}

    def record(forward: Forward) -> None:
        numbers = torch.arange(len(forward.cases))
        for at in hook_points:
            x = forward.at[at][numbers, forward.last.cpu()].cpu()  # a layer's device may differ
            activations.setdefault(at, x.new_empty(len(rows), x.shape[1]))[forward.cases] = x

    run_with_hooks(lm, rows, record, hook_points=hook_points, logits=False, context=context)
    return activations


def text_losses(lm: LanguageModel, rows: Rows, context: RowsContext | None = None) -> list[Tensor]:
    """Return the loss of each token but the first of texts, in nats; see `run_with_hooks`."""
    losses = [torch.empty(0, dtype=torch.float64)] * len(rows)

    def record(forward: Forward) -> None:
        of_texts = next_token_losses(forward.logits, forward.ids, forward.mask)
        for case, of_text, has_next in zip(
            forward.cases, of_texts, forward.mask[:, 1:], strict=True
        ):
            losses[case] = of_text[has_next].cpu()

    run_with_hooks(lm, rows, record, context=context)
    return losses


@dataclass(eq=False)
class BlockActivations:
    """Activations of the counted tokens of texts; those of a block are read once for all steps."""

    lm: LanguageModel
    hook_points: Sequence[HookPoint]
    number: int | None = None  #: Number of the block that was read last.
    block: Tensor = field(default_factory=lambda: torch.empty(0))
    """Those of the whole block, ``(n_hook_points, n_counted, width)``."""

    def read(self, step: TokenStep) -> Tensor:
        """Return the activations of a step's tokens in their order, as `block`."""
        if step.block != self.number:
            self.block = torch.empty(0)  # frees the last block's memory first
            self.block = self._read(step.texts)
            self.number = step.block
        return self.block[:, step.positions]

    def _read(self, texts: TokenRows) -> Tensor:
        model = self.lm.model
        counted = texts.counted.cpu()
        slots = counted.flatten().cumsum(0).view_as(counted) - 1
        shape = (len(self.hook_points), int(counted.sum()), width_of(model))
        out = torch.empty(shape, dtype=model.dtype, device=model.device)

        def write(forward: Forward) -> None:
            longest = forward.ids.shape[1]
            mask = counted[forward.cases, :longest]
            slot = slots[forward.cases, :longest][mask].to(out.device)
            for i, hook_point in enumerate(self.hook_points):
                out[i, slot] = forward.at[hook_point][mask.to(out.device)].to(out)

        run_with_hooks(self.lm, rows_of(texts), write, hook_points=self.hook_points, logits=False)
        return out


def rescale_at(sae: SparseAutoencoder, positions: Tensor, chosen: Tensor, r: float) -> Intervention:
    """Multiply activations of distinct features of each row by r at its position, ``(batch,)``.

    `chosen` are their indices, ``(batch, k)``, -1 for none.
    """

    def rescale(x: Tensor) -> Tensor:
        at = torch.arange(len(x), device=x.device), positions.to(x.device)
        index = chosen.to(x.device)
        features = sae.encode(x[at]).gather(1, index.clamp(min=0)) * (index >= 0)
        removed = (features.unsqueeze(1) @ sae.decoder[index.clamp(min=0)]).squeeze(1)
        changed = x.clone()
        changed[at] -= ((1 - r) * removed / sae.input_scale).to(x.dtype)
        return changed

    return rescale


def remove_features(saes: SAEs, features: Iterable[Feature]) -> dict[HookPoint, Intervention]:
    """Remove distinct features wherever they are active."""
    indices: dict[HookPoint, list[int]] = {}
    for feature in sorted(features):
        sae_of(feature, saes)
        indices.setdefault(feature.hook_point, []).append(feature.index)

    def remove(sae: SparseAutoencoder, index: list[int], x: Tensor) -> Tensor:
        return x - (sae.encode(x)[..., index] @ sae.decoder[index] / sae.input_scale).to(x.dtype)

    return {at: partial(remove, saes[at], index) for at, index in indices.items()}


def add_features(saes: SAEs, amounts: Mapping[Feature, float]) -> dict[HookPoint, Intervention]:
    """Add features to every token by amounts in units of their activation, to steer with them."""
    added: dict[HookPoint, Tensor] = {}
    for feature, amount in amounts.items():
        sae = sae_of(feature, saes)
        row = sae.decoder.detach()[feature.index] * (amount / sae.input_scale)
        added[feature.hook_point] = added.get(feature.hook_point, torch.zeros_like(row)) + row

    def add(vector: Tensor, x: Tensor) -> Tensor:
        return x + vector.to(x)

    return {at: partial(add, vector) for at, vector in added.items()}


@torch.no_grad()
def score_texts(
    model: nn.Module, saes: SAEs, texts: TokenRows, quality: ReconstructionQuality
) -> None:
    """Add to `quality` what a batch of texts gives unchanged, and twice more with each SAE.

    Activations are read and replaced at the counted tokens: by their reconstruction, and by zeros.
    """
    ids = texts.input_ids
    mask = texts.attention_mask
    counted = texts.counted

    def loss() -> Tensor:
        logits = model(input_ids=ids, attention_mask=mask, use_cache=False).logits
        return next_token_losses(logits, ids, mask).sum()

    def replace(new: Tensor, activation: Tensor) -> Tensor:
        changed = activation.clone()
        changed[counted] = new.to(activation)
        return changed

    with captured(model, saes) as read:
        clean = loss()
    spliced: list[Tensor] = []
    ablated: list[Tensor] = []
    for i, (hook_point, sae) in enumerate(saes.items()):
        activations = read[hook_point][counted]
        features = sae.encode(activations)
        rebuilt = sae.decode(features)
        quality.update(i, activations, rebuilt, features)
        for losses, new in ((spliced, rebuilt), (ablated, torch.zeros_like(rebuilt))):
            with edited(model, {hook_point: partial(replace, new)}):
                losses.append(loss())
    if bool(counted.any()):
        quality.add_losses(torch.stack([clean, *spliced, *ablated]), int(mask[:, 1:].sum()))
