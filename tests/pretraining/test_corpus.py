"""What the training text states, and what it withholds."""

from dataclasses import replace

import pytest

from lincorr_lightning.data.tiny_world.world import WorldConfig
from lincorr_lightning.errors import ConfigError
from lincorr_lightning.knowledge import Catalogue
from lincorr_lightning.pretraining.corpus import build_corpus
from lincorr_lightning.pretraining.datamodule import PackedStatements, recall_prompts

WORLD = WorldConfig(n_people=30, nicknames=False)


def make_corpus(stated, world=WORLD, **options):
    return build_corpus(world, Catalogue.load(), stated, "city->country", **options)


@pytest.mark.parametrize("cooccurrence", [0.0, 0.25, 1.0])
def test_both_are_stated_of_a_share_of_the_people(cooccurrence):
    corpus = make_corpus(["city", "country"], cooccurrence=cooccurrence)
    facts = {name: corpus.facts(name) for name in ("city", "country")}
    stated = {name: {s.subject for s in said} for name, (said, _) in facts.items()}
    people = set(corpus.world.people)
    assert stated["city"] | stated["country"] == people
    assert len(stated["city"] & stated["country"]) == round(cooccurrence * len(people))
    assert abs(len(stated["city"]) - len(stated["country"])) <= 1
    for name, (said, withheld) in facts.items():
        assert {s.subject for s in withheld} == people - stated[name]
        for statement in (*said, *withheld):
            assert statement.answer.identity == corpus.world.people[statement.subject][name]
    encoded = {
        (corpus.knowledge[s.knowledge], corpus.tokenizer.decode(s.tokens[s.subject]))
        for s in corpus.encoded
    }
    assert encoded == {(name, person) for name, members in stated.items() for person in members}


def test_the_pair_must_be_stated():
    with pytest.raises(ConfigError, match=r"data\.pair is .*, but country is not stated"):
        make_corpus(["city", "color"])


def test_only_stated_answers_are_answers():
    corpus = make_corpus(["city", "country"])
    for name, answers in zip(corpus.knowledge, corpus.answers, strict=True):
        words = {statement.text.split()[-1] for statement in corpus.facts(name)[0]}
        assert set(corpus.tokenizer.convert_ids_to_tokens(answers)) == words


def test_second_homes_are_learned_and_do_not_count_in_recall():
    corpus = make_corpus(["city", "country"], replace(WORLD, towns_per_country=1))
    people = corpus.world.people
    names = corpus.tokenizer.convert_ids_to_tokens
    stated = {names(s.tokens[s.subject]): names(s.answer) for s in corpus.encoded_second_homes}
    assert stated == {person: facts["second_home"] for person, facts in people.items()}
    learned = PackedStatements(corpus, repeats=[5, 1], second_home_repeats=2)
    assert len(learned._statements) == (5 + 1 + 2) * len(people)
    city = corpus.knowledge.index("city")
    assert set(stated.values()) <= set(names(corpus.answers[city]))
    recalled = set(names(recall_prompts(corpus)[city].answers.tolist()))
    assert recalled == {facts["city"] for facts in people.values()}


def test_a_withheld_city_withholds_the_second_home():
    world = replace(WORLD, towns_per_country=1)
    corpus = make_corpus(["city", "country"], world, cooccurrence=0.0)
    stated = {s.subject for s in corpus.facts("city")[0]}
    assert {s.subject for s in corpus.second_homes} == stated
    assert len(stated) == len(corpus.world.people) // 2
