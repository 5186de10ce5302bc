"""Area under the ROC curve: how well scores separate positive from negative cases.

Written here because torchmetrics takes the sigmoid of scores outside [0, 1], which makes high ones
equal, and scikit-learn, a dependency of the tests only, takes one score and one class at a time.
"""

import math
from collections import defaultdict
from collections.abc import Hashable, Sequence

import scipy
import torch
from torch import Tensor


def auroc(scores: Tensor, positive: Tensor) -> float:
    """Return the probability that a positive case has a higher score than a negative one.

    It is the Mann-Whitney U statistic divided by the number of pairs; ties count half. `scores` and
    whether cases are `positive` are ``(n,)``; NaN without positive or without negative cases.

    Example:
        >>> auroc(torch.tensor([0.1, 0.4, 0.8]), torch.tensor([False, True, True]))
        1.0
    """
    return class_auroc(scores[:, None], positive[:, None]).item()


def class_auroc(scores: Tensor, members: Tensor) -> Tensor:
    """Return the AUROC of several scores for several classes, each class against all other cases.

    Of scores ``(n, n_scores)``, and which cases are `members` of each class, ``(n, n_classes)``
    bool: ``(n_classes, n_scores)`` float64; ties count half; NaN for a class of no or all cases.
    """
    of_columns = scipy.stats.rankdata(scores.cpu().double().numpy(), axis=0)
    ranks = torch.from_numpy(of_columns).to(scores.device)
    n_in = members.sum(0).double()[:, None]
    n_pairs = n_in * (len(members) - n_in)
    u = members.double().T @ ranks - n_in * (n_in + 1) / 2
    return torch.where(n_pairs > 0, u / n_pairs, torch.nan)


def auroc_within(scores: Tensor, positive: Tensor, groups: Sequence[Hashable]) -> float:
    """Return the `auroc` over pairs of cases of the same one of the `groups` only.

    Ties count half; NaN if no group has positive and negative cases.

    Example:
        >>> scores, positive = torch.tensor([0.4, 0.1, 0.9]), torch.tensor([True, False, False])
        >>> auroc_within(scores, positive, ["France", "France", "Peru"])
        1.0
    """
    members: dict[Hashable, list[int]] = defaultdict(list)
    for i, group in enumerate(groups):
        members[group].append(i)
    wins = 0.0
    n_pairs = 0
    for chosen in members.values():
        n_positive = int(positive[chosen].sum())
        n = n_positive * (len(chosen) - n_positive)
        if n:
            wins += n * auroc(scores[chosen], positive[chosen])
            n_pairs += n
    return wins / n_pairs if n_pairs else math.nan


def counted_auroc(values: Tensor, positive: Tensor, negative: Tensor) -> float:
    """Return the `auroc` from counts of cases by value, where many cases share few values.

    `values` are scores in any order, of which NaN is left out; `positive` and `negative` are the
    numbers of cases with each value, ``(n_values,)`` all three.
    """
    known = ~values.isnan()
    levels, level_of = torch.unique(values[known].double(), return_inverse=True)
    up = torch.zeros_like(levels).index_add_(0, level_of, positive[known].to(levels))
    down = torch.zeros_like(levels).index_add_(0, level_of, negative[known].to(levels))
    pairs = float(up.sum() * down.sum())
    below = down.cumsum(0) - down / 2
    return float((up * below).sum()) / pairs if pairs else float("nan")
