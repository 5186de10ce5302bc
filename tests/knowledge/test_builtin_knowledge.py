"""The shipped knowledge: complete, as large as the paper's, and without loose ends."""

import time
from importlib.resources import files

import pytest
import yaml

from lincorr_lightning.knowledge import Catalogue, build_domain
from lincorr_lightning.knowledge.yaml_file import parse_knowledge_file

# Paper, table 10: template and size of the domain.
ATTRIBUTES = {
    "birthplace": ("{} was born in the city of", 242),
    "city": ("{} lives in the city of", 242),
    "country": ("{} lives in the country of", 128),
    "continent": ("{} lives in the continent of", 6),
    "language": ("{} speaks the language of", 217),
    "company": ("{} works for the company of", 100),
    "landmark": ("{} lives near the landmark of", 100),
    "ceo": ("{} works for the CEO called", 101),
    "mother": ("{}’s mother’s name is", 100),
    "father": ("{}’s father’s name is", 100),
    "job": ("{}’s job is", 105),
    "personality": ("{}’s personality is", 100),
    "pet": ("{}’s pet is", 100),
    "sport": ("{}’s favorite sport is", 102),
    "food": ("{}’s favorite food is", 104),
    "drink": ("{}’s favorite drink is", 102),
    "gender": ("{}’s gender is", 3),
    "vehicle": ("{}’s preferred mode of transportation is", 51),
    "color": ("{}’s favorite color is", 15),
    "music": ("{}’s favorite music genre is", 100),
    "hobby": ("{}’s favorite hobby is", 101),
    "flower": ("{}’s favorite flower is", 97),
    "vacation": ("{}’s favorite vacation spot is", 101),
}


@pytest.fixture(scope="module")
def catalogue():
    return Catalogue.load()


def identities(knowledge):
    return list(dict.fromkeys(answer.identity for answer in knowledge.answers))


def test_all_attributes_and_math_are_there(catalogue):
    attributes = {knowledge.name for knowledge in catalogue.select(["attribute"])}
    assert attributes == set(ATTRIBUTES)
    assert len(catalogue.select(["math"])) == 16


@pytest.mark.parametrize("name", ATTRIBUTES)
def test_an_attribute_is_the_papers(catalogue, name):
    template, size = ATTRIBUTES[name]
    knowledge = catalogue[name]
    assert knowledge.template == template
    assert (knowledge.family, knowledge.language) == ("attribute", "en")
    assert knowledge.leading_space
    n_identities = len(identities(knowledge))
    if size < 20:
        assert n_identities == size
    else:
        assert abs(n_identities - size) <= 0.15 * size


def test_every_city_lies_in_one_country(catalogue):
    reference = catalogue.relation("city->country").reference
    countries = set(identities(catalogue["country"]))
    for city in identities(catalogue["city"]):
        assert len(reference[city]) == 1, city
        assert reference[city] <= countries, city


def test_every_country_has_a_continent_and_a_language(catalogue):
    for target in ("continent", "language"):
        reference = catalogue.relation(f"country->{target}").reference
        known = set(identities(catalogue[target]))
        for country in identities(catalogue["country"]):
            assert reference[country], country
            assert reference[country] <= known, country


def test_every_ceo_leads_a_company(catalogue):
    reference = catalogue.relation("ceo->company").reference
    companies = set(identities(catalogue["company"]))
    for ceo in identities(catalogue["ceo"]):
        assert reference[ceo], ceo
        assert reference[ceo] <= companies, ceo


@pytest.mark.parametrize(
    ("relation", "source", "targets"),
    [
        ("city->country", "Paris", {"France"}),
        ("city->country", "Tokyo", {"Japan"}),
        ("country->continent", "France", {"Europe"}),
        ("country->continent", "Brazil", {"South America"}),
        ("country->language", "Japan", {"Japanese"}),
        ("birthplace->country", "Rome", {"Italy"}),
    ],
)
def test_some_facts_everybody_knows(catalogue, relation, source, targets):
    assert catalogue.relation(relation).reference[source] == targets


def test_several_right_answers_and_aliases(catalogue):
    languages = catalogue.relation("country->language").reference
    assert {"French", "German"} <= languages["Switzerland"]
    texts = {answer.text: answer.identity for answer in catalogue["country"].answers}
    assert texts["America"] == texts["USA"]


def test_every_data_file_says_where_its_facts_come_from():
    data = list(files("lincorr_lightning.knowledge").joinpath("data").iterdir())
    assert data
    for file in data:
        content = yaml.safe_load(file.read_text(encoding="utf-8"))
        assert content["version"] == 1
        assert len(content["source"]) > 20, file.name


def test_reading_all_data_takes_well_under_a_second():
    start = time.process_time()
    for file in files("lincorr_lightning.knowledge").joinpath("data").iterdir():
        parse_knowledge_file(file.read_text(encoding="utf-8"), file.name)
    assert time.process_time() - start < 1.0


def test_all_domains_of_a_tokenizer_take_under_a_second(catalogue, word_level, byte_level):
    from lincorr_lightning.knowledge import audit_rows

    start = time.process_time()
    rows = audit_rows(catalogue.values(), byte_level)
    assert time.process_time() - start < 1.0
    by_name = {row.domain.knowledge.name: row.domain for row in rows}
    # The training text of the fixtures knows these words and few others.
    assert {"Paris", "Rome", "Tokyo"} <= set(by_name["city"].texts)
    assert set(build_domain(catalogue["country"], word_level).texts) >= {"France", "Italy", "South"}
