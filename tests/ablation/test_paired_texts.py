"""Subjects and their answers: nothing gives an answer away."""

from collections import Counter

import pytest

from lincorr_lightning.ablation.datamodule import (
    COLUMNS,
    read_paired_texts,
    resolve_texts,
    sample_texts,
)
from lincorr_lightning.ablation.mappings import map_labels, pair_labels
from lincorr_lightning.errors import SubjectsError
from lincorr_lightning.io import write_csv
from lincorr_lightning.knowledge import Catalogue, TokenizedRelation


def labels_of(tokenizer, n=None):
    return pair_labels(TokenizedRelation.of("city->country", Catalogue.load(), tokenizer), n)


def test_texts_never_give_an_answer_away(world_tokenizer):
    labels = labels_of(world_tokenizer, 20)
    texts = sample_texts(labels, world_tokenizer, 1024, 128, seed=5)
    assert (len(texts.subjects), texts.n_paired, texts.n_new) == (1152, 1024, 128)
    assert len(set(texts.subjects)) == 1152  # so no subject of one phase is in the other
    answers = {
        token
        for name in ("reference", "permuted", "letters")
        for mapped in [map_labels(labels, name, world_tokenizer)]
        for token in (*mapped.source_tokens, *mapped.target_tokens)
    }
    prompts = labels.relation.source_prompts(texts.subjects)
    prompts += labels.relation.target_prompts(texts.subjects)
    rows = world_tokenizer(prompts, add_special_tokens=False)["input_ids"]
    assert not any(answers & set(ids) for ids in rows)
    assert not any(world_tokenizer.unk_token_id in ids for ids in rows)
    for part in (texts.answers[:1024], texts.answers[1024:]):
        counts = Counter(part)
        assert len(counts) == 20
        assert max(counts.values()) - min(counts.values()) <= 1
    assert sample_texts(labels, world_tokenizer, 1024, 128, 5) == texts
    assert sample_texts(labels, world_tokenizer, 1024, 128, 6).subjects != texts.subjects


def test_a_written_file_is_read_back(tokenizer, tmp_path):
    labels = labels_of(tokenizer)
    texts = sample_texts(labels, tokenizer, 30, 7, seed=1)
    write_csv(tmp_path / "texts.csv", COLUMNS, texts.rows(labels))
    assert resolve_texts(read_paired_texts(tmp_path / "texts.csv"), labels, tokenizer) == texts


ROWS = '{"phase": "compose", "subject": "name1", "source": "Paris"}\n'
BAD = {
    "twice": ('{"phase": "learn", "subject": "name1", "source": "Rome"}', "line 2.*line 1"),
    "phase": ('{"phase": "x", "subject": "name2", "source": "Rome"}', "line 2.*compose or learn"),
    "field": ('{"phase": "learn", "source": "Rome"}', "line 2.*a subject"),
    "no object": ("[1]", r"line 2.*this is \[1\]"),
    "none of a phase": ("", "no text of phase 'learn'"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_files_are_refused(case, tmp_path):
    line, message = BAD[case]
    file = tmp_path / "texts.jsonl"
    file.write_text(ROWS + line)
    with pytest.raises(SubjectsError, match=f"(?s){message}"):
        read_paired_texts(file)


@pytest.mark.parametrize(
    ("subject", "source", "message"),
    [
        ("Paris", "Rome", "has an answer in it"),
        ("§§", "Rome", "cannot spell"),
        ("name2", "Gotham", "'Gotham' is not one of the source labels"),
    ],
)
def test_written_texts_must_fit_the_vocabulary(subject, source, message, tokenizer, tmp_path):
    file = tmp_path / "texts.csv"
    file.write_text(f"phase,subject,source\ncompose,name1,Paris\nlearn,{subject},{source}\n")
    with pytest.raises(SubjectsError, match=message):
        resolve_texts(read_paired_texts(file), labels_of(tokenizer), tokenizer)


def test_too_few_subjects_say_how_many_there_are(tokenizer):
    with pytest.raises(SubjectsError, match=r"5128 subjects.*the vocabulary has \d+"):
        sample_texts(labels_of(tokenizer), tokenizer, 5000, 128, 0)
