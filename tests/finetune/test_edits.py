"""Edits in the labels of a relation: which rows are edits, and with which reference."""

import json
import re

import pytest

from lincorr_lightning.errors import KnowledgeError, SubjectsError
from lincorr_lightning.finetune.datamodule import EditsDataModule
from lincorr_lightning.finetune.edit_files import RawEdit, read_edits
from lincorr_lightning.finetune.edits import ListedEdits, resolve_edits
from lincorr_lightning.finetune.results import finetune_results
from lincorr_lightning.knowledge import Catalogue, TokenizedRelation
from lincorr_lightning.lm.language_model import LanguageModel
from tests.toys import WORDS, save_toy_lm

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
NO_LABEL = "its answer is no label of this LM (not one of city)"


@pytest.fixture
def teams(tmp_path):
    path = tmp_path / "teams.yaml"
    path.write_text(TEAMS)
    return str(path)


@pytest.fixture
def file_of(tmp_path):
    def write(*rows):
        path = tmp_path / "edits.jsonl"
        path.write_text("\n".join(map(json.dumps, rows)))
        return str(path)

    return write


def tokenized(lm, name, *files):
    return TokenizedRelation.of(name, Catalogue.load(*files), lm.tokenizer)


def test_edits_of_a_file_are_used_in_their_order(lm, relation, file_of):
    rows = [("name7", "Tokyo"), ("name3", "Paris"), ("name7", "Rome")]
    path = file_of(*({"subject": subject, "answer": answer} for subject, answer in rows))
    edits = EditsDataModule(lm, edits_file=path, n_edits=None).resolve().edits
    assert [(edit.subject, edit.answer) for edit in edits] == rows
    cities, countries = relation.source.texts, relation.target.texts
    assert [cities[edit.label] for edit in edits] == ["Tokyo", "Paris", "Rome"]
    references = [[countries[i] for i in edit.reference] for edit in edits]
    assert references == [["Japan"], ["France"], ["Italy"]]
    assert [lm.tokenizer.decode(list(edit.tokens)) for edit in edits] == ["Tokyo", "Paris", "Rome"]


def test_the_reference_is_that_of_the_answer_not_of_its_label(lm, teams):
    relation = tokenized(lm, "team->country", teams)
    assert [len(label.answers) for label in relation.source.labels] == [2, 1, 1]  # red white black

    def resolved(rows):
        return resolve_edits(ListedEdits(read_edits(rows)), relation, lm)

    answers = ["red blue", "red green", "white", "black"]
    rows = [{"subject": "name1", "answer": answer} for answer in answers]
    for row, reference in zip(rows, ("France", "Japan", None, "Peru"), strict=True):
        row["reference"] = reference
    edits = resolved(rows).edits
    countries = relation.target.texts
    references = [sorted(countries[i] for i in edit.reference) for edit in edits]
    assert references == [["France"], ["Japan"], ["Italy", "Spain"], ["Peru"]]
    assert [edit.label for edit in edits] == [0, 0, 1, 2]
    assert [lm.tokenizer.decode(list(edit.tokens)) for edit in edits] == answers
    # Without a reference, the first token " red" may be either team, and black has none.
    with pytest.warns(UserWarning, match=r"3 of 4 .*2: other answers share the first .*, 'red'"):
        found = resolved([row | {"reference": None} for row in rows])
    assert [edit.answer for edit in found.edits] == ["white"]
    with pytest.raises(SubjectsError, match=r"names no label; add a field"):
        resolved([{"subject": "name1", "answer": "black"}])
    # Edits of a run, which have no ids, are kept, all of them: others know them by their position.
    raw = [RawEdit("a run", "name1", answer) for answer in answers[:3]]
    found = resolve_edits(ListedEdits(raw * 2), relation, lm)
    assert [edit.answer for edit in found.edits] == answers[:3] * 2


def test_written_edits_read_back_the_same(lm, teams, tmp_path):
    for relation, n in (("city->country", 40), ("team->country", 25)):
        data = EditsDataModule(lm, relation, n_edits=n, knowledge_files=[teams])
        resolved = data.resolve()
        table = finetune_results([], {}, resolved, {}, "").table("edits")
        assert table.keys == ["subject", "answer", "reference", "source_before", "target_before"]
        path = tmp_path / "edits.csv"
        table.frame.to_csv(path, index=False)
        again = EditsDataModule(lm, relation, edits_file=str(path), knowledge_files=[teams])
        assert again.resolve().edits == resolved.edits


def test_a_reference_of_the_file_replaces_the_relation_s(lm, file_of):
    """The relation needs none then."""
    edit = {"subject": "name1", "answer": "Paris"}
    for relation, reference in (("city->country", ["Japan", "Peru"]), ("city->color", ["red"])):
        path = file_of(edit | {"reference": "|".join(reference)})
        (found,) = EditsDataModule(lm, relation, edits_file=path).resolve().edits
        texts = tokenized(lm, relation).target.texts
        assert [texts[i] for i in found.reference] == reference
    with pytest.raises(KnowledgeError, match="city->color has no reference"):
        EditsDataModule(lm, "city->color", edits_file=file_of(edit)).setup("fit")


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"answer": "Pariss"}, NO_LABEL),
        ({"answer": "Chicago"}, "its answer is no label of this LM (unknown word)"),
        ({"reference": "Frence"}, "its reference is no label of country"),
        ({"subject": "Nobody"}, "the subject has no token of the LM"),
        ({"subject": "name1"}, "an earlier row teaches the subject this answer"),
    ],
)
def test_a_row_that_is_no_edit_of_this_lm_is_skipped(lm, file_of, row, reason):
    first = {"subject": "name1", "answer": "Paris"}
    second = first | {"subject": "name2"} | row
    path = file_of(first, second)
    hint = "Did you mean 'Paris'" if row.get("answer") == "Pariss" else ""
    data = EditsDataModule(lm, edits_file=path)
    where = rf"\(1: {re.escape(reason)}\), such as {path}, line 2: .*{hint}"
    with pytest.warns(UserWarning, match=f"data.edits_file: 1 of 2 edits are skipped {where}"):
        assert [edit.subject for edit in data.resolve().edits] == ["name1"]
    results = finetune_results([], {}, data.resolve(), {}, "")
    assert results.values["skipped"] == {reason: 1}
    shown = [[f"{path}, line 2", second["subject"], second["answer"], reason]]
    assert results.table("skipped").frame.values.tolist() == shown
    if "earlier row" not in reason:
        with pytest.raises(SubjectsError, match=rf"^1 of 1 edits are skipped .*{hint}"):
            EditsDataModule(lm, edits_file=file_of(second)).setup("fit")


def test_rows_are_edits_or_skipped(lm, file_of):
    """Whatever the limits; checked in the order of the rows."""
    answers = ["Paris", "Atlantis", "Paris", "Paris", "Rome", "Oslo"]
    path = file_of(*({"subject": f"name{i}", "answer": x} for i, x in enumerate(answers, 1)))
    options = {"edits_file": path, "max_edits_per_reference": 2, "n_edits": 3}
    data = EditsDataModule(lm, **options)
    with pytest.warns(UserWarning, match="3 of 6 edits"):
        resolved = data.resolve()
    assert resolved.subjects == ["name1", "name3", "name5"]
    assert [(row.subject, row.problem) for row in resolved.skipped] == [
        ("name2", NO_LABEL),
        ("name4", "above data.max_edits_per_reference"),
        ("name6", "beyond data.n_edits"),
    ]
    again = EditsDataModule(lm, **options)
    data.setup("fit")
    data.resolve()
    again.setup("fit")
    again.load_state_dict(data.state_dict())
    assert again.resolve().edits == resolved.edits
    assert again.resolve().skipped == resolved.skipped


def test_text_is_compared_in_nfc(tmp_path):
    """As a file of macOS or a keyboard writes accents."""
    knowledge = tmp_path / "towns.yaml"
    knowledge.write_text(
        'version: 1\nsource: "made up"\n'
        "entities: {town: {Zu\u0308rich: {land: O\u0308sterreich}, Lima: {land: Peru}},"
        " land: {O\u0308sterreich: {}, Peru: {}}}\n"
        "knowledge:\n"
        '  town: {family: attribute, language: en, template: "{} saw a", answers: town}\n'
        '  land: {family: attribute, language: en, template: "{} is", answers: land}\n',
        encoding="utf-8",
    )
    words = (*WORDS, "Zu\u0308rich", "O\u0308sterreich", "name1", "name2")
    lm = LanguageModel.from_pretrained(str(save_toy_lm(tmp_path / "lm", words=words)))
    spellings = [("Z\u00fcrich", "\u00d6sterreich"), ("Zu\u0308rich", "O\u0308sterreich")]
    rows = [
        {"subject": f"name{i}", "answer": town, "reference": land}
        for i, (town, land) in enumerate(spellings, 1)
    ]
    relation = tokenized(lm, "town->land", str(knowledge))
    found = resolve_edits(ListedEdits(read_edits(rows)), relation, lm)
    assert not found.skipped and found.edits[0][1:5] == found.edits[1][1:5]
    texts = [relation.target.texts[i] for i in found.edits[0].reference]
    assert texts == ["O\u0308sterreich"]


def test_edits_that_ask_for_nothing_new_are_reported(lm, relation, file_of):
    """They count as generalized where nothing changes."""
    edits = EditsDataModule(lm, n_edits=4).resolve().edits
    edit = next(one for one in edits if relation.reference_mask[one.target_before].any())
    # A city that lies in the country that the LM answers already.
    city = relation.source.texts[relation.reference_mask[edit.target_before].argmax()]
    path = file_of({"subject": edit.subject, "answer": city})
    with pytest.warns(UserWarning, match=f"1 of 1 edits.*{edit.subject}.*answers already"):
        EditsDataModule(lm, edits_file=path).resolve()
