"""Names of people who do not exist."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np

# fmt: off
_ONSETS = [
    "b", "br", "c", "ch", "d", "dr", "f", "fl", "g", "gr", "h", "j", "k", "kr", "l", "m",
    "n", "p", "pr", "qu", "r", "s", "sh", "st", "t", "th", "tr", "v", "w", "z",
]
# fmt: on
_VOWELS = ["a", "ae", "ai", "e", "ea", "i", "ia", "o", "oa", "u", "y"]
_CODAS = ["", "", "", "l", "m", "n", "nd", "r", "ric", "s", "th", "v", "x"]


def invent_names(n: int, rng: np.random.Generator, taken: Collection[str] = ()) -> list[str]:
    """Draw n different names of one word, such as "Draeloth", that are not among those taken."""
    refused = {word.casefold() for word in taken}
    names: list[str] = []
    while len(names) < n:
        syllables = [
            _ONSETS[rng.integers(len(_ONSETS))] + _VOWELS[rng.integers(len(_VOWELS))]
            for _ in range(int(rng.integers(2, 4)))
        ]
        name = "".join(syllables) + _CODAS[rng.integers(len(_CODAS))]
        if name not in refused:
            refused.add(name)
            names.append(name.capitalize())
    return names
