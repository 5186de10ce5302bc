"""Rows of edits: a user's own, and records of CounterFact, zsRE, MQuAKE, RippleEdits, KnowEdit."""

import re
import unicodedata
from collections.abc import Callable, Iterable, Mapping
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from lincorr_lightning.data.files import read_rows
from lincorr_lightning.errors import SubjectsError

SEPARATOR = "|"  # of the target answers of a reference
Edits = str | Path | Iterable[Mapping[str, Any]]  # a file, or its rows
nfc = partial(unicodedata.normalize, "NFC")  #: Texts are compared in this form.

Record = Mapping[str, Any]
NO_FIELDS = "it lacks the fields of an edit"
_PLAIN = "your own"


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
    rewrites: tuple["RawEdit", ...] = ()
    problem: str = ""  #: Why the row is no edit, one of few reasons, by which rows are counted.
    lm: str = ""  #: Folder of the LM that was edited, if each edit has an LM of its own.

    @property
    def facts(self) -> tuple["RawEdit", ...]:
        """All facts that the row rewrites."""
        return self.rewrites or (self,)


class Format(NamedTuple):
    """A format of records: the keys that it is recognized by, and its reader.

    The reader returns the facts that a record rewrites, none if it cannot be read.
    """

    keys: tuple[str, ...]
    read: Callable[[Record], list[RawEdit]]


def read_edits(
    source: Edits, *, subject_key: str = "subject", answer_key: str = "answer"
) -> list[RawEdit]:
    """Read the rows of a file of edits, or of a list.

    Each has a subject and an answer, by these keys, and ``reference`` where it is not the
    relation's (a list, or one text with ``|`` between its answers), or is a record of one of
    `FORMATS`; any other row has a `problem`.

    Raises:
        SubjectsError: No row has the fields of an edit, or the file cannot be read.
    """
    if isinstance(source, (str, Path)):
        rows = read_rows(source, "edits")
    else:
        rows = ((f"edit {number}", row) for number, row in enumerate(source, 1))
    plain = Format((subject_key, answer_key), partial(_plain_row, subject_key, answer_key))
    formats = {_PLAIN: plain, **FORMATS}
    edits = [_raw_edit(row, where, str(i), formats) for i, (where, row) in enumerate(rows)]
    if not edits:
        raise SubjectsError(
            f"{source} has no edit. Write at least one, with {subject_key} and {answer_key}."
        )
    if all(edit.problem == NO_FIELDS for edit in edits):
        raise SubjectsError(
            f"{edits[0].where}: no edit can be read from {edits[0].subject}. A row is an object "
            f"with the fields {subject_key} and {answer_key} (other names of these are "
            f"data.subject_key and data.answer_key), or a record of {', '.join(FORMATS)}."
        )
    return edits


def _raw_edit(record: Any, where: str, number: str, formats: Mapping[str, Format]) -> RawEdit:
    unread = RawEdit(where, f"{record!r:.99}", "", id=number)
    if not isinstance(record, Mapping):
        return unread._replace(problem=NO_FIELDS)
    names = [name for name, each in formats.items() if record.keys() >= set(each.keys)]
    if not names:
        return unread._replace(problem=NO_FIELDS)
    if names[0] == _PLAIN:
        _refuse_misspelled(record, where)
    row_id = _text(record.get("case_id")) or _text(record.get("id")) or number
    facts = [fact._replace(where=where, id=row_id) for fact in formats[names[0]].read(record)]
    if not facts:
        return unread._replace(problem=f"no edit of {names[0]} can be read from it", id=row_id)
    return facts[0]._replace(rewrites=tuple(facts) if len(facts) > 1 else ())


def _refuse_misspelled(record: Record, where: str) -> None:
    # Silently ignored, a misspelled reference would be replaced by the relation's own.
    missing = [key for key in ("reference", "paraphrases") if key not in record]
    for name in record:
        for meant in get_close_matches(str(name).casefold(), missing, 1, 0.8):
            raise SubjectsError(
                f"{where}: there is no field {meant!r}, but {name!r}. Rename it, or leave it out."
            )


# -- readers ---------------------------------------------------------------------------------------


def _fact(subject: Any, answer: Any, *prompts: Any) -> RawEdit:
    """Return an edit of the texts of a record, and why subject or answer are none."""
    values = {"subject": _bare(subject), "new answer": _bare(answer)}
    problem = ""
    for name, value in values.items():
        if not _text(value) and not problem:
            is_empty = value is None or isinstance(value, str)
            problem = f"it has no {name}" if is_empty else f"its {name} is no text"
    shown = ["" if value is None else f"{value!s}".strip() for value in values.values()]
    texts = dict.fromkeys(filter(None, map(_text, prompts)))
    return RawEdit("", shown[0], shown[1], prompts=tuple(texts), problem=problem)


def _plain_row(subject_key: str, answer_key: str, record: Record) -> list[RawEdit]:
    right = record.get("reference") or None
    right = right.split(SEPARATOR) if isinstance(right, str) else _list(right)
    fact = _fact(record[subject_key], record[answer_key], *_list(record.get("paraphrases")))
    return [fact._replace(reference=tuple(map(_text, right)))]


def _rewrites(record: Record) -> list[RawEdit]:
    """Read CounterFact's fact, or those of MQuAKE."""
    facts = []
    for rewrite in _list(record["requested_rewrite"]):
        if isinstance(rewrite, Mapping):
            subject = rewrite.get("subject")
            prompt = _text(rewrite.get("prompt")).replace("{}", _text(subject))
            others = rewrite.get("question"), *_list(record.get("paraphrase_prompts"))
            facts.append(_fact(subject, rewrite.get("target_new"), prompt, *others))
    return facts


def _zsre(record: Record) -> list[RawEdit]:
    return [_fact(record["subject"], record["alt"], record.get("src"), record.get("rephrase"))]


def _knowedit(record: Record) -> list[RawEdit]:
    prompts = record.get("prompt"), record.get("rephrase_prompt")
    return [_fact(record["subject"], record["target_new"], *prompts)]


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


def _ripple(record: Record) -> list[RawEdit]:
    """Read subject, answer and prompt from a sentence such as ``The mother of Ada is Mia.``."""
    edit = record["edit"] if isinstance(record["edit"], Mapping) else {}
    relation = str(edit.get("relation"))
    words = re.escape(_RIPPLE_WORDS.get(relation, relation.replace("_", " ").lower()))
    pattern = rf"(.*?\b{words}(?: (?:of|in|by|which|that))? (.+) (?:is|are)) (.+?)\.?"
    parts = re.fullmatch(pattern, _text(edit.get("prompt")))
    if parts is None:
        return []
    prompt, subject, answer = parts.groups()
    return [_fact(re.sub(_AFTER_SUBJECT, "", subject), answer, prompt)]


FORMATS = {
    "CounterFact or MQuAKE": Format(("requested_rewrite",), _rewrites),
    "zsRE": Format(("subject", "alt"), _zsre),
    "KnowEdit": Format(("subject", "target_new"), _knowedit),
    "RippleEdits": Format(("edit",), _ripple),
}
"""Formats of records; of several whose keys a record has, the first reads it."""


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
    if value is None:
        return []
    return value if isinstance(value, list) else [value]
