"""Drawing answers so that unrelated facts do not go together by chance."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from math import fsum

import numpy as np


class BalancedDraw:
    """Draws answers so that other facts are spread over them as evenly as possible.

    Among people drawn at random, more women than men live in some cities by chance. An LM learns
    that before it knows where each person lives, and a linear map then reads the gender from the
    logits of the cities, although the two are unrelated. Each draw therefore takes the option that
    people with the same other facts have had least often, relative to how often they would have had
    it by chance: minimization, as clinical trials assign treatments (Pocock and Simon 1975).

    Args:
        rng: Draws among options that are equally rare.
    """

    def __init__(self, rng: np.random.Generator) -> None:
        self._rng = rng
        self._n = 0
        self._expected: defaultdict[str, float] = defaultdict(float)
        self._of_fact: Counter[tuple[str, str]] = Counter()
        self._of_both: Counter[tuple[str, tuple[str, str]]] = Counter()

    def draw(self, options: Sequence[str], facts: Mapping[str, str]) -> str:
        """Return one of the options for a person.

        Args:
            options: Answers that the person may have.
            facts: The person's other facts, by attribute.
        """
        pairs = list(facts.items())
        self._n += 1
        self._of_fact.update(pairs)
        shares = [self._of_fact[pair] / self._n for pair in pairs]
        for option in options:
            self._expected[option] += 1 / len(options)

        def excess(option: str) -> float:
            expected = self._expected[option]
            # Rounded exactly, so that equal options stay equal in every version of Python.
            return fsum(
                self._of_both[option, pair] - expected * share
                for pair, share in zip(pairs, shares, strict=True)
            )

        order = self._rng.permutation(len(options))
        drawn = min((options[i] for i in order), key=excess)
        self._of_both.update((drawn, pair) for pair in pairs)
        return drawn
