"""Reading the ends of texts many times over, with changes: what comes before is read once.

In a causal LM a change at one position leaves every position before it as it was, and a change in
one layer every layer below. So the beginning of a text stays in the LM's cache, and the stream into
the first changed layer is kept. Whether an LM can be entered so is tried on a probe; one that
cannot reads whole texts.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from lincorr_lightning.lm.batching import MicroBatches
from lincorr_lightning.lm.language_model import LanguageModel
from lincorr_lightning.lm.modes import evaluating
from lincorr_lightning.lm.shared_prefixes import narrowest_window
from lincorr_lightning.sae.forwards import Forward, Interventions
from lincorr_lightning.sae.hook_points import HookPoint
from lincorr_lightning.sae.hooks import captured, edited, layers_of

# Of how much logits differ between tokens; half precision rounds them by more.
_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4}
_HALF_TOLERANCE = 0.1
_N_PROBE_TOKENS = 8


@torch.no_grad()
def rerun_suffixes(
    lm: LanguageModel,
    rows: Sequence[Sequence[int]],
    positions: Sequence[int],
    n_variants: int,
    layer: int,
    look: Callable[[Forward, int], None],
    *,
    hook_points: Sequence[HookPoint] = (),
    edits: Callable[[list[int], int], Interventions],
    done: Callable[[int], object] | None = None,
) -> None:
    """Run the LM over the ends of texts, each in several variants, in batches that fit its memory.

    Args:
        lm: The LM, loaded.
        rows: Token ids of each text.
        positions: Nothing is changed before this one of each text.
        n_variants: Of each text; variant v of text t is number ``t * n_variants + v``.
        layer: Nothing is changed before the stream enters this layer.
        look: Called with each forward, whose cases are variants' numbers, and the position that
            its first token has in the text.
        hook_points: Whose activations it sees, in this layer or above; as they are after the edits.
        edits: What is changed in the variants of a forward, whose first token is at a position.
        done: Told how many variants have been read, after each forward.

    Raises:
        LanguageModelError: Too little memory.
    """
    can = supports_suffix_rerun(lm, layer, max(map(len, rows), default=0))
    begins = list(positions) if can else [0] * len(rows)
    batches = MicroBatches(lm.config.tokens_per_forward)
    device = lm.model.device.type
    with evaluating(lm.model), torch.autocast(device, enabled=False):
        for begin in sorted(set(begins)):
            of_these = [text for text, own in enumerate(begins) if own == begin]
            numbers = [t * n_variants + v for t in of_these for v in range(n_variants)]

            def ask(batch: list[int], begin: int = begin, numbers: list[int] = numbers) -> None:
                own = [numbers[i] for i in batch]
                texts = list(dict.fromkeys(number // n_variants for number in own))
                at_row = {text: row for row, text in enumerate(texts)}
                ids, mask, at, logits = _read(
                    lm, [rows[text] for text in texts],
                    [at_row[number // n_variants] for number in own],
                    begin, layer if can else 0, edits(own, begin), hook_points,
                )  # fmt: skip
                look(Forward(own, ids, mask.bool(), at, logits), begin)
                if done is not None:
                    done(len(own))

            batches.run([len(rows[n // n_variants]) - begin for n in numbers], device, ask)


def supports_suffix_rerun(lm: LanguageModel, layer: int, longest: int) -> bool:
    """Whether an LM reads the end of a text from a layer on as it does within the whole text.

    Args:
        lm: The LM, loaded.
        layer: Where it is entered, counted from 0.
        longest: Tokens of the longest text.
    """
    window = narrowest_window(lm.model)
    if lm.config.compile or (window is not None and longest > window):
        return False
    embedding: Any = lm.model.get_input_embeddings()  # type: ignore[no-untyped-call]
    ids = [i % len(embedding.weight) for i in range(_N_PROBE_TOKENS)]
    rows, begin = [ids, ids[::-1][:-2]], _N_PROBE_TOKENS // 2 - 1
    with evaluating(lm.model), torch.autocast(lm.model.device.type, enabled=False):
        try:
            # Not one for one, so that nothing kept beside the stream happens to fit.
            _, mask, _, whole = _read(lm, rows, [1, 0, 1], 0, 0, {}, ())
            _, _, _, tails = _read(lm, rows, [1, 0, 1], begin, layer, {}, ())
        except torch.OutOfMemoryError:
            raise
        except (RuntimeError, TypeError, ValueError, AttributeError, LookupError):
            return False
    there = mask[:, begin:].bool()
    if tails.shape != whole[:, begin:].shape:
        return False
    expected, found = whole[:, begin:][there].double(), tails[there].double()
    tolerance = _TOLERANCE.get(lm.model.dtype, _HALF_TOLERANCE)
    return bool((found - expected).norm() <= tolerance * (expected - expected.mean(0)).norm())


def _read(
    lm: LanguageModel,
    rows: Sequence[Sequence[int]],
    which: Sequence[int],
    begin: int,
    layer: int,
    edits: Interventions,
    hook_points: Sequence[HookPoint],
) -> tuple[Tensor, Tensor, Mapping[HookPoint, Tensor], Tensor]:
    """Read texts from a position on; row i is of text `which[i]`.

    Returns:
        Ids, mask, activations and logits.
    """
    model = lm.model
    ids, mask = lm.pad(rows)
    kept = torch.tensor(which, device=ids.device)
    tail = ids[:, begin:]
    cache: Any = None
    if begin:
        cache = model.base_model(
            input_ids=ids[:, :begin], attention_mask=mask[:, :begin], use_cache=True
        ).past_key_values
    stream: Tensor | None = None
    if layer:
        below = HookPoint(layer - 1, "residual")
        with captured(model, [below]) as seen:
            # It writes to the cache what it reads.
            model.base_model(
                input_ids=tail, attention_mask=mask, past_key_values=copy.deepcopy(cache),
                use_cache=cache is not None,
            )  # fmt: skip
        stream = seen[below][kept]
    if cache is not None:
        cache.batch_select_indices(kept)
    ids, mask = tail[kept], mask[kept]
    # Hooks run in the order they were put on: what is seen is what was made of it. Finding where
    # they belong may take a forward of a whole LM, so that layers are skipped last.
    with edited(model, edits), captured(model, hook_points) as at, _entered(lm, layer, stream):
        said = model(
            input_ids=ids, attention_mask=mask, past_key_values=cache, use_cache=cache is not None
        )
    return ids, mask[:, begin:], at, said.logits


@contextmanager
def _entered(lm: LanguageModel, layer: int, stream: Tensor | None) -> Iterator[None]:
    """Have the layers below pass on the stream that enters a layer, without computing anything."""
    skipped = list(layers_of(lm.model))[:layer]
    own = [module.__dict__.get("forward") for module in skipped]
    try:
        for module in skipped:
            module.forward = lambda *args, **kwargs: stream
        yield
    finally:
        for module, forward in zip(skipped, own, strict=True):
            del module.forward
            if forward is not None:
                module.forward = forward
