"""What the probe and the study of resilience add up: moments of the joint rows of both halves."""

from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from lincorr_lightning.data.subjects import Half
from lincorr_lightning.distributed import gather
from lincorr_lightning.linear_map import fitting
from lincorr_lightning.linear_map.fitting import FitMoments, Ridge, split_rows
from lincorr_lightning.linear_map.layout import JointLayout, Pair
from lincorr_lightning.linear_map.solver import FittedMaps
from lincorr_lightning.metrics import InstancewisePearson, JointMoments

_MAX_KEPT = 2000  # held-out subjects whose logits are kept until the end, for standard errors


class HalfMoments(nn.Module):
    """Second moments of the joint rows of both halves of the subjects, over batches and ranks.

    If it `chooses_ridges`, they are tried on a part of the fit half and judged on the rest, whose
    labels have moments of their own. Options are those of a torchmetrics ``Metric``.
    """

    def __init__(self, layout: JointLayout, chooses_ridges: bool, **options: Any) -> None:
        super().__init__()
        self.layout = layout
        columns = layout.n_columns, layout.blocks
        labels = layout.n_labels, layout.label_blocks
        self.test = JointMoments(layout.n_test_columns, layout.test_blocks, **options)
        parts = [columns, labels, labels] if chooses_ridges else [columns]
        #: The parts of `FitMoments`.
        self.fit: Any = nn.ModuleList(JointMoments(*part, **options) for part in parts)

    def reset(self, half: Half) -> None:
        """Forget the rows of a half."""
        for metric in [self.test] if half == "test" else self.fit:
            metric.reset()

    def add(self, half: Half, rows: Tensor, first: int) -> None:
        """Add rows of a half as they are read, from position `first`.

        They are ``(n_subjects, n_read)``; of held-out ones the first `n_kept` columns are enough.
        """
        if half == "test":
            self.test.update(*self.layout.with_permuted(rows[:, : self.layout.n_kept]))
            return
        every, *of_ridges = self.fit
        groups = split_rows(rows, first) if of_ridges else ()
        for metric, group in zip(of_ridges, groups, strict=True):
            metric.update(rows[group, : self.layout.n_labels])
        every.update(*self.layout.with_permuted(rows, *groups))

    def gather_fit(self) -> FitMoments:
        """Return what maps are fitted on, of all ranks, which must all call it."""
        return FitMoments(*(metric.gather() for metric in self.fit))


class ProbeSums(HalfMoments):
    """The moments, and instance-wise r and some rows of the held-out half."""

    def __init__(self, layout: JointLayout, chooses_ridges: bool, **options: Any) -> None:
        super().__init__(layout, chooses_ridges, **options)
        self.instancewise: Any = nn.ModuleList(
            InstancewisePearson(layout.target_sizes(s), **options) for s in layout.sources
        )
        self.kept: list[Tensor] = []

    def reset(self, half: Half) -> None:
        super().reset(half)
        if half == "test":
            self.kept.clear()
            for metric in self.instancewise:
                metric.reset()

    def fit_maps(self, ridge: Ridge) -> FittedMaps:
        """Fit the maps, which take over the moments of the fit half.

        All ranks must call it.
        """
        fitted = fitting.fit_maps(self.gather_fit(), self.layout, ridge)
        self.reset("fit")  # with new tensors: those of the maps stay
        return fitted

    def take_kept(self, of_all_ranks: bool) -> Tensor:
        """Return kept rows, ``(n, n_kept)``, and keep them no longer.

        All ranks must call it for those `of_all_ranks`.
        """
        parts = chain(*gather(self.kept)) if of_all_ranks else self.kept
        kept = torch.cat([torch.zeros(0, self.layout.n_kept), *parts])
        self.kept.clear()
        return kept

    def add_test(self, rows: Tensor, first: int, fitted: FittedMaps, n_shards: int = 1) -> None:
        """Add held-out rows as they are read; each of `n_shards` ranks keeps as many."""
        room = _MAX_KEPT // n_shards - sum(map(len, self.kept))
        self.kept.append(rows[: max(room, 0)].float().cpu())
        self.add("test", rows, first)
        predictions = fitted.to(rows.device).predictions(rows)
        for metric, (_, predicted, y) in zip(self.instancewise, predictions, strict=True):
            metric.update(predicted, y)

    def instance_r(self) -> dict[Pair, float]:
        """Return the mean instance-wise r of each pair, over all ranks, which must all call it."""
        instance: dict[Pair, float] = {}
        for source, metric in zip(self.layout.sources, self.instancewise, strict=True):
            # torchmetrics squeezes the result of a source with a single target
            means = metric.compute().reshape(-1).tolist()
            targets = self.layout.targets[source]
            instance |= {(source, t): r for t, r in zip(targets, means, strict=True)}
        return instance
