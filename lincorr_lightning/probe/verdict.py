"""What a probe found, in a few sentences: what W and r are worth beside what needs no knowledge."""

from collections.abc import Iterator, Sequence

from lincorr_lightning.errors import listed
from lincorr_lightning.functional import HALF_DECADES
from lincorr_lightning.linear_map.scores import PairScore
from lincorr_lightning.probe.significance import FINDING
from lincorr_lightning.results.table import clean, percent, points, show

_NOTABLE = 0.2  # r, below which a ridge does not matter
_BASELINES = {
    "causal_inner_product": "the nearest word",
    "unembedding": "the cosine of words in the head",
    "gaussian_states": "the vocabulary's map W₀",
    "same_prompt": "the map at the unrelated prompt",
    "constant": "one constant answer",
}


def verdict(scores: Sequence[PairScore], answers: Sequence[str]) -> list[str]:
    """Return the sentences, the important one first; a run over many pairs judges its first one.

    `answers` are the source labels of that pair whose target W alone gives, and not the nearest
    word.
    """
    judged = [score for score in scores if score["best_macro_1"] is not None]
    first = (judged or scores)[0]
    sentences = [*_of_answers(first, answers)] if judged else []
    sentences += [*_of_r(first), *_of_many(judged, scores), *_ways_out(scores)]
    return list(map(clean, sentences))


def _of_answers(score: PairScore, answers: Sequence[str]) -> Iterator[str]:
    baseline = _BASELINES[score["best_macro_baseline"]]
    w, best = percent(score["macro_1"]), percent(score["best_macro_1"])
    yield (
        f"{score.pair}: W gives the right {score.target} for {w} of answers "
        f"(mean by {score.target}), {baseline} for {best}: {_conclusion(score)}."
    )
    if "causal_inner_product" in score.ranks:
        near = score.ranks["causal_inner_product"] == 1
        n_missed = int((near & (score.ranks["W"] > 1)).sum())
        such = f" ({listed(answers, 4)})" if answers else ""
        yield (
            f"{score.pair}: W alone is right, and not the nearest word, for {len(answers)} of "
            f"{len(near)} answers{such}; the nearest word alone for {n_missed}."
        )


def _conclusion(score: PairScore) -> str:
    """Return what the right answers of W say beside those of the best baseline."""
    low, high = score["above_best_macro_low"], score["above_best_macro_high"]
    if low is None or high is None:
        return f"{score['n_references']} different answers are too few to tell them apart"
    if low > 0:
        return "W knows more than the vocabulary"
    is_constant = score["best_macro_baseline"] == "constant"
    other = "a constant answer" if is_constant else "the vocabulary"
    if high < 0:
        return f"W knows less than {other}"
    verb = "is no better" if is_constant else "knows no more"
    return f"W {verb} than {other} ({points(low, high, bound=1)})"


def _of_r(score: PairScore) -> Iterator[str]:
    if score["q"] is None or score["excess_over_random"] is None:
        return
    names = ("excess_over_random", "excess_over_random_low", "excess_over_random_high")
    excess, low, high = (show(score[name], "+.2f") for name in names)
    r, words = (show(score[name], ".2f") for name in ("label_mean", "random_label_mean"))
    more = "more" if score["q"] <= FINDING else "no more"
    yield (
        f"{score.pair}: r is {r}, as many random words have {words}: {more} than random words (of "
        f"{score['excess_over_random_labels']} each {excess}, {percent(0.95)}: {low} to {high})."
    )


def _of_many(judged: Sequence[PairScore], scores: Sequence[PairScore]) -> Iterator[str]:
    parts = []
    if len(judged) > 1:
        more = [s.pair for s in judged if (s["above_best_macro_low"] or 0) > 0]
        less = [s.pair for s in judged if (s["above_best_macro_high"] or 0) < 0]
        parts.append(
            f"Of {len(judged)} pairs with known answers, W gives more right ones than the best "
            f"baseline for {_named(more)}, fewer for {_named(less)}"
        )
    tested = [score for score in scores if score["q"] is not None]
    if len(tested) > 1:
        above = [score for score in tested if score["q"] <= FINDING]
        above.sort(key=lambda score: -(score["excess_over_random"] or 0))
        parts.append(
            f"r lies above random words in {len(above)} of {len(tested)} pairs (adjusted p ≤ "
            f"{FINDING:g}){': ' if above else ''}{_named([s.pair for s in above], '')}"
        )
    if parts:
        yield f"{'; '.join(parts)}."


def _named(names: Sequence[str], none: str = "none") -> str:
    return listed(names, 3) if names else none


def _ways_out(scores: Sequence[PairScore]) -> Iterator[str]:
    notable = [score for score in scores if (score["label_mean"] or 0) >= _NOTABLE]
    if edge := [score.pair for score in notable if score["ridge"] == HALF_DECADES[-1]]:
        yield (
            f"The ridge of {listed(edge, 3)} is {HALF_DECADES[-1]:g}, the strongest that is tried: "
            "a stronger one, by model.ridge, may be better."
        )
    known = [score for score in scores if score["influenced_1"] is not None]
    if imprecise := [s.pair for s in known if not s["ridge"] and s["influenced_1"] < 0.5]:
        yield f"Without a ridge W of {listed(imprecise, 3)} is imprecise: try model.ridge auto."
