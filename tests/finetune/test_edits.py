"""Edits that a user wrote: files, invalid lines, and the label of each answer."""

import csv
import json

import pytest

from lincorr_lightning.errors import KnowledgeError, SubjectsError
from lincorr_lightning.finetune.datamodule import EditsDataModule
from lincorr_lightning.finetune.edits import RawEdit, read_edits, resolve_edits
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
        RawEdit(f"{jsonl}, line 1", "name1", "Paris"),
        RawEdit(f"{jsonl}, line 3", "name2, the second", "Tokyo", ("China", "Japan")),
        RawEdit(f"{jsonl}, line 5", 'the "third"', "Oslo"),
    ]
    assert [edit[1:] for edit in read_edits(path)] == [edit[1:] for edit in read]
    assert [edit.where[-6:] for edit in read_edits(path)] == ["line 2", "line 3", "line 4"]
    assert [edit[1:] for edit in read_edits(entries)] == [edit[1:] for edit in read]
    path = file_of(
        '{"subject": " A\u2028b ", "answer": "Paris\\t", "reference": [" France", "Italy"]}'
    )
    assert read_edits(path)[0][1:] == ("A\u2028b", "Paris", ("France", "Italy"))
    with pytest.raises(SubjectsError, match=r"none\.csv cannot be read"):
        read_edits("none.csv")


GOOD = '{"subject": "a", "answer": "Paris"}\n'


@pytest.mark.parametrize(("name", "text", "message"), [
    ("e.jsonl", GOOD + '{"subject": "b", "answer": ', "line 2: this is not JSON"),
    ("e.jsonl", GOOD + "\n" + '["b", "Paris"]', "line 3: an object is needed"),
    ("e.jsonl", GOOD + '{"subject": "b"}', "line 2: 'answer' is missing"),
    ("e.jsonl", '{"subject": "  ", "answer": "Paris"}', "line 1: 'subject' is '  '"),
    ("e.jsonl", GOOD + GOOD, "line 2: 'a' is taught 'Paris' already, at .*line 1"),
    (
        "e.jsonl",
        '{"subject": "a", "answer": "Paris", "refrence": "Italy"}',
        "line 1: there is no field 'refrence'. Did you mean 'reference'",
    ),
    ("e.jsonl", "\n \n", "has no edit"),
    ("e.csv", "subject,reference\na,b\n", "line 1: the header lacks answer"),
    ("e.csv", "subject,answer\na,Paris\nb\n", "line 3: 'answer' is missing"),
    ("e.csv", 'subject,answer\na,Paris\nb,"Os"lo\n', "line 3: this is not CSV"),
    ("e.txt", GOOD, "neither .jsonl nor .csv"),
])  # fmt: skip
def test_a_bad_line_is_named(file_of, name, text, message):
    with pytest.raises(SubjectsError, match=message) as caught:
        read_edits(file_of(text, name))
    assert name in str(caught.value)
    with pytest.raises(SubjectsError, match="edit 2: an object is needed"):  # in a list of a config
        read_edits([json.loads(GOOD), "Paris"])


def test_a_subject_with_two_answers_is_two_edits_and_a_warning(file_of):
    lines = [("a", "Paris"), ("b", "Oslo"), ("a", "Rome"), ("c", "Rome"), ("c", "Lima")]
    path = file_of("".join(json.dumps({"subject": s, "answer": a}) + "\n" for s, a in lines))
    named = rf"2 of 3 subjects .* 'a': 'Paris' \({path}, line 1\) and 'Rome' \({path}, line 3\)"
    with pytest.warns(UserWarning, match=named):
        assert [edit[1:3] for edit in read_edits(path)] == lines


# -- labels ------------------------------------------------------------------------------------


def test_edits_of_a_file_are_used_in_their_order_with_the_lm_s_answers(lm, relation, file_of):
    entries = [("name7", "Tokyo"), ("name3", "Paris"), ("name7", "Rome")]
    path = file_of("".join(json.dumps({"subject": s, "answer": a}) + "\n" for s, a in entries))
    edits = EditsDataModule(lm, edits_file=path, n_edits=None).prepare_edits()
    assert [(edit.subject, edit.answer) for edit in edits] == entries
    with pytest.warns(UserWarning, match=r"only the first 2 are used \(data\.n_edits\)"):
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
    written[-1]["reference"] = "Peru"
    edits = resolve_edits(read_edits(written), relation, lm)
    countries = relation.target.texts
    references = [sorted(countries[i] for i in edit.reference) for edit in edits]
    assert references == [["France"], ["Japan"], ["France", "Japan"], ["Italy", "Spain"], ["Peru"]]
    assert [edit.label for edit in edits] == [0, 0, 0, 1, 2]
    assert [lm.tokenizer.decode(list(edit.tokens)) for edit in edits] == answers
    with pytest.raises(SubjectsError, match=r"edit 1: the reference of 'black' names no country"):
        resolve_edits([RawEdit("edit 1", "name1", "black")], relation, lm)


def test_written_edits_read_back_the_same(lm, teams, tmp_path):
    for relation, n in (("city->country", 40), ("team->country", 25)):
        data = EditsDataModule(lm, relation, n_edits=n, knowledge_files=[teams])
        dataset, edits = data.train_dataloader().dataset, data.prepare_edits()
        path = tmp_path / "edits.csv"
        table = finetune_results([], None, {}, dataset, {}, "").table("edits")
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


@pytest.mark.parametrize(("line", "message"), [
    ({"answer": "Pariss"}, "line 2: 'Pariss' is not a label of 'city'. Did you mean 'Paris'"),
    ({"answer": "Chicago"}, "'Chicago' is an answer of 'city', but not a label .*unknown word"),
    ({"reference": "Frence"}, "line 2: reference: 'Frence' is not .*Did you mean 'France'"),
    ({"subject": "Nobody"}, "line 2: the subject 'Nobody' has no token"),
])  # fmt: skip
def test_an_edit_that_this_lm_has_no_labels_for_is_named(lm, file_of, line, message):
    entry = {"subject": "name2", "answer": "Paris"} | line
    path = file_of(GOOD.replace('"a"', '"name1"') + json.dumps(entry))
    with pytest.raises(SubjectsError, match=message) as caught:
        EditsDataModule(lm, edits_file=path).prepare_edits()
    assert path in str(caught.value)
