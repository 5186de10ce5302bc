"""Edits of pretrained LMs after their last step: how often they carry over, beside baselines.

It reads the runs of ``run.py``; ``findings.py`` writes the tables. Edits step by step are in
``ripple_tables.py``.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import fmean

import numpy as np
import numpy.typing as npt
from pandas import DataFrame, concat, factorize

from benchmarks.common import Estimate, arrow, mean_estimate, read_csv
from benchmarks.real_lms.run import PLAN
from benchmarks.real_lms.tables import LMS, load, of_paper
from lincorr_lightning.results.table import column

SAMPLES = {"outcomes": "any", "balanced": "two per country"}
"""Beginnings of names of runs, and what their edits are: of any city, or two of a country."""


@dataclass(frozen=True)
class EditRun:
    """The edits of one relation on one LM, those of all seeds together.

    Attributes:
        lm: Name of the LM.
        relation: The relation, as city→country.
        method: full or lora.
        sample: Of what the edits are, see `SAMPLES`.
        color: Share of edits whose subject has the color of before, mean over seeds.
        pet: The same of the pet.
        cases: A row per edit, as in ``cases.csv``.
    """

    lm: str
    relation: str
    method: str
    sample: str
    color: float
    pet: float
    cases: DataFrame

    @cached_property
    def group(self) -> npt.NDArray[np.int64]:
        """Number of the reference of each edit, ``(n,)``."""
        return factorize(self.cases["reference"])[0]

    @cached_property
    def failed(self) -> npt.NDArray[np.bool_]:
        """Whether each edit did not generalize, ``(n,)``."""
        return (self.cases["outcome"] != "generalized").to_numpy()


def read_edits(results: Path) -> list[EditRun]:
    """Read the edits of all LMs."""
    found = []
    for lm in LMS:
        for sample, method in ("outcomes", "lora"), ("outcomes", "full"), ("balanced", "lora"):
            for relation in PLAN["edited"]:
                name = f"{method}_{relation.replace('->', '_to_')}"
                files = sorted((results / lm).glob(f"{sample}*_{name}.csv"))
                runs = [load(lm, file.stem, results) for file in files]
                if files:
                    kept = [
                        fmean(run["controls"][kind]["unchanged"] for run in runs)
                        for kind in ("color", "pet")
                    ]
                    about = lm, arrow(relation), method, SAMPLES[sample]
                    found.append(EditRun(*about, *kept, read_cases(*files)))
    return found


def read_cases(*files: Path) -> DataFrame:
    """Read tables of cases, one below the other."""
    text = dict.fromkeys(("subject", "source_answer", "reference"), str)
    tables = [read_csv(file, keep_default_na=False, dtype=text) for file in files]
    return concat(tables, ignore_index=True)


@dataclass(frozen=True)
class Outcomes:
    """How often edits carry over, how often baselines are right, and what else changes.

    Numbers by answer are means over distinct sets of right answers; `lead` is that over the better
    baseline, with an interval over them (Student's t).
    """

    lm: str = column("LM")
    relation: str = column("edits of")
    method: str = column()
    sample: str = column()
    edits: int = column(format="d")
    answers: int = column("right answers", "d")
    hallucinated: float = column(format=".0%")
    generalized: float = column(format=".0%")
    constant: float = column("best constant", ".0%")
    nearest_word: float = column(format=".0%")
    by_answer: float = column("by answer: generalized", ".0%")
    constant_by_answer: float = column("best constant", ".0%")
    nearest_by_answer: float = column("nearest word", ".0%")
    lead: Estimate = column("lead", "+.0%")
    color: float = column("same color", ".0%")
    pet: float = column("same pet", ".0%")
    paper: float | None = column("generalized, paper", ".0%")


def outcomes_of(run: EditRun) -> Outcomes:
    """Return the outcomes of the edits of a run."""
    labels = run.cases["reference"].str.split("|")
    constant = labels.explode().value_counts().index[0]
    right = DataFrame(
        {
            "generalized": ~run.failed,
            "constant": labels.map(lambda answers: constant in answers),
            "nearest_word": run.cases["nearest_risk"] < 0,
        }
    )
    by_edit = right.mean()
    by_answer = right.groupby(run.group).mean()
    shares = by_answer.mean()
    best = shares[["constant", "nearest_word"]].idxmax()
    return Outcomes(
        lm=run.lm,
        relation=run.relation,
        method=run.method,
        sample=run.sample,
        edits=len(right),
        answers=len(by_answer),
        hallucinated=(run.cases["outcome"] == "hallucinated").mean(),
        **by_edit,
        by_answer=shares["generalized"],
        constant_by_answer=shares["constant"],
        nearest_by_answer=shares["nearest_word"],
        lead=mean_estimate(by_answer["generalized"] - by_answer[best]),
        color=run.color,
        pet=run.pet,
        paper=of_paper("generalized", run.relation.replace("→", "->")),
    )
