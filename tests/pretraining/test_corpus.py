"""What the training text states."""

from lincorr_lightning.data.tiny_world.world import World
from lincorr_lightning.knowledge import Catalogue
from lincorr_lightning.pretraining.corpus import Corpus
from lincorr_lightning.pretraining.datamodule import PackedStatements, recall_prompts


def make_corpus(stated):
    world = World.load().first(30)
    return Corpus.of(world, Catalogue.load().select(stated))


def test_each_fact_of_each_person_is_stated_once():
    corpus = make_corpus(["city", "country"])
    facts = [
        (name, person, answers[name])
        for name in ("city", "country")
        for person, answers in corpus.world.people.items()
    ]
    names = corpus.tokenizer.convert_ids_to_tokens
    stated = [
        (corpus.knowledge[s.knowledge], *names([s.tokens[0], s.answer])) for s in corpus.encoded
    ]
    assert sorted(stated) == sorted((*fact, answer.split()[0]) for *fact, answer in facts)


def test_second_homes_are_learned_and_do_not_count_in_recall():
    corpus = make_corpus(["city", "country"])
    people = corpus.world.people
    names = corpus.tokenizer.convert_ids_to_tokens
    stated = {names(s.tokens[0]): names(s.answer) for s in corpus.second_homes}
    assert stated == {person: facts["second_home"] for person, facts in people.items()}
    learned = PackedStatements(corpus, repeats=[5, 1], second_home_repeats=2)
    assert len(learned._statements) == (5 + 1 + 2) * len(people)
    city = corpus.knowledge.index("city")
    assert set(stated.values()) <= set(names(corpus.answers[city]))
    recalled = set(names(recall_prompts(corpus)[city].answers.tolist()))
    assert recalled == {facts["city"] for facts in people.values()}
