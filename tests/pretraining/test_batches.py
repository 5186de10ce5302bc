"""What an epoch states, and how statements are packed, and mixed."""

from collections import Counter

import pytest
import torch

from lincorr_lightning.data.tiny_world.world import World
from lincorr_lightning.errors import ConfigError
from lincorr_lightning.knowledge import Catalogue
from lincorr_lightning.pretraining.datamodule import IGNORED, CorpusDataModule, PackedStatements
from tests.toys import toy_model

KNOWLEDGE = ["city", "continent", "pet", "X+1"]


def make_data(**settings):
    defaults = {"batch_size": 16, "second_home_repeats": 0}
    data = CorpusDataModule(20, KNOWLEDGE, **defaults | settings)
    data.setup()
    return data


@pytest.fixture(scope="module")
def truths():
    catalogue = Catalogue.load()
    world = World.load().first(20)
    return [s.text for s in world.statements(catalogue.select(KNOWLEDGE))]


def unpack(batch):
    """Each statement of a batch: its tokens and the target after each of them."""
    found = []
    columns = (batch.input_ids, batch.position_ids, batch.targets)
    for token, position, target in zip(*(c.flatten().tolist() for c in columns), strict=True):
        if position == 0:
            found.append(([], []))
        found[-1][0].append(token)
        found[-1][1].append(target)
    return [(tokens, targets) for tokens, targets in found if tokens != [0]]


def read(data, epoch=0):
    loader = data.train_dataloader()
    loader.sampler.set_epoch(epoch)
    return list(loader)


@pytest.mark.parametrize("full", [False, True])
def test_an_epoch_states_everything_once(truths, full):
    """Up to the answer; with full loss, every token from the third on is a target."""
    data = make_data(full_loss_fraction=float(full), repeats={})
    tokenizer = data.corpus.tokenizer
    stated = []
    for batch in read(data):
        for tokens, targets in unpack(batch):
            assert targets[0] == IGNORED
            assert targets[1:-1] == (tokens[2:] if full else [IGNORED] * (len(tokens) - 2))
            stated.append(tokenizer.convert_ids_to_tokens([*tokens, targets[-1]]))
    expected = [[*tokenizer.tokenize(text), "."] for text in truths]
    if not full:
        expected = [up_to_the_answer(words) for words in expected]
    assert Counter(map(tuple, stated)) == Counter(map(tuple, expected))


def up_to_the_answer(words):
    """Without the full stop; "North" is the first token of North America, and the only target."""
    return words[: -2 if words[-2] == "America" else -1]


def test_facts_are_repeated():
    once, often = (make_data(repeats=n) for n in ({}, {"math": 4, "pet": 2}))
    count = [sum(len(unpack(batch)) for batch in read(data)) for data in (once, often)]
    people = len(once.corpus.world.people)
    assert count[1] - count[0] == 3 * (10 + people) + people  # 0+1 to 9+1, everybody's sum, pets


def test_every_epoch_has_its_own_order_and_a_resumed_one_the_same():
    first, again = make_data(), make_data()
    third = read(first, epoch=2)
    for one, other in zip(third, read(again, epoch=2), strict=True):
        assert torch.equal(one.input_ids, other.input_ids)
        assert torch.equal(one.targets, other.targets)
    assert not torch.equal(third[0].targets, read(first, epoch=0)[0].targets)
    assert not torch.equal(third[0].targets, read(make_data(seed=1), epoch=2)[0].targets)


def test_what_a_statement_draws_does_not_depend_on_its_batch():
    """Full loss or not, through the order of all epochs."""

    def statements(data, epoch):
        return [statement for batch in read(data, epoch) for statement in unpack(batch)]

    settings = {"full_loss_fraction": 0.3, "repeats": {"math": 40}}
    small, usual = (make_data(batch_size=size, **settings) for size in (7, 256))
    for epoch in (0, 3):
        assert statements(small, epoch) == statements(usual, epoch)
    stop = small.corpus.tokenizer.convert_tokens_to_ids(".")
    full = [targets[-1] == stop for _, targets in statements(small, 0)]
    assert 0.2 < sum(full) / len(full) < 0.4


def test_packed_statements_do_not_see_each_other():
    data = make_data()
    lm = toy_model("llama-tied", len(data.corpus.tokenizer), max_position_embeddings=64)
    batch = read(data)[0]
    with torch.no_grad():
        # As the module does: with a cache, transformers takes a row for one text.
        ids, positions = batch.input_ids, batch.position_ids
        packed = lm(input_ids=ids, position_ids=positions, use_cache=False).logits
        for row, start in (positions == 0).nonzero().tolist():
            stop = start + 1
            while stop < ids.shape[1] and positions[row, stop] > 0:
                stop += 1
            alone = lm(input_ids=ids[row : row + 1, start:stop]).logits[0]
            torch.testing.assert_close(packed[row, start:stop], alone, atol=1e-4, rtol=1e-4)


def test_validation_reads_every_prompt_once(truths):
    data = make_data()
    prompts = []
    for batch in data.val_dataloader():
        for prompt, answer in zip(batch.input_ids.tolist(), batch.answers.tolist(), strict=True):
            prompts.append(data.corpus.tokenizer.convert_ids_to_tokens([*prompt, answer]))
    texts = ([*data.corpus.tokenizer.tokenize(text), "."] for text in truths)
    assert prompts == list(map(up_to_the_answer, texts))
    assert [batch.knowledge for batch in data.val_dataloader()] == KNOWLEDGE


def test_repeats_of_what_is_not_stated_are_refused():
    with pytest.raises(ConfigError, match=r"data\.repeats names 'color', which is not stated"):
        make_data(repeats={"color": 2})


def test_ranks_share_the_batches_of_a_step():
    corpus = make_data().corpus
    whole = PackedStatements(corpus, batch_size=16)
    assert len(whole) % 3  # so that the last step has fewer batches than ranks
    parts = [PackedStatements(corpus, batch_size=16, rank=rank, n_shards=3) for rank in range(3)]
    assert len({len(part) for part in parts}) == 1
    for epoch in (0, 2):
        steps = range(epoch * len(parts[0]), (epoch + 1) * len(parts[0]))
        read_ones = [part[step] for step in steps for part in parts]
        counted = [batch for batch in read_ones if not batch.is_padding]
        assert len(counted) == len(whole) < len(read_ones)
        for i, batch in enumerate(counted):
            assert torch.equal(batch.input_ids, whole[epoch * len(whole) + i].input_ids)
