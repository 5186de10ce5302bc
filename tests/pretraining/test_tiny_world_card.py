"""The card of the tiny world states the numbers of the files beside it."""

import json
import re
from importlib.resources import files
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from lincorr_lightning import Catalogue, LanguageModel

FOLDER = Path(str(files("lincorr_lightning.lm") / "tiny_world"))
TEXT = (FOLDER / "CARD.md").read_text(encoding="utf-8")
REGENERATE = "write the card again: python -m benchmarks.docs_tables.tiny_world_card"
WORLD = json.loads((FOLDER / "world.json").read_text(encoding="utf-8"))


def number(pattern: str) -> float:
    """The number that stands in the text where the pattern has a group."""
    found = re.search(pattern.replace(" ", r"\s+"), TEXT)
    assert found is not None, (pattern, REGENERATE)
    return float(found[1].replace(",", ""))


def rows() -> dict[str, list[str]]:
    lines = [line for line in TEXT.splitlines() if line.startswith("| ")]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]
    return {first: rest for first, *rest in cells}


def test_sizes_are_those_of_the_files() -> None:
    config = json.loads((FOLDER / "config.json").read_text(encoding="utf-8"))
    assert number(r"\(([\d,]+) layers") == config["num_hidden_layers"], REGENERATE
    assert number(r"width ([\d,]+)") == config["hidden_size"], REGENERATE
    assert number(r"vocabulary of ([\d,]+)\.") == config["vocab_size"], REGENERATE
    with safe_open(FOLDER / "model.safetensors", "np") as weights:
        shapes = [weights.get_slice(name).get_shape() for name in weights.keys()]  # noqa: SIM118
    n_parameters = sum(torch.Size(shape).numel() for shape in shapes)
    assert number(r"Llama of ([\d.]+) million") == round(n_parameters / 1e6, 1), REGENERATE


def test_the_data_are_those_of_the_world() -> None:
    n_people = WORLD["config"]["n_people"]
    invented = list(WORLD["people"].values())[:n_people]
    column = list(WORLD["answers"]).index
    assert number(r"([\d,]+) invented people") == n_people, REGENERATE
    for kind, pattern in (("city", r"in (\d+) cities"), ("country", r"of (\d+) real countries")):
        assert number(pattern) == len({row[column(kind)] for row in invented}), REGENERATE
    assert number(r"there are ([\d,]+) subjects") == len(WORLD["people"]), REGENERATE
    table = rows()
    for name, n_kinds in (("attributes", 23), ("objects and similes", 10), ("in Spanish", 8)):
        assert table[name][:2] == [str(n_kinds), f"{n_kinds * len(WORLD['people']):,}"]
    n_facts = sum(int(row[1].replace(",", "")) for row in table.values())
    assert number(r"the ([\d,]+) facts") == n_facts, REGENERATE


@pytest.mark.nightly
@pytest.mark.parametrize("group", ["attributes", "in Chinese"])
def test_the_least_recall_is_that_of_the_weights(group: str) -> None:
    """Prompts as text, encoded with padding; answers from the file, by their first word."""
    name, share = rows()[group][3].replace("\\", "").split(", ")
    lm, knowledge = LanguageModel.from_pretrained("tiny-world"), Catalogue.load()[name]
    attribute = name.removesuffix("_zh")
    column, identities = list(WORLD["answers"]).index(attribute), WORLD["answers"][attribute]
    text = {answer.identity: answer.text for answer in reversed(knowledge.answers)}
    right = 0
    for subject, row in WORLD["people"].items():
        ids = lm.tokenizer(knowledge.prompt(subject), add_special_tokens=False)["input_ids"]
        gap = " " if knowledge.leading_space else ""
        whole = knowledge.prompt(subject) + gap + text[identities[row[column]]]
        answer = lm.tokenizer(whole, add_special_tokens=False)["input_ids"][len(ids)]
        with torch.no_grad():
            logits = lm.model(torch.tensor([ids]), use_cache=False).logits[0, -1]
        right += int(logits.argmax()) == answer
    assert right / len(WORLD["people"]) == pytest.approx(float(share.strip("%")) / 100, abs=0.005)
