"""Files of edits in public shapes, written here, with outcomes that are written beside them."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas
import pytest

from lincorr_lightning.errors import SubjectsError
from lincorr_lightning.finetune.edit_files import Question, read_edits
from lincorr_lightning.finetune.edits import resolve_edits
from lincorr_lightning.knowledge import Catalogue, TokenizedRelation
from lincorr_lightning.lm.language_model import LanguageModel
from tests.toys import WORDS, save_toy_lm

NO_LABEL = "its answer is no label of this LM (not one of city)"
NO_ANSWER, NO_SUBJECT = "it has no new answer", "it has no subject"
NO_SENTENCE = "its sentence is none of RippleEdits of its relation"
OTHER = {"subject": "name9", "answer": "Oslo"}
LIVES, HOME = "name1 lives in", "The home of name1 is"
QUESTIONS = ["In which country does name1 live?", "What is the country of name1's city?"]


def counterfact(new: Any = "Paris", subject: Any = "name1", **more: Any) -> dict[str, Any]:
    return {
        "case_id": 4402,
        "pararel_idx": 11185,
        "requested_rewrite": {
            "prompt": "{} lives in",
            "relation_id": "P551",
            "subject": subject,
            "target_new": {"str": new, "id": "Q90"} if isinstance(new, str) else new[0],
            "target_true": {"str": "Rome", "id": "Q220"},
        },
        "paraphrase_prompts": [HOME, "No one was injured. name1 lives in"],
        "neighborhood_prompts": ["name2 lives in"],
        "attribute_prompts": ["name3 lives in"],
        "generation_prompts": ["name1 likes"],
    } | more


def zsre(alt: Any = "Paris", subject: Any = "name1", **more: Any) -> dict[str, Any]:
    return {
        "subject": subject,
        "src": LIVES,
        "pred": "Rome",
        "rephrase": HOME,
        "alt": alt,
        "answers": ["Rome"],
        "loc": "nq question: who wrote it",
        "loc_ans": "Ada",
        "cond": "Rome >> Paris || name1 lives in",
    } | more


def hop(answer: str, *aliases: str) -> dict[str, Any]:
    return {"question": "?", "cloze": "-", "answer": answer, "answer_alias": list(aliases)}


def rewrite(new: str, subject: str = "name1", relation: str = "P551") -> dict[str, Any]:
    return {
        "prompt": "{} lives in",
        "relation_id": relation,
        "target_new": {"str": new, "id": "Q1"},
        "target_true": {"str": "Rome", "id": "Q220"},
        "subject": subject,
        "question": f"Where does {subject} live?",
    }


def mquake(*rewrites: Any, hops: Any = None, **more: Any) -> dict[str, Any]:
    return {
        "case_id": 2500,
        "requested_rewrite": list(rewrites) or [rewrite("Paris")],
        "questions": QUESTIONS,
        "answer": "Italy",
        "answer_alias": ["Italian Republic"],
        "new_answer": "France",
        "new_answer_alias": ["French Republic"],
        "single_hops": [hop("Rome"), hop("Italy")],
        "new_single_hops": hops or [hop("Paris", "City of Light"), hop("France")],
        "orig": {"triples_labeled": [["name1", "residence", "Rome"], ["Rome", "country", "Italy"]]},
    } | more


def query(prompt: str, *answers: str) -> dict[str, Any]:
    values = [{"value": answer, "aliases": [f"{answer} too"]} for answer in answers]
    return {
        "prompt": prompt,
        "answers": values,
        "query_type": "two_hop",
        "subject_id": "Q1",
        "relation": "PLACE_OF_BIRTH",
        "target_ids": ["Q90"],
        "phrase": prompt,
    }


def ripple(
    sentence: str = "The place of birth of name1 is Paris.",
    relation: str = "PLACE_OF_BIRTH",
    **more: Any,
) -> dict[str, Any]:
    test = {
        "test_queries": [query(QUESTIONS[0], "France")],
        "test_condition": "OR",
        "condition_queries": [query("The country of Paris is", "France")],
    }
    return {
        "example_type": "popular",
        "edit": {
            "prompt": sentence,
            "subject_id": "Q1",
            "relation": relation,
            "target_id": "Q90",
            "original_fact": {
                "prompt": "The place of birth of name1 is Rome.",
                "subject_id": "Q1",
                "relation": relation,
                "target_id": "Q220",
            },
        },
        "Relation_Specificity": [],
        "Logical_Generalization": [],
        "Subject_Aliasing": [test],
        "Compositionality_I": [test],
        "Compositionality_II": [{"test_queries": [query("name2's spouse is from", "France")]}],
        "Forgetfulness": [],
    } | more


def knowedit(
    new: Any = "Paris", subject: Any = "name1", asked: Any = None, **more: Any
) -> dict[str, Any]:
    aliased = {"prompt": "The country of Nameone is", "ground_truth": [["France"]]}
    reasoning = {"prompt": QUESTIONS[0], "ground_truth": [["French Republic", "France"]]}
    return {
        "subject": subject,
        "prompt": LIVES,
        "target_new": new,
        "ground_truth": "Rome",
        "portability": {
            "Reasoning": [asked or reasoning],
            "Subject_Aliasing": [aliased],
            "Logical_Generalization": [aliased],
        },
        "locality": {"Relation_Specificity": [{"prompt": "name1 is", "ground_truth": [["Peru"]]}]},
    } | more


# Record; outcome: the reason of a skipped row, or the country that is right; prompts; questions.
CASES: dict[str, list[tuple[dict[str, Any], str, int, int]]] = {
    "counterfact": [
        (counterfact(), "France", 3, 0),
        (counterfact("Tokyo", paraphrase_prompts=[]), "Japan", 1, 0),
        (counterfact("Lima", paraphrase_prompts=[LIVES, HOME]), "Peru", 2, 0),
        (counterfact(["Cairo"]), "Egypt", 3, 0),  # plain text as target_new
        (counterfact("Atlantis"), NO_LABEL, 0, 0),
        (counterfact("Chicago"), "its answer is no label of this LM (unknown word)", 0, 0),
        (counterfact(subject="Nobody"), "the subject has no token of the LM", 0, 0),
        (counterfact(""), NO_ANSWER, 0, 0),
        (counterfact(subject=None), NO_SUBJECT, 0, 0),
        (counterfact([["Paris", "Rome"]]), "its new answer is a list", 0, 0),
        (counterfact([{"id": "Q90"}]), "its new answer is an object", 0, 0),
        (counterfact(" Berlin "), "Germany", 3, 0),
        (
            counterfact(requested_rewrite="name1 -> Paris"),
            "its requested_rewrite is no object",
            0,
            0,
        ),
        ({"requested_rewrite": {"subject": "name1", "target_new": {"str": "Rome"}}}, "Italy", 0, 0),
    ],
    "zsre": [
        (zsre(), "France", 2, 0),
        (zsre("Tokyo", rephrase=LIVES), "Japan", 1, 0),
        (zsre("  "), NO_ANSWER, 0, 0),
        (zsre("Atlantis"), NO_LABEL, 0, 0),  # not Rome, the old answer
        (zsre("Lima", answers=["Oslo", "Rome"]), "Peru", 2, 0),
        (zsre(portability={"New Question": QUESTIONS[0], "New Answer": "France"}), "France", 2, 1),
        (zsre(portability={"New Question": QUESTIONS[0], "New Answer": "euro"}), "France", 2, 0),
        (zsre(subject="Nobody"), "the subject has no token of the LM", 0, 0),
        (zsre(subject=""), NO_SUBJECT, 0, 0),
        (zsre(["Vienna"]), "Austria", 2, 0),
        ({"subject": "name1", "alt": "Madrid", "answers": ["Rome"]}, "Spain", 0, 0),
    ],
    "mquake": [
        (mquake(), "France", 2, 2),
        (mquake(new_answer="French Republic", new_answer_alias=["France"]), "France", 2, 2),
        (mquake(new_answer="Peru", new_answer_alias=[]), "Peru", 2, 2),  # the file's word
        (mquake(new_answer="euro", new_answer_alias=[]), "France", 2, 0),
        (mquake(hops=[hop("Paris"), hop("France"), hop("euro")]), "France", 2, 0),
        (mquake(hops=[hop("name1"), hop("Paris")], new_answer="Paris"), "France", 2, 0),
        (mquake(hops=[hop("Paname", "Paris"), hop("France")]), "France", 2, 2),
        (mquake(rewrite("Paris"), rewrite("Elvish", relation="P103")), "France", 2, 2),
        (
            mquake(rewrite("Paris"), rewrite("Rome", "name2")),
            "2 of its several rewrites have an answer of city",
            0,
            0,
        ),
        (
            mquake(rewrite("Elvish"), rewrite("Klingon")),
            "0 of its several rewrites have an answer of city",
            0,
            0,
        ),
        (mquake(rewrite("Elvish")), NO_LABEL, 0, 0),
        (mquake(questions=[], new_answer="Peru"), "France", 2, 0),
    ],
    "ripple": [
        (ripple(), "France", 1, 1),
        (ripple("The place of birth of name1 is Tokyo", Compositionality_I=[]), "Japan", 1, 0),
        (ripple("The place of birth of name1 is Atlantis."), NO_LABEL, 0, 0),
        (ripple("name1 follows Paris.", "FOLLOWS"), NO_SENTENCE, 0, 0),
        (
            ripple(
                "The name of the capital city of name1 is Oslo.", "CAPITAL", Compositionality_I=[]
            ),
            "Norway",
            1,
            0,
        ),
        (
            ripple("The place of birth of Nobody is Rome."),
            "the subject has no token of the LM",
            0,
            0,
        ),
        (
            ripple(Compositionality_I=[{"test_queries": [query("Its coin is", "euro")]}]),
            "France",
            1,
            0,
        ),
        (
            ripple(
                "The place of birth of name1 is Lima.",
                Compositionality_I=[
                    {"test_queries": [query("Its coin is", "sol"), query(QUESTIONS[0], "Peru")]}
                ],
            ),
            "Peru",
            1,
            1,
        ),
        (ripple(edit={"relation": "PLACE_OF_BIRTH"}), NO_SENTENCE, 0, 0),
        (
            ripple(
                "The name of the currency in name1 is Cairo.", "CURRENCY", Compositionality_I=None
            ),
            "Egypt",
            1,
            0,
        ),
    ],
    "knowedit": [
        (knowedit(), "France", 1, 1),
        (knowedit(rephrase_prompt=HOME), "France", 2, 1),
        (knowedit("Lima", portability={}), "Peru", 1, 0),
        (knowedit(asked={"prompt": QUESTIONS[0], "ground_truth": "France"}), "France", 1, 1),
        (knowedit(asked={"prompt": QUESTIONS[0], "ground_truth": ["euro"]}), "France", 1, 0),
        (knowedit(asked={"prompt": "", "ground_truth": ["France"]}), "France", 1, 0),
        (knowedit("Atlantis"), NO_LABEL, 0, 0),
        (knowedit(None), NO_ANSWER, 0, 0),
        (knowedit(subject="Nobody"), "the subject has no token of the LM", 0, 0),
        (knowedit(["Vienna"], portability=None, locality={}), "Austria", 1, 0),
        (
            knowedit(
                Compositionality_I=[{"prompt": QUESTIONS[1], "targets": ["France"]}],
                portability=None,
            ),
            "France",
            1,
            1,
        ),
    ],
}


@pytest.mark.filterwarnings("ignore:.*are skipped")
@pytest.mark.parametrize(
    ("record", "outcome", "n_prompts", "n_questions"),
    [
        pytest.param(*case, id=f"{name}-{i}")
        for name, cases in CASES.items()
        for i, case in enumerate(cases)
    ],
)
def test_records_of_benchmarks(
    lm: LanguageModel,
    relation: TokenizedRelation,
    tmp_path: Path,
    record: dict[str, Any],
    outcome: str,
    n_prompts: int,
    n_questions: int,
) -> None:
    path = tmp_path / "edits.json"
    path.write_text(json.dumps([OTHER, record, OTHER], indent=2))
    rows = read_edits(path)
    edits, raw, skipped = resolve_edits(rows, relation, lm)
    assert len(rows) == len(edits) + len(skipped) == 3 and len(raw) == len(edits)
    again, *rest = reversed(skipped)
    assert again.where == f"{path}, row 3" and "an earlier row" in again.reason
    if n_prompts == n_questions == 0 and rest:
        assert [(one.where, one.reason) for one in rest] == [(f"{path}, row 2", outcome)]
        return
    assert not rest and [edit.subject for edit in edits] == ["name9", "name1"]
    assert [relation.target.texts[i] for i in edits[1].reference] == [outcome]
    assert raw[1].id == str(record.get("case_id", 1)) and raw[1].where == f"{path}, row 2"
    assert len(raw[1].prompts) == n_prompts and len(raw[1].questions) == n_questions
    for prompt in raw[1].prompts:
        assert "name1" in prompt and "{}" not in prompt and not prompt.endswith(edits[1].answer)
    assert {question.prompt for question in raw[1].questions} <= {*QUESTIONS}


def test_prompts_and_questions_are_those_of_the_file() -> None:
    (one,) = read_edits([counterfact()])
    assert one.prompts == (LIVES, HOME, "No one was injured. name1 lives in")
    (one,) = read_edits([mquake()])
    answers = ("France", "French Republic")
    assert one.prompts == (LIVES, "Where does name1 live?")
    assert one.questions == tuple(Question(prompt, answers) for prompt in QUESTIONS)
    (one,) = read_edits([knowedit()])
    assert one.questions == (Question(QUESTIONS[0], ("French Republic", "France")),)
    (one,) = read_edits([ripple()])
    assert one.prompts == ("The place of birth of name1 is",)
    assert one.questions == (Question(QUESTIONS[0], ("France", "France too")),)
    (one,) = read_edits([mquake(rewrite("Paris"), rewrite("Elvish"))])
    assert [(fact.answer, fact.id) for fact in one.rewrites] == [
        ("Paris", "2500"),
        ("Elvish", "2500"),
    ]


@pytest.mark.parametrize(
    ("relation", "sentence", "subject", "answer"),
    [
        (
            "COUNTRY_OF_CITIZENSHIP",
            "The name of the country of citizenship of Leonardo DiCaprio is Syria.",
            "Leonardo DiCaprio",
            "Syria",
        ),
        ("PLACE_OF_DEATH", "The place of death of Leo Arons is Berlin.", "Leo Arons", "Berlin"),
        (
            "CONTINENT",
            "The name of the continent which France is part of is Asia.",
            "France",
            "Asia",
        ),
        (
            "COUNTRY",
            "The name of the country which Rome is associated with is Peru.",
            "Rome",
            "Peru",
        ),
        (
            "CAPITAL_OF",
            "The name of the country which Oslo is the capital of is Spain.",
            "Oslo",
            "Spain",
        ),
        (
            "CAPITAL",
            "The name of the capital city of Peru is Washington, D.C..",
            "Peru",
            "Washington, D.C.",
        ),
        ("CURRENCY", "The name of the currency in Japan is euro.", "Japan", "euro"),
        ("NATIVE_LANGUAGE", "The mother tongue of Ada is Welsh.", "Ada", "Welsh"),
        (
            "POSITION_HELD",
            "The name of the position held by Ada is mayor of Vienna.",
            "Ada",
            "mayor of Vienna",
        ),
        ("AWARD_RECEIVED", "The name of the award Ada won is Nobel Prize.", "Ada", "Nobel Prize"),
        ("LEAGUE", "The name of the league which Ada plays in is NBA.", "Ada", "NBA"),
        ("SIBLING", "The names of the siblings of Duke of York are Ada.", "Duke of York", "Ada"),
        (
            "DIRECTOR",
            "The name of the director of Life is Beautiful is Ada.",
            "Life is Beautiful",
            "Ada",
        ),
        (
            "MEMBER_OF_SPORTS_TEAM",
            "The name of the sports team which Ada is a member of is Ajax.",
            "Ada",
            "Ajax",
        ),
        ("SEX_OR_GENDER", "The gender of Ada is male.", "Ada", "male"),
        ("NUMBER_OF_CHILDREN", "The number of children Ada has is 3.", "Ada", "3"),
    ],
)
def test_sentences_of_ripple_edits(relation: str, sentence: str, subject: str, answer: str) -> None:
    (edit,) = read_edits([ripple(sentence, relation)])
    assert (edit.subject, edit.answer) == (subject, answer)


# -- files of one's own ----------------------------------------------------------------------------

TABLE = "subject,answer\nname1,Paris\nname2,Tokyo\n"
LIST = [{"subject": "name1", "answer": "Paris"}, {"subject": "name2", "answer": "Tokyo"}]
LINES = "\n".join(map(json.dumps, LIST))


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("e.csv", TABLE),
        ("e.csv", TABLE.replace(",", ";")),
        ("e.csv", TABLE.replace(",", "\t")),
        ("e.tsv", TABLE.replace(",", "\t")),
        ("e.CSV", TABLE.replace("\n", "\r\n")),
        ("e.csv", TABLE.replace(",", " ; ").replace("Paris", '"Paris"')),
        ("e.tsv", TABLE),
        ("e.tsv", TABLE.replace(",", ";")),
        ("e.csv", b"\xef\xbb\xbf" + TABLE.encode()),
        ("e.json", json.dumps(LIST)),
        ("e.json", json.dumps(LIST, indent=4)),
        ("e.jsonl", b"\xef\xbb\xbf" + LINES.encode()),
        ("e.jsonl", LINES.replace("\n", "\r\n\r\n")),
    ],
)
def test_files_of_every_kind_are_read_alike(tmp_path: Path, name: str, content: Any) -> None:
    path = tmp_path / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    rows = read_edits(str(path))
    assert [row[1:5] for row in rows] == [("name1", "Paris", (), "0"), ("name2", "Tokyo", (), "1")]
    is_list = path.suffix == ".json"
    assert all(row.where.startswith(f"{path}, {'row' if is_list else 'line'} ") for row in rows)


def test_fields_with_names_of_ones_own(tmp_path: Path) -> None:
    path = tmp_path / "edits.csv"
    path.write_text("person;home;answers;id\nname1;Paris;Rome;a7\n2;3;;\n")
    keys = {"subject_key": "person", "answer_key": "home"}
    assert [row[1:5] for row in read_edits(path, **keys)] == [
        ("name1", "Paris", (), "a7"),
        ("2", "3", (), "1"),
    ]
    with pytest.raises(
        SubjectsError,
        match=r"line 2: no edit .* fields person, home, answers, id\. "
        r"Name those .* data\.subject_key and data\.answer_key\. `answers` of zsRE",
    ):
        read_edits(path)
    # In zsRE, `answers` is what was right before.
    (one,) = read_edits([zsre()], answer_key="answers")
    assert one.answer == "Paris"
    # A name that is given takes the place of a benchmark's.
    (one,) = read_edits([knowedit()], answer_key="ground_truth")
    assert one.answer == "Rome"
    (one,) = read_edits([{"id": 7, "subject": "name1", "answer": True}])
    assert (one.id, one.answer, one.problem) == ("7", "True", "its new answer is no text")
    with pytest.raises(SubjectsError, match=r"'persn', but 'person'\. Rename .*subject_key\."):
        read_edits(path, subject_key="persn", answer_key="home")
    path.write_text("SUBJECT,answer\nname1,Paris\n")
    with pytest.raises(SubjectsError, match=r"no field 'subject', but 'SUBJECT'\. .*subject_key\."):
        read_edits(path)
    rows = [{"subject": "a", "answer": "b", "Reference": "c"}]
    with pytest.raises(SubjectsError, match=r"no field 'reference', but 'Reference'\. Rename it\."):
        read_edits(rows)


def test_a_row_that_lacks_the_fields_is_skipped_and_shown(
    lm: LanguageModel, relation: TokenizedRelation, tmp_path: Path
) -> None:
    path = tmp_path / "edits.jsonl"
    rows = [
        OTHER,
        {"subject": "name1"},
        ["name2", "Paris"],
        {"subject": "name3", "answer": [1, 2]},
        ripple("name7 follows Rome.", "FOLLOWS"),
    ]
    path.write_text("\n".join(map(json.dumps, rows)))
    with pytest.warns(UserWarning, match="4 of 5 edits are skipped .2: it lacks the fields"):
        edits, _, skipped = resolve_edits(read_edits(path), relation, lm)
    assert len(edits) == 1 and [one[1:] for one in skipped] == [
        ("{'subject': 'name1'}", "", "it lacks the fields of an edit"),
        ("['name2', 'Paris']", "", "it lacks the fields of an edit"),
        ("name3", "[1, 2]", "its new answer is a list"),
        ("name7 follows Rome.", "", NO_SENTENCE),
    ]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        (
            "e.csv",
            "subject,answer\nZoë,Paris\n".encode("cp1252"),
            r"the edits in .*e\.csv cannot be read: .*Save it in UTF-8",
        ),
        ("e.json", b'[{"subject": "a",', r"e\.json: no JSON .*Write a list of objects"),
        ("e.json", b"[]", "has no edit"),
        (
            "e.json",
            json.dumps(dict.fromkeys(range(999))).encode(),
            r"fields 0, 1, 2.{90,95}\. Name",
        ),
        ("e.json", json.dumps([[1] * 999]).encode(), r"row 1: an object .* not \[1, .{90,99}$"),
        (
            "e.json",
            b'{"success": [{"question": "a"}], "locality": []}',
            r"row 1: no edit can be read from the fields success, locality\. Name",
        ),
        ("e.json", b'[["a", "b"]]', "row 1: an object is needed"),
        ("e.json", b"[" * 100_000, "no JSON"),
        (
            "e.json",
            b'[{"text": "a", "labels": "b", "concept": "c"}]',
            "the fields text, labels, con",
        ),
        ("e.json", b'[{"subject": "a", "answers": ["b"]}]', "subject, answers. Name .* before"),
        (
            "e.json",
            b'{"data": [{"subject": "a", "answer": "b"}]}',
            "the fields data. .* rows are the list 'data', write that list alone",
        ),
        ("e.jsonl", b'[\n{"subject": "a", "answer": "b"}]', r"line 1: no JSON .* \.json file"),
        ("e.tsv", b"subject\tanswer\na\tb\tc\n", r"line 2: more fields .* those with a '\\t'"),
        ("e.csv", b"\x00\x01\x02", "e.csv has no edit"),
        ("e.pkl", b"", r"e\.pkl is no file of edits\. Name one of"),
        ("e", b"", r"Name one of \.jsonl, \.json, \.csv, \.tsv\."),
    ],
)
def test_files_that_are_refused(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(SubjectsError, match=message) as caught:
        read_edits(tmp_path / name)
    assert "\n" not in str(caught.value)


def test_text_is_compared_in_nfc(tmp_path: Path) -> None:
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
    words = (*WORDS, "Zu\u0308rich", "O\u0308sterreich", "name1", "name2", "name3")
    lm = LanguageModel.from_pretrained(str(save_toy_lm(tmp_path / "lm", words=words)))
    relation = TokenizedRelation.of("town->land", Catalogue.load(str(knowledge)), lm.tokenizer)
    rows = [
        {"subject": f"name{i}", "answer": town, "reference": land}
        for i, (town, land) in enumerate(
            [("Z\u00fcrich", "\u00d6sterreich"), ("Zu\u0308rich", "O\u0308sterreich")], 1
        )
    ]
    edits, _, skipped = resolve_edits(read_edits(rows), relation, lm)
    assert not skipped and edits[0][1:5] == edits[1][1:5]
    assert [relation.target.texts[i] for i in edits[0].reference] == ["O\u0308sterreich"]


# -- a run -----------------------------------------------------------------------------------------


def test_a_run_of_a_file_accounts_for_every_row(
    finetune: Callable[..., Any], tmp_path: Path
) -> None:
    rows = [
        counterfact("Paris", "name1"),
        counterfact("Atlantis", "name2"),
        zsre("", "name3"),
        mquake(rewrite("Tokyo", "name4"), rewrite("Elvish", "name4")),
        knowedit("Oslo", "name5"),
        ripple("The place of birth of name6 is Lima."),
        ripple("name7 follows Rome.", "FOLLOWS"),
        {"subject": "name8", "answer": "Cairo"},
        {"subject": "name8", "answer": "Cairo"},
    ]
    path = tmp_path / "mixed.json"
    path.write_text(json.dumps(rows))
    with pytest.warns(UserWarning, match=r"data\.edits_file: 5 of 9 edits are skipped"):
        run = finetune({"edits_file": str(path), "n_edits": 4}, steps_per_edit=1)
    assert [(edit.subject, edit.answer) for edit in run.edits] == [
        ("name1", "Paris"),
        ("name4", "Tokyo"),
        ("name5", "Oslo"),
        ("name6", "Lima"),
    ]
    skipped = pandas.read_csv(run.folder / "tables" / "skipped.csv")
    assert list(skipped["where"]) == [f"{path}, row {i}" for i in (2, 3, 7, 8, 9)]
    assert list(skipped["reason"])[3:] == ["beyond data.n_edits"] * 2
    assert run.results["n_edits"] == 4
    assert run.results["skipped"] == {
        "beyond data.n_edits": 2,
        NO_LABEL: 1,
        NO_ANSWER: 1,
        NO_SENTENCE: 1,
    }
