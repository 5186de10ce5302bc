"""Files of edits in public shapes, written here, with outcomes that are written beside them."""

import gzip
import json
import math
from pathlib import Path
from typing import Any

import numpy
import pandas
import pytest
import torch

from lincorr_lightning.errors import SubjectsError
from lincorr_lightning.finetune import edit_files
from lincorr_lightning.finetune.edit_files import read_edits
from lincorr_lightning.finetune.edits import ListedEdits, resolve_edits
from lincorr_lightning.knowledge import TokenizedRelation
from lincorr_lightning.lm.language_model import LanguageModel

NO_LABEL = "its answer is no label of this LM (not one of city)"
NO_ANSWER, NO_SUBJECT = "it has no new answer", "it has no subject"
NO_TEXT = "its new answer is no text"
UNREAD = "no edit of {} can be read from it"
OTHER = {"subject": "name9", "answer": "Oslo"}
LIVES, HOME = "name1 lives in", "The home of name1 is"


def rewrite(new: Any, subject: Any = "name1", **more: Any) -> dict[str, Any]:
    return {
        "prompt": "{} lives in",
        "relation_id": "P551",
        "subject": subject,
        "target_new": {"str": new, "id": "Q90"} if isinstance(new, str) else new[0],
        "target_true": {"str": "Rome", "id": "Q220"},
    } | more


def counterfact(new: Any = "Paris", subject: Any = "name1", **more: Any) -> dict[str, Any]:
    return {
        "case_id": 4402,
        "requested_rewrite": rewrite(new, subject),
        "paraphrase_prompts": [HOME, "No one was injured. name1 lives in"],
        "neighborhood_prompts": ["name2 lives in"],
    } | more


def zsre(alt: Any = "Paris", subject: Any = "name1", **more: Any) -> dict[str, Any]:
    texts = {"src": LIVES, "pred": "Rome", "rephrase": HOME, "loc": "nq question: who", "cond": "-"}
    return {"subject": subject, "alt": alt, "answers": ["Rome"], **texts} | more


def mquake(*rewrites: Any) -> dict[str, Any]:
    facts = [one | {"question": f"Where does {one['subject']} live?"} for one in rewrites]
    return {
        "case_id": 2500,
        "requested_rewrite": facts,
        "questions": ["In which country does name1 live?"],
        "new_answer": "France",
        "new_single_hops": [{"question": "?", "cloze": "-", "answer": "Paris"}],
    }


def ripple(
    sentence: str = "The place of birth of name1 is Paris.",
    relation: str = "PLACE_OF_BIRTH",
    **more: Any,
) -> dict[str, Any]:
    edit = {"prompt": sentence, "subject_id": "Q1", "relation": relation, "target_id": "Q90"}
    return {"example_type": "popular", "edit": edit, "Compositionality_I": []} | more


def knowedit(new: Any = "Paris", subject: Any = "name1", **more: Any) -> dict[str, Any]:
    texts = {"prompt": LIVES, "ground_truth": "Rome", "locality": {}}
    return {"subject": subject, "target_new": new, **texts} | more


def wikibigedit(**more: Any) -> dict[str, Any]:
    asked = {"update": LIVES, "rephrase": HOME, "personas": "Yo, name1 lives where?"}
    hop = {"mhop": "In which country does name1 live?", "mhop_ans": "France"}
    return {"tag": "new", "subject": "name1", "ans": "Paris", "loc": "?"} | asked | hop | more


def hallueditbench(**more: Any) -> dict[str, Any]:
    asked = {"question": LIVES, "paraphrased_question": HOME, "locality_question": "?"}
    return {"subject": "name1", "relation": "home", "object": "Paris"} | asked | more


def easyedit(**more: Any) -> dict[str, Any]:
    request = {"prompt": LIVES, "subject": "name1", "target_new": "Paris", "rephrase_prompt": HOME}
    unused = {"ground_truth": "Rome", "portability": {}, "locality": {"n": {"prompt": "?"}}}
    return {"case_id": 0, "requested_rewrite": request | unused | more, "post": {"rephrase_acc": 1}}


# Record; the country that is right, or the reason of a skipped row; the number of prompts.
CASES: list[tuple[dict[str, Any], str, int]] = [
    (counterfact(), "France", 3),
    (counterfact("Lima", paraphrase_prompts=[LIVES, HOME]), "Peru", 2),
    (counterfact(["Cairo"]), "Egypt", 3),  # plain text as target_new
    (counterfact(" Berlin "), "Germany", 3),
    (counterfact(""), NO_ANSWER, 0),
    (counterfact(subject=None), NO_SUBJECT, 0),
    (counterfact([["Paris", "Rome"]]), NO_TEXT, 0),
    (counterfact(requested_rewrite="name1"), UNREAD.format("CounterFact or MQuAKE"), 0),
    (zsre(), "France", 2),
    (zsre(["Vienna"], rephrase=LIVES), "Austria", 1),
    (zsre("Atlantis"), NO_LABEL, 0),  # not Rome, the old answer
    (mquake(rewrite("Paris")), "France", 2),
    (mquake(rewrite("Paris"), rewrite("Elvish")), "France", 2),
    (
        mquake(rewrite("Paris"), rewrite("Rome", "name2")),
        "2 of its several rewrites have an answer of city",
        0,
    ),
    (ripple(), "France", 1),
    (ripple("name1 follows Paris.", "FOLLOWS"), UNREAD.format("RippleEdits"), 0),
    (ripple(edit="name1"), UNREAD.format("RippleEdits"), 0),
    (knowedit(rephrase_prompt=HOME), "France", 2),
    (knowedit(None), NO_ANSWER, 0),
    (wikibigedit(), "France", 3),
    (wikibigedit(personas=math.nan, reference=["Peru"]), "Peru", 2),
    (hallueditbench(), "France", 2),
    (easyedit(), "France", 2),
    (counterfact(reference="Peru"), "Peru", 3),
    (OTHER | {"subject": "name1", "question": LIVES, "para_question": HOME}, "Norway", 2),
]


@pytest.mark.filterwarnings("ignore:.*are skipped", "ignore:.*answers already")
@pytest.mark.parametrize(("record", "outcome", "n_prompts"), CASES)
def test_records_of_benchmarks(
    lm: LanguageModel,
    relation: TokenizedRelation,
    tmp_path: Path,
    record: dict[str, Any],
    outcome: str,
    n_prompts: int,
) -> None:
    path = tmp_path / "edits.json"
    path.write_text(json.dumps([OTHER, record, OTHER], indent=2))
    found = resolve_edits(ListedEdits(read_edits(path)), relation, lm)
    assert len(found.edits) + len(found.skipped) == 3 and len(found.rows) == len(found.edits)
    *rest, again = found.skipped
    assert again.where == f"{path}, row 3" and "an earlier row" in again.problem
    if not n_prompts:
        assert [(row.where, row.problem) for row in rest] == [(f"{path}, row 2", outcome)]
        return
    assert not rest and found.subjects == ["name9", "name1"]
    assert [relation.target.texts[i] for i in found.edits[1].reference] == [outcome]
    row = found.rows[1]
    assert row.id == str(record.get("case_id", 1)) and row.where == f"{path}, row 2"
    assert len(row.prompts) == n_prompts
    for prompt in row.prompts:
        assert "name1" in prompt and "{}" not in prompt
        assert not prompt.endswith(found.edits[1].answer)


@pytest.mark.parametrize(
    ("row", "unread"),
    [
        (easyedit(), "locality, ground_truth, post"),
        (wikibigedit(), "loc, mhop, mhop_ans, tag"),
        (counterfact(), "neighborhood_prompts, relation_id, target_true"),
        (OTHER | {"locality": ["?"], "empty": [], "": 3}, "locality"),
        (OTHER | {"paraphrases": [HOME, 0.5]}, "paraphrases"),
    ],
)
def test_fields_that_are_not_read_are_named_in_one_line(
    monkeypatch: pytest.MonkeyPatch, row: dict[str, Any], unread: str
) -> None:
    lines: list[str] = []
    monkeypatch.setattr(edit_files, "rank_zero_info", lines.append)
    read_edits([OTHER, row, row])
    (line,) = lines
    assert sorted(line.rstrip(".").split(": ")[-1].split(", ")) == sorted(unread.split(", "))


def test_a_folder_of_results_is_read_in_the_order_of_its_cases(tmp_path: Path) -> None:
    for case in (10, 2):
        content = counterfact(subject=f"name{case}", case_id=case)
        (tmp_path / f"1_edits-case_{case}.json").write_text(json.dumps(content))
    (tmp_path / "params.json").write_text("{}")
    assert [row[1:5:3] for row in read_edits(tmp_path)] == [("name2", "2"), ("name10", "10")]


@pytest.mark.parametrize("kind", [list, numpy.array])
def test_lists_that_pandas_wrote_to_csv(kind: Any, tmp_path: Path) -> None:
    row = OTHER | {"paraphrases": kind([LIVES, HOME]), "reference": kind(["Peru", "Italy"])}
    pandas.DataFrame([row]).to_csv(tmp_path / "e.csv")
    (edit,) = read_edits(tmp_path / "e.csv")
    assert (edit.prompts, edit.reference) == ((LIVES, HOME), ("Peru", "Italy"))


@pytest.mark.parametrize("value", [pandas.NA, float("nan"), numpy.ones((2, 2)), torch.ones(3)])
def test_values_of_any_type_in_a_field_of_no_use(value: Any) -> None:
    assert [edit.subject for edit in read_edits([OTHER | {"more": value}])] == [OTHER["subject"]]


@pytest.mark.parametrize(
    ("relation", "sentence", "subject", "answer"),
    [
        ("CONTINENT", "The name of the continent which Oz is part of is Asia.", "Oz", "Asia"),
        ("CAPITAL", "The name of the capital city of Peru is D.C..", "Peru", "D.C."),
        ("SIBLING", "The names of the siblings of Duke of York are Ada.", "Duke of York", "Ada"),
        ("DIRECTOR", "The name of the director of Life is Sweet is Ada.", "Life is Sweet", "Ada"),
        ("NUMBER_OF_CHILDREN", "The number of children Ada has is 3.", "Ada", "3"),
    ],
)
def test_sentences_of_ripple_edits(relation: str, sentence: str, subject: str, answer: str) -> None:
    (edit,) = read_edits([ripple(sentence, relation)])
    assert (edit.subject, edit.answer) == (subject, answer)


# -- files of one's own ----------------------------------------------------------------------------

TABLE = "subject,answer\nname1,Paris\nname2,Tokyo\n"
LIST = [{"subject": "name1", "answer": "Paris"}, {"subject": "name2", "answer": "Tokyo"}]
LINES = "\n\n".join(map(json.dumps, LIST))


@pytest.mark.parametrize(
    ("name", "content", "where"),
    [
        ("e.csv", TABLE.replace(",", " ; ").replace("Paris", '"Paris"'), "line 2"),
        ("e.json", json.dumps(LIST, indent=4), "row 1"),
        ("e.jsonl", b"\xef\xbb\xbf" + LINES.encode(), "line 1"),
    ],
)
def test_files_of_every_kind_are_read_alike(
    tmp_path: Path, name: str, content: Any, where: str
) -> None:
    path = tmp_path / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    rows = read_edits(str(path))
    assert [row[1:5] for row in rows] == [("name1", "Paris", (), "0"), ("name2", "Tokyo", (), "1")]
    assert rows[0].where == f"{path}, {where}"


@pytest.mark.parametrize("orient", ["columns", "index", "records", "table"])
def test_json_of_pandas_in_any_orientation(tmp_path: Path, orient: Any) -> None:
    pandas.DataFrame(LIST * 6).to_json(tmp_path / "e.json", orient=orient)
    edits = [(row.subject, row.answer) for row in read_edits(tmp_path / "e.json")]
    assert edits == [("name1", "Paris"), ("name2", "Tokyo")] * 6


def test_the_separator_is_the_one_that_cuts_heading_and_rows_alike(tmp_path: Path) -> None:
    path = tmp_path / "e.csv"
    path.write_text(f"subject,answer,notes; of; mine\nname1,Paris,{'x' * 200_000}\n")
    assert [row[1:3] for row in read_edits(path)] == [("name1", "Paris")]


@pytest.mark.filterwarnings("ignore:.*are skipped", "ignore:.*answers already")
def test_rows_nobody_can_use_are_skipped(lm: LanguageModel, relation: TokenizedRelation) -> None:
    rows = [OTHER, OTHER | {"answer": "Pa\u200bris"}, OTHER | {"subject": "name1 " * 10_000}]
    found = resolve_edits(ListedEdits(read_edits(rows)), relation, lm)
    problems = [row.problem for row in found.skipped]
    assert "an invisible ZERO WIDTH SPACE" in problems[0] and "2,000 characters" in problems[1]


def test_fields_of_ones_own(tmp_path: Path) -> None:
    path = tmp_path / "edits.csv"
    path.write_text("person;home;answers;id\nname1;Paris;Rome;a7\n2;3;;\n")
    keys = {"subject_key": "person", "answer_key": "home"}
    found = [row[1:5] for row in read_edits(path, **keys)]
    assert found == [("name1", "Paris", (), "a7"), ("2", "3", (), "1")]
    # A name that is given takes the place of a benchmark's.
    (edit,) = read_edits([knowedit()], answer_key="ground_truth")
    assert edit.answer == "Rome"
    row = {"id": 7, "subject": " A\u2028b ", "answer": True, "reference": " France|Italy"}
    (edit,) = read_edits([row | {"paraphrases": [HOME, HOME]}])
    assert edit[1:6] == ("A\u2028b", "True", ("France", "Italy"), "7", (HOME,))
    assert edit.problem == NO_TEXT


def test_a_row_that_lacks_the_fields_is_skipped(
    lm: LanguageModel, relation: TokenizedRelation
) -> None:
    rows: list[Any] = [OTHER, {"subject": "name1"}, ["name2", "Paris"]]
    with pytest.warns(UserWarning, match="2 of 3 edits are skipped .2: it lacks the fields"):
        found = resolve_edits(ListedEdits(read_edits(rows)), relation, lm)
    assert found.subjects == ["name9"]
    assert [row.subject for row in found.skipped] == ["{'subject': 'name1'}", "['name2', 'Paris']"]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("e.json", '[{"subject": "a",', r"e\.json: no JSON .*a list of objects"),
        ("e.json", "[]", "has no edit"),
        ("e.json", '[["a", "b"]]', r"row 1: no edit .* subject and answer .*subject_key"),
        ("e.json", '[{"subject": "a", "answers": ["b"]}]', "row 1: no edit .*answers.* MQuAKE"),
        ("e.json", '[{"subject": "a", "answer": "b", "refrence": "c"}]', "'refrence'. Rename it"),
        ("e.jsonl", '[{"subject": "a", "answer": "b"}]', "line 1: no edit can be read"),
        ("e.json", '[{"subject": "a", "answer": "b", "alt": "c"}]', "'b' .answer. or 'c' .alt"),
        ("e.tsv", "subject\tanswer\na\tb\tc\n", "line 2: more fields"),
        ("e.json", '[{"subject": "a", "answer": "b", "subject": "c"}]', "'subject' .*twice"),
        ("e.jsonl", '{"subject": "a", "answer": "b", "id": 1, "id": 1}', "line 1: .*'id' .*twice"),
        ("e.csv", "answer;subject; answer\nParis;a;Rome\n", r"e\.csv, line 1: .*'answer' twice"),
        ("e.csv", 'subject,answer\na,Paris\nb,"Os"lo\n', "line 3: this is not CSV"),
        ("e.csv", "subject,answer\nZoë,Paris\n".encode("cp1252"), "cannot .*Save it in UTF-8"),
        ("e.json", pandas.DataFrame(LIST).to_json(orient="split"), 'e.json: .*orient="records"'),
        ("e.json", gzip.compress(b"[]", mtime=0), "packed by gzip; unpack it"),
        ("e.pkl", "", r"Name one of \.jsonl, \.json, \.csv, \.tsv\."),
    ],
)
def test_files_that_are_refused(tmp_path: Path, name: str, content: Any, message: str) -> None:
    path = tmp_path / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(SubjectsError, match=message) as caught:
        read_edits(path)
    assert "\n" not in str(caught.value)
