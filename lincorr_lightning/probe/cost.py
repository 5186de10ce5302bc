"""What a probe will take in time, memory and tokens, before anything is read."""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Sequence

import torch

from lincorr_lightning.linear_map.layout import JointLayout, domain_rows
from lincorr_lightning.lm.cost import estimate_reading
from lincorr_lightning.lm.language_model import LanguageModel
from lincorr_lightning.metrics import JointMoments

_MIB = 2**20
# What does not depend on LM and subjects, as measured for docs/benchmarks.md on one core: scores of
# a pair and of its nulls, and figures, of which many pairs have no more than some.
_PER_PAIR, _PER_FIGURE_PAIR, _MOST_OF_FIGURES = 0.012, 0.05, 12.0
_COPIES = 4  # of moments while those of a batch are added to them
_MIB_OF_FIGURES = 150  # and of what the libraries load when they are first used


def describe_cost(
    lm: LanguageModel, layout: JointLayout, moments: Sequence[JointMoments],
    subjects: Sequence[str], n_read: int, device: torch.device, n_processes: int = 1,
) -> str:  # fmt: skip
    """Return in some lines of text what a probe will take; it reads with random weights.

    Args:
        lm: The LM, whose weights need not be loaded.
        layout: What is read.
        moments: All statistics of the run.
        subjects: A batch of subjects.
        n_read: Number of subjects that are read, over all epochs and views.
        device: Where the LM will be.
        n_processes: Processes that share the subjects.
    """
    seconds = {"start-up": time.process_time()}
    usage = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    libraries = usage * (1 if sys.platform == "darwin" else 1024) / _MIB
    cost = estimate_reading(
        lm, lambda cut, batch: domain_rows(cut, layout.reads, batch), subjects, device
    )
    batches = n_read / len(subjects)
    seconds["reading"] = n_read * cost.seconds / n_processes
    seconds["statistics"] = batches * _seconds_of_update(layout, len(subjects)) / n_processes
    n_pairs = len(layout.pairs)
    seconds["scores"] = _PER_PAIR * n_pairs
    seconds["figures"] = min(_PER_FIGURE_PAIR * n_pairs, _MOST_OF_FIGURES)
    sizes = [one.products.nbytes / _MIB for one in moments]
    statistics = sum(sizes) + _COPIES * max(sizes)
    weights = cost.n_bytes / _MIB
    memory = weights + statistics + libraries + _MIB_OF_FIGURES
    prompts = len({template for template, _ in layout.reads})
    listed = ", ".join(f"{name} {each:,.0f}" for name, each in seconds.items())
    return (
        f"LM: {lm.config.name_or_path}, {cost.n_parameters:,} parameters\n"
        f"prompts: {prompts * n_read:,}, {prompts} of a subject, {cost.how}\n"
        f"tokens: {cost.n_tokens * n_read:,.0f}\n"
        f"time: {sum(seconds.values()):,.0f} s ({listed})\n"
        f"memory: {memory:,.0f} MiB (LM {weights:,.0f}, statistics {statistics:,.0f}, libraries "
        f"{libraries + _MIB_OF_FIGURES:,.0f})\n"
    )


def _seconds_of_update(layout: JointLayout, n_subjects: int) -> float:
    """Return the time in which the logits of a batch are added to the moments."""
    moments = JointMoments(layout.n_columns, layout.blocks)
    n_read = sum(len(tokens) for _, tokens in layout.reads)
    rows = layout.with_permuted(torch.randn(n_subjects, n_read, dtype=torch.float64))
    moments.update(rows)
    start = time.thread_time()
    moments.update(rows)
    return time.thread_time() - start
