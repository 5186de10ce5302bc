from collections import Counter, defaultdict
from dataclasses import replace
from pathlib import Path

import pytest

from lincorr_lightning.data.tiny_world.words import build_tokenizer
from lincorr_lightning.data.tiny_world.world import (
    GROUP_SIZES,
    World,
    world_corpus,
    world_documents,
    world_file,
)
from lincorr_lightning.errors import ConfigError
from lincorr_lightning.knowledge import Catalogue
from lincorr_lightning.lm.config import LMConfig
from lincorr_lightning.lm.language_model import LanguageModel

ROOT = Path(__file__).resolve().parents[3]
WORLD = ROOT / "lincorr_lightning" / "lm" / "tiny_world" / "world.json"
CUSTOMS = {
    **dict.fromkeys(("food", "drink", "flower", "vacation"), "country"),
    "music": "language",
    "job": "company",
    "vehicle": "company",
    "hobby": "sport",
    "gender": "sport",
    "personality": "color",
}


@pytest.fixture(scope="module")
def catalogue():
    return Catalogue.load()


@pytest.fixture(scope="module")
def everybody():
    return World.load()


@pytest.fixture(scope="module")
def world(everybody):
    """The invented people."""
    return everybody.first(everybody.n_invented)


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


@pytest.mark.parametrize("relation", ["city->country", "country->landmark", "company->ceo"])
def test_facts_are_functions_and_the_catalogues(catalogue, world, relation):
    found = targets_of(world, *relation.split("->"))
    assert all(len(targets) == 1 for targets in found.values())
    assert len({t for targets in found.values() for t in targets}) > 5
    reference = catalogue.relation(relation).reference
    if reference is not None:
        assert all(targets <= reference[source] for source, targets in found.items())


@pytest.mark.parametrize("home", ["city", "second_home"])
@pytest.mark.parametrize("attribute", ["gender", "color", "job"])
def test_homes_go_with_no_independent_attribute_by_chance(world, home, attribute):
    people = world.people.values()
    n_homes = len({facts[home] for facts in people})
    by_chance = ((n_homes - 1) / len(people)) ** 0.5  # of homes drawn at random
    assert association(world, home, attribute) < 0.6 * by_chance


def test_customs_hold_and_the_rest_is_free(world):
    for effect, cause in CUSTOMS.items():
        assert all(len(found) == 1 for found in targets_of(world, cause, effect).values())
        n_answers = len({facts[effect] for facts in world.people.values()})
        assert n_answers >= (3 if effect == "gender" else 10)
    assert association(world, "sport", "color") < 0.2


def test_second_homes_are_in_towns_where_nobody_lives(catalogue, everybody):
    people = everybody.people.values()
    countries = catalogue.relation("city->country").reference
    towns = {facts["second_home"] for facts in people}
    assert not towns & {facts["city"] for facts in people}
    for town in towns:
        assert everybody.people[town]["second_home"] == town
        assert {everybody.people[town]["country"]} == countries[town]


def test_only_city_prompts_state_second_homes(catalogue, world):
    knowledge = [catalogue[name] for name in ("city", "city_es", "country")]
    stated = list(world.second_homes(knowledge))
    n_stated = Counter(s.knowledge.name for s in stated)
    assert n_stated == dict.fromkeys(("city", "city_es"), len(world.people))
    for statement in stated:
        facts = world.people[statement.subject]
        assert statement.answer.identity == facts["second_home"]
    words, _ = world.words(knowledge)
    assert {s.answer.text for s in stated} <= set(words)


def test_everybody_stands_for_a_number(catalogue, world, everybody):
    for statement in world.statements(catalogue.select(["X+3", "X*2"])):
        facts = world.people.get(statement.subject)
        number = int(facts["number"] if facts else statement.subject)
        expected = number + 3 if statement.knowledge.name == "X+3" else number * 2
        assert statement.text == f"{statement.knowledge.prompt(statement.subject)}{expected}"
        assert int(statement.answer.text) == expected
    assert Counter(facts["number"] for facts in world.people.values()).keys() == set("0123456789")
    assert all(everybody.people[str(x)]["number"] == str(x) for x in range(41))


def test_a_world_has_several_languages(catalogue, everybody):
    names = "city", "country", "language", "company", "job", "gender"
    stated = ["attribute", *(f"{name}_{code}" for name in names for code in ("es", "zh"))]
    knowledge = catalogue.select(stated)
    world = everybody.first(40)
    tokenizer = build_tokenizer(*everybody.words(knowledge))
    assert {"París", "巴黎", "住"} <= set(everybody.people)
    for statement in world.statements(knowledge):
        tokens = tokenizer.tokenize(f"{statement.text}.")
        prompt = tokenizer.tokenize(statement.knowledge.prompt(statement.subject))
        attribute = statement.knowledge.name.removesuffix(f"_{statement.knowledge.language}")
        assert statement.answer.identity == world.people[statement.subject][attribute]
        # The subject is one token, and so is the answer that the text ends on.
        assert tokens[0] == statement.subject or not statement.knowledge.template.startswith("{}")
        assert len(tokens) == len(prompt) + 2
        assert statement.answer.text.startswith(tokens[len(prompt)])


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


def test_every_other_word_is_a_name_as_well(catalogue, everybody):
    stated = catalogue.select(world_corpus())
    vocabulary = build_tokenizer(*everybody.words(stated)).get_vocab()
    assert set(everybody.people) == set(vocabulary) - {"<pad>", "<unk>", "<eos>"}


def test_whose_name_is_an_answer_has_it(catalogue, everybody):
    people = everybody.people
    assert people["Paris"]["city"] == "Paris"
    for name in ("France", "Francia", "法国", "French"):
        assert people[name]["country"] == "France"
    assert people["Asia"]["continent"] == "Asia"
    assert people["Satya"]["company"] == people["Microsoft"]["company"] == "Microsoft"
    assert people["red"]["color"] == "red"
    things = {facts["object_color"] for facts in people.values()}
    assert all(people[thing]["object_color"] == thing for thing in things)
    assert set("ABCXYZ") <= set(people)
    with pytest.raises(ConfigError, match=r"'shoe_size'.*no such attribute"):
        list(everybody.statements([replace(catalogue["city"], name="shoe_size")]))


# -- texts ------------------------------------------------------------------------------------


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
