"""Edits that a user wrote: files, invalid lines, and the label of each answer."""

import csv
import json
import re

import pytest

from lincorr_lightning.errors import KnowledgeError, SubjectsError
from lincorr_lightning.finetune.datamodule import EditsDataModule
from lincorr_lightning.finetune.edit_files import RawEdit, read_edits
from lincorr_lightning.finetune.edits import resolve_edits, vocabulary_nearness
from lincorr_lightning.finetune.results import finetune_results
from lincorr_lightning.knowledge import Catalogue, TokenizedRelation

TEAMS = """
version: 1
source: "made up for the tests"
entities:
  team:
    red blue: {country: France}
    red green: {country: Japan}
    white: {country: [Italy, Spain]}
    black: {}
    purple: {country: Peru}
knowledge:
  team: {family: attribute, language: en, template: "{} saw a", answers: team}
"""


@pytest.fixture
def teams(tmp_path):
    path = tmp_path / "teams.yaml"
    path.write_text(TEAMS)
    return str(path)


@pytest.fixture
def file_of(tmp_path):
    def write(text, name="edits.jsonl"):
        path = tmp_path / name
        path.write_text(text, encoding="utf-8")
        return str(path)

    return write


def tokenized(lm, name, *files):
    return TokenizedRelation.of(name, Catalogue.load(*files), lm.tokenizer)


def test_labels_are_near_by_their_rows_of_the_head(lm, relation):
    head = lm.model.get_output_embeddings().weight.detach().double().numpy()
    sides = [head[domain.token_ids] for domain in (relation.source, relation.target)]
    cities, countries = (side - side.mean(0) for side in sides)
    found = vocabulary_nearness(lm, relation)
    assert found.shape == (len(countries), len(cities))
    for i, city in enumerate(cities):
        for j, country in enumerate(countries):
            cosine = sum(city * country) / sum(city**2) ** 0.5 / sum(country**2) ** 0.5
            assert found[j, i].item() == pytest.approx(cosine, abs=1e-9)


# -- reading -----------------------------------------------------------------------------------


def test_jsonl_and_csv_are_read_alike(file_of):
    entries = [
        {"subject": "name1", "answer": "Paris"},
        {"subject": "name2, the second", "answer": "Tokyo", "reference": "China|Japan"},
        {"subject": 'the "third"', "answer": "Oslo"},
    ]
    jsonl = file_of("\n\n".join(map(json.dumps, entries)))
    path = file_of("", "edits.csv")
    with open(path, "w", newline="", encoding="utf-8-sig") as file:  # noqa: PTH123
        writer = csv.DictWriter(file, ["answer", "subject", "comment", "reference"])
        writer.writeheader()
        writer.writerows(entries)
    read = read_edits(jsonl)
    assert read == [
        RawEdit(f"{jsonl}, line 1", "name1", "Paris", id="0"),
        RawEdit(f"{jsonl}, line 3", "name2, the second", "Tokyo", ("China", "Japan"), "1"),
        RawEdit(f"{jsonl}, line 5", 'the "third"', "Oslo", id="2"),
    ]
    assert [edit[1:] for edit in read_edits(path)] == [edit[1:] for edit in read]
    assert [edit.where[-6:] for edit in read_edits(path)] == ["line 2", "line 3", "line 4"]
    assert [edit[1:] for edit in read_edits(entries)] == [edit[1:] for edit in read]
    path = file_of(
        '{"subject": " A\u2028b ", "answer": "Paris\\t", "reference": [" France", "Italy"]}'
    )
    assert read_edits(path)[0][1:4] == ("A\u2028b", "Paris", ("France", "Italy"))
    with pytest.raises(SubjectsError, match=r"none\.csv cannot be read"):
        read_edits("none.csv")


GOOD = '{"subject": "a", "answer": "Paris"}\n'


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("e.jsonl", GOOD + '{"subject": "b", "answer": ', "line 2: no JSON"),
        ("e.jsonl", '\n"b, Paris"', "line 2: an object is needed"),
        ("e.jsonl", '{"subject": "b"}', "line 1: no edit can be .* the fields subject. N"),
        (
            "e.jsonl",
            '{"subject": "b", "anser": "c"}',
            "line 1: there is no .*'answer', but 'anser'",
        ),
        (
            "e.jsonl",
            '{"subject": "a", "answer": "Paris", "refrence": "Italy"}',
            "line 1: there is no field 'reference', but 'refrence'. Rename it.",
        ),
        ("e.jsonl", "\n \n", "has no edit"),
        ("e.csv", "subject,reference\na,b\n", "line 2: no edit .* fields subject, reference. Name"),
        ("e.csv", 'subject,answer\na,Paris\nb,"Os"lo\n', "line 3: this is not CSV"),
        ("e.txt", GOOD, r"e.txt is no file of edits\. .* \.csv, \.tsv\."),
    ],
)
def test_a_bad_line_is_named(file_of, name, text, message):
    with pytest.raises(SubjectsError, match=message) as caught:
        read_edits(file_of(text, name))
    assert name in str(caught.value)
    with pytest.raises(SubjectsError, match="edit 1: an object is needed"):  # in a list of a config
        read_edits(["Paris"])


def test_a_subject_with_two_answers_is_two_edits_and_a_warning(lm, relation):
    lines = [("a", "Paris"), ("b", "Oslo"), ("a", "Rome"), ("c", "Rome"), ("c", "Lima")]
    rows = [{"subject": f"name1 {s}", "answer": a} for s, a in lines]
    with pytest.warns(UserWarning, match="taught several answers: 2, such as 'name1 a'"):
        edits, raw, skipped = resolve_edits(read_edits(rows), relation, lm)
    assert [edit[1:3] for edit in raw] == [tuple(row.values()) for row in rows] and not skipped
    assert [edit[:2] for edit in edits] == [edit[1:3] for edit in raw]


# -- labels ------------------------------------------------------------------------------------


def test_edits_of_a_file_are_used_in_their_order_with_the_lm_s_answers(lm, relation, file_of):
    entries = [("name7", "Tokyo"), ("name3", "Paris"), ("name7", "Rome")]
    path = file_of("".join(json.dumps({"subject": s, "answer": a}) + "\n" for s, a in entries))
    edits = EditsDataModule(lm, edits_file=path, n_edits=None).prepare_edits()
    assert [(edit.subject, edit.answer) for edit in edits] == entries
    with pytest.warns(
        UserWarning, match=r"1 of 3 edits are .* \(1: beyond data\.n_edits\), such as"
    ):
        assert EditsDataModule(lm, edits_file=path, n_edits=2).prepare_edits() == edits[:2]
    cities, countries = relation.source.texts, relation.target.texts
    assert [cities[edit.label] for edit in edits] == ["Tokyo", "Paris", "Rome"]
    references = [[countries[i] for i in edit.reference] for edit in edits]
    assert references == [["Japan"], ["France"], ["Italy"]]
    assert [lm.tokenizer.decode(list(edit.tokens)) for edit in edits] == ["Tokyo", "Paris", "Rome"]


def test_the_reference_is_that_of_the_answer_not_of_its_label(lm, teams):
    relation = tokenized(lm, "team->country", teams)
    assert [len(label.answers) for label in relation.source.labels] == [2, 1, 1]  # red white black
    answers = ["red blue", "red green", "red", "white", "black"]
    written = [{"subject": "name1", "answer": answer} for answer in answers]
    for row, reference in zip(written, ("France", "Japan", None, None, "Peru"), strict=True):
        row["reference"] = reference
    edits = resolve_edits(read_edits(written), relation, lm).edits
    countries = relation.target.texts
    references = [sorted(countries[i] for i in edit.reference) for edit in edits]
    assert references == [["France"], ["Japan"], ["France", "Japan"], ["Italy", "Spain"], ["Peru"]]
    assert [edit.label for edit in edits] == [0, 0, 0, 1, 2]
    assert [lm.tokenizer.decode(list(edit.tokens)) for edit in edits] == answers
    # Without a reference, the first token " red" may be either team, and black has none.
    written = [{**row, "reference": None} for row in written]
    with pytest.warns(UserWarning, match=r"3 of 5 .*2: other answers share the first .*, 'red'"):
        edits, _, skipped = resolve_edits(read_edits(written), relation, lm)
    assert [edit.answer for edit in edits] == answers[2:4]
    assert [(one.where, one.answer) for one in skipped] == [
        ("edit 1", "red blue"),
        ("edit 2", "red green"),
        ("edit 5", "black"),
    ]
    with pytest.raises(SubjectsError, match=r"names no label; add a field"):
        resolve_edits([RawEdit("edit 1", "name1", "black")], relation, lm)
    # Edits of a run, which have no ids, are kept, all of them: others know them by their position.
    rows = [RawEdit("a run", "name1", answer) for answer in answers[:4]]
    assert [edit.answer for edit in resolve_edits(rows + rows, relation, lm).edits] == answers[
        :4
    ] * 2


def test_written_edits_read_back_the_same(lm, teams, tmp_path):
    for relation, n in (("city->country", 40), ("team->country", 25)):
        data = EditsDataModule(lm, relation, n_edits=n, knowledge_files=[teams])
        dataset, edits = data.train_dataloader().dataset, data.prepare_edits()
        path = tmp_path / "edits.csv"
        table = finetune_results([], {}, dataset, {}, "").table("edits")
        assert table.keys == ["subject", "answer", "reference", "source_before", "target_before"]
        target = dataset.relation.target.texts[edits[0].target_before]
        assert table.frame["target_before"][0] == target
        table.frame.to_csv(path, index=False)
        again = EditsDataModule(lm, relation, edits_file=str(path), knowledge_files=[teams])
        assert again.prepare_edits() == edits


@pytest.mark.parametrize(
    ("relation", "reference"), [("city->country", ["Japan", "Peru"]), ("city->color", ["red"])]
)
def test_a_reference_of_the_file_replaces_the_relation_s(lm, file_of, relation, reference):
    """The relation needs none then."""
    edit = {"subject": "name1", "answer": "Paris", "reference": "|".join(reference)}
    data = EditsDataModule(lm, relation, edits_file=file_of(json.dumps(edit)))
    (found,) = data.prepare_edits()
    assert [tokenized(lm, relation).target.texts[i] for i in found.reference] == reference
    if relation == "city->color":
        with pytest.raises(KnowledgeError, match="city->color has no reference"):
            resolve_edits([RawEdit("", "name1", "Paris")], tokenized(lm, relation), lm)


@pytest.mark.parametrize(
    ("line", "reason", "hint"),
    [
        (
            {"answer": "Pariss"},
            "its answer is no label of this LM (not one of city)",
            "you mean 'Par",
        ),
        ({"answer": "Chicago"}, "its answer is no label of this LM (unknown word)", ""),
        ({"answer": "Xyzzyx"}, "its answer is no label of this LM (not one of city)", "x'.( No|$)"),
        ({"reference": "Frence"}, "its reference is no label of country", "Did you mean 'France'"),
        ({"subject": "Nobody"}, "the subject has no token of the LM", ""),
        ({"subject": "name1"}, "an earlier row teaches the subject this answer", ""),
        ({"answer": "Pari\u0301s"}, "its answer is no label of this LM (not one of city)", ""),
    ],
)
def test_a_row_that_is_no_edit_of_this_lm_is_skipped(lm, file_of, line, reason, hint):
    entry = {"subject": "name2", "answer": "Paris"} | line
    path = file_of(GOOD.replace('"a"', '"name1"') + json.dumps(entry))
    skips = rf"\(1: {re.escape(reason)}\), such as {path}, line 2: '{entry['subject']}' -> .*{hint}"
    data = EditsDataModule(lm, edits_file=path)
    with pytest.warns(UserWarning, match=f"data.edits_file: 1 of 2 edits are skipped {skips}"):
        assert [edit.subject for edit in data.prepare_edits()] == ["name1"]
    results = finetune_results([], {}, data.train_dataloader().dataset, {}, "")
    assert results.values["skipped"] == {reason: 1}
    table = results.table("skipped")
    assert table.keys == ["where", "subject", "answer", "reason"]
    assert table.frame.values.tolist() == [
        [f"{path}, line 2", entry["subject"], entry["answer"], reason]
    ]
    if "earlier row" not in reason:
        with pytest.raises(SubjectsError, match=rf"^1 of 1 edits are skipped \(1: .*{hint}"):
            EditsDataModule(lm, edits_file=file_of(json.dumps(entry))).setup("fit")


def test_rows_are_edits_or_skipped(lm, relation, file_of):
    """Whatever the limits; checked in the order of the rows."""
    rows = [
        ("name1", "Paris"),
        ("name2", "Atlantis"),
        ("name3", "Paris"),
        ("name4", "Paris"),
        ("name1", "Paris"),
        ("name5", "Rome"),
        ("name6", "Oslo"),
        ("name7", "Lima"),
    ]
    path = file_of("subject,answer\n" + "".join(f"{s},{a}\n" for s, a in rows), "edits.csv")
    options = {"edits_file": path, "max_edits_per_reference": 2, "n_edits": 3}
    data = EditsDataModule(lm, **options)
    with pytest.warns(UserWarning, match="5 of 8 edits"):
        dataset = data.train_dataloader().dataset
    assert [edit.subject for edit in dataset.edits] == ["name1", "name3", "name5"]
    assert [(one.where[-6:], one.reason) for one in dataset.skipped] == [
        ("line 3", "its answer is no label of this LM (not one of city)"),
        ("line 5", "above data.max_edits_per_reference"),
        ("line 6", "an earlier row teaches the subject this answer"),
        ("line 8", "beyond data.n_edits"),
        ("line 9", "beyond data.n_edits"),
    ]
    again = EditsDataModule(lm, **options)
    again.setup("fit")
    again.load_state_dict(data.state_dict())
    assert again.train_dataloader().dataset.skipped == dataset.skipped
