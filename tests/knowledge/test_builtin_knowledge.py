"""The shipped knowledge: complete, at least as large as the paper's, without loose ends."""

import itertools
import re

import pytest

from lincorr_lightning.knowledge import Catalogue

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

# Paper, tables 12 and 13.
TRANSLATED = (
    "birthplace city country continent language company ceo job mother father gender"
).split()
LANGUAGES = ("es", "fr", "de", "zh", "ja")
KINDS = ("color", "price", "heat", "genre", "size")
SIMILES = dict.fromkeys((f"object_{kind}" for kind in KINDS), 85) | {
    "simile_color": 15,
    "simile_price": 2,
    "simile_heat": 4,
    "simile_genre": 22,
    "simile_size": 3,
    "simile_taste": 3,
    "name_country": 128,
    "gem_color": 50,
    "animal_size": 100,
    "food_taste": 95,
    "fruit_color": 99,
}
RELATIONS = (
    *"city->country country->continent country->language language->continent".split(),
    *"ceo->company landmark->country name_country->country food_taste->simile_taste".split(),
    *"fruit_color->simile_color gem_color->simile_color animal_size->simile_size".split(),
    *(f"object_{kind}->simile_{kind}" for kind in KINDS),
    *(f"{name}->{name}_{code}" for name in TRANSLATED for code in LANGUAGES),
    *(f"city_{language}->country_{language}" for language in LANGUAGES),
)

COMPLETE = ("city->country", "country->continent", "country->language", "ceo->company")


@pytest.fixture(scope="module")
def catalogue():
    return Catalogue.load()


def identities(knowledge):
    return list(dict.fromkeys(answer.identity for answer in knowledge.answers))


def test_attributes_are_the_papers(catalogue):
    assert len([one for one in catalogue.values() if one.family != "control"]) == 110
    for name, (template, _) in ATTRIBUTES.items():
        knowledge = catalogue[name]
        assert knowledge.template == template
        assert (knowledge.family, knowledge.language) == ("attribute", "en")
        assert knowledge.leading_space


def test_paraphrases_are_other_prompts_of_the_same_answers(catalogue):
    """They end before the answer, as the template does, and name what they ask for."""
    for name in ("city", "country", "continent", "language", "ceo", "company", "color"):
        knowledge = catalogue[name]
        wordings = (knowledge.template, *knowledge.paraphrases)
        assert len(set(wordings)) == len(wordings) >= 5
        for wording in knowledge.paraphrases:
            assert wording.count("{}") == 1
            assert wording == wording.strip()
            assert name in re.findall(r"\w+", wording.lower())


def test_small_domains_are_the_papers_and_others_at_least_as_large(catalogue):
    for name, size in (SIMILES | {name: size for name, (_, size) in ATTRIBUTES.items()}).items():
        assert catalogue[name].paper_size == size
        n_identities = len(identities(catalogue[name]))
        assert n_identities == size if size <= 22 else n_identities >= size, name


def test_a_translation_names_every_entity(catalogue):
    for name, code in itertools.product(TRANSLATED, LANGUAGES):
        knowledge = catalogue[f"{name}_{code}"]
        assert identities(knowledge) == identities(catalogue[name])
        assert knowledge.language == code
        assert knowledge.leading_space == (code not in ("zh", "ja"))
        assert knowledge.paper_size == catalogue[name].paper_size


def test_nearly_every_source_has_a_reference(catalogue):
    for name in RELATIONS:
        relation = catalogue.relation(name)
        assert relation.reference is not None, name
        sources = identities(relation.source)
        known = [source for source in sources if relation.reference.get(source)]
        share = 1 if name in COMPLETE else 0.95
        assert len(known) >= share * len(sources), (name, set(sources) - set(known))
