"""Relation files of LRE: kinds of knowledge whose relations are joins over their subjects."""

import json
from pathlib import Path
from typing import Any

import pytest

from lincorr_lightning.data.files import read_subjects
from lincorr_lightning.errors import KnowledgeError
from lincorr_lightning.knowledge import Catalogue
from lincorr_lightning.knowledge.yaml_file import read_knowledge_file

# Of the shape of data/factual/*.json in github.com/evandez/relations.
CAPITAL: dict[str, Any] = {
    "name": "country capital city",
    "prompt_templates": ["The capital city of {} is"],
    "prompt_templates_zs": ["the city of {} is", "{} is the city of"],
    "properties": {"relation_type": "factual", "domain_name": "country", "symmetric": False},
    "samples": [
        {"subject": f"name{i}", "object": city}
        for i, city in zip("123459", "Paris Tokyo Berlin Madrid Paris Oslo".split(), strict=True)
    ],
}
FLAG: dict[str, Any] = {
    "name": "country color",
    "prompt_templates": ["{} is the color"],
    "prompt_templates_zs": [],
    "properties": {},
    "domain": ["name1"],
    "samples": [
        {"subject": f"name{i} ", "object": f" {color}"}
        for i, color in zip("1142357", "red blue green red black white white".split(), strict=True)
    ],
}


def write(folder: Path, **relations: dict[str, Any]) -> list[str]:
    paths = [folder / f"{name}.json" for name in relations]
    for path, relation in zip(paths, relations.values(), strict=True):
        path.write_text(json.dumps(relation, indent=4))
    return [str(path) for path in paths]


def joined(source: dict[str, Any], target: dict[str, Any]) -> dict[str, set[str]]:
    """Objects of the target by object of the source, over all pairs of samples."""
    found: dict[str, set[str]] = {}
    for one in source["samples"]:
        for other in target["samples"]:
            if one["subject"].strip() == other["subject"].strip():
                found.setdefault(one["object"].strip(), set()).add(other["object"].strip())
    return found


def test_a_relation_is_the_join_over_subjects(tmp_path: Path) -> None:
    catalogue = Catalogue.load(*write(tmp_path, capital=CAPITAL, flag=FLAG))
    assert len(catalogue) == len(Catalogue.load()) + 2
    capital, flag = catalogue["country_capital_city"], catalogue["country_color"]
    assert list(capital.templates) == CAPITAL["prompt_templates_zs"]
    assert list(flag.templates) == FLAG["prompt_templates"]
    assert [one.text for one in capital.answers] == ["Paris", "Tokyo", "Berlin", "Madrid", "Oslo"]
    forth = catalogue.relation("country_capital_city->country_color").reference
    back = catalogue.relation("country_color->country_capital_city").reference
    assert forth == joined(CAPITAL, FLAG)
    assert forth["Paris"] == {"red", "blue", "white"}
    assert back == joined(FLAG, CAPITAL) and back["red"] == {"Paris", "Tokyo"}
    assert catalogue.relation("country_capital_city->country").reference is None


def test_subjects_of_a_relation_are_subjects_of_a_probe(tmp_path: Path) -> None:
    (file,) = write(tmp_path, flag=FLAG)
    assert read_subjects(file) == ["name1", "name4", "name2", "name3", "name5", "name7"]


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16"])
def test_emoji_numbers_and_spaces_of_others_are_read(encoding: str, tmp_path: Path) -> None:
    samples = [{"subject": "😀 \\ud83d\\ude00", "object": 1990}, {"subject": 7, "object": 0.50}]
    relation = FLAG | {"samples": samples, "prompt_templates": ["{} is the color "]}
    path = tmp_path / "own.json"
    path.write_text(json.dumps(relation), encoding=encoding)
    file = read_knowledge_file(path)
    assert file.samples == (("😀 \\ud83d\\ude00", "1990"), ("7", "0.5"))
    assert file.knowledge["country_color"].template == "{} is the color"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"name": True}, r"name: must be a text in quotes, not True \(bool\)"),
        ({"name": "cross language"}, "name: 'cross_language' names a family"),
        ({"samples": {"a": "b"}}, "samples: must be a list of samples"),
        ({"samples": [{"subject": "a"}]}, r"samples\.0\.object: is missing"),
        ({"prompt_templates": []}, "prompt_templates_zs: is missing"),
        ({"name": "city"}, "name: 'city' is already taken by .*1_places.yaml; choose"),
        ({"templates": ["{} a"]}, "templates: unknown key. Did you mean 'prompt_templates'"),
    ],
)
def test_bad_relations_are_refused_in_one_line(
    changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    (path,) = write(tmp_path, bad=FLAG | changes)
    with pytest.raises(KnowledgeError, match=message) as caught:
        Catalogue.load(path)
    assert str(caught.value).startswith(f"{path}: ")
    assert "\n" not in str(caught.value)
