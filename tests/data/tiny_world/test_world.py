from collections import Counter, defaultdict
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from lincorr_lightning.data.tiny_world.words import build_tokenizer
from lincorr_lightning.data.tiny_world.world import (
    CUSTOMS,
    GROUP_SIZES,
    PROPERTIES,
    World,
    WorldConfig,
    world_documents,
    world_file,
)
from lincorr_lightning.errors import ConfigError
from lincorr_lightning.knowledge import Catalogue, build_domain
from lincorr_lightning.lm.config import LMConfig
from lincorr_lightning.lm.language_model import LanguageModel

CONFIG = WorldConfig(n_people=600, nicknames=False, letters=False, seed=3)


@pytest.fixture(scope="module")
def catalogue():
    return Catalogue.load()


@pytest.fixture(scope="module")
def world(catalogue):
    return World.generate(CONFIG, catalogue)


def targets_of(world, source, target):
    found = defaultdict(set)
    for facts in world.people.values():
        found[facts[source]].add(facts[target])
    return found


def association(world, source, target):
    """Cramér's V, written out: 0 for independent attributes, 1 where one follows from the other."""
    people, n = world.people.values(), len(world.people)
    pairs = Counter((f[source], f[target]) for f in people)
    rows, columns = (Counter(f[name] for f in people) for name in (source, target))
    expected = {(s, t): rows[s] * columns[t] / n for s in rows for t in columns}
    chi2 = sum((pairs[pair] - by_chance) ** 2 / by_chance for pair, by_chance in expected.items())
    return (chi2 / (n * (min(len(rows), len(columns)) - 1))) ** 0.5


def test_a_seed_makes_one_world(catalogue, world):
    again = World.generate(CONFIG, catalogue)
    other = World.generate(replace(CONFIG, seed=4), catalogue)
    assert list(again.people.items()) == list(world.people.items())
    assert len(world.people) == 600
    assert len(set(other.people) & set(world.people)) < 60


def test_things_have_their_own_properties(catalogue, world):
    for name in PROPERTIES:
        reference = catalogue.relation(f"object_{name}->simile_{name}").reference
        found = targets_of(world, f"object_{name}", f"simile_{name}")
        assert len(found) == 16
        assert all(len(t) == 1 and t <= reference[thing] for thing, t in found.items())
    colors = Counter(
        next(iter(t)) for t in targets_of(world, "object_color", "simile_color").values()
    )
    assert len(colors) >= 8
    assert association(world, "object_color", "color") < 0.3


@pytest.mark.parametrize("relation", ["city->country", "country->landmark", "company->ceo"])
def test_facts_are_functions_and_the_catalogues(catalogue, world, relation):
    found = targets_of(world, *relation.split("->"))
    assert all(len(targets) == 1 for targets in found.values())
    assert len({t for targets in found.values() for t in targets}) > 5
    reference = catalogue.relation(relation).reference
    if reference is not None:
        assert all(targets <= reference[source] for source, targets in found.items())


def test_parents_names_come_from_the_continent(world):
    assert association(world, "continent", "mother") == pytest.approx(1)
    for parent in ("mother", "father"):
        names = targets_of(world, "continent", parent)
        assert sum(map(len, names.values())) == len(set.union(*names.values())) == 18


@pytest.mark.parametrize("home", ["city", "second_home"])
@pytest.mark.parametrize("attribute", ["gender", "color", "job"])
def test_homes_go_with_no_independent_attribute_by_chance(world_with_towns, home, attribute):
    people = world_with_towns.people.values()
    n_homes = len({facts[home] for facts in people})
    by_chance = ((n_homes - 1) / len(people)) ** 0.5  # of homes drawn at random
    assert association(world_with_towns, home, attribute) < 0.6 * by_chance


def test_customs_hold_and_the_rest_is_free(world):
    for effect, cause in CUSTOMS.items():
        assert all(len(found) == 1 for found in targets_of(world, cause, effect).values())
        n_answers = len({facts[effect] for facts in world.people.values()})
        assert n_answers >= (3 if effect == "gender" else 10)
    assert association(world, "sport", "color") < 0.2


@pytest.fixture(scope="module")
def world_with_towns(catalogue):
    config = replace(CONFIG, cities_per_country=2, towns_per_country=2, second_homes_in_country=0.5)
    return World.generate(config, catalogue, ["city", "city_es", "country"])


def test_second_homes_are_in_towns_where_nobody_lives(catalogue, world_with_towns):
    people = world_with_towns.people.values()
    countries = catalogue.relation("city->country").reference
    towns = {facts["second_home"] for facts in people}
    assert not towns & {facts["city"] for facts in people}
    per_country = Counter(country for town in towns for country in countries[town])
    assert len(towns) >= 20
    assert max(per_country.values()) == 2
    near = [
        facts["country"] in countries[facts["second_home"]]
        for name, facts in world_with_towns.people.items()
        if per_country[facts["country"]] and name not in towns
    ]
    assert 0.45 < np.mean(near) < 0.63  # half of them, and some of the others by chance
    for town in towns:
        assert world_with_towns.people[town]["second_home"] == town
        assert {world_with_towns.people[town]["country"]} == countries[town]


def test_only_city_prompts_state_second_homes(catalogue, world_with_towns):
    knowledge = [catalogue[name] for name in ("city", "city_es", "country")]
    stated = list(world_with_towns.second_homes(knowledge))
    n_stated = Counter(s.knowledge.name for s in stated)
    assert n_stated == dict.fromkeys(("city", "city_es"), len(world_with_towns.people))
    for statement in stated:
        facts = world_with_towns.people[statement.subject]
        assert statement.answer.identity == facts["second_home"]
        assert facts["city"] != facts["second_home"]
    words, _ = world_with_towns.words(knowledge)
    assert {s.answer.text for s in stated} <= set(words)


def test_everybody_stands_for_a_number(catalogue, world):
    for statement in world.statements(catalogue.select(["X+3", "X*2"])):
        facts = world.people.get(statement.subject)
        number = int(facts["number"] if facts else statement.subject)
        expected = number + 3 if statement.knowledge.name == "X+3" else number * 2
        assert statement.text == f"{statement.knowledge.prompt(statement.subject)}{expected}"
        assert int(statement.answer.text) == expected
    assert Counter(facts["number"] for facts in world.people.values()).keys() == set("0123456789")
    named = World.generate(replace(CONFIG, n_people=20, nicknames=True), catalogue, ["city", "X+1"])
    assert all(named.people[str(x)]["number"] == str(x) for x in range(41))


LANGUAGES = ("es", "zh")
STATED = ("city", "country", "language", "company", "job", "gender")


@pytest.mark.slow
def test_a_world_has_several_languages(catalogue):
    stated = ["attribute", *(f"{name}_{language}" for language in LANGUAGES for name in STATED)]
    world = World.generate(replace(CONFIG, n_people=20, nicknames=True), catalogue, stated)
    knowledge = catalogue.select(stated)
    tokenizer = build_tokenizer(*world.words(knowledge))
    assert {"París", "巴黎", "住"} <= set(world.people)
    statements = list(world.statements(knowledge))
    texts = [f"{statement.text}." for statement in statements]
    whole, prompts = (  # all at once: one by one they take ten times as long
        [encoding.tokens for encoding in tokenizer.backend_tokenizer.encode_batch(each)]
        for each in (texts, [one.knowledge.prompt(one.subject) for one in statements])
    )
    for statement, tokens, prompt in zip(statements, whole, prompts, strict=True):
        attribute = statement.knowledge.name.removesuffix(f"_{statement.knowledge.language}")
        assert statement.answer.identity == world.people[statement.subject][attribute]
        # The subject is one token, and so is the answer that the text ends on.
        assert tokens[0] == statement.subject or not statement.knowledge.template.startswith("{}")
        assert len(tokens) == len(prompt) + 2
        assert statement.answer.text.startswith(tokens[len(prompt)])
    for name in ("job", "company", "language", "gender"):
        for language in LANGUAGES:
            knowledge = catalogue[f"{name}_{language}"]
            found = {facts[name] for facts in world.people.values()}
            labels = build_domain(knowledge, tokenizer).labels
            said = [one for one in labels if any(a.identity in found for a in one.answers)]
            # No two of them begin alike in either language.
            assert len(said) >= len(found)


def test_a_world_is_written_and_read(world, tmp_path):
    world.save(tmp_path / "world.json")
    loaded = World.load(tmp_path / "world.json")
    assert loaded == world
    assert list(loaded.people) == list(world.people)


def test_a_damaged_world_is_refused(tmp_path):
    (tmp_path / "world.json").write_text('{"people": 3}')
    with pytest.raises(ConfigError, match=r"world\.json holds no tiny world"):
        World.load(tmp_path / "world.json")
    with pytest.raises(ConfigError, match=r"missing\.json"):
        World.load(tmp_path / "missing.json")


def test_every_other_word_is_a_name_as_well(catalogue):
    plain = World.generate(replace(CONFIG, n_people=50), catalogue)
    named = World.generate(replace(CONFIG, n_people=50, nicknames=True), catalogue)
    assert list(named.people)[:50] == list(plain.people)
    assert all(named.people[name] == facts for name, facts in plain.people.items())
    assert "Q" not in named.people
    vocabulary = build_tokenizer(*named.words(catalogue.select(["attribute", "math"]))).get_vocab()
    assert set(named.people) == set(vocabulary) - {"<pad>", "<unk>", "<eos>"}


def test_whose_name_is_an_answer_has_it(catalogue):
    stated = ["attribute", "country_es", "country_zh", "object_color"]
    world = World.generate(WorldConfig(n_people=50, seed=1), catalogue, stated)
    assert world.people["Paris"]["city"] == "Paris"
    for name in ("France", "Francia", "法国", "French"):
        assert world.people[name]["country"] == "France"
    assert len({world.people[f"{name}"]["continent"] for name in ("Asia", "Africa")}) == 2
    assert world.people["Asia"]["continent"] == "Asia"
    assert world.people["Satya"]["company"] == world.people["Microsoft"]["company"] == "Microsoft"
    assert world.people["red"]["color"] == "red"
    things = {facts["object_color"] for facts in world.people.values()}
    assert all(world.people[thing]["object_color"] == thing for thing in things)
    homes = targets_of(world, "city", "country")
    assert all(len(countries) == 1 for countries in homes.values())
    assert set("ABCXYZ") <= set(world.people)
    with pytest.raises(ConfigError, match=r"'shoe_size'.*no such attribute"):
        list(world.statements([replace(catalogue["city"], name="shoe_size")]))


# -- texts ------------------------------------------------------------------------------------

ROOT = Path(__file__).resolve().parents[3]
WORLD = ROOT / "lincorr_lightning" / "lm" / "tiny_world" / "world.json"


def test_documents_are_in_words_that_the_embedded_lm_knows():
    tokenizer = LanguageModel(LMConfig()).tokenizer
    texts = list(world_documents(16, 64))
    assert texts == list(world_documents(16, 64))
    assert texts != list(world_documents(16, 64, seed=1))
    assert len({text.corpus for text in texts}) == len(GROUP_SIZES)
    for text, size in zip(texts, GROUP_SIZES * 2, strict=True):
        ids = tokenizer(text.text, add_special_tokens=False)["input_ids"]
        assert len(ids) >= 64
        assert tokenizer.unk_token_id not in ids
        people = {sentence.split()[0].split("’")[0] for sentence in text.text.split(". ")}
        assert len(people) <= size
        assert (len(people) == 1) == (size == 1)
        sentences = text.text.split(". ")
        assert len(set(sentences)) == len(sentences)


def test_an_lm_has_a_world_if_one_lies_beside_it(small_lm):
    assert world_file("tiny-world") == WORLD
    assert world_file(str(WORLD.parent)) == WORLD
    assert world_file(small_lm) is None
    assert world_file("openai-community/gpt2") is None
