"""Rows of edits: a user's own, and records of CounterFact, zsRE, MQuAKE, RippleEdits, KnowEdit."""

import re
import unicodedata
from collections.abc import Iterable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from functools import partial
from itertools import chain, product
from pathlib import Path
from typing import Any, NamedTuple

from lincorr_lightning.data.files import read_rows
from lincorr_lightning.errors import SubjectsError

SEPARATOR = "|"  # of the target answers of a reference
Edits = str | Path | Iterable[Mapping[str, Any]]  # a file, or its rows
nfc = partial(unicodedata.normalize, "NFC")  #: Texts are compared in this form.

# Fields of the new answer and of prompts, in zsRE and in KnowEdit.
_FLAT = (("alt", "src", "rephrase"), ("target_new", "prompt", "rephrase_prompt"))
_ASKED = [
    *product(["prompt"], ("ground_truth", "answers", "targets")),
    ("New Question", "New Answer"),
]
_OF_SOURCE = ("Subject_Aliasing", "Logical_Generalization")  # tests that do not compose
# How RippleEdits writes a relation whose name is not in its sentences.
_RIPPLE_WORDS = {
    "CAPITAL": "capital city",
    "CAPITAL_OF": "country",
    "NATIVE_LANGUAGE": "mother tongue",
    "SEX_OR_GENDER": "gender",
    "MEMBER_OF_SPORTS_TEAM": "sports team",
    "AWARD_RECEIVED": "award",
    "SIBLING": "siblings",
    "CAST_MEMBER": "cast members",
}
_AFTER_SUBJECT = " (is (associated with|part of|a member of|the capital of)|plays in|won|has)$"


class Question(NamedTuple):
    """A complete prompt about what follows from an edit, and the right answers in the file."""

    prompt: str
    answers: tuple[str, ...]


class RawEdit(NamedTuple):
    """A row of a file as its author wrote it.

    A case that rewrites several facts is one row: the only one of `rewrites` whose answer is a
    label of the source is the edit.
    """

    where: str  #: File and row, for messages.
    subject: str
    answer: str
    reference: tuple[str, ...] = ()  #: Right target answers; empty for the relation's own.
    id: str = ""  #: Name of the row in its file, or its number from 0; empty for a run's own edits.
    prompts: tuple[str, ...] = ()  #: Complete prompts of the source.
    questions: tuple[Question, ...] = ()  #: Of what follows from the edit, the target or not.
    rewrites: tuple["RawEdit", ...] = ()
    problem: str = ""  #: Why subject or answer are none, if so; these are then what was found.


class _NoFieldsError(SubjectsError):
    """A row lacks the fields of an edit."""


def read_edits(
    source: Edits, *, subject_key: str = "subject", answer_key: str = "answer"
) -> list[RawEdit]:
    """Read the rows of a file of edits, or of a list.

    Each has a subject and an answer, by these keys, and ``reference`` where it is not the
    relation's (a list, or one text with ``|`` between its answers), or the keys of a benchmark; one
    that lacks them has a `problem`. Raises SubjectsError if all do, or the file cannot be read.
    """
    keys = subject_key, answer_key
    if isinstance(source, (str, Path)):
        rows = read_rows(source, "edits")
    else:
        rows = ((f"edit {number}", row) for number, row in enumerate(source, 1))
    raw, odd = list[RawEdit](), list[_NoFieldsError]()
    for number, (where, row) in enumerate(rows):
        try:
            raw.append(_raw_edit(row, where, number, keys))
        except _NoFieldsError as error:
            odd.append(error)
            raw.append(RawEdit(where, f"{row!r:.99}", "", problem="it lacks the fields of an edit"))
    if len(odd) < len(raw):
        return raw
    if odd:
        raise odd[0]
    raise SubjectsError(f"{source} has no edit. Write at least one, with {' and '.join(keys)}.")


def named_subjects(source: Edits) -> list[str]:
    """Return the subjects of all rows of a file or list of edits."""
    return [fact.subject for row in read_edits(source) for fact in row.rewrites or (row,)]


def _raw_edit(row: Any, where: str, number: int, keys: tuple[str, str]) -> RawEdit:
    """Return the edit of a record, by the first of the known shapes whose keys it has."""
    if not isinstance(row, Mapping):
        needed = '{"subject": "Ada", "answer": "Paris"}'
        raise _NoFieldsError(f"{where}: an object is needed, such as {needed}, not {row!r:.99}.")
    id = next((text for key in ("case_id", "id") if (text := _text(row.get(key)))), str(number))
    edit = partial(_edit, where, id)
    # In zsRE, `answers` are what was right before.
    if all(key in row for key in keys) and not ("alt" in row and keys[1] == "answers"):
        _refuse_misspelled(row, where, keys)
        right = row.get("reference") or None
        right = right.split(SEPARATOR) if isinstance(right, str) else _list(right)
        own = edit(row[keys[0]], row[keys[1]], _list(row.get("paraphrases")))
        return own._replace(reference=tuple(map(_text, right)))
    if "requested_rewrite" in row:
        facts = tuple(edit(*_rewrite(one, row)) for one in _dicts(row["requested_rewrite"]))
        if not facts:
            why = "its requested_rewrite is no object"
            return edit(row["requested_rewrite"], "")._replace(problem=why)
        return facts[0]._replace(rewrites=facts[1:] and facts)
    follows = row.get("portability") or row.get("Compositionality_I")
    for answer, *prompts in _FLAT:
        if "subject" in row and answer in row:
            return edit(row["subject"], row[answer], map(row.get, prompts), follows)
    if isinstance(row.get("edit"), Mapping):
        tests = [case.get("test_queries") for case in _dicts(row.get("Compositionality_I"))]
        if (parts := _ripple(row["edit"])) is not None:
            return edit(*parts, tests)
        why = "its sentence is none of RippleEdits of its relation"
        return edit(row["edit"].get("prompt"), "")._replace(problem=why)
    _refuse_misspelled(row, where, keys)
    hint = " `answers` of zsRE are what was right before." if "answers" in row else ""
    if lists := [name for name, value in row.items() if _dicts(value) and isinstance(value, list)]:
        hint = f" If its rows are the list {lists[0]!r}, write that list alone."
    raise _NoFieldsError(
        f"{where}: no edit can be read from the fields {', '.join(map(str, row)):.99}. Name those "
        f"of the subject and of the new answer as data.subject_key and data.answer_key.{hint}"
    )


def _refuse_misspelled(row: Mapping[str, Any], where: str, keys: Sequence[str]) -> None:
    # Silently ignored, a misspelled reference would be replaced by the relation's own.
    ways_out = (f", or pass it as data.{name}_key" for name in ("subject", "answer"))
    fields = {"reference": "", "paraphrases": "", **dict(zip(keys, ways_out, strict=True))}
    missing = [key for key in fields if key not in row]
    for name in {*row} - {*fields, "answers"}:
        for meant in get_close_matches(str(name).casefold(), missing, 1, 0.8):
            way_out = f"Rename it{fields[meant]}."
            raise SubjectsError(f"{where}: there is no field {meant!r}, but {name!r}. {way_out}")


def _edit(
    where: str, id: str, subject: Any, answer: Any, prompts: Iterable[Any] = (), follows: Any = None
) -> RawEdit:
    texts = tuple(dict.fromkeys(filter(None, map(_text, prompts))))
    named, problem = [], ""
    for what, value in ("subject", _bare(subject)), ("new answer", _bare(answer)):
        found = _text(value) or f"{'' if value is None else value!s:.99}".strip()
        if not _text(value):
            kind = "an object" if isinstance(value, Mapping) else "no text"
            kind = "a list" if isinstance(value, list) else kind
            problem = problem or (f"its {what} is {kind}" if found else f"it has no {what}")
        named.append(found)
    asked = tuple(_questions(follows))
    return RawEdit(where, named[0], named[1], (), id, texts, asked, (), problem)


def _rewrite(one: Mapping[str, Any], row: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return the parts of an edit of CounterFact, or of MQuAKE with the questions of two hops."""
    subject, answer, prompt = one.get("subject"), one.get("target_new"), _text(one.get("prompt"))
    others = one.get("question"), *_list(row.get("paraphrase_prompts"))
    prompts = [prompt.replace("{}", _text(subject)), *others]
    hops, asked = _dicts(row.get("new_single_hops")), _list(row.get("questions"))
    # Of an edit of the last hop, or in longer chains, the questions ask for something else.
    first = [hops[0].get(key) for key in ("answer", "answer_alias")] if len(hops) == 2 else []
    if _text(answer) not in _texts(first):
        return subject, answer, prompts, None
    right = [row.get("new_answer"), row.get("new_answer_alias")]
    return subject, answer, prompts, [{"prompt": text, "answers": right} for text in asked]


def _ripple(edit: Mapping[str, Any]) -> tuple[str, str, list[str]] | None:
    """Read subject, answer and prompt from a sentence such as ``The mother of Ada is Mia.``."""
    relation = str(edit.get("relation"))
    words = re.escape(_RIPPLE_WORDS.get(relation, relation.replace("_", " ").lower()))
    pattern = rf"(.*?\b{words}(?: (?:of|in|by|which|that))? (.+) (?:is|are)) (.+?)\.?"
    if not (parts := re.fullmatch(pattern, _text(edit.get("prompt")))):
        return None
    return re.sub(_AFTER_SUBJECT, "", parts[2]), parts[3], [parts[1]]


def _questions(tree: Any) -> Iterator[Question]:
    if isinstance(tree, Mapping):
        for prompt, answers in _ASKED:
            if prompt in tree and answers in tree:
                if text := _text(tree[prompt]):
                    yield Question(text, tuple(_texts(tree[answers])))
                return
        tree = [part for name, part in tree.items() if name not in _OF_SOURCE]
    for part in tree if isinstance(tree, list) else ():
        yield from _questions(part)


def _texts(tree: Any) -> Iterator[str]:
    tree = list(tree.values()) if isinstance(tree, Mapping) else tree
    if isinstance(tree, list):
        yield from chain.from_iterable(map(_texts, tree))
    elif text := _text(tree):
        yield text


def _text(value: Any) -> str:
    """Return a text without spaces around it, a whole number as its digits; empty if neither."""
    value = _bare(value)
    is_number = isinstance(value, int) and not isinstance(value, bool)
    return str(value).strip() if is_number or isinstance(value, str) else ""


def _bare(value: Any) -> Any:
    """Return a text as it is in the object with which CounterFact writes it, or alone in a list."""
    value = value["str"] if isinstance(value, Mapping) and "str" in value else value
    return value[0] if isinstance(value, list) and len(value) == 1 else value


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [] if value is None else [value]


def _dicts(value: Any) -> list[Mapping[str, Any]]:
    return [one for one in _list(value) if isinstance(one, Mapping)]
