"""The repair set and the measured edits: what they share, and what they must not."""

import json
from collections import Counter
from typing import Any

import pytest
import torch

from lincorr_lightning.distributed import DataShard
from lincorr_lightning.errors import CheckpointError, ConfigError, KnowledgeError, SubjectsError
from lincorr_lightning.finetune import EditsDataModule, RepairDataModule
from lincorr_lightning.finetune.repair.datamodule import JOINED_BY, statements
from lincorr_lightning.knowledge import Catalogue, TokenizedRelation
from lincorr_lightning.lm.language_model import LanguageModel
from tests.toys import save_toy_lm

SMALL: dict[str, Any] = {
    "n_examples": 12, "n_edits": 4, "batch_size": 5, "n_texts": 3, "n_tokens": 8,
    "n_preserved_texts": 5, "texts_per_step": 2,
    "preserve": ["color"], "controls": [],
}  # fmt: skip


def prepared(lm: LanguageModel, **settings: Any) -> RepairDataModule:
    data = RepairDataModule(lm, **SMALL | settings)
    data.prepare_edits()
    return data


def test_measured_edits_share_no_subject_with_the_repair_set(lm):
    data = prepared(lm)
    groups = [data.examples, data.measured["shown"], data.measured["held_out"]]
    assert [len(group) for group in groups] == [12, 4, 4]
    subjects = [edit.subject for group in groups for edit in group]
    assert len(set(subjects)) == len(subjects)
    shown = {edit.label for edit in data.examples + data.measured["shown"]}
    assert not shown & {edit.label for edit in data.measured["held_out"]}
    same, other = prepared(lm), prepared(lm, seed=1)
    assert (data.examples, data.measured) == (same.examples, same.measured)
    assert data.examples != other.examples


def test_a_limit_of_measured_edits_per_reference(lm):
    free = prepared(lm)
    for limit in (None, 4):
        same = prepared(lm, max_edits_per_reference=limit)
        assert (same.examples, same.measured) == (free.examples, free.measured)
    for part in prepared(lm, n_edits=5, max_edits_per_reference=1).measured.values():
        assert len({edit.reference for edit in part}) == len(part) == 5
    with pytest.raises(SubjectsError, match=r"asks for 30 .*raise data.max_edits_per_reference"):
        prepared(lm, n_edits=30, max_edits_per_reference=1)


@pytest.fixture(scope="module")
def world() -> LanguageModel:
    """An LM of several cities per country."""
    return LanguageModel.from_pretrained("tiny-world")


def test_a_limit_of_examples_per_reference(world):
    free = prepared(world)
    for limit in (1, 2):
        data = prepared(world, max_examples_per_reference=limit)
        counts = Counter(edit.reference for edit in data.examples)
        assert len(data.examples) == 12 and max(counts.values()) == limit
        assert data.measured == free.measured
    with pytest.raises(SubjectsError, match=r"n_examples asks .*raise data.max_examples_per_ref"):
        prepared(world, n_examples=60, max_examples_per_reference=1)


@pytest.mark.parametrize("seed", [0, 1])
def test_references_are_held_out_with_all_their_answers(world, seed):
    """Labels are put together by hand until none shares a target with one of another group."""
    data = prepared(world, hold_out="references", seed=seed)
    relation = data.tokenized
    targets = {
        label: set(relation.reference_mask[:, label].nonzero()[0].tolist())
        for label in range(len(relation.source.labels))
    }
    groups: list[set[int]] = []
    for label in (one for one, right in targets.items() if right):
        near = [g for g in groups if any(targets[label] & targets[other] for other in g)]
        groups = [g for g in groups if g not in near] + [{label}.union(*near)]
    split = data._split(relation)
    held_out = [group for group in groups if group <= split["held_out"]]
    assert len(held_out) == round(len(groups) / 2)
    assert all(group <= split["shown"] for group in groups if group not in held_out)
    right = {target for edit in data.examples for target in edit.reference}
    assert right.isdisjoint(t for edit in data.measured["held_out"] for t in edit.reference)
    assert not right.isdisjoint(t for edit in data.measured["shown"] for t in edit.reference)
    assert len(groups) < sum(map(bool, targets.values())), "all references have one answer"


@pytest.mark.parametrize("share", [0.25, 0.75])
def test_the_share_of_answers_that_is_held_out(lm, relation, share):
    split = RepairDataModule(lm, **SMALL | {"held_out": share})._split(relation)
    shown, held_out = split["shown"], split["held_out"]
    assert not shown & held_out
    assert shown | held_out == set(relation.reference_mask.any(0).nonzero()[0].tolist())
    assert len(held_out) == pytest.approx(share * len(shown | held_out), abs=0.5)


def test_edits_of_a_file_are_measured_and_their_subjects_left_out(lm, tmp_path):
    taken = prepared(lm).examples[0]
    edits = EditsDataModule(lm, n_edits=6, seed=3).prepare_edits()
    file = tmp_path / "edits.jsonl"
    rows = [{"subject": edit.subject, "answer": edit.answer} for edit in (taken, *edits)]
    file.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    data = prepared(lm, edits_file=str(file))
    measured = data.measured["shown"] + data.measured["held_out"]
    assert {edit.subject for edit in measured} == {row["subject"] for row in rows}
    assert not {edit.subject for edit in measured} & {edit.subject for edit in data.examples}
    shown = {edit.label for edit in data.examples}
    assert not shown & {edit.label for edit in data.measured["held_out"]}
    one = next(row for row in rows if row["answer"] in data.split["shown"])
    file.write_text(json.dumps(one))
    with pytest.warns(UserWarning, match="no edit whose answer is held out"):
        assert len(prepared(lm, edits_file=str(file)).measured["shown"]) == 1


def test_an_edit_with_the_reference_of_an_example_is_not_held_out(lm, relation, tmp_path):
    split = prepared(lm, hold_out="references")._split(relation)
    own, other = (relation.source.labels[min(split[part])] for part in ("held_out", "shown"))
    right = relation.target.texts[relation.reference_mask[:, min(split["shown"])].argmax()]
    rows = [
        {"subject": "name1", "answer": own.answers[0].text},
        {"subject": "name2", "answer": other.answers[0].text},
        {"subject": "name3", "answer": own.answers[0].text, "reference": right.strip()},
    ]
    file = tmp_path / "edits.jsonl"
    file.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    measured = prepared(lm, edits_file=str(file), hold_out="references").measured
    found = {part: [edit.subject for edit in edits] for part, edits in measured.items()}
    assert found == {"shown": ["name2", "name3"], "held_out": ["name1"]}


def test_statements_take_turns_in_wording_and_order(lm, relation):
    edits = prepared(lm).examples
    found = statements(relation, edits)
    for i, (edit, text) in enumerate(zip(edits, found, strict=True)):
        source = f"{edit.subject} lives in the city of {edit.answer}"
        country = relation.target.texts[edit.reference[0]].strip()
        target = f"{edit.subject} lives in the country of {country}"
        first, second = (source, target) if i % 8 < 4 else (target, source)
        assert text == f"{first}{JOINED_BY[i % 4]}{second}."
        assert statements(relation, [edit], "source") == [f"{source}."]
        assert statements(relation, [edit], "target") == [f"{target}."]


def test_all_tokens_of_a_statement_but_the_first_are_learned_once_an_epoch(lm):
    dataset = prepared(lm, examples="statements").train_dataloader().dataset
    assert len(dataset) == 2  # 12 examples in steps of 5
    batches = [dataset[i] for i in range(4)]
    for batch in batches:
        for ids, mask, labels in zip(
            batch.input_ids, batch.attention_mask, batch.labels, strict=True
        ):
            n = int(mask.sum())
            assert labels[: n - 1].tolist() == ids[1:n].tolist()
            assert set(labels[n - 1 :].tolist()) == {-100}
    rows = [{tuple(ids.tolist()) for b in pair for ids in b.input_ids[:, :6]}
            for pair in (batches[:2], batches[2:])]  # fmt: skip
    assert [len(one) for one in rows] == [10, 10] and rows[0] != rows[1]


def test_logits_of_preserved_knowledge_are_those_before(lm):
    data = prepared(lm)
    batch = data.train_dataloader().dataset[1]
    domain = TokenizedRelation.of("city->color", Catalogue.load(), lm.tokenizer).target
    for i, edit in enumerate(batch.edits.edits):
        ids = lm.tokenizer(domain.knowledge.prompt(edit.subject), return_tensors="pt").input_ids
        with torch.no_grad():
            expected = lm.model(ids).logits[0, -1, domain.token_ids].double()
        torch.testing.assert_close(batch.before["color"][i], expected, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(("settings", "error", "message"), [
    ({"examples": "facts"}, ConfigError, r"data\.examples is 'facts'"),
    ({"hold_out": "countries"}, ConfigError, r"data\.hold_out is 'countries'"),
    ({"max_examples_per_reference": 0}, ConfigError, r"max_examples_per_reference is 0"),
    ({"held_out": 1.0}, ConfigError, r"data\.held_out"),
    ({"n_tokens": 1}, ConfigError, r"data\.n_tokens"),
    ({"max_edits_per_reference": 0}, ConfigError, r"data\.max_edits_per_reference is 0"),
    ({"preserve": ["pet"], "controls": ["pet"]}, ConfigError, "name 'pet', which is in both"),
    ({"preserve": ["country"]}, ConfigError, "name 'country', .* part of city->country"),
    ({"relation": "city->planet"}, KnowledgeError, "planet"),
    ({"controls": ["colour"]}, KnowledgeError, "'colour'.*color"),
])  # fmt: skip
def test_settings_that_cannot_work_are_refused(lm, settings, error, message):
    with pytest.raises(error, match=message):
        RepairDataModule(lm, **SMALL | settings)


def test_data_that_cannot_be_made_is_refused(lm, monkeypatch):
    where = "lincorr_lightning.finetune.repair.datamodule"
    with pytest.raises(KnowledgeError, match="has no reference"):
        prepared(lm, relation="city->color", preserve=[])
    with pytest.raises(SubjectsError, match=r"n_examples asks for 100000 edits, but of"):
        prepared(lm, n_examples=100_000)
    data = prepared(lm)
    monkeypatch.setattr(f"{where}.data_shard", lambda _: DataShard(0, 2, counts=True))
    with pytest.raises(ConfigError, match=r"5 examples .* must be a multiple of the 2 ranks"):
        data.train_dataloader()
    monkeypatch.setattr(f"{where}.MIN_ANSWERS", 10_000)
    with pytest.raises(SubjectsError, match="a repair needs 10000"):
        prepared(lm)


def test_statements_longer_than_the_context_are_refused(tmp_path):
    folder = save_toy_lm(tmp_path / "lm", max_position_embeddings=12)
    data = prepared(LanguageModel.from_pretrained(str(folder)), examples="statements")
    with pytest.raises(SubjectsError, match=r"in the city of .*has 1\d tokens; .*positions for 12"):
        data.train_dataloader()


def test_a_resumed_run_has_the_same_edits_or_is_refused(lm):
    data = prepared(lm)
    data.train_dataloader()
    state = data.state_dict()
    again = RepairDataModule(lm, **SMALL)
    again.load_state_dict(state)
    assert (again.examples, again.measured) == (data.examples, data.measured)
    assert again._before.keys() == {"source", "target", "color", "in_context"}
    with pytest.raises(CheckpointError, match=r"with data\.n_examples 12, this run has 11"):
        RepairDataModule(lm, **SMALL | {"n_examples": 11}).load_state_dict(state)
