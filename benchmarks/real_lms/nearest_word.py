"""How well the nearest word forecasts which edits do not generalize, on pretrained LMs.

It reads the tables of cases of ``run.py``; ``findings.py`` puts its table and figure into docs/.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from pandas import DataFrame, concat, factorize

from benchmarks.common import (
    FLOATS,
    N_RESAMPLES,
    drawn,
    interval,
    markdown_table,
    new_figure,
    plain_axes,
    read_csv,
)
from benchmarks.real_lms.tables import edits_of

NEAREST = "nearest word"
WEIGHT = "−W of the reference"
COUNT = "edits of the reference"
NEVER_GENERALIZES = "X+1->X+2"
MIN_PER_CLASS = 10
MIN_PAIRS = 20


@dataclass(frozen=True)
class EditRun:
    """The edits of one relation on one LM, with their risks not to generalize.

    Attributes:
        lm: Name of the LM.
        method: full or lora.
        relation: The relation, as city->country.
        group: Number of the reference of each edit, ``(n,)``.
        failed: Whether each edit did not generalize, ``(n,)``.
        risks: By forecast: minus the margin of the nearest word, minus W of the reference, and how
            many of the edits have the same reference, each ``(n,)``.
    """

    lm: str
    method: str
    relation: str
    group: npt.NDArray[np.int64]
    failed: npt.NDArray[np.bool_]
    risks: Mapping[str, FLOATS]

    def is_judged(self, within: bool = False) -> bool:
        """Return whether enough edits generalized, and did not, for an AUROC to mean something.

        With `within`, whether there are enough such pairs of edits with one reference.
        """
        if within:
            is_pair = self.group[self.failed][:, None] == self.group[~self.failed]
            return int(is_pair.sum()) >= MIN_PAIRS
        n_failed = int(self.failed.sum())
        return MIN_PER_CLASS <= n_failed <= len(self.failed) - MIN_PER_CLASS


def read_edits(results: Path, name: str = "outcomes") -> list[EditRun]:
    """Read the edits of all LMs whose runs have a name; all seeds of a relation together."""
    by_run: dict[tuple[str, str, str], list[Path]] = {}
    for file in sorted(results.glob(f"*/{name}*.csv")):
        method, relation = edits_of(file.stem)
        if relation != NEVER_GENERALIZES:
            by_run.setdefault((file.parent.name, method, relation), []).append(file)
    return [edit_run_of(*about, read_cases(*files)) for about, files in by_run.items()]


def read_cases(*files: Path) -> DataFrame:
    """Read tables of cases, one below the other."""
    text = dict.fromkeys(("subject", "source_answer", "reference"), str)
    tables = [read_csv(file, keep_default_na=False, dtype=text) for file in files]
    return concat(tables, ignore_index=True)


def edit_run_of(lm: str, method: str, relation: str, cases: DataFrame) -> EditRun:
    """Return the edits of a table of cases."""
    group = factorize(cases["reference"])[0]
    risks = {
        NEAREST: cases["vocabulary_risk"].to_numpy(float),
        WEIGHT: -cases["weight_reference"].to_numpy(float),
        COUNT: np.bincount(group)[group].astype(float),
    }
    failed = (cases["outcome"] != "generalized").to_numpy()
    return EditRun(lm, method, relation, group, failed, risks)


def areas(run: EditRun, risk: str, weights: FLOATS, within: bool = False) -> FLOATS:
    """Return the AUROC of a risk in each sample of references, ``(n_samples,)``; NaN without pairs.

    With `within`, over pairs with one reference. `weights` are those of `drawn`.
    """
    values = run.risks[risk]
    above = values[run.failed][:, None]
    below = values[~run.failed]
    order = (above > below) + (above == below) / 2
    first = run.group[run.failed]
    second = run.group[~run.failed]
    with np.errstate(invalid="ignore"):
        if within:
            same = first[:, None] == second
            of_pair = weights[:, np.broadcast_to(first[:, None], same.shape)[same]]
            return np.asarray(of_pair @ order[same] / of_pair.sum(1))
        n_first = weights[:, first]
        n_second = weights[:, second]
        return np.asarray(
            ((n_first @ order) * n_second).sum(1) / (n_first.sum(1) * n_second.sum(1))
        )


def area(run: EditRun, risk: str, within: bool = False) -> float:
    """Return the AUROC of a risk on the edits of one run."""
    return float(areas(run, risk, np.ones((1, run.group.max() + 1)), within)[0])


def mean_areas(runs: Sequence[EditRun], risk: str, within: bool = False) -> FLOATS:
    """Return the AUROC of a risk, mean over relations, and in samples: ``(1 + N_RESAMPLES,)``.

    Each sample has as many relations, and of each as many references. The samples are the same
    ones at each call.

    Raises:
        KeyError: There are no runs.
    """
    if not runs:
        raise KeyError("no relation has enough edits")
    rng = np.random.default_rng(0)
    n = len(runs)
    chosen = rng.integers(n, size=(n, N_RESAMPLES))
    found = [areas(run, risk, drawn(run.group, n * N_RESAMPLES, rng), within) for run in runs]
    samples = np.array([one[1:].reshape(n, N_RESAMPLES) for one in found])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a sample without pairs
        means = np.nanmean(samples[chosen, np.arange(n)[:, None], np.arange(N_RESAMPLES)], 0)
    return np.concatenate([[np.mean([one[0] for one in found])], means])


def nearest_table(results: Path) -> str:
    """Return the AUROC of the nearest word, with its interval, beside those of W and of the count.

    Means over relations, over all edits and over pairs of edits with one reference.
    """
    rows = []
    for name, title in (("outcomes", "sampled"), ("balanced", "at most two per country")):
        runs = read_edits(results, name)
        for lm, method in dict.fromkeys((run.lm, run.method) for run in runs):
            row: list[Any] = [title, lm, method]
            for within, risks in ((False, (NEAREST, WEIGHT, COUNT)), (True, (NEAREST, WEIGHT))):
                judged = [
                    run
                    for run in runs
                    if (run.lm, run.method) == (lm, method) and run.is_judged(within)
                ]
                score, *others = (mean_areas(judged, risk, within) for risk in risks)
                row += [len(judged), "{:.2f} ({:.2f}–{:.2f})".format(*interval(score))]
                row += [f"{other[0]:.2f}" for other in others]
            rows.append(row)
    columns = [
        "edits",
        "LM",
        "method",
        "relations",
        f"{NEAREST} (95 %)",
        WEIGHT,
        COUNT,
        "relations",
        f"within a reference: {NEAREST} (95 %)",
        WEIGHT,
    ]
    return markdown_table(columns, rows)


def weights_figure(runs: Sequence[EditRun]) -> Any:
    """Draw W of the reference by outcome (the paper's figure 5), with the AUROC of minus W."""
    about = (
        "Blue: generalized. Orange: not. Boxes hold half of the edits. Numbers: AUROC of −W for "
        "edits that do not generalize, over all edits, and within a reference."
    )
    figure = new_figure(10, 3.8, "W of the reference, by outcome of the edit (LoRA)", about)
    judged = [run for run in runs if run.method == "lora" and run.is_judged()]
    by_lm = {lm: [r for r in judged if r.lm == lm] for lm in dict.fromkeys(r.lm for r in judged)}
    widths = [len(of_lm) + 0.5 for of_lm in by_lm.values()]
    panels = figure.subplots(1, len(by_lm), width_ratios=widths, squeeze=False)[0]
    for axes, (lm, of_lm) in zip(panels, by_lm.items(), strict=True):
        names = []
        for place, run in enumerate(of_lm):
            for failed, color, side in ((False, "C0", -0.2), (True, "C1", 0.2)):
                axes.boxplot(
                    -run.risks[WEIGHT][run.failed == failed],
                    positions=[place + side],
                    widths=0.32,
                    patch_artist=True,
                    boxprops={"facecolor": color, "alpha": 0.6},
                    medianprops={"color": "black"},
                    flierprops={"markersize": 2},
                )
            scores = [
                area(run, WEIGHT, within) for within in (False, True) if run.is_judged(within)
            ]
            names.append(
                "\n".join([run.relation.replace("->", "→\n"), *map("{:.2f}".format, scores)])
            )
        axes.set_xticks(range(len(of_lm)), names, fontsize=7)
        plain_axes(axes, lm, "", "W of the reference")
        axes.title.set_fontsize(8)
    return figure
