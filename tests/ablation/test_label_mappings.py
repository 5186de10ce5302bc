"""Who is told which answer, and that nothing gives it away."""

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from transformers import AutoTokenizer

from lincorr_lightning.ablation.datamodule import PairedTextsDataModule
from lincorr_lightning.ablation.mappings import map_labels, pair_labels
from lincorr_lightning.ablation.token_embedding import read_token_embedding
from lincorr_lightning.errors import ConfigError, DomainError, KnowledgeError, SubjectsError
from lincorr_lightning.knowledge import Catalogue, TokenizedRelation
from lincorr_lightning.lm.config import LMConfig


@pytest.fixture(scope="module")
def tokenizer(small_lm):
    return AutoTokenizer.from_pretrained(small_lm)


@pytest.fixture(scope="module")
def world_tokenizer():
    return read_token_embedding(LMConfig()).tokenizer


@pytest.fixture(scope="module")
def asked(tokenizer):
    return TokenizedRelation.of("city->country", Catalogue.load(), tokenizer)


def test_each_source_has_a_target_of_its_own_while_there_are(world_tokenizer):
    asked = TokenizedRelation.of("city->country", Catalogue.load(), world_tokenizer)
    countries = {int(np.flatnonzero(column)[0]) for column in asked.right.T if column.any()}
    few = pair_labels(asked, 12, seed=3)
    assert len(few.sources) == 12
    assert len(set(few.targets)) == 12
    many = pair_labels(asked, len(countries) + 5, seed=3)
    assert len(set(many.targets)) == len(countries)
    assert all(asked.right[t, s] for s, t in zip(many.sources, many.targets, strict=True))
    assert pair_labels(asked, 12, seed=4).sources != few.sources


def test_permuted_gives_nobody_what_is_right(world_tokenizer):
    for name in ("city->country", "country->continent"):
        pairs = pair_labels(TokenizedRelation.of(name, Catalogue.load(), world_tokenizer))
        true = map_labels(pairs, "reference", world_tokenizer)
        seen = set()
        for seed in range(5):
            mixed = map_labels(pairs, "permuted", world_tokenizer, seed)
            assert mixed.source_tokens == true.source_tokens
            assert Counter(mixed.target_tokens) == Counter(true.target_tokens)
            assert mixed.domain_tokens == true.domain_tokens
            place = {token: i for i, token in enumerate(true.domain_tokens)}
            told = [place[token] for token in mixed.target_tokens]
            rows = range(len(told))
            assert not true.right[rows, told].any()  # no fixed point in the reference
            assert mixed.right[rows, told].all()
            seen.add(mixed.target_tokens)
        assert len(seen) > 1


def test_no_permutation_where_one_target_is_right_for_most(asked, tokenizer):
    right = np.zeros_like(asked.right)
    right[0, :] = True
    pairs = pair_labels(replace(asked, right=right))
    with pytest.raises(ConfigError, match="more than half"):
        map_labels(pairs, "permuted", tokenizer)


def test_letters_are_the_first_of_both_answers(world_tokenizer):
    pairs = pair_labels(
        TokenizedRelation.of("city->country", Catalogue.load(), world_tokenizer), 15
    )
    cut = map_labels(pairs, "letters", world_tokenizer)
    words = world_tokenizer.convert_ids_to_tokens
    for i in range(15):
        assert words(cut.source_tokens[i]) == pairs.source_text(i)[0]
        assert words(cut.target_tokens[i]) == pairs.target_text(i)[0]
        right = [words(t) for t, yes in zip(cut.domain_tokens, cut.right[i], strict=True) if yes]
        assert right == [pairs.target_text(i)[0]]


def test_letters_need_a_vocabulary_that_spells(asked, tokenizer):
    with pytest.raises(DomainError, match=r"'P'.*no single tokens.*model.mapping"):
        map_labels(pair_labels(asked), "letters", tokenizer)


def test_texts_never_give_an_answer_away(world_tokenizer):
    data = PairedTextsDataModule(max_source_labels=20)
    labels = data.labels(world_tokenizer)
    told = data.texts(labels, world_tokenizer, seed=5)
    assert (len(told.subjects), told.n_paired, told.n_new) == (1152, 1024, 128)
    assert len(set(told.subjects)) == 1152  # so no subject of one phase is in the other
    answers = {
        token
        for name in ("reference", "permuted", "letters")
        for mapped in [map_labels(labels, name, world_tokenizer)]
        for token in (*mapped.source_tokens, *mapped.target_tokens)
    }
    prompts = labels.asked.source_prompts(list(told.subjects))
    prompts += labels.asked.target_prompts(list(told.subjects))
    rows = world_tokenizer(prompts, add_special_tokens=False)["input_ids"]
    assert not any(answers & set(ids) for ids in rows)
    assert not any(world_tokenizer.unk_token_id in ids for ids in rows)
    for part in (told.answers[:1024], told.answers[1024:]):
        counts = Counter(part)
        assert len(counts) == 20
        assert max(counts.values()) - min(counts.values()) <= 1
    assert data.texts(labels, world_tokenizer, 5) == told
    assert data.texts(labels, world_tokenizer, 6).subjects != told.subjects


def test_a_written_file_is_read_back(tokenizer, tmp_path):
    data = PairedTextsDataModule(n_paired=30, n_new=7)
    labels = data.labels(tokenizer)
    told = data.texts(labels, tokenizer, 1)
    data.write_texts(tmp_path / "texts.csv", labels, told)
    again = PairedTextsDataModule(texts_file=str(tmp_path / "texts.csv"))
    same = again.labels(tokenizer)
    read = again.texts(same, tokenizer, 99)
    assert read.subjects == told.subjects
    assert [same.source_text(i) for i in read.answers] == [
        labels.source_text(i) for i in told.answers
    ]


ROWS = '{"phase": "compose", "subject": "name1", "source": "Paris"}\n'
BAD = {
    "overlap": ('{"phase": "learn", "subject": "name1", "source": "Rome"}', "line 2.*both phases"),
    "twice": ('{"phase": "compose", "subject": "name1", "source": "Rome"}', "line 2.*twice"),
    "phase": (
        '{"phase": "sing", "subject": "name2", "source": "Rome"}',
        "line 2.*compose or learn",
    ),
    "field": ('{"phase": "learn", "source": "Rome"}', "line 2.*'subject'"),
    "json": ("{", "line 2.*not JSON"),
    "no object": ("[1]", "line 2.*an object"),
    "none of a phase": ("", "no text of phase 'learn'"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_files_are_told(case, tmp_path):
    line, message = BAD[case]
    file = tmp_path / "texts.jsonl"
    file.write_text(ROWS + line)
    with pytest.raises(SubjectsError, match=f"(?s){message}"):
        PairedTextsDataModule(texts_file=str(file))


@pytest.mark.parametrize(
    ("subject", "source", "message"),
    [
        ("Paris", "Rome", "has an answer in it"),
        ("§§", "Rome", "cannot read"),
        ("name2", "Gotham", "no single token.*'Gotham'"),
    ],
)
def test_written_texts_must_fit_the_vocabulary(subject, source, message, tokenizer, tmp_path):
    file = tmp_path / "texts.csv"
    file.write_text(f"phase,subject,source\ncompose,name1,Paris\nlearn,{subject},{source}\n")
    data = PairedTextsDataModule(texts_file=str(file))
    with pytest.raises(SubjectsError, match=message):
        data.texts(data.labels(tokenizer), tokenizer, 0)


def test_too_few_pairs_say_how_many_there_are(asked):
    usable = int(asked.right.any(0).sum())
    with pytest.raises(SubjectsError, match=f"has {usable} usable pairs.*{usable + 1} are asked"):
        pair_labels(asked, usable + 1)


def test_source_labels_must_be_single_tokens_with_a_target(asked):
    with pytest.raises(SubjectsError, match=r"no single token.*'Gotham', 'Metropolis'"):
        pair_labels(asked, only=["Paris", "Gotham", "Metropolis"])
    right = asked.right.copy()
    right[:, asked.source.texts.index("Lima")] = False
    with pytest.raises(SubjectsError, match="no target among the labels for 'Lima'"):
        pair_labels(replace(asked, right=right), only=["Paris", "Rome", "Lima"])


def test_a_relation_without_reference_is_refused(tokenizer):
    asked = TokenizedRelation.of("city->color", Catalogue.load(), tokenizer)
    with pytest.raises(KnowledgeError, match="no reference"):
        pair_labels(asked)


def test_too_few_subjects_say_how_many_there_are(tokenizer):
    data = PairedTextsDataModule(n_paired=5000)
    with pytest.raises(SubjectsError, match=r"5128 subjects.*the vocabulary has \d+"):
        data.texts(data.labels(tokenizer), tokenizer, 0)


@pytest.mark.parametrize(
    "bad", [{"n_paired": 0}, {"n_new": 0}, {"max_source_labels": 1}, {"seed": -1}]
)
def test_settings_that_cannot_be(bad):
    with pytest.raises(ConfigError, match=next(iter(bad))):
        PairedTextsDataModule(**bad)
