"""The paper's numbers, against the page that this project copied them from by hand."""

import pytest

from lincorr_lightning.ablation.results import PAPER
from lincorr_lightning.knowledge import Catalogue
from lincorr_lightning.results.paper import (
    is_of,
    is_share,
    paper_lm,
    paper_numbers,
    quantity_name,
)


def value(lm: str, relation: str, quantity: str) -> tuple[float, str]:
    (found,) = (n for n in paper_numbers([relation]) if n.lm == lm and n.quantity == quantity)
    return found.value, found.place


@pytest.mark.parametrize(
    ("lm", "relation", "quantity", "expected"),
    [
        ("llama-3-8b", "city->country", "influenced_1", (0.42, "table 2")),
        ("llama-3-8b", "X+1->X*2", "influencing_5", (0.70, "table 2")),
        ("llama-3.2-3b", "X+1->X+2", "gradient_correlation", (0.87, "table 4")),
        ("llama-3.2-3b", "city->city_ja", "generalized", (0.046, "table 5")),
        ("llama-3.2-3b", "city->country", "weight_answer:Indianapolis", (0.15, "table 6")),
        ("llama-3", "city->country", "mapping_letters", (0.3672, "table 7")),
        ("llama-3-8b", "gem_color->simile_color", "label_mean", (0.2746, "table 8")),
        ("llama-3-8b-instruct", "gem_color->simile_color", "after", (0.3366, "table 9")),
        ("llama-3.2-3b", "object_price->simile_price", "label_mean", (0.8423, "table 14")),
    ],
)
def test_single_numbers(lm: str, relation: str, quantity: str, expected: tuple[float, str]) -> None:
    found, place = value(lm, relation, quantity)
    assert (pytest.approx(found), place) == expected


def test_each_number_is_told_once_of_relations_there_are() -> None:
    numbers = paper_numbers()
    keys = [(n.lm, n.relation, n.quantity) for n in numbers]
    assert len(keys) == len(set(keys))
    catalogue = Catalogue.load()
    for relation in {n.relation for n in numbers}:
        assert set(relation.split("->")) <= set(catalogue), relation
    for number in numbers:
        assert -0.1 < number.value < 1 and quantity_name(number.quantity)


def test_table_7_is_that_of_the_ablations_own_report() -> None:
    found = {
        (n.relation, n.quantity.removeprefix("mapping_")): n.value
        for n in paper_numbers()
        if n.place == "table 7"
    }
    assert found == {(r, m): v for r, mappings in PAPER.items() for m, v in mappings.items()}
    assert is_share("mapping_letters") and not is_share("after")


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("meta-llama/Meta-Llama-3-8B", "llama-3-8b"),
        ("meta-llama/Meta-Llama-3-8B-Instruct", "llama-3-8b-instruct"),
        ("/data/llama-3.2-3b/", "llama-3.2-3b"),
        ("openai-community/gpt2-medium", "gpt2-medium"),
        ("/c/models--meta-llama--Llama-3.2-1B/snapshots/4e20de36", "llama-3.2-1b"),
        ("meta-llama/Llama-3.1-8B", None),
        ("me/llama-3-8b-finetuned", None),
        ("tiny-world", None),
        ("", None),
    ],
)
def test_lms_are_known_by_their_names(name: str, expected: str | None) -> None:
    assert paper_lm(name) == expected


def test_the_vocabulary_of_table_7_is_that_of_llama_3_of_any_size() -> None:
    (number,) = (n for n in paper_numbers(["ceo->company"]) if n.place == "table 7")
    assert is_of(number, "meta-llama/Llama-3.2-1B") and is_of(number, "meta-llama/Meta-Llama-3-8B")
    assert not is_of(number, "gpt2-medium") and not is_of(number, "tiny-world")
