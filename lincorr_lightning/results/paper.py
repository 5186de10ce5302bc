"""The paper's own numbers, by LM and relation, to be laid beside a run's.

The paper is "Linear Correlation in LM's Compositional Generalization and Hallucination" (arXiv
2502.04520); its tables call the LMs ``llama-3-8b``, ``llama-3.2-3b`` and so on.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

# Named as the paper names them; a hub id's or folder's last part is compared, without "meta-".
_LMS = (
    "gpt2-medium",
    "llama-3.2-1b",
    "llama-3.2-3b",
    "llama-3-8b",
    "llama-3-8b-instruct",
    "llama-3-70b",
    "mistral-7b-v0.3",
    "deepseek-r1-distill-qwen-7b",
    "aya-expanse-8b",
)
_FAMILY = "llama-3"


@dataclass(frozen=True)
class PaperNumber:
    """A number that the paper prints.

    Attributes:
        lm: As the paper calls it.
        relation: As ``city->country``.
        quantity: As `QUANTITIES` has it, or with ``:ANSWER`` behind it if it is of one answer.
        value: Shares and r as fractions of one.
        place: As ``table 2``.
    """

    lm: str
    relation: str
    quantity: str
    value: float
    place: str


QUANTITIES = {
    "label_mean": "label-wise r",
    "label_std": "label-wise r, std",
    **{f"influenced_{n}": f"Hit@{n} influenced" for n in (1, 3, 5)},
    **{f"influencing_{n}": f"Hit@{n} influencing" for n in (1, 3, 5)},
    "after": "label-wise r after post-training",
    "gradient_correlation": "gradient r",
    "logit_correlation": "logit r",
    "generalized": "generalized",
    "random": "random",
    "mapping_reference": "generalized, mapping reference",
    "mapping_permuted": "generalized, mapping permuted",
    "mapping_letters": "generalized, mapping letters",
    "weight_reference": "W of the reference",
    "weight_answer": "W of the answer given",
    "weight_max": "maximum of W",
}
"""What the numbers are, to be read."""

_SHARES = ("generalized", "random", "mapping_")


def is_share(quantity: str) -> bool:
    """Whether a quantity is told in percent."""
    return quantity.startswith(_SHARES)


def quantity_name(quantity: str) -> str:
    """A quantity, to be read.

    Example:
        >>> quantity_name("weight_max:Shanghai")
        'maximum of W, Shanghai'
    """
    name, _, answer = quantity.partition(":")
    return QUANTITIES[name] + (f", {answer}" if answer else "")


def paper_lm(name: str) -> str | None:
    """What the paper calls an LM; None if it is none of the paper's.

    Args:
        name: A hub id, or the folder of a copy.

    Example:
        >>> paper_lm("meta-llama/Meta-Llama-3-8B"), paper_lm("tiny-world")
        ('llama-3-8b', None)
        >>> paper_lm("/hub/models--mistralai--Mistral-7B-v0.3/snapshots/0a1b")
        'mistral-7b-v0.3'
    """
    # The hub's cache hides the name in the middle of the path.
    cached = re.search(r"models--[^/\\]+?--([^/\\]+)", name)
    last = cached[1] if cached else re.split(r"[/\\]", name.rstrip("/\\"))[-1]
    stem = last.lower().removeprefix("meta-")
    return stem if stem in _LMS else None


def paper_numbers(relations: Iterable[str] | None = None) -> list[PaperNumber]:
    """All numbers of the paper that are told here.

    Args:
        relations: Only of these; None takes all.
    """
    wanted = None if relations is None else set(relations)
    return [number for number in _ALL if wanted is None or number.relation in wanted]


def is_of(number: PaperNumber, lm: str) -> bool:
    """Whether a number is of this LM.

    Args:
        number: The paper's.
        lm: A hub id, or the folder of a copy.
    """
    named = paper_lm(lm)
    # Table 7 names no size.
    return named is not None and (
        number.lm == named or (number.lm == _FAMILY and named.startswith(_FAMILY))
    )


# Precision of W: Hit@1, 3, 5 of influenced targets, then of influencing sources.
_TABLE_2 = {
    "city->country": (0.42, 0.45, 0.48, 0.67, 0.74, 0.78),
    "ceo->company": (0.09, 0.09, 0.14, 0.05, 0.05, 0.08),
    "city->city_es": (0.91, 0.91, 0.92, 0.67, 0.74, 0.78),
    "city->city_zh": (0.10, 0.13, 0.16, 0.09, 0.11, 0.15),
    "fruit_color->simile_color": (0.25, 0.38, 0.47, 0.38, 0.50, 0.54),
    "food_taste->simile_taste": (0.28, 0.50, 0.62, 0.14, 0.36, 0.43),
    "X+1->X+2": (0.00, 0.50, 0.60, 0.10, 0.30, 0.50),
    "X+1->X*2": (0.10, 0.40, 0.50, 0.10, 0.30, 0.70),
}
# Correlation of logits, of gradients.
_TABLE_4 = {
    "city->country": (0.89, 0.79),
    "ceo->company": (0.55, 0.47),
    "city->city_es": (0.70, 0.79),
    "city->city_zh": (0.58, 0.46),
    "fruit_color->simile_color": (0.48, 0.46),
    "food_taste->simile_taste": (0.47, 0.47),
    "X+1->X+2": (0.93, 0.87),
    "X+1->X*2": (0.73, 0.66),
}
# Generalization, random.
_TABLE_5 = {
    "city->country": (0.5370, 0.0078),
    "country->continent": (0.5093, 0.20),
    "city->city_es": (0.3910, 0.0041),
    "X+1->X+2": (0.0, 0.0909),
    "X+1->X*2": (0.0818, 0.0909),
    "fruit_color->simile_color": (0.1160, 0.0667),
    "food_taste->simile_taste": (0.1944, 0.10),
    "ceo->company": (0.0434, 0.01),
    "language->continent": (0.2365, 0.20),
    "city->city_zh": (0.0249, 0.0041),
    "city->city_ja": (0.0460, 0.0041),
}
# W of the reference, of the answer given, and the column's maximum.
_TABLE_6 = {
    "Shanghai": (0.50, 0.50, 0.50),
    "NYC": (0.58, 0.58, 0.58),
    "Copenhagen": (0.47, 0.47, 0.47),
    "Karnataka": (0.34, 0.34, 0.56),
    "Indianapolis": (-0.05, 0.15, 0.17),
    "Dresden": (0.04, 0.13, 0.15),
    "Canberra": (0.04, 0.10, 0.10),
    "Helsinki": (0.42, 0.11, 0.42),
}
_TABLE_7 = {
    "city->country": {"reference": 0.9766, "permuted": 0.2266, "letters": 0.3672},
    "country->continent": {"reference": 0.7812},
    "ceo->company": {"reference": 0.5859},
    "X+1->X+2": {"reference": 0.0938},
}
# Tables 8 (llama-3-8b), 9 (the same after post-training) and 14 (llama-3.2-3b), in percent.
_TABLES_8_9_14 = {
    "fruit_color->simile_color": (48.42, 44.11, 48.37),
    "food_taste->simile_taste": (46.68, 37.06, 46.95),
    "gem_color->simile_color": (27.46, 33.66, 50.48),
    "name_country->country": (67.35, 67.30, 78.83),
    "animal_size->simile_size": (59.59, 49.65, 69.43),
    "object_genre->simile_genre": (77.68, 72.03, 81.92),
    "object_heat->simile_heat": (73.11, 63.75, 76.48),
    "object_size->simile_size": (71.41, 66.13, 84.23),
    "object_price->simile_price": (72.87, 71.09, 84.23),
    "object_color->simile_color": (70.87, 66.27, 81.08),
}


def _numbers() -> Iterator[PaperNumber]:
    notebook = "published notebook, 1,000 X's"
    yield PaperNumber("llama-3-8b", "city->country", "label_mean", 0.781, notebook)
    yield PaperNumber("llama-3-8b", "city->country", "label_std", 0.043, notebook)
    hits = [f"{way}_{n}" for way in ("influenced", "influencing") for n in (1, 3, 5)]
    for relation, rates in _TABLE_2.items():
        for hit, rate in zip(hits, rates, strict=True):
            yield PaperNumber("llama-3-8b", relation, hit, rate, "table 2")
    for relation, (logits, gradients) in _TABLE_4.items():
        # Table 14 has more digits of the same.
        if relation not in _TABLES_8_9_14:
            yield PaperNumber("llama-3.2-3b", relation, "label_mean", logits, "table 4")
        for quantity, value in (("logit_correlation", logits), ("gradient_correlation", gradients)):
            yield PaperNumber("llama-3.2-3b", relation, quantity, value, "table 4")
    for relation, (generalized, random) in _TABLE_5.items():
        for quantity, value in (("generalized", generalized), ("random", random)):
            yield PaperNumber("llama-3.2-3b", relation, quantity, value, "table 5")
    for answer, weights in _TABLE_6.items():
        for quantity, value in zip(
            ("weight_reference", "weight_answer", "weight_max"), weights, strict=True
        ):
            yield PaperNumber(
                "llama-3.2-3b", "city->country", f"{quantity}:{answer}", value, "table 6"
            )
    for relation, mappings in _TABLE_7.items():
        for mapping, value in mappings.items():
            yield PaperNumber(_FAMILY, relation, f"mapping_{mapping}", value, "table 7")
    for relation, (base, tuned, small) in _TABLES_8_9_14.items():
        for lm, quantity, percent, place in (
            ("llama-3-8b", "label_mean", base, "table 8"),
            ("llama-3-8b-instruct", "after", tuned, "table 9"),
            ("llama-3.2-3b", "label_mean", small, "table 14"),
        ):
            yield PaperNumber(lm, relation, quantity, percent / 100, place)


_ALL = tuple(_numbers())
