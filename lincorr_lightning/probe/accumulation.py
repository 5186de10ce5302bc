"""What the probe and the study of resilience add up: moments of the joint rows of both halves."""

from dataclasses import replace
from itertools import chain
from typing import Any, cast

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
        self.fit, self.test = (JointMoments(*columns, **options) for _ in range(2))
        self.trying = JointMoments(*labels, **options) if chooses_ridges else None
        self.judging = JointMoments(*labels, **options) if chooses_ridges else None

    def reset(self, half: Half) -> None:
        """Forget the rows of a half."""
        for metric in [self.test] if half == "test" else [self.fit, self.trying, self.judging]:
            if metric is not None:
                metric.reset()

    def add(self, half: Half, rows: Tensor, first: int) -> None:
        """Add rows of a half as they are read, ``(n_subjects, n_read)``, from position `first`."""
        if half == "test":
            self.test.update(*self.layout.with_permuted(rows))
        elif self.trying is None or self.judging is None:
            self.fit.update(*self.layout.with_permuted(rows))
        else:
            trying, judging = split_rows(rows, first)
            self.trying.update(rows[trying, : self.layout.n_labels])
            self.judging.update(rows[judging, : self.layout.n_labels])
            self.fit.update(*self.layout.with_permuted(rows, trying, judging))

    def gather_fit(self) -> FitMoments:
        """Return what maps are fitted on, of all ranks, which must all call it."""
        parts = [self.fit, self.trying, self.judging]
        return FitMoments(*(metric.gather() for metric in parts if metric is not None))


class ProbeSums(HalfMoments):
    """The moments, and instance-wise r and the first columns of some rows of the held-out half."""

    def __init__(self, layout: JointLayout, chooses_ridges: bool, **options: Any) -> None:
        super().__init__(layout, chooses_ridges, **options)
        self.instancewise = nn.ModuleList(
            InstancewisePearson(layout.target_sizes(s), **options) for s in layout.sources
        )
        self.kept: list[Tensor] = []

    def reset(self, half: Half) -> None:
        super().reset(half)
        if half == "test":
            self.kept.clear()
            for metric in self.instancewise:
                cast(InstancewisePearson, metric).reset()

    def fit_maps(self, ridge: Ridge) -> FittedMaps:
        """Fit the maps, and forget the rows of the fit half but for what scores need.

        All ranks must call it.
        """
        fitted = fitting.fit_maps(self.gather_fit(), self.layout, ridge)
        assert fitted.moments is not None
        needed = fitted.moments.first_blocks(len(self.layout.scoring_blocks))
        self.reset("fit")
        return replace(fitted, moments=needed)

    def take_kept(self, of_all_ranks: bool) -> Tensor:
        """Return the first columns of kept rows, ``(n, n_kept)``, and keep them no longer.

        All ranks must call it for those `of_all_ranks`.
        """
        parts = chain(*gather(self.kept)) if of_all_ranks else self.kept
        kept = torch.cat([torch.zeros(0, self.layout.n_kept), *parts])
        self.kept.clear()
        return kept

    def add_test(self, rows: Tensor, first: int, fitted: FittedMaps, n_shards: int = 1) -> None:
        """Add held-out rows as they are read; each of `n_shards` ranks keeps as many."""
        room = _MAX_KEPT // n_shards - sum(map(len, self.kept))
        self.kept.append(rows[: max(room, 0), : self.layout.n_kept].float().cpu())
        self.add("test", rows, first)
        predictions = fitted.to(rows.device).predictions(rows)
        for metric, (_, predicted, y) in zip(self.instancewise, predictions, strict=True):
            cast(InstancewisePearson, metric).update(predicted, y)

    def instance_r(self) -> dict[Pair, float]:
        """Return the mean instance-wise r of each pair, over all ranks, which must all call it."""
        instance: dict[Pair, float] = {}
        for source, metric in zip(self.layout.sources, self.instancewise, strict=True):
            # torchmetrics squeezes the result of a source with a single target
            means = cast(InstancewisePearson, metric).compute().reshape(-1).tolist()
            targets = self.layout.targets[source]
            instance |= {(source, t): r for t, r in zip(targets, means, strict=True)}
        return instance
