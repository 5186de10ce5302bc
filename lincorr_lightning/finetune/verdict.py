"""What edits did, in sentences, beside what needs no training: the nearest word, other people."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from lincorr_lightning.results.table import clean, percent, points, show

BASELINES = {"causal_inner_product": "the nearest word", "constant": "one constant answer"}
_FEW = 0.9  # share of learned edits below which the other shares say little
_UNKNOWN = {"mean": None, "low": None, "high": None}


def edits_verdict(values: Mapping[str, Any]) -> list[str]:
    """Return the sentences of edits from their ``results.json``, the important one first."""
    return list(map(clean, _of_edits(values))) if values["n_edits"] else []


def _of_edits(values: Mapping[str, Any]) -> Iterator[str]:
    relation, learned = values["relation"], values["source_learned"]
    target = relation.partition("->")[2]
    specific, leak = (values[name] or _UNKNOWN for name in ("specific", "leak"))
    steps = values.get("by_step", ())  # none of edits that were made elsewhere
    if not steps or learned < _FEW or specific["mean"] is None:
        of_subject = f", {percent(specific['mean'])} specific to their subject"
        yield (
            f"Edits of {relation}: {percent(learned)} learned"
            f"{'' if specific['mean'] is None else of_subject}"
            f"{': train longer, or raise the learning rate' if steps and learned < _FEW else ''}."
        )
    else:
        yield peak_sentence(steps, relation)
    if best := values["above_best_baseline"]:
        name = BASELINES[best["baseline"]]
        whom = "those that were not right before" if values["right_before"] else "them"
        yield (
            f"{'At the end, ' if steps else ''}{percent(best['generalized'])} of {whom} "
            f"generalize (mean by {target}), {name} is right for {percent(best['macro'])}: "
            f"{_compared(best['low'], best['high'], 'fewer', name)}."
        )
    if leak["mean"] is not None:
        is_everybody = specific["low"] is not None and specific["low"] <= 0 < leak["mean"]
        yield (
            f"{'Said of everybody: the' if is_everybody else 'The'} new {target} is then said of "
            f"{percent(leak['mean'])} of other people ({values['n_others']}), too."
        )


def peak_sentence(rows: Sequence[Mapping[str, Any]], relation: str) -> str:
    """Return where edits are most specific, in a sentence; rows are those of ``by_step``."""
    known = [row for row in rows if row["specific"] is not None]
    peak = max(known, key=lambda row: row["specific"])
    last = known[-1]
    if peak["specific"] <= 0:
        return f"Edits of {relation} are at no step specific to their subject."
    share, at_last = percent(peak["specific"]), percent(last["specific"])
    after = "1 step" if peak["step"] == 1 else f"{peak['step']} steps"
    if share != at_last:
        after += f", {at_last} after {last['step']}: stop at {peak['step']}"
    return f"Edits of {relation}: {share} specific to their subject after {after}."


def gradients_verdict(correlations: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Return r of the change of relations in a sentence, if any has one."""
    parts = [
        f"{show(numbers['gradient_correlation'], '.2f')} for {relation} "
        f"({show(numbers.get('permuted_gradient_correlation'), '.2f')} with W permuted)"
        for relation, numbers in correlations.items()
        if numbers.get("gradient_correlation") is not None
    ]
    text = f"r of the change, between W's prediction and what training did: {', '.join(parts[:3])}."
    return [clean(text)] if parts else []


def forecast_verdict(values: Mapping[str, Any], answers: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return for which edits the nearest word is right; `answers` are the least safe ones first."""
    nearest = values["nearest"]
    unsafe = [f"{row['answer']} (nearest: {row['nearest']})" for row in answers if not row["right"]]
    text = (
        f"The nearest word is right for {percent(nearest['right'])} of {values['n_edits']} edits "
        f"of {values['relation']} ({percent(nearest['macro'])} by answer)"
    )
    return [clean(f"{text}; least safe: {', '.join(unsafe[:3])}." if unsafe else f"{text}.")]


def interventions_verdict(relation: str, effects: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Return what W's direction takes beyond the vocabulary's; effects are those of each arm."""
    loss = {arm: show(-100 * row["effect"], ".0f") for arm, row in effects.items()}
    low, high = (
        None if end is None else -end
        for end in map(effects["W0"].get, ("w_minus_high", "w_minus_low"))
    )
    own_row = loss["reference's row"]
    return [
        f"Edits of {clean(relation)}: without W's direction {loss['W']} points fewer generalize, "
        f"without that of the vocabulary's map W₀ {loss['W0']}: W takes "
        f"{_compared(low, high, 'less', 'the vocabulary')}.",
        f"What W has beyond W₀ takes {loss['W - W0']} points, the right answer's own row of the "
        f"head {own_row}, a random direction {loss['random']}.",
    ]


def _compared(low: float | None, high: float | None, less: str, other: str) -> str:
    """Return whether an interval of a difference is above or below 0; if not, with its ends."""
    if low is None or high is None:
        return f"too few different answers to say whether more than {other}"
    if low > 0 or high < 0:
        return f"{'more' if low > 0 else less} than {other}"
    return f"no more than {other} ({points(low, high, bound=1)})"
