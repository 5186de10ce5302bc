"""What a probe found, in a few sentences: what W and r are worth beside what needs no knowledge."""

from collections.abc import Iterator, Sequence

from lincorr_lightning.errors import listed
from lincorr_lightning.functional import HALF_DECADES
from lincorr_lightning.linear_map.scores import PairScore
from lincorr_lightning.probe.significance import FINDING
from lincorr_lightning.results.table import clean, percent, points, show

_NOTABLE = 0.2  # r, below which a ridge does not matter
BASELINES = {
    "causal_inner_product": "the nearest word",
    "unembedding": "the cosine of words in the head",
    "gaussian_states": "the vocabulary's map W₀",
    "same_prompt": "the map at the unrelated prompt",
    "constant": "one constant answer",
}
"""What the baselines of right answers are called."""


def verdict(scores: Sequence[PairScore], answers: Sequence[str]) -> list[str]:
    """Return the sentences, the important one first; a run over many pairs judges its first one.

    `answers` are the source labels of that pair whose target W alone gives, and not the nearest
    word.
    """
    judged = [score for score in scores if score.best_macro_1 is not None]
    first = (judged or scores)[0]
    sentences = []
    if judged:
        sentences += [_of_answers(first), *_of_single_answers(first, answers)]
    sentences += [*_of_r(first), *_of_many(judged, scores), *_ways_out(scores)]
    return list(map(clean, sentences))


def conclusion(score: PairScore) -> str:
    """Return what the right answers of W say beside those of the best baseline."""
    low, high = score.above_best_macro_low, score.above_best_macro_high
    if low is None or high is None:
        return f"{score.n_references} different answers are too few to tell them apart"
    if low > 0:
        return "W knows more than the vocabulary"
    is_constant = score.best_macro_baseline == "constant"
    other = "a constant answer" if is_constant else "the vocabulary"
    if high < 0:
        return f"W knows less than {other}"
    verb = "is no better" if is_constant else "knows no more"
    return f"W {verb} than {other} ({points(low, high, bound=1)})"


def _of_answers(score: PairScore) -> str:
    baseline = BASELINES[score.best_macro_baseline or "constant"]
    return (
        f"{score.pair}: W gives the right {score.target} for {percent(score.macro_1)} of answers "
        f"(mean by {score.target}), {baseline} for {percent(score.best_macro_1)}: "
        f"{conclusion(score)}."
    )


def _of_r(score: PairScore) -> Iterator[str]:
    if score.q is None or score.excess_over_random is None:
        return
    ends = score.excess_over_random_low, score.excess_over_random_high
    interval = " to ".join(show(end, "+.2f") for end in ends)
    yield (
        f"{score.pair}: r is {show(score.label_mean, '.2f')}, as many random words have "
        f"{show(score.random_label_mean, '.2f')}: {'' if score.q <= FINDING else 'no '}more than "
        f"random words (of {score.excess_over_random_labels} each "
        f"{show(score.excess_over_random, '+.2f')}, {percent(0.95)}: {interval})."
    )


def _of_many(judged: Sequence[PairScore], scores: Sequence[PairScore]) -> Iterator[str]:
    parts = []
    if len(judged) > 1:
        more = [s.pair for s in judged if (s.above_best_macro_low or 0) > 0]
        less = [s.pair for s in judged if (s.above_best_macro_high or 0) < 0]
        parts.append(
            f"Of {len(judged)} pairs with known answers, W gives more right ones than the best "
            f"baseline for {_named(more)}, fewer for {_named(less)}"
        )
    tested = [score for score in scores if score.q is not None]
    if len(tested) > 1:
        above = [score for score in tested if (score.q or 0) <= FINDING]
        above.sort(key=lambda score: -(score.excess_over_random or 0))
        parts.append(
            f"r lies above random words in {len(above)} of {len(tested)} pairs (adjusted p ≤ "
            f"{FINDING:g}){': ' if above else ''}{_named([s.pair for s in above], '')}"
        )
    if parts:
        yield f"{'; '.join(parts)}."


def _named(names: Sequence[str], none: str = "none") -> str:
    return listed(names, 3) if names else none


def _of_single_answers(score: PairScore, answers: Sequence[str]) -> Iterator[str]:
    if "causal_inner_product" in score.ranks:
        near = score.ranks["causal_inner_product"] == 1
        n_missed = int((near & (score.ranks["W"] > 1)).sum())
        such = f" ({listed(answers, 4)})" if answers else ""
        yield (
            f"{score.pair}: W alone is right, and not the nearest word, for {len(answers)} of "
            f"{len(near)} answers{such}; the nearest word alone for {n_missed}."
        )


def _ways_out(scores: Sequence[PairScore]) -> Iterator[str]:
    known = [score for score in scores if score.influenced_1 is not None]
    edge = [
        score.pair
        for score in scores
        if score.ridge == HALF_DECADES[-1] and (score.label_mean or 0) >= _NOTABLE
    ]
    if edge:
        yield (
            f"The ridge of {listed(edge, 3)} is {HALF_DECADES[-1]:g}, the strongest that is tried: "
            "a stronger one, by model.ridge, may be better."
        )
    imprecise = [s.pair for s in known if not s.ridge and (s.influenced_1 or 0) < 0.5]
    if imprecise:
        yield f"Without a ridge W of {listed(imprecise, 3)} is imprecise: try model.ridge auto."
