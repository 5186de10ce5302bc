"""How much of r is the wording: related pairs beside unrelated knowledge in the same sentence.

It reads the probes of ``run.py``; ``findings.py`` writes the tables. Prompts of the family
``control`` ask for unrelated things in the sentences of the others (5_controls.yaml).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import compress, groupby

import numpy as np
import numpy.typing as npt
from pandas import DataFrame

from benchmarks.common import Estimate
from benchmarks.real_lms.tables import PairScores
from lincorr_lightning.knowledge import Catalogue
from lincorr_lightning.results.table import column

FLOATS = npt.NDArray[np.float64]
SENTENCES: Mapping[str, Sequence[str]] = {
    "city": ("house", "lived_month", "floor"),
    "country": ("house", "lived_month", "floor"),
    "continent": ("house", "lived_month", "floor"),
    "landmark": ("house", "lived_month", "floor"),
    "language": ("spoken_name",),
    "company": ("worked_day",),
    "ceo": ("worked_day",),
    "city_es": ("home_es", "flat_es"),
    "country_es": ("home_es", "flat_es"),
    "object_color": ("object_day", "object_month"),
    "simile_color": ("simile_day", "simile_month"),
    "object_genre": ("object_day", "object_month"),
    "simile_genre": ("simile_day", "simile_month"),
    "X+1": ("X+a", "X-b", "X*c", "X/d"),
    "X+2": ("X+a", "X-b", "X*c", "X/d"),
    "X*2": ("X+a", "X-b", "X*c", "X/d"),
}
"""Controls in the sentence of each kind of knowledge; those of music and the like have none."""
N_DRAWS = 2000


@dataclass(frozen=True)
class Wording:
    """r of related pairs of an LM beside controls in the same sentences, means over pairs.

    *Controls as source* predict the same target from the prompts of controls in the source's
    sentence, *as target* the words of controls in the target's; *others* are unrelated kinds of
    knowledge in other sentences, in the same places. Leads have 95 % intervals from samples of
    kinds of knowledge, which pairs share. Random words are the stronger of both sides. *Without
    sums* leaves out the pairs between two of X+1, X+2 and X*2.
    """

    lm: str = column("LM")
    pairs: int = column("related pairs", "d")
    r: float = column("r", ".2f")
    words: float = column("random words", ".2f")
    other_source: float = column("others as source", ".2f")
    other_target: float = column("others as target", ".2f")
    as_source: float = column("controls as source", ".2f")
    as_target: float = column("controls as target", ".2f")
    lead_source: Estimate = column("lead over controls as source", "+.2f")
    lead_target: Estimate = column("lead over controls as target", "+.2f")
    lead_without_sums: Estimate = column("the same, without sums", "+.2f")
    n_above: int = column("above all controls", "d")
    partial: float = column("r given the wording", ".2f")
    partial_unrelated: float = column("the same, unrelated pairs", ".2f")


@dataclass(frozen=True)
class Exceeding:
    """How many pairs exceed random words on both sides, by what they are.

    Share of pairs whose intervals are above zero on both sides; *r with relatedness* is over all
    pairs between whether they are related and the mean of both excesses, then given the overlap of
    their wordings (4-grams of characters, Jaccard); p by permuted kinds of knowledge. *Without
    sums* leaves out those between two of X+1, X+2, X*2 and their controls.
    """

    lm: str = column("LM")
    related: str = column("related pairs")
    unrelated: str = column("unrelated pairs")
    controls: str = column("with a control in its sentence")
    r_related: float = column("r with relatedness", ".2f")
    r_overlap: float = column("r with overlap", ".2f")
    r_given_overlap: float = column("r with relatedness, given overlap", ".2f")
    p_given_overlap: float = column("its p", ".2g")
    r_without_sums: float = column("the same, without sums", ".2f")
    p_without_sums: float = column("its p, without sums", ".2g")


def grams(text: str, n: int = 4) -> set[str]:
    """Return the n-grams of characters of a template."""
    return {text[i : i + n] for i in range(len(text) - n + 1)}


def overlap(first: str, second: str) -> float:
    """Return how alike two templates are, from 0 to 1."""
    a, b = grams(first), grams(second)
    return len(a & b) / len(a | b)


def in_sentence(source: str, target: str) -> bool:
    """Return whether one of two kinds is a control in the sentence of the other."""
    return source in SENTENCES.get(target, ()) or target in SENTENCES.get(source, ())


def is_sum(pair: tuple[str, str]) -> bool:
    """Return whether a pair is between two sums, or controls of them."""
    return all(name.startswith("X") for name in pair)


def is_control(name: str) -> bool:
    """Return whether a kind of knowledge is a control."""
    return any(name in controls for controls in SENTENCES.values())


def over_kinds(ends: Sequence[tuple[str, str]], values: FLOATS) -> Estimate:
    """Return the mean over pairs, with a 95 % interval from samples of kinds of knowledge.

    A pair counts in a sample as often as its source times as often as its target was drawn.
    """
    names = sorted({name for pair in ends for name in pair})
    index = np.array([[names.index(name) for name in pair] for pair in ends])
    drawn = np.random.default_rng(0).multinomial(
        len(names), np.full(len(names), 1 / len(names)), size=N_DRAWS
    )
    weights = drawn[:, index[:, 0]] * drawn[:, index[:, 1]]
    weights = weights[weights.sum(1) > 0]
    low, high = np.quantile(weights @ values / weights.sum(1), [0.025, 0.975])
    return Estimate(float(values.mean()), float(low), float(high))


def wording_of(lm: str, rows: Sequence[PairScores]) -> Wording:
    """Return the related pairs of an LM beside controls."""
    ends = {row: tuple(row.pair.split("→")) for row in rows}
    r = {pair: row.r for row, pair in ends.items()}
    known = {pair for row, pair in ends.items() if row.is_known}
    others = [name for name in dict.fromkeys(a for a, _ in r) if not is_control(name)]

    def beside(pairs: Iterable[tuple[str, str]]) -> float:
        return float(np.mean([r[pair] for pair in pairs if pair in r]))

    found = []
    for row, (source, target) in ends.items():
        controls = SENTENCES.get(source), SENTENCES.get(target)
        if not row.is_known or None in controls:
            continue
        near, far = (
            [(one, target) for one in controls[0]],
            [(source, one) for one in controls[1]],
        )
        elsewhere = (
            [(one, target) for one in others if SENTENCES.get(one) != controls[0]],
            [(source, one) for one in others if SENTENCES.get(one) != controls[1]],
        )
        found.append(
            {
                "ends": (source, target),
                "r": row.r,
                "words": max(row.source_words, row.target_words),
                "other_source": beside(pair for pair in elsewhere[0] if pair not in known),
                "other_target": beside(pair for pair in elsewhere[1] if pair not in known),
                "as_source": beside(near),
                "as_target": beside(far),
                "is_above": row.r > max(r[pair] for pair in (*near, *far) if pair in r),
                "partial": row.partial,
            }
        )
    table = DataFrame(found)
    without_sums = table[~table["ends"].map(is_sum)]
    unrelated = [
        row.partial
        for row, pair in ends.items()
        if not row.is_known and not any(map(is_control, pair))
    ]
    means = table.drop(columns=["ends", "is_above"]).mean()
    return Wording(
        lm,
        len(table),
        **means[["r", "words", "other_source", "other_target", "as_source", "as_target"]],
        lead_source=over_kinds(table["ends"], (table["r"] - table["as_source"]).to_numpy()),
        lead_target=over_kinds(table["ends"], (table["r"] - table["as_target"]).to_numpy()),
        lead_without_sums=over_kinds(
            without_sums["ends"].tolist(),
            (without_sums["r"] - without_sums["as_target"]).to_numpy(),
        ),
        n_above=int(table["is_above"].sum()),
        partial=means["partial"],
        partial_unrelated=float(np.nanmean(np.array(unrelated, dtype=float))),
    )


def residual(values: FLOATS, given: FLOATS) -> FLOATS:
    """Return what a linear function of other values leaves."""
    slope, intercept = np.polyfit(given, values, 1)
    return np.asarray(values - slope * given - intercept)


def exceeding_of(lm: str, rows: Sequence[PairScores]) -> Exceeding:
    """Return which pairs of an LM exceed random words."""
    template = {one.name: one.template for one in Catalogue.load().values()}
    ends = [tuple(row.pair.split("→")) for row in rows]
    related = np.array([row.is_known for row in rows], dtype=float)
    alike = np.array([overlap(template[a], template[b]) for a, b in ends])
    excess = np.array(
        [(row.above_source_words.value + row.above_target_words.value) / 2 for row in rows]
    )
    control = np.array([in_sentence(*pair) for pair in ends])
    exceeds = np.array([row.exceeds_words() for row in rows])

    def share(chosen: npt.NDArray[np.bool_]) -> str:
        return f"{int(exceeds[chosen].sum())} of {int(chosen.sum())}"

    plain = (related == 0) & ~control
    is_other = np.array([not is_sum(pair) for pair in ends])
    return Exceeding(
        lm,
        share(related > 0),
        share(plain),
        share(control & (related == 0)),
        float(np.corrcoef(related, excess)[0, 1]),
        float(np.corrcoef(alike, excess)[0, 1]),
        *beyond_overlap(ends, related, alike, excess),
        *beyond_overlap(
            [*compress(ends, is_other)], related[is_other], alike[is_other], excess[is_other]
        ),
    )


def beyond_overlap(
    ends: Sequence[tuple[str, str]], related: FLOATS, alike: FLOATS, excess: FLOATS
) -> tuple[float, float]:
    """Return r of relatedness of pairs and their excess, given the overlap; and its p."""
    names = sorted({name for pair in ends for name in pair})
    number = {name: i for i, name in enumerate(names)}
    of_related, of_excess = residual(related, alike), residual(excess, alike)
    observed = np.corrcoef(of_related, of_excess)[0, 1]
    # Kinds of knowledge are exchanged as wholes: pairs that share one are not independent.
    rng = np.random.default_rng(0)
    matrix = np.full((len(names), len(names)), np.nan)
    for (a, b), value in zip(ends, of_excess, strict=True):
        matrix[number[a], number[b]] = value
    index = np.array([(number[a], number[b]) for a, b in ends])
    n_larger = 0
    for _ in range(N_DRAWS):
        order = rng.permutation(len(names))
        shuffled = matrix[order[index[:, 0]], order[index[:, 1]]]
        known = ~np.isnan(shuffled)
        n_larger += np.corrcoef(of_related[known], shuffled[known])[0, 1] >= observed
    return float(observed), (n_larger + 1) / (N_DRAWS + 1)


def wordings(pairs: Sequence[PairScores]) -> Iterator[tuple[Wording, Exceeding]]:
    """Yield both rows of each LM whose pairs have controls."""
    for lm, group in groupby(pairs, key=lambda row: row.lm):
        rows = [row for row in group if row.above_source_words is not None]
        if any(is_control(end) for row in rows for end in row.pair.split("→")):
            yield wording_of(lm, rows), exceeding_of(lm, rows)
