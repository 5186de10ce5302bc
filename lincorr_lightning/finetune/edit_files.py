"""Rows of edits: a user's own, and records of CounterFact, zsRE, MQuAKE, RippleEdits, KnowEdit."""

import ast
import re
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from lightning.pytorch.utilities import rank_zero_info

from lincorr_lightning.data.files import read_rows
from lincorr_lightning.errors import SubjectsError, listed

SEPARATOR = "|"  # of the target answers of a reference
Edits = str | Path | Iterable[Any]
"""A file of edits; or its rows as a DataFrame, as mappings, or as pairs of subject and answer."""
nfc = partial(unicodedata.normalize, "NFC")  #: Texts are compared in this form.

Record = Mapping[str, Any]
_READ_FIRST = ("case_id", "id", "reference", "")  # a table of pandas has its index under no name
_QUOTED = r"""'[^']*'|"[^"]*\""""
_NUMPY_LIST = re.compile(rf"\[\s*(?:{_QUOTED})(?:\s+(?:{_QUOTED}))+\s*\]")  # as in a CSV of pandas
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
    """A format of records: the keys that it is recognized by, and its fields.

    `facts` returns the fields of each fact that a record rewrites, none if it cannot be read.
    """

    keys: tuple[str, ...]
    subject: str = "subject"
    answer: str = "target_new"
    facts: Callable[[Record], list[Record]] = lambda record: [record]


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
    name = str(source) if isinstance(source, (str, Path)) else "the edits"
    if isinstance(source, (str, Path)):
        rows = read_rows(source, "edits")
    else:
        rows = _listed_rows(source, subject_key, answer_key)
    formats = {_PLAIN: Format((subject_key, answer_key), subject_key, answer_key), **FORMATS}
    unread: dict[str, None] = {}
    edits = [_raw_edit(row, where, str(i), formats, unread) for i, (where, row) in enumerate(rows)]
    if unread:
        rank_zero_info(f"{name}: fields that are not read: {listed(list(unread), 20)}.")
    if not edits:
        raise SubjectsError(
            f"{name} has no edit. Write at least one, with {subject_key} and {answer_key}."
        )
    if all(edit.problem == NO_FIELDS for edit in edits):
        raise SubjectsError(
            f"{edits[0].where}: no edit can be read from {edits[0].subject}. A row is an object "
            f"with the fields {subject_key} and {answer_key} (other names of these are "
            f"data.subject_key and data.answer_key), or a record of {', '.join(FORMATS)}."
        )
    return edits


def _listed_rows(source: Any, *keys: str) -> Iterator[tuple[str, Any]]:
    """Yield each row in memory with its place; pairs as mappings of the keys."""
    if not isinstance(source, Iterable) or isinstance(source, Mapping):
        raise SubjectsError(
            f"the edits are of type {type(source).__name__}. Pass a file or rows with {keys}."
        )
    rows = [*(source.to_dict("records") if hasattr(source, "to_dict") else source)]
    if all(isinstance(row, (tuple, list)) and len(row) == len(keys) for row in rows):
        rows = [dict(zip(keys, row, strict=True)) for row in rows]
    return ((f"edit {number}", row) for number, row in enumerate(rows, 1))


def _raw_edit(
    record: Any, where: str, number: str, formats: Mapping[str, Format], unread: dict[str, None]
) -> RawEdit:
    row = RawEdit(where, f"{record!r:.99}", "", id=number)
    if not isinstance(record, Mapping):
        return row._replace(problem=NO_FIELDS)
    names = [name for name, each in formats.items() if record.keys() >= set(each.keys)]
    if not names:
        return row._replace(problem=NO_FIELDS)
    if names[0] == _PLAIN:
        _refuse_misspelled(record, where)
    row = row._replace(id=_text(record.get("case_id")) or _text(record.get("id")) or number)
    form = formats[names[0]]
    if form.answer == "answer":  # of a user's own rows
        _refuse_second_answer(record, where, [formats[name].answer for name in names[1:]])
    facts = [_fact(row, fields, form, unread) for fields in form.facts(record)]
    if not facts:
        return row._replace(problem=f"no edit of {names[0]} can be read from it")
    return facts[0]._replace(rewrites=tuple(facts) if len(facts) > 1 else ())


def _refuse_misspelled(record: Record, where: str) -> None:
    # Silently ignored, a misspelled reference would be replaced by the relation's own.
    missing = [key for key in ("reference", "paraphrases") if key not in record]
    for name in record:
        for meant in get_close_matches(str(name).casefold(), missing, 1, 0.8):
            raise SubjectsError(
                f"{where}: there is no field {meant!r}, but {name!r}. Rename it, or leave it out."
            )


def _refuse_second_answer(record: Record, where: str, others: Iterable[str]) -> None:
    for key in others:
        texts = _text(record["answer"]), _text(record.get(key))
        if all(texts) and texts[0] != texts[1]:
            raise SubjectsError(
                f"{where}: the new answer may be {texts[0]!r} (answer) or {texts[1]!r} ({key}). "
                "Name its field by data.answer_key, or leave the other one out."
            )


# -- readers ---------------------------------------------------------------------------------------


def _fact(row: RawEdit, fields: Record, form: Format, unread: dict[str, None]) -> RawEdit:
    """Return an edit of the fields of a fact, and why its subject or answer are no texts."""
    values = {"subject": _bare(fields[form.subject]), "new answer": _bare(fields[form.answer])}
    problem = ""
    for name, value in values.items():
        if not _text(value) and not problem:
            is_empty = value is None or isinstance(value, str)
            problem = f"it has no {name}" if is_empty else f"its {name} is no text"
    subject, answer = ("" if value is None else f"{value!s}".strip() for value in values.values())
    texts = {name: [*map(_text, _list(fields.get(name)))] for name in PROMPTS}
    read = {*_READ_FIRST, form.subject, form.answer, *(x for x in texts if all(texts[x]))}
    for name in map(str, fields):
        if not (name in read or name in unread) and _list(fields.get(name)):
            unread[name] = None
    prompts = (text.replace("{}", subject) for part in texts.values() for text in part if text)
    right = fields.get("reference")
    right = right.split(SEPARATOR) if isinstance(right, str) and right[:1] != "[" else right
    return row._replace(
        subject=subject,
        answer=answer,
        reference=tuple(map(_text, _list(right))),
        prompts=tuple(dict.fromkeys(prompts)),
        problem=problem,
    )


PROMPTS = (
    *("prompt", "prompt_full", "question", "src", "update", "paraphrases", "paraphrase_prompts"),
    *("rephrase", "rephrase_prompt", "para_question", "paraphrased_question", "personas"),
)
"""Fields with prompts of the source, in any format; ``{}`` in one stands for the subject."""


def _rewrites(record: Record) -> list[Record]:
    """Return CounterFact's fact, or those of MQuAKE, with the other fields of the record."""
    rest = {key: value for key, value in record.items() if key != "requested_rewrite"}
    rewrites = (each for each in _list(record["requested_rewrite"]) if isinstance(each, Mapping))
    return [{"subject": None, "target_new": None, **rest, **each} for each in rewrites]


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
_OF_RIPPLE = ("edit", "relation", "subject_id", "target_id")  # say the same as the sentence


def _ripple(record: Record) -> list[Record]:
    """Read subject, answer and prompt from a sentence such as ``The mother of Ada is Mia.``."""
    edit = record["edit"] if isinstance(record["edit"], Mapping) else {}
    relation = str(edit.get("relation"))
    words = re.escape(_RIPPLE_WORDS.get(relation, relation.replace("_", " ").lower()))
    pattern = rf"(.*?\b{words}(?: (?:of|in|by|which|that))? (.+) (?:is|are)) (.+?)\.?"
    parts = re.fullmatch(pattern, _text(edit.get("prompt")))
    if parts is None:
        return []
    prompt, subject, answer = parts.groups()
    rest = {key: value for key, value in {**record, **edit}.items() if key not in _OF_RIPPLE}
    subject = re.sub(_AFTER_SUBJECT, "", subject)
    return [{**rest, "prompt": prompt, "subject": subject, "target_new": answer}]


FORMATS = {
    "CounterFact or MQuAKE": Format(("requested_rewrite",), facts=_rewrites),
    "zsRE": Format(("subject", "alt"), answer="alt"),
    "KnowEdit": Format(("subject", "target_new")),
    "WikiBigEdit": Format(("subject", "update", "ans"), answer="ans"),
    "HalluEditBench": Format(("subject", "object", "question"), answer="object"),
    "RippleEdits": Format(("edit",), facts=_ripple),
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
    items = list(value) if _is_list(value) else []
    return items[0] if len(items) == 1 else value


def _list(value: Any) -> list[Any]:
    """Return the items of any list, also as pandas writes one to CSV, without empty ones."""
    if isinstance(value, str) and _NUMPY_LIST.fullmatch(value):  # Python would join the texts
        value = [text[1:-1] for text in re.findall(_QUOTED, value)]
    elif isinstance(value, str) and value.startswith("[") and value.endswith("]"):
        with suppress(ValueError, SyntaxError, RecursionError, MemoryError):
            value = ast.literal_eval(value)
    items = value if _is_list(value) else [value]
    return [item for item in items if not _is_missing(item)]


def _is_missing(value: Any) -> bool:
    if value is None or (isinstance(value, (str, Mapping)) and not value):
        return True
    try:
        return bool(value != value)  # NaN
    except TypeError:  # of pandas' NA
        return True
    except (ValueError, RuntimeError):  # an array or tensor
        return False


def _is_list(value: Any) -> bool:
    return isinstance(value, Iterable) and not isinstance(value, (str, Mapping))
