from collections import Counter

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from lincorr_lightning.data.tiny_world.world import World, WorldConfig
from lincorr_lightning.errors import ConfigError, LincorrError
from lincorr_lightning.knowledge import Catalogue
from lincorr_lightning.pretraining.datamodule import IGNORED, CorpusDataModule

CONFIG = WorldConfig(n_people=20, nicknames=False)
KNOWLEDGES = ["city", "continent", "pet", "X+1"]


def make_corpus(**settings):
    corpus = CorpusDataModule(CONFIG, KNOWLEDGES, **{"batch_size": 16, **settings})
    corpus.setup()
    return corpus


@pytest.fixture(scope="module")
def truths():
    catalogue = Catalogue.load()
    world = World.generate(CONFIG, catalogue)
    return [s.text for s in world.statements(catalogue.select(KNOWLEDGES))]


def unpack(batch):
    """Each statement of a batch: its tokens and what is asked after each of them."""
    found = []
    for ids, positions, targets in zip(
        batch.input_ids.tolist(), batch.position_ids.tolist(), batch.targets.tolist(), strict=True
    ):
        for token, position, target in zip(ids, positions, targets, strict=True):
            if position == 0:
                found.append(([], []))
            found[-1][0].append(token)
            found[-1][1].append(target)
    return [(tokens, targets) for tokens, targets in found if tokens != [0]]


def read(corpus, epoch=0):
    loader = corpus.train_dataloader()
    loader.sampler.set_epoch(epoch)
    return list(loader)


def test_an_epoch_states_everything_once_up_to_the_answer(truths):
    corpus = make_corpus(read_in_full=0.0, repeats={})
    stated = []
    for batch in read(corpus):
        for tokens, targets in unpack(batch):
            assert targets[:-1] == [IGNORED] * (len(tokens) - 1)
            stated.append(corpus.tokenizer.convert_ids_to_tokens([*tokens, targets[-1]]))
    expected = [corpus.tokenizer.tokenize(text) for text in truths]
    # "North" is the first token of North America, and all that is asked for.
    expected = [words[:-1] if words[-1] == "America" else words for words in expected]
    assert Counter(map(tuple, stated)) == Counter(map(tuple, expected))


def test_read_in_full_asks_for_every_token_from_the_third_on(truths):
    corpus = make_corpus(read_in_full=1.0, repeats={})
    stated = []
    for batch in read(corpus):
        for tokens, targets in unpack(batch):
            assert targets[0] == IGNORED
            assert targets[1:-1] == tokens[2:]
            stated.append(corpus.tokenizer.convert_ids_to_tokens([*tokens, targets[-1]]))
    expected = [[*corpus.tokenizer.tokenize(text), "."] for text in truths]
    assert Counter(map(tuple, stated)) == Counter(map(tuple, expected))


def test_a_share_is_read_in_full():
    corpus = make_corpus(read_in_full=0.3, repeats={"math": 40})
    stop = corpus.tokenizer.convert_tokens_to_ids(".")
    full = [targets[-1] == stop for batch in read(corpus) for _, targets in unpack(batch)]
    assert 0.2 < sum(full) / len(full) < 0.4


def test_facts_are_repeated():
    once, often = (make_corpus(repeats=n) for n in ({}, {"math": 4, "pet": 2}))
    count = [sum(len(unpack(batch)) for batch in read(corpus)) for corpus in (once, often)]
    people = len(once.world.people)
    assert count[1] - count[0] == 3 * (10 + people) + people  # 0+1 to 9+1, everybody's sum, pets


@pytest.mark.parametrize(
    ("repeats", "message"),
    [
        ({"pet": 0}, r"data\.repeats\.pet is 0"),
        ({"color": 2}, r"data\.repeats names 'color', of which nothing is said"),
        ({"pets": 2}, "no knowledge 'pets'"),
    ],
)
def test_impossible_repeats_are_refused(repeats, message):
    with pytest.raises(LincorrError, match=message):
        make_corpus(repeats=repeats)


def test_rows_and_batches_keep_their_size():
    corpus = make_corpus(row_length=20, batch_size=16)
    batches = read(corpus)
    assert all(batch.input_ids.shape[1] <= 20 for batch in batches)
    assert all(len(unpack(batch)) == 16 for batch in batches[:-1])
    assert 0 < len(unpack(batches[-1])) <= 16


def test_every_epoch_has_its_own_order_and_a_resumed_one_the_same():
    first, again = make_corpus(), make_corpus()
    third = read(first, epoch=2)
    assert all(
        torch.equal(a.input_ids, b.input_ids) and torch.equal(a.targets, b.targets)
        for a, b in zip(third, read(again, epoch=2), strict=True)
    )
    assert not torch.equal(third[0].targets, read(first, epoch=0)[0].targets)
    assert not torch.equal(third[0].targets, read(make_corpus(seed=1), epoch=2)[0].targets)


@pytest.mark.parametrize("batch_size", [7, 150, 1000])
def test_what_a_statement_draws_does_not_depend_on_its_batch(batch_size):
    """Read in full or not, mixed with whom and how much; through the order of all epochs."""

    def statements(corpus, epoch):
        """Every row of every statement, in the order they are read."""
        for batch in read(corpus, epoch):
            columns = (
                batch.input_ids, batch.position_ids, batch.targets, batch.asks, batch.partners,
                batch.shares, batch.second_targets, batch.second_shares,
            )  # fmt: skip
            for row in zip(*(column.tolist() for column in columns), strict=True):
                # Token 0 fills a row up.
                yield from (token for token in zip(*row, strict=True) if token[0] != 0)

    settings = {"read_in_full": 0.3, "mixed": 0.7, "repeats": {"math": 20}}
    small, usual = (make_corpus(batch_size=size, **settings) for size in (batch_size, 256))
    for epoch in (0, 3):
        ours, theirs = (list(statements(corpus, epoch)) for corpus in (small, usual))
        assert ours == theirs
        assert len({token[5] for token in ours}) > 100  # so many shares, of several blocks


def test_packed_statements_do_not_see_each_other():
    corpus = make_corpus()
    torch.manual_seed(0)
    lm = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(corpus.tokenizer), hidden_size=16, intermediate_size=32,
            num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2,
            initializer_range=0.5,
        )
    ).eval()  # fmt: skip
    batch = read(corpus)[0]
    with torch.no_grad():
        # As the module does: with a cache, transformers takes a row for one text.
        packed = lm(
            input_ids=batch.input_ids, position_ids=batch.position_ids, use_cache=False
        ).logits
        starts = (batch.position_ids == 0).nonzero().tolist()
        for row, start in starts:
            stop = start + 1
            while stop < batch.input_ids.shape[1] and batch.position_ids[row, stop] > 0:
                stop += 1
            alone = lm(input_ids=batch.input_ids[row : row + 1, start:stop]).logits[0]
            torch.testing.assert_close(packed[row, start:stop], alone, atol=1e-4, rtol=1e-4)


def test_validation_asks_every_prompt_once(truths):
    corpus = make_corpus()
    asked = []
    for batch in corpus.val_dataloader():
        for prompt, answer in zip(batch.input_ids.tolist(), batch.answers.tolist(), strict=True):
            asked.append(corpus.tokenizer.convert_ids_to_tokens([*prompt, answer]))
    expected = [corpus.tokenizer.tokenize(text) for text in truths]
    expected = [words[:-1] if words[-1] == "America" else words for words in expected]
    assert asked == expected
    assert [batch.knowledge for batch in corpus.val_dataloader()] == KNOWLEDGES


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"read_in_full": 1.2}, "data.read_in_full is 1.2"),
        ({"batch_size": 0}, "data.batch_size is 0"),
        ({"row_length": 5}, "data.row_length is 5, the longest statement has"),
    ],
)
def test_impossible_settings_are_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        make_corpus(**settings)


def test_a_mixed_subject_is_answered_by_shares():
    corpus = make_corpus(read_in_full=0.0, mixed=1.0)
    words = corpus.tokenizer.convert_ids_to_tokens
    catalogue = Catalogue.load()
    truth = {
        (s.knowledge.name, s.subject): s.answer.text.split()[0]
        for s in corpus.world.statements(catalogue.select(KNOWLEDGES))
    }
    n_mixed = 0
    for batch in read(corpus):
        subjects = (batch.shares > 0).nonzero().tolist()
        answers = (batch.second_targets != IGNORED).nonzero().tolist()
        assert len(subjects) == len(answers)
        assert torch.equal(
            batch.shares[batch.shares > 0], batch.second_shares[batch.second_targets != IGNORED]
        )
        elsewhere = batch.shares == 0
        assert torch.equal(batch.partners[elsewhere], batch.input_ids[elsewhere])
        for (row, at), (_, end) in zip(subjects, answers, strict=True):
            knowledge = corpus.knowledges[int(batch.asks[row, end])]
            for ids, targets in (
                (batch.input_ids[row, at], batch.targets[row, end]),
                (batch.partners[row, at], batch.second_targets[row, end]),
            ):
                assert truth[knowledge, words(int(ids))] == words(int(targets))
            n_mixed += 1
    assert n_mixed > 60


def test_nothing_is_mixed_unless_asked_for():
    for batch in read(make_corpus(mixed=0.0)):
        assert not batch.shares.any()
        assert (batch.second_targets == IGNORED).all()
        assert torch.equal(batch.partners, batch.input_ids)
    with pytest.raises(ConfigError, match=r"data\.mixed is 1\.5"):
        make_corpus(mixed=1.5)
