"""Geometric median of points."""

import torch
from torch import Tensor


@torch.no_grad()
def geometric_median(points: Tensor, n_steps: int = 50, tolerance: float = 1e-6) -> Tensor:
    """Return the point with the smallest mean distance to all points, by Weiszfeld's iteration.

    Unlike the mean, it is robust to outliers. Of points ``(..., n, d)``: ``(..., d)``. Iterations,
    `n_steps` at most, end when it moves by less than the `tolerance`, a fraction of that distance.
    """
    median = points.mean(-2)
    for _ in range(n_steps):
        distance = (points - median[..., None, :]).norm(dim=-1)
        scale = distance.mean(-1, keepdim=True)
        # A point that coincides with the median would have infinite weight.
        weight = distance.clamp(min=torch.finfo(points.dtype).eps * scale + 1e-30).reciprocal()
        new = (points * weight[..., None]).sum(-2) / weight.sum(-1, keepdim=True)
        moved = (new - median).norm(dim=-1, keepdim=True)
        median = new
        if bool((moved <= tolerance * scale).all()):
            break
    return median
