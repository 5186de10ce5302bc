"""What the probe and the study of resilience add up: moments of the joint rows of both halves."""

import torch
from torch import Tensor, nn

from lincorr_lightning.data.subjects import Half
from lincorr_lightning.linear_map.fitting import FitMoments, split_rows
from lincorr_lightning.linear_map.layout import JointLayout
from lincorr_lightning.metrics import JointMoments


class HalfMoments(nn.Module):
    """Second moments of the joint rows of both halves of the subjects, over batches and ranks.

    Args:
        layout: Layout of the rows.
        chooses_ridges: Whether ridges are tried on a part of the fit half and judged on the rest,
            so that the labels of both parts have moments of their own.
    """

    def __init__(self, layout: JointLayout, chooses_ridges: bool) -> None:
        super().__init__()
        self.layout = layout
        columns = layout.n_columns, layout.blocks
        labels = layout.n_labels, layout.blocks[:1]
        self.fit, self.test = JointMoments(*columns), JointMoments(*columns)
        self.trying = JointMoments(*labels) if chooses_ridges else None
        self.judging = JointMoments(*labels) if chooses_ridges else None

    def reset(self, half: Half) -> None:
        """Forget the rows of a half."""
        for metric in [self.test] if half == "test" else [self.fit, self.trying, self.judging]:
            if metric is not None:
                metric.reset()

    def add(self, half: Half, rows: Tensor, first: int) -> None:
        """Add rows of a half as they are read, ``(n_subjects, n_read)``, from position `first`."""
        if half == "test":
            self.test.update(self.layout.with_permuted(rows))
        elif self.trying is None or self.judging is None:
            self.fit.update(self.layout.with_permuted(rows))
        else:
            trying, judging = map(self.layout.with_permuted, split_rows(rows, first))
            self.trying.update(trying[:, : self.layout.n_labels])
            self.judging.update(judging[:, : self.layout.n_labels])
            self.fit.update(torch.cat([trying, judging]))

    def gather_fit(self) -> FitMoments:
        """Return what maps are fitted on, of all ranks, which must all call it."""
        parts = [self.fit, self.trying, self.judging]
        return FitMoments(*(metric.gather() for metric in parts if metric is not None))
