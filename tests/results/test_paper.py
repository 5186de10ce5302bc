"""The paper's numbers, against the page that this project copied them from by hand."""

from collections.abc import Callable
from pathlib import Path

import pytest

from lincorr_lightning.knowledge import Catalogue
from lincorr_lightning.results.paper import (
    PaperNumber,
    paper_numbers,
    quantities,
    size_figure,
)
from lincorr_lightning.results.saved_run import SavedRun

Make = Callable[..., Path]


@pytest.mark.parametrize(
    ("lm", "relation", "quantity", "answer", "expected"),
    [
        ("llama-3-8b", "city->country", "influenced_1", "", (0.42, "Table 2")),
        ("llama-3.2-3b", "X+1->X+2", "gradient_correlation", "", (0.87, "Table 4")),
        ("llama-3.2-3b", "city->country", "weight_answer", "Indianapolis", (0.15, "Table 6")),
        ("llama-3", "city->country", "mapping_letters", "", (0.3672, "Table 7")),
        ("llama-3.2-3b", "object_price->simile_price", "label_mean", "", (0.8423, "Table 14")),
    ],
)
def test_single_numbers(
    lm: str, relation: str, quantity: str, answer: str, expected: tuple[float, str]
) -> None:
    wanted = (lm, relation, quantity, answer)
    found = [n for n in paper_numbers() if (n.lm, n.relation, n.quantity.name, n.answer) == wanted]
    assert [(n.value, n.place) for n in found] == [expected]


def test_each_number_is_there_once_of_relations_that_exist() -> None:
    keys = [(n.lm, n.relation, n.quantity.heading, n.answer) for n in paper_numbers()]
    assert len(keys) == len(set(keys)) == 163
    names = set(Catalogue.load())
    for number in paper_numbers():
        assert set(number.relation.split("->")) <= names, number.relation
        assert -0.1 < number.value < 1


def number(place: str, relation: str) -> PaperNumber:
    return next(n for n in paper_numbers() if (n.place, n.relation) == (place, relation))


def test_lms_are_known_by_their_names() -> None:
    of_lm = number("Table 2", "city->country")
    for name in (
        "meta-llama/Meta-Llama-3-8B",
        "/data/llama-3-8b/",
        "/c/models--meta-llama--Llama-3-8B/snapshots/4e20de36",
    ):
        assert of_lm.is_about(name)
    for name in ("meta-llama/Llama-3.1-8B", "me/llama-3-8b-finetuned", "tiny-world"):
        assert not of_lm.is_about(name)
    # The vocabulary of table 7 is that of Llama-3 of any size.
    of_family = number("Table 7", "ceo->company")
    for name in ("meta-llama/Llama-3.2-1B", "meta-llama/Meta-Llama-3-8B"):
        assert of_family.is_about(name)
    assert not of_family.is_about("gpt2-medium") and not of_family.is_about("tiny-world")


def test_quantities_are_found_in_runs(probe: Make, finetune: Make, ablation: Make) -> None:
    run = SavedRun.read(probe(r=0.9, hits=(0.1, 0.2, 0.3, 0.4, 0.5, 0.6)))
    known = quantities()
    assert known["label_mean"].of(run, "city->country") == 0.9
    assert known["label_std"].of(run, "city->country") is None
    assert known["label_mean"].of(run, "city->nothing") is None
    place, lines = size_figure()
    found = [line.of(run, "city->country") for line in lines]
    assert (place, found) == ("Figure 4", [0.1, 0.2, 0.3, 0.4, 0.5, 0.6])
    assert all(line.of(run, "city->color") is None for line in lines)
    edits = SavedRun.read(finetune(generalized=0.5))
    assert known["generalized"].of(edits, "city->country") == 0.5
    assert known["generalized"].of(edits, "city->color") is None
    assert known["logit_correlation"].of(edits, "city->country") is None
    assert known["weight_max"].of(edits, "city->country", "Shanghai") == 0.51
    assert known["weight_max"].of(edits, "city->country", "Oslo") is None
    assert known["weight_reference"].of(edits, "city->country", "Oslo") == 0.69
    assert known["weight_reference"].of(edits, "city->country", "Rome") is None
    assert known["label_mean"].of(edits, "city->country") is None
    mappings = SavedRun.read(ablation())
    assert known["mapping_permuted"].of(mappings, "city->country") == 0.25
    assert known["mapping_letters"].of(mappings, "city->country") is None
